"""The sinks of a report, found by the page and by `find_sinks`."""

import dlm_lens as dl
from dlm_lens.sinks import SoftSigmoid, find_sinks

PROMPTS = ["Tom has 5 apples and buys 3 more.", "Mia has 2 eggs."]
STEPS = 8

FOUND = """([pane, level, name, value]) => {
    const { recorded } = window.dlmLens.panes[pane];
    const found = [];
    for (let step = 0; step < recorded.steps; step += 1) {
        for (const s of window.dlmLens.sinksAt(recorded, level, step, { name, value })) {
            const threshold = Number.isNaN(s.threshold) ? null : s.threshold;
            found.push([step, s.layer, s.head, recorded.about.positions[s.key], s.score, threshold]);
        }
    }
    return found;
}"""


def of_python(recording, rule, level, row=1):
    """All sinks of a row as the page lists them: positions from its first token, -1 - i for learned sinks."""
    padding = int(recording.run.padding[row])
    sinks = find_sinks(recording, rule, level=level)
    shape = (sinks.is_sink.shape[0], sinks.is_sink.shape[1], -1, 1, sinks.is_sink.shape[-1])
    if level == "head":
        shape = sinks.is_sink.shape
    is_sink, scores, threshold = (t.reshape(shape)[:, row] for t in (sinks.is_sink, sinks.scores, sinks.threshold))
    canvas = is_sink.shape[-1] - sinks.sinks
    found = {}
    for step, layer, head, key in is_sink.nonzero().tolist():
        place = (step, layer, head, key - padding if key < canvas else -1 - (key - canvas))
        limit = threshold[step, layer, head, key].item()
        found[place] = (scores[step, layer, head, key].item(), None if limit != limit else limit)
    return found


def of_page(page, rule, level, pane=0):
    name, value = {
        dl.AboveMean: lambda: ("above-mean", rule.eps),
        dl.AboveStd: lambda: ("above-std", rule.k),
        dl.TopK: lambda: ("top-k", rule.k),
        SoftSigmoid: lambda: ("soft-sigmoid", rule.alpha),
    }.get(type(rule), lambda: (repr(rule), None))()
    lines = page.evaluate(FOUND, [pane, level, name, value])
    found = {tuple(line[:4]): (line[4], line[5]) for line in lines}
    assert len(found) == len(lines)
    return found
