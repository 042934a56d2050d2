"""The entropy-bound sampler of uniform-noise DLMs: every position is predicted, accepted or made random again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.sampling.algorithm_registry import MINUS_ENTROPY, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.network import most_likely
from dlm_lens.sampling.noise import Draw, Noise, drawn_by_rows
from dlm_lens.sampling.samplers.base import one_block
from dlm_lens.sampling.samplers.uniform_noise import UniformNoiseSampler
from dlm_lens.sampling.settings import SpecialIds, at_least_one, not_negative


@dataclass(frozen=True)
class EntropyBoundSettings:
    """Settings of the entropy-bound sampler, under the names of DiffusionGemma's generation in transformers.

    Args:
        steps: denoising steps, at most.
        gen_length: tokens of the answer, which is one canvas.
        entropy_bound: a step accepts the k positions of lowest entropy, for the largest k with H_1 + ... + H_k-1
            at most this, in nats.
        t_min: temperature of the last step.
        t_max: temperature before the first one.
        stability_threshold: a row is done when the most likely tokens of all positions are those of this many steps
            before too, and it is confident; None: never early.
        confidence_threshold: mean entropy in nats below which a row is confident; None: never early.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int | None = 1
    confidence_threshold: float | None = 0.005

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "steps")
        not_negative(self, "entropy_bound", zero="accept the position with the lowest entropy alone")
        not_negative(self, "stability_threshold", zero="confidence alone ends a row")
        not_negative(self, "confidence_threshold", zero="never early")
        if not 0 < self.t_min <= self.t_max:
            raise ValueError(
                f"the temperatures are t_min={self.t_min} and t_max={self.t_max}; they must be above 0 (at 0 every "
                "entropy is 0, and the first step accepts all) and t_max at least t_min"
            )

    def temperature(self, remaining: int, total: int) -> float:
        """Of a step: t_min + (t_max - t_min) n / N, with n steps left of N, this one included."""
        return self.t_min + (self.t_max - self.t_min) * (remaining / total)


class EntropyPropose(nn.Module):
    """x0 drawn from softmax(logits / temperature); confidence = minus its entropy in nats.

    At a row's last step x0 is the most likely token.

    Attributes:
        temperature: of the step.
        last: the step is the run's last.
        ending: per row, whether this step is its last.
        entropy: of every position, inf where none was evaluated.
        best: the most likely tokens.
    """

    temperature = 1.0
    last = False
    ending: Bool[Tensor, "batch"]

    def __init__(self, settings: EntropyBoundSettings, noise: Noise) -> None:
        super().__init__()
        self.settings, self.noise = settings, noise
        self.history: Int[Tensor, "step batch position"] | None = None

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        drawn, likely, entropy = drawn_by_rows(self._drawn, self.noise, logits, evaluated, eligible)
        confidence = torch.full(canvas.shape, -torch.inf, dtype=entropy.dtype, device=canvas.device)
        confidence = confidence.masked_scatter(evaluated, -entropy).masked_fill(~eligible, -torch.inf)
        best = canvas.masked_scatter(evaluated, likely)
        self.ending = self._ends(best, confidence, eligible)
        return Proposal(
            torch.where(self.ending[:, None], best, canvas.masked_scatter(evaluated, drawn)), confidence
        )

    def _drawn(
        self, logits: Float[Tensor, "n d_vocab"], draw: Draw
    ) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"], Float[Tensor, "n"]]:
        """Tokens that are drawn, the most likely ones, and the entropies."""
        scaled = (logits / self.temperature).float().log_softmax(-1)
        probabilities = scaled.exp()
        entropy = -(probabilities * scaled.clamp(min=torch.finfo(scaled.dtype).min)).sum(-1)
        return draw(probabilities), most_likely(scaled), entropy

    def _ends(self, best: Tensor, confidence: Tensor, eligible: Tensor) -> Bool[Tensor, "batch"]:
        """The rows whose most likely tokens stay the same, with a low mean entropy; all rows at the last step."""
        running, settings = eligible.any(-1), self.settings
        if self.last or settings.stability_threshold is None or settings.confidence_threshold is None:
            return running & self.last
        if self.history is None:
            self.history = best.new_full((settings.stability_threshold, *best.shape), -1)
        unchanged = ((self.history == best) | ~eligible).all(-1).all(0)
        mean = -confidence.masked_fill(~eligible, 0.0).sum(-1) / eligible.sum(-1).clamp(min=1)
        if settings.stability_threshold:
            self.history = torch.cat([self.history[1:], best[None]])
        return running & unchanged & (mean < settings.confidence_threshold)


