"""The two halves of a sampler, as modules: `propose` says what would be written, `select` what is written now."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


@dataclass(frozen=True)
class StepPlan:
    """Where a run stands before a step; Python numbers only.

    `remaining` counts the steps left in the block, this one included; `span` is the block in canvas positions.
    """

    index: int
    total: int
    block: int
    span: tuple[int, int]
    remaining: int


class Proposal(NamedTuple):
    """x0 and its confidence; the canvas's own token and -inf where nothing is proposed."""

    tokens: Int[Tensor, "batch position"]
    confidence: Float[Tensor, "batch position"]


class Select(nn.Module):
    """Choose the `count` most confident eligible positions of every row; of equals, the earlier one."""

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions to write now."""
        order = confidence.argsort(dim=-1, descending=True, stable=True)
        # Eligible positions first, whatever their confidence: -inf among them must not tie with the others.
        first = eligible.gather(-1, order).byte().argsort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, first)
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
        )
        return (rank < count[:, None]) & eligible


@dataclass(frozen=True)
class SpecialIds:
    """Token ids that samplers treat specially."""

    mask: int
    eos: int | None = None
    eot: int | None = None


class Sampler(nn.Module):
    """One sampling algorithm: a schedule and the modules `propose` and `select`.

    The loop asks, at every step, which positions are `eligible` and how many of them to write (`count`), and
    hands both to the modules. A subclass per algorithm; hosts hook the two children.
    """

    propose: nn.Module
    select: nn.Module
    cfg_scale: float = 0.0
    unpadded: bool = False  # whether the network sees padding as content: a quirk
    proposes_all: bool = False  # whether to propose where nothing would be written too, for a host to choose from
    hides_prompt: bool = False  # whether guidance masks all of the prompt's positions, or what was no mask at first

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step of the run, in order."""
        raise NotImplementedError

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Positions that may be written at this step."""
        raise NotImplementedError

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions each row writes at this step."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on beside the canvas and the random numbers; nothing, for most."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from such a state."""

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether the run ends with this step, whatever the plans say; asked once, behind every step."""
        return False

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step: the next canvas (a new tensor), what was proposed, what was written.

        `logits` has a row for every True of `evaluated`, in row-major order.
        """
        eligible = self.eligible(masked, plan)
        proposal: Any = self.propose(canvas, logits, evaluated, eligible)
        unmasked = self.select(proposal[1], eligible, self.count(eligible, masked, plan))
        return torch.where(unmasked, proposal[0], canvas), Proposal(*proposal), unmasked
