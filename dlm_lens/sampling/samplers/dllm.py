"""dllm's sampler for masked DLMs: LLaDA's proposals, and numbers of tokens from a noise schedule by rounding."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import padding_before
from dlm_lens.sampling.algorithm_registry import RANKED, Algorithm
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.network import Network
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.base import FirstCanvas, Sampler
from dlm_lens.sampling.samplers.llada import REMASKING, GumbelPropose, without
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.settings import (
    SpecialIds,
    answer_settings,
    at_least_one,
    known_remasking,
    not_negative,
    with_token_ids,
)

SCHEDULES = ("linear", "cosine")


@dataclass(frozen=True)
class DllmSettings:
    """Settings of dllm's MDLMSampler (ZHZisZZ/dllm, core/samplers/mdlm.py).

    Args:
        steps: denoising steps in all; each block gets ceil(steps / blocks), and steps that would unmask nothing are
            left out.
        gen_length: tokens of the answer (`max_new_tokens`).
        block_length: tokens of a block (`block_size`); the last block may be shorter. Infilling (gen_length 0) cuts
            each row's own positions into blocks; None makes them one block.
        temperature: 0 takes the most likely token.
        cfg_scale: guidance; 0 for none.
        remasking: "low_confidence" or "random".
        schedule: alpha(t), the share of positions that are not masked at time t: "linear", 1 - t, or "cosine",
            1 - cos(pi (1 - t) / 2).
        stochastic_transfer: the numbers of tokens are drawn, each mask being unmasked with the step's probability;
            with `reference_quirks` too from other random numbers than dllm's.
        suppress_tokens: ids that are never proposed.
        begin_suppress_tokens: ids that are not proposed at the first step; with `reference_quirks` they are
            proposed at any step with confidence 0.
        cfg_keep_tokens: ids that guidance leaves visible in its second half.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    block_length: int | None
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: str = "low_confidence"
    schedule: str = "linear"
    stochastic_transfer: bool = False
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    cfg_keep_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "block_length")
        not_negative(self, "temperature", zero="greedy")
        not_negative(self, "cfg_scale", zero="no guidance")
        known_remasking(self.remasking, REMASKING, REMASKING, "dllm")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; it must be one of {', '.join(SCHEDULES)}")

    def blocks(self, positions: int) -> int:
        """Number of blocks of so many positions."""
        return 1 if self.block_length is None else max(1, math.ceil(positions / self.block_length))

    def block_steps(self, positions: int) -> int:
        """Steps of each block of so many positions, before those that would unmask nothing are left out."""
        return math.ceil(self.steps / self.blocks(positions))

    @property
    def float64_confidence(self) -> bool:
        """The softmax of the confidence has the dtype of the logits."""
        return False


@cache
def reveal_probabilities(steps: int, schedule: str) -> tuple[Tensor, ...]:
    """P = 1 - (1 - alpha(s)) / (1 - alpha(t)) for t = 1, 1 - 1/n, ..., 1/n and s = t - 1/n, in float32 as dllm."""

    def masked(time: float) -> Tensor:
        """1 - alpha(t), through alpha, as dllm rounds it."""
        t = torch.tensor(time, dtype=torch.float32)
        alpha = 1 - t if schedule == "linear" else 1 - torch.cos((math.pi / 2) * (1 - t))
        return 1 - alpha

    return tuple(1 - masked((left - 1) / steps) / masked(left / steps) for left in range(steps, 0, -1))


@cache
def transfers(masks: int, steps: int, schedule: str = "linear") -> tuple[int, ...]:
    """How many of so many masks each step unmasks: round(left p), half to even, where that is more than 0.

    Of `masks` in n steps, step i has p_i of `reveal_probabilities`, and `left` is what the steps before left
    (ZHZisZZ/dllm, core/samplers/utils.py, get_num_transfer_tokens). Twelve in five steps: 2, 2, 3, 2, 3.
    """
    found, left = [], masks
    for p in reveal_probabilities(steps, schedule):
        number = min(left, int(torch.round(torch.tensor(left, dtype=torch.float64) * p)))
        found.append(number)
        left -= number
    return tuple(number for number in found if number)


