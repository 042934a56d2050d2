"""DiffuGPT's sampler: a step decides every masked position with one probability, with a token of the nucleus."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import RateCorruption
from dlm_lens.sampling.network import by_rows, most_likely
from dlm_lens.sampling.noise import Draw, Noise, SharedNoise, drawn_by_rows
from dlm_lens.sampling.samplers.dream import filtered
from dlm_lens.sampling.samplers.llada import without
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.samplers.timesteps import TimestepSampler
from dlm_lens.sampling.settings import SpecialIds, answer_settings, at_least_one, not_negative, positive_share

PLACEHOLDER = 0
"""The id that the authors' scripts have where text is to be written; it stays at the first position of a row."""


@dataclass(frozen=True)
class DiffuGPTSettings:
    """Settings of DiffuGPT's `generate_samples`: its diffusion_steps, logits_temp and topp_temp.

    Args:
        steps: denoising steps.
        gen_length: tokens of the answer.
        temperature: of the softmax from which tokens are drawn; 0 takes the most likely one.
        top_p: a token is one of the most likely ones that together have at least this probability; None for any.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    temperature: float = 0.95
    top_p: float | None = 0.9
    remasking: ClassVar[str] = "origin"
    eps: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        at_least_one(self, "steps")
        not_negative(self, "temperature", zero="greedy")
        positive_share(self, "top_p")


class DiffuGPTPropose(torch.nn.Module):
    """x0 from softmax(nucleus(logits / temperature)), greedy at temperature 0; the confidence is not used.

    [MASK] is never an x0 unless `reference_quirks`, with which a token is drawn for every output of the batch, used
    or not: that of position i by the numbers of output i - 1. The first position has no output before it, and gets
    `PLACEHOLDER`.
    """

    def __init__(self, settings: DiffuGPTSettings, noise: Noise, ids: SpecialIds, reference_quirks: bool) -> None:
        super().__init__()
        self.settings, self.noise, self.reference_quirks = settings, noise, reference_quirks
        self.never = [] if reference_quirks else [ids.mask]

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position, and a confidence of -inf."""
        shared = self.noise if self.reference_quirks and isinstance(self.noise, SharedNoise) else None
        if self.settings.temperature == 0:
            (chosen,) = by_rows(self._chosen, logits, whole=self.reference_quirks)
        else:
            at_once = None if shared is None else partial(shared.tokens_by_output, evaluated=evaluated)
            (chosen,) = drawn_by_rows(self._chosen, self.noise, logits, evaluated, eligible, at_once=at_once)
        if self.reference_quirks:
            chosen = chosen.masked_fill(evaluated.nonzero()[:, 1] == 0, PLACEHOLDER)
        confidence = torch.full(canvas.shape, -torch.inf, dtype=torch.float32, device=canvas.device)
        return Proposal(canvas.masked_scatter(evaluated, chosen), confidence)

    def _chosen(self, logits: Float[Tensor, "n d_vocab"], draw: Draw | None = None) -> tuple[Int[Tensor, "n"]]:
        """The tokens: the most likely ones, or drawn."""
        settings = self.settings
        scaled = without(logits / settings.temperature if settings.temperature > 0 else logits, self.never)
        kept = filtered(scaled, settings.top_p, None)
        if self.reference_quirks:
            # Theirs gives log-probabilities to torch.distributions, which normalises them again: bfloat16 shows it.
            kept = kept.log_softmax(-1)
            kept = kept - kept.logsumexp(-1, keepdim=True)
        likely = kept.softmax(-1)
        return (most_likely(likely) if draw is None else draw(likely),)


class DiffuGPTSampler(TimestepSampler):
    """Step k of T decides every masked position with probability 1 / (T - k), the last one what is left.

    So a position is decided at each step with probability 1 / T, independently of the others: Dream's and SMDM's
    "origin" with a last time of 0.

    With `reference_quirks` a position is decided also where its token is [MASK], which then stays, and the tokens
    of a step are drawn before its positions.
    """

    decided: Bool[Tensor, "batch position"] | None = None

    def __init__(
        self, settings: DiffuGPTSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, noise)
        self.settings, self.reference_quirks = settings, reference_quirks
        self.propose = DiffuGPTPropose(settings, noise, ids, reference_quirks)
        self.select = Select()

    def fraction(self, plan: StepPlan) -> Float[Tensor, ""]:
        """The probability with which the step decides a position."""
        return torch.tensor(1 / plan.remaining, dtype=torch.float64)

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts and an answer of mask tokens."""
        if self.reference_quirks and isinstance(self.noise, SharedNoise):
            self.decided = torch.zeros_like(fillable)
            # Theirs draws the attention mask, of nothing but ones, from the stream of the tokens.
            torch.bernoulli(torch.ones(fillable.shape[1], fillable.shape[1]), generator=self.noise.generator)
        return super().begin(model, prompts, fillable)

    def open_positions(self, canvas: Int[Tensor, "batch position"], step: int) -> Bool[Tensor, "batch position"]:
        """Positions that hold [MASK] and were not decided to hold it."""
        found = super().open_positions(canvas, step)
        return found if self.decided is None else found & ~self.decided

    def state(self) -> dict[str, Tensor]:
        """The positions that are decided, where [MASK] may be among their tokens."""
        return {} if self.decided is None else {"decided": self.decided}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        self.decided = state.get("decided", self.decided)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step; with `reference_quirks` tokens are drawn for all positions, and then the positions."""
        if self.decided is None:
            return super().forward(canvas, logits, evaluated, masked, plan)
        eligible = self.eligible(masked, plan)
        proposal = Proposal(*self.propose(canvas, logits, evaluated, eligible))
        if plan.remaining > 1:
            drawn = self.noise.positions(eligible).to(canvas.device) < float(self.fraction(plan))
            eligible = eligible & drawn
        unmasked = self.select(proposal.confidence, eligible, eligible.sum(-1))
        self.decided = self.decided | unmasked
        return self.canvas_after(canvas, proposal, unmasked), proposal, unmasked


ALGORITHM = Algorithm(
    "diffugpt",
    DiffuGPTSettings,
    DiffuGPTSampler,
    answer_settings,
    "-inf: positions are decided at random",
    corruption=RateCorruption(eps=1e-3),
)
