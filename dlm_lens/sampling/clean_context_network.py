"""Logits of canvases that begin with clean text, which sees itself alone; the noise after it sees all (GIDD)."""

from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import additive_mask
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import CanvasLogits, network_inputs

if TYPE_CHECKING:
    from dlm_lens.sampling.samplers.gidd import GiddSampler


def clean_context_inputs(
    model: Any, content: Bool[Tensor, "batch position"], clean: Bool[Tensor, "#batch position"]
) -> dict[str, Any]:
    """Arguments of a pass beside the ids: a query at a clean position sees the clean keys, others see all.

    Padding is no key and no query. Where all is clean, or nothing, no mask of [query, key] is made.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        clean: the positions without noise.
    """
    inputs, clean = network_inputs(content), clean & content
    if not bool(clean.any()) or bool((clean | ~content).all()):
        return inputs
    # One mask for all rows that are alike.
    same = bool((clean == clean[:1]).all()) and bool(content.all())
    clean, content = (clean[:1], content[:1]) if same else (clean, content)
    visible = (~clean[:, :, None] | clean[:, None, :]) & content[:, None, :] & content[:, :, None]
    return {**inputs, "attention_mask": additive_mask(visible[:, None], model.dtype)}


class CleanContextLogits(CanvasLogits):
    """Logits of canvases in which clean positions see no noise.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        clean: the clean positions; of a run its sampler says them at every step (`GiddSampler.at`).
        sampler: of a run.
    """

    def __init__(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        clean: Bool[Tensor, "#batch position"] | None = None,
        sampler: "GiddSampler | None" = None,
    ) -> None:
        super().__init__(model, content)
        self.content, self.clean, self.sampler = content, clean, sampler

    def enter(self, plan: StepPlan) -> None:
        """Take where the block of the step begins."""
        if self.sampler is not None:
            self.sampler.at(plan)

    def inputs_of(self, canvas: Int[Tensor, "batch position"]) -> dict[str, Any]:
        """Mask and positions."""
        content = self.content[:, : canvas.shape[1]]
        clean = self.clean if self.sampler is None else self.sampler.clean(content)
        assert clean is not None
        return clean_context_inputs(self.model, content, clean)
