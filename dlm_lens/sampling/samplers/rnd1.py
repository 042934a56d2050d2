"""RND1's sampler: the positions of highest entropy stay masked, or an entropy bound says what is written."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.sampling.algorithm_registry import MINUS_ENTROPY, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.network import by_rows, most_likely
from dlm_lens.sampling.noise import Draw, Noise, SharedNoise, drawn_by_rows
from dlm_lens.sampling.samplers.base import Sampler, one_block
from dlm_lens.sampling.samplers.dream import filtered, filters
from dlm_lens.sampling.samplers.llada import without
from dlm_lens.sampling.samplers.selection import Select, by_confidence
from dlm_lens.sampling.settings import SpecialIds, answer_settings, at_least_one, not_negative, positive_share


@dataclass(frozen=True)
class RND1Settings:
    """Settings of RND1's `diffusion_sample` (RadicalNumerics/RND1, rnd/sampling.py).

    Args:
        steps: denoising steps, at most; their `num_diffusion_steps`.
        gen_length: tokens of the answer.
        temperature: of the distributions whose entropies rank, and from which tokens are drawn. 0: the most likely
            token, ranked by the entropy at temperature 1.
        greedy: take the most likely token at every temperature.
        top_k: keep the k most likely tokens.
        top_p: then those whose probabilities sum to this, with the one that crosses it.
        entropy_bound: write the k most confident positions, for the largest k with H_1 + ... + H_k - max H_i at
            most this, instead of a planned number; their `eb_gamma`, in nats.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    temperature: float = 0.1
    greedy: bool = False
    top_k: int | None = None
    top_p: float | None = None
    entropy_bound: float | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "top_k")
        not_negative(self, "temperature", zero="the most likely token")
        not_negative(self, "entropy_bound", zero="write the most confident position alone")
        positive_share(self, "top_p")


