"""LLaDA2.0's sampler: block after block, every token above a confidence threshold and at least a planned number."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.base import FirstCanvas
from dlm_lens.sampling.samplers.blocks import BlockSampler
from dlm_lens.sampling.samplers.sdar import BlockDraws, SdarPropose, SelectAbove
from dlm_lens.sampling.settings import SpecialIds, at_least_one, not_negative, positive_share
from dlm_lens.sampling.step_attention import StepAttention


@dataclass(frozen=True, kw_only=True)
class BlockwiseSettings:
    """Settings of both samplers of LLaDA2 (ZHZisZZ/dllm, pipelines/llada2 and llada21, sampler.py).

    Args:
        gen_length: tokens of the answer (`max_new_tokens`); the last block is decoded whole, `texts` end before.
        block_length: tokens of a block (`block_size`), counted from the text's first token.
        temperature: 0 takes the most likely token, without top_k and top_p.
        top_k: keep so many of the most likely tokens, before top_p; None or 0 for all.
        top_p: keep the most likely tokens up to this probability, with the one that crosses it.
        threshold: every token with a higher confidence is written.
        eos_early_stop: in LLaDA2.0 a row ends inside its block, as soon as an end of the text has no mask before
            it; otherwise, and in LLaDA2.1, with that block. In LLaDA2.1 `reference_quirks` alone reads it.
        use_cache: compute finished blocks once, which is exact.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    threshold: float = 0.95
    eos_early_stop: bool = False
    use_cache: bool = True

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "block_length")
        not_negative(self, "temperature", zero="greedy")
        not_negative(self, "top_k", zero="all")
        not_negative(self, "threshold", zero="write every token at once")
        positive_share(self, "top_p")

    @classmethod
    def of(cls, settings: Any) -> "BlockwiseSettings":
        """Those that the settings of another sampler of blocks have too."""
        shared = [each.name for each in fields(cls) if hasattr(settings, each.name)]
        return cls(**{name: getattr(settings, name) for name in shared})


