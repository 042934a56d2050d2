"""Logits of an answer that grows block by block in a bidirectional model, with an approximate cache (dLLM-Var)."""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from dlm_lens.sampling.cached_network import CachedLogits
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import network_inputs


def until(content: Bool[Tensor, "batch position"], stop: int) -> Bool[Tensor, "batch position"]:
    """The content before a position."""
    return content & (torch.arange(content.shape[1], device=content.device) < stop)


class GrowingLogits(CachedLogits):
    """Logits of steps that see nothing after their block (2510.24605; maomaocun/dLLM-Var).

    A step whose span begins before its block stores the span's keys and values: the block before it is computed
    for the last time, beside the masks of the new one. Other steps compute their block alone, and see what is
    stored before it.

    Args:
        model: from `dlm_lens.load`.
        content: False at the padding on the left.
    """

    def __init__(self, model: Any, content: Bool[Tensor, "batch position"]) -> None:
        super().__init__(model, content)
        self.content = content

    def enter(self, plan: StepPlan) -> None:
        """The step of the next passes, and the content that they see."""
        super().enter(plan)
        self.inputs = network_inputs(until(self.content, plan.span[1]))

    def replaces(self, plan: StepPlan) -> bool:
        """Whether the step's span begins before its block."""
        return plan.computed is not None and plan.computed[0] < plan.span[0]

    def predicts_from(self, plan: StepPlan, span: tuple[int, int]) -> int:
        """The span's first position: a block's first step may decide what is left of the block before."""
        return span[0]
