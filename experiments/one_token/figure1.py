"""Figure 1: attention maps at two steps, whose bright columns move, and value norms of sinks and other tokens."""

from typing import Any

from dlm_lens.experiments.attention_sinks.recorded_runs import head_pattern, per_network, rounded
from dlm_lens.experiments.experiment import Cost, Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, over_networks
from dlm_lens.experiments.one_token import recorded_runs
from dlm_lens.experiments.one_token.paper import FIGURE1
from dlm_lens.experiments.one_token.recorded_runs import by_network, items, over, title
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_below
from dlm_lens.printable import counted
from dlm_lens.probes.norms import ValueMatch
from dlm_lens.statistics import POSITIVE_BOUNDS, SHARE_BOUNDS

LARGEST = 96
"""Rows and columns of a stored map; larger ones are averaged down."""

EDGES = [0.5 * edge for edge in range(0, 61)]
"""Bins of norms."""

DRAWN = 300
"""Pairs of the first item whose norms are stored one by one, for the scatter plot."""

COLUMNS = "columns"
"""Norms of the sinks that an AR model has on column sums; in a bidirectional pass the two scales are one."""

SMALL: dict[str, Any] = {
    "models": ["toy", "toy-sink", "toy-gated"], **recorded_runs.SMALL, "late": 16, "eps": 3.0, "pairs": 10_000,
}  # fmt: skip
FULL: dict[str, Any] = {
    **SMALL, "models": ["GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B"], "task": "gsm8k.jsonl",
    "prompts": 32, "batch": 4, "chat": True, "sampler": {"gen_length": 128, "steps": 128}, "late": 64,
}  # fmt: skip
"""The paper: 10K sinks and 10K other tokens of GSM8K and HumanEval, steps 0 and 64; the rule for sinks is not
given."""


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Norms of sinks and of others per prompt, matched in two ways; two attention maps of the first prompt."""
    import dlm_lens as dl
    from dlm_lens.probes import value_norms

    model, recording = recorded_runs.record_prompts(item, settings, bench)
    found = dl.find_sinks(recording, dl.AboveMean(settings["eps"]))
    result: dict[str, Any] = {"found": int(found.is_sink.sum()), "patterns": found.is_sink[..., 0].numel()}
    rows = recording.run.tokens.shape[0]
    kinds: tuple[ValueMatch, ...] = ("any", "masked")
    for match in kinds:
        norms = value_norms(recording, found, samples=settings["pairs"], match=match) if result["found"] else None
        result[match] = [_sums(norms, prompt) for prompt in range(rows)]
        result[f"{match}_counts"] = _counts(norms)
        if item["start"] == 0 and match == "any" and norms is not None:
            result["pairs"] = rounded([norms.sink[:DRAWN], norms.other[:DRAWN]], 2)
    if recording.run.autoregressive:
        columns = dl.find_sinks(recording, dl.AboveMean(settings["eps"]), relative=False)
        some = bool(columns.is_sink.any())
        norms = value_norms(recording, columns, samples=settings["pairs"]) if some else None
        result[COLUMNS] = [_sums(norms, prompt) for prompt in range(rows)]
    result |= _moved(found, recording.run.row_steps - 1)
    if item["start"] == 0 and not item.get("network"):
        result["maps"] = _maps(model, recording.run, found.scores, settings)
    return result


def _moved(found: Any, last: Any) -> dict[str, Any]:
    """Per prompt: maps with a sink at the first and the last step, and how many of them have another main sink."""
    main = found.scores.nan_to_num(nan=-1.0).argmax(-1)
    ends = last, range(len(last))
    both = found.is_sink[0].any(-1) & found.is_sink[ends].any(-1)
    apart = both & (main[0] != main[ends])
    return {"both": both.flatten(1).sum(-1).tolist(), "apart": apart.flatten(1).sum(-1).tolist()}


def _sums(norms: Any, prompt: int) -> list[float]:
    """The sum of the sinks' norms, of the others' norms, and the number of pairs; zeros without any sink."""
    if norms is None:
        return [0.0, 0.0, 0]
    own = norms.prompt == prompt
    return [round(float(norms.sink[own].sum()), 4), round(float(norms.other[own].sum()), 4), int(own.sum())]


def _counts(norms: Any) -> list[list[int]]:
    import numpy as np

    top = EDGES[-1]
    if norms is None:
        return [[0] * (len(EDGES) - 1)] * len(KINDS)
    pairs = (np.histogram(values.clamp(max=top).numpy(), EDGES)[0] for values in (norms.sink, norms.other))
    return [counts.tolist() for counts in pairs]


def _maps(model: Any, run: Any, scores: Any, settings: Settings) -> dict[str, Any]:
    """The patterns of one head at two steps: canvas queries, learned sinks as last keys.

    Of the heads whose main sink moves, the one where it is strongest at both steps.
    """
    steps = (0, min(settings["late"], int(run.row_steps[0]) - 1))
    values, places = scores[list(steps), 0].nan_to_num(nan=-1.0).max(-1)
    # Where no head's main sink moves, all are below zero match and the first is shown.
    weight = values.amin(0).masked_fill(places[0] == places[1], -1.0)
    layer, head = divmod(int(weight.argmax()), weight.shape[-1])
    return {
        "layer": layer, "head": head, "steps": list(steps),
        "patterns": [rounded(_pattern(model, run, step, layer, head), 3) for step in steps],
    }  # fmt: skip


def _pattern(model: Any, run: Any, step: int, layer: int, head: int) -> Any:
    """The pattern of the first prompt, averaged down to at most `LARGEST` rows and columns."""
    import torch

    pattern = head_pattern(model, run, step=step, row=0, layer=layer, head=head)
    size = (min(pattern.shape[0], LARGEST), min(pattern.shape[1], LARGEST))
    return torch.nn.functional.adaptive_avg_pool2d(pattern[None], size)[0]


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step, and two for the maps."""
    (steps,) = recorded_runs.cost(item, settings)
    return [steps, Cost(2, 1, steps.positions, item["model"])]


