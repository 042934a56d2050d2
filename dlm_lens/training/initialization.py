"""The network that a run starts from: a converted AR model, a DLM, or a new SMDM."""

import copy
import math
import warnings
from dataclasses import fields
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dlm_lens.adapters import family_of, load
from dlm_lens.adapters.families.smdm import SIZES, SMDMConfig, SMDMForMaskedLM
from dlm_lens.adapters.model_preparation import finish_model, prepare_config
from dlm_lens.adapters.tokenizer_files import load_tokenizer
from dlm_lens.arguments import level_of_caller
from dlm_lens.attention import find_sites
from dlm_lens.placement import seeded
from dlm_lens.training.conversion import convert
from dlm_lens.training.objective import NextToken
from dlm_lens.training.settings import ModelSettings, TrainingSettings

SCRATCH = "smdm-"

NEW = "new:"
"""Before the name of an AR checkpoint: its layout and tokenizer, with new weights."""


def build_model(settings: TrainingSettings) -> PreTrainedModel:
    """The network of the settings, in float32.

    Raises:
        ValueError: `start` is empty or an unknown size, a DLM comes with options of a conversion, or `tokenizer`
            is given for a checkpoint, which has its own.

    Warns:
        UserWarning: an AR baseline (`NextToken`) comes with options of a conversion, which it does not have.
    """
    chosen = settings.model
    if not chosen.start:
        raise ValueError("model.start is empty; name an AR checkpoint, a DLM, or a size such as smdm-472M")
    if chosen.start.startswith(SCRATCH):
        return new_smdm(chosen, settings.seed)
    if chosen.tokenizer is not None:
        raise ValueError(
            f"model.tokenizer is {chosen.tokenizer!r}, and {chosen.start} has its own; it is for sizes of SMDM: "
            "leave it out, or set it to null"
        )
    model = load(chosen.start.removeprefix(NEW), dtype=torch.float32)
    if chosen.start.startswith(NEW):
        model = _with_new_weights(model, settings.seed)
    options = [field for field in fields(chosen) if field.name not in ("start", "tokenizer")]
    changed = [f"model.{field.name}" for field in options if getattr(chosen, field.name) != field.default]
    if family_of(model.config.model_type).causal:
        if isinstance(settings.objective, NextToken):
            if changed:
                text = f"{', '.join(changed)} do not apply to an AR baseline (objective.kind next_token): not used"
                warnings.warn(text, stacklevel=level_of_caller())
            return model
        return convert(
            model,
            chosen.sinks,
            chosen.position,
            chosen.zero_value,
            chosen.gated,
            chosen.shift,
            softmax=cast(Any, chosen.softmax),
            seed=settings.seed,
        )
    if changed:
        raise ValueError(
            f"{chosen.start} is a DLM already, and {', '.join(changed)} apply only to AR checkpoints and new "
            "models: leave them out"
        )
    return model


def _with_new_weights(model: Any, seed: int) -> Any:
    """A network of the same layout as an AR model, with the initial weights of its class.

    Raises:
        ValueError: the model is a DLM.
    """
    family = family_of(model.config.model_type)
    if not family.causal:
        raise ValueError(f"model.start begins with {NEW!r}, which takes an AR checkpoint, and this is a DLM")
    with seeded(seed):
        new = type(model)(copy.deepcopy(model.config))
    finish_model(new.to(model.device, torch.float32), family, model.tokenizer)
    find_sites(new)
    return new


def smdm_config(chosen: ModelSettings) -> SMDMConfig:
    """The config of one of SMDM's sizes, with sinks or a gate.

    Raises:
        ValueError: an unknown size, or a softmax that SMDM's layers do not have.
    """
    size = chosen.start.removeprefix(SCRATCH)
    if size not in SIZES:
        names = ", ".join(SCRATCH + name for name in SIZES)
        raise ValueError(f"model.start {chosen.start!r} is not a size of SMDM; choose from {names}")
    if chosen.softmax != "standard":
        raise ValueError(f"SMDM's layers have no softmax {chosen.softmax!r}; only Qwen2 and Llama have it")
    return SMDMConfig(
        **SIZES[size],
        num_sinks=chosen.sinks,
        sink_placement=chosen.position,
        zero_sink_value=chosen.zero_value,
        gated_attention=chosen.gated,
        eos_token_id=2,
        bos_token_id=1,
        tie_word_embeddings=False,
    )


def new_smdm(chosen: ModelSettings, seed: int) -> PreTrainedModel:
    """An untrained SMDM, initialised as its authors do (ML-GSAI/SMDM, diffmodel.py)."""
    config = smdm_config(chosen)
    family = family_of(config.model_type)
    prepare_config(config, family)
    with seeded(seed):
        model = SMDMForMaskedLM(config)
        initialise_smdm(model)
    tokenizer = load_tokenizer(chosen.tokenizer, {}) if chosen.tokenizer else None
    if chosen.tokenizer and tokenizer is None:
        raise ValueError(
            f"model.tokenizer is {chosen.tokenizer!r}, which has no tokenizer; give another directory or hub name"
        )
    return finish_model(model, family, tokenizer)


@torch.no_grad()
def initialise_smdm(model: Any) -> None:
    """Normal weights with deviation sqrt(2 / (5 d)); 1 / (n sqrt(d)) for projections into the residual stream.

    d is the width, n the number of layers (ML-GSAI/SMDM, diffmodel.py).
    """
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            writes = name.endswith(("o_proj", "down_proj"))
            module.weight.normal_(0.0, 1 / math.sqrt(width) / layers if writes else math.sqrt(2 / 5 / width))
    if model.config.num_sinks:
        model.model.embed_tokens.sinks.normal_(0.0, math.sqrt(2 / 5 / width))
