"""Multi-block decoding: consecutive blocks at once, of which the later begin before the earlier are finished."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.attention import BlockCounts, RunningBlocks
from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.network import most_likely
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import FirstCanvas
from dlm_lens.sampling.samplers.dream import filtered, filters
from dlm_lens.sampling.samplers.llada import without
from dlm_lens.sampling.samplers.llada2 import BlockwiseSampler, BlockwiseSettings
from dlm_lens.sampling.samplers.sdar import SdarPropose
from dlm_lens.sampling.settings import SpecialIds, at_least_one, positive_share
from dlm_lens.sampling.step_attention import StepAttention


@dataclass(frozen=True, kw_only=True)
class MultiBlockSettings:
    """Settings of multi-block decoding (MBD-LMs, 2606.29215; SJTU-DENG-Lab/Diffulex, strategy multi_bd).

    Args:
        gen_length: tokens of the answer; the last block is decoded whole, `texts` end before.
        block_length: tokens of a block, counted from the text's first token.
        running_blocks: most blocks of a row that are decoded at once (`buffer_size`); 1 for one after the other,
            None for no limit.
        add_block_threshold: a block joins once this share of the positions of the one before is decided.
        semi_complete_threshold: a block of which no mask is confident enough writes the most confident one, once
            this share of the positions of the block before is decided. The first running block always does.
        threshold: every mask whose confidence is above it is written (`accept_threshold`).
        temperature: 0 takes the most likely token.
        top_k: keep so many of the most likely tokens, after top_p; None or 0 for all.
        top_p: keep the most likely tokens up to this probability, with the one that crosses it.
        use_cache: compute finished blocks once, which is exact.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    running_blocks: int | None = 2
    add_block_threshold: float = 0.1
    semi_complete_threshold: float = 0.9
    threshold: float = 0.95
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    use_cache: bool = True

    def __post_init__(self) -> None:
        at_least_one(self, "running_blocks")
        BlockwiseSettings.of(self)  # which checks its own
        positive_share(self, "add_block_threshold")
        positive_share(self, "semi_complete_threshold")


