"""Psi-samplers of uniform noise: between Duo's posterior and noise put on a text that was predicted."""

import re
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import OF_THE_TEXT, Algorithm
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.nelbo import UniformCorruption
from dlm_lens.sampling.samplers.duo import DuoPropose, DuoSampler, DuoSettings, alpha_of
from dlm_lens.sampling.samplers.uniform_posterior import Levels, posterior
from dlm_lens.sampling.settings import random_settings

MODES = ("pure-posterior", "pure-pc", "constant-ETA", "constant-remdm-ETA", "max-capped-ETA", "max-rescale-ETA")
"""ETA is a number from 0 to 1."""

PROFILES = ("linear", "linear-constant-linear-T", "linear-constant-linear-ALPHA-inv")


@dataclass(frozen=True)
class PsiSettings(DuoSettings):
    """Settings of `generate_samples` with the predictor "psi" (s-sahoo/duo, trainer_base.py; 2602.21185).

    The times are in three parts, with a rule each for kappa, the share of the posterior.

    Args:
        high_mode: rule of the first part: "pure-posterior", kappa = 1 (Duo's sampler); "pure-pc", 0;
            "constant-ETA"; or one of ReMDM's, kappa = 1 - r / (1 - alpha_s) with r = eta ("constant-remdm-ETA"),
            min(eta, (1 - alpha_s) / alpha_t) ("max-capped-ETA"), or eta times that ("max-rescale-ETA").
        middle_mode: of the second part.
        low_mode: of the last.
        high_frac: share of the times in the first part.
        middle_frac: in the second.
        time_profile: "linear", from 1 to eps; "linear-constant-linear-T", which stays at T in the second part;
            "linear-constant-linear-ALPHA-inv", at T = 1 - ALPHA.
    """

    high_mode: str = "pure-posterior"
    middle_mode: str = "pure-posterior"
    low_mode: str = "pure-posterior"
    high_frac: float = 0.2
    middle_frac: float = 0.6
    time_profile: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("high_mode", "middle_mode", "low_mode"):
            if _mode(getattr(self, name)) is None:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(MODES)}")
        if not (self.high_frac >= 0 <= self.middle_frac and self.high_frac + self.middle_frac <= 1):
            raise ValueError(
                f"high_frac is {self.high_frac} and middle_frac {self.middle_frac}; they are shares of the times, "
                "at most 1 together"
            )
        if self.time_profile != "linear" and self._constant is None:
            raise ValueError(f"time_profile is {self.time_profile!r}; it must be one of {', '.join(PROFILES)}")

    @property
    def _constant(self) -> float | None:
        """The time of the second part, if it has one."""
        found = re.fullmatch(r"linear-constant-linear-(\d*\.?\d+)(-inv)?", str(self.time_profile))
        if found is None or not 0 < float(found[1]) < 1:
            return None
        return 1 - float(found[1]) if found[2] else float(found[1])

    @property
    def _parts(self) -> tuple[int, int, int]:
        """How many times there are in each part."""
        total = self.steps + 1
        high = round(self.high_frac * total)
        middle = min(round(self.middle_frac * total), total - high)  # both may be rounded up
        return high, middle, total - high - middle

    def times(self, dtype: torch.dtype) -> Float[Tensor, "step_plus_one"]:
        """The time before every step, and after the last."""
        constant, (high, middle, low) = self._constant, self._parts
        if constant is None:
            return super().times(dtype)
        first, last = (
            torch.linspace(1, constant, high, dtype=dtype),
            torch.linspace(constant, self.eps, low, dtype=dtype),
        )
        return torch.cat([first, torch.full((middle,), constant, dtype=dtype), last])

    def kappas(self, dtype: torch.dtype) -> Float[Tensor, "step_plus_one"]:
        """The share of the posterior in every step; the last number is of none."""
        modes = (self.high_mode, self.middle_mode, self.low_mode)
        parts = self.times(dtype).split(self._parts)
        return torch.cat([_kappas(mode, part) for mode, part in zip(modes, parts, strict=True)])


def _mode(mode: str) -> tuple[str, float] | None:
    """A rule and its eta."""
    if mode in ("pure-posterior", "pure-pc"):
        return "constant", float(mode == "pure-posterior")
    found = re.fullmatch(r"(constant|constant-remdm|max-capped|max-rescale)-(\d*\.?\d+)", str(mode))
    return None if found is None or float(found[2]) > 1 else (found[1], float(found[2]))


