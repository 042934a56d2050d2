"""Block diffusion: are there sinks, are they in the cached prefix, and do they move with the block?

In block diffusion keys and values of finished blocks never change, and a step computes the queries of its block
alone. Attention from these queries ("block queries") is what a cached run computes; under them every seen key has
the same e_j, so that the two scales are one. "All queries" are those of everything that a step sees, as in the
other experiments: the finished ones among them never change, and the two scales differ.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.map_shares import (
    MARGIN,
    NO_EXCESS,
    as_many_as,
    beyond,
    has_sinks,
    models_with,
    part,
    share,
)
from dlm_lens.experiments.attention_sinks.recorded_runs import (
    PromptRun,
    per_prompt,
    record_prompts,
    rounded,
    sink_rule,
)
from dlm_lens.experiments.attention_sinks.two_scales import BESIDE, NAMED, SCALES, uniform_attention
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above

READINGS = {
    "block": ("block", "relative"),
    "all, sums": ("all", "sums"),
    "all, relative": ("all", "relative"),
}
"""The name of a reading, with its class of queries and its scale."""

LABELS = {
    "block": "block queries (both scales)",
    "all, sums": f"all queries, {NAMED['sums']}",
    "all, relative": f"all queries, {NAMED['relative']}",
}

CAUSAL = "block causal"
"""What the results say of block-diffusion models."""

BOOLS = NDArray[np.bool_]


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt and reading: sinks, how many are in the prefix, and what becomes of them from step to step."""
    found: dict[str, Any] = {name: [] for name in READINGS}
    found[CAUSAL] = False
    for number, prompt_run in enumerate(record_prompts(item, settings, bench, ("all", "block"))):
        run = prompt_run.run
        found[CAUSAL] = run.attention.blocks is not None
        for name, (queries, scale) in READINGS.items():
            if not (run.autoregressive and queries == "block"):
                found[name].append(rounded(_counts(prompt_run, prompt_run.received[queries], scale, settings)))
        if item["start"] == 0 and number == 0 and not item.get("network", 0):
            found["maps"] = _maps(prompt_run)
    return found


def decoded_steps(run: Any, row: int) -> NDArray[np.int64]:
    """The steps of a row up to the block that holds its first end of the text; after it nothing is decoded."""
    last = int(run.row_steps[row])
    ends = (run.tokens[row, run.prompt_length :] == run.tokenizer.eos_token_id).nonzero().flatten()
    if len(ends) and not run.autoregressive:
        place = run.prompt_length + int(ends[0])
        last = sum(start <= place for start, _ in run.spans[:last])
    return np.arange(last)


def _counts(prompt_run: PromptRun, received: Any, scale: str, settings: Settings) -> dict[str, Any]:
    import dlm_lens as dl

    run, row, rule = prompt_run.run, prompt_run.row, sink_rule(settings)
    held = received.on_scale(SCALES[scale])
    even = uniform_attention(received).on_scale(SCALES[scale])
    steps = decoded_steps(run, row)
    found = dl.find_sinks(held, rule).is_sink[:, 0].flatten(1, 2).numpy()[steps]
    scores = held.values[:, 0].flatten(1, 2).nan_to_num(nan=-np.inf).numpy()[steps]
    masked_only = dl.find_sinks(even, rule).is_sink[:, 0, 0, 0].numpy()[steps]
    # Without a preference a sink is any seen key; on column sums in proportion to e_j, as uniform attention goes.
    known = ~held.values[:, 0, 0, 0].isnan().numpy()[steps]
    weight = (
        received.expected[:, 0, 0, 0].double().numpy()[steps] * known if scale == "sums" else known.astype(float)
    )
    spans = np.asarray(run.spans)[steps]
    return counted(found, scores, weight, spans, masked_only, followed=not run.autoregressive)


