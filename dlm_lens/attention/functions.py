"""The attention functions: `attend`, for transformers' attention interface, and the explicit one with hook points.

`attend` receives queries, keys and values after projections, norms, rotation and cache. While nothing reads scores
or a pattern, it calls the function that the model's config names (sdpa, which forms no pattern). Under "eager" and
"hooked" that is the explicit one, whose softmax is in float32, and not the eager function of the model's file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils.generic import is_flash_attention_requested

from dlm_lens.attention.fused_lse import fused_lse
from dlm_lens.attention.hook_attachment import column_calls
from dlm_lens.attention.hook_points import DISPATCH, UndispatchedModule, is_hooked_attention
from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.sink_layout import SinkLayout
from dlm_lens.attention.sliding_windows import smallest_window
from dlm_lens.attention.softmax_variants import spare_logits, with_spare_key
from dlm_lens.attention.streaming import stream_hidden, stream_mix
from dlm_lens.attention.visibility import AttentionPass

_known_masks: Any = WeakTensorKeyDictionary()
"""Mask -> its version and `_biases` of it, so that the layers of a pass look at it once: a GPU would wait."""

HOOKED = "hooked"
"""Name of the function that always materialises the pattern, for `attn_implementation=`."""


def hooked_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Bool[Tensor, "batch #head query key"] | Float[Tensor, "batch #head query key"] | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    spare_logits: Float[Tensor, "head"] | None = None,
    position_bias: Float[Tensor, "#batch #head query key"] | None = None,
    query_start: int | None = None,
    s_aux: Float[Tensor, "head"] | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch query head d_head"], Float[Tensor, "batch head query key"]]:
    """Attention with explicit scores and pattern, both passed through the hook points of `module`.

    scores = q k^T scale (masked entries: the dtype's minimum), pattern = softmax over keys in float32,
    z = pattern v. A query that sees no key gets a pattern of zeros, as in torch's fused kernel. With `softcap` c
    scores are c tanh(scores / c) (Gemma 2, 2408.00118, section 2). `spare_logits` b give every row a spare entry,
    pattern = exp(scores) / (exp(b) + sum exp(scores)), which is left out; `s_aux` is transformers' name
    for them. `position_bias` is added to the scores. `query_start` is the position of the first query among the
    keys; None if the queries are the last positions.
    Works for every mask of transformers' `sdpa` and `eager`: none, boolean (True = visible) or additive.

    Raises:
        ValueError: the mask is of another kind (flash attention's 2-D mask, flex attention's block mask).
    """
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if groups > 1:  # query head j reads key/value head j // groups; copies, as in transformers' eager function
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.mT).mul_(scale)  # in place: a pattern less to allocate
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    scores, visible = _masked(scores, attention_mask, causal=causal_without_mask(module, is_causal))
    current = AttentionPass(visible, spare_logits if s_aux is None else s_aux, query_start)
    points: Mapping[str, Any] = module._modules
    with _pass_at(points, current):
        scores = current.scores = points["hook_scores"](scores)
        pattern = points["hook_pattern"](current.softmax(scores).to(query.dtype))
    mixed = nn.functional.dropout(pattern, p=dropout, training=module.training) if dropout else pattern
    return (mixed @ value).transpose(1, 2).contiguous(), pattern  # modules take views of it


@contextmanager
def _pass_at(points: Mapping[str, Any], current: AttentionPass) -> Iterator[None]:
    """Set `attention_pass` of the points of scores and pattern while they run, for hooks that read it."""
    # Not by nn.Module's __setattr__, which looks for parameters, modules and buffers first.
    scores, pattern = vars(points["hook_scores"]), vars(points["hook_pattern"])
    # A hook may run another pass through the same module (`source="clean"` in a trace).
    outer = scores.get("attention_pass"), pattern.get("attention_pass")
    scores["attention_pass"] = pattern["attention_pass"] = current
    try:
        yield
    finally:
        scores["attention_pass"], pattern["attention_pass"] = outer


def _masked(
    scores: Float[Tensor, "batch head query key"], mask: Any, *, causal: bool
) -> tuple[Float[Tensor, "batch head query key"], Bool[Tensor, "..."] | None]:
    """Apply the mask; the second value is which keys each query sees, None for all."""
    queries, keys = scores.shape[-2:]
    if mask is None:
        # transformers leaves the mask out where a flag suffices: nothing is hidden, or attention is causal.
        if not causal or queries == 1:
            return scores, None
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=scores.device).tril()
    mask = _of_every_query(mask, queries)[..., :keys]
    floor = torch.finfo(scores.dtype).min
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, floor), mask
    return scores + mask, mask > floor


def _of_every_query(mask: Any, queries: int) -> Tensor:
    """A mask that says which keys each query sees.

    Raises:
        ValueError: the mask is of another kind (flash attention's 2-D mask, flex attention's block mask).
    """
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-2] in (1, queries):
        return mask
    kind = f"a {tuple(mask.shape)} tensor" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
    raise ValueError(
        f"the attention mask is {kind}; reading attention, scores or patterns needs a [batch, 1, query, key] mask: "
        "load the model with attn_implementation='sdpa' or 'hooked'"
    )


def causal_without_mask(module: Any, is_causal: bool | None) -> bool:
    """Whether attention is causal where transformers passes no mask, as its `sdpa` function decides."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


AttentionInterface.register(HOOKED, hooked_attention)
# Without an entry for masks too, transformers passes a custom function no padding mask, without a message.
AttentionMaskInterface.register(HOOKED, sdpa_mask)


def attend(
    module: Any,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    gate: Float[Tensor, "batch query width"] | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "batch query head d_head"], Float[Tensor, "batch head query key"] | None]:
    """Attention of a module with hook points: z, and the pattern where it was formed.

    Queries and keys that arrive in a wider dtype than the values (LLaDA rotates in float32) are rounded to it.
    Learned sink tokens of the config (`num_sinks`) see only themselves and are seen by all. `gate` is the gate
    before its sigmoid, which multiplies z ("One Token Is Enough", appendix A.2). `softcap`, `s_aux` (the learned
    logits of a spare softmax entry) and `position_bias` are those of transformers' attention functions;
    `query_start` is that of `hooked_attention`.

    Raises:
        RuntimeError: another thread's hooks, readers or trace are on the model.
        ValueError: the module has no hook points, or a mask of a kind that scores cannot be formed with or flash
            attention cannot apply, or its projections were replaced under a hook.
    """
    if not is_hooked_attention(module):
        raise ValueError(
            f"{type(module).__name__} calls the attention function of dlm_lens and has no hook points: use "
            'dlm_lens.add_hook_points(model), or model.set_attn_implementation("sdpa")'
        )
    points = module._modules
    if not torch.compiler.is_compiling():
        module.lock.check_thread()
        for name in ("hook_q", "hook_k"):
            if name in points:
                points[name].check_source()
    value = _zero_sink_values(module, value)
    query, key = query.to(value.dtype), key.to(value.dtype)
    value = _past_cache(points["hook_v"], value)
    query, key = _through(points["hook_rot_q"], query), _past_cache(points["hook_rot_k"], key)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    spare = options.pop("s_aux", None)
    mixed = _Call(
        module,
        query,
        key,
        value,
        _boolean_if_integer(attention_mask),
        scaling,
        dropout,
        spare_logits(module, query.device) if spare is None else spare,
        options.pop("query_start", None),
        options,
    ).run()
    z = points["hook_z"](mixed.z).contiguous()  # as transformers' functions return it: modules take views of it
    if mixed.inputs is not None:
        _read(module, mixed.inputs, z)
    return (z if gate is None else z * gate.sigmoid().view(z.shape)), mixed.pattern


