"""SDLM's sampler: each step predicts a window of tokens, and keeps those before the first that is not confident."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import additive_mask, position_ids, sees_window, until_window
from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.dream import DreamPropose
from dlm_lens.sampling.samplers.moving_windows import MovingWindowSampler, resolve_window
from dlm_lens.sampling.samplers.sdar import SelectFirst
from dlm_lens.sampling.samplers.wedlm import RowDraws
from dlm_lens.sampling.settings import SpecialIds, at_least_one, known_remasking, not_negative, positive_share
from dlm_lens.sampling.step_attention import StepAttention

REMASKING = ("probability", "entropy")


@dataclass(frozen=True)
class SDLMSettings:
    """Settings of `SDLM_generate` (OpenGVLab/SDLM, sdlm_inference.py; 2509.24007, longest prefix decoding).

    Args:
        gen_length: tokens of the answer (`max_gen_len`).
        window_length: D, the tokens that a step predicts, from the last token and D - 1 masks (`n_future_tokens`);
            1 decodes as an AR model.
        threshold: a step keeps the tokens before the first whose confidence is not above this, at least one; 1
            keeps one a step (`only_first_token_keep`).
        remasking: "probability", that of the token after temperature and filters (`alg` "prob_conf"); "entropy",
            1 - H / ln V with the entropy H of the same distribution ("entropy_conf").
        temperature: 0 takes the most likely token.
        top_p: sample from the smallest set of tokens with this probability.
        top_k: sample from the k most likely tokens, after `top_p`; None for all.
        stop_tokens: ids that end a row; None for the model's ends of text and turn.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    window_length: int
    threshold: float = 0.9
    remasking: str = "probability"
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    stop_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "window_length", "top_k")
        not_negative(self, "temperature", zero="greedy")
        positive_share(self, "top_p")
        known_remasking(self.remasking, REMASKING, REMASKING, "SDLM")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; it is a confidence, from 0 to 1")


class SDLMPropose(DreamPropose):
    """x0 as Dream has it, from the same filters, and the confidence of SDLM's rule, in float32."""

    in_float32 = True

    def _confidence(self, likely: Float[Tensor, "n d_vocab"], chosen: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        if self.rule == "entropy":
            return 1 - torch.special.entr(likely).sum(-1) / log(likely.shape[-1])
        return super()._confidence(likely, chosen)


class SelectPrefix(SelectFirst):
    """Choose the eligible positions before the first whose confidence is too low, at least `count`.

    Args:
        threshold: of the confidence.
        reached: whether a confidence equal to the threshold is enough; otherwise it has to be above.
    """

    def __init__(self, threshold: float, *, reached: bool = False) -> None:
        super().__init__()
        self.threshold, self.reached = threshold, reached

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        low = confidence < self.threshold if self.reached else confidence <= self.threshold
        doubtful = eligible & low
        return super().forward(confidence, eligible, count) | (eligible & (doubtful.cumsum(-1) == 0))


class SDLMSampler(MovingWindowSampler):
    """Longest prefix decoding (2509.24007): a step predicts the next D tokens, and keeps the confident ones.

    The window of a row is its last token before the first mask, and D - 1 masks, which see each other and all
    before them; the output at i - 1 predicts position i. With `reference_quirks` the window reaches beyond
    `gen_length`, so that the canvas is longer by D - 1 positions, and tokens are drawn from one stream, [MASK]
    among them.
    """

    windowed: ClassVar[bool] = True

    def __init__(
        self, settings: SDLMSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, ids, settings.window_length - 1, reference_quirks=reference_quirks)
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = RowDraws(noise)
        self.propose = SDLMPropose(settings, noise, ids, reference_quirks)
        self.select = SelectPrefix(settings.threshold)

    def window_inputs(
        self, model: Any, content: Bool[Tensor, "batch position"], canvas: Int[Tensor, "batch position"]
    ) -> dict[str, Any]:
        """The attention of the windows."""
        assert self.attention.window is not None
        visible = sees_window(content, canvas == model.config.mask_token_id, self.attention.window)
        mask = additive_mask(visible, model.dtype)
        return {"attention_mask": mask, "position_ids": position_ids(content), "use_cache": False}

    @classmethod
    def attention_of(
        cls, settings: Mapping[str, Any], content: Bool[Tensor, "batch position"], prompt_length: int
    ) -> StepAttention:
        """Causally, but for the window; nothing after it is seen."""
        return StepAttention(window=int(settings["window_length"]), ends_with_window=True)

    def reach(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The positions up to the last one that the window predicts, after its last mask."""
        assert self.attention.window is not None
        content = torch.ones_like(masked) if self._content is None else self._content
        return until_window(content, masked, self.attention.window + 1)


ALGORITHM = Algorithm(
    "sdlm",
    SDLMSettings,
    SDLMSampler,
    resolve_window,
    f'{FILTERED}; with remasking "entropy" 1 - H / ln V with their entropy H',
)
