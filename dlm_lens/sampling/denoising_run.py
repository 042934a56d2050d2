"""`DenoisingRun`: what a denoising run did, step by step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import padding_before
from dlm_lens.sampling.samplers.base import Proposal, StepPlan


@dataclass(frozen=True, eq=False)
class DenoisingRun:
    """A finished run; all tensors are on the CPU.

    A step is one forward pass, counted from the most masked canvas; `canvases[t]` is what step t saw and
    `canvases[-1]` the result. For an AR baseline a step is one decoded token, and a position that is not yet
    written counts as masked (its token is a placeholder).

    Args:
        canvases: token ids x_t.
        masked: which positions of each canvas are masked (not yet written).
        proposals: x0, the token proposed for every position that was evaluated; elsewhere the canvas's own.
        confidence: what the ranking used; -inf where a position was not eligible.
        unmasked: which positions were written at each step.
        attention_mask: True for content, False for the padding on the left of shorter prompts.
        prompt_length: positions in front of the answer, padding included.
        spans: the block being decoded at each step, as (start, stop) canvas positions.
        blocks: its index at each step.
        settings: the sampler and every setting that it ran with, seeds included.
        eos_token_ids: ids that end a text.
        tokenizer: decodes `texts`; None if the model has none.
        rows_ran: how many steps each row ran, where runs of different lengths were joined (a recording of several
            batches); None if every row ran all.

    Raises:
        ValueError: the shapes contradict each other.
    """

    canvases: Int[Tensor, "step_plus_one batch position"]
    masked: Bool[Tensor, "step_plus_one batch position"]
    proposals: Int[Tensor, "step batch position"]
    confidence: Float[Tensor, "step batch position"]
    unmasked: Bool[Tensor, "step batch position"]
    attention_mask: Bool[Tensor, "batch position"]
    prompt_length: int
    spans: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]
    settings: Mapping[str, Any]
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Any = field(default=None, repr=False)
    rows_ran: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        steps, batch, positions = self.unmasked.shape
        expected = {
            "canvases": (steps + 1, batch, positions),
            "masked": (steps + 1, batch, positions),
            "proposals": (steps, batch, positions),
            "confidence": (steps, batch, positions),
            "attention_mask": (batch, positions),
        }
        for name, shape in expected.items():
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(f"DenoisingRun.{name} has shape {tuple(getattr(self, name).shape)}, not {shape}")
        if self.rows_ran is not None and len(self.rows_ran) != batch:
            raise ValueError(f"DenoisingRun.rows_ran has {len(self.rows_ran)} entries for {batch} rows")
        if not len(self.spans) == len(self.blocks) == steps:
            raise ValueError(f"{len(self.spans)} spans and {len(self.blocks)} blocks for {steps} steps")

    def __repr__(self) -> str:
        steps, batch, positions = self.unmasked.shape
        return f"DenoisingRun(steps={steps}, batch={batch}, positions={positions}, settings={dict(self.settings)})"

    @property
    def steps(self) -> int:
        """How many steps ran, T."""
        return self.unmasked.shape[0]

    @property
    def tokens(self) -> Int[Tensor, "batch position"]:
        """The final canvas."""
        return self.canvases[-1]

    @property
    def padding(self) -> Int[Tensor, "batch"]:
        """How many positions of each row are padding before its first token.

        Tables, figures and reports count positions from that token; `position + padding` is the canvas position,
        which indexes tensors (tables have it as `canvas_position`).
        """
        return padding_before(self.attention_mask)

    @property
    def row_steps(self) -> Int[Tensor, "batch"]:
        """How many steps each row ran, see `rows_ran`; behind them nothing of a row is defined."""
        rows = len(self.attention_mask)
        return torch.tensor([self.steps] * rows if self.rows_ran is None else self.rows_ran, dtype=torch.long)

    def first_steps(self, count: int) -> "DenoisingRun":
        """The first `count` steps; the canvas that they leave is the last."""
        if count >= self.steps:
            return self
        per_step = ("proposals", "confidence", "unmasked", "spans", "blocks")
        per_canvas = ("canvases", "masked")
        parts: dict[str, Any] = {name: getattr(self, name)[:count] for name in per_step}
        parts |= {name: getattr(self, name)[: count + 1] for name in per_canvas}
        ran = None if self.rows_ran is None else tuple(min(count, steps) for steps in self.rows_ran)
        return replace(self, **parts, rows_ran=ran)

    @property
    def counts(self) -> Int[Tensor, "step batch"]:
        """How many positions each row wrote at each step."""
        return self.unmasked.sum(-1)

    @property
    def masks_left(self) -> Int[Tensor, "batch"]:
        """Masks on the final canvas; 0 unless an intervention or a reference quirk left some."""
        return self.masked[-1].sum(-1)

    @cached_property
    def step_of(self) -> Int[Tensor, "batch position"]:
        """The step at which a position was (last) written; -1 for the prompt and for what nothing wrote."""
        steps = torch.arange(1, self.steps + 1)[:, None, None]
        return (self.unmasked * steps).amax(0) - 1

    @property
    def progress(self) -> Float[Tensor, "step_plus_one batch"]:
        """Share of the answer (everything masked at the start) that is written, per canvas and row."""
        wanted = self.masked[0].sum(-1).clamp(min=1)
        return 1 - self.masked.sum(-1) / wanted

    @property
    def texts(self) -> list[str]:
        """Prompt and answer as text, up to the first end-of-text in the answer."""
        return [self._decode(row[: self._end(row)]) for row in self._contents()]

    @property
    def answers(self) -> list[str]:
        """The answer alone (behind the prompt) as text, up to the first end-of-text."""
        return [self._decode(row[: self._end(row)][len(row) - self._answer_length :]) for row in self._contents()]

    @property
    def _answer_length(self) -> int:
        return self.tokens.shape[1] - self.prompt_length

    def _contents(self) -> list[Tensor]:
        return [row[keep] for row, keep in zip(self.tokens, self.attention_mask, strict=True)]

    def _end(self, row: Tensor) -> int:
        start = len(row) - self._answer_length
        stops = torch.isin(row[start:], torch.tensor(self.eos_token_ids, dtype=row.dtype)).nonzero()
        return start + int(stops[0]) if len(stops) else len(row)

    def _decode(self, ids: Tensor) -> str:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; read .tokens, or set model.tokenizer before denoising")
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


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
        self.unmasked: list[Tensor] = []
        self.plans: list[StepPlan] = []

    def start(self, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]) -> None:
        """The canvas that a step (or nobody any more) is about to see."""
        self.canvases.append(canvas)
        self.masked.append(masked)

    def finish(self, plan: StepPlan, proposal: Proposal, unmasked: Bool[Tensor, "batch position"]) -> None:
        """What the step proposed and wrote."""
        self.plans.append(plan)
        self.proposals.append(proposal)
        self.unmasked.append(unmasked)

    def result(self) -> DenoisingRun:
        """The finished steps as a `DenoisingRun`; the last canvas started counts as the result."""
        shape = self.canvases[0].shape
        steps = len(self.plans)

        def stack(rows: list[Tensor], dtype: torch.dtype) -> Tensor:
            return torch.stack(rows).cpu().to(dtype) if rows else torch.empty(0, *shape, dtype=dtype)

        eos = getattr(self.model.config, "eos_token_id", None)
        ends = [
            *(eos if isinstance(eos, list | tuple) else [eos]),
            getattr(self.model.config, "eot_token_id", None),
        ]
        return DenoisingRun(
            canvases=stack(self.canvases[: steps + 1], torch.long),
            masked=stack(self.masked[: steps + 1], torch.bool),
            proposals=stack([p.tokens for p in self.proposals], torch.long),
            confidence=stack([p.confidence for p in self.proposals], torch.float32),
            unmasked=stack(self.unmasked, torch.bool),
            attention_mask=self.attention_mask.cpu(),
            prompt_length=self.prompt_length,
            spans=tuple(plan.span for plan in self.plans),
            blocks=tuple(plan.block for plan in self.plans),
            settings=self.settings,
            eos_token_ids=tuple(int(i) for i in ends if i is not None),
            tokenizer=getattr(self.model, "tokenizer", None),
        )