AttentionInterface.register(DISPATCH, attend)


class _Mixed(NamedTuple):
    """z, the pattern where it was formed, and the inputs for readers if there are any."""

    z: Float[Tensor, "batch position head d_head"]
    pattern: Float[Tensor, "batch head query key"] | None = None
    inputs: AttentionInputs | None = None


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of an attention module's function."""

    module: Any
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    scale: float
    dropout: float
    spare: Tensor | None
    start: int | None
    options: dict[str, Any]

    def run(self) -> _Mixed:
        """Compute z, with a pattern where a hook or an option needs one."""
        layout = SinkLayout.of(self.module)
        if layout.count:
            return self._run_around_sinks(layout)
        if not self._materialises():
            return self._mix(self.q, self.mask, self.start)
        z, pattern = self._materialise(self.mask)
        return _Mixed(z, pattern, self._inputs_with(pattern, self.q, self.mask, self.start))

    def _run_around_sinks(self, layout: SinkLayout) -> _Mixed:
        """A sink's z is its own value, so the fused kernel runs on the canvas's queries alone.

        With the row of the sink in it, it would need a mask, which costs more than the sink
        (benchmarks/README.md).
        """
        length = self.q.shape[2]
        canvas = layout.canvas(length)
        if self.mask is not None and getattr(self.mask, "ndim", None) != 4:
            raise ValueError(
                f"{type(self.module).__name__} has learned sink tokens and got a mask of attn_implementation "
                f"{self.module.config.wrapped._attn_implementation!r}, in which they cannot be told from the "
                "canvas: load the model with attn_implementation='sdpa' or 'hooked'"
            )
        q, rows = self.q[:, :, canvas], None if self.mask is None else self.mask[:, :, canvas]
        if self._materialises():
            z, pattern = self._materialise(layout.restrict(self.mask, length, self.q.device))
            return _Mixed(z, pattern, self._inputs_with(pattern[:, :, canvas], q, rows, canvas.start))
        mixed = self._mix(q, rows, canvas.start)
        own = self.v[:, :, layout.sinks(length)].transpose(1, 2)
        return mixed._replace(
            z=layout.surround(mixed.z, own.repeat_interleave(self.q.shape[1] // self.v.shape[1], 2))
        )

    def _materialise(self, mask: Any) -> tuple[Tensor, Tensor]:
        self._check_window(mask)
        mask = self._of_flash(self.q, mask)
        given = {name: self.options.get(name) for name in ("is_causal", "softcap", "position_bias")}
        return hooked_attention(
            self.module,
            self.q,
            self.k,
            self.v,
            mask,
            self.scale,
            self.dropout,
            spare_logits=self.spare,
            query_start=self.start,
            **given,
        )

    def _mix(self, q: Tensor, mask: Any, own_start: int | None = None) -> _Mixed:
        """Mix without a pattern: by the config's attention function, or by the fused kernel with columns hidden."""
        for point in (self.module.hook_scores, self.module.hook_pattern):
            point.skip()
        calls = column_calls(self.module.hook_scores, self.module.hook_pattern)
        inputs = None
        if calls:
            given = self._inputs(q, mask, own_start)
            inputs = stream_hidden(given, calls)
            inputs = None if inputs is given else inputs
        if not self.module.hook_z.readers:
            return _Mixed(self._plain(q, mask) if inputs is None else stream_mix(inputs, self._learned()))
        sdpa = inputs is not None or self.module.config.wrapped._attn_implementation == "sdpa"
        with fused_lse(q, self.k, mask, sdpa=sdpa) as lse:
            z = self._plain(q, mask) if inputs is None else stream_mix(inputs, self._learned())
        return _Mixed(z, inputs=replace(inputs or self._inputs(q, mask, own_start), lse=lse.value))

    def _inputs_with(
        self, pattern: Tensor, q: Tensor, mask: Any, own_start: int | None = None
    ) -> AttentionInputs | None:
        """The inputs for readers, with a materialised pattern; None if there are no readers."""
        if not self.module.hook_z.readers:
            return None
        return replace(self._inputs(q, mask, own_start), pattern=pattern)

    def _plain(self, q: Tensor, mask: Any) -> Tensor:
        """The attention function that the model's config names."""
        name = self.module.config.wrapped._attn_implementation
        function = self.module.config.functions.get_interface(name, hooked_attention)
        options = {"scaling": self.scale, "dropout": self.dropout, **self.options}
        module = self.module
        if _is_flash(name):
            self._check_flash(name, mask)
            module = UndispatchedModule(module)
        if self.spare is None:
            z, _ = function(module, q, self.k, self.v, mask, **options)
        elif name == "sdpa":
            wide = with_spare_key(q, self.k, self.v, mask, self._learned(), self.scale)
            z, _ = function(module, *wide, **options)
            z = z[..., : self.v.shape[-1]]
        else:
            z, _ = function(module, q, self.k, self.v, mask, s_aux=self.spare, **options)
        return cast(Tensor, z)

    def _check_flash(self, name: str, mask: Any) -> None:
        """Refuse what flash attention cannot apply; version 2 leaves a spare entry out without a message."""
        softmax = getattr(self.module.config, "softmax", "standard")
        remedy = "load the model with attn_implementation='sdpa'"
        if isinstance(mask, Tensor) and mask.ndim == 4:
            raise ValueError(
                f"attn_implementation {name!r} hides padding alone, and in this pass queries of "
                f"{type(self.module).__name__} see different keys (blocks, an encoder): {remedy}"
            )
        if softmax != "standard":
            raise ValueError(
                f"attn_implementation {name!r} has no spare entry of the softmax, and the model's softmax is "
                f"{softmax!r}: {remedy}"
            )

    def _learned(self) -> Tensor | None:
        """The logits of the spare entry; None where they are 0 (off-by-one), or there is none."""
        # Configs of transformers with sink logits (gpt-oss) have no such field.
        return None if getattr(self.module.config, "softmax", None) == "off_by_one" else self.spare

    def _materialises(self) -> bool:
        scores, pattern = self.module.hook_scores, self.module.hook_pattern
        name = self.module.config.wrapped._attn_implementation
        if name in (HOOKED, "eager") or scores.listened_to() or pattern.listened_to():
            return True
        # Hooks after the softmax run in stream one at a time.
        if len(column_calls(pattern)) > 1:
            return True
        calls = column_calls(scores, pattern)
        if (calls or self.module.hook_z.readers) and self._unusual():
            return True
        # After the softmax, streams mix rows that sum to 1 without a spare entry.
        if column_calls(pattern) and self.spare is not None:
            return True
        # They mix the values without dropout, which is 0 but in training.
        if calls and self.dropout:
            return True
        # The fused kernel has no soft cap, and its causal flag would hide the spare key.
        bare = self.mask is None and causal_without_mask(self.module, self.options.get("is_causal"))
        return name == "sdpa" and (self.options.get("softcap") is not None or (self.spare is not None and bare))

    def _unusual(self) -> bool:
        """Whether scores are not q k^T of the visible keys."""
        options = (self.options.get(option) for option in ("softcap", "position_bias"))
        return any(each is not None for each in options) or _biases(self.mask)

    def _check_window(self, mask: Any) -> None:
        """Refuse to read a pass whose window is not in its mask: flash attention is given it beside the mask."""
        window, keys = self.options.get("sliding_window"), self.k.shape[2]
        name = self.module.config.wrapped._attn_implementation
        beside = mask is None or getattr(mask, "ndim", None) == 2
        if beside and window is not None and keys > window and _is_flash(name):
            raise ValueError(
                f"under attn_implementation {name!r} the sliding window of {window} keys is not in the attention "
                f"mask, and the pass has {keys} keys; reading attention, scores or patterns needs it there: load "
                "the model with attn_implementation='sdpa' or 'hooked'"
            )

    def _of_flash(self, q: Tensor, mask: Any) -> Any:
        """The mask that says all that flash attention hides; of other implementations as it is.

        Flash attention is given where padding is, [batch, key], or None, and causality beside it, by which the last
        query sees the last key. Nothing reads what queries of padding see.
        """
        padding = isinstance(mask, Tensor) and mask.ndim == 2
        if not (mask is None or padding) or not _is_flash(self.module.config.wrapped._attn_implementation):
            return mask
        queries, keys = q.shape[2], self.k.shape[2]
        content = mask[:, None, None, :keys].bool() if padding else None
        causal = queries > 1 and causal_without_mask(self.module, self.options.get("is_causal"))
        if not causal or (content is None and queries == keys):
            return content
        before = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        return before if content is None else before & content

    def _inputs(self, q: Tensor, mask: Any, own_start: int | None = None) -> AttentionInputs:
        self._check_window(mask)
        visible = self._of_flash(q, mask)
        queries, keys = q.shape[2], self.k.shape[2]
        if visible is not None:
            visible = _of_every_query(visible, queries)[..., :keys]
            if visible.dtype != torch.bool:
                visible = visible > torch.finfo(visible.dtype).min / 2
        causal = visible is None and queries > 1
        causal = causal and causal_without_mask(self.module, self.options.get("is_causal"))
        if causal and own_start is None and keys > queries:
            own_start = 0  # an empty static cache: as in the fused kernel, the first query sees the first key
        layer = self.module.hook_layer
        return AttentionInputs(
            layer,
            q,
            self.k,
            self.v,
            self.scale,
            visible,
            causal=causal,
            own_start=own_start,
            window=smallest_window(self.module.config),
            spare=self.spare,
        )


def _is_flash(name: str | None) -> bool:
    """Whether this implementation is one of flash attention's, of a package or from the hub."""
    return is_flash_attention_requested(requested_attention_implementation=name)


def _biases(mask: Any) -> bool:
    """Whether a mask adds something to scores of visible keys (Doge; relative positions of a user's own mask)."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        return False
    version = None if mask.is_inference() else mask._version
    known = _known_masks.get(mask)
    if known is None or version is None or known[0] != version:
        known = version, bool(((mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)).any())
        _known_masks[mask] = known
    return known[1]


def _read(module: Any, inputs: AttentionInputs, z: Float[Tensor, "batch position head d_head"]) -> None:
    # Queries may be the canvas's alone, where z has the sinks' positions too.
    queries = z if z.shape[1] == inputs.q.shape[2] else z[:, inputs.own]
    for reader in module.hook_z.readers:
        reader(replace(inputs, z=queries))


def _through(point: Any, heads: Float[Tensor, "batch head position d_head"]) -> Tensor:
    """Pass a tensor through its hook point, at which the heads come after the positions."""
    passed: Tensor = point(heads.transpose(1, 2))
    return passed.transpose(1, 2)


def _past_cache(point: Any, heads: Float[Tensor, "batch head position d_head"]) -> Tensor:
    """Pass keys or values, which a cache may hold, through their hook point; where it is listened to, a copy."""
    # An edit in place would reach what the cache keeps for later passes.
    return _through(point, heads.clone() if point.listened_to() else heads)


def _zero_sink_values(module: Any, value: Tensor) -> Tensor:
    """The values, with those of learned sink tokens zero where the config says so (Table 5)."""
    if not getattr(module.config, "zero_sink_value", False):
        return value
    at_sink = SinkLayout.of(module).is_sink(value.shape[2], value.device)
    return value.masked_fill(at_sink[:, None], 0.0)


def _boolean_if_integer(mask: Any) -> Any:
    """A mask [batch, heads, query, key] of integers 0 and 1 as boolean; added to scores it would hide nothing."""
    whole = isinstance(mask, Tensor) and mask.ndim == 4 and not mask.is_floating_point()
    return mask.bool() if whole else mask
