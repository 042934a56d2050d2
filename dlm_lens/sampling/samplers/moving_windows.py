"""`MovingWindowSampler`: what samplers share whose window begins at each row's first mask (WeDLM, SDLM, I-DLM)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import position_ids
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import CanvasLogits
from dlm_lens.sampling.samplers.base import FirstCanvas, RowEndingSampler, one_block
from dlm_lens.sampling.settings import SpecialIds, with_token_ids


class WindowLogits(CanvasLogits):
    """Logits of canvases of which each row's network sees a window of masks.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        sampler: which gives the arguments of a pass.
    """

    def __init__(self, model: Any, content: Bool[Tensor, "batch position"], sampler: "MovingWindowSampler") -> None:
        super().__init__(model, content)
        self.content, self.sampler = content, sampler

    def inputs_of(self, canvas: Int[Tensor, "batch position"]) -> dict[str, Any]:
        """Arguments of a pass over the canvas."""
        return self.sampler.window_inputs(self.model, self.content, canvas)


class MovingWindowSampler(RowEndingSampler):
    """Base class of samplers that decide masks of a window, which then moves on to the row's next masks.

    A row ends with a stop token in its answer that has no mask before it; masks after it stay. How many steps run
    depends on the confidences. No cache is kept: what the authors' code caches are the keys and values of the
    tokens before the window, which do not see it, so that its numbers are the same.

    Attributes:
        one_prompt: whether the authors' code denoises one prompt at a time.
        drafted: open positions that hold tokens (I-DLM); none in others.
    """

    adaptive = True
    one_prompt: ClassVar[bool] = True
    reference_quirks = False
    drafted: Tensor = torch.tensor(False)
    _content: Bool[Tensor, "batch position"] | None = None
    _most = 0
    _answer = 0

    def __init__(self, settings: Any, ids: SpecialIds, ahead: int, *, reference_quirks: bool) -> None:
        super().__init__()
        self.settings, self.ahead, self.reference_quirks = settings, ahead, reference_quirks
        self.stops = ids.stops if settings.stop_tokens is None else settings.stop_tokens

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """The tokens requested; with `reference_quirks` as many more as the last window has after its first.

        Raises:
            ValueError: several prompts, with `reference_quirks`.
        """
        if self.reference_quirks and self.one_prompt and len(prompts) > 1:
            raise ValueError(
                f"the authors' code denoises one prompt at a time, and there are {len(prompts)}: leave "
                "reference_quirks out, or give one prompt"
            )
        return gen_length + (self.ahead if self.reference_quirks else 0)

    def window_inputs(
        self, model: Any, content: Bool[Tensor, "batch position"], canvas: Int[Tensor, "batch position"]
    ) -> dict[str, Any]:
        """Arguments of a pass over a canvas, beside the ids: what is seen, of which the network knows the order.

        Positions count the hidden masks too.
        """
        masked = (canvas == model.config.mask_token_id) | self.drafted.to(canvas.device)
        seen = self.attention.seen_content(content, masked, canvas.shape[1])
        return {"attention_mask": seen.long(), "position_ids": position_ids(content), "use_cache": False}

    def network(self, model: Any, first: FirstCanvas) -> WindowLogits:
        """The network of the windows.

        Raises:
            ValueError: masks in a prompt, with `reference_quirks`.
        """
        content = first.content
        if self.reference_quirks and bool((first.masked & content)[:, : first.prompt_length].any()):
            raise ValueError(
                "the authors' code keeps a [MASK] in a prompt as a token, and here it is filled in: leave "
                "reference_quirks or the masks in the prompt out"
            )
        self._content, self._most = content, int((first.masked & content).sum(-1).max())
        return WindowLogits(model, content, self)

    def inputs(
        self,
        model: Any,
        content: Bool[Tensor, "batch seen"],
        canvas: Int[Tensor, "batch seen"],
        prompt_length: int,
    ) -> dict[str, Any]:
        """The window of each row."""
        return self.window_inputs(model, content, canvas)

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """As many steps as there are masks, at most."""
        self._answer = prompt_length
        return one_block(self._most, prompt_length, positions, self.settings.gen_length)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """One in each row, beside those that are confident enough."""
        return eligible.any(-1).long()

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has its answer, or a stop token in it without a mask before."""
        assert self._content is not None
        decided = (self.open_positions(canvas, plan.index + 1) & self._content).cumsum(-1) == 0
        end = self._answer + self.settings.gen_length
        stops = torch.isin(canvas, torch.tensor(self.stops, dtype=canvas.dtype, device=canvas.device)) & decided
        self.ended = stops[:, self._answer : end].any(-1) | decided[:, end - 1]
        return bool(self.ended.all())


def resolve_window(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings, then the checkpoint's; lists of ids become tuples."""
    return with_token_ids({**defaults, **given}, "stop_tokens")
