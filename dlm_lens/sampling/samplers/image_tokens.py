"""MMaDA's image tokens: the text-to-image sampler, and `generate_image_tokens`."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.adapters import ImageLayout, family_of
from dlm_lens.arguments import checked_arguments, instance
from dlm_lens.attention import exclusive
from dlm_lens.sampling.denoising_run import DenoisingRun, Proposal, StepPlan
from dlm_lens.sampling.history import History
from dlm_lens.sampling.loop import OnCanvas, OnLogits, run_sampler
from dlm_lens.sampling.network import CanvasLogits, check_finite, network_inputs
from dlm_lens.sampling.noise import Draw, Noise, RowNoise, SharedNoise, drawn_by_rows
from dlm_lens.sampling.prompts import Prompts, read_prompts, warn_beyond_context
from dlm_lens.sampling.samplers.base import Sampler
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.settings import at_least_one, not_negative, row_seeds


@dataclass(frozen=True)
class ImageSettings:
    """Settings of MMaDA's `t2i_generate`; `steps` is its timesteps, `cfg_scale` its guidance_scale.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int = 18
    cfg_scale: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        at_least_one(self, "steps")
        not_negative(self, "temperature", zero="no noise")
        not_negative(self, "cfg_scale", zero="no guidance")

    def temperature_at(self, step: int) -> float:
        """Temperature times the product of 1 - (i + 1) / steps up to this step; 0 at the last."""
        return self.temperature * math.prod(1 - (i + 1) / self.steps for i in range(step + 1))

    def masks_after(self, step: int, image_tokens: int) -> int:
        """floor(N cos(pi / 2 (step + 1) / steps)) in float32, as the original has it."""
        share = torch.cos(torch.tensor((step + 1) / self.steps, dtype=torch.float32) * (math.pi / 2))
        return int((image_tokens * share).floor())


class ImagePropose(nn.Module):
    """x0 drawn from the softmax over the codebook's columns, in float32; confidence = its probability.

    Positions that are decided propose their own token, with the largest float as confidence.
    """

    def __init__(self, noise: Noise, layout: ImageLayout, mask_id: int) -> None:
        super().__init__()
        self.noise, self.layout, self.mask_id = noise, layout, mask_id

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        first = self.layout.text_tokens
        columns = logits[:, first : first + self.layout.codebook_size]
        chosen, sure = drawn_by_rows(_drawn, self.noise, columns, evaluated, eligible)
        chosen = chosen.to(canvas.device)
        missing = evaluated & (canvas == self.mask_id)
        tokens = torch.where(missing, canvas.masked_scatter(evaluated, chosen + first), canvas)
        confidence = sure.new_zeros(canvas.shape).masked_scatter(evaluated, sure)
        confidence = confidence.masked_fill(~missing, torch.finfo(confidence.dtype).max)
        return Proposal(tokens, confidence.masked_fill(~eligible, -torch.inf))


def _drawn(logits: Float[Tensor, "n code"], draw: Draw) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
    """Codes that are drawn, and their probabilities."""
    likely = logits.float().softmax(-1)
    chosen = draw(likely).to(likely.device)
    return chosen, likely.gather(-1, chosen[:, None]).squeeze(-1)


class ImageSelect(Select):
    """Choose the `count` positions of every row with the largest ln(max(p, 1e-20)) + temperature * Gumbel.

    Of equals the earlier one; `reference_quirks` takes all that reach the score of the last one chosen, and draws
    at temperature 0 too.
    """

    def __init__(self, noise: Noise, reference_quirks: bool) -> None:
        super().__init__()
        self.noise, self.reference_quirks, self.temperature = noise, reference_quirks, 0.0

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        scores = confidence.clamp(min=1e-20).log()
        if self.temperature > 0 or self.reference_quirks:
            uniform = self.noise.masked_positions(eligible).to(scores.device)
            gumbel = -uniform.clamp(min=1e-20).log().neg().clamp(min=1e-20).log()
            scores = scores + self.temperature * gumbel
        if not self.reference_quirks:
            return super().forward(scores, eligible, count)
        scores = scores.masked_fill(~eligible, -torch.inf)
        place = (scores.shape[-1] - count).clamp(max=scores.shape[-1] - 1)
        return eligible & (scores >= scores.sort(-1).values.gather(-1, place[:, None]))


