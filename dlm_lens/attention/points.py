"""Hook points in every attention module, and the forward that fires them.

The hosts' Llama and Qwen2 attention modules keep their parameters, their names and their config; only
their `forward` is replaced by one that passes each quantity through an identity module first.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dlm_lens.attention.functions import hooked_attention

HOOK_POINTS = ("q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z")
"""Hook points of an attention module in the order in which they fire; the child is `hook_<name>`.

`q`, `k`, `v`, `rot_q`, `rot_k`, `z` are `[batch, position, head, d_head]` (k and v with key/value heads);
`scores` and `pattern` are `[batch, head, query, key]`.
"""

Model = TypeVar("Model", bound=PreTrainedModel)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class HookPoint(nn.Module):
    """The identity; a PyTorch forward hook on it sees, and may replace, what passes through.

    A host that watches modules without hooks (nnsight) adds to `watchers` a function that says whether it is
    about to read this point.
    """

    watchers: tuple[Callable[[], bool], ...] = ()

    def forward(self, value: Tensor) -> Tensor:
        """Return `value` itself."""
        return value


class HookedAttention(nn.Module):
    """Attention of the Llama and Qwen2 layout whose quantities pass through the hook points.

    Mixed in front of the host's class by `add_hook_points`. While nothing listens to `hook_scores` or
    `hook_pattern` the attention function of the config runs (sdpa: no pattern is materialised); as soon as
    somebody does, this module computes its pattern explicitly. Both agree to float error.
    """

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
        q, k, v = self._project(hidden_states)
        q, k = self._rotate(q, k, *position_embeddings, dtype=v.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, host.layer_idx)
        kwargs["scaling"] = host.scaling
        kwargs["dropout"] = host.attention_dropout if self.training else 0.0
        kwargs["sliding_window"] = getattr(host, "sliding_window", None)
        z, pattern = self._attend(q, k, v, attention_mask, **kwargs)
        return self._output(host.hook_z(z), hidden_states), pattern

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

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mixing of values: z [batch, position, head, d_head], and the pattern where it was materialised."""
        z, pattern = self._attention_function()(self, q, k, v, attention_mask, **kwargs)
        return z, pattern

    def _output(self, z: Tensor, hidden_states: Tensor) -> Tensor:
        """What is added to the residual stream, from z and the module's own input."""
        output: Tensor = cast(Any, self).o_proj(z.flatten(-2))
        return output

    def _attention_function(self) -> Any:
        host = cast(Any, self)
        if listened_to(host.hook_scores) or listened_to(host.hook_pattern):
            return hooked_attention
        return ALL_ATTENTION_FUNCTIONS.get_interface(host.config._attn_implementation, hooked_attention)


def listened_to(point: nn.Module) -> bool:
    """Whether a forward hook or pre-hook is registered on `point`, or a watcher is about to read it."""
    if point._forward_hooks or point._forward_pre_hooks:
        return True
    return any(watches() for watches in cast(HookPoint, point).watchers)


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _hooked_class(mixin: type[HookedAttention], host: type[nn.Module]) -> type[nn.Module]:
    if (mixin, host) not in _CLASSES:
        _CLASSES[mixin, host] = type(f"Hooked{host.__name__}", (mixin, host), {"__module__": host.__module__})
    return _CLASSES[mixin, host]


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
    for attention in found:
        if not isinstance(attention, HookedAttention):
            attention.__class__ = _hooked_class(attention_class, type(attention))
            for name in HOOK_POINTS:
                attention.add_module(f"hook_{name}", HookPoint())
    return model