def counted(
    sinks: BOOLS,
    scores: NDArray[np.floating[Any]],
    weight: NDArray[np.floating[Any]],
    spans: NDArray[np.int64],
    mask_alone: BOOLS,
    *,
    followed: bool,
) -> dict[str, Any]:
    """Counts of one prompt, over all maps (layers and heads) and steps.

    Args:
        sinks: the sinks [step, map, key].
        scores: their scores [step, map, key]; -inf where there is none.
        weight: of every key as the place of a sink without a preference [step, key]; 0 where a key has no score.
        spans: first and one past last position of the block at each step.
        mask_alone: the sinks of uniform attention under the same mask [step, key].
        followed: count what becomes of sinks from step to step, which needs blocks.

    Returns:
        maps: number of steps and maps with a score; with: those that have a sink; mask alone: those that would have
            one under uniform attention.
        sinks: number of sinks; prefix: those before the block; chance: those expected there by `weight`.
        inside, crossing: of the sinks before the block, how many there are at the first of two steps, how many of
            them are sinks at the second, and how many keys drawn without a preference would be. Both steps are in
            one block, or the second begins the next.
        entering: the same for sinks in a block at its last step.
        largest: of the maps whose largest sink is in the block at its last step: their number; how many have the
            largest sink at that position one step later, how many in the next block; how many by chance.
    """
    maps = sinks.shape[1]
    steps = np.flatnonzero((weight > 0).any(1))
    share = weight / np.maximum(weight.sum(1, keepdims=True), 1e-12)
    found: dict[str, Any] = {
        "maps": len(steps) * maps, "with": int(sinks.any(-1).sum()),
        "mask alone": int(mask_alone.any(-1).sum()) * maps,
        "sinks": int(sinks.sum()), "prefix": 0, "chance": 0.0,
        **{name: [0, 0, 0.0] for name in ("inside", "crossing", "entering")}, "largest": [0, 0, 0, 0.0],
    }  # fmt: skip
    for step in steps:
        start = spans[step][0]
        found["prefix"] += int(sinks[step][:, :start].sum())
        found["chance"] += float(sinks[step].sum() * share[step, :start].sum())
    for now in range(len(sinks) - 1 if followed else 0):
        after, (start, stop) = now + 1, spans[now]
        crossing = bool((spans[after] != spans[now]).any())
        parts = {"crossing" if crossing else "inside": slice(0, start)} | (
            {"entering": slice(start, stop)} if crossing else {}
        )
        often = sinks[after].sum(-1)
        for name, keys in parts.items():
            here = sinks[now][:, keys]
            found[name][0] += int(here.sum())
            found[name][1] += int((here & sinks[after][:, keys]).sum())
            # k sinks among n keys hit a given one with probability k times its weight.
            found[name][2] += float(np.minimum(often[:, None] * share[after, keys], 1.0)[here].sum())
        if crossing:
            _follow(found["largest"], sinks, scores, share, spans, now)
    return found


def _follow(counts: list[Any], sinks: BOOLS, scores: Any, share: Any, spans: NDArray[np.int64], now: int) -> None:
    """Add the maps whose largest sink is in the block at its last step, and where it is one step later."""
    main = [np.where(sinks[step].any(-1), np.where(sinks[step], scores[step], -np.inf).argmax(-1), -1)
            for step in (now, now + 1)]  # fmt: skip
    (start, stop), (first, last) = spans[now], spans[now + 1]
    mine = (main[0] >= start) & (main[0] < stop) & (main[1] >= 0)
    inside = (main[1] >= first) & (main[1] < last)
    counts[0] += int(mine.sum())
    counts[1] += int((mine & (main[0] == main[1])).sum())
    counts[2] += int((mine & inside).sum())
    counts[3] += float(mine.sum() * share[now + 1, first:last].sum())


