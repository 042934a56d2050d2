"""GIDD's sampler (2503.04482): ancestral steps of mixed noise, and after them steps that correct the text."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.families.gidd_dit import hybrid_rates, hybrid_shares
from dlm_lens.sampling.algorithm_registry import OF_THE_TEXT, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.nelbo import MixedCorruption
from dlm_lens.sampling.network import most_likely
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.base import one_block
from dlm_lens.sampling.samplers.mdlm import Float32Noise, NoiseConditionedSampler, log_probabilities
from dlm_lens.sampling.samplers.mixed_noise import MixedNoiseSampler, MixedPropose, Mixture
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.settings import SpecialIds, answer_settings, not_negative, of_run

LEAST_UNIFORM = math.exp(-20)
"""The original's least `p_uniform`."""


@dataclass(frozen=True)
class GiddDiTSettings:
    """Settings of GiddPipeline's `generate` and `self_correction` (dvruette/gidd, sampling.py and pipeline.py).

    Args:
        steps: from the time 1 - eps to eps; 0 for steps of correction alone.
        gen_length: tokens of the answer.
        temperature: of the tokens' probabilities; 0 takes the most likely token (what is noise stays random). The
            original has 1.
        min_p: outcomes of a position with less than this probability are not drawn.
        eps: the last time; the config's `t_eps`.
        correction_steps: after these, at most so many steps that each rewrite one position of every row: of tokens
            drawn everywhere that which differs from the canvas and is the most probable.
        correction_temperature: of the probabilities in these steps.
        correction_time: the time that the network is given in them.
        correction_stops: a row's correction ends with a step that changes nothing, and by `correction_patience`.
        correction_patience: it ends after more than so many steps in a row in which no more of its tokens than ever
            before are the network's most likely ones.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    temperature: float = 1.0
    min_p: float = 0.0
    eps: float = 1e-4
    correction_steps: int = 0
    correction_temperature: float = 0.1
    correction_time: float = 0.01
    correction_stops: bool = True
    correction_patience: int = 32

    def __post_init__(self) -> None:
        not_negative(self, "steps", zero="correction alone")
        not_negative(self, "correction_steps", zero="no correction")
        not_negative(self, "correction_patience", zero="until the first step without an improvement")
        if not isinstance(self.correction_stops, bool):
            raise ValueError(f"correction_stops is {self.correction_stops!r}; it must be True or False")
        not_negative(self, "temperature", zero="greedy")
        if not self.steps + self.correction_steps:
            raise ValueError("steps and correction_steps are 0: nothing would run; give one of them at least 1")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p is {self.min_p}; it must be at least 0 and below 1")
        for name, most in (("eps", 0.5), ("correction_time", 1)):
            if not 0 < getattr(self, name) < most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be between 0 and {most}")
        if self.correction_temperature <= 0:
            raise ValueError(f"correction_temperature is {self.correction_temperature}; it must be positive")

    def times(self, index: int, *, reference_quirks: bool) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The times before and after a step, of steps + 1 equally spaced ones.

        The original's are in float32 and one interval later: its first step takes the masks for those of the second
        time, and its last is from eps to eps, which changes nothing.
        """
        wide = torch.float32 if reference_quirks else torch.float64
        times = (1 - 2 * self.eps) * torch.linspace(0, 1, self.steps + 1, dtype=wide) + self.eps
        first = self.steps - index - reference_quirks
        return times[first], times[max(0, first - 1)]


