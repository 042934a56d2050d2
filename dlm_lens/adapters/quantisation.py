"""Quantised weights: which of transformers' quantisation methods can be loaded, and refusals of the others."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import AutoHfQuantizer

from dlm_lens.adapters.registry import Family
from dlm_lens.attention import hooked_attentions
from dlm_lens.printable import one_line, shown


def check_quantisation(
    source: str, family: Family, model_type: str, own: Any, requested: Any, device_map: Any
) -> float | None:
    """Refuse quantisation that cannot be loaded, before any weight is read.

    Args:
        source: the checkpoint's name in messages.
        family: of the checkpoint.
        model_type: of its config.
        own: quantization_config of config.json, None where its weights are plain.
        requested: quantization_config as given to `load`.
        device_map: as given to `load`.

    Returns:
        Bytes per weight of a matrix that is quantised while loading; None for plain and for quantised files.

    Raises:
        ImportError: the method's package is not installed.
        ValueError: an unknown method, a machine that it does not run on, or a family whose weights are split.
    """
    if own is None and requested is None:
        return None
    if family.conversions_in(model_type):
        raise ValueError(
            f"{source} is of the family {family.name}, whose checkpoints hold several projections in one tensor "
            "that is split while loading, which quantised weights cannot be: load plain weights without "
            'quantization_config, with dtype="bfloat16" for half the memory'
        )
    try:
        config = copy.deepcopy(
            requested if own is None else AutoHfQuantizer.merge_quantization_configs(dict(own), requested)
        )
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=own is not None)
        quantizer.validate_environment(device_map=device_map, weights_only=True)
    except ImportError as error:
        raise ImportError(_refusal(source, own, error, "install it, or load")) from error
    except (ValueError, TypeError, KeyError, RuntimeError, OSError, AttributeError) as error:
        raise ValueError(_refusal(source, own, error, "change quantization_config, or load")) from error
    return None if own is not None else quantizer.quantized_element_size


def check_quantised(model: PreTrainedModel, source: str) -> None:
    """Refuse a quantised model whose embedding, head or attention dlm_lens can no longer read.

    Raises:
        ValueError: the embedding or the head is quantised, or an attention module was replaced.
    """
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    for name, module in ends.items():
        weight = getattr(module, "weight", None)
        plain = isinstance(weight, Tensor) and type(weight.data) is Tensor and weight.is_floating_point()
        if not plain:
            raise ValueError(
                f"quantisation of {source} reaches the {name}, whose rows dlm_lens reads as vectors: leave it out "
                "(modules_to_not_convert, llm_int8_skip_modules or the like of your quantization_config)"
            )
    hooked = len(hooked_attentions(model))
    layers = int(model.config.num_hidden_layers)
    if hooked != layers:
        raise ValueError(
            f"quantisation of {source} replaced {layers - hooked} of {layers} attention modules, so that their "
            "hook points would never fire: switch fused modules off in the quantization_config"
        )


def _refusal(source: str, own: Any, error: Exception, remedy: str) -> str:
    what = "is quantised, which" if own is not None else "is to be quantised, which"
    plain = "a checkpoint that is not quantised" if own is not None else "it without quantization_config"
    return f"{source} {what} does not work here ({one_line(error)}): {remedy} {plain}"


def floating_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of a name; None for None and "auto", which leave it to the checkpoint.

    Raises:
        ValueError: no floating dtype of torch.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise ValueError(
            f'dtype {shown(dtype)} is none that weights are computed in; give "float32", "bfloat16", "float16", '
            '"float64" or None, and for 8 or 4 bits a quantization_config'
        )
    return found
