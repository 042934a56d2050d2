"""How the sinks of every pattern move: one number per pattern for each question."""

import numpy as np
from numpy.typing import NDArray

from dlm_lens.sinks.lifetimes import Bools, Floats, Ints, Lives

STATIC_SHARE = 0.9
"""Static: one position is on in at least this part of the steps that have a sink."""

TRANSIENT_STEPS = 2
"""Transient: a life of at most so many steps."""

KINDS = ("none", "static", "moving", "unsettled")
"""No sink at any step; static; not static and a sink moved; neither (sinks come and go without a move)."""


def life_counts(lives: Lives, before: Ints, trajectory: Ints, patterns: int) -> dict[str, Floats]:
    """Numbers of lives, trajectories, transients and moves per pattern, and the mean length of lives and moves."""

    def per_pattern(weights: NDArray[np.generic]) -> Floats:
        return np.asarray(
            np.bincount(lives.pattern, weights=weights.astype(float), minlength=patterns), dtype=float
        )

    moved = before >= 0
    jump = np.where(moved, lives.position - lives.position[before], 0)
    owners = lives.pattern[np.unique(trajectory, return_index=True)[1]]
    count, moves = per_pattern(np.ones(len(lives))), per_pattern(moved)
    with np.errstate(invalid="ignore"):
        return {
            "lives": count,
            "trajectories": np.bincount(owners, minlength=patterns).astype(float),
            "life": per_pattern(lives.steps) / count,
            "transient": per_pattern(lives.steps <= TRANSIENT_STEPS) / count,
            "moves": moves,
            "moves_right": per_pattern(jump > 0) / moves,
            "jump": per_pattern(np.abs(jump)) / moves,
        }


def main_path(main: Ints, canvas: int, defined: Bools) -> dict[str, Floats]:
    """Where the largest sink is over the steps ([step, pattern]; -1: none); steps without one are left out.

    `drift` is the slope of the least-squares line of position over step, in positions per step (to the right above
    0); `displacement` the last position minus the first; `variance` the population's over steps, in positions^2;
    `changes` how often the position differs between neighbouring steps that both have a sink, `change` by how much.
    `moved_over_run` compares the first step with the last of those that are `defined` (NaN where either has no
    sink).
    """
    there = (main >= 0) & (main < canvas)
    steps = np.arange(len(main))[:, None]
    count = there.sum(0)
    at = np.where(there, main, 0).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean, middle = at.sum(0) / count, (there * steps).sum(0) / count
        off, time = np.where(there, at - mean, 0), np.where(there, steps - middle, 0)
        spread = (time**2).sum(0)
        drift = np.where(count > 1, (off * time).sum(0) / spread, np.nan)
        variance = (off**2).sum(0) / count
        pairs = there[1:] & there[:-1]
        step_sizes = np.where(pairs, np.abs(np.diff(at, axis=0)), 0)
        changes = (step_sizes > 0).sum(0).astype(float)
        change = step_sizes.sum(0) / changes
    first, last = there.argmax(0), len(main) - 1 - there[::-1].argmax(0)
    pattern = np.arange(main.shape[1])
    displacement = np.where(count > 0, at[last, pattern] - at[first, pattern], np.nan)
    begin, end = main[defined.argmax(0), pattern], main[len(main) - 1 - defined[::-1].argmax(0), pattern]
    ends = (begin >= 0) & (end >= 0)
    return {
        "moved_over_run": np.where(ends, begin != end, np.nan),
        "displacement": displacement,
        "drift": drift,
        "variance": variance,
        "changes": changes,
        "change": change,
    }


def kinds_of(sink_steps: Ints, static_share: Floats, moves: Floats) -> NDArray[np.str_]:
    """One of `KINDS` per pattern."""
    static: Bools = static_share >= STATIC_SHARE
    return np.select([sink_steps == 0, static, moves > 0], KINDS[:3], KINDS[3])
