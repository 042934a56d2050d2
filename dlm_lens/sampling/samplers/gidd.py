"""GIDD's sampler: blocks of noise after clean text, denoised by the posterior or where the network differs most."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import Context
from dlm_lens.sampling.algorithm_registry import OF_THE_TEXT, Algorithm
from dlm_lens.sampling.block_network import CleanContextLogits, clean_context_inputs
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.nelbo import MixedCorruption
from dlm_lens.sampling.network import most_likely
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import FirstCanvas
from dlm_lens.sampling.samplers.blocks import block_plans
from dlm_lens.sampling.samplers.dream import filtered
from dlm_lens.sampling.samplers.mixed_noise import MixedNoiseSampler, MixedPropose, Mixture
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.samplers.uniform_noise import positions_after
from dlm_lens.sampling.samplers.uniform_posterior import drawn_once
from dlm_lens.sampling.settings import (
    SpecialIds,
    at_least_one,
    known_remasking,
    log_snr_bounds,
    not_negative,
    positive_share,
)
from dlm_lens.sampling.step_attention import StepAttention

REMASKING = ("ancestral", "adaptive")
SCHEDULES = ("linear", "cosine")


@dataclass(frozen=True)
class GiddSettings:
    """Settings of `generate` (dvruette/gidd-easydel, model/modeling_gidd_hf.py; 2512.10858).

    Args:
        gen_length: tokens of the answer (`max_length`); the last block is decoded whole, `texts` end before.
        block_length: positions of a block.
        steps_per_block: denoising steps of a block (`steps`).
        remasking: the rule of a step (`sampling_method`): "ancestral", every token of the block is drawn again from
            q(x_s | x_t, x); "adaptive", the `tokens_per_step` positions of the block with the greatest
            (max_j x_j - x_i) b(i) take a token drawn from x, i the token that is there and b(i) the probability
            that the noise of the step writes it (Eq. 9).
        temperature: of the tokens' probabilities x; 0 takes the most likely token. Ranking has none.
        top_p: the nucleus of what is drawn from, whose last token crosses it; None for all.
        top_k: so many tokens are drawn from, before `top_p`; None for all.
        schedule: the share of the text's tokens between its bounds, at t from 1 to 0: "cosine",
            (1 + cos(pi t)) / 2; "linear", 1 - t.
        tokens_per_step: positions that a step of "adaptive" writes.
        min_length: positions of the answer, from its beginning, that no end of the text is written to.
        canvas_length: positions after the prompt. Those after the block are noise that the network sees; with None
            the canvas ends with the answer. The authors' count includes the prompt, as does this with
            `reference_quirks`.
        noise_type: b of the share of random tokens among the noise, sigmoid(log-SNR + b).
        min_log_snr, max_log_snr: bounds of ln(alpha / (1 - alpha)), alpha the share of the text's tokens.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    steps_per_block: int
    remasking: str = "ancestral"
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    schedule: str = "cosine"
    tokens_per_step: int = 1
    min_length: int = 0
    canvas_length: int | None = None
    noise_type: float = 0.0
    min_log_snr: float = -9.0
    max_log_snr: float = 9.0

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "block_length", "steps_per_block", "tokens_per_step", "top_k")
        not_negative(self, "temperature", zero="greedy")
        not_negative(self, "min_length", zero="no such position")
        positive_share(self, "top_p")
        known_remasking(self.remasking, REMASKING, REMASKING, "GIDD")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; it must be one of {', '.join(SCHEDULES)}")
        log_snr_bounds(self)
        if self.canvas_length is not None and self.canvas_length < self.answer:
            raise ValueError(
                f"canvas_length is {self.canvas_length}; it must hold the {self.answer} positions of the answer's "
                "blocks"
            )

    @property
    def answer(self) -> int:
        """Positions of the answer's blocks."""
        return math.ceil(self.gen_length / self.block_length) * self.block_length

    def level(self, time: int, dtype: torch.dtype) -> Mixture:
        """The noise at t = time / steps_per_block.

        Alpha is sigmoid(l) and the share of random tokens among the noise sigmoid(l + b), where l is the log-SNR of
        the schedule's share of the text's tokens, which goes from sigmoid(min_log_snr) to sigmoid(max_log_snr).
        """
        least, most = (torch.tensor(bound, dtype=dtype) for bound in (self.min_log_snr, self.max_log_snr))
        t = torch.linspace(0.0, 1.0, self.steps_per_block + 1, dtype=dtype)[time]
        share = 1 - t if self.schedule == "linear" else 0.5 + 0.5 * torch.cos(t * torch.pi)
        alpha = (most.sigmoid() - least.sigmoid()) * share + least.sigmoid()
        return mixture_at((alpha / (1 - alpha)).log().clamp(least, most), self.noise_type)