class GiddDiTPropose(MixedPropose):
    """x_s drawn from q(x_s | x_t, x_theta); in steps of correction a token drawn from the network's probabilities.

    The confidence is the probability that x_s is the text's; in steps of correction that of a token which differs
    from the canvas, and 0 where it does not. With `reference_quirks` the numbers are float32, with the original's
    products, whose rounding decides tokens.

    Attributes:
        settings: of the run.
        correcting: whether the step is one of correction.
        p_uniform: of the model.
        times: before and after the step.
    """

    correcting = False
    p_uniform = 0.0
    times = (torch.tensor(0.5), torch.tensor(0.5))

    def __init__(self, settings: GiddDiTSettings, mask_id: int, noise: Any, *, reference_quirks: bool) -> None:
        super().__init__(mask_id, noise, reference_quirks=reference_quirks)
        self.settings = settings

    def probabilities(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """Of the text's token, without [MASK], in float64."""
        settings = self.settings
        temperature = settings.correction_temperature if self.correcting else settings.temperature
        if not self.reference_quirks or temperature == 0:
            return log_probabilities(logits.double(), self.mask_id, temperature).exp()
        without = logits.float().index_fill(-1, torch.tensor([self.mask_id], device=logits.device), -torch.inf)
        return (without / temperature).softmax(-1)

    def proposed(
        self,
        logits: Float[Tensor, "evaluated d_vocab"],
        seen: Int[Tensor, "evaluated"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> tuple[Int[Tensor, "evaluated"], Float[Tensor, "evaluated"]]:
        """The tokens of the evaluated positions, and their confidences."""
        if not self.correcting:
            return super().proposed(logits, seen, evaluated, eligible)
        likely = self.probabilities(logits)
        chosen = self.drawn(likely, evaluated, eligible)
        return chosen, (chosen != seen) * likely.gather(-1, chosen[:, None])[:, 0]

    def drawn(
        self,
        weights: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """A token for each row of weights; the original takes the last id where their sum is below the number."""
        if not self.reference_quirks:
            return super().drawn(weights, evaluated, eligible)
        sums = weights.cumsum(-1)
        sums[:, -1] = 1 + 1e-4
        uniform = self.noise.columns(evaluated, eligible, 1).to(weights)
        return torch.searchsorted(sums, uniform, right=True)[:, 0]

    def weights(
        self, likely: Float[Tensor, "evaluated d_vocab"], seen: Int[Tensor, "evaluated"]
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Of x_s, without outcomes below `min_p`; the most likely one stays where all are."""
        if self.reference_quirks:
            return self._original_weights(likely, seen)
        weights, least = super().weights(likely, seen), self.settings.min_p
        if not least:
            return weights
        rare = weights < least * weights.sum(-1, keepdim=True)
        return weights.masked_fill(rare & (weights < weights.amax(-1, keepdim=True)), 0.0)

    def _original_weights(
        self, likely: Float[Tensor, "evaluated d_vocab"], seen: Int[Tensor, "evaluated"]
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Q(x_t | x_s) q(x_s | x_theta) / q(x_t | x_theta), in float32 as the original multiplies them."""
        (alpha_t, noise_t), (alpha_s, noise_s) = (self._original_shares(time, likely) for time in self.times)
        here = seen[:, None]
        before, after = likely * alpha_t + noise_t, likely * alpha_s + noise_s
        moved = (noise_t - alpha_t / alpha_s * noise_s)[0, seen][:, None]
        one_hot = torch.zeros_like(seen[:, None].expand(likely.shape)).scatter(-1, here, 1)
        weights = (alpha_t / alpha_s * one_hot + moved) * after / before.gather(-1, here)
        if self.settings.min_p > 0:
            weights = (1 - (weights < self.settings.min_p).float()) * weights
            weights = weights / weights.sum(-1, keepdim=True)
        return weights

    def _original_shares(
        self, time: Float[Tensor, ""], likely: Float[Tensor, "evaluated d_vocab"]
    ) -> tuple[Float[Tensor, "1 1"], Float[Tensor, "1 d_vocab"]]:
        """Alpha, and what the noise writes, in float32."""
        t = time.to(likely)[None, None]
        mask = torch.zeros_like(likely[:1])
        mask[:, self.mask_id] = 1
        share = max(self.p_uniform, LEAST_UNIFORM)
        strength = torch.tensor(math.log(2) + math.log(share) - math.log(1 - share)).to(likely).exp()
        half = torch.tensor(0.5).to(likely)
        random = t.pow(half) * (1 - t).pow(half) * strength
        total = 1 + random
        return (1 - t) / total, (t * mask + random * ((1 - mask) / (likely.shape[-1] - 1))) / total


class GiddDiTSelect(Select):
    """Positions whose token is rather the text's than noise; in steps of correction the most probable change.

    Attributes:
        correcting: whether the step is one of correction.
    """

    correcting = False

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that are decided after the step, or those that it rewrites."""
        if not self.correcting:
            return eligible & (confidence >= 0.5)
        return super().forward(confidence, eligible, count) & (confidence > 0)


class GiddDiTSampler(NoiseConditionedSampler, MixedNoiseSampler):
    """Steps from masks to text, in which every position may change, and then steps that correct one token each.

    A row's correction ends for itself; steps in which no row is corrected are left out. Rows have random generators
    of their own. With `reference_quirks` there is the original's one stream, its float32, its times, and one row
    where there is correction, since the original corrects one text after the other.
    """

    select: GiddDiTSelect

    def __init__(
        self, settings: GiddDiTSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        if isinstance(noise, SharedNoise):
            noise = Float32Noise(noise)
        super().__init__(noise)
        assert ids.mask is not None
        self.settings, self.reference_quirks = settings, reference_quirks
        self.adaptive = self.rows_wait(vars(settings))
        self.propose: GiddDiTPropose = GiddDiTPropose(settings, ids.mask, noise, reference_quirks=reference_quirks)
        self.select = GiddDiTSelect()
        self.select.by_topk = reference_quirks
        self._over = torch.empty(0, dtype=torch.bool)
        self._best = self._waited = torch.empty(0, dtype=torch.long)

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.settings = of_run(GiddDiTSettings, settings)
        sampler.reference_quirks = bool(settings.get("reference_quirks"))
        return sampler

    @classmethod
    def rows_wait(cls, settings: Mapping[str, Any]) -> bool:
        """Whether rows end for themselves: with steps of correction."""
        return bool(settings.get("correction_steps")) and bool(settings.get("correction_stops", True))

    def first_noise(self) -> Mixture:
        """At t = 1 all is masked."""
        return Mixture(*hybrid_shares(torch.tensor(1.0, dtype=torch.float64), self.propose.p_uniform))

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts and an answer of masks.

        Raises:
            ValueError: several rows whose correction is to be the original's.
        """
        if self.reference_quirks and self.settings.correction_steps and len(prompts) > 1:
            raise ValueError(
                f"reference_quirks corrects one text after the other with one random stream, and there are "
                f"{len(prompts)} rows; give one prompt, or correction_steps=0"
            )
        self.propose.p_uniform = float(model.config.p_uniform)
        self._over = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
        self._best = self._waited = torch.zeros(len(prompts), dtype=torch.long, device=prompts.device)
        return super().begin(model, prompts, fillable)

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step, and those of correction; there are no blocks."""
        total = self.settings.steps + self.settings.correction_steps
        return one_block(total, prompt_length, positions, self.settings.gen_length)

    def at(self, plan: StepPlan) -> None:
        """Take the step's time for the passes until the next step."""
        self.sigma = self.settings.correction_time
        if plan.index < self.settings.steps:
            self.sigma = float(self.settings.times(plan.index, reference_quirks=self.reference_quirks)[0])

    def running(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The positions that the step may write, in rows whose correction has not ended."""
        return super().running(masked, plan) & ~self._over[:, None]

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """One position of each row in steps of correction; no number is planned in the others."""
        return eligible.any(-1).long() if plan.index >= self.settings.steps else eligible.sum(-1)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The kind of the step and its noise."""
        self.propose.correcting = self.select.correcting = plan.index >= self.settings.steps
        if not self.propose.correcting:
            times = self.settings.times(plan.index, reference_quirks=self.reference_quirks)
            self.propose.times = times
            noise = (Mixture(*hybrid_shares(time.double(), self.propose.p_uniform)) for time in times)
            self.propose.now, self.propose.then = noise

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step."""
        if plan.index < self.settings.steps:
            return super().forward(canvas, logits, evaluated, masked, plan)
        self.prepare(masked, plan)
        running = self.running(masked, plan)
        proposal = Proposal(*self.propose(canvas, logits, evaluated, running))
        chosen = self.select(proposal.confidence, running, self.count(running, masked, plan))
        after = self.canvas_after(canvas, proposal, chosen & masked, chosen & ~masked)
        best = canvas.masked_scatter(evaluated, self._best_tokens(logits).to(canvas.device))
        self._follow(((after == best) & running).sum(-1), (after != canvas).any(-1), running.any(-1))
        chosen = chosen & ~self._over[:, None]
        self._open = self._open & ~chosen
        return torch.where(chosen, after, canvas), proposal, chosen & masked

    def _best_tokens(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Int[Tensor, "evaluated"]:
        """The network's most likely tokens."""
        mask = torch.tensor([self.propose.mask_id], device=logits.device)
        return most_likely(logits.index_fill(-1, mask, -torch.inf))

    def _follow(
        self, right: Int[Tensor, "batch"], changed: Bool[Tensor, "batch"], rows: Bool[Tensor, "batch"]
    ) -> None:
        """Note of every row that is corrected its greatest number of most likely tokens, and whether it is over."""
        if not self.settings.correction_stops:
            return
        better = right > self._best
        self._best = torch.where(rows & better, right, self._best)
        self._waited = torch.where(better, 0, self._waited + 1)
        self._over = self._over | (rows & (~changed | (self._waited > self.settings.correction_patience)))

    def state(self) -> dict[str, Tensor]:
        """What is open, and how far the correction is."""
        return {**super().state(), "over": self._over, "best": self._best, "waited": self._waited}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._over, self._best, self._waited = (state[name] for name in ("over", "best", "waited"))


@dataclass(frozen=True)
class HybridCorruption(MixedCorruption):
    """The noise of the training: `hybrid_shares`."""

    def levels(self, config: Any, times: Float[Tensor, "n"]) -> tuple[Mixture, Mixture]:
        """The shares at these times, and their derivatives."""
        now, rates = (shares(times, config.p_uniform) for shares in (hybrid_shares, hybrid_rates))
        return Mixture(*now), Mixture(*rates)


ALGORITHM = Algorithm(
    "gidd_dit",
    GiddDiTSettings,
    GiddDiTSampler,
    answer_settings,
    f"{OF_THE_TEXT}; in steps of correction that of the new token",
    corruption=HybridCorruption(),
)
