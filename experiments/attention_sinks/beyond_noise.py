"""Uniform noise: does a DLM without a mask token have sinks, and do open positions with random tokens become them?

In a model of uniform noise every position of the answer holds a token at every step; which ones are decided only
the sampler knows. A masked model (toy) marks its open positions with one token, the same at every step. The claim
"open positions become sinks" is judged against two nulls, both in closed form as expectations over all
permutations: which of the answer's positions are open is permuted within every step, and, since sinks may prefer
places, at which of the steps a position is open is permuted within every position. Every pass sees the whole
canvas, so that column sums and scores relative to uniform differ by one factor for all keys; both scales are
computed and judged.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.map_shares import (
    NO_EXCESS,
    as_many_as,
    beyond,
    has_sinks,
    models_with,
    part,
    share,
)
from dlm_lens.experiments.attention_sinks.recorded_runs import PromptRun, record_prompts, rounded, sink_rule
from dlm_lens.experiments.attention_sinks.two_scales import BESIDE, NAMED, SCALES, uniform_attention
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import all_of, is_above

READINGS = tuple(SCALES)
"""Received attention of all queries, on both scales."""

BOOLS = NDArray[np.bool_]


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt and scale: maps with a sink, and how many of the answer's sinks are at open positions."""
    found: dict[str, Any] = {name: [] for name in READINGS}
    found["uniform noise"] = False
    for number, prompt_run in enumerate(record_prompts(item, settings, bench)):
        run = prompt_run.run
        found["uniform noise"] = run.uniform_noise
        for scale in READINGS:
            found[scale].append(rounded(_counts(prompt_run, scale, settings)))
        if item["start"] == 0 and number == 0 and not item.get("network", 0) and not run.autoregressive:
            found["maps"] = _maps(prompt_run)
    return found


def active_steps(run: Any, row: int) -> NDArray[np.int64]:
    """The steps of a row up to the last one that decided or revised a position."""
    steps = int(run.row_steps[row])
    changed = (run.unmasked[:steps, row] | run.revised[:steps, row]).any(-1).nonzero().flatten()
    return np.arange(int(changed[-1]) + 1 if len(changed) else 0)


def _counts(prompt_run: PromptRun, scale: str, settings: Settings) -> dict[str, Any]:
    import dlm_lens as dl

    run, row, rule, received = prompt_run.run, prompt_run.row, sink_rule(settings), prompt_run.received["all"]
    steps, positions = active_steps(run, row), run.tokens.shape[1]
    held, even = (one.on_scale(SCALES[scale]) for one in (received, uniform_attention(received)))
    sinks = dl.find_sinks(held, rule).is_sink[:, 0].flatten(1, 2).numpy()[steps]
    alone = dl.find_sinks(even, rule).is_sink[:, 0, 0, 0].numpy()[steps]
    opened, answer = run.open[:-1, row].numpy()[steps], run.open[0, row].numpy()
    return counted(sinks, alone, opened, answer & (not run.autoregressive), positions)


def counted(sinks: BOOLS, alone: BOOLS, opened: BOOLS, answer: BOOLS, positions: int) -> dict[str, Any]:
    """Counts of one prompt, over all maps (layers and heads) and steps.

    Args:
        sinks: the sinks [step, map, key]; keys after the canvas are learned sink tokens.
        alone: the sinks of uniform attention [step, key].
        opened: the open positions [step, position].
        answer: the positions of the answer; none in an AR model, whose open positions no query sees.
        positions: of the canvas.

    Returns:
        maps: number of steps and maps; with: those that have a sink; mask alone: those that would have one under
            uniform attention.
        sinks: of the answer, at steps at which it has open and decided positions; open: those at open positions;
            by step: how many would be, if the answer's open positions of each step were any of its positions; by
            place: if each position were open at any of these steps.
        share open: of the answer's positions at these steps, summed over the steps; steps: their number.
    """
    maps = sinks.shape[1]
    found = {
        "maps": len(sinks) * maps, "with": int(sinks.any(-1).sum()),
        "mask alone": int(alone.any(-1).sum()) * maps,
    }  # fmt: skip
    here, shown = opened[:, answer], sinks[:, :, :positions][:, :, answer].sum(1)
    both = here.any(-1) & ~here.all(-1)
    here, shown = here[both], shown[both]
    within_step = here.mean(-1, keepdims=True) if len(here) else here
    within_place = here.mean(0, keepdims=True) if len(here) else here
    return found | {
        "sinks": int(shown.sum()), "open": int((shown * here).sum()),
        "by step": float((shown * within_step).sum()), "by place": float((shown * within_place).sum()),
        "share open": float(within_step.sum()), "steps": len(here),
    }  # fmt: skip