def ratio(results: Results, model: str, match: str) -> Interval:
    """Mean norm of sinks over mean norm of others; interval over prompts and networks."""
    return over_networks(_columns(results, model, match, 0, 1), bounds=POSITIVE_BOUNDS)


def mean_norms(results: Results, model: str, match: str) -> tuple[Interval, Interval]:
    """Mean norms of sinks and of others."""
    sinks, others = (_columns(results, model, match, place, 2) for place in (0, 1))
    return over_networks(sinks, bounds=POSITIVE_BOUNDS), over_networks(others, bounds=POSITIVE_BOUNDS)


def _columns(
    results: Results, model: str, match: str, top: int, bottom: int
) -> list[tuple[list[float], list[float]]]:
    """Two of the three sums of every prompt in which a network has a pair, per network."""
    prompts = zip(*per_network(results, match, model=model), strict=True)
    # A prompt without pairs in some networks only stays: all have the same prompts.
    kept = [rows for rows in prompts if any(row[2] for row in rows)]
    networks = [([row[top] for row in one], [row[bottom] for row in one]) for one in zip(*kept, strict=True)]
    return networks or [([], [])]


def render(results: Results) -> Rendering:
    """Norms, how often sinks move, the maps and the distributions."""
    from dlm_lens.experiments.attention_sinks.charts import heat_maps, line_chart, scatter_plots

    rows = []
    panels: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    clouds: dict[str, Any] = {}
    # A model without any sink has no norms to compare.
    models = [model for model in results.models if has_pairs(results, model, "any")]
    for model in models:
        sink, other = mean_norms(results, model, "any")
        pairs = sum(int(row[2]) for row in results.listed("any", model=model))
        apart, both = (by_network(results, model, name) for name in ("apart", "both"))
        rows.append([
            title(model), str(len(apart)), str(pairs), str(sink), str(other), str(ratio(results, model, "any")),
            str(ratio(results, model, "masked")),
            _of_columns(results, model), str(over(apart, both, bounds=SHARE_BOUNDS)),
        ])  # fmt: skip
        for place in (one.value["maps"] for one in results.where(model=model) if "maps" in one.value):
            for step, pattern in zip(place["steps"], place["patterns"], strict=True):
                panels[f"{title(model)}, layer {place['layer']}, head {place['head']}, step {step}"] = pattern
        curves |= _distribution(results, model)
        # An unfinished run may lack the item that has them.
        for held in [one.value["pairs"] for one in results.where(model=model) if "pairs" in one.value][:1]:
            clouds[title(model)] = {name: list(enumerate(norms)) for name, norms in zip(KINDS, held, strict=True)}
    head = ["model", "networks", "pairs", "value norm of sinks", "of others", "ratio",
            "ratio, others in the same state", "ratio, sinks on column sums",
            "main sink moved, of maps with one first and last"]  # fmt: skip
    rule = f"sinks by Eq. 3 of 2510.15731, eps = {results.settings['eps']}, per head, relative to uniform"
    # A colour per model, a line style per kind: ten curves are more than there are colours.
    styles = {name: (number // len(KINDS), number % len(KINDS)) for number, name in enumerate(curves)}
    figures = {
        "maps": heat_maps(panels, x="key", y="query", bar="attention"),
        "scatter": scatter_plots(clouds, x="sampled token", y="L2 norm of its value"),
        "norms": line_chart(curves, x="value norm (bins of 0.5)", y="share", styles=styles),
    }
    captions = {
        "maps": "As the paper's attention maps: one head at two steps of one prompt. A bright column is a sink; "
        "the head is one whose brightest column is another at the later step, if there is any.",
        "scatter": "As the paper's scatter plots: value norms of sampled sinks and of other tokens. In the paper "
        "the sinks lie far below the others.",
        "norms": "The same norms of all pairs, as shares of all.",
    }
    table = Table(f"{rule}; intervals over prompts (with several networks, over both)", head, rows)
    notes = [
        "That bright columns move is tested with a null in Figures 4 and 7 of [the other page](results.md); here "
        "it has a picture and a number and no verdict."
    ]
    notes += recorded_runs.on_scale(results)
    findings = [_finding(results, model) for model in models]
    findings += [_finding(results, model, COLUMNS) for model in models if has_pairs(results, model, COLUMNS)]
    return Rendering([table], figures, findings, notes, captions)


KINDS = ("sinks", "others")


def _distribution(results: Results, model: str) -> dict[str, Any]:
    import numpy as np

    counts = [record.value["any_counts"] for record in results.where(model=model)]
    shares = np.sum(counts, 0) / np.sum(counts, (0, 2))[:, None]
    last = int(np.nonzero(shares.sum(0))[0].max()) + 1
    names = (f"{title(model)}, sinks", f"{title(model)}, others")
    return {name: list(zip(EDGES[:last], row[:last], strict=True)) for name, row in zip(names, shares, strict=True)}


def _of_columns(results: Results, model: str) -> str:
    """The ratio for sinks on column sums; "-" for results of an AR model that were stored without it."""
    if not results.is_causal(model):
        return str(ratio(results, model, "any"))
    return str(ratio(results, model, COLUMNS)) if has_pairs(results, model, COLUMNS) else "-"


def has_pairs(results: Results, model: str, match: str) -> bool:
    """Whether the results hold norms of a model's sinks; older ones lack them where a batch has no sink."""
    values = [one.value for one in results.where(model=model)]
    return all(match in value for value in values) and any(row[2] for value in values for row in value[match])


def _finding(results: Results, model: str, match: str = "any") -> Finding:
    found = ratio(results, model, match)
    networks = counted(len(per_network(results, match, model=model)), "network")
    scale = ", sinks on column sums" if match == COLUMNS else ""
    printed = "; ".join(f"{name} {sink:.2f} vs {other:.2f}" for name, (sink, other) in FIGURE1.items())
    return Finding.of(
        f"sinks have shorter values than other tokens ({printed}: ratios "
        f"{', '.join(f'{sink / other:.2f}' for sink, other in FIGURE1.values())})",
        f"{title(model)}: ratio {found} ({networks}{scale})",
        is_below(found, 1.0),
        "agrees: the whole interval below 1; disagrees: above",
        "1, a random other token of the same prompt, step, layer and head",
    )


EXPERIMENT = Experiment(
    name="one-token-figure1",
    shows="2601.19657, Figure 1",
    title="moving sinks, and the value norms of sinks against other tokens",
    metric="L2 norm of values per head (Eq. 15)",
    small=SMALL,
    full=FULL,
    items=items,
    run=run,
    render=render,
    cost=cost,
    own=recorded_runs.OWN,
    paper=[
        Table("Figure 1, mean value norms of 10K tokens each", ["", "sinks", "others"],
              [[name, f"{sink:.2f}", f"{other:.2f}"] for name, (sink, other) in FIGURE1.items()]),
    ],
)  # fmt: skip

if __name__ == "__main__":
    run_script(EXPERIMENT)
