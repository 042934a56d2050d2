"""Samplers of uniform noise: open positions hold random tokens, and the sampler keeps which are open."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import Revise, Sampler


def positions_after(before: int, canvas_length: int | None, needed: int) -> int:
    """How many positions follow the prompt: those of the canvas, or without one those that are needed.

    Args:
        before: positions of the prompt that `canvas_length` counts, as authors' code does; else 0.
        canvas_length: of the settings.
        needed: by the answer, and what must follow it.

    Raises:
        ValueError: the canvas leaves too few.
    """
    if canvas_length is None:
        return needed
    if canvas_length - before < needed:
        raise ValueError(
            f"canvas_length is {canvas_length}, which with reference_quirks counts the {before} positions of the "
            f"prompt; give at least {before + needed}"
        )
    return canvas_length - before


class UniformNoiseSampler(Sampler):
    """A sampler whose answer begins as tokens drawn uniformly from the vocabulary, all open.

    Every step predicts each position of the answer, open or decided, and may rewrite it. Openness is no token id:
    the sampler keeps it, and it is part of the state that a run is resumed from. A position that was decided is
    `revised` where its token changes or it is opened again.

    Args:
        noise: source of the random tokens.

    Attributes:
        blank: the token of positions that no canvas has reached yet.
        writes_all: whether a step writes every running position, rather than those that `select` chooses.
        vocabulary: number of ids of random tokens, from the model's config.
    """

    blank = 0
    closes_rows = True
    writes_all = True

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.noise, self.vocabulary = noise, 0
        self.revise = Revise(-torch.inf)
        self._open = self._answer = torch.empty(0, dtype=torch.bool)

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts and an answer of random tokens."""
        where = torch.arange(fillable.shape[1], device=fillable.device)
        self._answer = self._open = (where >= prompts.shape[1]).expand(fillable.shape)
        self.vocabulary = int(model.config.vocab_size)
        blank = prompts.new_full((len(prompts), fillable.shape[1] - prompts.shape[1]), self.blank)
        return self._with_random(
            torch.cat([prompts, blank], 1), self._first_span(prompts.shape[1], fillable.shape[1])
        )

    def open_positions(self, canvas: Int[Tensor, "batch position"], step: int) -> Bool[Tensor, "batch position"]:
        """What the last finished step left open; before the first one the whole answer."""
        return self._open

    def running(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The positions that the step may write: the answer."""
        return self._answer

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The open ones among the running positions."""
        return masked & self.running(masked, plan)

    def editable(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The decided ones among the running positions."""
        return self.running(masked, plan) & ~masked

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """No number is planned."""
        return eligible.sum(-1)

    def writable(
        self, proposal: Proposal, running: Bool[Tensor, "batch position"]
    ) -> Bool[Tensor, "batch position"]:
        """The running positions that may take their proposals: all, for most."""
        return running

    def _with_random(
        self, canvas: Int[Tensor, "batch position"], span: tuple[int, int]
    ) -> Int[Tensor, "batch position"]:
        """The canvas with random tokens at the open positions of a span."""
        wanted = self._open[:, slice(*span)]
        drawn = self.noise.uniform_tokens(wanted, self.vocabulary)
        inside = torch.where(wanted, drawn, canvas[:, slice(*span)])
        return torch.cat([canvas[:, : span[0]], inside, canvas[:, span[1] :]], 1)

    def _first_span(self, start: int, stop: int) -> tuple[int, int]:
        """The part of the answer that is random at first: all of it."""
        return start, stop

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step: running positions take their proposals, and are decided where `select` chooses them.

        All of them do, or those alone that are chosen (`writes_all`); the others are then left as they are.
        """
        self.prepare(masked, plan)
        running = self.running(masked, plan)
        proposal = Proposal(*self.propose(canvas, logits, evaluated, running))
        written = self.writable(proposal, running)
        decided = self.select(proposal.confidence, written, self.count(written, masked, plan))
        if self.writes_all:
            self._open = torch.where(written, ~decided, self._open)
        else:
            self._open, written = self._open & ~decided, decided
        return self.canvas_after(canvas, proposal, written & masked, written & ~masked), proposal, decided & masked

    def state(self) -> dict[str, Tensor]:
        """What is open."""
        return {"open": self._open}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        self._open = state["open"]
