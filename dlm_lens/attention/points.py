"""Hook points in the attention modules of a transformers model, without replacing a forward.

transformers' attention modules look their attention function up by the name in their config. `add_hook_points`
gives every such module a `DispatchedConfig`, which names the function of `dlm_lens.attention.functions`, and
identity modules as children, through which that function passes each quantity.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dlm_lens.attention.hook_points import HookPoint, add_projection_points
from dlm_lens.attention.model_access import ModelLock, guard_hooks

HOOK_POINTS = ("q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z")
"""Hook points of an attention module in the order in which they fire; the child is `hook_<name>`.

`q`, `k`, `v`, `rot_q`, `rot_k`, `z` are `[batch, position, head, d_head]` (k and v with key/value heads);
`scores` and `pattern` are `[batch, head, query, key]`. With a cache, `rot_k` and `v` hold the cached keys too. An
attention that projects queries and keys in another way than by `q_proj` and `k_proj` has no `q` and `k`.
"""

DISPATCH = "dlm_lens"
"""Name of our attention function in transformers' registry; only a `DispatchedConfig` names it."""

PROJECTIONS = ("q_proj", "query", "query_key_value", "qkv", "qkv_proj")
"""Endings of the names of projections by which an attention module is recognised that calls no interface."""

Model = TypeVar("Model", bound=nn.Module)


class DispatchedConfig:
    """A config as an attention module with hook points reads it: our attention function, the rest as it was.

    `wrapped` is the model's own config. What it names as attention implementation ("sdpa", "eager", ...) decides
    which masks transformers builds, and which of `functions`, those that the module's own file uses, runs while no
    hook needs scores or patterns.
    """

    def __init__(self, wrapped: Any, functions: AttentionInterface) -> None:
        object.__setattr__(self, "wrapped", wrapped)
        object.__setattr__(self, "functions", functions)

    @property
    def _attn_implementation(self) -> str:
        return DISPATCH

    def __getattr__(self, name: str) -> Any:
        if name in ("wrapped", "functions") or name.startswith("__"):
            raise AttributeError(name)  # a copy or an unpickled instance that has no fields yet
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)


def add_hook_points(model: Model) -> Model:
    """Give every attention module of a transformers model its hook points, in place, and return the model.

    Parameters, their names and every forward stay as they are. Calling it twice changes nothing. Modules are found
    by their code: a forward that looks its function up in transformers' attention interface.

    Raises:
        ValueError: the model has no such module, or one whose quantities cannot be hooked exactly: it computes
            attention itself, or does something else depending on the name of the implementation.
    """
    if has_hook_points(model):
        return model
    found = list(_dispatching_modules(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention module that calls transformers' attention interface "
            "(ALL_ATTENTION_FUNCTIONS): its attention cannot be hooked"
        )
    guard_hooks()
    lock = ModelLock()
    for index, attention in enumerate(found):
        attention.lock, attention.hook_layer = lock, index
        attention.config = DispatchedConfig(attention.config, _attention_functions(type(attention)))
        add_projection_points(attention)
        for name in HOOK_POINTS[2:]:
            attention.add_module(f"hook_{name}", HookPoint())
    return model


def has_hook_points(module: Any) -> bool:
    """Whether an attention module, or a model's attention modules, have hook points."""
    return any(isinstance(child, HookPoint) for child in module.modules())


def hooked_attentions(model: nn.Module) -> list[Any]:
    """The attention modules with hook points, in order."""
    return [module for module in model.modules() if is_hooked_attention(module)]


def is_hooked_attention(module: Any) -> bool:
    """Whether this module itself is an attention module with hook points."""
    return isinstance(module, nn.Module) and isinstance(module._modules.get("hook_z"), HookPoint)


def hook_point(attention: Any, name: str) -> HookPoint:
    """A hook point of an attention module.

    Raises:
        ValueError: the module does not have it.
    """
    point = attention._modules.get(f"hook_{name}")
    if isinstance(point, HookPoint):
        return point
    have = ", ".join(each for each in HOOK_POINTS if f"hook_{each}" in attention._modules)
    raise ValueError(f"{type(attention).__name__} has no hook point {name!r}: it has {have}")


def _attention_functions(kind: type) -> AttentionInterface:
    """The attention functions that a module's own file uses; some override one of transformers' locally."""
    for parent in kind.__mro__:
        found = getattr(sys.modules.get(parent.__module__), "ALL_ATTENTION_FUNCTIONS", None)
        if isinstance(found, AttentionInterface):
            return found
    return ALL_ATTENTION_FUNCTIONS


def _dispatching_modules(model: nn.Module) -> Iterator[Any]:
    """Attention modules that call the interface; raises for those that cannot be hooked."""
    for name, module in model.named_modules():
        code = _forward_code(type(module))
        calls = any("ALL_ATTENTION_FUNCTIONS" in each.co_names for each in code)
        if calls and "sdpa" in _strings(each for each in code):
            raise ValueError(
                f"{type(module).__name__} ({name}) computes something else for the attention implementation 'sdpa' "
                "than for others, so that its attention cannot be hooked exactly"
            )
        if calls:
            yield module
        elif _attends_by_itself(module):
            raise ValueError(
                f"{type(module).__name__} ({name}) computes attention without transformers' attention interface, "
                "so that its attention cannot be hooked"
            )


def _forward_code(kind: type) -> list[Any]:
    """Code of the forward that runs, and of those that it calls as super().forward."""
    found: list[Any] = []
    for parent in kind.__mro__:
        forward = parent.__dict__.get("forward")
        code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
        if code is None:
            continue
        found.append(code)
        if not {"super", "forward"} <= set(code.co_names):
            break
    return found


def _strings(code: Any) -> set[str]:
    found: set[str] = set()
    for each in code:
        for constant in each.co_consts:
            values = constant if isinstance(constant, tuple | frozenset) else (constant,)
            found |= {value for value in values if isinstance(value, str)}
    return found


def _attends_by_itself(module: nn.Module) -> bool:
    """Whether this looks like an attention module: by its class's name, with projections as direct children."""
    if not any(parent.__name__.endswith("Attention") for parent in type(module).__mro__):
        return False
    return any(child.endswith(PROJECTIONS) for child in module._modules)
