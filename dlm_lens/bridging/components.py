"""Attention, layers and norms of a bridge: what `dlm_lens.attention` computes, at TransformerLens's hook points."""

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    BlockBridge,
    GatedMLPBridge,
    JointQKVAttentionBridge,
    LinearBridge,
    MLPBridge,
    NormalizationBridge,
    PositionEmbeddingsAttentionBridge,
    RMSNormalizationBridge,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from dlm_lens.attention import SinkLayout, hooked_attention
from dlm_lens.attention.cache_argument import OLD, given_cache
from dlm_lens.attention.model_access import ModelLock
from dlm_lens.attention.softmax_variants import spare_logits


class ZeroSinkValue(LinearBridge):
    """The value projection of a model whose sinks' values are forced to zero: `hook_v` sees the zeros."""

    layout = SinkLayout()

    def forward(self, input: Float[Tensor, "batch position d_model"], *args: Any, **kwargs: Any) -> Tensor:
        """Values [batch, position, head x d_head], zero at the sinks."""
        x = self.hook_in(input)
        return self.through_hook_v(self.original_component(x, *args, **kwargs))

    def through_hook_v(self, values: Float[Tensor, "batch position width"]) -> Tensor:
        """Set the sinks' values to zero, then run `hook_v`."""
        at_sink = self.layout.is_sink(values.shape[1], values.device)
        hooked: Tensor = self.hook_out(values.masked_fill(at_sink[:, None], 0.0))
        return hooked