class RND1Propose(nn.Module):
    """x0 from softmax(filtered(logits / temperature)); confidence = minus its entropy in nats.

    H = -sum p ln p, with 0 ln 0 = 0. [MASK] is never an x0, and its probability counts in the entropy. With an
    entropy bound the confidence is ln p of x0, and `entropy` has H.

    Attributes:
        entropy: of every position at the last step; 0 where none was evaluated.
    """

    entropy: Float[Tensor, "batch position"]

    def __init__(self, settings: RND1Settings, noise: Noise, ids: SpecialIds) -> None:
        super().__init__()
        self.settings, self.noise, self.never = settings, noise, [ids.mask]
        self.greedy = settings.greedy or settings.temperature == 0

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        shared = self.noise if isinstance(self.noise, SharedNoise) else None
        if self.greedy:
            chosen, entropy, ranked = by_rows(self._chosen, logits, whole=shared is not None)
        else:
            # The authors' code draws for every output.
            at_once = None if shared is None else partial(shared.tokens_by_output, evaluated=evaluated)
            found = drawn_by_rows(self._chosen, self.noise, logits, evaluated, eligible, at_once=at_once)
            chosen, entropy, ranked = found
        self.entropy = entropy.new_zeros(canvas.shape).masked_scatter(evaluated, entropy)
        confidence = torch.full(canvas.shape, -torch.inf, dtype=torch.float32, device=canvas.device)
        confidence = confidence.masked_scatter(evaluated, ranked.float()).masked_fill(~eligible, -torch.inf)
        return Proposal(canvas.masked_scatter(evaluated, chosen), confidence)

    def _chosen(
        self, logits: Float[Tensor, "n d_vocab"], draw: Draw | None = None
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"], Float[Tensor, "n"]]:
        """The tokens, the entropies, and what positions are ranked by."""
        settings = self.settings
        logits = logits / (settings.temperature or 1.0)
        if filters(settings.top_p, settings.top_k, logits.shape[-1]):
            # [MASK] leaves before the filter, which may keep nothing else.
            logits = filtered(filtered(without(logits, self.never), None, settings.top_k), settings.top_p, None)
        known, choice = logits.log_softmax(-1), without(logits, self.never)
        chosen = most_likely(choice) if draw is None else draw(choice.softmax(-1))
        terms = known.exp() * known.clamp(min=torch.finfo(known.dtype).min)
        entropy = -terms.sum(-1)
        ranked = -entropy
        if settings.entropy_bound is not None:
            ranked = known.gather(-1, chosen[:, None]).squeeze(-1)
        return chosen, entropy, ranked


class SelectAllButUncertain(Select):
    """`Select` by -H, where `torch.topk` chooses the positions that stay masked, as in the reference.

    Of equal entropies, common at low temperatures, it may keep other positions than those that it would write.
    """

    by_topk = True

    def _of_topk(
        self, confidence: Float[Tensor, "batch position"], count: Int[Tensor, "batch"]
    ) -> Bool[Tensor, "batch position"]:
        """All positions but the uncertain ones of every row."""
        lowest = torch.finfo(confidence.dtype).min
        uncertain = (-confidence).masked_fill(confidence == -torch.inf, lowest)
        kept = (confidence > -torch.inf).sum(-1) - count
        chosen = torch.ones_like(confidence, dtype=torch.bool)
        for row, number in enumerate(kept.tolist()):
            chosen[row, uncertain[row].topk(number).indices] = False
        return chosen


class SelectConfidentBound(nn.Module):
    """Write the k most confident positions, for the largest k with H_1 + ... + H_k - max(H_1, ..., H_k) <= bound.

    The order is that of falling confidence; the left side bounds the mutual information of the written tokens,
    which are drawn independently (2505.24857, with the error proxy "confidence"). The first is always written.

    Args:
        bound: in nats.
        propose: whose `entropy` is H.
    """

    def __init__(self, bound: float, propose: RND1Propose) -> None:
        super().__init__()
        self.bound = bound
        self._entropies = lambda: propose.entropy  # `propose` is the sampler's child, and no child of this module

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks; `count` says of which rows all are."""
        order = by_confidence(confidence, eligible)
        entropy = self._entropies().gather(-1, order)
        admitted = entropy.cumsum(-1) - entropy.cummax(-1).values <= self.bound
        chosen = torch.zeros_like(eligible).scatter(-1, order, admitted)
        return (chosen | (count == eligible.sum(-1))[:, None]) & eligible


class RND1Sampler(Sampler):
    """Step j of n leaves the floor(m (n - 1 - j) / n) positions of highest entropy masked, of m at the start.

    The product is computed in float32, as in the reference. With an entropy bound a step writes what
    `SelectConfidentBound` admits, and the last one all that is left. A step at which nothing is masked is left out.
    A row counts its own masks. With `reference_quirks` the answer's last position holds the padding token from the
    start: the authors' code keeps it free for the end of the text.
    """

    adaptive = True

    def __init__(
        self, settings: RND1Settings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        self.settings, self.reference_quirks = settings, reference_quirks
        self.propose: RND1Propose = RND1Propose(settings, noise, ids)
        bound = settings.entropy_bound
        if bound is not None:
            self.select: nn.Module = SelectConfidentBound(bound, self.propose)
        else:
            self.select = SelectAllButUncertain() if reference_quirks else Select()
        self.begun_with = torch.zeros(0, dtype=torch.long)

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts and an answer of mask tokens, which are counted."""
        canvas = super().begin(model, prompts, fillable)
        if self.reference_quirks and self.settings.gen_length > 1:
            canvas[:, -1] = int(model.config.pad_token_id or 0)
        self.begun_with = self.open_positions(canvas, 0).sum(-1)
        return canvas

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step; there are no blocks."""
        return one_block(self.settings.steps, prompt_length, positions, self.settings.gen_length)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row this step unmasks; with a bound all at the last step, and else unknown."""
        left = eligible.sum(-1)
        if plan.remaining == 1:
            return left
        if self.settings.entropy_bound is not None:
            return torch.full_like(left, -1)
        kept = (self.begun_with.to(left.device) * ((plan.remaining - 1) / plan.total)).long()
        return (left - kept).clamp(min=0)


ALGORITHM = Algorithm(
    "rnd1",
    RND1Settings,
    RND1Sampler,
    answer_settings,
    f"{MINUS_ENTROPY}, after temperature and filters; with entropy_bound ln p of the proposed token",
    corruption=CountCorruption(),
)
