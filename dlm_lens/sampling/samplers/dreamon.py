"""DreamOn's sampler: a step decides a mask, deletes it or makes two of it, so that the text changes its length."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.sampling.algorithm_registry import Algorithm
from dlm_lens.sampling.denoising_run import DenoisingRun, Proposal, StepPlan
from dlm_lens.sampling.moved_tokens import NOWHERE, answer_of
from dlm_lens.sampling.network import CanvasLogits, network_inputs
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.base import FirstCanvas, Sampler
from dlm_lens.sampling.samplers.dream import OF_THE_RULE, DreamPropose, SelectDrawn
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.samplers.wedlm import RowDraws
from dlm_lens.sampling.settings import (
    SpecialIds,
    answer_settings,
    at_least_one,
    known_remasking,
    not_negative,
    positive_share,
)

REMASKING = ("entropy", "maskgit_plus", "topk_margin")


@dataclass(frozen=True)
class DreamOnSettings:
    """Settings of DreamOn's `diffusion_generate` (2602.01326; Dream-org/DreamOn-v0-7B, generation_utils.py).

    Args:
        gen_length: how many positions the text may grow by: a gap of m masks gets at most m + gen_length tokens
            (their `max_new_tokens`), and a prompt without masks an answer of at most gen_length.
        start_length: masks that such an answer begins with, at most gen_length.
        temperature: 0 takes the most likely token.
        remasking: the rule of the confidence, of Dream's.
        top_p: sample from the smallest set of tokens with this probability.
        top_k: sample from the k most likely tokens, after `top_p`; None for all.
        alg_temp: above 0 positions are drawn, from softmax(confidence / alg_temp).
        tokens_per_step: masks of a row that a step decides, deletes or expands (`number_transfer_tokens`).
        expand_budget: expansions of a row; None for twice the positions from its first mask to the canvas's end.
        delete_to_right: a deleted mask takes with it all later masks of its row (`pad_delete_to_right`).

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    start_length: int = 4
    temperature: float = 0.0
    remasking: str = "entropy"
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    tokens_per_step: int = 1
    expand_budget: int | None = None
    delete_to_right: bool = False

    def __post_init__(self) -> None:
        at_least_one(self, "start_length", "tokens_per_step", "top_k")
        not_negative(self, "temperature", "alg_temp", zero="greedy")
        not_negative(self, "expand_budget", zero="no expansion")
        positive_share(self, "top_p")
        known_remasking(self.remasking, REMASKING, REMASKING, "DreamOn")


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings, then the checkpoint's; how many steps run depends on the tokens."""
    values = answer_settings(defaults, given, masks)
    return {name: value for name, value in values.items() if name != "steps" or name in given}


