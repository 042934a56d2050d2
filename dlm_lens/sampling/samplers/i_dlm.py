"""I-DLM's sampler: each step verifies the tokens that the last one drafted, decides the next, and drafts others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.attention import without_later_masks
from dlm_lens.sampling.algorithm_registry import Algorithm
from dlm_lens.sampling.denoising_run import DenoisingRun, Proposal, StepPlan
from dlm_lens.sampling.network import most_likely
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.dream import filtered
from dlm_lens.sampling.samplers.llada import without
from dlm_lens.sampling.samplers.moving_windows import MovingWindowSampler, resolve_window
from dlm_lens.sampling.samplers.sdar import SelectFirst
from dlm_lens.sampling.settings import SpecialIds, at_least_one, not_negative, positive_share
from dlm_lens.sampling.step_attention import StepAttention


@dataclass(frozen=True)
class IDLMSettings:
    """Settings of `IDLMBlockN` (Introspective-Diffusion/I-DLM, idlm_blockN.py; 2604.11035).

    Args:
        gen_length: tokens of the answer.
        stride: N, the tokens that a step decides at most: N - 1 that the last step drafted, and the next one
            (`gen_block_size`); 1 decodes as an AR model.
        temperature: 0 takes the most likely token, and keeps the drafts that are.
        top_k: the next token is one of the k most likely; None or 0 for all. Drafts are verified without filters.
        top_p: and one of the smallest set of tokens with this probability, both of the whole distribution.
        verify_alpha: a draft x is kept with probability min(1, p(x) / (verify_alpha q(x))); 0 keeps all.
        stop_tokens: ids that end a row; None for the model's ends of text and turn.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    stride: int
    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float | None = 0.95
    verify_alpha: float = 1.0
    stop_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "stride")
        not_negative(self, "temperature", zero="greedy")
        not_negative(self, "top_k", zero="all")
        positive_share(self, "top_p")
        if not 0 <= self.verify_alpha <= 1:
            raise ValueError(f"verify_alpha is {self.verify_alpha}; it is from 0 (keep all drafts) to 1")


