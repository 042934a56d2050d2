"""DiffusionGemma's sampler: canvas after canvas of random tokens, by the entropy-bound rule, self-conditioned."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import MINUS_ENTROPY, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.encoder_decoder_network import EncoderDecoderLogits, StoredConditioning
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import FirstCanvas
from dlm_lens.sampling.samplers.blocks import block_plans
from dlm_lens.sampling.samplers.entropy_bound import (
    EntropyBoundSampler,
    EntropyBoundSettings,
    entropy_bound_settings,
)
from dlm_lens.sampling.settings import SpecialIds, at_least_one, of_run

CONDITIONS = ("logits", "top", "none")
"""What the decoder can be conditioned on."""


@dataclass(frozen=True)
class DiffusionGemmaSettings:
    """Settings of DiffusionGemma's sampler, under the names of its generation in transformers where they are equal.

    Args:
        gen_length: tokens of the answer (`max_new_tokens`); the last canvas is decoded whole, `texts` end before.
        block_length: tokens of a canvas (`canvas_length`).
        steps_per_block: denoising steps of a canvas, at most (`max_denoising_steps`).
        entropy_bound: a step accepts the k positions of lowest entropy, for the largest k with H_1 + ... + H_k-1
            at most this, in nats.
        t_min: temperature of a canvas's last step.
        t_max: temperature before its first one.
        stability_threshold: for how many steps the most likely tokens stay before a row is done with a canvas.
        confidence_threshold: mean entropy in nats below which it may be.
        self_conditioning: what the next step is conditioned on: the "logits" of this one; their "top" token alone,
            so that nothing but tokens passes from step to step (2606.20560's token bottleneck); or "none".

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    steps_per_block: int
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int | None = 1
    confidence_threshold: float | None = 0.005
    self_conditioning: str = "logits"

    def __post_init__(self) -> None:
        if self.self_conditioning not in CONDITIONS:
            raise ValueError(
                f"self_conditioning is {self.self_conditioning!r}; it must be one of {', '.join(CONDITIONS)}"
            )
        at_least_one(self, "gen_length", "block_length", "steps_per_block")
        _ = self.of_canvas

    @property
    def of_canvas(self) -> EntropyBoundSettings:
        """The settings of one canvas."""
        return EntropyBoundSettings(
            self.steps_per_block,
            self.block_length,
            self.entropy_bound,
            self.t_min,
            self.t_max,
            self.stability_threshold,
            self.confidence_threshold,
        )


class DiffusionGemmaSampler(EntropyBoundSampler):
    """Entropy-bound sampling of one canvas after another (`DiffusionGemmaGenerationMixin` of transformers).

    A canvas is `EntropyBoundSampler`'s answer. When every row is done with it, it goes through the encoder, and the
    next one begins as random tokens. Rows that are done before the others wait. A row ends with the canvas that
    holds an end of its text: what follows that becomes padding, and is decided. The run ends with its last row.

    With `reference_quirks`, numbers are drawn for all positions of the canvas in every row, positions count the
    padding, and a row that has ended is denoised like the others (so that the run waits for it) and then replaced
    by padding. With a static cache transformers computes something else where a prompt is longer than the window of
    the sliding layers: the canvas's keys overwrite the encoder's. That is not reproduced.
    """

    has_quirks = True
    grows = True
    adaptive = True
    whole_blocks = True

    def __init__(
        self,
        settings: DiffusionGemmaSettings,
        noise: Noise,
        ids: SpecialIds,
        *,
        reference_quirks: bool = False,
    ) -> None:
        super().__init__(settings.of_canvas, noise, ids, reference_quirks=reference_quirks)
        self.reference_quirks, self.block_length = reference_quirks, settings.block_length
        self.conditions_on = settings.self_conditioning
        self.ends = sorted({one for one in (*ids.ends, ids.eot) if one is not None})
        self.pad: int | None = None
        self._over = torch.empty(0, dtype=torch.bool)
        self._stop = 0

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        own = of_run(DiffusionGemmaSettings, settings)
        sampler.settings, sampler.conditions_on = own.of_canvas, own.self_conditioning
        sampler.block_length = int(settings["block_length"])
        sampler.reference_quirks = bool(settings.get("reference_quirks"))
        return sampler

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """Whole canvases."""
        return -(-gen_length // self.block_length) * self.block_length

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts, a canvas of random tokens, and room for the others, open and without tokens yet.

        Raises:
            ValueError: an empty prompt, which leaves the encoder nothing.
        """
        if not prompts.shape[1]:
            raise ValueError(
                "the prompt is empty; DiffusionGemma's encoder needs at least one token, such as <bos>"
            )
        self.pad = model.config.pad_token_id
        self.blank = self.pad or 0
        self._over = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
        return super().begin(model, prompts, fillable)

    def network(self, model: Any, first: FirstCanvas) -> EncoderDecoderLogits:
        """Encoder and decoder."""
        return EncoderDecoderLogits(model, first.content, **self._network_options(first.prompt_length))

    def rerun_network(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        prompt_length: int,
        plans: Sequence[StepPlan],
        block_numbers: Sequence[int],
    ) -> StoredConditioning:
        """Encoder and decoder, with the conditioning of every step."""
        return StoredConditioning(model, content, plans, block_numbers, **self._network_options(prompt_length))

    def planned_again(self, plan: StepPlan, block_number: int) -> StepPlan:
        """With the steps left in the canvas, of which the temperature is a function."""
        return replace(plan, remaining=self.settings.steps - block_number)

    def _network_options(self, prompt_length: int) -> dict[str, Any]:
        return {
            "prompt_length": prompt_length,
            "length": self.block_length,
            "temperature": self.temperature,
            "conditions_on": self.conditions_on,
            "counts_padding": self.reference_quirks,
        }

    def temperature(self, plan: StepPlan) -> float:
        """Of a step."""
        if self.reference_quirks:  # in float32, as there
            least, most = self.settings.t_min, self.settings.t_max
            return float(least + (most - least) * (torch.tensor(plan.remaining) / self.settings.steps))
        return super().temperature(plan)

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """As many steps of every canvas as it can have; a step computes its canvas and sees all before it."""
        spans = self.block_layout.spans(prompt_length, positions)
        return [
            replace(plan, computed=plan.span) for plan in block_plans(spans, [self.settings.steps] * len(spans))
        ]

    def repeated_after(self, done: Sequence[StepPlan]) -> list[int]:
        """The finished steps of the last canvas: the next step is conditioned on the chain of them."""
        return [index for index, plan in enumerate(done) if plan.block == done[-1].block]

    def running(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The canvas, in rows that are not done with it; none of a canvas that is finished."""
        here = self._inside(masked, plan.span) & ~self._ended[:, None]
        return here if plan.span[0] >= self._stop else torch.zeros_like(here)

    def editable(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Its decided positions in these rows; with `reference_quirks` the whole canvas of the others too."""
        if self.reference_quirks:
            return self._inside(masked, plan.span) & ~self.eligible(masked, plan)
        return super().editable(masked, plan)

    def leaves_out(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row is done with the canvas."""
        return not bool(self.running(masked, plan).any())

    def next_canvas(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> Int[Tensor, "batch position"]:
        """The canvas; after the last step of one the random tokens of the next."""
        return self._finish_canvas(canvas, plan) if bool(self._ended.all()) else canvas

    def _finish_canvas(
        self, canvas: Int[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch position"]:
        """End the rows with an end of the text, and begin the next canvas of the others."""
        self.propose.history, stop = None, plan.span[1]
        ends = self._inside(canvas, plan.span) & torch.isin(canvas, canvas.new_tensor(self.ends))
        self._over, self._stop = self._over | ends.any(-1), stop
        if bool(self._over.all()) or stop >= canvas.shape[1]:
            return canvas
        if self.reference_quirks:
            self._ended = torch.zeros_like(self._over)
        else:  # the rest of a row that has ended is padding, and decided
            self._ended = self._over
            self._open = self._open & ~self._over[:, None]
        return self._with_random(canvas, (stop, stop + self.block_length))

    def completed(self, proposal: Proposal, plan: StepPlan) -> Proposal:
        """Padding after the first end of the text in rows that are done with the canvas."""
        if self.pad is None:
            return proposal
        inside = self._inside(proposal.tokens, plan.span)
        ends = inside & torch.isin(proposal.tokens, proposal.tokens.new_tensor(self.ends))
        after = inside & ((ends.cumsum(-1) - ends.long() > 0) | self._over[:, None])
        return proposal._replace(tokens=proposal.tokens.masked_fill(after & self.propose.ending[:, None], self.pad))

    def _inside(self, canvas: Tensor, span: tuple[int, int]) -> Bool[Tensor, "batch position"]:
        where = torch.arange(canvas.shape[1], device=canvas.device)
        return ((where >= span[0]) & (where < span[1])).expand(canvas.shape)

    def _first_span(self, start: int, stop: int) -> tuple[int, int]:
        """The first canvas; the others have no tokens yet."""
        return start, start + self.block_length

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has ended."""
        return bool(self._over.all())

    def final_length(self, positions: int, steps: int) -> int:
        """The canvases that were decoded."""
        return min(positions, self._stop) if bool(self._over.all()) and self._stop else positions

    def state(self) -> dict[str, Tensor]:
        """As `EntropyBoundSampler`'s, which rows have ended, and where the last finished canvas ends."""
        return {**super().state(), "over": self._over, "stop": torch.tensor(self._stop)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._over, self._stop = state["over"], int(state["stop"])


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings, then the checkpoint's; `steps`, those of the whole answer, set those of a canvas."""
    values = entropy_bound_settings(defaults, given, masks)
    steps = values.pop("steps", None)
    if steps is not None and "steps_per_block" not in given:
        canvases = math.ceil(max(1, values["gen_length"]) / max(1, values["block_length"]))
        values["steps_per_block"] = math.ceil(steps / canvases)
    return values


ALGORITHM = Algorithm(
    "diffusion_gemma",
    DiffusionGemmaSettings,
    DiffusionGemmaSampler,
    resolve,
    f"{MINUS_ENTROPY}, at the step's temperature",
)
