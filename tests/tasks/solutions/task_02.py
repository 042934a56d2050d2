"""Comparisons of runs with and without hooks in some steps."""

import functools
from typing import Any

from scipy import stats

import dlm_lens as dl
from dlm_lens.hooks import at_steps, mask_random, mask_sinks
from tests.tasks.solutions import PROMPTS, toy

WRONG: tuple[dict[str, Any], ...] = (
    {"half": range(12)},
    {"half": range(24)},
    {"match": "columns"},
    {"source": "clean"},
)


@functools.cache
def compared(half: range, source: Any, match: Any = None) -> Any:
    """Hidden sinks, or with `match` other columns."""
    sinks = at_steps(mask_sinks(dl.AboveMean(3.0), source=source), half)
    hook = mask_random(like=sinks, match=match) if match else sinks
    return dl.compare(toy(), PROMPTS, hooks=[hook], gen_length=24, block_length=8, seed=0)


def solve(half: range = range(12, 24), match: Any = "mass", source: Any = "current") -> dict[str, Any]:
    pairs = [compared(half, source), compared(half, source, match)]
    hidden, control = (pair.tokens_changed for pair in pairs)
    difference = (hidden - control).double()
    width = float(stats.t.ppf(0.975, 11) * difference.std() / 12**0.5)
    mass = [float(pair.hooked.settings["mass_hidden"][0] or 0) for pair in pairs]
    mean = float(difference.mean())
    return {
        "changed_hidden": hidden.tolist(),
        "changed_control": control.tolist(),
        "mass_hidden": mass[0],
        "mass_control": mass[1],
        "difference": mean,
        "interval": [mean - width, mean + width],
    }
