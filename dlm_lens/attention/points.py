"""Hook points in every attention module, and the forward that fires them.

The hosts' Llama and Qwen2 attention modules keep their parameters, their names and their config; only
their `forward` is replaced by one that passes each quantity through an identity module first.
"""

from dataclasses import replace
from types import MethodType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dlm_lens.attention.access import ModelLock, guard_hooks, lock_of
from dlm_lens.attention.attention_pass import AttentionPass
from dlm_lens.attention.calls import column_calls, needs_value
from dlm_lens.attention.functions import HOOKED, hooked_attention
from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.streaming import Reader, stream_hidden, stream_mix

HOOK_POINTS = ("q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z")
"""Hook points of an attention module in the order in which they fire; the child is `hook_<name>`.

`q`, `k`, `v`, `rot_q`, `rot_k`, `z` are `[batch, position, head, d_head]` (k and v with key/value heads);
`scores` and `pattern` are `[batch, head, query, key]`.
"""

Model = TypeVar("Model", bound=PreTrainedModel)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Watcher(Protocol):
    """A host that may read a hook point."""

    def __call__(self) -> bool:
        """Whether it is about to read the point."""
        ...

    def passed(self) -> None:
        """The forward pass went by the point, whose value was not computed."""
        ...


class HookPoint(nn.Module):
    """The identity; a PyTorch forward hook on it sees, and may replace, what passes through.

    A host that follows modules without hooks (nnsight) adds itself to `watchers`. While scores and pattern run,
    `attention_pass` is what attention knows of the pass.
    """

    watchers: tuple["Watcher", ...] = ()
    attention_pass: AttentionPass | None = None

    def forward(self, value: Tensor) -> Tensor:
        """Return `value` itself."""
        return value

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not part of a host that watches this point.
        return {name: value for name, value in super().__getstate__().items() if name != "watchers"}


class Mixed(NamedTuple):
    """What attention mixed, the pattern where it was materialised, and what readers are handed if there are any."""

    z: Float[Tensor, "batch position head d_head"]
    pattern: Float[Tensor, "batch head query key"] | None = None
    inputs: AttentionInputs | None = None


class HookedAttention(nn.Module):
    """Attention of the Llama and Qwen2 layout whose quantities pass through the hook points.

    Mixed in front of the host's class by `add_hook_points`. While nothing listens to `hook_scores` or
    `hook_pattern` the attention function of the config runs (sdpa: no pattern is materialised); as soon as
    somebody does, this module computes its pattern explicitly. Both agree to float error. `readers` are handed
    the inputs of every forward pass, after the hooks at `hook_z`, and column hooks that wait as a `ColumnCall` run
    in stream: neither needs a pattern.
    """

    readers: tuple[Reader, ...] = ()
    lock: ModelLock | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not part of a recording of the original.
        return {name: value for name, value in super().__getstate__().items() if name != "readers"}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time (`_hooked_class`), so pickle cannot find it by its name.
        mixin, host = type(self).__bases__
        return _empty_attention, (mixin, host), self.__getstate__()

    def forward(
        self,
        hidden_states: Float[Tensor, "batch position d_model"],
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "batch position d_model"], Float[Tensor, "batch head query key"] | None]:
        """Return what is added to the residual stream, and the pattern where it was materialised."""
        host = cast(Any, self)
        if self.lock is not None and not torch.compiler.is_compiling():
            self.lock.check_thread()
        attention_mask = _boolean_if_whole(attention_mask)
        q, k, v = self._project(hidden_states)
        q, k = self._rotate(q, k, *position_embeddings, dtype=v.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, host.layer_idx)
        kwargs["scaling"] = host.scaling
        kwargs["dropout"] = host.attention_dropout if self.training else 0.0
        kwargs["sliding_window"] = getattr(host, "sliding_window", None)
        mixed = self._attend(q, k, v, attention_mask, **kwargs)
        if mixed.pattern is None:
            self._tell_watchers()
        z = host.hook_z(mixed.z)
        if mixed.inputs is not None:
            self._read(mixed.inputs, z)
        return self._output(z, hidden_states), mixed.pattern

    def _tell_watchers(self) -> None:
        # Compiled code runs only while nobody traces the model (`listening`).
        if not torch.compiler.is_compiling():
            for name in ("hook_scores", "hook_pattern"):
                for watcher in cast(HookPoint, self.get_submodule(name)).watchers:
                    watcher.passed()

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        host = cast(Any, self)
        heads = (*hidden_states.shape[:-1], -1, host.head_dim)
        return (
            host.hook_q(host.q_proj(hidden_states).view(heads)),
            host.hook_k(host.k_proj(hidden_states).view(heads)),
            host.hook_v(host.v_proj(hidden_states).view(heads)),
        )

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # The tables decide the precision: a rotary module that returns float32 tables (LLaDA's) widens q and k
        # here, and the result goes back to the model's dtype. With tables in the model's dtype nothing changes.
        host = cast(Any, self)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        return host.hook_rot_q(q.to(dtype)), host.hook_rot_k(k.to(dtype))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> "Mixed":
        """Mixing of values, under the pattern where somebody needs it."""
        if not self._materialises():
            return self._mix(q, k, v, attention_mask, **kwargs)
        z, pattern = hooked_attention(cast(nn.Module, self), q, k, v, attention_mask, **kwargs)
        return Mixed(z, pattern, self._inputs_with(pattern, q, k, v, attention_mask, **kwargs))

    def _mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        own_start: int | None = None,
        **kwargs: Any,
    ) -> "Mixed":
        """Mixing without a pattern: the config's attention function, or the fused kernel under what hooks hide."""
        host = cast(Any, self)
        calls = column_calls(host.hook_scores, host.hook_pattern)
        inputs = None
        if calls:
            given = self._inputs(q, k, v, attention_mask, own_start, kwargs["scaling"])
            inputs = stream_hidden(given, calls)
            inputs = None if inputs is given else inputs
        if inputs is not None:
            z = stream_mix(inputs)
        else:
            function = ALL_ATTENTION_FUNCTIONS.get_interface(host.config._attn_implementation, hooked_attention)
            z, _ = function(self, q, k, v, attention_mask, **kwargs)
        if self.readers and inputs is None:
            inputs = self._inputs(q, k, v, attention_mask, own_start, kwargs["scaling"])
        return Mixed(z, inputs=inputs if self.readers else None)

    def _inputs_with(
        self,
        pattern: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        own_start: int | None = None,
        **kwargs: Any,
    ) -> AttentionInputs | None:
        """What readers are handed beside a materialised pattern; None if nobody reads."""
        if not self.readers:
            return None
        return replace(self._inputs(q, k, v, attention_mask, own_start, kwargs["scaling"]), pattern=pattern)

    def _read(self, inputs: AttentionInputs, z: Float[Tensor, "batch position head d_head"]) -> None:
        # Queries may be the canvas's alone, where z has the sinks' positions too.
        queries = z if z.shape[1] == inputs.q.shape[2] else z[:, inputs.own]
        for reader in self.readers:
            reader(replace(inputs, z=queries))

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, own_start: int | None, scale: float
    ) -> AttentionInputs:
        host, visible = cast(Any, self), attention_mask
        if visible is not None:
            visible = visible[..., : k.shape[2]]
            if visible.dtype != torch.bool:
                visible = visible > torch.finfo(visible.dtype).min / 2
        causal = visible is None and bool(getattr(host, "is_causal", False)) and q.shape[2] > 1
        return AttentionInputs(host.layer_idx, q, k, v, scale, visible, causal=causal, own_start=own_start)

    def _output(self, z: Tensor, hidden_states: Tensor) -> Tensor:
        """What is added to the residual stream, from z and the module's own input."""
        output: Tensor = cast(Any, self).o_proj(z.flatten(-2))
        return output

    def _materialises(self) -> bool:
        """Whether somebody needs the pattern itself."""
        host = cast(Any, self)
        if host.config._attn_implementation in (HOOKED, "eager"):
            return True
        if listened_to(host.hook_scores) or listened_to(host.hook_pattern):
            return True
        # Hooks behind the softmax run in stream one at a time.
        return len(column_calls(host.hook_pattern)) > 1


