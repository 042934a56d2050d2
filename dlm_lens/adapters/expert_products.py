"""Mixtures of experts in passes that have shapes alone: `lm.scan`, and models on the meta device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dlm_lens.placement import lacks_numbers

GROUPED = "grouped_mm"
"""transformers' products of groups of tokens; torch computes their shapes in bfloat16 alone (2.13)."""

BATCHED = "batched_mm"
"""transformers' products of one matrix per token, whose shapes are known in every dtype."""


@contextmanager
def shapes_of_experts(model: nn.Module) -> Iterator[None]:
    """A block in which the experts of `model` multiply in a way that has shapes in every dtype."""
    configs = _grouped(model)
    for config in configs:
        config._experts_implementation = BATCHED
    try:
        yield
    finally:
        for config in configs:
            config._experts_implementation = GROUPED


def check_meta_experts(model: nn.Module) -> None:
    """Check that a model on the meta device has no experts whose products torch has no shapes for.

    Raises:
        ValueError: it has.
    """
    weight = next(model.parameters())
    if lacks_numbers(model) and weight.dtype != torch.bfloat16 and _grouped(model):
        raise ValueError(
            f"torch has no grouped products of {weight.dtype} on the meta device, and the experts are set to "
            f"{GROUPED!r}: call model.set_experts_implementation({BATCHED!r}), or take the model in bfloat16 or on "
            "another device"
        )


def _grouped(model: nn.Module) -> list[Any]:
    """The configs by which modules of the model choose grouped products."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [one for one in configs.values() if getattr(one, "_experts_implementation", None) == GROUPED]