@dataclass(frozen=True, kw_only=True)
class LLaDA2Settings(BlockwiseSettings):
    """Settings of LLaDA2.0's sampler.

    Args:
        steps_per_block: steps of a block (`steps` in the model's `generate`), fewer if it has no mask left before.
        minimal_topk: at most gen_length // minimal_topk steps for a block.

    Raises:
        ValueError: a value is out of its range.
    """

    steps_per_block: int
    minimal_topk: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "steps_per_block", "minimal_topk")

    @property
    def block_steps(self) -> int:
        """Steps of a block."""
        return max(1, min(self.steps_per_block, self.gen_length // self.minimal_topk))

    def planned(self, step: int) -> int:
        """How many tokens a step of a block writes at least: block_length / steps, the first ones one more."""
        each, more = divmod(self.block_length, self.block_steps)
        return each + (step < more)


class BlockwiseSampler(BlockSampler):
    """What both samplers of LLaDA2 have in common: blocks counted from each row's text, and the ends of rows.

    The prompt's last tokens share a block with the first masks. Every row decodes its k-th block at the same steps,
    and waits for the others where it is done with it. A row ends with the block that holds an end of its text, or
    inside it (`eos_early_stop`); its later blocks stay masked, and the run ends with its last row. Masks in the
    prompt are filled in too: decoding begins with the block of the first mask.

    With `reference_quirks` decoding begins after the whole blocks of the prompt, rows do not end, and tokens are
    drawn for all positions of a block from one stream.
    """

    from_text, adaptive = True, True
    ends_inside: ClassVar[bool] = False
    reference_quirks = False

    def __init__(
        self, settings: BlockwiseSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        self.reference_quirks, self.early = reference_quirks, settings.eos_early_stop
        self.block_length = settings.block_length
        self.use_cache = settings.use_cache
        self.mask, self.eos = ids.mask, ids.eos
        self.ends = sorted({one for one in (*ids.ends, ids.eot) if one is not None})
        self.stream: BlockDraws | None = None
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = self.stream = BlockDraws(noise)
        self.propose = SdarPropose(
            noise,
            [] if reference_quirks else [ids.mask],
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        self.propose.in_float32 = True
        self.select = SelectAbove(settings.threshold)
        self.select.by_topk = reference_quirks

    @classmethod
    def attention_of(
        cls, settings: Mapping[str, Any], content: Bool[Tensor, "batch position"], prompt_length: int
    ) -> StepAttention:
        """Block by block; a row ends with its own last block, where the canvas goes on for rows that end later."""
        found, last = super().attention_of(settings, content, prompt_length), prompt_length - 1
        assert found.blocks is not None
        own = found.blocks.until_block_of(last + int(settings["gen_length"]), content.shape[1])
        return replace(found, own_blocks=own)

    def network(self, model: Any, first: FirstCanvas) -> BlockLogits:
        """The network of block diffusion.

        Raises:
            ValueError: `reference_quirks` with prompts that dllm's code refuses.
        """
        content, prompt_length = first.content, first.prompt_length
        lengths = content[:, :prompt_length].sum(-1)
        if self.reference_quirks and len(lengths.unique()) > 1:
            raise ValueError(
                f"reference_quirks with prompts of {lengths.tolist()} tokens: dllm's code takes prompts of equal "
                "length only; leave reference_quirks out, or run them one by one"
            )
        network = super().network(model, first)
        where = torch.arange(content.shape[1], device=content.device)
        answer = (where >= prompt_length).expand(content.shape) if self.reference_quirks else first.masked
        self._answer = self.attention.within_own_blocks(answer)
        self._begin = int(self._answer.any(0).int().argmax())
        return network

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """As many steps of every block as it can have; those that have nothing to do are left out."""
        return self.block_plans(self._begin, positions, self.most_steps())

    def most_steps(self) -> int:
        """How many steps a block can have."""
        raise NotImplementedError

    def at_work(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch"]:
        """The rows that are not done with the block."""
        raise NotImplementedError

    def running(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The positions of the block in rows that are not done with it and have not ended."""
        rows = self.at_work(masked, plan)
        rows = rows if self.ended is None else rows & ~self.ended
        return self.attention.within_own_blocks(self.reach(masked, plan)) & rows[:, None]

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The masks of the block, in rows that are not done with it."""
        return masked & self.running(masked, plan)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The block that the random stream draws for and that `torch.topk` is given."""
        self.select.span = plan.span  # type: ignore[assignment]
        if self.stream is not None:
            self.stream.span = plan.span

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has ended."""
        if self.reference_quirks:
            return False
        masked = self.open(canvas)
        ends = self._answer & self.reach(masked, plan) & torch.isin(canvas, canvas.new_tensor(self.ends))
        if self.early and self.ends_inside:
            # An end of the text counts once no mask is before it.
            over = (ends & ~(masked & self._answer).cumsum(-1).bool()).any(-1)
        else:
            over = ends.any(-1) & ~self.at_work(masked, plan)
        self.ended = over if self.ended is None else self.ended | over
        return bool(self.ended.all())

    def open(self, canvas: Int[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
        """The masks of a canvas."""
        return canvas.eq(-1 if self.mask is None else self.mask)

    def _has_end(self, tokens: Int[Tensor, "*token"]) -> bool:
        """Whether dllm's code sees an end of the text among these."""
        return self.eos is not None and bool(tokens.eq(self.eos).any())


class LLaDA2Sampler(BlockwiseSampler):
    """Each step of a block writes every token above the threshold, and at least the planned number.

    By default the last step of a block writes all that is left, so that masks which an intervention puts back are
    written too. With `reference_quirks` and `eos_early_stop` a block is left, with its masks, as soon as a row has
    an end of the text in it, prompt included, and the next one is decoded after it.
    """

    ends_inside = True

    def __init__(
        self, settings: LLaDA2Settings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, noise, ids, reference_quirks=reference_quirks)
        self.settings = settings
        self._left = -1

    def most_steps(self) -> int:
        """The steps of a block."""
        return self.settings.block_steps

    def at_work(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch"]:
        """The rows that have masks in the block."""
        there = (masked & self.reach(masked, plan)).any(-1)
        return there & (plan.block != self._left)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """The planned number."""
        if plan.remaining == 1 and not self.reference_quirks:
            return eligible.sum(-1)
        number = self.settings.planned(self.settings.block_steps - plan.remaining)
        return eligible.sum(-1).clamp(max=number)

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has ended."""
        if self.reference_quirks and self.early and self._has_end(canvas[:, slice(*plan.span)]):
            self._left = plan.block
        return super().finished(canvas, plan)

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended, and the block that was left."""
        return {**super().state(), "left": torch.tensor(self._left)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._left = int(state.get("left", -1))


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings, then the checkpoint's; `steps`, those of the whole answer, set those of a block."""
    values = {**defaults, **given}
    steps = values.pop("steps", None)
    if steps is not None:
        blocks = math.ceil(values["gen_length"] / max(1, values["block_length"]))
        values["steps_per_block"] = given.get("steps_per_block", math.ceil(steps / max(1, blocks)))
    return values


ALGORITHM = Algorithm("llada2", LLaDA2Settings, LLaDA2Sampler, resolve, FILTERED, corruption=CountCorruption())
