"""A model ready to denoise: values known by name, special ids, hook points, settings, the check of a few tokens."""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from dlm_lens.adapters.config_fields import REFUSALS
from dlm_lens.adapters.head import check_head, decoder_logits
from dlm_lens.adapters.registry import Family, families, fills_masks
from dlm_lens.attention import add_hook_points, check_hook_points, declare_sites
from dlm_lens.printable import one_line, shown

logger = logging.getLogger(__name__)


def known_values(
    family: Family, name: str, values: Mapping[str, Any], given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The values of the config that the caller gave, or that are known by the checkpoint's name.

    Args:
        family: of the checkpoint.
        name: of the checkpoint.
        values: of its config.json.
        given: special ids and sampler of the caller; None, or nothing, for those that were not given.

    Raises:
        ValueError: a mask token for a family that has none, or a sampler that the family does not have.
    """
    if given.get("mask_token_id") is not None:
        _check_masks(family, given["mask_token_id"], str(values.get("model_type")))
    requested = given.get("sampler")
    if requested is not None and not (isinstance(requested, str) and requested in family.samplers):
        raise ValueError(f"sampler is {shown(requested)}; {family.name} has {', '.join(family.samplers)}")
    chosen = values.get("sampler") if requested is None else requested
    own = family.hub_samplers.get(name) or next(iter(family.samplers))
    known: dict[str, Any] = {}
    if chosen is None:
        known["sampler"] = family.hub_samplers.get(name)
    is_own = chosen is None or (isinstance(chosen, str) and chosen == own)
    if is_own and values.get("trained_block_length") is None:
        known["trained_block_length"] = family.hub_block_lengths.get(name)
    if isinstance(requested, str) and requested != (values.get("sampler") or own) and "sampler_defaults" in values:
        known["sampler_defaults"] = {}  # those of the checkpoint are settings of its own sampler
    return {name: value for name, value in {**given, **known}.items() if value is not None}


def _check_masks(family: Family, mask_token_id: int, model_type: str) -> None:
    """Raise for a family whose models hold no mask token, which would be ignored.

    Raises:
        ValueError: naming the families of masked models that come with such a config.json, where there are some.
    """
    given = f"mask_token_id is {mask_token_id}"
    if family.causal:
        masked = [f"family={each.name!r}" for each in families() if model_type in each.adapted and not each.causal]
        remedy = f"for a masked diffusion model of these layers give {' or '.join(masked)}, else " if masked else ""
        raise ValueError(
            f"{given}, and the checkpoint is autoregressive by its model_type {shown(model_type)}: {remedy}leave "
            "mask_token_id out"
        )
    if not family.has_mask_token:
        raise ValueError(
            f"{given}, and {family.name} has no mask token: its positions hold random tokens until they are "
            "decided; leave mask_token_id out"
        )


def prepare_config(config: Any, family: Family, tokenizer: Any = None) -> None:
    """Fill in the special ids and check them; give the tokenizer mask and padding where the authors' code does.

    Raises:
        ValueError: an unknown sampler, a masked DLM without a mask token id, with one that has no embedding row, or
            with one that ends the text.
    """
    family.sampler_of(config)
    if family.causal:
        return
    if config.model_type in family.rows_of_tokenizer and tokenizer is not None:
        tokens = len(tokenizer)
        config.vocab_size = config.vocab_size if tokens <= config.vocab_size else tokens + tokens % 2
    for name, value in family.ids_of(config, tokenizer).items():
        if getattr(config, f"{name}_token_id", None) is None:
            setattr(config, f"{name}_token_id", value)
    if family.pad_token and getattr(tokenizer, "pad_token_id", 0) is None and len(tokenizer) == config.pad_token_id:
        tokenizer.add_special_tokens({"pad_token": family.pad_token})
    if not fills_masks(config):
        config.mask_token_id = None
        return
    tokenizer_mask = getattr(tokenizer, "mask_token_id", None)
    if config.mask_token_id is None:
        raise ValueError(
            "neither config.json nor the tokenizer names a mask token; pass mask_token_id= to dlm_lens.load"
        )
    rows = getattr(config, "embedding_rows", config.vocab_size)
    if not 0 <= config.mask_token_id < rows:
        raise ValueError(
            f"mask_token_id {config.mask_token_id} has no row in an embedding of {rows}; "
            "pass the right mask_token_id= to dlm_lens.load"
        )
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.mask_token_id in ends:
        raise ValueError(
            f"mask_token_id and eos_token_id are both {config.mask_token_id}, so that a masked position "
            "could not be distinguished from the end of the text; pass the right mask_token_id= or eos_token_id= "
            "to dlm_lens.load"
        )
    if tokenizer_mask is None and family.mask_token and tokenizer is not None:
        if len(tokenizer) == config.mask_token_id:
            tokenizer.add_special_tokens({"mask_token": family.mask_token})
    elif tokenizer_mask is not None and tokenizer_mask != config.mask_token_id:
        logger.warning(
            "the tokenizer's mask token is %d, the config's %d; the config is used",
            tokenizer_mask,
            config.mask_token_id,
        )


def finish_model(
    model: PreTrainedModel, family: Family, tokenizer: Any = None, eos_token_id: int | None = None
) -> PreTrainedModel:
    """Finish a model: hook points, tokenizer, the sampler's settings, ends of the text, eval mode.

    The text of an AR model ends as in transformers' `generate`, with the ids of its generation config.

    Args:
        model: to finish.
        family: of it.
        tokenizer: of it, or None.
        eos_token_id: the caller's id of the end of the text, or None for that of the checkpoint.
    """
    if eos_token_id is not None:
        model.generation_config.eos_token_id = eos_token_id
    add_hook_points(model)
    if not family.causal:  # of transformers' own classes only a pass of tokens tells which sites layers have
        declare_sites(model)
    extras: Any = model  # attributes that transformers' class does not declare
    extras.tokenizer = tokenizer
    generation = dict(getattr(model, "generation_settings", {}))
    if family.causal:
        generation["eos_token_id"] = getattr(model.generation_config, "eos_token_id", None)
    ends = generation.pop("eos_token_id", None)
    model.config.eos_token_id = model.config.eos_token_id if ends is None else ends
    own = getattr(model.config, "sampler_defaults", None) or {}
    extras.sampler_defaults = {**family.settings_of(model.config), **generation, **own}
    return model.eval()


def check_model(model: Any) -> None:
    """Raise unless hook points and output embedding work as the library assumes, on a few tokens.

    A model of transformers must be causal too. Costs two forward passes for a model of our families, three for one
    of transformers.

    Raises:
        ValueError: they are not.
    """
    native = type(model).__module__.startswith("transformers.")
    try:
        _check_logits(model, native)
    except (ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except REFUSALS as error:
        raise ValueError(
            f"a few tokens do not pass through {type(model).__name__} ({one_line(error)}): check its config.json"
        ) from error


def _check_logits(model: Any, native: bool) -> None:
    """Check the hook points and the head of a model.

    Of a model of transformers (native) the plain attention function and causality too.
    """
    try:
        # Sampling's logits with idle hook points, compared with the model's own logits, with patterns and without.
        check_hook_points(model, plain=native, idle=decoder_logits(model, causal=native))
    except ValueError:
        # With a pass of its own for each check, to name the part that is at fault.
        check_head(model, check_hook_points(model, plain=native), causal=native)
        raise