class OrderedNoise(SharedNoise):
    """The random stream of code that draws for other positions than our canvas has.

    Attributes:
        padding: of every row.
        span: the block of the step.
    """

    padding: Int[Tensor, "batch"]
    span = (0, 0)

    def __init__(self, stream: SharedNoise) -> None:
        self.generator = stream.generator


class RightPaddedNoise(OrderedNoise):
    """The random stream of code that pads rows on the right, for rows that are padded on the left."""

    def _aligned(self, values: Tensor) -> Tensor:
        """Rows moved to the right by their padding."""
        width = values.shape[1]
        source = (torch.arange(width) - self.padding.cpu()[:, None]) % width
        return values[torch.arange(len(values))[:, None], source]

    def columns(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Float[Tensor, "evaluated width"]:
        """Draw for all positions of the batch, return the evaluated ones'."""
        values = torch.rand(*evaluated.shape, width, generator=self.generator, dtype=torch.float64)
        return self._aligned(values)[evaluated.cpu()]

    def positions(self, eligible: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """Draw for all positions of the batch."""
        return self._aligned(super().positions(eligible))


class DllmPropose(GumbelPropose):
    """LLaDA's proposals and confidences, with tokens that are suppressed always or at first.

    Attributes:
        first: whether this is the first step.
    """

    first = False

    def __init__(self, settings: DllmSettings, noise: Noise, ids: SpecialIds, reference_quirks: bool) -> None:
        super().__init__(settings, noise, ids, reference_quirks)
        self.suppressed, self.at_first = settings.suppress_tokens, settings.begin_suppress_tokens

    def proposable(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        """The logits without the suppressed tokens."""
        at_first = self.at_first if self.first and not self.reference_quirks else ()
        return without(logits, [*self.suppressed, *at_first])

    def ranked(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        """With `reference_quirks` the tokens to suppress at first have confidence 0 at every step."""
        return without(logits, self.at_first) if self.reference_quirks else logits


class DllmSampler(Sampler):
    """Blocks from left to right; each step unmasks the number of tokens that the noise schedule gives.

    The numbers are `transfers` of the masks that a row's block has at its first step; a row whose numbers are used
    up waits for the others. Blocks of an answer are the same for all rows; in infilling they are cut from each
    row's own positions, and only the block's masks are eligible. Masks in the prompt of an answer are eligible from
    the first block on. By default they count too, and so do masks that an intervention puts back: the numbers are
    then scaled, and a block leaves no mask. `reference_quirks` counts the masks of the block alone, so that as many
    are left at the end.
    """

    withholds = ("suppress_tokens", "begin_suppress_tokens")
    stream_class: ClassVar[type[OrderedNoise]] = RightPaddedNoise
    stream: OrderedNoise | None = None
    infilling = False  # as in a rerun, which has no settings
    reference_quirks = False
    _before: Int[Tensor, "batch"] | None = None

    def __init__(
        self, settings: DllmSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = self.stream = self.stream_class(noise)
        self.settings, self.noise, self.reference_quirks = settings, noise, reference_quirks
        self.cfg_scale, self.guidance_keeps = settings.cfg_scale, tuple(settings.cfg_keep_tokens)
        self.propose = DllmPropose(settings, noise, ids, reference_quirks)
        self.select, self.infilling = Select(), settings.gen_length == 0
        self.select.by_topk = reference_quirks
        self._own_blocks: Tensor | None = None
        self._masks_of_blocks: list[list[int]] = []
        self._steps: list[int] = []
        self._block_steps = settings.steps
        self._block_masks: Tensor | None = None

    def network(self, model: Any, first: FirstCanvas) -> Network:
        """The canvas's network; the random stream and the blocks of infilling learn where rows begin."""
        self._before = padding_before(first.content)
        if self.stream is not None:
            self.stream.padding = self._before
        if self.infilling:
            self._cut(first.content, first.masked)
        return super().network(model, first)

    def _cut(self, content: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]) -> None:
        """The block of every position of infilling (-1: padding), and each block's masks by row."""
        width = content.shape[1] if self.settings.block_length is None else self.settings.block_length
        own = torch.arange(content.shape[1], device=content.device) - padding_before(content)[:, None]
        self._own_blocks = torch.where(content, own // width, -1)
        count = self.settings.blocks(content.shape[1])
        self._masks_of_blocks = [((self._own_blocks == block) & masked).sum(-1).tolist() for block in range(count)]

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step: of each block those that unmask something in some row."""
        settings, found = self.settings, list[StepPlan]()
        length = positions if self.infilling else settings.gen_length
        self._block_steps = settings.block_steps(length)
        spans = [(0, positions)] * settings.blocks(length)
        if not self.infilling:
            width = settings.block_length or length
            starts = range(prompt_length, positions, width)
            spans = [(start, min(start + width, positions)) for start in starts]
            self._masks_of_blocks = [[stop - start] for start, stop in spans]
        self._steps = [
            self._block_steps if settings.stochastic_transfer and any(masks)
            else max(len(self._numbers(one)) for one in masks)
            for masks in self._masks_of_blocks
        ]  # fmt: skip
        for block, (span, steps) in enumerate(zip(spans, self._steps, strict=True)):
            found += [StepPlan(len(found) + i, sum(self._steps), block, span, steps - i) for i in range(steps)]
        return found

    def _numbers(self, masks: int) -> tuple[int, ...]:
        return transfers(masks, self._block_steps, self.settings.schedule)

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Masked positions up to the end of the block; in infilling those of the row's block."""
        if self._own_blocks is not None:
            return masked & (self._own_blocks.to(masked.device) == plan.block)
        return masked & (torch.arange(masked.shape[1], device=masked.device) < plan.span[1])

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row this step unmasks."""
        done = self._steps[plan.block] - plan.remaining
        if done == 0 or self._block_masks is None:
            alone = self.reference_quirks and self._own_blocks is None
            self._block_masks = (masked[:, slice(*plan.span)] if alone else eligible).sum(-1)
        if self.settings.stochastic_transfer:
            return self._drawn(eligible, plan)
        left = eligible.sum(-1).tolist()
        numbers = [
            self._number(self._numbers(masks)[done:], there, plan)
            for masks, there in zip(self._block_masks.tolist(), left, strict=True)
        ]
        return torch.tensor(numbers, device=eligible.device)

    def _number(self, planned: tuple[int, ...], there: int, plan: StepPlan) -> int:
        """A row's number: the planned one, scaled where there are more or fewer masks than planned."""
        if self.reference_quirks:
            return planned[0] if planned else 0
        if plan.remaining == 1:
            return there
        if not planned:
            return -(-there // plan.remaining)
        return round(there * planned[0] / sum(planned))

    def _drawn(self, eligible: Bool[Tensor, "batch position"], plan: StepPlan) -> Int[Tensor, "batch"]:
        """Binomial numbers: each eligible mask counts with the step's probability."""
        steps = self._block_steps
        p = reveal_probabilities(steps, self.settings.schedule)[steps - plan.remaining]
        return (self.noise.masked_positions(eligible).to(eligible.device) < p).sum(-1)

    def state(self) -> dict[str, Tensor]:
        """The masks that the block had at its first step."""
        return {} if self._block_masks is None else {"block_masks": self._block_masks}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        self._block_masks = state.get("block_masks")

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The block that the random stream draws for, whether the step is the first, and where rows begin."""
        if self.stream is not None:
            self.stream.span = plan.span
        self.select.padding = self._before  # type: ignore[assignment]
        self.propose.first = plan.index == 0  # type: ignore[assignment]


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """Settings of `answer_settings`; the default block is at most the answer, lists of ids become tuples."""
    values = answer_settings(defaults, given, masks)
    if "block_length" not in given and values["gen_length"] and values["block_length"] is not None:
        values["block_length"] = min(values["block_length"], values["gen_length"])
    names = ("suppress_tokens", "begin_suppress_tokens", "cfg_keep_tokens")
    values |= {name: () for name in names if name in values and values[name] is None}
    return with_token_ids(values, *names)


ALGORITHM = Algorithm("dllm", DllmSettings, DllmSampler, resolve, RANKED, corruption=CountCorruption())
