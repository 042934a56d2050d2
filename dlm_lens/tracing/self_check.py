"""The check of a wrapped model when it is loaded: its patterns can be read, are patterns, and can be edited."""

from typing import Any

import torch
from torch import Tensor

from dlm_lens.attention import (
    SinkLayout,
    attends_observed_first,
    attention_blocks,
    computed_span,
    mask_window_of,
)
from dlm_lens.placement import input_device

LENGTH = 6


class SelfCheckError(RuntimeError):
    """Patterns of the wrapped model are missing or wrong, or edits of them have no effect."""


@torch.no_grad()
def check_model(lm: Any) -> None:
    """Trace two tiny forwards and check the values at the hook points.

    Raises:
        SelfCheckError: a pattern of the wrong shape, rows that do not sum to 1, a future that is hidden where it
            should be seen (or seen where it should be hidden), or an edit that does not reach the logits.
    """
    module = lm._module
    ids = torch.arange(LENGTH, device=input_device(module))[None] % module.get_input_embeddings().weight.shape[0]
    if attends_observed_first(module.config):
        ids[:, 0] = module.config.mask_token_id  # a mask sees the tokens after it
    if mask_window_of(module.config) is not None:
        ids[:, 1] = module.config.mask_token_id  # the token before a mask sees it
    block = attention_blocks(module)[-1]  # the last layer may have no attention (Jamba)
    last = next(index for index, layer in enumerate(lm.layers) if layer._module is block)
    pattern, logits = _clean(lm, ids, last)
    length = LENGTH + SinkLayout.of(module).count
    start, stop = computed_span(module, LENGTH) or (0, length)
    expected = (1, module.config.num_attention_heads, stop - start, length)
    if tuple(pattern.shape) != expected:
        raise SelfCheckError(_message(last, f"has shape {tuple(pattern.shape)}, not {expected}"))
    sums = pattern.float().sum(-1)
    # With a spare entry in the softmax (ours, or gpt-oss's learned logits) a row may sum to anything up to 1.
    learned = getattr(lm.layers[last].attn._module, "sinks", None) is not None
    spare = learned or getattr(module.config, "softmax", "standard") != "standard"
    error = float((sums - 1).clamp(min=0.0 if spare else -torch.inf).abs().max())
    if not error < 1e-2:
        raise SelfCheckError(_message(last, f"has rows that miss 1 by {error:.2g}"))
    causal = lm.causal or mask_window_of(module.config) == 1
    if bool(pattern.float().triu(1).sum() > 0) == causal:
        raise SelfCheckError(_message(last, f"{'sees' if causal else 'does not see'} later positions"))
    if torch.equal(_edited(lm, ids, last), logits):
        raise SelfCheckError(_message(last, "can be read, but an edit of it does not change the logits"))


def _clean(lm: Any, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    with lm.trace(ids):
        pattern = lm.layers[layer].attn.pattern.save()
        logits = lm.lm_head.output.save()
    return pattern, logits


def _edited(lm: Any, ids: Tensor, layer: int) -> Tensor:
    with lm.trace(ids):
        lm.layers[layer].attn.pattern = torch.zeros_like(lm.layers[layer].attn.pattern)
        logits: Tensor = lm.lm_head.output.save()
    return logits


def _message(layer: int, what: str) -> str:
    return (
        f"self-check: the pattern of layer {layer} {what}; load the model with dlm_lens.load "
        "(attn_implementation 'sdpa' or 'hooked'), or pass check=False to use it as it is"
    )