def _maps(prompt_run: PromptRun) -> list[dict[str, Any]]:
    """Score [step, position] of the mean of all heads and of the head with the strongest sinks, with the blocks."""
    run = prompt_run.run
    received = prompt_run.received["all" if run.autoregressive else "block"]
    steps = decoded_steps(run, prompt_run.row)
    scores = received.values[steps, 0]
    there = ~scores.isnan().all(dim=(0, 1, 2))
    if not there.any():  # of a short canvas enough queries see no key
        return []
    strongest = scores.nan_to_num(nan=0.0).amax(-1).mean(0)
    layer, head = (int(n) for n in np.unravel_index(int(strongest.argmax()), strongest.shape))
    shift = int(there.nonzero()[0])
    begins = {} if run.autoregressive else {int(run.spans[t][0]) - shift: int(t) for t in reversed(steps)}
    model = received.at_level("model").values[steps, 0, 0, 0]
    named = {"mean of all heads": model, f"layer {received.layers[layer]}, head {head}": scores[:, layer, head]}
    return [
        {"of": name, "values": rounded(values[:, there], 2), "begins": sorted(begins.items())}
        for name, values in named.items()
    ]


def render(results: Results) -> Rendering:
    """Shares per model and reading, and the maps of each model's first prompt."""
    from dlm_lens.experiments.attention_sinks.charts import heat_maps

    rows, panels, marks = [], {}, {}
    for model in results.models:
        rows += [_row(results, model, reading) for reading in readings_of(results, model)]
        for record in results.where(model=model, start=0):
            for one in record.value.get("maps", ()):
                queries = "all queries" if results.is_causal(model) else "block queries"
                title = f"{model}, {one['of']}: {queries}"
                panels[title] = [[np.nan if x is None else x for x in line] for line in one["values"]]
                marks[title] = [tuple(place) for place in one["begins"]]
    head = ["model", "queries and scale", "maps with a sink", "the mask alone", "sinks in the prefix", "by chance",
            "kept inside a block", "kept when a block is finished", "of the finished block", "by chance",
            "largest: stays", "in the next block", "by chance", "n prompts"]  # fmt: skip
    table = Table("Eq. 3 on every layer, head and step; 95% intervals over prompts", head, rows)
    figures = {"maps": heat_maps(panels, x="position", y="step", bar="received attention relative to uniform",
                                 marks=marks)} if panels else {}  # fmt: skip
    return Rendering([table], figures, list(_findings(results)), [
        "What to see: received attention relative to uniform, of one prompt; grey: not seen yet. A triangle marks "
        "where a block begins, at its first step. A sink that stays in the cached prefix is a vertical line that "
        "goes on below the triangles to its right; one that moves with the block steps to the right at each.",
        '"By chance": a sink at any key that is seen, on column sums in proportion to e_j, the attention that it '
        'receives under uniform attention. "The mask alone": uniform attention under the same mask.',
        "toy decodes the same blocks from left to right with the whole canvas in sight, and computes its finished "
        "blocks again at every step. Steps after the block with the end of the text are left out. toy-blocks is "
        "trained for fewer steps than toy.",
        "When a block is finished all block queries are replaced, in toy as well: what is kept then is to be read "
        "beside toy's number, and the sinks of all queries, most of which are old ones, beside both.",
        BESIDE,
    ])  # fmt: skip


def readings_of(results: Results, model: str) -> list[str]:
    """The readings that a model has: an AR model's block is one query, which says nothing by itself."""
    return [name for name in READINGS if name != "block" or not results.is_causal(model)]


def _row(results: Results, model: str, reading: str) -> list[str]:
    where = (results, model, reading)
    cells = [share(*where), part(*where, "mask alone", "maps"), part(*where, "prefix", "sinks"),
             part(*where, "chance", "sinks")]  # fmt: skip
    if results.is_causal(model):
        followed = ["-"] * 7
    else:
        kept = [kept_share(*where, name) for name in ("inside", "crossing", "entering")]
        largest = [_ratio_of(*where, "largest", index, 0) for index in (1, 2, 3)]
        followed = [*map(str, kept), str(_ratio_of(*where, "entering", 2, 0)), *map(str, largest)]
    return [model, LABELS[reading], *map(str, cells), *followed, str(len(results.listed(reading, model=model)))]


