"""AR decoding of the baselines as a sampler: every step decides the next position, from left to right."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.sampling.algorithm_registry import PLAIN, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.network import PrefixLogits, most_likely
from dlm_lens.sampling.noise import Noise, add_gumbel
from dlm_lens.sampling.samplers.base import FirstCanvas, Sampler
from dlm_lens.sampling.settings import SpecialIds, first_id, not_negative


@dataclass(frozen=True)
class CausalSettings:
    """Settings of AR decoding.

    Args:
        gen_length: tokens of the answer.
        temperature: 0 takes the most likely token, above 0 samples from softmax(logits / temperature).
        use_cache: False computes the whole prefix at every step, so that hooks and recorders see the attention of
            every query and not of the newest alone.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    temperature: float = 0.0
    use_cache: bool = True

    def __post_init__(self) -> None:
        if self.gen_length < 1:
            raise ValueError(f"gen_length is {self.gen_length}; an AR model writes at least 1 token")
        not_negative(self, "temperature", zero="greedy")


class CausalPropose(nn.Module):
    """x0 of the next position = argmax of the (noisy) logits; confidence = its probability under the clean ones.

    A row that has ended proposes its end token, with the confidence of the token that it would have taken.
    """

    def __init__(self, settings: CausalSettings, noise: Noise, ends: tuple[int, ...]) -> None:
        super().__init__()
        self.temperature, self.noise, self.ends = settings.temperature, noise, ends
        self.ended: Bool[Tensor, "batch"] | None = None

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "batch d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 and its confidence at the one position of every row that is evaluated."""
        scores = logits
        if self.temperature > 0:
            scores = add_gumbel(logits, self.noise.columns(evaluated, eligible, logits.shape[-1]), self.temperature)
        token = most_likely(scores)
        confidence = logits.float().softmax(-1).gather(-1, token[:, None]).squeeze(-1)
        if self.ends and self.ended is not None:
            token = token.masked_fill(self.ended, self.ends[0])
        return Proposal(
            canvas.masked_scatter(evaluated, token),
            torch.full(canvas.shape, -torch.inf, dtype=torch.float32, device=canvas.device).masked_scatter(
                evaluated, confidence
            ),
        )


class SelectAll(nn.Module):
    """Choose every eligible position."""

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        return eligible


class CausalSampler(Sampler):
    """One token per step and row; a row that has ended repeats its end token until every row has ended.

    The network sees prefixes of the canvas (`PrefixLogits`), and what is not decided yet is open.
    """

    autoregressive = True
    has_quirks = False
    progress = ("decoding", "token")

    def __init__(
        self, settings: CausalSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        self.settings, self.use_cache = settings, settings.use_cache
        self.propose: CausalPropose = CausalPropose(settings, noise, ids.ends)
        self.select = SelectAll()
        self._prompt_length = 0

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts and an answer of placeholders, which nothing reads."""
        self._prompt_length = prompts.shape[1]
        placeholder = first_id(model.config.pad_token_id, model.config.eos_token_id, 0)
        answer = prompts.new_full((len(prompts), fillable.shape[1] - prompts.shape[1]), placeholder or 0)
        return torch.cat([prompts, answer], 1)

    def open_positions(self, canvas: Int[Tensor, "batch position"], step: int) -> Bool[Tensor, "batch position"]:
        """What is not decided yet is known by its place."""
        where = torch.arange(canvas.shape[1], device=canvas.device)
        return (where >= self._prompt_length + step).expand_as(canvas)

    def network(self, model: Any, first: FirstCanvas) -> PrefixLogits:
        """The network of the prefixes."""
        return PrefixLogits(model, first.content, use_cache=self.use_cache)

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """A step per token of the answer."""
        total = positions - prompt_length
        span = (prompt_length, positions)
        return [StepPlan(step, total, 0, span, total - step, prompt_length + step) for step in range(total)]

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The next position of every row."""
        return (torch.arange(masked.shape[1], device=masked.device) == plan.prefix_length).expand_as(masked)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """One."""
        return eligible.sum(-1)

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended."""
        return {} if self.propose.ended is None else {"ended": self.propose.ended}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        self.propose.ended = state["ended"]

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has ended."""
        token, ended = canvas[:, plan.prefix_length], self.propose.ended
        ended = torch.zeros_like(token, dtype=torch.bool) if ended is None else ended
        for end in self.propose.ends:
            ended = ended | (token == end)
        self.propose.ended = ended
        return bool(ended.all())

    def final_length(self, positions: int, steps: int) -> int:
        """The positions up to the last one that any row decided."""
        return positions - self.settings.gen_length + steps


def causal_settings(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """Settings of AR decoding, whose steps are its tokens.

    Raises:
        ValueError: another number of steps.
    """
    values = {**defaults, **given}
    steps = values.pop("steps", None)
    if steps is not None and steps != values["gen_length"]:
        raise ValueError(
            f"an AR model takes one step per token, so steps ({steps}) must equal gen_length "
            f"({values['gen_length']}) or be left out"
        )
    return values


ALGORITHM = Algorithm("causal", CausalSettings, CausalSampler, causal_settings, PLAIN)
