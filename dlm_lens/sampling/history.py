"""What a run has done so far, collected step by step."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.result import Denoised
from dlm_lens.sampling.sampler import Proposal, StepPlan


class History:
    """Steps on the model's device; `result` moves them to the CPU at once.

    The canvases are kept, not copied: nobody edits a canvas in place.
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
        self.selected: list[Tensor] = []
        self.plans: list[StepPlan] = []

    def start(self, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]) -> None:
        """The canvas that a step (or nobody any more) is about to see."""
        self.canvases.append(canvas)
        self.masked.append(masked)

    def finish(self, plan: StepPlan, proposal: Proposal, selected: Bool[Tensor, "batch position"]) -> None:
        """What the step proposed and wrote."""
        self.plans.append(plan)
        self.proposals.append(proposal)
        self.selected.append(selected)

    def result(self) -> Denoised:
        """The finished steps as a `Denoised`; the last canvas started counts as the result."""
        shape = self.canvases[0].shape
        steps = len(self.plans)

        def stack(rows: list[Tensor], dtype: torch.dtype) -> Tensor:
            return torch.stack(rows).cpu().to(dtype) if rows else torch.empty(0, *shape, dtype=dtype)

        eos = getattr(self.model.config, "eos_token_id", None)
        ends = [
            *(eos if isinstance(eos, list | tuple) else [eos]),
            getattr(self.model.config, "eot_token_id", None),
        ]
        return Denoised(
            canvases=stack(self.canvases[: steps + 1], torch.long),
            masked=stack(self.masked[: steps + 1], torch.bool),
            proposals=stack([p.tokens for p in self.proposals], torch.long),
            confidence=stack([p.confidence for p in self.proposals], torch.float32),
            selected=stack(self.selected, torch.bool),
            attention_mask=self.attention_mask.cpu(),
            prompt_length=self.prompt_length,
            spans=tuple(plan.span for plan in self.plans),
            blocks=tuple(plan.block for plan in self.plans),
            settings=self.settings,
            eos_token_ids=tuple(int(i) for i in ends if i is not None),
            tokenizer=getattr(self.model, "tokenizer", None),
        )