class MaskDraws(RowDraws):
    """The random stream of code that draws among the masks of one row: their tokens, then which of them to take."""

    def draw(
        self,
        weights: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """`torch.multinomial` over the eligible positions of each row."""
        chosen = torch.zeros(weights.shape, dtype=torch.bool)
        for row, (among, number) in enumerate(zip(eligible.cpu(), count.tolist(), strict=True)):
            if number:
                drawn = torch.multinomial(weights[row].cpu()[among].softmax(-1), number, generator=self.generator)
                chosen[row, among.nonzero()[drawn, 0]] = True
        return chosen.to(weights.device)


class SelectAmongMasks(Select):
    """Choose positions as `torch.topk` over the eligible ones alone does, which chooses among equal confidences."""

    by_topk = True

    def _of_topk(
        self, confidence: Float[Tensor, "batch position"], count: Int[Tensor, "batch"]
    ) -> Bool[Tensor, "batch position"]:
        chosen = torch.zeros_like(confidence, dtype=torch.bool)
        for row, number in enumerate(count.tolist()):
            among = (confidence[row] > -torch.inf).nonzero().flatten()
            chosen[row, among[confidence[row, among].topk(number).indices]] = True
        return chosen


class DreamOnPropose(DreamPropose):
    """x0 as Dream has it, without probability for a change of the length where the length may not change.

    Attributes:
        expand: the token that makes two masks of one.
        delete: the token that deletes a mask.
        full: the rows that may not grow.
        fixed: the positions that are neither deleted nor expanded.
    """

    expand: int
    delete: int
    full: Bool[Tensor, "batch"]
    fixed: Bool[Tensor, "batch position"]

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        fixed = self.fixed[evaluated]
        full = self.full[:, None].expand_as(evaluated)[evaluated]
        logits = logits.clone()
        logits[fixed | full, self.expand] = -torch.inf
        logits[fixed, self.delete] = -torch.inf
        return super().forward(canvas, logits, evaluated, eligible)


class RoomLogits(CanvasLogits):
    """Logits of canvases with room for masks that a sampler may insert, which is not seen.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        sampler: which knows the room of the present step.
    """

    def __init__(self, model: Any, content: Bool[Tensor, "batch position"], sampler: "DreamOnSampler") -> None:
        super().__init__(model, content)
        self.content, self.sampler = content, sampler

    def inputs_of(self, canvas: Int[Tensor, "batch position"]) -> dict[str, Any]:
        """What is seen of the canvas."""
        return self.sampler.inputs(self.model, self.content, canvas, 0)


class DreamOnSampler(Sampler):
    """Masks are decided, deleted (x0 is the end of the text) or become two (x0 is `expand_token_id`).

    Every row has a stretch of the canvas from its first mask to `gen_length` positions after its last, and what
    follows the last mask in the prompt is at the end of the canvas. Text and masks of the stretch are at its
    beginning. The masks after them are room: open, and not seen by the network, so that the row is what it is in a
    canvas without them. Where a mask is deleted or inserted, the tokens after it in the stretch move by a position:
    a step unmasks the open positions to which decided tokens move, and opens those that they leave.

    An expansion for which there is no room, or no budget, leaves the mask as it is. A mask that a caller puts
    outside the stretch (`on_canvas`) is decided. The authors' canvas ends with the room, and they cut what an
    expansion moves beyond its end; one prompt at a time.

    Attributes:
        rerun: whether it is for passes over a finished run.
    """

    propose: DreamOnPropose
    adaptive = True
    resizes: ClassVar[bool] = True
    moves_tokens: ClassVar[bool] = True
    rerun = True

    def __init__(
        self, settings: DreamOnSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        if ids.eos is None:
            raise ValueError(
                "DreamOn deletes a mask by the end of the text, and the model has no eos_token_id; give one to "
                "dlm_lens.load"
            )
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = MaskDraws(noise)
        self.settings, self.reference_quirks = settings, reference_quirks
        self.propose = DreamOnPropose(settings, noise, ids, reference_quirks)
        self.propose.delete = ids.eos
        self.propose.keeps_dtype = reference_quirks and bool(settings.alg_temp)
        by_rank = SelectAmongMasks() if reference_quirks else Select()
        self.select: nn.Module = SelectDrawn(noise, settings.alg_temp) if settings.alg_temp else by_rank
        self._span, self._plans, self.rerun = (0, 0), 0, False
        self._prompt: Tensor | None = None

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts with room after the last mask of each row, or after the prompt.

        Raises:
            ValueError: several prompts with `reference_quirks`, or a model without `expand_token_id`.
        """
        if self.reference_quirks and len(prompts) > 1:
            raise ValueError(
                f"the authors' code denoises one prompt at a time, and there are {len(prompts)}: leave "
                "reference_quirks out, or give one prompt"
            )
        if (expand := getattr(model.config, "expand_token_id", None)) is None:
            raise ValueError(f"{type(model).__name__} has no expand_token_id; load a DreamOn checkpoint")
        self.propose.expand = int(expand)
        canvas, (width, positions) = super().begin(model, prompts, fillable), (prompts.shape[1], fillable.shape[1])
        room = positions - width
        places = []
        for row, masks in enumerate(self.open_positions(canvas, 0)[:, :width]):
            holes = masks.nonzero().flatten().tolist()
            if not holes:
                places.append((width, min(self.settings.start_length, room), positions))
                continue
            last = holes[-1] + 1
            places.append((holes[0], last - holes[0], last + room))
            canvas[row, last + room :] = prompts[row, last:]
            canvas[row, last : last + room] = int(self.mask_id or 0)
        self._first, self._length, self._stop = prompts.new_tensor(places).unbind(-1)
        rest, given = positions - self._first, self.settings.expand_budget
        self._budget = 2 * rest if given is None else torch.full_like(rest, given)
        self._span = (int(self._first.min()), positions)
        self._plans = int((2 * rest + 2 * self._budget).max())  # the bound of the authors' loop
        self._set_room(positions)
        return canvas

    def _set_room(self, positions: int) -> None:
        where = torch.arange(positions, device=self._first.device)
        stretch = (where >= self._first[:, None]) & (where < self._stop[:, None])
        room = stretch & (where >= (self._first + self._length)[:, None])
        self.attention, self.propose.fixed = replace(self.attention, room=room, prompt=self._prompt), ~stretch

    def network(self, model: Any, first: FirstCanvas) -> RoomLogits:
        """The network, which does not see the room."""
        return RoomLogits(model, first.content, self)

    def inputs(
        self,
        model: Any,
        content: Bool[Tensor, "batch seen"],
        canvas: Int[Tensor, "batch seen"],
        prompt_length: int,
    ) -> dict[str, Any]:
        """Arguments of a pass, which sees all but the room."""
        opened = canvas == model.config.mask_token_id
        return network_inputs(self.attention.seen_content(content, opened, canvas.shape[1]))

    @classmethod
    def room_of(cls, run: DenoisingRun, step: int | slice) -> Bool[Tensor, "*step batch position"] | None:
        """The room of a step, or several, of a finished run: open positions for which nothing was proposed."""
        proposed = (run.confidence[step] > -torch.inf) | (run.proposals[step] != run.canvases[:-1][step])
        return run.masked[:-1][step] & (~proposed | (run.unmasked[step] & run.confidence[step].isneginf()))

    def follow(self, run: DenoisingRun, step: int) -> None:
        """Take the room of a step of a finished run, and where its prompt is."""
        self.attention = replace(self.attention, room=self.room_of(run, step), prompt=~answer_of(run, step))

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """As many steps as the authors' loop has at most; those without a mask are left out."""
        return [StepPlan(i, self._plans, 0, self._span, self._plans - i) for i in range(self._plans)]

    def reach(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """All that the network sees; of a finished run its caller leaves out the room (`room_of`)."""
        everything = torch.ones_like(masked)
        return everything if self.rerun else self.attention.seen_content(everything, masked, masked.shape[1])

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Every mask that is no room."""
        return masked & self.reach(masked, plan)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """`tokens_per_step`, or all that are left."""
        return eligible.sum(-1).clamp(max=self.settings.tokens_per_step)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The rows that may not grow."""
        self.propose.full = (self._length >= self._stop - self._first) | (self._budget <= 0)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step: decide, then delete and expand; the proposal has the tokens that moved where they are now."""
        seen = self.reach(masked, plan)
        made, proposal, chosen = super().forward(canvas, logits, evaluated, masked, plan)
        made = self._resized(made, chosen & masked, masked, seen)
        unmasked = masked & ~self.open_positions(made, plan.index + 1)
        return made, Proposal(torch.where(unmasked, made, proposal.tokens), proposal.confidence), unmasked

    def _resized(
        self,
        canvas: Int[Tensor, "batch position"],
        chosen: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        seen: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "batch position"]:
        """The canvas without the masks that are deleted, and with two for one that is expanded."""
        assert self.mask_id is not None
        stretch, delete = ~self.propose.fixed, self.propose.delete
        seen = seen & stretch
        deleted, expanded = (chosen & stretch & (canvas == token) for token in (delete, self.propose.expand))
        if self.settings.delete_to_right:
            # The authors' code looks for the end of a text on all of the canvas, prompt included.
            ends = canvas.eq(delete) if self.reference_quirks else deleted
            deleted = masked & seen & (ends.cumsum(-1) > 0)
            expanded = expanded & ~deleted
        room = self._stop - self._first - seen.sum(-1) + deleted.sum(-1)
        canvas = canvas.masked_fill(expanded, self.mask_id)
        expanded = expanded & (expanded.cumsum(-1) <= torch.minimum(room, self._budget)[:, None])
        sizes = seen.long() + expanded.long() - deleted.long()
        target = self._first[:, None] + sizes.cumsum(-1) - sizes
        kept = seen & ~deleted
        made = canvas.masked_fill(stretch, self.mask_id)
        rows, places = kept.nonzero(as_tuple=True)
        made[rows, target[kept]] = canvas[kept]
        where = torch.arange(canvas.shape[1], device=canvas.device).expand_as(canvas)
        self.origins = where.masked_fill(stretch, NOWHERE)
        self.origins[rows, target[kept]] = places
        prompt = ~masked if self._prompt is None else self._prompt
        self._prompt = prompt & ~stretch
        self._prompt[rows, target[kept]] = prompt[kept]
        rows, places = expanded.nonzero(as_tuple=True)
        self.origins[rows, target[expanded] + 1] = places
        self._length, self._budget = sizes.sum(-1), self._budget - expanded.sum(-1)
        self._set_room(canvas.shape[1])
        return made

    def state(self) -> dict[str, Tensor]:
        """The lengths of the stretches without their room, the expansions left, and where the prompt is."""
        own = {} if self._prompt is None else {"prompt": self._prompt}
        return {**super().state(), "lengths": self._length, "budgets": self._budget, **own}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._length, self._budget, self._prompt = state["lengths"], state["budgets"], state.get("prompt")
        assert self.attention.room is not None
        self._set_room(self.attention.room.shape[1])


ALGORITHM = Algorithm(
    "dreamon",
    DreamOnSettings,
    DreamOnSampler,
    resolve,
    f"{OF_THE_RULE}; where the length may not change, among the tokens that leave it",
)
