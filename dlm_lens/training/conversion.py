"""`convert`: an autoregressive checkpoint becomes a masked DLM, to be trained further."""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dlm_lens.adapters import load
from dlm_lens.adapters.model_preparation import finish_model, prepare_config
from dlm_lens.adapters.registry import family_of
from dlm_lens.attention import Placement
from dlm_lens.attention.softmax_variants import Softmax
from dlm_lens.placement import in_float64, seeded

logger = logging.getLogger(__name__)

TARGETS = {"qwen2": "sink_qwen", "llama": "sink_llama"}
"""model_type of an AR checkpoint -> model_type of the DLM."""

MASK = "<|mask|>"

DROPPED = frozenset(
    {"architectures", "model_type", "auto_map", "use_cache", "dtype", "torch_dtype", "transformers_version"}
)


def convert(
    model_name_or_path: str | Path | PreTrainedModel,
    sinks: int = 1,
    position: Placement = "front",
    zero_value: bool = False,
    gated: bool = False,
    shift: bool = True,
    *,
    softmax: Softmax = "standard",
    mask_token: str = MASK,
    mask_token_id: int | None = None,
    dtype: str | torch.dtype | None = torch.float32,
    seed: int = 0,
) -> PreTrainedModel:
    """Turn a Qwen2 or Llama checkpoint into a masked DLM with the same weights.

    Attention becomes bidirectional. A mask token is added: in a spare row of the embedding after the tokenizer's
    last id, or else in a new row of the embedding and the head. Its embedding is the mean of the other tokens'.
    Sinks, gate and sink logits are new and drawn from `seed`. Without them, the logits are those of the AR network
    without its causal mask. `save_pretrained` and `dlm_lens.load` round-trip the result.

    Args:
        model_name_or_path: a hub name, a directory, an embedded model, or a loaded AR model (which is not changed).
        sinks: learned sink tokens ("One Token Is Enough": 1).
        position: of the sinks, "front" or "end".
        zero_value: force the sinks' values to zero in every layer.
        gated: gated attention; W_g starts at zero, so the gate starts at 1/2.
        shift: the output at i - 1 predicts position i, as in the AR checkpoint (and in Dream).
        softmax: "standard", "off_by_one" or "sink_logits" (see `SinkFields`); the latter two exclude sinks.
        mask_token: the mask token's text in the tokenizer.
        mask_token_id: the mask token's id, for a model without a tokenizer.
        dtype: of the weights that are loaded; float32 for training, None for the checkpoint's own.
        seed: of the new weights.

    Raises:
        ValueError: not a Qwen2 or Llama checkpoint, one with quantised weights, or a mask token that is in use.
    """
    source = _ar_model(model_name_or_path, dtype)
    name = TARGETS[source.config.model_type]
    tokenizer = getattr(source, "tokenizer", None)
    tokenizer, mask, rows = with_mask_token(tokenizer, source.config.vocab_size, mask_token, mask_token_id)
    family = family_of(name)
    config_class, model_class = family.layouts[name]
    values = {k: v for k, v in source.config.to_dict().items() if k not in DROPPED}
    own = {
        "num_sinks": sinks, "sink_placement": position, "zero_sink_value": zero_value, "gated_attention": gated,
        "softmax": softmax, "logit_shift": shift, "vocab_size": rows, "mask_token_id": mask,
        "sampler": "dream" if shift else "llada", "sampler_defaults": None,
    }  # fmt: skip
    config = config_class(**values | own)
    config._attn_implementation = "sdpa"
    prepare_config(config, family, tokenizer)
    with seeded(seed):
        model = model_class(config)
    # Parameters alone: rotary frequencies stay in float32, as in a loaded model.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(source.dtype)
    _copy(source, model, mask)
    return finish_model(model.to(source.device), family, tokenizer)