def mixture_at(log_snr: Float[Tensor, "*level"], noise_type: float) -> Mixture:
    """The noise at a log-SNR l: alpha = sigmoid(l), and of the rest sigmoid(l + b) random (their `_pi_lambda`)."""
    random = (log_snr + noise_type).sigmoid()
    alpha = log_snr.sigmoid()
    return Mixture(alpha, (1 - alpha) * (1 - random), (1 - alpha) * random)


class GiddPropose(MixedPropose):
    """x_s from q(x_s | x_t, x); with "adaptive" x0 from x, and for confidence how much the network would change.

    Attributes:
        no_end: positions that no end of the text is written to; None for none.
    """

    no_end: Bool[Tensor, "position"] | None = None

    def __init__(self, settings: GiddSettings, noise: Any, end: int | None, *, reference_quirks: bool) -> None:
        super().__init__(0, noise, reference_quirks=reference_quirks)
        self.settings, self.end = settings, end
        self.wide = torch.float32 if reference_quirks else torch.float64

    def proposed(
        self,
        logits: Float[Tensor, "evaluated d_vocab"],
        seen: Int[Tensor, "evaluated"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> tuple[Int[Tensor, "evaluated"], Float[Tensor, "evaluated"]]:
        """A token of every evaluated position, and the confidence: of x_s that it is the text's."""
        wide = logits.to(self.wide).index_fill(-1, torch.tensor([self.mask_id], device=logits.device), -torch.inf)
        if self.no_end is not None and self.end is not None:
            inside = self.no_end.to(evaluated.device).expand(evaluated.shape)[evaluated].to(wide.device)
            wide[inside, self.end] = -torch.inf
        if self.settings.remasking == "ancestral":
            return super().proposed(wide, seen, evaluated, eligible)
        likely = wide.softmax(-1)
        wanted = likely.amax(-1) - likely.gather(-1, seen[:, None])[:, 0]
        written = self.now.noise_at(seen, self.mask_id, logits.shape[-1]).to(wanted)
        if self.reference_quirks:
            # As there: it rounds, and 0 / 0, which ranks first, is in rows without a mask left.
            rows = evaluated.sum(-1).tolist()
            written = torch.cat([part / part.sum() for part in written.split(rows)])
        return self.drawn(self.probabilities(wide), evaluated, eligible), (wanted * written).nan_to_num(
            torch.inf, torch.inf
        )

    def drawn(
        self,
        weights: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """A token for each row of weights, with `reference_quirks` by `torch.multinomial`."""
        if self.reference_quirks:
            return self.noise.tokens(weights, evaluated, eligible)
        if self.settings.temperature == 0 and self.settings.remasking == "adaptive":
            return most_likely(weights)
        return drawn_once(self.noise, weights, evaluated, eligible)

    def probabilities(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """Of the text's token: softmax(logits / temperature) of the `top_k` first, and of these the nucleus."""
        if self.settings.temperature == 0:
            return torch.zeros_like(logits).scatter(-1, most_likely(logits)[:, None], 1.0)
        kept = filtered(logits / self.settings.temperature, None, self.settings.top_k)
        return filtered(kept, self.settings.top_p, None).softmax(-1)


class GiddSampler(MixedNoiseSampler):
    """GIDD's `generate`: block after block of noise, with the noise after it as context.

    Clean positions, the prompt and finished blocks, see clean ones alone; noisy positions see all (`clean_until`).
    With "ancestral" a position of the block is decided while its token is rather the text's than noise; with
    "adaptive" it is open until a step writes it, and later steps may rewrite it. Every step of a block runs. A row
    ends with the block that holds an end of its text; its later blocks stay noise, and are closed. Rows have random
    generators of their own.

    With `reference_quirks` there is the original's one stream, float32, its count of `canvas_length`, the prior's
    random tokens with [MASK] among them, and an end of the text that counts wherever it stands: the run ends after
    the block at whose end every row has one, in its prompt, its answer or its noise.

    Attributes:
        clean_until: where the clean positions of the step end.
    """

    context: ClassVar[Context] = "clean"
    adaptive = True  # rows end
    whole_blocks = True
    any_block_length = True
    clean_until = 0
    _all_over = False

    def __init__(
        self, settings: GiddSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(noise)
        self.settings, self.reference_quirks = settings, reference_quirks
        self.block_length, self.ids = settings.block_length, ids
        self.ends = sorted({one for one in (*ids.ends, ids.eot) if one is not None})
        self.propose: GiddPropose = GiddPropose(settings, noise, ids.eos, reference_quirks=reference_quirks)
        if settings.remasking == "adaptive":
            self.writes_all = False
            self.select: Any = Select()
            self.select.by_topk = reference_quirks
        self._over, self._prompt = torch.empty(0, dtype=torch.bool), 0

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.block_length = int(settings["block_length"])
        return sampler

    @classmethod
    def attention_of(
        cls, settings: Mapping[str, Any], content: Bool[Tensor, "batch position"], prompt_length: int
    ) -> StepAttention:
        """Clean positions see what is clean; the block, and the noise after it, sees all."""
        return StepAttention(blocks=cls.block_layout_of(int(settings["block_length"]), content, prompt_length))

    @classmethod
    def rows_wait(cls, settings: Mapping[str, Any]) -> bool:
        """No: a block has as many steps in every row."""
        return False

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """Positions after the prompts: the answer's blocks, and context.

        Raises:
            ValueError: as `positions_after`, with `reference_quirks`.
        """
        before = prompts.shape[1] if self.reference_quirks else 0
        return positions_after(before, self.settings.canvas_length, self.settings.answer)

    def first_noise(self) -> Mixture:
        """At the least log-SNR."""
        return self.settings.level(self.settings.steps_per_block, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.reference_quirks else torch.float64

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts, and noise after them.

        Raises:
            ValueError: masks in a prompt, which is clean text.
        """
        mask, width = getattr(model.config, "mask_token_id", None), prompts.shape[1]
        holes = (prompts == mask) & fillable[:, :width] if mask is not None else fillable[:, :0]
        if bool(holes.any()) and not self.reference_quirks:
            raise ValueError(
                f"the prompt has {int(holes.sum())} masks; GIDD decodes blocks after a prompt without noise: leave "
                "them out"
            )
        self._prompt, self._over = width, torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
        canvas = super().begin(model, prompts, fillable)
        self.propose.mask_id = self.noise_mask_id
        return canvas

    def first_canvas(self, canvas: Int[Tensor, "batch position"]) -> Int[Tensor, "batch position"]:
        """The noise of the first canvas; with `reference_quirks` drawn for the prompt too, among all ids."""
        if not self.reference_quirks:
            return super().first_canvas(canvas)
        share = torch.sigmoid(torch.tensor(self.settings.min_log_snr) + self.settings.noise_type)
        chosen = self.noise.positions(self._open).to(canvas.device) < share
        return torch.where(chosen & self._open, self.noise.uniform_tokens(self._open, self.vocabulary), canvas)

    def network(self, model: Any, first: FirstCanvas) -> CleanContextLogits:
        """The network of the canvas, in which clean positions see no noise."""
        return CleanContextLogits(model, first.content, sampler=self)

    def inputs(
        self,
        model: Any,
        content: Bool[Tensor, "batch seen"],
        canvas: Int[Tensor, "batch seen"],
        prompt_length: int,
    ) -> dict[str, Any]:
        """Arguments of a pass over what a step sees, beside the ids."""
        return clean_context_inputs(model, content, self.clean(content))

    def clean(self, content: Bool[Tensor, "batch position"]) -> Bool[Tensor, "1 position"]:
        """The positions before the block of the step."""
        return (torch.arange(content.shape[1], device=content.device) < self.clean_until)[None]

    def at(self, plan: StepPlan) -> None:
        """Take where the block of the step begins."""
        self.clean_until = plan.span[0]

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step of every block."""
        spans = self.block_layout.spans(prompt_length, prompt_length + self.settings.answer)
        found = block_plans(spans, [self.settings.steps_per_block] * len(spans))
        return [replace(plan, seen=None) for plan in found]

    def running(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The block, in rows that have not ended."""
        where = torch.arange(masked.shape[1], device=masked.device)
        return ((where >= plan.span[0]) & (where < plan.span[1]))[None] & ~self._over[:, None].to(masked.device)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The noise of the step, and where no end of the text is written."""
        propose, time = self.propose, plan.remaining
        propose.now, propose.then = (self.settings.level(one, self._dtype) for one in (time, time - 1))
        if not self.writes_all and self.reference_quirks:
            self.select.span = plan.span  # `torch.topk` is given the block alone
        where = torch.arange(masked.shape[1])
        propose.no_end = where < self._prompt + self.settings.min_length if self.settings.min_length else None

    def writable(
        self, proposal: Proposal, running: Bool[Tensor, "batch position"]
    ) -> Bool[Tensor, "batch position"]:
        """With "adaptive" what the network would not change, or noise does not write, stays."""
        return running if self.writes_all or self.reference_quirks else running & (proposal.confidence > 0)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row a step of "adaptive" writes."""
        if self.settings.remasking == "ancestral":
            return eligible.sum(-1)
        return eligible.sum(-1).clamp(max=self.settings.tokens_per_step)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step."""
        after, proposal, decided = super().forward(canvas, logits, evaluated, masked, plan)
        return self._after_block(after, plan) if plan.remaining == 1 else after, proposal, decided

    def _after_block(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> Int[Tensor, "batch position"]:
        """End the rows whose finished blocks hold an end of the text, or are the last, and close what is left."""
        ends = torch.isin(canvas, canvas.new_tensor(self.ends))
        if self.reference_quirks:
            ends = canvas == (self.ids.eos if self.ids.eos is not None else -1)
        else:
            ends[:, : self._prompt], ends[:, plan.span[1] :] = False, False
            last = plan.span[1] >= self._prompt + self.settings.answer
            self._over = self._over | ends.any(-1).to(self._over.device) | last
            self._open = self._open & ~self._over[:, None].to(self._open.device)
        self._all_over = bool(ends.any(-1).all()) if self.reference_quirks else bool(self._over.all())
        return canvas

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has ended."""
        return self._all_over

    def state(self) -> dict[str, Tensor]:
        """What is open, and which rows have ended."""
        return {**super().state(), "over": self._over}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._over = state["over"]


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings, then the checkpoint's.

    `steps`, those of the whole answer, set those of a block; with `gen_length` but without any number of steps
    there is one for each token of a block. The default block is no longer than the answer, and the default canvas
    long enough for it.
    """
    values = {**defaults, **given}
    length = max(1, values["gen_length"])
    if "block_length" not in given:
        values["block_length"] = max(1, min(values["block_length"], length))
    steps = values.pop("steps", None)
    if "steps_per_block" not in given:
        if "gen_length" in given and "steps" not in given:
            values["steps_per_block"] = values["block_length"]
        elif steps is not None and ("steps" in given or "steps_per_block" not in values):
            values["steps_per_block"] = math.ceil(steps / math.ceil(length / max(1, values["block_length"])))
    if values.get("canvas_length") is not None and "canvas_length" not in given:
        whole = math.ceil(length / max(1, values["block_length"])) * values["block_length"]
        values["canvas_length"] = max(values["canvas_length"], whole)
    return values


@dataclass(frozen=True)
class GiddCorruption(MixedCorruption):
    """The noise of the training (diffusion_trainer/schedule.py): alpha = 1 - t, of the rest sigmoid(l + b) random.

    With s = sigmoid(l + b) these are r = (1 - alpha) s, and dr/dt = s - s (1 - s) / alpha.
    """

    def levels(self, config: Any, times: Float[Tensor, "n"]) -> tuple[Mixture, Mixture]:
        """The shares at these times, and their derivatives."""
        level = mixture_at((1 - times).log() - times.log(), config.noise_type)
        share = level.random / times
        slope = share - share * (1 - share) / level.alpha
        return level, Mixture(torch.full_like(times, -1.0), 1 - slope, slope)


ALGORITHM = Algorithm(
    "gidd",
    GiddSettings,
    GiddSampler,
    resolve,
    f'{OF_THE_TEXT}; with remasking "adaptive" how much the network would change it',
    corruption=GiddCorruption(),
)