class ImageSampler(Sampler):
    """One block, the image; the number of masks after each step follows a cosine.

    That number is less than the masks before the step, and at least one except after the last step; masks are
    recounted from the canvas. With `reference_quirks` every image position is evaluated and ranked at every step,
    and the last step leaves a mask as well.
    """

    mask_id: int

    def __init__(
        self,
        settings: ImageSettings,
        noise: Noise,
        layout: ImageLayout,
        mask_id: int,
        image: Bool[Tensor, "batch position"],
        reference_quirks: bool,
    ) -> None:
        super().__init__()
        self.settings, self.layout, self.mask_id = settings, layout, mask_id
        self.image = self.fillable = image
        self.reference_quirks = reference_quirks
        self.cfg_scale = settings.cfg_scale
        self.propose = ImagePropose(noise, layout, mask_id)
        self.select: ImageSelect = ImageSelect(noise, reference_quirks)

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step."""
        total, length = self.settings.steps, int(self.image[0].sum())
        span = (prompt_length, prompt_length + length)
        return [StepPlan(index, total, 0, span, total - index) for index in range(total)]

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Every masked position, or with quirks every position of the image."""
        return self.image if self.reference_quirks else masked

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many eligible positions of each row are unmasked, or stay decided, at this step."""
        if plan.remaining == 1 and not self.reference_quirks:
            return eligible.sum(-1)
        keep = (masked.sum(-1) - 1).clamp(max=self.settings.masks_after(plan.index, plan.span[1] - plan.span[0]))
        return (eligible.sum(-1) - keep.clamp(min=1)).clamp(min=0)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The temperature of the step."""
        self.select.temperature = self.settings.temperature_at(plan.index)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step; eligible positions that are not chosen are masked after it."""
        first = self.layout.text_tokens
        check_finite(logits[:, first : first + self.layout.codebook_size], evaluated, plan.index)
        _, proposal, chosen = super().forward(canvas, logits, evaluated, masked, plan)
        others = canvas.masked_fill(self.eligible(masked, plan), self.mask_id)
        return torch.where(chosen, proposal.tokens, others), proposal, chosen & masked


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """The image codes of a run, and the run.

    Args:
        codes: image codes, without the offset of the tokens; -1 where `on_canvas` put what is no image token.
        run: every step; its answer is the image.

    Raises:
        ValueError: the shapes contradict each other.
    """

    codes: Int[Tensor, "batch image"]
    run: DenoisingRun

    def __post_init__(self) -> None:
        start, stop = self.run.spans[0]
        expected = (self.run.tokens.shape[0], stop - start)
        if tuple(self.codes.shape) != expected:
            raise ValueError(f"ImageTokens.codes has shape {tuple(self.codes.shape)}, but the run has {expected}")


@checked_arguments(layout=instance(ImageLayout, "an ImageLayout, or None"))
@torch.no_grad()
@exclusive
def generate_image_tokens(
    model: Any,
    prompt: Any,
    *,
    layout: ImageLayout | None = None,
    unconditional: Any = None,
    steps: int = 18,
    cfg_scale: float = 0.0,
    temperature: float = 1.0,
    seed: int | list[int] = 0,
    noise: Noise | None = None,
    on_logits: OnLogits | None = None,
    on_canvas: OnCanvas | None = None,
    progress: bool = False,
    reference_quirks: bool = False,
) -> ImageTokens:
    """Draw the image codes of prompts as MMaDA does (Gen-Verse/MMaDA, t2i_generate).

    At every step each masked position draws a code from the softmax over the codebook's columns. The scores
    ln(max(p, 1e-20)) + T_t Gumbel rank the draws, and all but floor(N cos(pi/2 (t+1)/steps)) masks (fewer than
    before, at least one until the last step) are unmasked. Image tokens in the prompt stay as they are, and masks
    in its text are not filled in. A row does not depend on its batch: padding is hidden, and each row has a random
    generator of its own.

    Args:
        model: an MMaDA from `dlm_lens.load`.
        prompt: token ids as `ImageLayout.generation` builds them.
        layout: the model's special ids; `ImageLayout.of(model)` by default.
        unconditional: prompts of guidance's other half, of the same length, whose image is the canvas's; those
            with an empty text (`ImageLayout.unconditional`) by default.
        steps: denoising steps.
        cfg_scale: classifier-free guidance, u + (cfg_scale + 1) (c - u), which is the original's
            (1 + cfg_scale) c - cfg_scale u; 0 for none.
        temperature: of the noise in the ranking, T_t = temperature times the product of 1 - (i+1)/steps for
            i <= t; the codes themselves are always drawn at 1.
        seed: one number, or one per row.
        noise: the source of random numbers, instead of the seed.
        on_logits: called as (step, canvas, logits [batch, position, d_vocab]), as in `denoise`.
        on_canvas: called as (step, canvas), as in `denoise`.
        progress: show a progress bar.
        reference_quirks: one random stream for the batch (a single seed), drawn for decided positions too and at
            temperature 0; the last step leaves one mask on the canvas (`codes` is complete); ties with the
            threshold are all unmasked, and a high temperature may mask decided positions again.

    Raises:
        ValueError: a model, a prompt or a setting that cannot work, before anything is computed.
        NonFiniteLogitsError: naming the step; its `partial` holds the steps before.
    """
    settings = ImageSettings(steps, cfg_scale, temperature)
    layout = _layout(model, layout)
    prompts = _read(model, prompt, layout)
    ids, mask_id, (start, stop) = prompts.ids, model.config.mask_token_id, layout.image(prompts.ids)
    seeds = row_seeds(seed, len(ids))
    if reference_quirks and len(set(seeds)) > 1:
        raise ValueError("reference_quirks has one random stream for the batch; give a single seed")
    if not bool((ids[:, start:stop] == mask_id).any()):
        raise ValueError(
            f"no image position of the prompt holds the model's mask token {mask_id}: nothing to draw; build the "
            f"prompt with an ImageLayout whose mask is {mask_id}"
        )
    other = _unconditional(model, unconditional, layout, ids) if cfg_scale else None
    warn_beyond_context(model, ids.shape[1])
    if noise is None:
        noise = SharedNoise(seeds[0]) if reference_quirks else RowNoise(seeds)
    record = {"sampler": "text_to_image", **asdict(settings), "seeds": seeds, "reference_quirks": reference_quirks}
    image = torch.zeros_like(prompts.attention_mask)
    image[:, start:stop] = True
    run = run_sampler(
        ImageLogits(model, prompts, other, image, cfg_scale),
        ImageSampler(settings, noise, layout, mask_id, image, reference_quirks),
        ids,
        History(model, prompts.attention_mask, start, record),
        on_logits=on_logits,
        on_canvas=on_canvas,
        progress=progress,
    )
    return _codes(run, layout)


def _codes(run: DenoisingRun, layout: ImageLayout) -> ImageTokens:
    # A position that the last step masked (a quirk) has the code that was drawn for it.
    tokens = torch.where(run.masked[-1], run.proposals[-1], run.tokens)[:, slice(*run.spans[-1])]
    codes = tokens - layout.text_tokens
    return ImageTokens(codes.masked_fill((codes < 0) | (codes >= layout.codebook_size), -1), run)


def _layout(model: Any, layout: ImageLayout | None) -> ImageLayout:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not hasattr(model, "sampler_defaults") or kind is None or family_of(kind).name != "mmada":
        raise ValueError(f"{type(model).__name__} draws no images; load an MMaDA with dlm_lens.load")
    layout = ImageLayout.of(model) if layout is None else layout
    columns, needed = model.config.vocab_size, layout.text_tokens + layout.codebook_size
    if needed > columns:
        raise ValueError(
            f"the layout's image tokens reach up to {needed - 1}, but the model has {columns} tokens; give a "
            "layout whose text_tokens (the length of the text tokenizer) and codebook_size are the model's"
        )
    return layout


def _read(model: Any, prompt: Any, layout: ImageLayout) -> Prompts:
    prompts = read_prompts(model, prompt)
    return Prompts(prompts.ids, prompts.attention_mask & ~layout.padding(prompts.ids))


def _unconditional(model: Any, given: Any, layout: ImageLayout, ids: Tensor) -> Prompts:
    other = _read(model, layout.unconditional(ids) if given is None else given, layout)
    if other.ids.shape != ids.shape or layout.image(other.ids) != layout.image(ids):
        raise ValueError(
            f"the unconditional prompts have shape {list(other.ids.shape)}, the prompts {list(ids.shape)}; there "
            "must be as many, with their images at the same positions: give both the same length in "
            "ImageLayout.generation"
        )
    return other


class ImageLogits(CanvasLogits):
    """Logits of canvases, guided by the same image after another text."""

    def __init__(
        self,
        model: Any,
        prompts: Prompts,
        other: Prompts | None,
        image: Bool[Tensor, "batch position"],
        cfg_scale: float,
    ) -> None:
        super().__init__(model, prompts.attention_mask, cfg_scale=cfg_scale)
        self.other, self.image = other, image
        if other is not None:
            self.inputs = network_inputs(torch.cat([prompts.attention_mask, other.attention_mask]))

    def _halves(self, canvas: Tensor) -> Tensor:
        if self.other is None:
            return canvas
        return torch.cat([canvas, torch.where(self.image, canvas, self.other.ids)])
