"""What the code of an attention module's forward method says: which functions it uses, in which order."""

import inspect
from collections.abc import Iterable
from types import CodeType

from torch import nn

PROJECTIONS = ("q_proj", "query", "query_key_value", "qkv", "qkv_proj")
"""Endings of the names of projections by which an attention module is recognised that calls no interface."""

LETTERS = frozenset({"q", "k", "v"})
"""Whole names of projections by which one is recognised too (LongT5)."""


def forward_code(kind: type) -> list[CodeType]:
    """Code of the forward that runs, and of those that it calls as super().forward."""
    found: list[CodeType] = []
    for parent in kind.__mro__:
        forward = parent.__dict__.get("forward")
        code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
        if code is None:
            continue
        found.append(code)
        if not {"super", "forward"} <= set(code.co_names):
            break
    return found


def strings_of(codes: Iterable[CodeType]) -> set[str]:
    """The strings that stand in these codes."""
    found: set[str] = set()
    for each in codes:
        for constant in each.co_consts:
            values = constant if isinstance(constant, tuple | frozenset) else (constant,)
            found |= {value for value in values if isinstance(value, str)}
    return found


def computes_attention(module: nn.Module) -> bool:
    """Whether this looks like an attention module: by its class's name, with projections as direct children."""
    if not any(parent.__name__.endswith("Attention") for parent in type(module).__mro__):
        return False
    return module._modules.keys() >= LETTERS or any(child.endswith(PROJECTIONS) for child in module._modules)


def rotates_before(kind: type, norm: str) -> bool:
    """Whether the forward method rotates queries and keys before it calls the norm of this name (NanoChat)."""
    for code in forward_code(kind):
        names = code.co_names  # in the order of their first use
        rotation = [place for place, name in enumerate(names) if name.startswith("apply_rotary")]
        if rotation and norm in names:
            return rotation[0] < names.index(norm)
    return False