class MultiBlockPropose(SdarPropose):
    """x0 from softmax(filtered(logits / temperature)), and its probability there as confidence.

    The filters, top_p before top_k, change the confidence at temperature 0 too.

    Attributes:
        of_others: whether the probabilities are those of the tokens that may be x0, without [MASK]; with a filter
            they always are.
        last_of_equals: of equally likely tokens the last, as in the authors' code; otherwise the first.
    """

    of_others = True
    last_of_equals = False

    def _kept(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        logits = logits / self.temperature if self.temperature > 0 else logits
        chooses = filters(self.top_p, self.top_k or None, logits.shape[-1])
        if self.of_others or chooses:
            logits = without(logits, self.never)
        # A filter gives [MASK] the dtype's minimum again.
        return without(filtered(logits, self.top_p, self.top_k or None), self.never) if chooses else logits

    def _most_likely(self, logits: Float[Tensor, "n d_vocab"]) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        likely, choice = self._probabilities(logits)
        last = choice.shape[-1] - 1
        chosen = last - most_likely(choice.flip(-1)) if self.last_of_equals else most_likely(choice)
        return chosen, self._confidence(likely, chosen)


class SelectInBlocks(nn.Module):
    """Choose every eligible position above a threshold, and in some blocks at least the most confident one.

    Attributes:
        number: the block of every position.
        forced: the blocks that have to write.
    """

    number: Int[Tensor, "batch position"]
    forced: Bool[Tensor, "batch block"]

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks; of equals, the earlier one.

        Args:
            confidence: of x0.
            eligible: the masks of the running blocks.
            count: not read; the blocks in `forced` say how many there are at least.
        """
        above = eligible & (confidence > self.threshold)
        wrote = torch.zeros_like(self.forced, dtype=torch.long).scatter_add(1, self.number, above.long()) > 0
        open_ = eligible & (self.forced & ~wrote).gather(1, self.number)
        given = confidence.masked_fill(~open_, -torch.inf)
        least = torch.full(self.forced.shape, -torch.inf, dtype=given.dtype, device=given.device)
        best = open_ & (given == least.scatter_reduce(1, self.number, given, "amax").gather(1, self.number))
        equals = torch.zeros_like(self.forced, dtype=torch.long).scatter_add(1, self.number, best.long())
        in_earlier_blocks = (equals.cumsum(1) - equals).gather(1, self.number)
        return above | (best & (best.long().cumsum(1) == in_earlier_blocks + 1))


class MultiBlockSampler(BlockwiseSampler):
    """Each step decodes all running blocks of a row, each of which sees the blocks before it, masks and all.

    A row's running blocks begin with its first one that has a mask (`RunningBlocks`). Each is decoded by a
    threshold; a later one may write nothing at a step. Every row has running blocks of its own, so that it is
    decoded as it is alone. A row ends with the block that holds an end of its text, as soon as no mask is in or
    before it; what its later running blocks have decided stays.

    Keys and values of a block depend on those of earlier ones, and are kept once all of these are decided.

    With `reference_quirks` (one row) a finished block keeps its place among the running ones for one more step, in
    which the authors' engine stores its keys and values, so that the next block joins later; none joins once an end
    of the text is written; and of equally likely tokens the last one is proposed.

    Attributes:
        stores: whether a finished block keeps its place for a step, with `reference_quirks`.
    """

    stores = False
    _before: Bool[Tensor, "batch position"] | None = None
    _stop: int | None = None

    def __init__(
        self, settings: MultiBlockSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(BlockwiseSettings.of(settings), noise, ids)
        self.settings, self.stores = settings, reference_quirks
        self.propose = self.proposal(settings, noise, [ids.mask])
        self.propose.last_of_equals = reference_quirks
        self.select = SelectInBlocks(settings.threshold)

    def proposal(
        self, settings: MultiBlockSettings, noise: Noise, never: Sequence[int | None]
    ) -> MultiBlockPropose:
        """The module that proposes tokens, never these."""
        propose = MultiBlockPropose(
            noise, never, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
        )
        propose.in_float32 = True
        return propose

    @classmethod
    def attention_of(
        cls, settings: Mapping[str, Any], content: Bool[Tensor, "batch position"], prompt_length: int
    ) -> StepAttention:
        """Block by block, of which a row runs several at once."""
        running = RunningBlocks(
            int(settings.get("running_blocks") or settings.get("gen_length", 1)),
            float(settings.get("add_block_threshold", 1.0)),
            of_span=bool(settings.get("reference_quirks")),
        )
        return replace(super().attention_of(settings, content, prompt_length), running=running)

    def network(self, model: Any, first: FirstCanvas) -> BlockLogits:
        """The network of block diffusion.

        Raises:
            ValueError: `reference_quirks` with several rows, which have places of their own.
        """
        if self.stores and len(first.content) > 1:
            raise ValueError(
                f"reference_quirks with {len(first.content)} prompts: a stored step tells one row's running blocks "
                "there; leave reference_quirks out, or run them one by one"
            )
        self._content = self.attention.within_own_blocks(first.content)
        return super().network(model, first)

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """As many steps as the row with the most masks has, with the spans of one token a step: at most so many."""
        most, spans = int(self._answer.sum(-1).max()), self.block_layout.spans(self._begin, positions)
        found = []
        for step in range(most):
            first = min(step // self.block_length, len(spans) - 1)
            last = min(first + (self.settings.running_blocks or len(spans)), len(spans)) - 1
            span = spans[first][0], spans[last][1]
            found.append(StepPlan(step, most, 0, span, most - step, seen=positions))
        return found

    def planned(
        self, plan: StepPlan, masked: Bool[Tensor, "batch position"], edited: Bool[Tensor, "batch position"]
    ) -> StepPlan:
        """The plan with the span of all rows' running blocks."""
        where = self._decoded(masked).any(0).nonzero()
        if not len(where):
            return plan
        start, stop = int(where.min()), min(int(where.max()) + 1, self._stop or masked.shape[1])
        return replace(plan, span=(start, stop), seen=stop)

    def reach(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The positions of every row's running blocks that the step sees."""
        seen = torch.arange(masked.shape[1], device=masked.device) < (plan.seen or masked.shape[1])
        return self._running(masked) & seen

    def at_work(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch"]:
        """The rows that have masks."""
        return (masked & self._content).any(-1)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """One of each row's first running block."""
        return eligible.any(-1).long()

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The blocks, and which of them have to write: those after one that is decided far enough."""
        counts = BlockCounts.of(self.block_layout, self._content, masked)
        far = counts.reached(self.settings.semi_complete_threshold)
        self.select.number = counts.number
        self.select.forced = torch.cat([torch.ones_like(far[:, :1]), far[:, :-1]], 1)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step."""
        made = super().forward(canvas, logits, evaluated, masked, plan)
        self._before = masked if self.stores else None
        return made

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has ended."""
        masked = self.open(canvas) & self._answer
        ends = self._answer & torch.isin(canvas, canvas.new_tensor(self.ends))
        number = self.block_layout.numbers(canvas.shape[1])
        least = number.masked_fill(~ends, canvas.shape[1]).amin(-1, keepdim=True)
        self.ended = ~(masked & (number <= least)).any(-1)
        if self.stores and self._stop is None and bool(ends.any()):
            self._stop = plan.span[1]
        return bool(self.ended.all())

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended, what was open at the last step, and where the last block that joins ends."""
        own = {"open_before": self._before, "stop": None if self._stop is None else torch.tensor(self._stop)}
        return {**super().state(), **{name: value for name, value in own.items() if value is not None}}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._before = state.get("open_before")
        self._stop = int(state["stop"]) if "stop" in state else None

    def _running(self, masked: Bool[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
        running = self.attention.running
        assert running is not None
        return running.positions(self.block_layout, self._content, masked, self._before)

    def _decoded(self, masked: Bool[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
        """The running blocks of the rows that have not ended."""
        found = self._running(masked)
        return found if self.ended is None else found & ~self.ended[:, None]


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings, then the checkpoint's."""
    return {**defaults, **given}


ALGORITHM = Algorithm(
    "multi_block",
    MultiBlockSettings,
    MultiBlockSampler,
    resolve,
    f"{FILTERED}, among those other than [MASK]",
    corruption=CountCorruption(),
)
