"""WeDLM's streaming parallel decoding: a window of masks, of which those of low entropy are filled at each step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.sampling.algorithm_registry import MINUS_ENTROPY, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.network import by_rows, most_likely
from dlm_lens.sampling.noise import Draw, Noise, SharedNoise, drawn_by_rows
from dlm_lens.sampling.samplers.dllm import OrderedNoise
from dlm_lens.sampling.samplers.dream import filtered
from dlm_lens.sampling.samplers.llada import without
from dlm_lens.sampling.samplers.moving_windows import MovingWindowSampler, resolve_window
from dlm_lens.sampling.samplers.sdar import SelectAbove
from dlm_lens.sampling.settings import SpecialIds, at_least_one, not_negative, positive_share
from dlm_lens.sampling.step_attention import StepAttention


@dataclass(frozen=True)
class WeDLMSettings:
    """Settings of WeDLM's engine (Tencent/WeDLM, wedlm/sampling_params.py and config.py).

    Args:
        gen_length: tokens of the answer (`max_tokens`).
        window_length: positions of the window, which begins at the first mask (`wedlm_window_size`).
        entropy_threshold: in nats; a step fills the masks of the window whose entropy plus penalty is below it, at
            least the lowest one (`wedlm_entropy_threshold`). 0 fills one mask a step, as the authors' None.
        position_penalty: added to a mask's entropy for each position that it is after the first mask
            (`wedlm_pos_penalty_factor`).
        temperature: 0 takes the most likely token.
        top_k: sample from the k most likely tokens; None or 0 for all.
        top_p: sample from the smallest set of tokens with this probability, after `top_k` and before the
            temperature.
        stop_tokens: ids that end a row (`stop_token_ids`); None for the model's ends of text and turn.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    window_length: int
    entropy_threshold: float = 0.4
    position_penalty: float = 0.02
    temperature: float = 0.2
    top_k: int | None = None
    top_p: float | None = None
    stop_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "window_length")
        not_negative(self, "entropy_threshold", zero="one mask a step")
        not_negative(self, "position_penalty", zero="none")
        not_negative(self, "temperature", zero="greedy")
        not_negative(self, "top_k", zero="all")
        positive_share(self, "top_p")


class RowDraws(OrderedNoise):
    """The random stream of code that draws for the masks of one row after the other, in a call for each."""

    def tokens(
        self,
        probabilities: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """Tokens of the evaluated positions; rows without an eligible one take no numbers."""
        rows = probabilities.split(evaluated.sum(-1).tolist())
        each = zip(rows, evaluated.split(1), eligible.split(1), strict=True)
        return torch.cat([self.tokens_among(*row) for row in each])


class WeDLMPropose(nn.Module):
    """x0 from the filtered softmax(logits / temperature); the confidence is minus the penalised entropy.

    The entropy H = -sum p ln p is that of the plain softmax, at every temperature; d positions after the first mask
    of its row the confidence is -(H + d position_penalty). [MASK] is never an x0, unless `reference_quirks`.
    """

    def __init__(self, settings: Any, noise: Noise, ids: SpecialIds, reference_quirks: bool) -> None:
        super().__init__()
        self.settings, self.noise, self.reference_quirks = settings, noise, reference_quirks
        self.never = [] if reference_quirks else [ids.mask]

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        settings = self.settings
        if settings.temperature > 0:
            chosen, entropy = drawn_by_rows(self._chosen, self.noise, logits, evaluated, eligible)
        else:
            chosen, entropy = by_rows(self._chosen, logits, whole=self.reference_quirks)
        where = torch.arange(canvas.shape[1], device=canvas.device)
        distance = (where - eligible.int().argmax(-1, keepdim=True)).float()
        found = entropy.new_zeros(canvas.shape).masked_scatter(evaluated, entropy)
        confidence = -(found + distance * settings.position_penalty)
        return Proposal(canvas.masked_scatter(evaluated, chosen), confidence.masked_fill(~eligible, -torch.inf))

    def _chosen(
        self, logits: Float[Tensor, "n d_vocab"], draw: Draw | None = None
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        """The tokens, and the entropies of the plain softmax."""
        settings, kept = self.settings, without(logits, self.never)
        entropy = torch.special.entr(logits.float().softmax(-1)).sum(-1)
        if draw is None:
            return most_likely(kept), entropy
        # Two calls: the authors' top k comes before the nucleus.
        kept = filtered(filtered(kept, None, settings.top_k or None), settings.top_p, None)
        return draw((kept / settings.temperature).softmax(-1)), entropy


class WeDLMSampler(MovingWindowSampler):
    """Streaming parallel decoding (2512.22737): observed tokens first, then a window of masks.

    The window of a row begins at its first mask. A step predicts the masks in it, each at its own position, and
    fills those that `WeDLMSettings.entropy_threshold` says. Tokens that are filled in are observed from the next
    step on, and their keys and values are computed anew; those before the first mask no longer change.

    With `reference_quirks` the window reaches beyond `gen_length`, so that the canvas is longer by
    window_length - 1 positions, and tokens are drawn row by row from one stream, [MASK] among them.
    """

    from_text = True
    one_prompt = False
    training_block_length = 32  # finetune/configs/example.yaml

    def __init__(
        self, settings: WeDLMSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, ids, settings.window_length - 1, reference_quirks=reference_quirks)
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = RowDraws(noise)
        self.propose = WeDLMPropose(settings, noise, ids, reference_quirks)
        self.select = SelectAbove(-settings.entropy_threshold)

    @classmethod
    def attention_of(
        cls, settings: Mapping[str, Any], content: Bool[Tensor, "batch position"], prompt_length: int
    ) -> StepAttention:
        """Observed tokens first, then the masks of the window; later masks are not seen."""
        return StepAttention(observed_first=True, mask_reach=int(settings["window_length"]))

    def reach(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """All that the network sees."""
        content = torch.ones_like(masked) if self._content is None else self._content
        return self.attention.seen_content(content, masked, masked.shape[1])


ALGORITHM = Algorithm(
    "wedlm",
    WeDLMSettings,
    WeDLMSampler,
    resolve_window,
    f"{MINUS_ENTROPY}, minus position_penalty times the places after the first mask",
    corruption=CountCorruption(),
)
