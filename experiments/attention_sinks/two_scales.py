"""The two scales of received attention, and what either shows without the effect that a figure claims.

The paper plots A-bar, the column sums r_j divided by the number of queries (2510.15731, section 4.1). Under a
causal mask the column sums of uniform attention are H_S - H_j: the first key is a sink by the mask alone. Relative
to uniform, r_j / e_j, uniform attention has no sink under any mask. In a bidirectional pass the two scales are one.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import PromptRun, record_prompts
from dlm_lens.experiments.experiment import Cost
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.statistics import Z

if TYPE_CHECKING:
    from dlm_lens.sinks import Received
    from dlm_lens.sinks.sink_trajectories import Trajectories

SCALES: Mapping[str, Any] = {"sums": "column sum", "relative": "relative to uniform"}
"""The name of a scale in the stored values, and in `Received`."""

PLOTTED = "sums"
"""The scale that the paper plots."""

NAMED = {"sums": "column sums (the paper's scale)", "relative": "relative to uniform"}
"""The scales in tables and findings."""

DRAWS = 8
"""Random draws per prompt of a null that has no closed form."""

ORDERS = ("blocks", "no blocks", "left to right")
"""How a run decodes: blocks from left to right, the whole answer at once, or an AR model's token by token."""

Ints = NDArray[np.int64]


def runs_in_every_order(item: Item, settings: Settings, bench: Any) -> dict[str, list[PromptRun]]:
    """The item's runs, by the order of decoding: a DLM that decodes in blocks is also run without them.

    Without blocks the sampler may write any open position at any step, as Dream's does.
    """
    first = record_prompts(item, settings, bench)
    run = first[0].run
    if run.autoregressive:
        return {"left to right": first}
    if len(set(run.spans)) == 1:
        return {"no blocks": first}
    free = {**settings["sampler"], "block_length": run.settings["gen_length"]}
    keep = settings["keep"] and f"{settings['keep']}/no-blocks"
    return {"blocks": first, "no blocks": record_prompts(item, {**settings, "sampler": free, "keep": keep}, bench)}


def cost_of_every_order(item: Item, settings: Settings) -> list[Cost]:
    """Two runs of every prompt: an upper bound, since only a DLM with blocks is run twice."""
    return 2 * recorded_runs.cost(item, settings)


def orders_of(results: Results, model: str) -> list[str]:
    """The orders in which a model was run."""
    stored = {name for record in results.where(model=model) for name in record.value}
    return [order for order in ORDERS if any(name.startswith(f"{order}: ") for name in stored)]


def baselines(results: Results) -> list[str]:
    """The AR models."""
    return [model for model in results.models if results.is_causal(model)]


def pairs(results: Results) -> Iterator[tuple[str, str, str]]:
    """Every DLM beside every AR model on both scales, the paper's first."""
    for model in results.diffusion_models:
        for baseline in baselines(results):
            for scale in SCALES:
                yield model, baseline, scale


BESIDE = (
    "toy-ar has toy's layout, data and training budget. An AR model of another size, data or task differs from "
    "these DLMs in more than the kind of model."
)
"""A note for pages that compare DLMs with AR models."""


def effective_cases(patterns: int, related: Interval) -> float:
    """How many independent cases so many patterns are worth: patterns / design effect (Korn and Graubard 1998).

    The design effect is the variance of a share over that of as many independent cases, at least 1. It is unknown
    for a share of 0, and is taken from another share of the same patterns.

    Args:
        patterns: their number.
        related: the other share, with its interval over prompts; without a spread one case per prompt is returned.
    """
    independent = Z * math.sqrt(max(related.value * (1 - related.value), 0.0) / max(patterns, 1))
    half = (related.high - related.low) / 2
    if not independent or not half or math.isnan(half):
        return related.n
    return patterns / max(1.0, (half / independent) ** 2)


def followed(received: "Received", rule: Any) -> "dict[str, Trajectories]":
    """The sinks over the steps on each scale, by the name of the scale."""
    import dlm_lens as dl

    return {name: dl.trajectories(received.on_scale(scale), rule) for name, scale in SCALES.items()}


def uniform_attention(received: "Received") -> "Received":
    """The same keys and steps under uniform attention, r_j = e_j: one pattern per row, the mask without a model.

    Returns:
        Received attention of one layer and head, relative to uniform: 1 wherever a key is defined.
    """
    import torch

    values = received.on_scale(SCALES["relative"]).values[:, :, :1, :1]
    expected = received.expected[:, :, :1, :1]
    viewers = None if received.viewers is None else received.viewers[:, :, :1, :1]
    ones = torch.where(values.isnan(), values, torch.ones_like(values))
    return replace(received, values=ones, expected=expected, viewers=viewers, layers=received.layers[:1],
                   scale=SCALES["relative"])  # fmt: skip


def differ_in_random_order(main: Ints) -> NDArray[np.float64]:
    """The probability that the largest sink differs between two random steps that have one, per pattern.

    Of n steps with a sink, n_k of them with the largest sink at key k: 1 - sum_k n_k (n_k - 1) / (n (n - 1)). It is
    the value of "the largest sink ends elsewhere" when the order of the steps carries no information.

    Args:
        main: position of the largest sink [step, pattern]; -1 for none.

    Returns:
        The probability; NaN with fewer than two steps that have a sink.
    """
    found = np.full(main.shape[1], np.nan)
    for pattern, path in enumerate(main.T):
        counts = np.unique(path[path >= 0], return_counts=True)[1]
        n = counts.sum()
        if n > 1:
            found[pattern] = 1 - (counts * (counts - 1)).sum() / (n * (n - 1))
    return found