def kept_share(results: Results, model: str, reading: str, name: str) -> Interval:
    """Share of the sinks that are sinks one step later; `name` as in `counted`."""
    return _ratio_of(results, model, reading, name, 1, 0)


def _ratio_of(results: Results, model: str, reading: str, name: str, top: int, bottom: int) -> Interval:
    return per_prompt(results, model, [reading], lambda one: (one[name][top], one[name][bottom]), bounds=(0, 1))


def lost_at_the_end(results: Results, model: str, reading: str) -> Interval:
    """Share of the prefix's sinks kept when a block is finished, minus that inside a block, prompt by prompt."""

    def terms(one: dict[str, Any]) -> tuple[float, float]:
        (of, kept, _), (others, others_kept, _) = one["crossing"], one["inside"]
        return (kept / of - others_kept / others, 1.0) if of and others else (0.0, 0.0)

    return per_prompt(results, model, [reading], terms, bounds=(-1, 1))


def moved_along(results: Results, model: str, reading: str) -> Interval:
    """Share of the largest sinks of a finished block that are in the next block one step later, minus chance."""
    return per_prompt(
        results, model, [reading], lambda one: (one["largest"][2] - one["largest"][3], one["largest"][0]),
        bounds=(-1, 1),
    )  # fmt: skip


def _findings(results: Results) -> Iterator[Finding]:
    for model in models_with(results, CAUSAL):
        for reading in READINGS:
            where = (results, model, reading)
            yield has_sinks(*where, LABELS[reading], "a block-diffusion model", "the mask alone")
            yield Finding.of(
                "its sinks are in the cached prefix (no statement of the paper's)",
                f"{model}, {LABELS[reading]}: {part(*where, 'prefix', 'sinks')} of the sinks",
                is_above(beyond(*where, "prefix", "chance", "sinks"), NO_EXCESS),
                why="agreement: more than keys drawn without a preference",
                null=f"without a preference: {part(*where, 'chance', 'sinks')}",
            )
        yield from _steps(results, model)
        others = {other: readings_of(results, other) for other in results.models if other != model}
        yield from as_many_as(results, model, others, LABELS)


def _steps(results: Results, model: str) -> Iterator[Finding]:
    where = (results, model, "block")
    lost = lost_at_the_end(*where)
    yield Finding.of(
        "they stay there when a block is finished (no statement of the paper's)",
        f"{model}, block queries: {kept_share(*where, 'crossing')} of the prefix's sinks are kept then, "
        f"{kept_share(*where, 'inside')} from step to step in a block; difference {lost}",
        is_above(lost, -MARGIN),
        why=f"agreement: the difference is above -{MARGIN:.2f}, a margin that was set before",
        null=f"without a preference {_ratio_of(*where, 'crossing', 2, 0)} are kept",
    )
    moved = moved_along(*where)
    yield Finding.of(
        "they move with the block (no statement of the paper's)",
        f"{model}, block queries: of the largest sinks in a block at its last step, "
        f"{_ratio_of(*where, 'largest', 2, 0)} are in the next block one step later, "
        f"{_ratio_of(*where, 'largest', 1, 0)} where they were",
        is_above(moved, NO_EXCESS),
        why="agreement: in the next block more often than a key drawn without a preference",
        null=f"without a preference: {_ratio_of(*where, 'largest', 3, 0)}",
    )


EXPERIMENT = recorded_runs.experiment(
    name="beyond-blocks",
    shows="beyond 2510.15731",
    title="sinks in block diffusion: in the cached prefix, or with the block",
    metric="shares of maps with a sink, of sinks in the prefix, and of sinks that stay when a block is finished",
    small={"models": ["toy", "toy-ar", "toy-blocks"]},
    full={"models": ["dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1", "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1"]},
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
