"""Tensors that SMDM's checkpoints hold as one and the host's layers as several, in both directions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps


class SplitGroups(ConversionOps):
    """The fused projection, whose rows are (group, [its queries, key, value], d_head), as q, k and v."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """One tensor to three."""
        config = kwargs["config"]
        (fused,) = _tensors(input_dict)
        groups = fused.view(config.num_key_value_heads, -1, config.head_dim, fused.shape[-1])
        queries = groups.shape[1] - 2
        parts = groups.split([queries, 1, 1], 1)
        return {name: part.flatten(0, 2).contiguous() for name, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """For saving."""
        return FuseGroups()


class FuseGroups(ConversionOps):
    """q, k and v as the fused, interleaved projection."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Three tensors to one."""
        config = kwargs["config"]
        parts = [
            part.view(config.num_key_value_heads, -1, config.head_dim, part.shape[-1])
            for part in _tensors({name: input_dict[name] for name in source_patterns})
        ]
        return {target_patterns[0]: torch.cat(parts, 1).flatten(0, 2)}

    @property
    def reverse_op(self) -> ConversionOps:
        """For loading."""
        return SplitGroups()


class SplitSinks(ConversionOps):
    """The embedding's rows as token rows and sink rows; without sinks there is nothing to split."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """One tensor to one or two."""
        config = kwargs["config"]
        (rows,) = _tensors(input_dict)
        if not config.num_sinks:
            return {target_patterns[0]: rows}
        parts = rows[: config.embedding_rows].contiguous(), rows[config.embedding_rows :].contiguous()
        return dict(zip(target_patterns, parts, strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        """For saving."""
        return JoinSinks()


class JoinSinks(ConversionOps):
    """Token rows and sink rows as one embedding."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """One or two tensors to one."""
        held = {name: input_dict[name] for name in source_patterns if name in input_dict}
        return {target_patterns[0]: torch.cat(_tensors(held))}

    @property
    def reverse_op(self) -> ConversionOps:
        """For loading."""
        return SplitSinks()


def _tensors(held: Mapping[str, Any]) -> list[Tensor]:
    return [value[0] if isinstance(value, list) else value for value in held.values()]
