"""dLLM-Var's sampler: the answer grows by blocks until the end of the text is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import PLAIN, Algorithm
from dlm_lens.sampling.cached_network import CachedLogits
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.network import Network, network_inputs
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import FirstCanvas, RowEndingSampler
from dlm_lens.sampling.samplers.blocks import answer_to_write
from dlm_lens.sampling.samplers.cached_blocks import SelectConfident
from dlm_lens.sampling.samplers.llada import GumbelPropose
from dlm_lens.sampling.settings import SpecialIds, at_least_one
from dlm_lens.sampling.step_attention import StepAttention


@dataclass(frozen=True)
class DllmVarSettings:
    """Settings of `generate` (2510.24605; maomaocun/dLLM-Var, evaluation/utils/generate_function.py).

    Args:
        gen_length: the most tokens that the answer may grow to (`max_gen_length`).
        block_length: tokens by which it grows; the last block may be shorter.
        threshold: a step unmasks the proposals of the block whose probability is above it, and at least the most
            likely one.
        stop_tokens: ids that end a row; None for the model's ends of text and turn.
        use_cache: compute the keys and values before a block once, which is approximate; False computes everything
            up to the block's end at every step.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    threshold: float
    stop_tokens: tuple[int, ...] | None = None
    use_cache: bool = True
    temperature: ClassVar[float] = 0.0
    remasking: ClassVar[str] = "low_confidence"
    float64_confidence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least_one(self, "block_length")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; it is a probability, from 0 to 1")


def until(content: Bool[Tensor, "batch position"], stop: int) -> Bool[Tensor, "batch position"]:
    """The content before a position."""
    return content & (torch.arange(content.shape[1], device=content.device) < stop)


class GrowingLogits(CachedLogits):
    """Logits of steps that see nothing after their block (2510.24605; maomaocun/dLLM-Var).

    A step whose span begins before its block stores the span's keys and values: the block before it is computed
    for the last time, beside the masks of the new one. Other steps compute their block alone, and see what is
    stored before it.

    Args:
        model: from `dlm_lens.load`.
        content: False at the padding on the left.
    """

    def __init__(self, model: Any, content: Bool[Tensor, "batch position"]) -> None:
        super().__init__(model, content)
        self.content = content

    def enter(self, plan: StepPlan) -> None:
        """The step of the next passes, and the content that they see."""
        super().enter(plan)
        self.inputs = network_inputs(until(self.content, plan.span[1]))

    def replaces(self, plan: StepPlan) -> bool:
        """Whether the step's span begins before its block."""
        return plan.computed is not None and plan.computed[0] < plan.span[0]

    def predicts_from(self, plan: StepPlan, span: tuple[int, int]) -> int:
        """The span's first position: a block's first step may decide what is left of the block before."""
        return span[0]


