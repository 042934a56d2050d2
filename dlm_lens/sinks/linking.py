"""Which life goes on in which: moves, and the trajectories that they join."""

import numpy as np

from dlm_lens.sinks.lifetimes import Ints, Lives

WITHIN = 1
"""A sink moves if one position switches off within this many steps of another switching on."""


def link_lives(lives: Lives, movable: np.ndarray) -> tuple[Ints, Ints]:
    """The moves: which life each life comes from, and the trajectory that it belongs to.

    Life B continues life A of the same pattern if B's position is another, B switches on at most one step before
    or after A switches off, and B begins and ends later than A. Where several fit, the smallest difference in time
    wins, then the smallest distance, then the earlier and the left one; a life has at most one predecessor and one
    successor. A life that begins with the run, or ends with it, was not seen to switch.

    Args:
        lives: all lives.
        movable: which of them stand on the canvas; a learned sink token cannot have moved.

    Returns:
        For every life its predecessor (-1: none) and its trajectory, counted in the order of first lives.
    """
    before = np.full(len(lives), -1, dtype=np.int64)
    death, birth = _candidates(lives, np.flatnonzero(lives.died & movable), np.flatnonzero(lives.born & movable))
    fits = (
        (lives.position[death] != lives.position[birth])
        & (lives.first[birth] > lives.first[death])
        & (lives.last[birth] > lives.last[death])
    )
    death, birth = death[fits], birth[fits]
    delay = lives.first[birth] - lives.last[death] - 1
    distance = np.abs(lives.position[birth] - lives.position[death])
    order = np.lexsort((lives.position[birth], lives.position[death], delay, distance, np.abs(delay)))
    death, birth = death[order], birth[order]
    while len(death):
        # A pair that is the best one left for both of its lives is what going down the list would take.
        best = np.zeros(len(death), dtype=bool)
        best[np.unique(death, return_index=True)[1]] = True
        best_birth = np.zeros(len(death), dtype=bool)
        best_birth[np.unique(birth, return_index=True)[1]] = True
        taken = best & best_birth
        before[birth[taken]] = death[taken]
        left = ~(np.isin(death, death[taken]) | np.isin(birth, birth[taken]))
        death, birth = death[left], birth[left]
    return before, _trajectories(before)


def _candidates(lives: Lives, deaths: Ints, births: Ints) -> tuple[Ints, Ints]:
    """All pairs of a death and a birth in one pattern at most WITHIN steps apart."""
    if not len(deaths) or not len(births):
        return deaths[:0], births[:0]
    width = int(lives.last.max()) + 2 * WITHIN + 3
    key = lives.pattern[births] * width + lives.first[births] + WITHIN
    order = np.argsort(key, kind="stable")
    off = lives.pattern[deaths] * width + lives.last[deaths] + 1 + WITHIN
    low = np.searchsorted(key[order], off - WITHIN, side="left")
    high = np.searchsorted(key[order], off + WITHIN, side="right")
    found = high - low
    pairs = np.arange(found.sum()) - np.repeat(np.cumsum(found) - found, found) + np.repeat(low, found)
    return np.repeat(deaths, found), births[order][pairs]


def _trajectories(before: Ints) -> Ints:
    """Follow every life back to the one that it comes from in the end."""
    root = np.where(before < 0, np.arange(len(before)), before)
    while True:
        further = root[root]
        if np.array_equal(further, root):
            break
        root = further
    return np.unique(root, return_inverse=True)[1].astype(np.int64)
