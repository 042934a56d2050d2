"""Attention inside a bridge: the numbers of `dlm_lens.attention`, at TransformerLens's hook points."""

from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import LinearBridge, PositionEmbeddingsAttentionBridge
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dlm_lens.attention import SinkLayout, hooked_attention
from dlm_lens.attention.model_access import ModelLock
from dlm_lens.attention.softmax_variants import spare_logits


class ZeroSinkValue(LinearBridge):
    """The value projection of a model whose sinks' values are forced to zero: `hook_v` sees the zeros."""

    layout = SinkLayout()

    def forward(self, input: Float[Tensor, "batch position d_model"], *args: Any, **kwargs: Any) -> Tensor:
        """Values [batch, position, head x d_head], zero at the sinks."""
        x = self.hook_in(input)
        return self.hooked(self.original_component(x, *args, **kwargs))

    def hooked(self, values: Float[Tensor, "batch position width"]) -> Tensor:
        """Values with the sinks' set to zero, through `hook_v`."""
        at_sink = self.layout.is_sink(values.shape[1], values.device)
        found: Tensor = self.hook_out(values.masked_fill(at_sink[:, None], 0.0))
        return found


class DiffusionAttentionBridge(PositionEmbeddingsAttentionBridge):
    """TransformerLens's rotary attention with the masks of this library's families.

    Bidirectional or causal, with learned sink tokens (a sink sees only itself, everyone sees all sinks), with
    gated attention, and with a float32 rotation that goes back to the model's dtype. The numbers are those of
    the native model with `attn_implementation="hooked"`.

    `hook_z` is what the output projection reads, so that z W_O sums to `hook_attn_out`. With gated attention that
    is behind the gate; `hook_z_ungated` is the mixed value before it, and `hook_gate` the gate before its sigmoid.
    """

    def set_original_component(self, component: nn.Module) -> None:
        """Wrap the native attention module."""
        super().set_original_component(component)
        self.layout = SinkLayout.of(component)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What is added to the residual stream [batch, position, d_model], and the pattern."""
        lock: ModelLock | None = self.original_component.lock
        if lock is not None and not torch.compiler.is_compiling():
            lock.check_thread()
        hidden_states = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        mask, tables = kwargs.pop("attention_mask", None), kwargs.pop("position_embeddings")
        hidden_states = self.hook_in(hidden_states)
        q, k, v = (heads.transpose(1, 2) for heads in self._project(hidden_states))
        cos, sin = self._apply_position_embedding_hooks(tables)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        q, k = self.hook_rot_q(q.to(v.dtype)), self.hook_rot_k(k.to(v.dtype))
        k, v = self._update_kv_cache(k, v, **kwargs)
        z, pattern = self._attend(q, k, v, mask)
        return self._output(z, hidden_states), pattern

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each [batch, position, head, d_head]."""
        width = self.original_component.head_dim
        split, forked = self.config.use_split_qkv_input, self.config.use_attn_in
        if not (split or forked):
            found = (part(hidden_states).unflatten(-1, (-1, width)) for part in (self.q, self.k, self.v))
            q, k, v = found
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

    def _project_per_head_qkv(self, linear_bridge: Any, *args: Any) -> Tensor:
        """TransformerLens's projection of per-head inputs, with the sinks' values set to zero before `hook_v`."""
        if isinstance(linear_bridge, ZeroSinkValue):
            own = linear_bridge
            linear_bridge = SimpleNamespace(original_component=own.original_component, hook_out=own.hooked)
        projected: Tensor = super()._project_per_head_qkv(linear_bridge, *args)
        return projected

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Z [batch, position, head, d_head] and the pattern; both hook points fire inside."""
        host = self.original_component
        if self.layout.count:
            mask = self.layout.restrict(mask, q.shape[2], q.device)
        points = _Points(self.hook_attn_scores, self.hook_pattern, causal=self.is_causal, training=self.training)
        dropout = host.attention_dropout if self.training else 0.0
        options = {"scaling": host.scaling, "dropout": dropout, "spare_logits": spare_logits(host)}
        return hooked_attention(points, q, k, v, mask, **options)  # type: ignore[arg-type]

    def _output(self, z: Float[Tensor, "batch position head d_head"], hidden_states: Tensor) -> Tensor:
        heads, width = z.shape[-2:]
        flat = z.flatten(-2)
        if "gate" in self._modules:
            flat = self.hook_z_ungated(z).flatten(-2) * self.hook_gate(self.gate(hidden_states)).sigmoid()
        if self.config.use_attn_result:
            per_head = self.o.hook_in(flat).unflatten(-1, (heads, width))
            # The sum over heads is what the projection would have returned.
            return self.hook_out(self.o.hook_out(self._compute_per_head_result(per_head, heads, width)))
        return self.hook_out(self.o(flat))


class _Points:
    """The attention bridge's hook points under the names that `hooked_attention` asks for."""

    def __init__(self, scores: HookPoint, pattern: HookPoint, *, causal: bool, training: bool) -> None:
        self.submodules = {"hook_scores": scores, "hook_pattern": pattern}
        self.is_causal, self.training = causal, training

    def get_submodule(self, name: str) -> HookPoint:
        return self.submodules[name]
