"""Figure 8: (a) static sinks at the beginning; (b) sinks that follow the unmasking frontier."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import (
    PromptRun,
    head_pattern,
    ratio,
    rounded,
    sink_rule,
)
from dlm_lens.experiments.attention_sinks.twin_networks import model_of
from dlm_lens.experiments.attention_sinks.two_scales import (
    NAMED,
    PLOTTED,
    SCALES,
    aligned,
    cost_of_every_order,
    followed,
    orders_of,
    runs_in_every_order,
    uniform_attention,
)
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above, is_below

BEGINNING = 4
"""Number of first positions that count as the beginning."""

OFTEN = 0.25
"""Bound of "often", a quarter: the rule of this experiment since its first version."""

FOLLOWS = 0.8
"""Bound of "follow the frontier", a fifth nearer than by chance: the rule since the first version."""

REFERENCES = ("rightmost mask", "leftmost mask")

LEAST_STEPS = 0.5
"""A head is shown if it has a sink in at least this share of the steps."""


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt, order of decoding and scale: static sinks at the beginning; of a DLM also distances to the masks.

    Of the first prompt also attention maps of a static sink at the beginning and of a sink that follows the masks.
    """
    found: dict[str, Any] = {}
    for order, prompt_runs in runs_in_every_order(item, settings, bench).items():
        for number, prompt_run in enumerate(prompt_runs):
            received, row = prompt_run.received["all"], prompt_run.row
            shift = int(prompt_run.run.padding[row])
            paths = followed(received, sink_rule(settings))
            even = followed(uniform_attention(received), sink_rule(settings))
            values: dict[str, Any] = {}
            for scale, one in paths.items():
                base = _base(one, shift)
                static, first = _at_beginning(one, shift)
                there = (one.main >= 0) & (one.main < one.canvas)
                begun = there & (one.main - shift < BEGINNING)
                alone, alone_first = _at_beginning(even[scale], shift)
                mine = {
                    "static": static, "first": first, "by chance": base * static, "beyond": first - base * static,
                    "steps": int(there.sum()), "first steps": int(begun.sum()), "uniform static": alone,
                    "uniform first": alone_first,
                }  # fmt: skip
                values |= {f"{scale} {name}": value for name, value in mine.items()}
            if not prompt_run.run.autoregressive:
                values |= _frontier(paths[PLOTTED])
            for name, value in values.items():
                found.setdefault(f"{order}: {name}", []).append(rounded(value))
            if item["start"] == 0 and number == 0 and not item.get("network", 0):
                found[f"{order}: examples"] = _examples(model_of(item, settings, bench), prompt_run, paths)
    return found


def _at_beginning(paths: Any, shift: int) -> tuple[int, int]:
    """Static patterns, and those whose sink is among the first positions."""
    static = paths.kinds == "static"
    return int(static.sum()), int((static & (paths.static_position - shift < BEGINNING).numpy()).sum())


def _base(paths: Any, shift: int) -> float:
    """The share of the canvas keys with a score that are among the first positions, mean over steps."""
    scored = paths.scored[:, 0, : paths.canvas].float()
    some = scored.sum(-1) > 0
    return float((scored[some, shift : shift + BEGINNING].sum(-1) / scored[some].sum(-1)).mean())


def _frontier(paths: Any) -> dict[str, float]:
    """Onsets near the rightmost mask; distances to both ends of the masks of largest sinks that change place."""
    masked = paths.masked[:, 0, : paths.canvas].numpy()
    some = masked.any(-1)
    ends = {
        "rightmost mask": np.where(some, masked.shape[-1] - 1 - masked[:, ::-1].argmax(-1), np.nan),
        "leftmost mask": np.where(some, masked.argmax(-1), np.nan),
    }
    right, lives = ends["rightmost mask"], paths.lives
    # The onset of a sink that is there at the first step was not observed, but is where the run begins.
    use = (lives.position < paths.canvas) & np.isfinite(right[lives.first])
    near = np.abs(lives.position - right[lives.first]) <= 1
    scored = paths.scored[:, 0, : paths.canvas].numpy()
    keys = np.abs(np.arange(paths.canvas) - right[:, None]) <= 1
    by_chance = (keys & scored).sum(-1) / np.maximum(scored.sum(-1), 1)
    found = {
        "onsets": int(use.sum()), "onsets near": int((near & use).sum()),
        "onsets by chance": float(by_chance[lives.first[use]].sum()),
    }  # fmt: skip
    found["onsets beyond"] = found["onsets near"] - found["onsets by chance"]
    main = np.where((paths.main >= 0) & (paths.main < paths.canvas), paths.main, -1).reshape(len(masked), -1)
    for name, reference in ends.items():
        distances = aligned(main, reference)
        known = np.isfinite(distances[:, 0])
        found |= {f"{name} n": int(known.sum()), f"{name} distance": float(distances[known, 0].sum()),
                  f"{name} random order": float(distances[known, 1].sum())}  # fmt: skip
    return found