def _kappas(mode: str, times: Float[Tensor, "time"]) -> Float[Tensor, "time"]:
    """Kappa of a part's times; by ReMDM's rules 1 at the last, as in the original."""
    rule = _mode(mode)
    assert rule is not None
    name, eta = rule
    if name == "constant":
        return torch.full_like(times, eta)
    alphas = alpha_of(times)
    alpha_t, alpha_s = alphas[:-1], alphas[1:]
    rate = torch.full_like(alpha_t, eta)
    if name != "constant-remdm":
        rate = torch.minimum(rate, (1 - alpha_s) / alpha_t)
    rate = rate * eta if name == "max-rescale" else rate
    return torch.cat([torch.clip(1 - rate / (1 - alpha_s), 0, 1), torch.ones_like(times[:1])])


class PsiPropose(DuoPropose):
    """x_s drawn from kappa q(x_s | x_t, x_theta) + (1 - kappa) times noise on x_0 from q(x_0 | x_t, x_theta).

    The second part is alpha_s q(x_0 = j | x_t, x_theta) + (1 - alpha_s) / V.

    Attributes:
        kappa: of the step, and 1 - kappa.
    """

    kappa: tuple[float, float] = (1.0, 0.0)

    def weights(
        self, likely: Float[Tensor, "evaluated d_vocab"], seen: Int[Tensor, "evaluated"]
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Of x_s."""
        if self.kappa[1] == 0 and not self.reference_quirks:
            return super().weights(likely, seen)
        alpha = self.levels.alpha_s
        text = float(alpha) * self._normalised(likely, seen, self.levels.removed) + float(
            (1 - alpha) / likely.shape[-1]
        )
        return self.kappa[0] * self._normalised(likely, seen, self.levels) + self.kappa[1] * text

    def share(
        self,
        likely: Float[Tensor, "evaluated d_vocab"],
        seen: Int[Tensor, "evaluated"],
        chosen: Int[Tensor, "evaluated"],
    ) -> Float[Tensor, "evaluated"]:
        """The probability that the tokens `chosen` are the text's: the mean of the two parts', by their weights."""
        own = super().share(likely, seen, chosen)
        if self.kappa[1] == 0 or not self.levels.drawn:
            return own
        alpha, column = float(self.levels.alpha_s), chosen[:, None]
        one = self.kappa[0] * self._normalised(likely, seen, self.levels).gather(-1, column)[:, 0]
        text = self.kappa[1] * alpha * self._normalised(likely, seen, self.levels.removed).gather(-1, column)[:, 0]
        return (own * one + text) / (one + text + self.kappa[1] * (1 - alpha) / likely.shape[-1])

    def _normalised(
        self, likely: Float[Tensor, "n d_vocab"], seen: Int[Tensor, "n"], levels: Levels
    ) -> Float[Tensor, "n d_vocab"]:
        """`posterior`, which sums to 1."""
        total = float(levels.alpha_t * likely.shape[-1]) * likely.gather(-1, seen[:, None]) + float(
            1 - levels.alpha_t
        )
        return posterior(likely, seen, levels) / total


class PsiSampler(DuoSampler):
    """Psi-samplers (2602.21185): a step may put noise on decided positions again, whatever the schedule says.

    The removal of noise is Duo's. With a time that does not change (`time_profile`) the posterior keeps every
    token, and what a step rewrites is due to the other part.
    """

    kind, proposing = PsiSettings, PsiPropose
    settings: PsiSettings
    propose: PsiPropose

    def prepare(self, masked: Tensor, plan: StepPlan) -> None:
        """The noise of the step, and the share of the posterior in it."""
        super().prepare(masked, plan)
        self.propose.kappa = (1.0, 0.0)
        if plan.index < self.settings.steps:
            dtype = torch.float32 if self.reference_quirks else torch.float64
            kappa = self.settings.kappas(dtype)[plan.index]
            self.propose.kappa = (float(kappa), float(1 - kappa))


ALGORITHM = Algorithm(
    "duo_psi", PsiSettings, PsiSampler, random_settings, OF_THE_TEXT, corruption=UniformCorruption()
)
