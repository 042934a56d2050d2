"""Section 5.2: with a sink hidden, is a DLM less confident where the sink mattered, and unmasks elsewhere first?

Sure predictions flip less under any change of the network, so that flips are compared at equal confidence: the
confidence without the mask, in bins of half a unit of ln(c / (1 - c)), within one prompt.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.problems import chat, problems_of
from dlm_lens.experiments.attention_sinks.recorded_runs import per_prompt, rounded
from dlm_lens.experiments.attention_sinks.twin_networks import model_of
from dlm_lens.experiments.experiment import Cost, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, over_networks, signed
from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_below

KINDS = ("sinks", "random", "random, same mass")
CELLS = ("kept", "kept change", "flipped", "flipped change", "others", "others flipped", "first", "first flipped")
"""What is counted per bin: open positions whose prediction is kept or flips, with the sum of their changes of
confidence; and the position that is surest under the mask at each step, beside the other open ones."""

Counts = dict[str, Any]
"""The counts of one prompt."""


def items(settings: Settings) -> Iterator[Item]:
    """The mask and its controls, on the canvases of the same runs without hooks."""
    for item in recorded_runs.items(settings):
        for kind in KINDS:
            yield {**item, "hidden": kind}


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: how often the prediction flips, over all open positions and at the position unmasked next."""
    import dlm_lens as dl
    from dlm_lens.hooks import mask_random, mask_top_sinks

    model = model_of(item, settings, bench)
    texts = chat(model, problems_of(settings, item["start"]), settings)
    done = dl.denoise(model, texts, **settings["sampler"])
    mask = mask_top_sinks(settings["columns"])
    hooks = dict(zip(KINDS, (mask, mask_random(like=mask), mask_random(like=mask, match="mass")), strict=True))
    replayed = dl.replay(model, done, [hooks[item["hidden"]]], attention=False)
    return {"flips": [count_flips(replayed, row) for row in range(len(texts))]}


def count_flips(replayed: Any, row: int) -> Counts:
    """Counts of one prompt. Open positions: those that the sampler may unmask at a step, in the current block.

    "first" is the position that is surest under the mask, "plain_first" the one that is surest without it, and
    "rechosen" the number of steps at which they differ; "bins" has `CELLS` by bin of confidence without the mask.
    """
    import torch

    run = replayed.run
    found: Counts = dict.fromkeys(
        ("open", "flipped", "first", "first_flipped", "plain_first_flipped", "rechosen"), 0
    )
    bins: dict[str, list[float]] = {}
    position = torch.arange(replayed.predicted.shape[-1])
    for step, (start, stop) in enumerate(run.spans):
        here = replayed.predicted[step, row]
        inside = here & (position >= start) & (position < stop)
        here = inside if bool(inside.any()) else here
        if not bool(here.any()):
            continue
        flipped, sure, plain = (
            getattr(replayed, name)[step, row] for name in ("flipped", "confidence_hooked", "confidence")
        )
        best, before = (int(one.masked_fill(~here, -torch.inf).argmax()) for one in (sure, plain))
        found["open"] += int(here.sum())
        found["flipped"] += int(flipped[here].sum())
        found["first"] += 1
        found["first_flipped"] += int(flipped[best])
        found["plain_first_flipped"] += int(flipped[before])
        found["rechosen"] += int(best != before)
        for place in here.nonzero().flatten().tolist():
            cells = bins.setdefault(str(bin_of(float(plain[place]))), [0.0] * len(CELLS))
            turned = bool(flipped[place])
            which = "flipped" if turned else "kept"
            cells[CELLS.index(which)] += 1
            cells[CELLS.index(f"{which} change")] += float(sure[place] - plain[place])
            group = "first" if place == best else "others"
            cells[CELLS.index(group)] += 1
            cells[CELLS.index(f"{group} flipped")] += turned
    return found | {"bins": {name: rounded(cells) for name, cells in sorted(bins.items())}}