class DllmVarSampler(RowEndingSampler):
    """Blocks from left to right, of a canvas whose positions after the block are not there yet: nothing sees them.

    With `use_cache` the first step of the answer is a pass over all up to the end of the first block, and keeps all
    keys and values. The first step of another block computes the block before it too, whose keys and values it
    keeps; every other step computes its block alone, beside those that are kept. So what is kept of a block is that
    of a pass in which it was decided and the next one masked. An edit of the canvas outside the computed span
    makes the step compute everything.

    A row ends with the block in which it has an end of the text or of the turn: its later blocks stay masked, and
    the canvas ends with the last row's block.

    `reference_quirks`: one prompt, whole blocks; [MASK] may be proposed, and what a block's steps leave is decided
    with the next block, or stays; confidence and threshold are compared in the dtype of the logits.
    """

    adaptive = True
    decodes_in_order = True
    reference_quirks = False

    def __init__(
        self, settings: DllmVarSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        self.settings, self.reference_quirks, self.mask = settings, reference_quirks, ids.mask
        self.cache = "prefix" if settings.use_cache else None
        self.propose = GumbelPropose(settings, noise, ids, reference_quirks)
        self.select = SelectConfident(settings.threshold, None, above=True)
        self.stops = ids.stops if settings.stop_tokens is None else settings.stop_tokens
        self._begin, self._kept_until, self._stop = 0, 0, 0
        self._end: int | None = None

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> "DllmVarSampler":
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.cache = "prefix" if settings.get("use_cache", True) else None
        return sampler

    @classmethod
    def attention_of(
        cls, settings: Mapping[str, Any], content: Bool[Tensor, "batch position"], prompt_length: int
    ) -> StepAttention:
        """Nothing after the block is seen."""
        return StepAttention(ends_with_span=True)

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """The tokens requested.

        Raises:
            ValueError: what the authors' code cannot do, with `reference_quirks`.
        """
        if self.reference_quirks and len(prompts) > 1:
            raise ValueError(
                f"the authors' code rewrites rows that have no mask left, and there are {len(prompts)} prompts: "
                "leave reference_quirks out, or give one prompt"
            )
        if self.reference_quirks and gen_length % self.settings.block_length:
            raise ValueError(
                f"the authors' code decodes whole blocks, and gen_length {gen_length} is no multiple of "
                f"block_length {self.settings.block_length}: leave reference_quirks out, or change one of them"
            )
        return gen_length

    def network(self, model: Any, first: FirstCanvas) -> Network:
        """The network of the growing canvas.

        Raises:
            ValueError: masks in a prompt, which no block holds, or learned sink tokens.
        """
        if bool((first.masked & first.content)[:, : first.prompt_length].any()):
            raise ValueError(
                "a prompt has mask tokens, and dLLM-Var writes an answer after the prompt alone: take them out, or "
                "load the model with sampler='llada' to fill them in"
            )
        return GrowingLogits(model, first.content)

    def cached_network(self, model: Any, content: Bool[Tensor, "batch position"]) -> Network:
        """The network of a finished run."""
        return GrowingLogits(model, content)

    def at(self, plan: StepPlan) -> None:
        """Take where the block ends."""
        self._stop = plan.span[1]

    def inputs(
        self,
        model: Any,
        content: Bool[Tensor, "batch seen"],
        canvas: Int[Tensor, "batch seen"],
        prompt_length: int,
    ) -> dict[str, Any]:
        """Arguments of a pass, which sees all up to the end of the block."""
        return network_inputs(until(content, self._stop))

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """As many steps of every block as it has positions; the authors' code makes one more of each."""
        self._begin, length = prompt_length, self.settings.block_length
        starts = range(prompt_length, positions, length)
        each = length + self.reference_quirks
        found, total = list[StepPlan](), each * len(starts)
        for block, start in enumerate(starts):
            stop = min(start + length, positions)
            for step in range(each):
                first = start if step else start - length
                computed = None if self.cache is None or (step == 0 and block == 0) else (first, stop)
                index = block * each + step
                found.append(StepPlan(index, total, block, (start, stop), each - step, computed=computed))
        return found

    def planned(
        self, plan: StepPlan, masked: Bool[Tensor, "batch position"], edited: Bool[Tensor, "batch position"]
    ) -> StepPlan:
        """The plan, which computes all where an edit or a mask is before its span, and all that is not kept yet."""
        if plan.computed is None:
            return plan
        start = min(plan.computed[0], self._kept_until)
        changed = edited
        if not self.reference_quirks:
            changed = edited | (masked if self.ended is None else masked & ~self.ended[:, None])
        return replace(plan, computed=None if bool(changed[:, :start].any()) else (start, plan.span[1]))

    def reach(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """What the step computes, up to the end of its block."""
        start = 0 if plan.computed is None else plan.computed[0]
        where = torch.arange(masked.shape[1], device=masked.device)
        return ((where >= start) & (where < plan.span[1])).expand_as(masked)

    def leaves_out(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether nothing is left to decide; in the authors' code in the answer, before it leaves a block."""
        if not self.reference_quirks:
            return super().leaves_out(masked, plan)
        return not bool(masked[:, self._begin : plan.span[1]].any())

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """One at least; as many as the steps that are left of the block require."""
        if self.reference_quirks:
            return eligible.any(-1).long()
        return (eligible.sum(-1) + plan.remaining - 1) // plan.remaining

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """Note up to where keys and values are kept of what is decided."""
        if plan.computed is None or plan.computed[0] < plan.span[0]:
            self._kept_until = plan.span[0]

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has an end of the text in a block that is finished."""
        written = canvas[:, self._begin : plan.span[1]]
        ends = torch.isin(written, written.new_tensor(self.stops)).any(-1)
        masks = (written == written.new_tensor(-1 if self.mask is None else self.mask)).any(-1)
        over = ends & (~masks | torch.tensor(plan.remaining == 1, device=canvas.device))
        self.ended = over if self.ended is None else self.ended | over
        if bool(self.ended.all()):
            self._end = plan.span[1]
        return self._end is not None

    def final_length(self, positions: int, steps: int) -> int:
        """All positions, or up to the end of the block in which the last row has ended."""
        return positions if self._end is None else self._end

    def keys_left_by(self, done: Sequence[StepPlan]) -> list[int]:
        """The last step that computed all, and those after it whose span begins before their block."""
        whole = super().keys_left_by(done)
        after = [i for i, plan in enumerate(done) if plan.computed is not None and plan.computed[0] < plan.span[0]]
        return [*whole, *(i for i in after if i > whole[0])] if whole else []

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended, and up to where keys are kept."""
        own = {"kept_until": torch.tensor(self._kept_until)}
        return {**super().state(), **own, **({} if self._end is None else {"end": torch.tensor(self._end)})}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._kept_until = int(state["kept_until"])
        self._end = int(state["end"]) if "end" in state else None


ALGORITHM = Algorithm(
    "dllm_var", DllmVarSettings, DllmVarSampler, answer_to_write, PLAIN, corruption=CountCorruption()
)
