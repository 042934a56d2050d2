"""ReMDM's sampler (2503.00307): MDLM's ancestral sampling, whose steps may mask decided positions again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import NOISE_EPS, sigma_of
from dlm_lens.sampling.algorithm_registry import BESIDE_MASK, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import LogLinearCorruption
from dlm_lens.sampling.network import Rows
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.mdlm import (
    AncestralPropose,
    MDLMSampler,
    MDLMSettings,
    Times,
    exponential,
    log_probabilities,
    within_nucleus,
)
from dlm_lens.sampling.settings import SpecialIds, answer_settings, known_remasking, positive_share

REMASKING = ("cap", "rescale", "conf", "loop")


@dataclass(frozen=True)
class ReMDMSettings(MDLMSettings):
    """Settings of ReMDM's `_sample` (kuleshov-group/remdm, diffusion.py), beside MDLM's.

    Args:
        predictor: "ddpm_cache", whose share of masked positions at time t is t; the original has no other here.
        remasking: the rule for the probability sigma with which a step masks a decided position again (its
            `sampler`, "remdm-cap" and so on). With alpha = 1 - t and sigma_max = min(1, (1 - alpha_s) / alpha_t):
            "cap", min(eta, sigma_max); "rescale", eta sigma_max; "conf", sigma_max times the softmax, over the
            row's decided positions, of minus the probabilities with which their tokens were written; "loop", none
            before time `t_on` and after `t_off`, and eta between them, where alpha stays at `alpha_on`.
        eta: of the rule, from 0 to 1; "conf" has none.
        t_on: of "loop", the time after which decided positions are masked again; time runs from 1 to 0.
        t_off: of "loop", the time after which they no longer are.
        alpha_on: of "loop", the share of decided positions between the two.
        nucleus_p: draw from the most likely tokens whose probabilities sum to at most this, so that the token that
            crosses it is left out, but never the first. 1 for all.

    Raises:
        ValueError: a value is out of its range.
    """

    predictors: ClassVar[tuple[str, ...]] = ("ddpm_cache",)
    remasking: str = "cap"
    eta: float = 0.008
    t_on: float = 0.55
    t_off: float = 0.05
    alpha_on: float = 0.9
    nucleus_p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        known_remasking(self.remasking, REMASKING, REMASKING, "ReMDM")
        positive_share(self, "nucleus_p")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta is {self.eta}; it is a probability, from 0 to 1")
        if not 0 < self.t_off < self.t_on < 1 or not 0 < self.alpha_on < 1:
            raise ValueError(
                f"t_on is {self.t_on}, t_off {self.t_off} and alpha_on {self.alpha_on}; they must lie between "
                "0 and 1, and t_off below t_on"
            )
        if self.remasking == "loop" and self.eta > (1 - self.alpha_on) / self.alpha_on:
            raise ValueError(
                f"eta is {self.eta}, and with alpha_on {self.alpha_on} a step can mask at most "
                f"{(1 - self.alpha_on) / self.alpha_on:.4g} of the decided positions again; give less"
            )

    def step(self, index: int, *, none: float | Tensor = 0.0) -> tuple[Times, float]:
        """The noise of a step for masked positions, and sigma for decided ones (of "conf", sigma_max).

        A masked position becomes a token with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), where
        sigma is 0 in "conf".

        Args:
            index: of the step.
            none: that 0, as a tensor in whose dtype the probabilities are computed.
        """
        schedule = torch.linspace(1, self.eps, self.steps + 1, dtype=torch.float32)
        t, length = schedule[index], (1 - self.eps) / self.steps
        level = float(sigma_of((1 - NOISE_EPS) * t))
        if index == self.steps:
            return Times(level, 1.0, 0.0, drawn=False), 0.0
        if self.remasking == "loop":
            return self._loop(t, length, level)
        s = t - length
        alpha_t, alpha_s = float(1 - t), float(1 - s)
        most = (1 - alpha_s) / alpha_t if alpha_t > 0 else 1.0
        if self.remasking == "conf":
            return Times(level, *_shares(alpha_t, alpha_s, none)), min(1.0, most)
        sigma = self.eta * min(1.0, most)
        if self.remasking == "cap":
            sigma = min(self.eta, most) if alpha_t > 0 else self.eta
        return Times(level, *_shares(alpha_t, alpha_s, sigma)), sigma

    def _loop(self, t: Float[Tensor, ""], length: float, level: float) -> tuple[Times, float]:
        """The step of "loop" that begins at time t."""
        on, off, alpha = self.t_on, self.t_off, self.alpha_on
        if off < float(t) <= on:
            return Times(level, *_shares(alpha, alpha, self.eta)), self.eta
        if float(t) > on:
            before, after = (1 - (1 - time) * alpha / (1 - on) for time in (t, t - length))
        else:
            before, after = (time * (1 - alpha) / off for time in (t, t - length))
        # Of few steps one may be longer than the rest of the time.
        return Times(level, float(before - after), max(0.0, float(after))), 0.0


def _shares(alpha_t: float, alpha_s: float, sigma: float | Tensor) -> tuple[float, float]:
    """The probabilities that a masked position becomes a token, and that it stays masked."""
    rest = 1 - alpha_t
    return float((alpha_s - (1 - sigma) * alpha_t) / rest), max(0.0, float((1 - alpha_s - sigma * alpha_t) / rest))


class ReMDMPropose(AncestralPropose):
    """MDLM's proposals within the nucleus.

    Attributes:
        likely: P(x0) of the tokens that the last step proposed at its evaluated positions.
        plain: whether the step is one of MDLM's, in whose weights the original's have float32.
        every: the numbers of all positions, in code that draws them all; None to draw for masked ones.
    """

    likely: Float[Tensor, "evaluated"]
    every: Float[Tensor, "batch position width"] | None = None
    nucleus_p, plain = 1.0, False

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        self._parts = list[Tensor]()
        proposal = super().forward(canvas, logits, evaluated, eligible)
        self.likely = torch.cat(self._parts)
        return proposal

    def drawn(
        self, logits: Float[Tensor, "n d_vocab"], uniform: Float[Tensor, "n d_vocab"] | None
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        """X0 and its confidence."""
        found = super().drawn(logits, uniform)
        self._parts.append(self._likely.gather(-1, found[0][:, None])[:, 0])
        return found

    def probabilities(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """P(x0) within the nucleus, in float64; in the original in the dtype of the logits."""
        quirks = self.reference_quirks
        wide = logits if quirks else logits.double()
        likely = log_probabilities(wide, self.mask, self.temperature, rounded_twice=quirks).exp()
        self._likely = within_nucleus(likely, self.nucleus_p)
        return self._likely

    def weights(
        self, logits: Float[Tensor, "evaluated d_vocab"]
    ) -> tuple[Float[Tensor, "evaluated d_vocab"], Float[Tensor, "#evaluated"] | float]:
        """Those of MDLM; with `reference_quirks` rounded as in the original, which then draws in float64."""
        likely, times = self.probabilities(logits), self.times
        if not self.reference_quirks:
            return likely * times.unmasked, times.masked
        likely = likely.float() if self.plain else likely
        return (likely * times.unmasked).double(), float(torch.tensor(times.masked, dtype=likely.dtype))

    def uniform(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Rows:
        """A number for every evaluated position and column."""
        return super().uniform(evaluated, eligible, width) if self.every is None else self.every[evaluated.cpu()]


class ReMDMSampler(MDLMSampler):
    """MDLM's steps, which also mask decided positions of the answer again, each with the step's probability.

    Prompts stay. A position that is masked again is `revised` in the run. Every step runs, and the removal of noise
    writes what is left. With `reference_quirks` probabilities have the dtype of the logits, draws are one stream,
    and the confidences of "conf" are in bfloat16.

    Attributes:
        variable: the positions that were masked at first.
        written: minus the probability with which each decided token was written; -inf elsewhere.
    """

    settings_class: ClassVar[type[MDLMSettings]] = ReMDMSettings
    settings: ReMDMSettings
    propose: ReMDMPropose
    variable: Bool[Tensor, "batch position"]
    written: Float[Tensor, "batch position"]

    def __init__(
        self, settings: ReMDMSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, noise, ids, reference_quirks=reference_quirks)
        self.adaptive, self.reference_quirks, self.noise = False, reference_quirks, noise
        self.leaves_out_passes = not reference_quirks  # the authors' code makes them
        self.propose = ReMDMPropose(settings.temperature, noise, ids.mask, reference_quirks=reference_quirks)
        self.propose.nucleus_p = settings.nucleus_p

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.reference_quirks = bool(settings.get("reference_quirks"))
        return sampler

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts and an answer of mask tokens; what is masked now may be masked again.

        Raises:
            ValueError: "conf" with `reference_quirks` in another dtype than bfloat16.
        """
        if self.reference_quirks and self.settings.remasking == "conf" and model.dtype != torch.bfloat16:
            raise ValueError(
                "reference_quirks with remasking 'conf': the authors' code keeps confidences in bfloat16 and "
                f"fails where the network computes in {model.dtype}; load it with dtype='bfloat16', or leave "
                "reference_quirks out"
            )
        canvas = super().begin(model, prompts, fillable)
        self.variable = self.open_positions(canvas, 0)
        dtype = torch.bfloat16 if self.reference_quirks else torch.float32
        self.written = torch.full(canvas.shape, -torch.inf, dtype=dtype, device=canvas.device)
        return canvas

    def times(self, plan: StepPlan) -> Times:
        """The noise of a step."""
        dtype = torch.bfloat16 if self.reference_quirks else torch.float64
        return self.settings.step(plan.index, none=torch.zeros(1, dtype=dtype))[0]

    def editable(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The decided ones among those that were masked at first."""
        return self.variable & ~masked

    def needed(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The masked positions; whether a decided one is masked again depends on no logits."""
        return self.eligible(masked, plan)

    def state(self) -> dict[str, Tensor]:
        """Minus the probabilities with which the decided tokens were written, for "conf"."""
        return {**super().state(), "written": self.written}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self.written = state["written"]

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step: masked positions may take x0, decided ones may be masked."""
        self.prepare(masked, plan)
        assert self.mask_id is not None
        if self.reference_quirks and self.times(plan).drawn:
            every = torch.ones_like(masked)
            self.propose.every = self.noise.columns(every, every, logits.shape[-1]).unflatten(0, masked.shape)
        eligible, decided = self.eligible(masked, plan), self.editable(masked, plan)
        sigma = self._sigma(decided, plan)
        self.propose.plain = self.settings.remasking == "loop" and self.settings.step(plan.index)[1] == 0
        proposal = Proposal(*self.propose(canvas, logits, evaluated, eligible))
        again = decided & self._masked_again(canvas, decided, sigma)
        unmasked = self.select(proposal.confidence, eligible, eligible.sum(-1))
        fresh = self.written.masked_scatter(evaluated, -self.propose.likely.to(self.written))
        self.written = torch.where(unmasked, fresh, self.written).masked_fill(again, -torch.inf)
        made = self.canvas_after(canvas, proposal, unmasked)
        return made.masked_fill(again, self.mask_id), proposal, unmasked

    def _sigma(
        self, decided: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Float[Tensor, "batch position"] | float:
        """The probability with which the step masks each decided position again."""
        sigma = self.settings.step(plan.index)[1]
        if self.settings.remasking != "conf":
            return sigma
        shares = self.written.masked_fill(~decided, -torch.inf).softmax(-1)
        return shares.nan_to_num(0.0) * sigma  # a row without a decided position

    def _masked_again(
        self,
        canvas: Int[Tensor, "batch position"],
        decided: Bool[Tensor, "batch position"],
        sigma: Float[Tensor, "batch position"] | float,
    ) -> Bool[Tensor, "batch position"]:
        """Which positions are masked again; with `reference_quirks` by the draw of the token against [MASK]."""
        if isinstance(sigma, float) and sigma == 0:
            return torch.zeros_like(decided)
        if not self.reference_quirks:
            return self.noise.masked_positions(decided).to(canvas.device) < sigma
        assert self.propose.every is not None
        gumbel = exponential(self.propose.every, reference_quirks=True).to(canvas.device)
        own = gumbel.gather(-1, canvas[..., None])[..., 0]
        wide = torch.as_tensor(sigma, device=canvas.device)
        kept, masked = (one.to(self.propose.likely.dtype).double() for one in (1 - wide, wide))
        kept, masked = kept / own, masked / gumbel[..., self.mask_id]
        # Of equals the original's argmax takes the lower id, and [MASK] is the last one.
        return masked > kept


ALGORITHM = Algorithm(
    "remdm", ReMDMSettings, ReMDMSampler, answer_settings, BESIDE_MASK, corruption=LogLinearCorruption()
)
