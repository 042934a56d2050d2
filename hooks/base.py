"""What every hook is made of: the base classes, the context, `sink(i)`, and how a hook prints itself."""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, get_args

from dlm_lens.arguments import named_arguments
from dlm_lens.attention import (
    ColumnHook,
    ColumnMask,
    Hook,
    HookWrapper,
    PointContext,
    Site,
    Stage,
    attach_hooks,
    sink,
)

__all__ = [
    "ColumnHook",
    "ColumnMask",
    "Hook",
    "HookWrapper",
    "PointContext",
    "Site",
    "Stage",
    "attach_hooks",
    "call_of",
    "check_stage",
    "makes_hook",
    "sink",
]

HEAD_AXIS: dict[str, int] = {"scores": 1, "pattern": 1, **dict.fromkeys(("q", "k", "v", "rot_q", "rot_k", "z"), 2)}
"""Axis of the heads of an activation; k, v and rot_k have key/value heads."""

LIMITS = {
    "heads": "at_heads(hook, heads)",
    "layers": "at_layers(hook, layers)",
    "steps": "at_steps(hook, steps)",
}
"""Arguments that users give hooks, and the limits that are put around the hook for them."""

makes_hook = named_arguments(**LIMITS, **{name.removesuffix("s"): limit for name, limit in LIMITS.items()})
"""The decorator of functions that make a hook: the error of an unknown argument says what it is here."""


def check_stage(stage: str, renormalise: bool) -> None:
    """Check the stage of a hook that hides columns, and that rows can be renormalised there.

    Raises:
        ValueError: an unknown stage, or `renormalise` before the softmax.
    """
    if stage not in get_args(Stage):
        raise ValueError(f"stage is {stage!r}; it must be 'before_softmax' or 'after'")
    if renormalise and stage == "before_softmax":
        raise ValueError("renormalise=True is for stage='after'; before the softmax rows sum to 1 anyway")


def call_of(hook: Any, name: str, positional: Sequence[str] = ()) -> str:
    """A hook as the call that makes it: its fields, without those at their defaults.

    Args:
        hook: a frozen dataclass.
        name: the function that makes it.
        positional: fields to give without their names; a tuple is spread.
    """
    parts = [_argument(getattr(hook, field)) for field in positional]
    for field in fields(hook):
        given = getattr(hook, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.repr and field.name not in positional and given != default:
            parts.append(f"{field.name}={given!r}")
    return f"{name}({', '.join(parts)})"


def _argument(value: Any) -> str:
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