def _ar_model(given: str | Path | PreTrainedModel, dtype: str | torch.dtype | None) -> Any:
    """The model to convert.

    Raises:
        ValueError: a model_type that cannot be converted, or quantised weights.
    """
    source: Any = load(str(given), dtype=dtype) if isinstance(given, str | Path) else given
    if source.config.model_type not in TARGETS:
        raise ValueError(
            f"{given if isinstance(given, str | Path) else type(source).__name__} is of model_type "
            f"{source.config.model_type!r}; an AR checkpoint of {' or '.join(TARGETS)} can be converted"
        )
    if getattr(source.config, "quantization_config", None) is not None:
        raise ValueError(
            f"{given if isinstance(given, str | Path) else type(source).__name__} has quantised weights, which a "
            "DLM to be trained cannot take over; load it without quantisation, or convert the checkpoint that it "
            "was made from"
        )
    return source


def with_mask_token(
    tokenizer: PreTrainedTokenizerBase | None, rows: int, spelling: str, mask: int | None
) -> tuple[Any, int, int]:
    """The tokenizer with a mask token, its id, and the rows that the embedding needs.

    Args:
        tokenizer: of the AR checkpoint, which is not changed; None for none.
        rows: of its embedding.
        spelling: of a mask token that is new.
        mask: id of the mask token; None for the tokenizer's own or a new one.

    Raises:
        ValueError: the mask token is in use, or its id lies outside the embedding.
    """
    if tokenizer is None:
        if mask is None:
            return None, rows, rows + 1
        if not 0 <= mask <= rows:
            raise ValueError(f"mask_token_id {mask} lies outside an embedding of {rows} rows (one may be added)")
        return None, mask, max(rows, mask + 1)
    if mask is not None and mask < len(tokenizer) and mask != tokenizer.mask_token_id:
        raise ValueError(
            f"the mask token {mask} is in use: it is the token {tokenizer.convert_ids_to_tokens(mask)!r}; leave "
            "mask_token_id out to add a new token"
        )
    new = len(tokenizer) if tokenizer.mask_token_id is None else int(tokenizer.mask_token_id)
    if mask is not None and mask != new:
        raise ValueError(f"mask_token_id is {mask}, and the tokenizer's mask token has the id {new}; leave it out")
    if tokenizer.mask_token_id is not None:
        return tokenizer, new, max(rows, new + 1)
    if tokenizer.convert_tokens_to_ids(spelling) not in (None, tokenizer.unk_token_id):
        raise ValueError(
            f"the mask token {spelling!r} is in use: it is token {tokenizer.convert_tokens_to_ids(spelling)} of "
            "the tokenizer; choose another mask_token"
        )
    # A copy, so that the AR model's tokenizer is not changed.
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"mask_token": spelling})
    added = int(tokenizer.mask_token_id)
    return tokenizer, added, max(rows, added + 1)


@torch.no_grad()
def _copy(source: Any, model: Any, mask: int) -> None:
    """Copy the weights of `source`; new rows and the mask token's row are the mean of the other tokens' rows."""
    weights = source.state_dict()
    state = model.state_dict()
    for name, target in state.items():
        if name not in weights:
            continue
        value = weights[name].to(target.device, target.dtype)
        target[: len(value)].copy_(value)
        if len(target) > len(value):
            target[len(value) :].copy_(_mean(value, len(target) - len(value)))
    embedding = model.get_input_embeddings().weight
    # Rows after the tokenizer's last id were never trained.
    tokenizer, rows = getattr(source, "tokenizer", None), len(weights["model.embed_tokens.weight"])
    used = rows if tokenizer is None else min(rows, len(tokenizer))
    others = embedding[:used][torch.arange(used, device=embedding.device) != mask]
    embedding[mask].copy_(_mean(others, 1)[0])
    if model.config.gated_attention:
        for layer in model.model.layers:
            layer.self_attn.gate_proj.weight.zero_()
    missing = sorted(name for name in weights if name not in state)
    if missing:
        raise ValueError(f"the checkpoint holds weights that the DLM lacks: {', '.join(missing[:5])}")


def _mean(rows: Tensor, number: int) -> Tensor:
    return in_float64(rows).mean(0, keepdim=True).to(rows).expand(number, -1)