class NativeAttention:
    """Mixin before TransformerLens's attention: the numbers and the masks of this library's families.

    Attention is bidirectional or causal. With learned sink tokens, a sink attends to itself only and every other
    query attends to all sinks. Gated attention is supported, and a float32 rotation is cast back to the model's
    dtype. The numbers are those of the native model with `attn_implementation="hooked"`.

    `hook_z` is the input of the output projection, so that z W_O sums to `hook_attn_out`. With gated attention
    `hook_z` is the gated value, `hook_z_ungated` the value before the gate, and `hook_gate` the gate before its
    sigmoid.
    """

    original_component: Any
    config: Any
    layout = SinkLayout()

    def set_original_component(self, component: nn.Module) -> None:
        """Wrap the native attention module."""
        super().set_original_component(component)  # type: ignore[misc]
        self.layout = SinkLayout.of(component)

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The attention's output to the residual stream [batch, position, d_model], and the pattern."""
        lock: ModelLock | None = self.original_component.lock
        if lock is not None and not torch.compiler.is_compiling():
            lock.check_thread()
        hidden_states = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        mask, tables = kwargs.pop("attention_mask", None), kwargs.pop("position_embeddings", None)
        hidden_states = self.hook_in(hidden_states)
        q, k, v = (heads.transpose(1, 2) for heads in self._normed(*self._project(hidden_states)))
        q, k = self._rotated(q, k, (tables, kwargs.get("position_ids")), v.dtype)
        # The host knows the old name alone.
        k, v = self._update_kv_cache(k, v, **{**kwargs, OLD: given_cache(kwargs)})
        z, pattern = self._attend(q, k, v, mask)
        return self._output(z, hidden_states), pattern

    def _rotated(self, q: Tensor, k: Tensor, places: tuple[Any, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Q and k at their positions, through the hook points after rotation; `places`: tables and positions."""
        raise NotImplementedError

    def _project(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each [batch, position, head, d_head]."""
        width = self.original_component.head_dim
        split, forked = self.config.use_split_qkv_input, self.config.use_attn_in
        if not (split or forked):
            q, k, v = (part(hidden_states).unflatten(-1, (-1, width)) for part in (self.q, self.k, self.v))
            return q, k, v
        heads = int(self.config.n_heads)
        counts = (heads, *(int(self.config.n_key_value_heads or heads),) * 2)
        source = hidden_states if self._captured_pre_ln_residual is None else self._captured_pre_ln_residual
        if split:
            points = (self.hook_q_input, self.hook_k_input, self.hook_v_input)
            inputs = [self._fork_and_norm_per_head(source, *fork) for fork in zip(points, counts, strict=True)]
        else:
            shared = self._fork_and_norm_per_head(source, self.hook_attn_in, heads)
            inputs = [shared[..., :count, :] for count in counts]
        parts = zip((self.q, self.k, self.v), inputs, counts, strict=True)
        q, k, v = (self._project_per_head_qkv(*part, width) for part in parts)
        return q, k, v

    def _normed(self: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q and k after the norm of each head, in models that have one (Qwen3)."""
        if "q_norm" in self._modules:
            q, k = self.hook_q_normed(self.q_norm(q)), self.hook_k_normed(self.k_norm(k))
        return q, k, v

    def _mark_post_reshape_norm_hooks(self: Any) -> None:
        """Leave the position at axis 1: the host names axis 2, as it norms [batch, head, position, d_head]."""

    def _project_per_head_qkv(self, linear_bridge: Any, *args: Any) -> Tensor:
        """TransformerLens's projection of per-head inputs, with the sinks' values set to zero before `hook_v`."""
        if isinstance(linear_bridge, ZeroSinkValue):
            values = linear_bridge
            linear_bridge = SimpleNamespace(
                original_component=values.original_component, hook_out=values.through_hook_v
            )
        projected: Tensor = super()._project_per_head_qkv(linear_bridge, *args)  # type: ignore[misc]
        return projected

    def _attend(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Z [batch, position, head, d_head] and the pattern; both hook points run inside."""
        native = self.original_component
        if self.layout.count:
            mask = self.layout.restrict(mask, q.shape[2], q.device)
        points = _PatternPoints(
            self.hook_attn_scores, self.hook_pattern, causal=self.is_causal, training=self.training
        )
        options = {
            "scaling": native.scaling,
            "dropout": self._dropout(),
            "spare_logits": spare_logits(native, q.device),
        }
        return hooked_attention(points, q, k, v, mask, **options)  # type: ignore[arg-type]

    def _dropout(self) -> float:
        """The rate at which attention drops out in training."""
        return float(self.original_component.attention_dropout)

    def _output(self: Any, z: Float[Tensor, "batch position head d_head"], hidden_states: Tensor) -> Tensor:
        heads, width = z.shape[-2:]
        flat = z.flatten(-2)
        if "gate" in self._modules:
            flat = self.hook_z_ungated(z).flatten(-2) * self.hook_gate(self.gate(hidden_states)).sigmoid()
        if self.config.use_attn_result:
            per_head = self.o.hook_in(flat).unflatten(-1, (heads, width))
            # The sum over heads is what the projection would have returned.
            return self.hook_out(self.o.hook_out(self._compute_per_head_result(per_head, heads, width)))
        return self.hook_out(self.o(flat))


class DiffusionAttentionBridge(NativeAttention, PositionEmbeddingsAttentionBridge):
    """TransformerLens's rotary attention with the masks of this library's families."""

    def _rotated(self, q: Tensor, k: Tensor, places: tuple[Any, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Q and k, rotated, in the model's dtype; Ministral 3 scales q by its position."""
        tables, positions = places
        cos, sin = self._apply_position_embedding_hooks(tables)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        rotation = self.original_component.config.rope_parameters
        if (beta := rotation.get("llama_4_scaling_beta")) is not None:
            q = q * get_llama_4_attn_scale(positions, beta, rotation["original_max_position_embeddings"]).to(q)
        return self.hook_rot_q(q.to(dtype)), self.hook_rot_k(k.to(dtype))


class FusedProjection(LinearBridge):
    """The projection of q, k and v in one, without hook points: its parts run in its place."""

    def forward(self, input: Float[Tensor, "batch position d_model"], *args: Any, **kwargs: Any) -> Tensor:
        """What the native module computes."""
        fused: Tensor = self.original_component(input, *args, **kwargs)
        return fused


class JointAttentionBridge(NativeAttention, JointQKVAttentionBridge):
    """TransformerLens's attention with one projection for q, k and v (GPT-2), with our families' masks.

    The parts of the projection are views of its weight. Nothing is rotated: `hook_rot_q` and `hook_rot_k` have what
    `hook_q` and `hook_k` have, as in the native model.
    """

    def _rotated(self, q: Tensor, k: Tensor, places: tuple[Any, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.hook_rot_q(q), self.hook_rot_k(k)

    def _dropout(self) -> float:
        """The rate at which attention drops out in training."""
        return float(self.original_component.attn_dropout.p)

    def _output(self, z: Float[Tensor, "batch position head d_head"], hidden_states: Tensor) -> Tensor:
        return self.original_component.resid_dropout(super()._output(z, hidden_states))


class _PatternPoints:
    """The attention bridge's scores and pattern points under the names that `hooked_attention` reads."""

    def __init__(self, scores: HookPoint, pattern: HookPoint, *, causal: bool, training: bool) -> None:
        self._modules = {"hook_scores": scores, "hook_pattern": pattern}  # as a module has its children
        self.is_causal, self.training = causal, training


class LazyNorm:
    """Mixin before TransformerLens's norms; the second norm, for its hook points, runs only when one has a hook.

    `on_input`, if it is set, is called with the input before and after `hook_in`.
    """

    on_input: Callable[[Tensor, Tensor], object] | None = None

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Normalised states, computed by the native module."""
        hooked = self.hook_in(hidden_states)
        if self.on_input is not None:
            self.on_input(hidden_states, hooked)
        needed = has_hooks(self.hook_scale) or has_hooks(self.hook_normalized)
        states = self._hf_autograd_forward_with_hooks(hooked) if needed else self.original_component(hooked)
        output: Tensor = self.hook_out(states)
        return output


class LazyRMSNorm(LazyNorm, RMSNormalizationBridge):
    """An RMSNorm."""


class LazyLayerNorm(LazyNorm, NormalizationBridge):
    """A layer norm."""


def has_hooks(point: Any) -> bool:
    """Whether a hook point has any hook, added through TransformerLens or with PyTorch's own methods."""
    return any((point._forward_hooks, point._forward_pre_hooks, point._backward_hooks, point._backward_pre_hooks))


class StreamBlock(BlockBridge):
    """TransformerLens's block, in which an edit of `hook_resid_mid` reaches `hook_resid_post` too.

    TransformerLens places `hook_resid_mid` at the input of the second norm, so that an edit there reaches the MLP
    only. Here the layer's output is the edited stream plus the MLP's output. While no hook edits the point, the
    output is that of the native layer.
    """

    _kept: Mapping[str, Any] = MappingProxyType({})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        norm = self._modules.get("ln2")
        point = getattr(norm, "hook_in", None)
        if not isinstance(norm, LazyNorm) or point is None or not has_hooks(point):
            return super().forward(*args, **kwargs)
        kept: dict[str, Any] = {}

        def keep_mlp(module: Any, inputs: Any, output: Tensor) -> None:
            kept["mlp"] = output

        handle = self._modules["mlp"].register_forward_hook(keep_mlp)
        # A hook may run the bridge itself: what the pass around it keeps is put back.
        around, on_input = vars(self).get("_kept"), norm.on_input
        norm.on_input = lambda given, hooked: kept.update(given=given, hooked=hooked)
        self._kept = kept
        try:
            return super().forward(*args, **kwargs)
        finally:
            handle.remove()
            norm.on_input = on_input
            if around is None:
                del self._kept
            else:
                self._kept = around

    def _apply_output_hook(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        kept = self._kept
        if kept and kept["hooked"] is not kept["given"]:
            if self._read_use_hook_mlp_in():
                # hook_mlp_in comes before, and its edit changes the MLP's input alone.
                first = (output[0] if isinstance(output, tuple) else output) + (kept["hooked"] - kept["given"])
            else:
                first = kept["hooked"] + kept["mlp"]
            output = (first, *output[1:]) if isinstance(output, tuple) else first
        return super()._apply_output_hook(output, *args, **kwargs)


class NativeMLP:
    """Mixin before TransformerLens's MLPs: computed by the native module in compatibility mode too.

    TransformerLens computes folded weights by a function of its own that leaves `gate.hook_in` and `in.hook_in`
    out. The folded weights are in the projections, which the native module calls.
    """

    def forward(
        self: Any, hidden_states: Float[Tensor, "batch position d_model"]
    ) -> Float[Tensor, "batch position d_model"]:
        """The MLP's output to the residual stream."""
        added: Tensor = self.hook_out(self.original_component(self.hook_in(hidden_states)))
        return added


class NativeGatedMLP(NativeMLP, GatedMLPBridge):
    """The MLP of Llama and its relatives."""


class NativePlainMLP(NativeMLP, MLPBridge):
    """The MLP of GPT-2."""
