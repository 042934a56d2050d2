"""Checks that the settings of several samplers share, with one wording."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

WHOLE = ("steps", "gen_length", "block_length", "top_k", "eot_token", "samples", "strata", "batch_size")
REAL = ("temperature", "cfg_scale", "eps", "top_p", "alg_temp")


def numbers(values: Mapping[str, Any]) -> None:
    """Raise unless the settings that are numbers are finite ones, and whole where they count something.

    Raises:
        ValueError: naming the setting and its value.
    """
    for name, value in values.items():
        if name in WHOLE and value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise ValueError(f"{name} is {value!r}; it must be a whole number")
        known = isinstance(value, Real) and not isinstance(value, bool)
        if name in REAL and value is not None and not (known and math.isfinite(value)):
            raise ValueError(f"{name} is {value!r}; it must be a finite number")


def at_least_one(settings: Any, *names: str) -> None:
    """Raise unless these fields are at least 1 (or None).

    Raises:
        ValueError: naming the field and its value.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def not_negative(settings: Any, *names: str, zero: str) -> None:
    """Raise if one of these fields is negative; `zero` says what 0 means.

    Raises:
        ValueError: naming the field and its value.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 0:
            raise ValueError(f"{name} is {value}; it must be 0 ({zero}) or positive")


def known_remasking(remasking: str, accepted: Sequence[str], listed: Sequence[str], owner: str) -> None:
    """Raise unless the algorithm is one of the sampler's; `listed` are those worth naming.

    Raises:
        ValueError: naming it and those that there are.
    """
    if remasking not in accepted:
        raise ValueError(f"remasking {remasking!r} is none of {owner}'s: {', '.join(listed)}")


def inner_eps(eps: float) -> None:
    """Raise unless the last timestep lies strictly between 0 and 1.

    Raises:
        ValueError: naming it.
    """
    if not 0 < eps < 1:
        raise ValueError(f"eps is {eps}; it must lie between 0 and 1")
