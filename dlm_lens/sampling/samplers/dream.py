"""Dream's sampler: a timestep schedule over the answer or its blocks, and the rules that choose the positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import RateCorruption
from dlm_lens.sampling.network import by_rows, most_likely
from dlm_lens.sampling.noise import Noise, RowNoise, SharedNoise, drawn_tokens
from dlm_lens.sampling.samplers.cached_blocks import CachedSampler, SelectConfident, SpanNoise, check_parallel
from dlm_lens.sampling.samplers.llada import without
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.samplers.timesteps import TimestepSampler
from dlm_lens.sampling.settings import (
    SpecialIds,
    answer_settings,
    at_least_one,
    check_blocks,
    inner_eps,
    known_remasking,
    not_negative,
    positive_share,
)

REMASKING = ("origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold")


@dataclass(frozen=True)
class DreamSettings:
    """Settings of Dream's `diffusion_generate`, and of Fast-dLLM's; `remasking` is their `alg`.

    Args:
        steps: denoising steps in all.
        gen_length: tokens of the answer.
        temperature: 0 takes the most likely token, above 0 samples.
        remasking: "origin" unmasks every mask with the schedule's probability; "maskgit_plus", "topk_margin" and
            "entropy" the most confident by this rule; "confidence_threshold" those of `threshold`.
        top_p: propose among the most likely tokens up to this probability, with the one that crosses it.
        top_k: propose among so many of the most likely tokens.
        alg_temp: above 0 positions are drawn, from softmax(confidence / alg_temp).
        eps: the last time of the schedule, which begins at 1.
        block_length: length of the blocks that are decoded from left to right, each with steps / blocks steps; None
            for one block.
        cache: "prefix" keeps the keys and values before the block while it is decoded, "dual" those after it too,
            which is approximate; None computes everything at every step.
        threshold: with "confidence_threshold", a step unmasks all positions of the block with at least this
            probability, and at least one; `steps` is then not used.
        factor: likewise the n best, for the largest n with p_n >= 1 - factor / (n + 1).

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    temperature: float = 0.0
    remasking: str = "origin"
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    eps: float = 1e-3
    block_length: int | None = None
    cache: str | None = None
    threshold: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "block_length")
        check_blocks(self)
        not_negative(self, "temperature", "alg_temp", zero="greedy")
        known_remasking(self.remasking, REMASKING, REMASKING, "Dream")
        positive_share(self, "top_p")
        at_least_one(self, "top_k")
        inner_eps(self.eps)
        check_parallel(self)
        if (self.remasking == "confidence_threshold") != (self.threshold is not None or self.factor is not None):
            raise ValueError(
                f"remasking {self.remasking!r} with threshold {self.threshold} and factor {self.factor}: they "
                "belong to 'confidence_threshold'; give both or neither"
            )

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return max(1, self.gen_length // (self.block_length or max(1, self.gen_length)))


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """Settings of `answer_settings`; a threshold or factor implies "confidence_threshold" (alone 0.9)."""
    values = answer_settings(defaults, given, masks)
    parallel = any(values.get(name) is not None for name in ("threshold", "factor"))
    if parallel and "remasking" not in given:
        values["remasking"] = "confidence_threshold"
    if values["remasking"] == "confidence_threshold" and not parallel:
        values["threshold"] = 0.9
    return values


def filtered(
    logits: Float[Tensor, "n d_vocab"], top_p: float | None, top_k: int | None
) -> Float[Tensor, "n d_vocab"]:
    """Logits outside the nucleus or the top k become the dtype's minimum; the token that crosses top_p stays."""
    floor = torch.finfo(logits.dtype).min
    if top_p is not None and top_p < 1:
        values, order = logits.sort(descending=True)
        beyond = values.softmax(-1).cumsum(-1) > top_p
        beyond = torch.cat([torch.zeros_like(beyond[:, :1]), beyond[:, :-1]], -1)
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), floor)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, floor)
    return logits


def filters(top_p: float | None, top_k: int | None, size: int) -> bool:
    """Whether `filtered` may leave out one of `size` tokens."""
    return (top_p is not None and top_p < 1) or (top_k is not None and top_k < size)


def sums_to_one(probabilities: Float[Tensor, "n d_vocab"]) -> bool:
    """Whether `torch.distributions.Categorical` takes these probabilities.

    Divided by its sum, each row sums to 1 within 1e-6.
    """
    divided = probabilities / probabilities.sum(-1, keepdim=True)
    return bool(((divided.sum(-1) - 1).abs() < 1e-6).all())


class FilteredSettings(Protocol):
    """The settings that `DreamPropose` reads."""

    @property
    def temperature(self) -> float:
        """0 takes the most likely token."""
        ...

    @property
    def top_p(self) -> float | None:
        """The probability of the smallest set of tokens to draw from; None for all."""
        ...

    @property
    def top_k(self) -> int | None:
        """How many of the most likely tokens to draw from, after `top_p`; None for all."""
        ...

    @property
    def remasking(self) -> str:
        """The rule of the confidence."""
        ...


