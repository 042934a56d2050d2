"""P2, path planning (2502.03540), with the model as its own planner: a step may mask decided positions again."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.base import Sampler, one_block
from dlm_lens.sampling.samplers.cached_blocks import SpanNoise
from dlm_lens.sampling.samplers.dream import DreamPropose, DreamSettings
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.settings import SpecialIds, answer_settings, at_least_one, not_negative, positive_share


@dataclass(frozen=True)
class P2Settings:
    """Settings of the rule "p2" of Open-dLLM's `diffusion_generate` (veomni/models/transformers/qwen2).

    Args:
        steps: denoising steps, at most.
        gen_length: tokens of the answer.
        temperature: 0 takes the most likely token.
        top_p: keep the tokens whose probabilities sum to this, with the one that crosses it.
        top_k: then the k most likely.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "top_k")
        not_negative(self, "temperature", zero="greedy")
        positive_share(self, "top_p")


class SelectByArgsort(Select):
    """`Select` where `torch.argsort` chooses among equals, as in the authors' code: the lowest are left out."""

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that are decided after this step."""
        order = confidence.masked_fill(~eligible, torch.inf).argsort(dim=1)
        left = eligible.sum(-1) - count
        rank = torch.arange(order.shape[1], device=order.device).expand_as(order)
        lowest = torch.zeros_like(eligible).scatter(1, order, rank < left[:, None])
        return eligible & ~lowest


class P2Propose(DreamPropose):
    """x0 and its probability, of a softmax in float32.

    With `reference_quirks` the temperature and the filters have the dtype of the logits, as in the authors' code.
    """

    def _kept(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        return super()._kept(logits if self.reference_quirks else logits.float()).float()


class P2Sampler(Sampler):
    """Every step predicts all n positions that were masked at first, decided or not, and keeps the most confident.

    x0 is drawn from softmax(filtered(logits / temperature)), and its probability is the confidence, also at decided
    positions, whose own token may be another. After step j of N the floor(n (1 - (j + 1) / N)) positions with the
    lowest confidence are masked (float32, as in the reference); of the others those that were masked take x0, and
    the decided ones keep their token. A decided position that is masked again is `revised` in the run. Steps after
    the last mask is gone are left out.
    """

    adaptive = True
    variable: Bool[Tensor, "batch position"]

    def __init__(
        self, settings: P2Settings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        self.settings = settings
        self.stream: SpanNoise | None = None
        if isinstance(noise, SharedNoise):
            noise = self.stream = SpanNoise(noise)
        # The confidence of "maskgit_plus" is the probability of x0.
        rule = DreamSettings(
            settings.steps,
            settings.gen_length,
            settings.temperature,
            "maskgit_plus",
            settings.top_p,
            settings.top_k,
        )
        self.propose = P2Propose(rule, noise, ids, reference_quirks)
        self.select = SelectByArgsort() if reference_quirks else Select()

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts and an answer of mask tokens; what is masked now may be masked again."""
        canvas = super().begin(model, prompts, fillable)
        self.variable = self.open_positions(canvas, 0)
        return canvas

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step; there are no blocks."""
        return one_block(self.settings.steps, prompt_length, positions, self.settings.gen_length)

    def editable(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The decided ones among those that were masked at first, in rows that are not finished."""
        return self.variable & ~masked & masked.any(-1, keepdim=True)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row are decided after this step."""
        among = (self.variable | masked).sum(-1)
        done = (plan.total - plan.remaining + 1) / plan.total
        return among - (among.float() * (1.0 - done)).floor().long()

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The authors' code draws tokens for every position."""
        if self.stream is not None:
            self.stream.drawn = torch.ones_like(masked)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step: positions that `select` does not return are masked, open ones that it returns take x0."""
        self.prepare(masked, plan)
        decided = self.editable(masked, plan)
        running = self.eligible(masked, plan) | decided
        proposal = Proposal(*self.propose(canvas, logits, evaluated, running))
        kept = self.select(proposal.confidence, running, self.count(running, masked, plan))
        unmasked, again = kept & masked, decided & ~kept
        assert self.mask_id is not None
        after = self.canvas_after(canvas, proposal, unmasked, decided & kept)
        return after.masked_fill(again, self.mask_id), proposal, unmasked


ALGORITHM = Algorithm("p2", P2Settings, P2Sampler, answer_settings, FILTERED, corruption=CountCorruption())
