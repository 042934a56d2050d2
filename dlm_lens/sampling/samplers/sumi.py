"""Sumi's samplers of uniform noise: ancestral, adaptive (the positions it would change most) and greedy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import OF_THE_TEXT, Algorithm
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.nelbo import UniformCorruption
from dlm_lens.sampling.network import most_likely
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import one_block
from dlm_lens.sampling.samplers.mdlm import SelectLikelier
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.samplers.uniform_noise import UniformNoiseSampler, positions_after
from dlm_lens.sampling.samplers.uniform_posterior import Levels, UniformPosteriorPropose, UniformPropose, drawn_once
from dlm_lens.sampling.settings import (
    SpecialIds,
    at_least_one,
    known_remasking,
    log_snr_bounds,
    not_negative,
    random_settings,
)

REMASKING = ("ancestral", "adaptive", "greedy")
SCHEDULES = ("linear", "cosine")
DELIMITER = 2
"""Positions of the delimiter of documents: the end of a text and the beginning of the next."""


@dataclass(frozen=True)
class SumiSettings:
    """Settings of `generate` (tohoku-nlp/sumi-7b, generation_sumi.py; 2606.19005).

    Args:
        steps: of the schedule; their `num_denoising_steps`.
        gen_length: tokens of the answer; their `max_new_tokens`.
        remasking: the rule of a step, their `sampler`: "ancestral", every token is drawn again from
            q(x_s | x_t, x); "adaptive", the `tokens_per_step` positions with the greatest max_j x_j - x_i, i the
            token that is there, take a token drawn from x (2512.10858, Eq. 9); "greedy", every position takes its
            most likely token.
        temperature: of the tokens' probabilities x; at 0 all is the most likely token's. Ranking has none.
        canvas_length: positions after the prompt. Those after answer and delimiter are denoised too, as context;
            with None there are none. The authors' count includes the prompt, as this with `reference_quirks`.
        delimiter: whether EOS and BOS follow the answer and stay, between two documents of the training.
        schedule: shares of the text's tokens alpha: "linear", from 1e-4 to 1 - 1e-4; "cosine",
            (1 + cos(pi t)) / 2 with t from 1 - 1e-3 to 1e-3.
        min_log_snr, max_log_snr: bounds of ln(alpha / (1 - alpha)).
        tokens_per_step: positions that a step of "adaptive" writes.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    remasking: str = "ancestral"
    temperature: float = 1.0
    canvas_length: int | None = None
    delimiter: bool = True
    schedule: str = "linear"
    min_log_snr: float = -9.0
    max_log_snr: float = 9.0
    tokens_per_step: int = 1

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "steps", "tokens_per_step")
        not_negative(self, "temperature", zero="greedy")
        known_remasking(self.remasking, REMASKING, REMASKING, "Sumi")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; it must be one of {', '.join(SCHEDULES)}")
        log_snr_bounds(self)
        if self.canvas_length is not None and self.canvas_length < self.least_canvas:
            end = f" and {DELIMITER} of the delimiter" if self.delimiter else ""
            raise ValueError(
                f"canvas_length is {self.canvas_length}; it must hold {self.gen_length} tokens of the answer{end}"
            )

    @property
    def least_canvas(self) -> int:
        """Positions of the answer and what must follow it."""
        return self.gen_length + (DELIMITER if self.delimiter else 0)

    def alphas(self, dtype: torch.dtype) -> Float[Tensor, "step_plus_one"]:
        """The share of the text's tokens before every step, and after the last: sigmoid of the bounded log-SNR."""
        if self.schedule == "linear":
            shares = torch.linspace(1e-4, 1 - 1e-4, self.steps + 1, dtype=dtype)
        else:
            shares = 0.5 + 0.5 * torch.cos(torch.linspace(1 - 1e-3, 1e-3, self.steps + 1, dtype=dtype) * torch.pi)
        shares = shares.clamp(1e-6, 1 - 1e-6)
        return (shares.log() - (-shares).log1p()).clamp(self.min_log_snr, self.max_log_snr).sigmoid()


def probabilities(
    logits: Float[Tensor, "n d_vocab"], temperature: float, dtype: torch.dtype
) -> Float[Tensor, "n d_vocab"]:
    """Softmax(logits / temperature), with a temperature of at least 1e-6, as there."""
    wide = logits.to(dtype)
    return (wide if temperature == 1 else wide / max(temperature, 1e-6)).softmax(-1)


