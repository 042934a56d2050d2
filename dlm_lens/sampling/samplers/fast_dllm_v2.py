"""Fast-dLLM v2's sampler: blocks, sub-blocks decoded from left to right, and a threshold on probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.attention import padding_before
from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.network import by_rows, most_likely
from dlm_lens.sampling.noise import Draw, Noise, SharedNoise, drawn_by_rows
from dlm_lens.sampling.samplers.base import FirstCanvas
from dlm_lens.sampling.samplers.blocks import BlockSampler, answer_to_write
from dlm_lens.sampling.samplers.dream import filtered
from dlm_lens.sampling.samplers.llada import without
from dlm_lens.sampling.samplers.sdar import BlockDraws, SelectAbove
from dlm_lens.sampling.settings import SpecialIds, at_least_one, not_negative, positive_share
from dlm_lens.sampling.sub_block_network import SubBlockLogits

STEP_BLOCK = 32
"""The length of the blocks of the original's steps, whatever its argument `block_size` is."""


@dataclass(frozen=True)
class FastDllmV2Settings:
    """Settings of Fast-dLLM v2's `generate` (Efficient-Large-Model/Fast_dLLM_v2_7B, modeling.py).

    Args:
        gen_length: tokens of the answer (`max_new_tokens`).
        block_length: tokens of a block (`block_size`), counted from the text's first token; the last one may be
            short.
        sub_block_length: tokens of a sub-block (`small_block_size`), which divides the block.
        threshold: a step unmasks the proposals of the sub-block whose probability is above it, at least the most
            likely one; at 1 one token per step.
        temperature: 0 takes the most likely token.
        top_p: above temperature 0, the probability of the tokens that are sampled from.
        use_cache: compute finished blocks once, which is exact.
        use_block_cache: compute the sub-block alone, with keys and values of the block's other positions from
            before, which is approximate. They are computed again when the sub-block's first position is masked.

    Raises:
        ValueError: a value is out of its range, or the sub-blocks do not fill a block.
    """

    gen_length: int
    block_length: int
    sub_block_length: int
    threshold: float = 1.0
    temperature: float = 0.0
    top_p: float = 0.95
    use_cache: bool = True
    use_block_cache: bool = False

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "block_length", "sub_block_length")
        not_negative(self, "temperature", zero="greedy")
        if self.block_length % self.sub_block_length:
            raise ValueError(
                f"sub-blocks of {self.sub_block_length} do not fill a block of {self.block_length}; choose a "
                "sub_block_length that divides block_length"
            )
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; it is a probability from 0 to 1 (one token a step)")
        positive_share(self, "top_p")
        if self.use_block_cache and not self.use_cache:
            raise ValueError(
                "use_block_cache=True needs the cache of finished blocks, which hooks, recorders and "
                "use_cache=False switch off; leave use_block_cache out"
            )


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """Settings of a run; the default sub-block holds where it divides the block, otherwise a block is one.

    Raises:
        ValueError: there is no answer to write.
    """
    values = answer_to_write(defaults, given, masks)
    if "sub_block_length" not in given and values["block_length"] % values["sub_block_length"]:
        values["sub_block_length"] = values["block_length"]
    return values


