"""DMax's sampler: LLaDA2's blocks, whose decoded positions are predicted again from soft inputs until they stay."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import BlockLayout
from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import DenoisingRun, Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import FirstCanvas, Revise
from dlm_lens.sampling.samplers.llada2 import BlockwiseSampler, BlockwiseSettings, resolve
from dlm_lens.sampling.samplers.sdlm import SelectPrefix
from dlm_lens.sampling.settings import SpecialIds, at_least_one

CONDITIONS = ("confidence", "none")
"""What a step can be conditioned on."""


@dataclass(frozen=True, kw_only=True)
class DMaxSettings:
    """Settings of soft parallel decoding (2604.08302; czg1225/DMax, generate_uniform.py and parallel_strategy.py).

    Args:
        gen_length: tokens of the answer; the last block is decoded whole, `texts` end before.
        block_length: tokens of a block, counted from the text's first token.
        threshold: masks are decoded from left to right, up to the first whose confidence is below it, and at least
            the first mask. The authors evaluate with 0.5, and with 0.65 on code; their model card has 0, with which
            the first step of a block decodes all of it.
        end_threshold: a row is done with a block once every position that it decodes there has at least this
            confidence, or as soon as a step changes no token.
        steps_per_block: steps of a block, at most; None for `block_length`.
        temperature: 0 alone: the most likely token is proposed, of which the soft inputs are.
        self_conditioning: what the next step is conditioned on: the "confidence" of this one's tokens, by which its
            inputs are soft; or "none", so that nothing but tokens passes from step to step.
        use_cache: compute finished blocks once, which is exact.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    threshold: float = 0.5
    end_threshold: float = 0.9
    steps_per_block: int | None = None
    temperature: float = 0.0
    self_conditioning: str = "confidence"
    use_cache: bool = True

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "block_length", "steps_per_block")
        if self.temperature != 0:
            raise ValueError(
                f"temperature is {self.temperature}; DMax's soft inputs are of the most likely tokens: it must be 0"
            )
        if self.self_conditioning not in CONDITIONS:
            raise ValueError(
                f"self_conditioning is {self.self_conditioning!r}; it must be one of {', '.join(CONDITIONS)}"
            )
        for name in ("threshold", "end_threshold"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it is a probability, from 0 to 1")


class SoftBlockLogits(BlockLogits):
    """Logits of blocks whose step sees the confidence of its tokens.

    Args:
        model: from `dlm_lens.load`, with a decoder that takes `token_confidence`.
        content: False where there is padding.
        sampler: which knows the confidences.
        **options: of `BlockLogits`.
    """

    def __init__(
        self, model: Any, content: Bool[Tensor, "batch position"], sampler: "DMaxSampler", **options: Any
    ) -> None:
        super().__init__(model, content, **options)
        self.sampler = sampler

    def enter(self, plan: StepPlan) -> None:
        """The step of the next passes."""
        self.sampler.at(plan)

    def _inputs(
        self, canvas: Int[Tensor, "batch seen"], start: int, finished: Int[Tensor, "batch"]
    ) -> dict[str, Any]:
        """The confidences beside the other arguments."""
        inputs, confidence = super()._inputs(canvas, start, finished), self.sampler.confidence_of(canvas)
        return inputs if confidence is None else {**inputs, "token_confidence": confidence[:, start:]}


class DMaxSampler(BlockwiseSampler):
    """Each step decodes the confident masks at a block's front, and proposes all that is decoded there again.

    A step proposes the most likely token of every position of the answer in the block, with its probability as
    confidence. Masks take it over up to the first below `threshold`, decoded positions always. In the next step the
    input of a decoded position lies between the embedding of its token and that of [MASK], by this confidence
    (`SoftInputs`); a token that something else wrote there has its own embedding. The first step of a block has
    none of these inputs, and finished blocks are seen as tokens, so that their keys and values stay in the cache.

    A row that is done with a block waits for the others. By default it is not done while it has masks in it, and
    the last step of a block decodes all that is left. With `reference_quirks` (one row) [MASK] may be proposed, and
    opens a decoded position again, and the run ends with a block that holds an end of the text, prompt included.
    """

    mask: int | None = None
    conditioned = True
    _block = -1
    _before: Proposal | None = None

    def __init__(
        self, settings: DMaxSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(BlockwiseSettings.of(settings), noise, ids, reference_quirks=reference_quirks)
        self.settings, self.revise = settings, Revise(-math.inf)
        self.conditioned = settings.self_conditioning == "confidence"
        self.select = SelectPrefix(settings.threshold, reached=True)
        self._done = torch.empty(0, dtype=torch.bool)

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run, or of a likelihood, which has no such steps."""
        sampler = super().for_rerun(settings)
        given = settings.get("self_conditioning", "confidence")
        sampler.conditioned = given == "confidence" and "blocks_of" not in settings
        return sampler

    def block_logits(
        self, model: Any, content: Bool[Tensor, "batch position"], layout: BlockLayout, **options: Any
    ) -> SoftBlockLogits:
        """The logits of these blocks."""
        self.mask = model.config.mask_token_id
        return SoftBlockLogits(model, content, self, layout=layout, ignored=self.ignored(model), **options)

    def network(self, model: Any, first: FirstCanvas) -> BlockLogits:
        """The network of block diffusion.

        Raises:
            ValueError: `reference_quirks` with several rows, all of which the authors' code decodes as long as any.
        """
        if self.reference_quirks and len(first.content) > 1:
            raise ValueError(
                f"reference_quirks with {len(first.content)} prompts: the authors' code goes on with a block until "
                "all rows are done with it; leave reference_quirks out, or run them one by one"
            )
        network = super().network(model, first)
        if self.reference_quirks:
            # Their first block begins after as many positions as the prompt has tokens beside its masks.
            known = int((~first.masked[:, : first.prompt_length]).sum())
            where = torch.arange(first.masked.shape[1], device=first.masked.device)
            self._answer = first.masked & (where >= known // self.block_length * self.block_length)
            self._begin = int(self._answer.any(0).int().argmax())
        return network

    def at(self, plan: StepPlan) -> None:
        """Forget what was proposed in another block."""
        if plan.block != self._block:
            self._before = None

    def follow(self, run: DenoisingRun, step: int) -> None:
        """Take what the step before in the same block proposed.

        Raises:
            ValueError: a part of a run lacks that step.
        """
        self._before = None
        if not self.conditioned or not run.block_numbers[step]:
            return
        numbers = run.step_numbers
        if not step or numbers[step - 1] != numbers[step] - 1:
            raise ValueError(
                f"step {numbers[step]} sees the confidences of step {numbers[step] - 1}, which this part of the "
                "run does not hold; give the whole run"
            )
        self._block, self._before = run.blocks[step], Proposal(run.proposals[step - 1], run.confidence[step - 1])

    def confidence_of(self, canvas: Int[Tensor, "batch seen"]) -> Float[Tensor, "batch seen"] | None:
        """The confidence of each token that the step before proposed, and -inf for others; None at a first step."""
        if self._before is None or not self.conditioned:
            return None
        tokens, confidence = (part[:, : canvas.shape[1]].to(canvas.device) for part in self._before)
        return confidence.masked_fill((tokens != canvas) | self.open(canvas), -torch.inf)

    def most_steps(self) -> int:
        """The steps of a block."""
        return self.settings.steps_per_block or self.block_length

    def at_work(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch"]:
        """The rows that have an answer in the block and are not done with it."""
        there = (self._answer & self.reach(masked, plan)).any(-1)
        return there & ~self._done if plan.block == self._block else there

    def editable(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Decided positions of the answer in the block, in rows that are not done with it."""
        return self._answer & ~masked & self.running(masked, plan)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """At least the first mask; in the last step of a block all that is left."""
        left = eligible.sum(-1)
        return left if plan.remaining == 1 and not self.reference_quirks else left.clamp(max=1)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step."""
        active = self._answer & self.running(masked, plan)
        after, proposal, unmasked = super().forward(canvas, logits, evaluated, masked, plan)
        over = (~active | (proposal.confidence >= self.settings.end_threshold)).all(-1) | (after == canvas).all(-1)
        if not self.reference_quirks:
            over &= ~(self.open(after) & active).any(-1)
        over |= plan.remaining == 1
        done = self._done if plan.block == self._block else torch.zeros_like(over)
        self._block, self._done, self._before = plan.block, done | (over & active.any(-1)), proposal
        return after, proposal, unmasked

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has ended."""
        if self.reference_quirks:
            over = not bool(self.at_work(self.open(canvas), plan).any())
            return over and self._has_end(canvas[:, slice(*plan.span)])
        return super().finished(canvas, plan)

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended, which are done with the block, and what the last step proposed."""
        own = {} if self._before is None else {"before": self._before.tokens, "sure": self._before.confidence}
        return {**super().state(), **own, "block": torch.tensor(self._block), "done": self._done}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._block, self._done = int(state["block"]), state["done"]
        self._before = Proposal(state["before"], state["sure"]) if "before" in state else None


ALGORITHM = Algorithm("dmax", DMaxSettings, DMaxSampler, resolve, FILTERED, corruption=CountCorruption())