def _boolean_if_whole(mask: Any) -> Any:
    """A mask [batch, heads, query, key] of whole numbers, 0 and 1, as boolean; added to scores it hid nothing."""
    whole = isinstance(mask, Tensor) and mask.ndim == 4 and not mask.is_floating_point()
    return mask.bool() if whole else mask


def listened_to(point: nn.Module) -> bool:
    """Whether a hook that needs the value is registered on `point`, or a watcher is about to read it.

    A `ColumnCall` does not need it: attention runs it in stream.
    """
    if any(map(needs_value, point._forward_hooks.values())) or point._forward_pre_hooks:
        return True
    if torch.compiler.is_compiling():
        return False
    return any(watches() for watches in cast(HookPoint, point).watchers)


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _hooked_class(mixin: type[HookedAttention], host: type[nn.Module]) -> type[nn.Module]:
    if (mixin, host) not in _CLASSES:
        _CLASSES[mixin, host] = type(f"Hooked{host.__name__}", (mixin, host), {"__module__": host.__module__})
    return _CLASSES[mixin, host]


def _empty_attention(mixin: type[HookedAttention], host: type[nn.Module]) -> nn.Module:
    """An attention module whose state is still to be set."""
    hooked = _hooked_class(mixin, host)
    return hooked.__new__(hooked)


def _rewrap(attention: nn.Module, plain: type[nn.Module]) -> None:
    """Let accelerate's wrapper, which a device map puts around `forward` while loading, call the new class's."""
    wrapped = attention.__dict__.get("_old_forward")
    if getattr(wrapped, "__func__", None) is plain.forward:
        attention.__dict__["_old_forward"] = MethodType(type(attention).forward, attention)


def add_hook_points(model: Model, attention_class: type[HookedAttention] = HookedAttention) -> Model:
    """Give every attention module of `model` its hook points, in place, and return the model.

    The module keeps its parameters and its place in the tree and changes its class to a subclass, as
    `torch.nn.utils.parametrize` does, so that weights load and save under the same names. Calling it twice
    changes nothing. `attention_class` is for families whose attention does something of its own.

    Raises:
        ValueError: no attention module with `q_proj`, `k_proj`, `v_proj` and `o_proj` was found.
    """
    found = [m for m in model.modules() if all(hasattr(m, name) for name in _PROJECTIONS)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention module with {', '.join(_PROJECTIONS)}; "
            "hook points need the Llama or Qwen2 layout"
        )
    guard_hooks()
    lock = lock_of(model) or ModelLock()
    for attention in found:
        if not isinstance(attention, HookedAttention):
            attention.lock = lock
            plain = type(attention)
            attention.__class__ = _hooked_class(attention_class, plain)
            _rewrap(attention, plain)
            for name in HOOK_POINTS:
                attention.add_module(f"hook_{name}", HookPoint())
    return model
