"""MMaDA's text-to-image sampler: codes drawn from the codebook's columns, the surest kept, a cosine schedule."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.adapters import ImageLayout
from dlm_lens.sampling.checks import at_least_one, not_negative
from dlm_lens.sampling.network import check_finite
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.sampler import Proposal, Sampler, Select, StepPlan


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

    def masks_behind(self, step: int, image_tokens: int) -> int:
        """floor(N cos(pi / 2 (step + 1) / steps)) in float32, as the original has it."""
        share = torch.cos(torch.tensor((step + 1) / self.steps) * (math.pi / 2))
        return int((image_tokens * share).floor())


class ImagePropose(nn.Module):
    """x0 drawn from the softmax over the codebook's columns, in float32; confidence = its probability.

    What is written already proposes itself, with the largest number as its confidence.
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
        likely = logits[:, first : first + self.layout.codebook_size].float().softmax(-1)
        chosen = self.noise.tokens(likely, evaluated, eligible).to(canvas.device)
        sure = likely.gather(-1, chosen[:, None]).squeeze(-1)
        missing = evaluated & (canvas == self.mask_id)
        tokens = torch.where(missing, canvas.masked_scatter(evaluated, chosen + first), canvas)
        confidence = likely.new_zeros(canvas.shape).masked_scatter(evaluated, sure)
        confidence = confidence.masked_fill(~missing, torch.finfo(confidence.dtype).max)
        return Proposal(tokens, confidence.masked_fill(~eligible, -torch.inf))


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
        """Return the positions to write now."""
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
    """One block, the image; what stays masked behind a step follows a cosine.

    That number is at most the masks before the step less one, and at least one but behind the last step; masks are
    recounted from the canvas. With `reference_quirks` every image position is evaluated and ranked at every step,
    and the last step leaves a mask as well.
    """

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
        self.image, self.reference_quirks = image, reference_quirks
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
        """How many eligible positions of each row are written, or stay written, now."""
        if plan.remaining == 1 and not self.reference_quirks:
            return eligible.sum(-1)
        keep = (masked.sum(-1) - 1).clamp(max=self.settings.masks_behind(plan.index, plan.span[1] - plan.span[0]))
        return (eligible.sum(-1) - keep.clamp(min=1)).clamp(min=0)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step; what is eligible and not chosen is masked behind it."""
        first = self.layout.text_tokens
        check_finite(logits[:, first : first + self.layout.codebook_size], evaluated, plan.index)
        self.select.temperature = self.settings.temperature_at(plan.index)
        _, proposal, chosen = super().forward(canvas, logits, evaluated, masked, plan)
        others = canvas.masked_fill(self.eligible(masked, plan), self.mask_id)
        return torch.where(chosen, proposal.tokens, others), proposal, chosen & masked
