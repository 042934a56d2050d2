"""Duo's sampler: ancestral sampling of uniform noise, in which every token can be rewritten at every step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.adapters.dit import NOISE_EPS, sigma_of
from dlm_lens.sampling.algorithm_registry import OF_THE_TEXT, Algorithm
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.nelbo import UniformCorruption
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import one_block
from dlm_lens.sampling.samplers.dream import filtered
from dlm_lens.sampling.samplers.mdlm import NoiseConditionedSampler, SelectLikelier, log_probabilities
from dlm_lens.sampling.samplers.uniform_noise import UniformNoiseSampler
from dlm_lens.sampling.samplers.uniform_posterior import Levels, UniformPosteriorPropose
from dlm_lens.sampling.settings import (
    SpecialIds,
    at_least_one,
    inner_eps,
    not_negative,
    of_run,
    positive_share,
    random_settings,
)

REMOVALS = ("ancestral", "greedy", "none")


@dataclass(frozen=True)
class DuoSettings:
    """Settings of `generate_samples` with the predictor "ancestral" (s-sahoo/duo, trainer_base.py).

    Args:
        steps: of the schedule t = linspace(1, eps, steps + 1).
        gen_length: tokens of the answer.
        noise_removal: the step after them, from the last time to 0: "ancestral", another draw; "greedy", the most
            likely token at every position (the greedy-tail sampler, 2506.10892, section 4.2); "none".
        eps: the last time.
        temperature: of the tokens' probabilities; at 0 all is the most likely token's, and what is rewritten stays
            random. The original has 1.
        top_p: the nucleus of the tokens' probabilities (`p_nucleus`), whose last token crosses it; None for all.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    noise_removal: str = "ancestral"
    eps: float = 1e-5
    temperature: float = 1.0
    top_p: float | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "steps")
        not_negative(self, "temperature", zero="greedy")
        positive_share(self, "top_p")
        inner_eps(self.eps)
        if self.noise_removal not in REMOVALS:
            raise ValueError(f"noise_removal is {self.noise_removal!r}; it must be one of {', '.join(REMOVALS)}")

    def times(self, dtype: torch.dtype) -> Float[Tensor, "step_plus_one"]:
        """The time before every step, and after the last."""
        return torch.linspace(1, self.eps, self.steps + 1, dtype=dtype)


def alpha_of(t: Float[Tensor, "*time"]) -> Float[Tensor, "*time"]:
    """Alpha(t) = 1 - (1 - 1e-3) t, of the log-linear schedule."""
    return 1 - (1 - NOISE_EPS) * t


def levels_of(settings: DuoSettings, index: int, *, reference_quirks: bool = False) -> Levels:
    """The noise of a step; with `reference_quirks` in float32, as the original computes it."""
    times = settings.times(torch.float32 if reference_quirks else torch.float64)
    t = times[index]
    levels = Levels(float(sigma_of((1 - NOISE_EPS) * t)), alpha_of(t), alpha_of(t))
    if index == settings.steps:
        return levels.removed._replace(drawn=settings.noise_removal == "ancestral")
    s = t - (t - times[index + 1])  # as there; in float32 it is not always the next time
    return levels._replace(alpha_s=alpha_of(s))


class DuoPropose(UniformPosteriorPropose):
    """x_s of Duo: the tokens' probabilities are those within the nucleus."""

    def __init__(self, settings: DuoSettings, noise: Noise, *, reference_quirks: bool) -> None:
        super().__init__(noise, reference_quirks=reference_quirks)
        self.settings = settings

    def probabilities(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """P(x_0) within the nucleus, in float64."""
        return self.logs(logits).double().exp()

    def logs(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """Its logarithm, in float64; the original's log-softmax has the dtype of the logits."""
        wide = logits if self.reference_quirks else logits.double()
        logs = log_probabilities(wide, None, self.settings.temperature)
        if self.settings.top_p is not None:
            logs = filtered(logs.double(), self.settings.top_p, None).log_softmax(-1)
        return logs


class DuoSampler(NoiseConditionedSampler, UniformNoiseSampler):
    """Ancestral sampling of uniform noise (2506.10892): x_s is drawn at every position of the answer.

    No position is final before the last step. After a step a position is decided while its token is rather the
    text's than noise: its confidence is at least one half; else it is open. Both take the token that was drawn.
    Every step runs; rows have random generators of their own. With `reference_quirks` there is the original's one
    stream, and its schedule in float32.

    Attributes:
        kind: class of its settings.
        proposing: class of `propose`.
    """

    kind: ClassVar[type[DuoSettings]] = DuoSettings
    proposing: ClassVar[type[DuoPropose]] = DuoPropose

    def __init__(
        self, settings: DuoSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(noise)
        self.settings, self.reference_quirks = settings, reference_quirks
        self.propose: DuoPropose = self.proposing(settings, noise, reference_quirks=reference_quirks)
        self.select = SelectLikelier()

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.settings = of_run(cls.kind, settings)
        sampler.reference_quirks = bool(settings.get("reference_quirks"))
        return sampler

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step, and the removal of noise; there are no blocks."""
        total = self.settings.steps + (self.settings.noise_removal != "none")
        return one_block(total, prompt_length, positions, self.settings.gen_length)

    def at(self, plan: StepPlan) -> None:
        """Take the step's noise level for the passes until the next step."""
        self.sigma = self.levels(plan).sigma

    def levels(self, plan: StepPlan) -> Levels:
        """The noise of a step."""
        return levels_of(self.settings, plan.index, reference_quirks=self.reference_quirks)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The noise of the step."""
        self.propose.levels = self.levels(plan)


ALGORITHM = Algorithm("duo", DuoSettings, DuoSampler, random_settings, OF_THE_TEXT, corruption=UniformCorruption())
