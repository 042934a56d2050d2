"""WeDLM's streaming parallel decoding: a window of masks, of which those of low entropy are filled at each step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.attention import position_ids
from dlm_lens.sampling.algorithm_registry import Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.network import CanvasLogits
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.base import Sampler, SpecialIds, one_block
from dlm_lens.sampling.samplers.dllm import OrderedNoise
from dlm_lens.sampling.samplers.dream import filtered
from dlm_lens.sampling.samplers.llada import without
from dlm_lens.sampling.samplers.sdar import SelectAbove
from dlm_lens.sampling.settings import at_least_one, not_negative, nucleus


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
    window_length: int = 16
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
        nucleus(self, "top_p")


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

    def __init__(self, settings: WeDLMSettings, noise: Noise, ids: SpecialIds, reference_quirks: bool) -> None:
        super().__init__()
        self.settings, self.noise = settings, noise
        self.never = [] if reference_quirks else [ids.mask]

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        settings, kept = self.settings, without(logits, self.never)
        entropy = torch.special.entr(logits.float().softmax(-1)).sum(-1)
        if settings.temperature > 0:
            # Two calls: the authors' top k comes before the nucleus.
            kept = filtered(filtered(kept, None, settings.top_k or None), settings.top_p, None)
            chosen = self.noise.tokens((kept / settings.temperature).softmax(-1), evaluated, eligible)
        else:
            chosen = kept.argmax(-1)
        where = torch.arange(canvas.shape[1], device=canvas.device)
        distance = (where - eligible.int().argmax(-1, keepdim=True)).float()
        found = entropy.new_zeros(canvas.shape).masked_scatter(evaluated, entropy)
        confidence = -(found + distance * settings.position_penalty)
        return Proposal(canvas.masked_scatter(evaluated, chosen), confidence.masked_fill(~eligible, -torch.inf))


class WindowLogits(CanvasLogits):
    """Logits of canvases of which the network does not see the masks after the window.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        window_length: positions of the window.
    """

    def __init__(self, model: Any, content: Bool[Tensor, "batch position"], window_length: int) -> None:
        super().__init__(model, content)
        self.content, self.sampler = content, Sampler()
        self.sampler.window_length = window_length

    def inputs_of(self, canvas: Int[Tensor, "batch position"]) -> dict[str, Any]:
        """Arguments of a pass over the canvas; positions count the hidden masks too."""
        seen = self.sampler.seen_content(self.content, canvas == self.model.config.mask_token_id)
        return {"attention_mask": seen.long(), "position_ids": position_ids(self.content), "use_cache": False}


class WeDLMSampler(Sampler):
    """Streaming parallel decoding (2512.22737): observed tokens first, then a window of masks.

    The window of a row begins at its first mask. A step predicts the masks in it, each at its own position, and
    fills those that `WeDLMSettings.entropy_threshold` says. Tokens that are filled in are observed from the next
    step on, and their keys and values are computed anew; those before the first mask no longer change. No cache is
    kept: what the authors' engine caches are the keys and values of the tokens before the first mask, which see
    only each other, so that its numbers are the same.

    A row ends with a stop token in its answer that has no mask before it; masks after it stay. How many steps run
    depends on the entropies. With `reference_quirks` the window reaches beyond `gen_length`, so that the canvas is
    longer by window_length - 1 positions, and tokens are drawn row by row from one stream, [MASK] among them.
    """

    observed_first, adaptive, from_text = True, True, True
    training_block_length = 32  # finetune/configs/example.yaml
    ended: Bool[Tensor, "batch"] | None = None
    reference_quirks = False
    _content: Bool[Tensor, "batch position"] | None = None

    def __init__(
        self, settings: WeDLMSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = RowDraws(noise)
        self.settings, self.reference_quirks = settings, reference_quirks
        self.window_length = settings.window_length
        self.propose = WeDLMPropose(settings, noise, ids, reference_quirks)
        self.select = SelectAbove(-settings.entropy_threshold)
        ends = (*ids.ends, *([] if ids.eot is None else [ids.eot]))
        self.stops = ends if settings.stop_tokens is None else settings.stop_tokens
        self._most = 0

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """The tokens requested; with `reference_quirks` as many more as the last window has after its first."""
        return gen_length + (self.settings.window_length - 1 if self.reference_quirks else 0)

    def network(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        prompt_length: int,
        canvas: Int[Tensor, "batch position"],
    ) -> WindowLogits:
        """The network of the windows.

        Raises:
            ValueError: masks in a prompt, with `reference_quirks`.
        """
        assert self.window_length is not None
        if self.reference_quirks and bool((masked & content)[:, :prompt_length].any()):
            raise ValueError(
                "the authors' engine keeps a [MASK] in a prompt as a token, and here it is filled in: leave "
                "reference_quirks or the masks in the prompt out"
            )
        self._content, self._most = content, int((masked & content).sum(-1).max())
        return WindowLogits(model, content, self.window_length)

    def inputs(
        self,
        model: Any,
        content: Bool[Tensor, "batch seen"],
        canvas: Int[Tensor, "batch seen"],
        prompt_length: int,
    ) -> dict[str, Any]:
        """The window of each row."""
        assert self.window_length is not None
        return WindowLogits(model, content, self.window_length).inputs_of(canvas)

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.window_length = int(settings["window_length"])
        return sampler

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """As many steps as there are masks, at most."""
        self._answer = prompt_length
        return one_block(self._most, prompt_length, positions, self.settings.gen_length)

    def reach(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """All that the network sees."""
        content = torch.ones_like(masked) if self._content is None else self._content
        return self.seen_content(content, masked)

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The masks of the window, in rows that have not ended."""
        masks = masked & self.reach(masked, plan)
        return masks if self.ended is None else masks & ~self.ended[:, None]

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """One in each row, beside those below the threshold."""
        return eligible.any(-1).long()

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has its answer, or a stop token in it without a mask before."""
        assert self._content is not None
        decided = (self.open_positions(canvas, plan.index + 1) & self._content).cumsum(-1) == 0
        end = self._answer + self.settings.gen_length
        stops = torch.isin(canvas, torch.tensor(self.stops, dtype=canvas.dtype, device=canvas.device)) & decided
        self.ended = stops[:, self._answer : end].any(-1) | decided[:, end - 1]
        return bool(self.ended.all())

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended."""
        return {} if self.ended is None else {"ended": self.ended}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        self.ended = state.get("ended")


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings, then the checkpoint's; lists of ids become tuples."""
    values = {**defaults, **given}
    if values.get("stop_tokens") is not None:
        values["stop_tokens"] = tuple(int(one) for one in values["stop_tokens"])
    return values


ALGORITHM = Algorithm("wedlm", WeDLMSettings, WeDLMSampler, resolve, corruption=CountCorruption())