def _maps(prompt_run: PromptRun) -> list[dict[str, Any]]:
    """Score [step, position] of the head with the strongest sinks, and which positions are open."""
    run, row = prompt_run.run, prompt_run.row
    steps, content = active_steps(run, row), run.attention_mask[row]
    scores = prompt_run.received["all"].values[steps, 0][..., : len(content)][..., content]
    strongest = scores.nan_to_num(nan=0.0).amax(-1).mean(0)
    layer, head = (int(n) for n in np.unravel_index(int(strongest.argmax()), strongest.shape))
    return [
        {"of": f"layer {prompt_run.received['all'].layers[layer]}, head {head}",
         "values": rounded(scores[:, layer, head], 2)},
        {"of": "open positions", "values": run.open[:-1, row][steps][:, content].int().tolist()},
    ]  # fmt: skip


def render(results: Results) -> Rendering:
    """Shares per model and scale, and a map of each model's first prompt."""
    from dlm_lens.experiments.attention_sinks.charts import heat_maps

    rows = [_row(results, model, scale) for model in results.models for scale in READINGS]
    panels = {
        f"{model}, {one['of']}": [[np.nan if x is None else x for x in line] for line in one["values"]]
        for model in results.models
        for record in results.where(model=model, start=0)
        for one in record.value.get("maps", ())
    }
    head = ["model", "scale", "maps with a sink", "the mask alone", "answer's sinks at open positions",
            "open permuted within steps", "within positions", "share of positions open", "n prompts"]  # fmt: skip
    table = Table("Eq. 3 on every layer, head and step; 95% intervals over prompts", head, rows)
    bar = "received attention relative to uniform; open = 1"
    figures = {"maps": heat_maps(panels, x="position", y="step", bar=bar)} if panels else {}
    return Rendering([table], figures, list(_findings(results)), [
        "What to see: received attention of the head with the strongest sinks, of one prompt, and beside it which "
        "positions are open. Sinks that open positions become are bright where the other panel is.",
        "In toy-uniform an open position holds another random token at every step, in toy the mask. The run of "
        "toy-uniform ends early where its most likely tokens are stable; steps after that are left out.",
        "toy-uniform has toy's layout and data, is trained for fewer steps, and decodes with the entropy bound; "
        "toy decodes by low confidence in blocks. What is compared is the model with its sampler.",
        BESIDE,
    ])  # fmt: skip


def _row(results: Results, model: str, scale: str) -> list[str]:
    where = (results, model, scale)
    cells = [share(*where), part(*where, "mask alone", "maps")]
    if not results.is_causal(model):
        cells += [part(*where, name, "sinks") for name in ("open", "by step", "by place")]
        cells.append(part(*where, "share open", "steps"))
    shown = [*map(str, cells), *["-"] * (6 - len(cells))]
    return [model, NAMED[scale], *shown, str(len(results.listed(scale, model=model)))]


def _findings(results: Results) -> Iterator[Finding]:
    noisy = models_with(results, "uniform noise")
    others = {model: READINGS for model in results.models if model not in noisy}
    for model in noisy:
        for scale in READINGS:
            yield has_sinks(results, model, scale, NAMED[scale], "a uniform-noise model", "uniform attention")
        yield from as_many_as(results, model, others, NAMED)
    for model in results.diffusion_models:
        for scale in READINGS:
            yield _open_become_sinks(results, model, scale)


def _open_become_sinks(results: Results, model: str, scale: str) -> Finding:
    where = (results, model, scale)
    nulls = [beyond(*where, "open", null, "sinks") for null in ("by step", "by place")]
    held = "random tokens" if model in models_with(results, "uniform noise") else "the mask token"
    return Finding.of(
        f"open positions, which hold {held}, become sinks (no statement of the paper's)",
        f"{model}, {NAMED[scale]}: {part(*where, 'open', 'sinks')} of the answer's sinks are at open positions; "
        f"more than by the nulls by {nulls[0]} and {nulls[1]}",
        all_of(*(is_above(one, NO_EXCESS) for one in nulls)),
        why="agreement: more than both nulls",
        null=f"open positions permuted within steps {part(*where, 'by step', 'sinks')}, within positions "
        f"{part(*where, 'by place', 'sinks')}",
    )


EXPERIMENT = recorded_runs.experiment(
    name="beyond-noise",
    shows="beyond 2510.15731",
    title="sinks in a model of uniform noise: do open positions with random tokens become sinks",
    metric="shares of maps with a sink, and of the answer's sinks at open positions",
    small={"models": ["toy", "toy-ar", "toy-uniform"]},
    full={"models": ["toy", "toy-ar", "toy-uniform"], "task": "toy_arithmetic", "prompts": 96, "batch": 24,
          "sampler": {}, "chat": False},
    run=run,
    render=render,
)  # fmt: skip

if __name__ == "__main__":
    run_script(EXPERIMENT)