class FastDllmV2Propose(nn.Module):
    """x0 from softmax(logits / temperature) within its nucleus; the confidence is the probability of x0 there.

    At temperature 0 it is the argmax, with its probability among all tokens. [MASK] is never an x0.
    `reference_quirks` allows it, takes the argmax for the first token of a block at every temperature, and keeps
    the confidence in the dtype of the logits, to which torch rounds the threshold.

    Attributes:
        leads: positions that are the first of their block, where the step decides these; None elsewhere.
    """

    leads: Bool[Tensor, "batch position"] | None = None

    def __init__(self, settings: FastDllmV2Settings, noise: Noise, ids: SpecialIds, reference_quirks: bool) -> None:
        super().__init__()
        self.settings, self.noise = settings, noise
        self.never, self.reference_quirks = [] if reference_quirks else [ids.mask], reference_quirks

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        if self.settings.temperature > 0:
            leads = self.leads[evaluated] if self.reference_quirks and self.leads is not None else None
            drawn = partial(self._drawn, leads=leads)
            chosen, found = drawn_by_rows(drawn, self.noise, logits, evaluated, eligible)
        else:
            chosen, found = by_rows(self._most_likely, logits, whole=self.reference_quirks)
        found = found if self.reference_quirks else found.float()
        confidence = found.new_zeros(canvas.shape).masked_scatter(evaluated, found)
        return Proposal(canvas.masked_scatter(evaluated, chosen), confidence.masked_fill(~eligible, -torch.inf))

    def _most_likely(self, logits: Float[Tensor, "n d_vocab"]) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        chosen = most_likely(without(logits, self.never))
        return chosen, logits.softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)

    def _drawn(
        self, logits: Float[Tensor, "n d_vocab"], draw: Draw, leads: Bool[Tensor, "n"] | None
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        """Tokens that are drawn, and their probabilities; the most likely ones at `leads`."""
        # [MASK] leaves before the nucleus, which may hold nothing else.
        scaled = without(logits, self.never) / self.settings.temperature
        scaled = filtered(scaled, self.settings.top_p, None).softmax(-1)
        chosen = draw(scaled)
        found = scaled.gather(-1, chosen[:, None]).squeeze(-1)
        if leads is None:
            return chosen, found
        plain, likely = self._most_likely(logits)
        return torch.where(leads, plain, chosen), torch.where(leads, likely, found)


class FastDllmV2Sampler(BlockSampler):
    """Blocks from left to right, counted from the text, and in each the sub-blocks from left to right.

    The output at i - 1 predicts position i. The first position of a block is therefore predicted by the block
    before, and a step of its own decides it, before the others are predicted. Each further step proposes for the
    masks of a row's first sub-block that has any. A row ends when an end of the text in its answer has no mask
    before it; the rest of its canvas stays masked.

    `reference_quirks`: whole blocks are decoded, gen_length // block_length of them with the one that holds the end
    of the (longest) prompt, and one token more; the first token of a block is greedy; a prompt of exactly one block
    is not seen; with several rows (`batch_sample`) the answer of a prompt that ends with its block, and is neither
    the shortest nor the longest, begins as a mask among others, and the last token of the longest prompts is
    predicted where it is the first of its block and a shorter prompt has an earlier block to decode; the block that
    is decoded does not see keys after the next multiple of 32 positions.
    """

    from_text, adaptive = True, True

    def __init__(
        self, settings: FastDllmV2Settings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        if reference_quirks and settings.block_length == 1:
            raise ValueError(
                "reference_quirks with block_length 1: the original appends a mask to every block and writes two "
                "tokens there; give a block_length of at least 2, or leave reference_quirks out"
            )
        self.settings, self.reference_quirks, self.ends = settings, reference_quirks, ids.ends
        self.block_length, self.use_cache = settings.block_length, settings.use_cache
        self.stream: BlockDraws | None = None
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = self.stream = BlockDraws(noise)
        self.propose = FastDllmV2Propose(settings, noise, ids, reference_quirks)
        self.select = SelectAbove(settings.threshold)
        self.mask, self._seen_until = ids.mask, 0

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """gen_length, so that the last block may be short; with `reference_quirks` whole blocks and a token."""
        if not self.reference_quirks:
            return gen_length
        self._rewritten = self._rewritten_rows(prompts)
        lengths, total = prompts.sum(-1), self._quirky_length(prompts)
        return 0 if total is None else max(0, total - int(lengths.min()))

    def _quirky_length(self, content: Bool[Tensor, "batch prompt"]) -> int | None:
        """How long every text becomes in the original; None where it returns the prompt."""
        lengths, length = content.sum(-1), self.block_length
        wanted, shortest, longest = self.settings.gen_length // length, int(lengths.min()), int(lengths.max())
        if not wanted and shortest <= length and shortest // length == longest // length:
            return None
        return (longest // length + wanted) * length + 1

    def _rewritten_rows(self, content: Bool[Tensor, "batch prompt"]) -> Bool[Tensor, "batch"]:
        """The rows whose last prompt token the original writes over with the first token of its block.

        Those are the longest, where they begin a block and a shorter prompt has an earlier block to decode.
        """
        lengths, length = content.sum(-1), self.block_length
        earlier = lengths.min() // length < lengths.max() // length
        return (lengths == lengths.max()) & (lengths % length == 1) & earlier

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The first canvas; in the original some rows predict their last prompt token."""
        canvas = super().begin(model, prompts, fillable)
        if self.reference_quirks:
            last = prompts.shape[1] - 1
            canvas[:, last] = canvas[:, last].masked_fill(self._rewritten, int(self.mask or 0))
        return canvas

    def network(self, model: Any, first: FirstCanvas) -> SubBlockLogits:
        """The network of block diffusion, whose output at i - 1 predicts position i."""
        content, prompt_length = first.content, first.prompt_length
        rows, settings = torch.arange(len(content), device=content.device), self.settings
        if self.reference_quirks and len(content) > 1 and settings.temperature > 0:
            raise ValueError(
                "the original samples the first row's tokens for every row: with reference_quirks and a "
                "temperature give one prompt"
            )
        if self.reference_quirks and len(content) > 1 and settings.use_block_cache:
            raise ValueError(
                "the block caches of the original's rows depend on each other: with reference_quirks and "
                "use_block_cache give one prompt"
            )
        seen = self._seen(content, prompt_length)
        self._answer, self._begins = prompt_length, padding_before(seen)
        self._limits = torch.full_like(self._begins, content.shape[1])
        if self.reference_quirks:
            prompts = content[:, :prompt_length]
            lengths = prompts.sum(-1)
            between = (lengths > lengths.min()) & (lengths < lengths.max())
            alone = between & (lengths % self.block_length == 0)
            # The write over the longest prompts gives the other rows the first token of that block too.
            alone &= ~(self._rewritten_rows(prompts).any() & (lengths + 1 == lengths.max()))
            total = self._quirky_length(prompts)
            if total is not None:
                self._limits = padding_before(content) + total
                alone &= lengths + 1 < total  # the token after the last block is the result's
            self._begins = torch.where(alone, prompt_length, self._begins)
        network = SubBlockLogits(
            model,
            seen,
            layout=self.block_layout,
            sub_block_length=settings.sub_block_length if settings.use_block_cache else None,
            window=STEP_BLOCK if self.reference_quirks else None,
            use_cache=self.use_cache,
        )
        if network.source is not None and content.shape[1] > prompt_length:
            network.source[rows, self._begins] = self._begins
        return network

    def _seen(self, content: Bool[Tensor, "batch position"], prompt_length: int) -> Bool[Tensor, "batch position"]:
        """What the network sees; in the original not the first block, if that is all of the shortest prompt."""
        padding = padding_before(content)
        if not self.reference_quirks or int((prompt_length - padding).min()) != self.block_length:
            return content
        where = torch.arange(content.shape[1], device=content.device)
        return content & (where >= padding[:, None] + self.block_length)

    def inputs(
        self,
        model: Any,
        content: Bool[Tensor, "batch seen"],
        canvas: Int[Tensor, "batch seen"],
        prompt_length: int,
    ) -> dict[str, Any]:
        """Block causal attention over what a step sees."""
        layout = self.block_layout_of(self.block_length, content, prompt_length)
        window = STEP_BLOCK if self.reference_quirks else None
        seen = self._seen(content, prompt_length)
        return SubBlockLogits(model, seen, layout=layout, window=window).inputs_of(canvas)

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> "FastDllmV2Sampler":
        """A sampler for passes over the canvases of a finished run, all of which are exact."""
        sampler: FastDllmV2Sampler = super().for_rerun(settings)
        names = FastDllmV2Settings.__dataclass_fields__
        known = {name: value for name, value in settings.items() if name in names}
        sampler.settings = FastDllmV2Settings(**{**known, "use_block_cache": False})
        sampler.reference_quirks = bool(settings.get("reference_quirks"))
        return sampler

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step that may be needed: as many for each block as it has positions."""
        return self.block_plans(prompt_length, positions, self.block_length)

    def reach(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Positions that the step's network can predict: of each row's block, or of the sub-block it computes."""
        return self.eligible(masked, plan) if self.settings.use_block_cache else super().reach(masked, plan)

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The first position of a row's block if it is masked; then the masks of its first sub-block with any."""
        where, start = torch.arange(masked.shape[1], device=masked.device), self._starts(plan)[:, None]
        within = masked & super().reach(masked, plan) & (where < self._limits[:, None])
        if self.ended is not None:
            within &= ~self.ended[:, None]
        lead = within & self._leads(masked, plan)
        number = (where - start) // self.settings.sub_block_length
        current = number.masked_fill(~within, masked.shape[1]).amin(-1, keepdim=True)
        return torch.where(lead.any(-1, keepdim=True), lead, within & (number == current))

    def _starts(self, plan: StepPlan) -> Int[Tensor, "batch"]:
        return self.block_layout.starts(plan.span)

    def _leads(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The first position of every row's block, where the block before predicts it."""
        start, where = self._starts(plan), torch.arange(masked.shape[1], device=masked.device)
        return (where == start[:, None]) & (start > self._begins)[:, None]

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """One in each row, beside those above the threshold."""
        return eligible.any(-1).long()

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """Where blocks begin, and the sub-block that the random stream draws for; none for a first token."""
        self.propose.leads = leads = self._leads(masked, plan)
        if self.stream is not None:
            eligible, length = self.eligible(masked, plan)[0], self.settings.sub_block_length
            first, start = int(eligible.int().argmax()), int(self._starts(plan)[0])
            begin = first - (first - start) % length
            self.stream.span = (0, 0) if bool((eligible & leads[0]).any()) else (begin, begin + length)

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether the answer of every row has an end of the text without a mask before it."""
        self._seen_until = plan.span[1]
        answer = canvas[:, self._answer :]
        undecided = answer == torch.tensor(self.mask, device=answer.device)
        ends = torch.isin(answer, torch.tensor(self.ends, dtype=answer.dtype, device=answer.device))
        ends &= undecided.cumsum(-1) == 0
        self.ended = ends.any(-1)
        return bool(self.ended.all())

    def final_length(self, positions: int, steps: int) -> int:
        """The end of the last block that was decoded."""
        return min(self._seen_until or positions, positions)

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended, and the end of the last block."""
        return {**super().state(), "seen_until": torch.tensor(self._seen_until)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._seen_until = int(state["seen_until"])


ALGORITHM = Algorithm(
    "fast_dllm_v2", FastDllmV2Settings, FastDllmV2Sampler, resolve, FILTERED, corruption=CountCorruption()
)