def first(positions: Bool[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
    """The first of each row's positions."""
    return positions & (positions.cumsum(-1) == 1)


class IDLMPropose(nn.Module):
    """x0 is a draft where it is kept, else its correction; elsewhere the next token, and new drafts after it.

    With p the softmax of logits / temperature, and q that from which a token x was drafted, x is kept with
    probability min(1, p(x) / (verify_alpha q(x))), and its correction drawn from max(0, p - q). The next token is
    drawn from p with its filters, new drafts are argmax p. The confidence is p(x0). [MASK] is never an x0, unless
    `reference_quirks`; then q is of logits / temperature^2, since the authors' kernel divides again.

    Attributes:
        drafted: the open positions that hold drafts.
        before: q of each of them.
    """

    drafted: Bool[Tensor, "batch position"]
    before: Float[Tensor, "drafted d_vocab"]

    def __init__(self, settings: IDLMSettings, noise: Noise, ids: SpecialIds, reference_quirks: bool) -> None:
        super().__init__()
        self.settings, self.noise, self.reference_quirks = settings, noise, reference_quirks
        self.never = [] if reference_quirks else [ids.mask]

    def scores(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        """Logits divided by the temperature, in float32."""
        return without(logits.float(), self.never) / (self.settings.temperature or 1.0)

    def drafting(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        """The distribution q of drafts."""
        return (self.scores(logits) / (self.settings.temperature if self.reference_quirks else 1.0)).softmax(-1)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        settings, drafted, scores = self.settings, self.drafted, self.scores(logits)
        likely = scores.softmax(-1)
        tokens = canvas.masked_scatter(evaluated, most_likely(scores))
        if settings.temperature > 0:
            now, given = likely[drafted[evaluated]], canvas[drafted][:, None]
            uniform = self.noise.masked_positions(drafted).to(canvas.device)[drafted][:, None]
            bar = uniform * settings.verify_alpha * self.before.gather(-1, given)
            refused = drafted.masked_scatter(drafted, bar >= now.gather(-1, given))
            rest = (now - self.before).clamp(min=0)
            rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, now)
            following = first(eligible & ~drafted)
            scores, top_k, top_p = scores[following[evaluated]], settings.top_k or None, settings.top_p
            if self.reference_quirks:  # without flashinfer the nucleus is of what top k leaves
                scores, top_k = filtered(scores, None, top_k), None
            chosen = filtered(scores, top_p, top_k).softmax(-1)
            # A row's own generator draws what the step decides alone: a correction, or the next token.
            decided = following & ~refused.any(-1, keepdim=True)
            for rows, where, wanted in ((rest, drafted, first(refused)), (chosen, following, decided)):
                if len(rows):
                    tokens = tokens.masked_scatter(where, self.noise.tokens(rows, where, wanted))
            tokens = torch.where(drafted & ~refused, canvas, tokens)
        confidence = likely.gather(-1, tokens[evaluated][:, None]).squeeze(-1)
        found = confidence.new_zeros(canvas.shape).masked_scatter(evaluated, confidence)
        return Proposal(tokens, found.masked_fill(~eligible, -torch.inf))


class IDLMSampler(MovingWindowSampler):
    """Introspective strided decoding (2604.11035), from left to right under causal attention.

    A step sees a row's decided tokens and 2 (N - 1) drafts and masks; the output at i - 1 predicts position i. It
    decides the drafts of the last step up to the first that is not kept, which it corrects. If it keeps all, it
    decides the next token too, and drafts N - 1 after that; these are open, though they hold tokens. The first step
    decides a token and drafts none: it is the authors' pass over the prompt.

    With `reference_quirks` drafts reach beyond `gen_length`, so that the canvas is longer by N - 1 positions, and
    tokens are drawn from one stream, [MASK] among them.
    """

    windowed: ClassVar[bool] = True
    propose: IDLMPropose

    def __init__(
        self, settings: IDLMSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, ids, settings.stride - 1, reference_quirks=reference_quirks)
        self.propose = IDLMPropose(settings, noise, ids, reference_quirks)
        self.select = SelectFirst()

    @classmethod
    def attention_of(
        cls, settings: Mapping[str, Any], content: Bool[Tensor, "batch position"], prompt_length: int
    ) -> StepAttention:
        """Causally; of drafts and masks those that the authors' passes have."""
        return StepAttention(window=1, mask_reach=2 * int(settings["stride"]) - 2)

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts and an answer of mask tokens, without drafts."""
        self.drafted, self.propose.before = torch.zeros_like(fillable), torch.zeros(0, 1, device=fillable.device)
        return super().begin(model, prompts, fillable)

    def follow(self, run: DenoisingRun, step: int) -> None:
        """Take the open positions of a step of a finished run."""
        self.drafted = run.masked[step]

    def open_positions(self, canvas: Int[Tensor, "batch position"], step: int) -> Bool[Tensor, "batch position"]:
        """The masks, and the drafts of the last finished step."""
        return super().open_positions(canvas, step) | self.drafted

    def reach(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """What the network sees, and the position after it."""
        assert self.attention.mask_reach is not None
        content = torch.ones_like(masked) if self._content is None else self._content
        return without_later_masks(masked & content, self.attention.mask_reach + 1)

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The drafts, the next position and those to be drafted; at the first step the next position alone."""
        stride = self.settings.stride if plan.index else 1
        return super().eligible(masked, plan) & without_later_masks(masked & ~self.drafted, stride)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step: decide up to the first correction, stop token or position without a draft; draft the rest."""
        assert self.mask_id is not None
        eligible, propose, before = self.eligible(masked, plan), self.propose, self.drafted
        propose.drafted = drafted = before & eligible
        if self.settings.temperature > 0:
            propose.before = propose.before[drafted[before]]
        proposal = Proposal(*propose(canvas, logits, evaluated, eligible))
        stops = torch.tensor(self.stops, dtype=canvas.dtype, device=canvas.device)
        breaks = torch.isin(proposal.tokens, stops) | (drafted & (proposal.tokens != canvas))
        last = (eligible & (breaks | ~drafted)).long()
        count = (eligible & (last.cumsum(-1) - last == 0)).sum(-1)
        unmasked = self.select(proposal.confidence, eligible, count)
        self.drafted = eligible & ~unmasked & ~(unmasked & breaks).any(-1, keepdim=True)
        if self.settings.temperature > 0:
            propose.before = propose.drafting(logits[self.drafted[evaluated]])
        left = canvas.masked_fill(before, self.mask_id)
        return self.canvas_after(left, proposal, unmasked | self.drafted), proposal, unmasked

    def state(self) -> dict[str, Tensor]:
        """The drafts, and the distributions that they are from."""
        return {**super().state(), "drafted": self.drafted, "before": self.propose.before}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self.drafted, self.propose.before = state["drafted"], state["before"]


ALGORITHM = Algorithm(
    "i_dlm",
    IDLMSettings,
    IDLMSampler,
    resolve_window,
    "the probability of the token at the temperature, without filters",
)
