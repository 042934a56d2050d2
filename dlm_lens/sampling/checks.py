"""Checks that the settings of several samplers share, with one wording."""

from collections.abc import Sequence
from typing import Any

from dlm_lens.arguments import Rule

FOLLOWS = ("start", "step", "finish", "stop", "grad", "everywhere")
"""What the loop asks of a host."""


def _follows(host: Any) -> bool:
    hosts = host if isinstance(host, Sequence) else (host,)
    return all(hasattr(each, name) for each in hosts for name in FOLLOWS) and not any(
        isinstance(each, type) for each in hosts
    )


HOST = Rule(
    f"what follows a run, such as dlm_lens.Recorder(model, ...), or a list of such, each with {', '.join(FOLLOWS)}",
    _follows,
)


def _resumes(value: Any) -> bool:
    from dlm_lens.sampling.resuming import Resumption  # needs torch, which the other checks do not

    return isinstance(value, Resumption)


RESUME = Rule("a Resumption of an unfinished run", _resumes)


def check_model(model: Any) -> None:
    """Raise unless this is a model that `dlm_lens.load` or `dlm_lens.testing.tiny` made.

    Raises:
        ValueError: naming its class.
    """
    if not hasattr(model, "sampler_defaults") or not hasattr(getattr(model, "config", None), "model_type"):
        raise ValueError(f"{type(model).__name__} has no sampler; load the model with dlm_lens.load")


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
