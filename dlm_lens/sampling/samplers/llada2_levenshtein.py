"""LLaDA2.2's sampler: LLaDA2.1's blocks, whose steps also delete tokens and insert masks (Levenshtein editing)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.moved_tokens import NOWHERE
from dlm_lens.sampling.network import most_likely
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import Revise
from dlm_lens.sampling.samplers.llada import without
from dlm_lens.sampling.samplers.llada2 import BlockwiseSampler, BlockwiseSettings, resolve
from dlm_lens.sampling.settings import SpecialIds, at_least_one, not_negative

REPEATS = ("random", "least_confident")
"""How the position is chosen that gets another token where a block would repeat itself."""

TRIES = 5
"""How often a step tries other tokens for a block that would repeat itself."""


@dataclass(frozen=True, kw_only=True)
class LLaDA2LevenshteinSettings:
    """Settings of LLaDA2.2's `generate` (inclusionAI/LLaDA2.2-flash, as FLX-OSS/FluxServe describes it).

    Args:
        gen_length: tokens of the answer; the last block is decoded whole, `texts` end before.
        block_length: tokens of a block, counted from the text's first token.
        steps_per_block: steps over which the masks of a block are planned (`steps`); after them a step writes all.
        threshold: every mask whose proposal has a higher confidence is written.
        editing_threshold: a decided token is rewritten or deleted, or gets a mask before it, where that proposal
            has a higher confidence.
        max_post_steps: most steps of a block after the last of its first masks; the last of them writes all masks
            and neither deletes nor inserts. With 0 it is the step that writes the last of its first masks.
        repeats: which of the positions that a step changes gets another token where the block would be as it was
            after an earlier step: a "random" one, as in the authors' code, or the "least_confident", as in the
            servers SGLang and FluxServe.
        temperature: 0 alone: the most likely token is proposed.
        use_cache: compute finished blocks once, which is exact.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    steps_per_block: int = 32
    threshold: float = 0.5
    editing_threshold: float = 0.0
    max_post_steps: int = 16
    repeats: str = "random"
    temperature: float = 0.0
    use_cache: bool = True

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "block_length", "steps_per_block")
        not_negative(self, "threshold", zero="write every token at once")
        not_negative(self, "editing_threshold", zero="rewrite whatever changes")
        not_negative(self, "max_post_steps", zero="leave a block with its last mask")
        if self.temperature != 0:
            raise ValueError(f"temperature is {self.temperature}; LLaDA2.2 is decoded greedily: it must be 0")
        if self.repeats not in REPEATS:
            raise ValueError(f"repeats is {self.repeats!r}; it must be one of {', '.join(REPEATS)}")


@dataclass(frozen=True)
class BlockState:
    """How far every row is with a block.

    Args:
        block: its number; -1 before the first.
        first: the positions that hold one of the block's first masks, or a token that was written there.
        masks: how many first masks it had.
        post: steps that began without one, since the last that began with one.
        done: whether the row is done with it.
        seen: the block as every step wrote it, before tokens were deleted and masks inserted; -1 where none was.
    """

    block: Int[Tensor, ""]
    first: Bool[Tensor, "batch position"]
    masks: Int[Tensor, "batch"]
    post: Int[Tensor, "batch"]
    done: Bool[Tensor, "batch"]
    seen: Int[Tensor, "step batch place"]