class FilteredPropose(nn.Module):
    """Base class of proposals from the softmax of filtered logits (Dream, SDAR).

    Attributes:
        noise: source of the random numbers.
        never: the tokens that are no x0.
        in_float32: whether the logits become float32 first, as in code whose network returns float32 logits.
    """

    noise: Noise
    never: Sequence[int | None]
    in_float32 = False

    def _kept(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        """The logits over the temperature, those outside the filters at the dtype's minimum."""
        raise NotImplementedError

    def _confidence(self, likely: Float[Tensor, "n d_vocab"], chosen: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        """What positions are ranked by, from the probabilities and x0."""
        raise NotImplementedError

    def _probabilities(
        self, logits: Float[Tensor, "n d_vocab"]
    ) -> tuple[Float[Tensor, "n d_vocab"], Float[Tensor, "n d_vocab"]]:
        """Of the tokens that the filters keep, and of those among them that may be x0."""
        if self.in_float32:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        kept = self._kept(logits)
        # Of the other tokens alone: beside a likely [MASK] all their probabilities may round to 0.
        return kept.softmax(-1), without(kept, self.never).softmax(-1)

    def _drawn(
        self,
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> tuple[Tensor, ...]:
        """Tokens that are drawn, and their confidence; a reference's stream is drawn for all of them at once."""
        if isinstance(self.noise, RowNoise):
            uniform = self.noise.column_rows(evaluated, eligible, logits.shape[-1])
            return by_rows(self._drawn_with, logits, uniform)
        likely, choice = self._probabilities(logits)
        chosen = self._drawn_at_once(choice, evaluated, eligible)
        return chosen, self._confidence(likely, chosen)

    def _drawn_with(
        self, logits: Float[Tensor, "n d_vocab"], uniform: Float[Tensor, "n d_vocab"]
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        likely, choice = self._probabilities(logits)
        chosen = drawn_tokens(choice, uniform)
        return chosen, self._confidence(likely, chosen)

    def _drawn_at_once(
        self,
        choice: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """Tokens from a reference's stream."""
        return self.noise.tokens(choice, evaluated, eligible)

    def _most_likely(self, logits: Float[Tensor, "n d_vocab"]) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        likely, choice = self._probabilities(logits)
        chosen = most_likely(choice)
        return chosen, self._confidence(likely, chosen)


class DreamPropose(FilteredPropose):
    """x0 from softmax(filtered(logits / temperature)), and the confidence of the rule.

    maskgit_plus and confidence_threshold: the probability of x0; topk_margin: largest minus second largest
    probability; entropy: sum p ln(p + 1e-10), without `reference_quirks` at least in float32. With `origin` the
    confidence is not used. [MASK] is never an x0 unless `reference_quirks`: the filter is one of the other tokens,
    and without a filter the probabilities are those of all tokens.

    The authors' code draws with `torch.distributions.Categorical`, which refuses probabilities that do not sum to 1
    within 1e-6, as can happen in bfloat16; it then catches the exception and takes the most likely token of every
    position. So does `reference_quirks`.

    Attributes:
        keeps_dtype: leave the confidence in the dtype of the logits, to which torch rounds a threshold that it
            compares with it, and the softmax from which `alg_temp` draws; otherwise it is float32.
    """

    keeps_dtype = False

    def __init__(self, settings: FilteredSettings, noise: Noise, ids: SpecialIds, reference_quirks: bool) -> None:
        super().__init__()
        self.settings, self.noise, self.rule = settings, noise, settings.remasking
        self.never = [] if reference_quirks else [ids.mask]
        self.reference_quirks = reference_quirks

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        if self.settings.temperature == 0:
            chosen, found = by_rows(self._most_likely, logits)
        else:
            chosen, found = self._drawn(logits, evaluated, eligible)
        found = found if self.keeps_dtype else found.float()
        confidence = found.new_full(canvas.shape, -torch.inf)
        if self.rule != "origin":
            confidence = confidence.masked_scatter(evaluated, found)
        return Proposal(canvas.masked_scatter(evaluated, chosen), confidence.masked_fill(~eligible, -torch.inf))

    def _drawn_at_once(
        self,
        choice: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        if self.reference_quirks and not sums_to_one(choice):
            return most_likely(choice)
        return super()._drawn_at_once(choice, evaluated, eligible)

    def _kept(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        settings = self.settings
        if settings.temperature > 0:
            logits = logits / settings.temperature
        if filters(settings.top_p, settings.top_k, logits.shape[-1]):
            # [MASK] leaves before the filter, which may keep nothing else.
            logits = without(logits, self.never)
        return filtered(logits, settings.top_p, settings.top_k)

    def _confidence(self, likely: Float[Tensor, "n d_vocab"], chosen: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        if self.rule == "topk_margin":
            first, second = likely.topk(2).values.unbind(-1)
            return first - second
        if self.rule == "entropy":
            if not self.reference_quirks:
                # In float16 1e-10 is 0, and a probability of 0 would give NaN.
                likely = likely.to(torch.promote_types(likely.dtype, torch.float32))
            return (likely * torch.log(likely + 1e-10)).sum(-1)
        return likely.gather(-1, chosen[:, None]).squeeze(-1)


class SelectDrawn(nn.Module):
    """Draw `count` eligible positions per row without replacement, from softmax(confidence / alg_temp).

    Attributes:
        all: choose every eligible position instead, and draw nothing.
    """

    all = False

    def __init__(self, noise: Noise, alg_temp: float) -> None:
        super().__init__()
        self.noise, self.alg_temp = noise, alg_temp

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        if self.all:
            return eligible
        weights = (confidence / self.alg_temp).masked_fill(~eligible, -torch.inf)
        return self.noise.draw(weights, eligible, count) & eligible


class DreamSampler(CachedSampler, TimestepSampler):
    """The timestep schedule with counts rounded down, so that as many steps as tokens is not one token per step.

    The count is a fraction of each row's own masks in the block, recounted at every step; `reference_quirks` takes
    the average number of masks over the batch, at the last step too, where a row with more keeps some.

    Under a cache and with `reference_quirks` (Fast-dLLM's code for Dream) the step that computes all decides the
    first position of the block, whatever its confidence, and no other; every rule but "confidence_threshold" is
    "entropy"; and with one step per block the other positions stay masked.
    """

    stream: SpanNoise | None = None

    def __init__(
        self, settings: DreamSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, noise, blocks=settings.blocks)
        self.settings, self.reference_quirks = settings, reference_quirks
        self.parallel = settings.threshold is not None or settings.factor is not None
        self.cache, self.adaptive = settings.cache, self.rows_wait(vars(settings))
        self.fast_quirks = reference_quirks and settings.cache is not None
        self.draws_positions &= not self.fast_quirks
        if isinstance(noise, SharedNoise) and self.fast_quirks:
            noise = self.stream = SpanNoise(noise)
        if self.parallel:
            # Theirs decides the first position alone, and computes a step more than it needs.
            width = settings.block_length or settings.gen_length
            self.each = max(2, width) if self.fast_quirks else width
        self.propose = DreamPropose(settings, noise, ids, reference_quirks)
        self.propose.keeps_dtype = reference_quirks and (self.parallel or bool(settings.alg_temp))
        origin = settings.remasking == "origin"
        if settings.alg_temp and not origin and not self.parallel:
            self.select: nn.Module = SelectDrawn(noise, settings.alg_temp)
        else:
            self.select = SelectConfident(settings.threshold, settings.factor) if self.parallel else Select()
            self.select.by_topk = reference_quirks and not origin

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step of every block; the first of a block computes the whole canvas."""
        if self.parallel and not self.settings.gen_length:
            self.each = positions
        return [
            self.with_span(plan, positions, first=plan.remaining == self.each)
            for plan in super().plans(prompt_length, positions)
        ]

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Every masked position up to the end of the block that the step predicts."""
        found = super().eligible(masked, plan) & self.reach(masked, plan)
        if self.fast_quirks and plan.computed is None:
            return found & (torch.arange(masked.shape[1], device=masked.device) == plan.span[0])
        return found

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row this step unmasks: float32, rounded down, as in the reference."""
        left = eligible.sum(-1)
        if self.parallel:
            return (left + plan.remaining - 1) // plan.remaining
        if self.fast_quirks and plan.computed is None:
            return left
        masks = (left.sum() / len(left)).expand(len(left)) if self.reference_quirks else left.float()
        fraction = self.fraction(plan).to(masks.device)
        return (masks if plan.remaining == 1 else masks * fraction).long()

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """With quirks, the step's rule, and the positions that the random stream and `torch.topk` are given."""
        if not self.fast_quirks:
            return
        if isinstance(self.select, Select):
            self.select.span = plan.computed
        whole = plan.computed is None
        rule = "maskgit_plus" if whole or self.parallel else "entropy"
        self.propose.rule = rule  # type: ignore[assignment]
        if self.stream is not None:
            # Theirs draws tokens for every position of a whole pass, and for all masks that a threshold sees.
            seen = masked & self.reach(masked, plan)
            block = seen if self.parallel else super().eligible(seen, plan)
            self.stream.span = plan.computed
            self.stream.drawn = torch.ones_like(masked) if whole else block
        if isinstance(self.select, SelectDrawn):
            self.select.all = whole


OF_THE_RULE = (
    f'by remasking: {FILTERED}; "topk_margin": the difference of the two largest; '
    '"entropy": minus the entropy, in nats; "origin": -inf'
)

ALGORITHM = Algorithm(
    "dream",
    DreamSettings,
    DreamSampler,
    resolve,
    OF_THE_RULE,
    corruption=RateCorruption(eps=1e-3, protect_ends=True),
)