def _examples(model: Any, prompt_run: PromptRun, paths: Any) -> dict[str, Any]:
    """Attention maps of a static sink at the beginning, and of a sink that follows the rightmost mask.

    (a) Of the static patterns whose sink is among the first positions the strongest, relative to uniform
    attention, at the first and the last step. (b) Of the DLM's patterns with a sink in enough of the steps and a
    largest sink that changes place, the one nearest to the rightmost mask, over the distance in random order, at
    the two steps between which its largest sink moves furthest to the left (or furthest, if it never moves left).
    """
    found = {}
    if (one := _static_example(paths["relative"], int(prompt_run.run.padding[prompt_run.row]))) is not None:
        found["static"] = one
    if not prompt_run.run.autoregressive and (other := _following_example(paths[PLOTTED])) is not None:
        found["following"] = other
    run, row = prompt_run.run, prompt_run.row
    for one in found.values():
        whole = [head_pattern(model, run, step=step, row=row, layer=one["layer"], head=one["head"])
                 for step in one["steps"]]  # fmt: skip
        # Without learned sink tokens.
        one["maps"] = [rounded(pattern[:, : len(pattern)], 2) for pattern in whole]
        names = [name for name in ("positions", "last masks") if name in one]
        one |= {name: [int(place - run.padding[row]) for place in one[name]] for name in names}
    return found


def _static_example(paths: Any, shift: int) -> dict[str, Any] | None:
    begins = (paths.kinds == "static") & (paths.static_position - shift < BEGINNING).numpy()
    if not begins.any():
        return None
    score = paths.main_score.nan_to_num(nan=0.0).mean(0).numpy()
    _, layer, head = (int(n) for n in np.unravel_index(int(np.where(begins, score, -1).argmax()), begins.shape))
    steps = (paths.counts[:, 0, layer, head] > 0).nonzero().flatten()
    place = int(paths.static_position[0, layer, head])
    return {"layer": layer, "head": head, "steps": [int(steps[0]), int(steps[-1])], "positions": [place, place]}


def _following_example(paths: Any) -> dict[str, Any] | None:
    masked = paths.masked[:, 0, : paths.canvas].numpy()
    right = np.where(masked.any(-1), masked.shape[-1] - 1 - masked[:, ::-1].argmax(-1), np.nan)
    main = np.where((paths.main >= 0) & (paths.main < paths.canvas), paths.main, -1).reshape(len(masked), -1)
    distances = aligned(main, right)
    enough = ((main >= 0).mean(0) >= LEAST_STEPS) & np.isfinite(distances[:, 0])
    pairs = (main[:-1] >= 0) & (main[1:] >= 0) & (main[:-1] != main[1:])
    enough &= pairs.any(0)
    if not enough.any():
        return None
    at = int(np.where(enough, distances[:, 0] / np.maximum(distances[:, 1], 1e-9), np.inf).argmin())
    jump = np.where(pairs[:, at], main[1:, at] - main[:-1, at], 0)
    step = int(jump.argmin()) if jump.min() < 0 else int(jump.argmax())
    heads = paths.main.shape[-1]
    return {"layer": at // heads, "head": at % heads, "steps": [step, step + 1],
            "positions": [int(main[step, at]), int(main[step + 1, at])],
            "last masks": [int(right[step]), int(right[step + 1])]}  # fmt: skip