def moving_at_random_times(paths: "Trajectories", seed: int) -> tuple[float, float]:
    """Moving patterns, and moves, if the same sinks came and went at random times.

    Every observed lifetime keeps its position, its length and which of its ends are observed, and is placed at a
    uniformly random time at which its key exists. Ends and onsets then coincide by chance only.

    Args:
        paths: the sinks as they were.
        seed: of the draws.

    Returns:
        The number of moving patterns and of moves, means over `DRAWS` draws.
    """
    from dlm_lens.sinks.lifetimes import kinds_of, link_lifetimes

    lives, patterns = paths.lives, int(paths.static_share.numel())
    rng = np.random.default_rng(seed)
    row = np.unravel_index(lives.pattern, tuple(paths.static_share.shape))[0]
    scored = paths.scored.numpy()
    exists = scored[:, row, lives.position].argmax(0)
    movable = lives.position < paths.canvas
    moving, moves = [], []
    for _ in range(DRAWS):
        first, last = _placed(lives, exists, len(scored), rng)
        placed = replace(lives, first=first, last=last)
        before, _ = link_lifetimes(placed, movable)
        moved = np.bincount(lives.pattern, weights=before >= 0, minlength=patterns).astype(float)
        steps, share = _persistence(lives.pattern, lives.position, first, last, len(scored), patterns)
        moving.append(float((kinds_of(steps, share, moved) == "moving").sum()))
        moves.append(float(moved.sum()))
    return float(np.mean(moving)), float(np.mean(moves))


def _placed(lives: Any, exists: Ints, steps: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """First and last step of every lifetime at a random time; ends that were not observed stay where they were."""
    first, last = lives.first.copy(), lives.last.copy()
    for n, (length, born, died) in enumerate(zip(lives.steps, lives.born, lives.died, strict=True)):
        low = max(1, int(exists[n]))
        if born and died and steps - 1 - length >= low:
            first[n] = rng.integers(low, steps - length)
            last[n] = first[n] + length - 1
        elif born and not died:
            first[n] = rng.integers(low, steps)
        elif died and not born:
            last[n] = rng.integers(first[n], steps - 1)
    return first, last


def _persistence(
    pattern: Ints, position: Ints, first: Ints, last: Ints, steps: int, patterns: int
) -> tuple[Ints, NDArray[np.float64]]:
    """Per pattern the steps with a sink, and the largest share of them at which one position is a sink."""
    active: dict[int, dict[int, NDArray[np.bool_]]] = {}
    for at, key, start, stop in zip(pattern, position, first, last, strict=True):
        on = active.setdefault(int(at), {}).setdefault(int(key), np.zeros(steps, bool))
        on[start : stop + 1] = True
    with_sink, share = np.zeros(patterns, np.int64), np.full(patterns, np.nan)
    for at, keys in active.items():
        with_sink[at] = np.any(list(keys.values()), axis=0).sum()
        share[at] = max(on.sum() for on in keys.values()) / with_sink[at]
    return with_sink, share


def static_at_random_keys(paths: "Trajectories", seed: int) -> int:
    """Static patterns if every step had as many sinks at random keys: a sink of one step alone is always static.

    Args:
        paths: the sinks as they were.
        seed: of the draw.

    Returns:
        The number of patterns in which one key is a sink in at least 90% of the steps that have one.
    """
    from dlm_lens.sinks.lifetimes import STATIC_SHARE

    rng = np.random.default_rng(seed)
    counts = paths.counts.numpy()
    scored = paths.scored.numpy()[:, :, None, None, :]
    draws = np.where(scored, rng.random((*counts.shape, scored.shape[-1])), np.inf)
    taken = (draws.argsort(-1).argsort(-1) < counts[..., None]) & scored
    with_sink = (counts > 0).sum(0)
    return int(((taken.sum(0).max(-1) >= STATIC_SHARE * with_sink) & (with_sink > 0)).sum())


def drift_of_random_positions(open_to: NDArray[np.bool_], seed: int) -> dict[str, float]:
    """Drift of sinks without a preference: at every step a random one of the positions that are open to it.

    Args:
        open_to: the candidates [step, position]; a step without any has no sink.
        seed: of the draws.

    Returns:
        "drift", the mean slope in positions per step, and "right", the share of the paths that go right, over
        `DRAWS` paths.
    """
    from dlm_lens.sinks.lifetimes import main_path

    rng = np.random.default_rng(seed)
    draws = np.where(open_to[:, None], rng.random((len(open_to), DRAWS, open_to.shape[1])), -1.0)
    main = np.where(open_to.any(1, keepdims=True), draws.argmax(-1), -1)
    path = main_path(main, open_to.shape[1], np.ones_like(main, bool), range(len(main)))
    drift = np.asarray(path["drift"], float)
    known = drift[~np.isnan(drift)]
    return {
        "drift": float(known.mean()) if len(known) else float("nan"),
        "right": float((known > 0).mean()) if len(known) else float("nan"),
    }


def aligned(main: Ints, reference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance of the largest sink to a reference, as it was and with the steps of the reference in random order.

    Of a pattern whose largest sink is at m_t and whose reference is at p_t: the mean over t of |m_t - p_t|, and the
    mean over t and t' of |m_t - p_t'|. A sink that stays at one position has equal values.

    Args:
        main: position of the largest sink [step, pattern]; -1 for none.
        reference: its position [step]; NaN for none.

    Returns:
        [pattern, 2]; NaN where the largest sink stays at one position, or fewer than two steps have both.
    """
    found = np.full((main.shape[1], 2), np.nan)
    for pattern, path in enumerate(main.T):
        known = (path >= 0) & np.isfinite(reference)
        if known.sum() > 1 and len(set(path[known].tolist())) > 1:
            here, there = path[known].astype(float), reference[known]
            found[pattern] = np.abs(here - there).mean(), np.abs(here[:, None] - there).mean()
    return found