class LLaDA2LevenshteinSampler(BlockwiseSampler):
    """Each step writes masks and rewrites decided tokens, among them by two proposals that change the block.

    A position that proposes `delete_token_id` is deleted: later ones of the block move to the left, and a mask is
    added at its end. One that proposes `split_token_id` gets a mask before it, and later ones move to the right;
    what leaves the block is lost. Tokens of the prompt after a mask stay where they are: what is between two of
    them is resized as if it were a block. The canvas keeps its length; `DenoisingRun.origins` tells what moved.

    A step writes every mask above the threshold, if these are at least as many as the masks that are planned for
    the step and those that were inserted; else as many of the most confident. A row is done with a block at the
    first step that leaves it as it was, without masks, or after `max_post_steps`. [MASK] is never proposed. Where
    the block, as it is written, would be as after an earlier step, one of the positions that change gets its next
    most likely token, up to `TRIES` times.
    """

    has_quirks, moves_tokens = False, True
    mask: int | None = None
    delete = split = -1
    _state: BlockState | None = None

    def __init__(
        self, settings: LLaDA2LevenshteinSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(BlockwiseSettings.of(settings), noise, ids)
        self.settings, self.noise, self.revise = settings, noise, Revise(settings.editing_threshold)

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """Begin a run; of a model without the two tokens, one that deletes and inserts nothing."""
        ids = (getattr(model.config, f"{name}_token_id", None) for name in ("delete", "split"))
        self.delete, self.split = (-1 if one is None else int(one) for one in ids)
        return super().begin(model, prompts, fillable)

    def most_steps(self) -> int:
        """The planned steps, one that writes what they left, and those after it."""
        return self.settings.steps_per_block + 1 + self.settings.max_post_steps

    def _block(self, masked: Tensor, plan: StepPlan) -> Bool[Tensor, "batch position"]:
        return self.attention.within_own_blocks(self.reach(masked, plan))

    def _entered(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> BlockState:
        """How far the rows are with the step's block: it is another than the last step's, or the same."""
        if self._state is not None and self._state.block == plan.block:
            return self._state
        first = masked & self._block(masked, plan)
        none = first.new_zeros(len(first), dtype=torch.long)
        seen = none.new_zeros(0, len(first), self.block_length)
        return BlockState(torch.tensor(plan.block), first, first.sum(-1), none, ~first.any(-1), seen)

    def at_work(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch"]:
        """The rows that have masks in the block, or are not done with it."""
        return (masked & self._block(masked, plan)).any(-1) | ~self._entered(masked, plan).done

    def editable(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Decided tokens of the answer in the block, in rows that are not done with it."""
        return self._answer & ~masked & self.running(masked, plan)

    def _post(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Int[Tensor, "batch"]:
        """Steps without a first mask, this one included."""
        state = self._entered(masked, plan)
        return torch.where((masked & state.first & self._block(masked, plan)).any(-1), 0, state.post + 1)

    def _last(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch"]:
        """The rows whose last step in the block this is, as far as that is known before it."""
        most = self.settings.max_post_steps
        last = (self._post(masked, plan) >= most) & (most > 0)
        return last | (plan.remaining == 1)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """As many as planned and inserted; all after the planned steps, and at the last step."""
        state, steps, masks = self._entered(masked, plan), self.settings.steps_per_block, eligible.sum(-1)
        step = self.most_steps() - plan.remaining
        planned = state.masks // steps + (step < state.masks % steps)
        wanted = (planned + (eligible & ~state.first).sum(-1)).minimum(masks)
        return torch.where(self._last(masked, plan) | (step >= steps), masks, wanted)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step: write, then delete and insert; the proposal has the tokens that moved where they are now."""
        state, working, last = self._entered(masked, plan), self.at_work(masked, plan), self._last(masked, plan)
        eligible, editable = self.eligible(masked, plan), self.editable(masked, plan)
        tokens, confidence = self.propose(canvas, logits, evaluated, eligible | editable)
        unmasked = self.select(confidence, eligible, self.count(eligible, masked, plan))
        if not self.settings.max_post_steps:
            left = eligible & state.first
            last = last | (left.any(-1) & ~(left & ~unmasked).any(-1))
            unmasked = unmasked | (eligible & last[:, None])
        written = unmasked | self.revise(canvas, tokens, confidence, editable)
        edits = canvas.new_tensor([self.delete, self.split])
        resizing = written & last[:, None] & torch.isin(tokens, edits)
        never = edits.expand(int(resizing.sum()), -1)
        tokens = self._next_likely(tokens, resizing, never, logits, evaluated)
        made = torch.where(written, tokens, canvas)
        made = self._unlike_before(canvas, made, confidence, logits, evaluated, state, plan, working & ~last)
        tokens = torch.where(written, made, tokens)
        places, inside = self._places(plan, canvas), eligible | editable
        seen = made.gather(1, places).masked_fill(~working[:, None], -1)
        made, first = self._resized(canvas, made, inside, state.first)
        opened = self.open_positions(made, plan.index + 1) & self._block(masked, plan)
        still = ~((made != canvas) & inside).any(-1)
        self._state = replace(
            state,
            first=first,
            post=torch.where(working, self._post(masked, plan), state.post),
            done=state.done | (working & ~opened.any(-1) & (last | still)),
            seen=torch.cat([state.seen, seen[None]]),
        )
        unmasked = masked & inside & ~opened
        return made, Proposal(torch.where(unmasked, made, tokens), confidence), unmasked

    def _next_likely(
        self,
        tokens: Int[Tensor, "batch position"],
        at: Bool[Tensor, "batch position"],
        never: Int[Tensor, "n k"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "batch position"]:
        """The tokens, at some evaluated positions the most likely one that is neither [MASK] nor one of `never`."""
        if not len(never):
            return tokens
        left = without(logits[at[evaluated]], [self.mask])
        return tokens.masked_scatter(at, most_likely(left.scatter(1, never, -torch.inf)))

    def _places(self, plan: StepPlan, canvas: Int[Tensor, "batch position"]) -> Int[Tensor, "batch place"]:
        """The positions of every row's block; outside the canvas, one of its ends."""
        starts = self.block_layout.starts(plan.span).to(canvas.device)
        places = starts[:, None] + torch.arange(self.block_length, device=canvas.device)
        return places.clamp(0, canvas.shape[1] - 1)

    def _unlike_before(
        self,
        canvas: Int[Tensor, "batch position"],
        made: Int[Tensor, "batch position"],
        confidence: Float[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        state: BlockState,
        plan: StepPlan,
        rows: Bool[Tensor, "batch"],
    ) -> Int[Tensor, "batch position"]:
        """The written canvas, with other tokens where a row's block would be as it was after an earlier step."""
        places = self._places(plan, canvas)
        for _ in range(TRIES):
            again = (state.seen == made.gather(1, places)).all(-1).any(0) & rows
            changed = (made != canvas) & again[:, None]
            if not bool(changed.any()):
                break
            if self.settings.repeats == "random":
                weights = torch.zeros_like(confidence).masked_fill(~changed, -torch.inf)
                at = self.noise.draw(weights, changed, changed.any(-1).long()) & changed
            else:
                least = confidence.masked_fill(~changed, torch.inf).argmin(-1, keepdim=True)
                at = torch.zeros_like(changed).scatter(1, least, True) & changed
            made = self._next_likely(made, at, made[at][:, None], logits, evaluated)
        return made

    def _resized(
        self,
        canvas: Int[Tensor, "batch position"],
        written: Int[Tensor, "batch position"],
        inside: Bool[Tensor, "batch position"],
        first: Bool[Tensor, "batch position"],
    ) -> tuple[Int[Tensor, "batch position"], Bool[Tensor, "batch position"]]:
        """The canvas and its first masks after deletions and insertions; sets `origins`."""
        where = torch.arange(canvas.shape[1], device=canvas.device).expand_as(canvas)
        deleted, split = inside & (written == self.delete), inside & (written == self.split)
        sizes = inside.long() + split.long() - deleted.long()
        before = sizes.cumsum(-1) - sizes
        # Positions in a row without a given token among them: where they begin and end.
        begins = inside & ~pad(inside[:, :-1], (1, 0))
        ends = inside & ~pad(inside[:, 1:], (0, 1))
        start, base = (torch.where(begins, values, 0).cummax(-1).values for values in (where, before))
        stop = torch.where(ends, where, canvas.shape[1]).flip(-1).cummin(-1).values.flip(-1)
        target = start + before - base + split.long()  # of the token; a mask before it where there is one
        kept = inside & ~deleted & (target <= stop)
        rows, places = kept.nonzero(as_tuple=True)
        made = written.masked_fill(inside, int(self.mask or 0))
        made[rows, target[kept]] = torch.where(split, canvas, written)[kept]
        self.origins = where.masked_fill(inside, NOWHERE)
        self.origins[rows, target[kept]] = places
        moved = first & ~inside
        moved[rows, target[kept]] = first[kept]
        return made, moved

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended, and how far each is with the block."""
        return {**super().state(), **({} if self._state is None else vars(self._state))}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        names = BlockState.__dataclass_fields__
        self._state = BlockState(**{name: state[name] for name in names}) if "seen" in state else None


ALGORITHM = Algorithm(
    "llada2_levenshtein",
    LLaDA2LevenshteinSettings,
    LLaDA2LevenshteinSampler,
    resolve,
    FILTERED,
    corruption=CountCorruption(),
)