def render(results: Results) -> Rendering:
    """Sinks at the beginning, distances to the frontier, and attention maps of both."""
    from dlm_lens.experiments.attention_sinks.charts import heat_maps

    runs = [(model, order) for model in results.models for order in orders_of(results, model)]
    rows = [_beginning_row(results, model, order, scale) for model, order in runs for scale in SCALES]
    aside = [_frontier_row(results, model, order) for model, order in runs if not results.is_causal(model)]
    figures = {}
    for kind in ("static", "following"):
        panels, marks = _panels(results, kind)
        if panels:
            figures[kind] = heat_maps(panels, x="key", y="query", bar="attention", marks=marks)
    tables = [
        Table(f"(a) static sinks among the first {BEGINNING} positions; 95% intervals over prompts (and networks)",
              ["model", "order", "scale", "of the static patterns", "n static", "a random key",
               "uniform attention", "largest sink there, of steps with a sink", "n runs"], rows),
        Table("(b) share of the onsets at most one position from the rightmost mask; distance of largest sinks "
              "that change place to the last and the first mask, over the same distance with the steps in random "
              "order (below 1: they follow it)",
              ["model", "order", "onsets at the rightmost mask", "a random key", *REFERENCES, "n patterns",
               "n runs"], aside),
    ]  # fmt: skip
    return Rendering(tables if aside else tables[:1], figures, list(_findings(results)), [
        "What to see: (a) the column of the first positions is bright at the first and at the last step. (b) The "
        "triangle marks the largest sink of the head, at two neighbouring steps; a sink that follows the frontier "
        "is near the last mask, whose position is in the title.",
        "Both heads are chosen by a rule from the first prompt, given in the experiment's file: they are the best "
        "cases of that prompt, also where no head follows the frontier.",
    ])  # fmt: skip


def _beginning_row(results: Results, model: str, order: str, scale: str) -> list[str]:
    name = f"{order}: {scale}"
    static = results.listed(f"{name} static", model=model)
    return [
        model, order, NAMED[scale], str(at_beginning(results, model, order, scale)), str(sum(static)),
        str(by_chance(results, model, order, scale)), uniform(results, model, order, scale),
        str(ratio(results, model, f"{name} first steps", f"{name} steps", bounds=(0, 1))), str(len(static)),
    ]  # fmt: skip


def _frontier_row(results: Results, model: str, order: str) -> list[str]:
    patterns = results.listed(f"{order}: rightmost mask n", model=model)
    return [
        model, order, str(originating(results, model, order)),
        str(ratio(results, model, f"{order}: onsets by chance", f"{order}: onsets", bounds=(0, 1))),
        *(str(following(results, model, order, name)) for name in REFERENCES),
        str(sum(patterns)), str(len(patterns)),
    ]  # fmt: skip


