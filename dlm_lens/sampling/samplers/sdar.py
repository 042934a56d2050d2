"""SDAR's sampler for block diffusion: blocks counted from the text, and four rules that choose the positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.network import by_rows
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.blocks import BlockSampler
from dlm_lens.sampling.samplers.dllm import OrderedNoise
from dlm_lens.sampling.samplers.dream import FilteredPropose, filtered, filters
from dlm_lens.sampling.samplers.llada import without
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.settings import (
    SpecialIds,
    at_least_one,
    known_remasking,
    not_negative,
    positive_share,
    with_token_ids,
)

REMASKING = ("low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded")


@dataclass(frozen=True)
class SdarSettings:
    """Settings of SDAR's `block_diffusion_generate` (JetAstra/SDAR, generate.py).

    Args:
        gen_length: tokens of the answer.
        block_length: tokens of a block, counted from the first token of the text; the answer's last block may be
            shorter.
        steps: denoising steps in all, of which each block gets ceil(steps / ceil(gen_length / block_length)).
        steps_per_block: steps of every block, at most (`denoising_steps`), instead. Of a block of b positions in n
            steps, each step plans to unmask b // n, the first b % n steps one more.
        temperature: 0 takes the most likely token.
        remasking: "low_confidence_dynamic", every position whose confidence is above `threshold`, at least the
            planned number; "low_confidence_static", the most confident; "sequential", from left to right;
            "entropy_bounded", those of the lowest entropy whose sum stays below `entropy_bound`, at least the
            planned number.
        threshold: of "low_confidence_dynamic" (`confidence_threshold`).
        entropy_bound: of "entropy_bounded", in nats (`eb_threshold`).
        top_k: sample from the k most likely tokens; None or 0 for all.
        top_p: sample from the smallest set of tokens with this probability, after `top_k`.
        stop_tokens: ids that end a row after the block that has one of them (`stopping_criteria_idx`); None for the
            model's ends of text and turn, none of them with `reference_quirks`.
        use_cache: compute finished blocks once, which is exact.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    steps: int | None = None
    steps_per_block: int | None = None
    temperature: float = 1.0
    remasking: str = "low_confidence_dynamic"
    threshold: float = 0.85
    entropy_bound: float = 0.35
    top_k: int | None = None
    top_p: float | None = None
    stop_tokens: tuple[int, ...] | None = None
    use_cache: bool = True

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "block_length", "steps", "steps_per_block")
        not_negative(self, "temperature", zero="greedy")
        not_negative(self, "top_k", zero="all")
        not_negative(self, "entropy_bound", zero="the planned number")
        known_remasking(self.remasking, REMASKING, REMASKING, "SDAR")
        positive_share(self, "top_p")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; it is a probability, from 0 to 1")

    @property
    def block_steps(self) -> int:
        """Steps of each block, at most."""
        if self.steps_per_block is not None or self.steps is None:
            return self.steps_per_block or self.block_length
        blocks = -(-self.gen_length // self.block_length)
        return -(-self.steps // blocks)

    def planned(self, step: int) -> int:
        """How many positions a block's step plans to unmask."""
        each, more = divmod(self.block_length, self.block_steps)
        return each + (step < more)


class BlockDraws(OrderedNoise):
    """The random stream of code that draws a token for every position of the block, masked or not."""

    def tokens(
        self,
        probabilities: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """Tokens of the evaluated positions, drawn for the whole `span` of every row."""
        drawn = torch.zeros_like(evaluated)
        drawn[:, slice(*self.span)] = True
        return self.tokens_among(probabilities, evaluated, drawn)


class SdarPropose(FilteredPropose):
    """x0 from softmax(filtered(logits / temperature)), and its probability there as confidence.

    Temperature, top_k and top_p apply in this order and change the confidence; at temperature 0 x0 is the most
    likely token, and its confidence is that of the plain softmax; `by_entropy` it is minus the entropy -sum p ln p.
    The tokens `never` are no x0: the filters are those of the other tokens, and without a filter the probabilities
    are those of all tokens. The confidence is float32, or with `keeps_dtype` in the dtype of the logits, to which
    torch rounds the threshold.
    """

    def __init__(
        self,
        noise: Noise,
        never: Sequence[int | None],
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        by_entropy: bool = False,
        keeps_dtype: bool = False,
    ) -> None:
        super().__init__()
        self.noise, self.never, self.temperature = noise, list(never), temperature
        self.top_k, self.top_p, self.by_entropy = top_k, top_p, by_entropy
        self.keeps_dtype = keeps_dtype

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        if self.temperature > 0:
            chosen, found = self._drawn(logits, evaluated, eligible)
        else:
            chosen, found = by_rows(self._most_likely, logits)
        found = found if self.keeps_dtype else found.float()
        confidence = found.new_zeros(canvas.shape).masked_scatter(evaluated, found)
        return Proposal(canvas.masked_scatter(evaluated, chosen), confidence.masked_fill(~eligible, -torch.inf))

    def _confidence(self, likely: Float[Tensor, "n d_vocab"], chosen: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        if self.by_entropy:
            return -torch.special.entr(likely).sum(-1)
        return likely.gather(-1, chosen[:, None]).squeeze(-1)

    def _kept(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        if self.temperature == 0:
            return logits
        logits = logits / self.temperature
        if filters(self.top_p, self.top_k or None, logits.shape[-1]):
            # [MASK] leaves before the filters, which may keep nothing else.
            logits = filtered(without(logits, self.never), None, self.top_k or None)
            logits = filtered(logits, self.top_p, None)
        return logits


class SelectFirst(Select):
    """Choose the first `count` eligible positions of every row."""

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        return eligible & (eligible.cumsum(-1) <= count[:, None])


class SelectAbove(Select):
    """Choose every eligible position whose confidence is above a threshold, at least the `count` most confident."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        above = (eligible & (confidence > self.threshold)).sum(-1)
        return super().forward(confidence, eligible, count.maximum(above))


class SelectBounded(Select):
    """Choose the positions of lowest entropy whose entropies sum to less than a bound, at least `count`.

    The confidence is minus the entropy.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        entropies = (-confidence).masked_fill(~eligible, torch.inf).sort(-1).values
        within = (entropies.cumsum(-1) < self.bound).sum(-1)
        return super().forward(confidence, eligible, count.maximum(within))


class SdarSampler(BlockSampler):
    """The planned numbers of SDAR, capped by the masks that are left; a block ends as soon as it has no mask.

    The last planned step of a block unmasks what is left. With `reference_quirks` the canvas is filled up to a
    whole block, and tokens are drawn for all positions of a block from one stream.
    """

    from_text, adaptive = True, True

    def __init__(
        self, settings: SdarSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        self.stream: OrderedNoise | None = None
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = self.stream = BlockDraws(noise)
        if reference_quirks and settings.remasking == "entropy_bounded":
            raise ValueError(
                "reference_quirks with remasking 'entropy_bounded': the authors' code stops with an error there; "
                "leave reference_quirks out"
            )
        self.settings, self.reference_quirks = settings, reference_quirks
        self.block_length, self.use_cache = settings.block_length, settings.use_cache
        self.propose = SdarPropose(
            noise,
            [] if reference_quirks else [ids.mask],
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            by_entropy=settings.remasking == "entropy_bounded",
            keeps_dtype=reference_quirks,
        )
        self.select = {
            "sequential": SelectFirst(),
            "low_confidence_static": Select(),
            "low_confidence_dynamic": SelectAbove(settings.threshold),
            "entropy_bounded": SelectBounded(settings.entropy_bound),
        }[settings.remasking]
        self.select.by_topk = reference_quirks
        ends = () if reference_quirks else ids.stops
        self.stops = ends if settings.stop_tokens is None else settings.stop_tokens
        self.mask = ids.mask
        self._answer = 0

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """The tokens requested; with `reference_quirks` up to the end of a whole block.

        Raises:
            ValueError: rows that would end at different positions.
        """
        if not self.reference_quirks:
            return gen_length
        over = {length % self.block_length for length in (prompts.sum(-1) + gen_length).tolist()}
        if len(over) > 1:
            raise ValueError(
                f"reference_quirks fills the text up to whole blocks of {self.block_length}, and these prompts "
                f"have {prompts.sum(-1).tolist()} tokens; denoise them one at a time, as the authors' code does"
            )
        return gen_length + -over.pop() % self.block_length

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step of every block, at most."""
        self._answer = prompt_length
        return self.block_plans(prompt_length, positions, self.settings.block_steps)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row this step unmasks, at least."""
        left = eligible.sum(-1)
        if plan.remaining == 1:
            return left
        return left.clamp(max=self.settings.planned(self.settings.block_steps - plan.remaining))

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has a stop token in its finished blocks."""
        if not self.stops or self.attention.blocks is None:
            return False
        where = torch.arange(canvas.shape[1], device=canvas.device)
        open_ = ((canvas == self.mask) & self.block_layout.inside(plan.span, canvas.shape[1])).any(-1)
        written = self.block_layout.until(plan.span, canvas.shape[1]) & (where >= self._answer)
        stops = torch.isin(canvas, torch.tensor(self.stops, device=canvas.device)) & written
        ends = stops.any(-1) & ~open_
        self.ended = ends if self.ended is None else self.ended | ends
        return bool(self.ended.all())

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The block that the random stream draws for and that `torch.topk` is given."""
        self.select.span = plan.span  # type: ignore[assignment]
        if self.stream is not None:
            self.stream.span = plan.span


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The settings, where lists of ids become tuples; without `steps` one token per step."""
    return with_token_ids({**defaults, **given, "steps": given.get("steps", defaults.get("steps"))}, "stop_tokens")


ALGORITHM = Algorithm(
    "sdar",
    SdarSettings,
    SdarSampler,
    resolve,
    f'{FILTERED}; with remasking "entropy_bounded" minus their entropy',
    corruption=CountCorruption(),
)
