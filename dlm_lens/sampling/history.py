"""`History`: the steps of a run so far, which become a `DenoisingRun`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.adapters.model_names import name_of
from dlm_lens.sampling.denoising_run import DenoisingRun, Proposal, StepPlan
from dlm_lens.sampling.settings import SpecialIds


def revised_positions(
    before: Int[Tensor, "batch position"],
    masked: Bool[Tensor, "batch position"],
    after: Int[Tensor, "batch position"],
    opened: Bool[Tensor, "batch position"],
) -> Bool[Tensor, "batch position"] | None:
    """Which decided positions a step rewrote or opened again; None: none.

    Args:
        before: the canvas that the step saw.
        masked: which of its positions were open.
        after: the canvas that the sampler made of it.
        opened: which positions of that are open.
    """
    revised = ((before != after) | opened) & ~masked
    return revised if bool(revised.any()) else None


class History:
    """The steps of a run so far, on the model's device; `result` moves them to the CPU at once.

    Canvases are kept without a copy: no code of the library edits a canvas in place.

    Args:
        model: whose end-of-text ids and tokenizer the result gets.
        attention_mask: True for content, False for padding.
        prompt_length: positions before the answer.
        settings: of the run; may be added to before `result`.
    """

    def __init__(
        self,
        model: Any,
        attention_mask: Bool[Tensor, "batch position"],
        prompt_length: int,
        settings: Mapping[str, Any],
    ) -> None:
        self.model, self.attention_mask = model, attention_mask
        self.prompt_length, self.settings = prompt_length, dict(settings)
        self.canvases: list[Tensor] = []
        self.masked: list[Tensor] = []
        self.proposals: list[Proposal] = []
        self.unmasked: list[Tensor] = []
        self.revised: list[Tensor | None] = []
        self.origins: list[Tensor | None] = []
        self.plans: list[StepPlan] = []
        self._needed: Tensor | None = None

    def start(
        self,
        canvas: Int[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        needing: Bool[Tensor, "batch"] | None = None,
    ) -> None:
        """Add the canvas that the next step sees, or the final one.

        Args:
            canvas: that canvas.
            masked: its open positions.
            needing: the rows that the step has something to do for, in runs that leave other steps out: alone, a
                row has no step after the last of these, and its `DenoisingRun.row_steps` end there. A row with
                nothing to write has the first one.
        """
        self.canvases.append(canvas)
        self.masked.append(masked)
        if needing is not None:
            before = torch.zeros_like(needing, dtype=torch.long) if self._needed is None else self._needed
            self._needed = torch.where(needing, len(self.plans) + 1, before)

    def finish(
        self,
        plan: StepPlan,
        proposal: Proposal,
        unmasked: Bool[Tensor, "batch position"],
        revised: Bool[Tensor, "batch position"] | None = None,
        origins: Int[Tensor, "batch position"] | None = None,
    ) -> None:
        """Add what the step proposed, unmasked, (None: nowhere) revised and (None: nothing) moved."""
        self.plans.append(plan)
        self.proposals.append(proposal)
        self.unmasked.append(unmasked)
        self.revised.append(revised)
        self.origins.append(origins)

    def state(self) -> dict[str, Tensor]:
        """The steps that the rows needed so far, for a run that is resumed."""
        return {} if self._needed is None else {"needed_steps": self._needed}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        self._needed = state.get("needed_steps")

    def cut(self, length: int) -> None:
        """Keep the first `length` positions of every canvas."""
        if length == self.attention_mask.shape[1]:
            return
        self.canvases = [canvas[:, :length] for canvas in self.canvases]
        self.masked = [masked[:, :length] for masked in self.masked]
        self.proposals = [Proposal(*(part[:, :length] for part in proposal)) for proposal in self.proposals]
        self.unmasked = [unmasked[:, :length] for unmasked in self.unmasked]
        self.revised = [None if revised is None else revised[:, :length] for revised in self.revised]
        self.plans = [replace(plan, span=(plan.span[0], min(plan.span[1], length))) for plan in self.plans]
        self.attention_mask = self.attention_mask[:, :length]

    def result(self) -> DenoisingRun:
        """The finished steps as a `DenoisingRun`; the canvas added last is the result."""
        shape = self.canvases[0].shape
        steps = len(self.plans)

        def stack(rows: list[Tensor], dtype: torch.dtype) -> Tensor:
            return torch.stack(rows).cpu().to(dtype) if rows else torch.empty(0, *shape, dtype=dtype)

        run = DenoisingRun(
            canvases=stack(self.canvases[: steps + 1], torch.long),
            masked=stack(self.masked[: steps + 1], torch.bool),
            proposals=stack([p.tokens for p in self.proposals], torch.long),
            confidence=stack([p.confidence for p in self.proposals], torch.float32),
            unmasked=stack(self.unmasked, torch.bool),
            revised=self._revised(),  # type: ignore[arg-type]
            attention_mask=self.attention_mask.cpu(),
            origins=self._origins(),
            prompt_length=self.prompt_length,
            spans=tuple(plan.span for plan in self.plans),
            blocks=tuple(plan.block for plan in self.plans),
            computed=spans_of(self.plans),
            settings=self.settings,
            eos_token_ids=SpecialIds.of(self.model.config).stops,
            tokenizer=getattr(self.model, "tokenizer", None),
            model=name_of(self.model),
            planned=self.plans[0].total if self.plans else None,
        )
        if self._needed is None:
            return run
        ends = torch.minimum(run.row_steps, self._needed.cpu().clamp(min=1))
        return run if ends.equal(run.row_steps) else replace(run, rows_ran=tuple(ends.tolist()))

    def _origins(self) -> Int[Tensor, "step batch position"] | None:
        """Where everything on the canvas after each step was before it; None: nothing moves."""
        found = [origins for origins in self.origins if origins is not None]
        return torch.stack(found).cpu() if found else None

    def _revised(self) -> Bool[Tensor, "step batch position"] | None:
        """Which positions the steps rewrote; None: none."""
        found = next((revised for revised in self.revised if revised is not None), None)
        if found is None:
            return None
        nothing = torch.zeros_like(found)
        return torch.stack([nothing if revised is None else revised for revised in self.revised]).cpu()


def spans_of(plans: Sequence[StepPlan]) -> tuple[tuple[int, int] | None, ...]:
    """What each step computes; empty if all compute all that they see."""
    found = tuple(plan.computed for plan in plans)
    return found if any(found) else ()
