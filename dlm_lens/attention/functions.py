"""Attention with explicit scores and pattern, which pass through hook points."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from dlm_lens.attention.attention_pass import AttentionPass

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
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch query head d_head"], Float[Tensor, "batch head query key"]]:
    """Attention with explicit scores and pattern, both passed through the hook points of `module`.

    scores = q k^T scale (masked entries: the dtype's minimum), pattern = softmax over keys in float32,
    z = pattern v. A query that sees no key gets a pattern of zeros, as in torch's fused kernel. With `softcap` c
    scores are c tanh(scores / c) (Gemma 2, 2408.00118, section 2). `spare_logits` b give every row a spare entry,
    pattern = exp(scores) / (exp(b) + sum exp(scores)), which is left out. `position_bias` is added to the scores.
    Works for every mask of transformers' `sdpa` and `eager`: none, boolean (True = visible) or additive.

    Raises:
        ValueError: the mask is of another kind (flash attention's 2-D mask, flex attention's block mask).
    """
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Query head j reads key/value head j // groups; a broadcast axis avoids copying keys and values.
    grouped = rearrange(query, "b (g n) q d -> b g n q d", n=groups)
    scores = rearrange(grouped @ key.unsqueeze(2).mT, "b g n q k -> b (g n) q k") * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    scores, visible = _masked(scores, attention_mask, causal=causal_without_mask(module, is_causal))
    known = AttentionPass(visible, spare_logits)
    with _known_at(module, known):
        scores = known.scores = module.get_submodule("hook_scores")(scores)
        pattern = module.get_submodule("hook_pattern")(known.softmax(scores).to(query.dtype))
    mixed = nn.functional.dropout(pattern, p=dropout, training=module.training)
    z = rearrange(mixed, "b (g n) q k -> b g n q k", n=groups) @ value.unsqueeze(2)
    return rearrange(z, "b g n q d -> b q (g n) d"), pattern


@contextmanager
def _known_at(module: nn.Module, known: AttentionPass) -> Iterator[None]:
    """Leave what is known of the pass at the points of scores and pattern, for hooks that ask."""
    points: list[Any] = [module.get_submodule(f"hook_{name}") for name in ("scores", "pattern")]
    # A hook may run another pass through the same module (`source="clean"` in a trace).
    outer = [getattr(point, "attention_pass", None) for point in points]
    for point in points:
        point.attention_pass = known
    try:
        yield
    finally:
        for point, before in zip(points, outer, strict=True):
            point.attention_pass = before


def _masked(
    scores: Float[Tensor, "batch head query key"], mask: Any, *, causal: bool
) -> tuple[Float[Tensor, "batch head query key"], Bool[Tensor, "..."] | None]:
    """Apply the mask; the second value says which keys each query sees, None for all."""
    queries, keys = scores.shape[-2:]
    if mask is None:
        # transformers leaves the mask out where a flag says it all: nothing is hidden, or a causal prefix is.
        if not causal or queries == 1:
            return scores, None
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=scores.device).tril()
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-2] not in (1, queries):
        kind = f"a {tuple(mask.shape)} tensor" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(
            f"the attention mask is {kind}; watching scores or patterns needs a [batch, 1, query, key] mask: "
            "load the model with attn_implementation='sdpa' or 'hooked'"
        )
    mask = mask[..., :keys]
    floor = torch.finfo(scores.dtype).min
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, floor), mask
    return scores + mask, mask > floor


def causal_without_mask(module: Any, is_causal: bool | None) -> bool:
    """Whether attention is causal where transformers hands it no mask, as its `sdpa` function decides."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


AttentionInterface.register(HOOKED, hooked_attention)
# Without an entry for masks too, transformers hands a custom function no padding mask and says nothing.
AttentionMaskInterface.register(HOOKED, sdpa_mask)