def bin_of(confidence: float) -> int:
    """The whole part of 2 ln(c / (1 - c)), from -16 to 30."""
    c = min(max(confidence, 1e-9), 1 - 1e-7)
    return max(-16, min(30, math.floor(2 * math.log(c / (1 - c)))))


def at_equal_confidence(counts: Counts, one: str, other: str, of: str) -> tuple[float, float]:
    """Mantel and Haenszel's weighted difference of two groups' means over the bins, as numerator and denominator.

    sum_b w_b (x_b / n_b - y_b / m_b) with w_b = n_b m_b / (n_b + m_b), and sum_b w_b.

    Args:
        counts: of one prompt.
        one: the first group of `CELLS`.
        other: the second group.
        of: what is averaged, appended to the group's name: " flipped" or " change".
    """
    top = bottom = 0.0
    for cells in counts["bins"].values():
        n, x, m, y = (cells[CELLS.index(name)] for name in (one, one + of, other, other + of))
        if n and m:
            top += (x * m - y * n) / (n + m)
            bottom += n * m / (n + m)
    return top, bottom


def cost(item: Item, settings: Settings) -> list[Cost]:
    """A run, and two passes over each of its canvases."""
    return [Cost(one.passes * 3, one.rows, one.positions, one.model) for one in recorded_runs.cost(item, settings)]