class SumiAncestral(UniformPosteriorPropose):
    """x_s drawn from q(x_s | x_t, x), with the probabilities of the softmax in float64.

    With `reference_quirks` in float32, with the original's products, by `torch.multinomial` for every position.
    """

    def __init__(self, temperature: float, noise: Any, *, reference_quirks: bool) -> None:
        super().__init__(noise, reference_quirks=reference_quirks)
        self.temperature = temperature

    def probabilities(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """Of the text's token."""
        wide = torch.float32 if self.reference_quirks else torch.float64
        return probabilities(logits, self.temperature, wide)

    def drawn(
        self,
        weights: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """A token for each row of weights; the original draws for the prompt too."""
        if not self.reference_quirks:
            return drawn_once(self.noise, weights, evaluated, eligible)
        return self.noise.tokens_among(weights, evaluated, torch.ones_like(evaluated))

    def weights(
        self, likely: Float[Tensor, "evaluated d_vocab"], seen: Int[Tensor, "evaluated"]
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Of x_s; with `reference_quirks` q(x_s | x) q(x_t | x_s) / q(x_t | x) as the original multiplies them."""
        if not self.reference_quirks:
            return super().weights(likely, seen)
        alpha_t, alpha_s = self.levels.alpha_t, self.levels.alpha_s
        size, ratio = likely.shape[-1], alpha_t / alpha_s.clamp(min=1e-12)
        one_hot = torch.zeros_like(likely).scatter_(-1, seen[:, None], 1.0)
        seen_given = ratio * one_hot + (1 - ratio).clamp(min=0) * (1 / size)
        total = alpha_t * likely.gather(-1, seen[:, None]) + (1 - alpha_t) * (1 / size)
        found = (alpha_s * likely + (1 - alpha_s) * (1 / size)) * seen_given / total.clamp(min=1e-12)
        return found.clamp(min=0)


class SumiAdaptive(UniformPropose):
    """x0 drawn from x at a temperature; confidence = max_j x_j - x_i without one, i the token that is there.

    The confidence is how much the network would change the token (2512.10858, Eq. 9, whose prior is constant).
    """

    def __init__(self, temperature: float, noise: Any, *, reference_quirks: bool) -> None:
        super().__init__(noise, reference_quirks=reference_quirks)
        self.temperature = temperature

    def proposed(
        self,
        logits: Float[Tensor, "evaluated d_vocab"],
        seen: Int[Tensor, "evaluated"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> tuple[Int[Tensor, "evaluated"], Float[Tensor, "evaluated"]]:
        """Return x0 for every evaluated position, and the confidence."""
        wide = torch.float32 if self.reference_quirks else torch.float64
        likely = probabilities(logits, 1.0, wide)
        wanted = likely.amax(-1) - likely.gather(-1, seen[:, None])[:, 0]
        if self.temperature == 0:
            return most_likely(likely), wanted
        drawn = likely if self.temperature == 1 else probabilities(logits, self.temperature, wide)
        if self.reference_quirks:
            return self.noise.tokens_among(drawn, evaluated, torch.ones_like(evaluated)), wanted
        return drawn_once(self.noise, drawn, evaluated, eligible), wanted


class SumiSampler(UniformNoiseSampler):
    """Sumi's `generate`: an answer, a delimiter that stays, and after it random tokens, denoised as context.

    "ancestral" is Duo's (`DuoSampler`): after a step a position is decided while its token is rather the text's
    than noise. With "adaptive" and "greedy" a position is open until a step writes it; later steps may rewrite it.
    Every step runs; rows have random generators of their own. With `reference_quirks` there is the original's one
    stream, float32, and its count of `canvas_length`.
    """

    def __init__(
        self, settings: SumiSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(noise)
        self.settings, self.reference_quirks, self.end = settings, reference_quirks, ids.eos
        self.ancestral = settings.remasking == "ancestral"
        if self.ancestral:
            self.propose: Any = SumiAncestral(settings.temperature, noise, reference_quirks=reference_quirks)
            self.select: Any = SelectLikelier()
        else:
            temperature = 0.0 if settings.remasking == "greedy" else settings.temperature
            self.propose = SumiAdaptive(temperature, noise, reference_quirks=reference_quirks)
            self.select, self.writes_all = Select(), False
            self.select.by_topk = reference_quirks

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """Positions after the prompts: answer, delimiter, context.

        Raises:
            ValueError: as `positions_after`, with `reference_quirks`.
        """
        before = prompts.shape[1] if self.reference_quirks else 0
        return positions_after(before, self.settings.canvas_length, self.settings.least_canvas)

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts, random tokens, and the delimiter after the answer.

        Raises:
            ValueError: the config has no ids of the delimiter.
        """
        canvas = super().begin(model, prompts, fillable)
        if not self.settings.delimiter:
            return canvas
        first = getattr(model.config, "bos_token_id", None)
        if self.end is None or first is None:
            raise ValueError(
                f"delimiter=True writes EOS and BOS after the answer, and the model's config has eos_token_id "
                f"{self.end} and bos_token_id {first}; set them, or give delimiter=False"
            )
        start = prompts.shape[1] + self.settings.gen_length
        self._answer = self._answer.clone()
        self._answer[:, start : start + DELIMITER] = False
        self._open = self._answer
        canvas[:, start : start + DELIMITER] = canvas.new_tensor([self.end, int(first)])
        return canvas

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step; there are no blocks."""
        return one_block(self.settings.steps, prompt_length, positions, self.settings.gen_length)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The noise of the step."""
        if self.ancestral:
            alphas = self.settings.alphas(torch.float32 if self.reference_quirks else torch.float64)
            self.propose.levels = Levels(0.0, alphas[plan.index], alphas[plan.index + 1])

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row a step of "adaptive" writes; the others write all."""
        if self.settings.remasking != "adaptive":
            return eligible.sum(-1)
        return eligible.sum(-1).clamp(max=self.settings.tokens_per_step)


def sumi_settings(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings, then the checkpoint's; the default `canvas_length` is longer where the answer is."""
    values = random_settings(defaults, given, masks)
    if values.get("canvas_length") is not None and "canvas_length" not in given:
        values["canvas_length"] = max(values["canvas_length"], values["gen_length"] + DELIMITER)
    return values


ALGORITHM = Algorithm(
    "sumi",
    SumiSettings,
    SumiSampler,
    sumi_settings,
    f'how much the network would change the token; with remasking "ancestral" {OF_THE_TEXT}',
    corruption=UniformCorruption(),
)