class SelectEntropyBound(nn.Module):
    """Accept the k positions of lowest entropy, for the largest k with H_1 + ... + H_k - H_k <= bound.

    With the entropies in ascending order H_k is their maximum; the left side bounds the mutual information between
    the accepted tokens, which are drawn independently (2505.24857; `EntropyBoundSampler.accept_canvas` of
    transformers). The first is always accepted; of equal entropies the earlier position comes first.

    Args:
        bound: in nats.

    Attributes:
        ending: rows of which all is accepted.
    """

    ending: Bool[Tensor, "batch"] | None = None

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that the step accepts, among open and decided ones; `count` has no part in it."""
        entropy, order = (-confidence).masked_fill(~eligible, torch.inf).sort(dim=-1, stable=True)
        known = entropy.isfinite()
        before = entropy.masked_fill(~known, 0.0).cumsum(-1) - entropy
        accepted = torch.zeros_like(eligible).scatter(-1, order, (before <= self.bound) & known)
        return accepted if self.ending is None else accepted | (eligible & self.ending[:, None])


class EntropyBoundSampler(UniformNoiseSampler):
    """Uniform-noise denoising (`DiffusionGemmaGenerationMixin.generate` of transformers, one canvas at a time).

    At every step the positions that `select` accepts take over the drawn token and are decided, and all others
    become new random tokens and are open. At a row's last step every position takes its most likely token, so that
    none stays open. A row ends early as `EntropyBoundSettings` says, and does not change after that.

    Rows have random generators of their own.
    """

    has_quirks = False

    def __init__(
        self, settings: EntropyBoundSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(noise)
        self.settings = settings
        self.propose: EntropyPropose = EntropyPropose(settings, noise)
        self.select: SelectEntropyBound = SelectEntropyBound(settings.entropy_bound)
        self._ended = torch.empty(0, dtype=torch.bool)

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts and an answer of random tokens; no row has ended."""
        self._ended = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
        return super().begin(model, prompts, fillable)

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step; there are no blocks."""
        return one_block(self.settings.steps, prompt_length, positions, self.settings.gen_length)

    def running(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The positions that the step may decide: the answer, in rows that have not ended."""
        return super().running(masked, plan) & ~self._ended[:, None]

    def temperature(self, plan: StepPlan) -> float:
        """Of a step."""
        return self.settings.temperature(plan.remaining, self.settings.steps)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The step's temperature, and whether it is the last."""
        self.propose.temperature, self.propose.last = self.temperature(plan), plan.remaining == 1

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step."""
        self.prepare(masked, plan)
        running = self.running(masked, plan)
        proposal = self.completed(Proposal(*self.propose(canvas, logits, evaluated, running)), plan)
        self.select.ending = self.propose.ending
        accepted = self.select(proposal.confidence, running, self.count(running, masked, plan))
        after = self.canvas_after(canvas, proposal, accepted & masked, accepted & ~masked)
        self._open = torch.where(running, ~accepted, self._open)
        after = self._with_random(after, plan.span)
        self._ended = self._ended | self.propose.ending
        return self.next_canvas(after, plan), proposal, accepted & masked

    def completed(self, proposal: Proposal, plan: StepPlan) -> Proposal:
        """The proposal as it is written; another one where a row's last step fills what follows its end."""
        return proposal

    def next_canvas(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> Int[Tensor, "batch position"]:
        """What the next step sees; another canvas where this one is finished and more follow."""
        return canvas

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has ended."""
        return bool(self._ended.all())

    def state(self) -> dict[str, Tensor]:
        """What is open, which rows have ended, and the most likely tokens of the last steps."""
        found = {**super().state(), "ended": self._ended}
        return found if self.propose.history is None else {**found, "likeliest": self.propose.history}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._ended = state["ended"]
        self.propose.history = state.get("likeliest")


def entropy_bound_settings(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings, then the checkpoint's; `temperature` is that of every step.

    Raises:
        ValueError: `temperature` beside `t_min` or `t_max`.
    """
    values = {**defaults, **given}
    temperature = values.pop("temperature", None)
    if temperature is not None:
        if "t_min" in given or "t_max" in given:
            raise ValueError(f"temperature {temperature} is t_min and t_max in one; leave it or them out")
        values |= {"t_min": temperature, "t_max": temperature}
    return values


ALGORITHM = Algorithm(
    "entropy_bound",
    EntropyBoundSettings,
    EntropyBoundSampler,
    entropy_bound_settings,
    f"{MINUS_ENTROPY}, at the step's temperature",
)
