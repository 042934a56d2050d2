"""Logits from the decoder's states: the final norm, the output embedding, and the scaling of some families."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dlm_lens.attention import SinkLayout, check_ids, decoder_of


def head_states(model: Any, states: Float[Tensor, "*state d_model"]) -> Float[Tensor, "*state d_model"]:
    """States that have passed the final norm, as the output embedding takes them.

    ModernBERT has a prediction head between the two (a dense layer, an activation, a norm): the module that its
    family names `prediction_head`, or `lm_head` where that is not the output embedding (its decoders).
    """
    head = getattr(model, "prediction_head", None)
    if head is None:
        head = model._modules.get("lm_head")
        embedding = model.get_output_embeddings()
        if head is None or embedding is None or any(each is embedding for each in head.modules()):
            return states
    return head(states)


def logit_scaling(model: Any) -> Callable[[Tensor], Tensor] | None:
    """What a family does to the logits after its output embedding, or None where it changes nothing.

    c tanh(u / c) with the config's `final_logit_softcapping` c (Gemma 2, 2408.00118, section 2), u times
    `logit_scale` (Cohere), u divided by `logits_scaling` (Granite), u times `lm_head_multiplier` (Falcon-H1).
    """
    config = model.config.get_text_config()
    factors = {
        name: getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "lm_head_multiplier")
    }
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is None and all(factor in (None, 1) for factor in factors.values()):
        return None

    def scaled(logits: Float[Tensor, "*state d_vocab"]) -> Float[Tensor, "*state d_vocab"]:
        """The scaled logits."""
        for name, factor in factors.items():
            if factor is not None:
                logits = logits / factor if name == "logits_scaling" else logits * factor
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    return scaled


def head_logits(model: Any, states: Float[Tensor, "*state d_model"]) -> Float[Tensor, "*state d_vocab"]:
    """Logits of states that have passed the final norm: u = W_U h, then `logit_scaling`; h as `head_states`.

    With the config's `float32_logits` (DiffusionGemma) u is scaled in float32 at least.
    `check_head` raises where a family does something else.
    """
    logits: Tensor = model.get_output_embeddings()(head_states(model, states))
    if getattr(model.config, "float32_logits", False):
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaling = logit_scaling(model)
    return logits if scaling is None else scaling(logits)


FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "embedding_norm", "norm_f",
               "layer_norm", "layernorm")  # fmt: skip
"""Names of the norm after the last layer."""


def final_norm(model: Any) -> nn.Module:
    """The norm after the last layer.

    Raises:
        ValueError: the decoder has none of a known name.
    """
    decoder = decoder_of(model)
    for name in FINAL_NORMS:
        found = getattr(decoder, name, None)
        if isinstance(found, nn.Module):
            return found
    raise ValueError(f"{type(model).__name__} has no final norm ({', '.join(FINAL_NORMS)}) that a lens could apply")


@torch.no_grad()
def decoder_logits(model: Any, *, causal: bool = True) -> Float[Tensor, "2 position d_vocab"]:
    """Logits of `check_ids` by way of the decoder and `head_logits`, as sampling computes them.

    Args:
        model: in eval mode.
        causal: whether the model must be causal.

    Raises:
        ValueError: the model has no decoder or no output embedding, or a token changes the states before it, so
            that it is not causal.
    """
    decoder = decoder_of(model) if hasattr(model, "get_decoder") else None
    head = model.get_output_embeddings()
    if decoder is None or decoder is model or head is None:
        raise ValueError(
            f"{type(model).__name__} has no decoder with an output embedding: it does not write text "
            "(get_decoder() and get_output_embeddings() give the two)"
        )
    ids = check_ids(model)
    states = decoder(input_ids=ids, use_cache=False).last_hidden_state
    states = states[:, SinkLayout.of(model).canvas(states.shape[1])]
    first, second = states.float()  # their tokens differ at the last position
    if causal and not float((second - first)[:-1].abs().max()) <= _tolerance(model) * float(first.abs().max()):
        raise ValueError(
            f"the last token changes what {type(model).__name__} computes before it: it is no autoregressive model "
            "(for an encoder, use dlm_lens.add_hook_points)"
        )
    # Where the layers lie on several devices, a model returns its logits on that of the ids.
    return head_logits(model, states).float().to(ids.device)


def check_head(model: Any, logits: Float[Tensor, "2 position d_vocab"], *, causal: bool = True) -> None:
    """Raise unless `head_logits` of a model's decoder's states are its logits, and it is causal if it must be.

    Args:
        model: in eval mode.
        logits: of `check_ids`, from the model itself.
        causal: whether the model must be causal.

    Raises:
        ValueError: they are not, or as `decoder_logits`.
    """
    got, expected = decoder_logits(model, causal=causal), logits.float()
    tolerance = _tolerance(model) * float(expected.abs().max())
    if got.shape != expected.shape or not float((got - expected).abs().max()) <= tolerance:
        raise ValueError(
            f"the logits of {type(model).__name__} are not its output embedding applied to its decoder's states: "
            "sampling and lenses cannot read it"
        )


def _tolerance(model: Any) -> float:
    """Float error of states and logits, as a share of the largest one."""
    return 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.05