def _panels(results: Results, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Maps and marks of one kind: static sinks in the usual order of decoding, moving ones without blocks."""
    panels: dict[str, Any] = {}
    marks: dict[str, Any] = {}
    for model in results.models:
        order = orders_of(results, model)[0 if kind == "static" else -1]
        for record in results.where(model=model, start=0):
            one = (record.value.get(f"{order}: examples") or {}).get(kind)
            if one is None:
                continue
            for number, values in enumerate(one["maps"]):
                last = f" (last mask: {one['last masks'][number]})" if kind == "following" else ""
                head = f"layer {one['layer']}, head {one['head']}"
                panels[name := f"{model}, {order}, {head}, step {one['steps'][number]}{last}"] = values
                marks[name] = [(one["positions"][number], -0.5)]
    return panels, marks


def at_beginning(results: Results, model: str, order: str, scale: str = PLOTTED) -> Interval:
    """Of the static patterns, the share whose sink is among the first positions."""
    name = f"{order}: {scale}"
    return ratio(results, model, f"{name} first", f"{name} static", bounds=(0, 1))


def by_chance(results: Results, model: str, order: str, scale: str = PLOTTED) -> Interval:
    """The same share if every static sink were at a random key."""
    return ratio(results, model, f"{order}: {scale} by chance", f"{order}: {scale} static", bounds=(0, 1))


def uniform(results: Results, model: str, order: str, scale: str) -> str:
    """The same share under uniform attention, one pattern per prompt."""
    first, n = (
        sum(results.listed(f"{order}: {scale} uniform {name}", model=model)) for name in ("first", "static")
    )
    return f"{first / n:.2f} of {n}" if n else "no sink"


def originating(results: Results, model: str, order: str) -> Interval:
    """The share of the onsets of sinks that are at most one position from the rightmost mask."""
    return ratio(results, model, f"{order}: onsets near", f"{order}: onsets", bounds=(0, 1))


def following(results: Results, model: str, order: str, name: str) -> Interval:
    """Distance of the largest sink to a reference, over that with the steps in random order."""
    return ratio(results, model, f"{order}: {name} distance", f"{order}: {name} random order", bounds=(0, math.inf))


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        order = orders_of(results, model)[0]
        yield from (_beginning(results, model, order, scale)
                    for scale in (SCALES if results.is_causal(model) else (PLOTTED,)))  # fmt: skip
    # An AR prefix has no masked position after it: its frontier is its end.
    for model in results.diffusion_models:
        for order in orders_of(results, model):
            yield from _moving(results, model, order)


def _beginning(results: Results, model: str, order: str, scale: str) -> Finding:
    causal = results.is_causal(model)
    first, n = (
        at_beginning(results, model, order, scale),
        sum(results.listed(f"{order}: {scale} static", model=model)),
    )
    beyond = ratio(results, model, f"{order}: {scale} beyond", f"{order}: {scale} static", bounds=(-1, 1))
    claim = (
        "the typical static sink of ARMs (4.2), at the beginning of the sequence as MMaDA's (8a)"
        if causal
        else "MMaDA often has a static sink at the beginning of the sequence (8a)"
    )
    here = f"{model}, {NAMED[scale]}: {first} of {n} static patterns, {beyond} more than a random key"
    alone = uniform(results, model, order, scale)
    null = f"random key {by_chance(results, model, order, scale)}" + (
        f"; uniform attention {alone}" if causal else ""
    )
    if causal and alone != "no sink":
        return Finding(claim, here, "no counterpart", "the causal mask alone gives this on column sums", null)
    return Finding.of(claim, here, is_above(first, OFTEN), why="often: in more than a quarter", null=null)


def _moving(results: Results, model: str, order: str) -> Iterator[Finding]:
    near = originating(results, model, order)
    n = sum(results.listed(f"{order}: onsets", model=model))
    patterns = sum(results.listed(f"{order}: rightmost mask n", model=model))
    beyond = ratio(results, model, f"{order}: onsets beyond", f"{order}: onsets", bounds=(-1, 1))
    follow = following(results, model, order, "rightmost mask")
    claims = (
        ("Dream's sinks often originate at the rightmost masked token (8b)",
         f"{model}, {order}: {near} of {n} onsets, {beyond} more than a random key", is_above(near, OFTEN),
         "often: more than a quarter",
         f"random key {ratio(results, model, f'{order}: onsets by chance', f'{order}: onsets', bounds=(0, 1))}"),
        ("Dream's sinks follow the unmasking frontier (8b)",
         f"{model}, {order}: distance to the rightmost mask {follow} of that in random order, {patterns} patterns",
         is_below(follow, FOLLOWS), "at least a fifth nearer to it than with the steps in random order",
         "1"),
    )  # fmt: skip
    for claim, here, judged, why, null in claims:
        if order == "blocks":
            reason = "a block sampler: the rightmost mask is the end of the canvas until the last block"
            yield Finding(claim, here, "no counterpart", reason, null)
        else:
            yield Finding.of(claim, here, judged, why=why, null=null)


EXPERIMENT = recorded_runs.experiment(
    name="fig8-static",
    shows="2510.15731, Figure 8",
    title="sinks at the beginning, and sinks at the unmasking frontier",
    metric="share of static sinks at the first positions; distance to the frontier over that in random order",
    full={"models": ["Gen-Verse/MMaDA-8B-MixCoT", "Dream-org/Dream-v0-Instruct-7B"]},
    run=run,
    render=render,
    cost=cost_of_every_order,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