def render(results: Results) -> Rendering:
    """Flips over all open positions and at the position that is unmasked next, also at equal confidence."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    rows, curves, styles = [], {}, {}
    for number, model in enumerate(results.models):
        for line, kind in enumerate(KINDS):
            shares = [
                flips(results, model, kind, "flipped", "open"),
                flips(results, model, kind, "plain_first_flipped", "first"),
                flips(results, model, kind, "first_flipped", "first"),
            ]
            rows.append([
                model, kind, *map(str, shares), signed(spared(results, model, kind)),
                signed(rechosen(results, model, kind)), signed(lost(results, model, kind)), str(shares[0].n),
            ])  # fmt: skip
            curves[f"{model}, {kind}"], styles[f"{model}, {kind}"] = list(enumerate(shares)), (number, line)
    head = ["model", "hidden", "flipped: open positions", "surest without the mask", "surest under it",
            "the last - others as sure without the mask", "the last - surest without the mask",
            "change of confidence, flipped - kept ones as sure", "n"]  # fmt: skip
    counts = {settings_of(results.settings, model)["columns"] for model in results.models}
    columns = " or ".join(map(str, sorted(counts)))
    table = Table(f"{columns} column(s) per head hidden on canvases of unmasked runs; 95% intervals", head, rows)
    figure = line_chart(
        curves, x="", y="prediction flipped", styles=styles,
        ticks=["open positions", "surest without the mask", "surest under the mask"],
    )  # fmt: skip
    return Rendering([table], {"flips": figure}, list(findings(results)))


def _over(
    results: Results, model: str, kind: str, terms: Callable[[Counts], tuple[float, float]], least: float = -1
) -> Interval:
    return per_prompt(results, model, ["flips"], terms, bounds=(least, 1), hidden=kind)


def flips(results: Results, model: str, kind: str, top: str, bottom: str) -> Interval:
    """Ratio of two counts."""
    return _over(results, model, kind, lambda one: (one[top], one[bottom]), 0)


def spared(results: Results, model: str, kind: str) -> Interval:
    """Flips of the positions written next minus flips of other open ones that were as sure without the mask."""
    return _over(results, model, kind, lambda one: at_equal_confidence(one, "first", "others", " flipped"))


def rechosen(results: Results, model: str, kind: str) -> Interval:
    """Flips where the model would write under the mask minus flips where it would have written without it."""
    return _over(
        results, model, kind, lambda one: (one["first_flipped"] - one["plain_first_flipped"], one["first"])
    )


def lost(results: Results, model: str, kind: str) -> Interval:
    """Change of confidence where the prediction flips minus where it is kept, among equally sure positions."""
    return _over(results, model, kind, lambda one: at_equal_confidence(one, "flipped", "kept", " change"))


def more_than_control(results: Results, model: str) -> Interval:
    """`spared` with sinks hidden minus that with random columns of the same mass, a mean over prompts."""
    sinks, control = (_by_network(results, model, kind) for kind in (KINDS[0], KINDS[2]))
    networks: list[tuple[list[float], list[float]]] = []
    for number in sorted(sinks.keys() & control.keys()):
        tops: list[float] = []
        bottoms: list[float] = []
        for both in zip(sinks[number], control[number], strict=True):
            (a, n), (b, m) = (at_equal_confidence(one, "first", "others", " flipped") for one in both)
            tops.append(a / n - b / m if n and m else 0.0)
            bottoms.append(float(bool(n and m)))
        networks.append((tops, bottoms))
    return over_networks(networks or [([], [])], bounds=(-2, 2))


def _by_network(results: Results, model: str, kind: str) -> dict[int, list[Counts]]:
    found: dict[int, list[Counts]] = {}
    for record in results.where(model=model, hidden=kind):
        found.setdefault(record.item.get("network", 0), []).extend(record.value["flips"])
    return found


def findings(results: Results) -> Iterator[Finding]:
    """Both halves of the hypothesis, at equal confidence, and whether sinks matter more than other columns."""
    for model in results.models:
        everywhere = flips(results, model, "sinks", "flipped", "open")
        first = flips(results, model, "sinks", "first_flipped", "first")
        if results.is_causal(model):
            yield Finding("an AR model must write the affected token", f"{model}: {first} of the next tokens flip",
                          "no counterpart", "every step writes its one open position")  # fmt: skip
            continue
        change, control = lost(results, model, "sinks"), lost(results, model, KINDS[2])
        yield Finding.of(
            "(hypothesis) the model becomes less confident about the tokens that the sink affects",
            f"{model}: where the prediction flips, the confidence changes by {signed(change)} more than at "
            "positions that were as sure and keep theirs",
            is_below(change, 0),
            why="agreement: below 0 at equal confidence without the mask",
            null=f"0; random columns of the same mass: {signed(control)}",
        )
        less, control = spared(results, model, "sinks"), spared(results, model, KINDS[2])
        yield Finding.of(
            "(hypothesis) and does not write there",
            f"{model}: {first} of the predictions written next flip, of all open ones {everywhere}; against open "
            f"ones that were as sure without the mask: {signed(less)}",
            is_below(less, 0),
            why="agreement: fewer flips than of other positions with the same confidence without the mask",
            null=f"0: sure predictions flip less, whatever is hidden; random columns of the same mass: "
            f"{signed(control)}",
        )
        saved = rechosen(results, model, "sinks")
        plain = flips(results, model, "sinks", "plain_first_flipped", "first")
        yield Finding.of(
            "(hypothesis) choosing again what to write is what protects a DLM",
            f"{model}: {first} flip where it writes under the mask, {plain} where it would have written: "
            f"{signed(saved)}",
            is_below(saved, 0),
            why="agreement: fewer flips where the model writes under the mask than where it would have written",
            null="0: the choice does not depend on the mask, as in an AR model",
        )
        others = flips(results, model, KINDS[2], "flipped", "open")
        yield Finding(
            "nothing says that this is about sinks",
            f"{model}: the difference at equal confidence is {signed(more_than_control(results, model))} larger "
            "with sinks hidden than with random columns of the same mass",
            "no counterpart",
            "below 0: positions written next are spared more from hidden sinks than from other columns; of all "
            f"open ones {everywhere} flip with sinks hidden, {others} with those columns: there is less to spare",
        )


EXPERIMENT = recorded_runs.experiment(
    name="beyond-confidence",
    shows="2510.15731, Section 5.2",
    title="where predictions flip when sinks are hidden, and whether these are written",
    metric="share of predictions that change on the same canvas, at equal confidence without the mask",
    small={"models": ["toy", "toy-ar"], "columns": 1},
    full={"columns": 5},
    items=items,
    run=run,
    render=render,
    cost=cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
