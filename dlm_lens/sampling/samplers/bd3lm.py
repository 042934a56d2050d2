"""BD3-LM's sampler: semi-autoregressive, ancestral sampling of one block after another, or one token per step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import NOISE_EPS, sigma_of, takes_noise_level
from dlm_lens.sampling.algorithm_registry import Algorithm
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import RateCorruption
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.base import FirstCanvas
from dlm_lens.sampling.samplers.blocks import BlockSampler
from dlm_lens.sampling.samplers.dllm_blocks import BlockNoise
from dlm_lens.sampling.samplers.mdlm import (
    AncestralPropose,
    NoiseConditionedLogits,
    NoiseConditionedSampler,
    SelectLikelier,
    Times,
    log_probabilities,
    within_nucleus,
)
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.settings import SpecialIds, at_least_one, not_negative, of_run, positive_share


@dataclass(frozen=True)
class BD3LMSettings:
    """Settings of BD3-LM's `_semi_ar_sampler` (kuleshov-group/bd3lms, diffusion.py).

    Args:
        gen_length: tokens of the answer.
        block_length: tokens of a block, counted from the first token of the text; the answer's last block may be
            shorter.
        steps: steps in all, of which each block gets ceil(steps / ceil(gen_length / block_length)).
        steps_per_block: steps of every block, at most (`num_steps`), instead.
        first_hitting: write one token per step, at a position drawn at random (2409.02908); with fewer steps than
            masks equally many, rounded up. Without, ancestral sampling, as MDLM's.
        nucleus_p: draw from the most likely tokens whose probabilities sum to at most this, so that the token that
            crosses it is left out, but never the first. 1 for all.
        temperature: of the tokens' probabilities; 0 takes the most likely token (positions stay random). The
            original has 1.
        use_cache: compute finished blocks once (`kv_cache`), which is exact.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    steps: int | None = None
    steps_per_block: int | None = None
    first_hitting: bool = True
    nucleus_p: float = 1.0
    temperature: float = 1.0
    use_cache: bool = True

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "block_length", "steps", "steps_per_block")
        not_negative(self, "temperature", zero="greedy")
        positive_share(self, "nucleus_p")
        for name in ("first_hitting", "use_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")

    @property
    def block_steps(self) -> int:
        """Steps of each block, at most."""
        steps = self.steps_per_block
        if steps is None:
            steps = -(-(self.steps or self.gen_length) // -(-self.gen_length // self.block_length))
        return min(steps, self.block_length) if self.first_hitting else steps

    def times(self, step: int, *, reference_quirks: bool = False) -> Times:
        """The noise of a block's step.

        A mask stays with probability s / t, with t = 1 - step / n and s = t - 1 / n. The original takes t from
        linspace(1, 0, n) in float32 and s = t - 1 / n, so that at its last step s / t is -inf: whatever is masked
        then becomes the first token of the vocabulary.
        """
        steps = self.block_steps
        if reference_quirks:
            t = torch.linspace(1, 0, steps, dtype=torch.float32)[step]
            ratio = (t - 1 / steps) / t
        else:
            t = torch.tensor(1 - step / steps, dtype=torch.float64)
            ratio = torch.tensor(1 - 1 / (steps - step), dtype=torch.float64)
        sigma = sigma_of(t).clamp(max=float(sigma_of(torch.tensor(1 - NOISE_EPS, dtype=torch.float32))))
        return Times(float(sigma), float(1 - ratio), float(ratio))


class BlockStream(BlockNoise):
    """The original's stream: numbers for the block alone, and one number for the position that is written."""

    def positions(self, eligible: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """1 at the position drawn from a single row's masks, 0 elsewhere."""
        masks = eligible[0].cpu().nonzero().flatten()
        values = torch.zeros(eligible.shape, dtype=torch.float32)
        values[0, masks[torch.randint(0, len(masks), (1,), generator=self.generator)]] = 1.0
        return values


class BD3LMPropose(AncestralPropose):
    """x0 drawn from p(x0) within the nucleus; with `first_hitting` the confidence is a random number."""

    def __init__(self, settings: BD3LMSettings, noise: Noise, mask: int | None, *, reference_quirks: bool) -> None:
        super().__init__(settings.temperature, noise, mask, reference_quirks=reference_quirks)
        self.nucleus_p, self.first_hitting = settings.nucleus_p, settings.first_hitting

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        proposal = super().forward(canvas, logits, evaluated, eligible)
        if not self.first_hitting:
            return proposal
        order = self.noise.positions(eligible).to(canvas.device)
        return proposal._replace(confidence=order.masked_fill(~eligible, -torch.inf))

    def probabilities(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """P(x0) within the nucleus, in float64; the original's logarithm has the dtype of the logits."""
        quirks = self.reference_quirks
        wide = logits if quirks else logits.double()
        likely = log_probabilities(wide, self.mask, self.temperature, rounded_twice=quirks).double().exp()
        return within_nucleus(likely, self.nucleus_p)


class NoiseConditionedBlocks(NoiseConditionedLogits, BlockLogits):
    """Logits of blocks, of a network that may be given the noise level."""


class BD3LMSampler(NoiseConditionedSampler, BlockSampler):
    """Blocks from left to right; a block ends when it has no mask, and its last planned step leaves none.

    With `reference_quirks` the times are the original's (`BD3LMSettings.times`), blocks are whole, and
    `first_hitting` takes a single row.
    """

    from_text, adaptive = True, True

    def __init__(
        self, settings: BD3LMSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        self.stream: BlockStream | None = None
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = self.stream = BlockStream(noise)
        self.settings, self.reference_quirks = settings, reference_quirks
        self.keeps_stale = reference_quirks
        self.block_length, self.use_cache = settings.block_length, settings.use_cache
        self.propose = BD3LMPropose(settings, noise, ids.mask, reference_quirks=reference_quirks)
        self.select = Select() if settings.first_hitting else SelectLikelier()

    def network(self, model: Any, first: FirstCanvas) -> NoiseConditionedBlocks:
        """The network of block diffusion; given the noise level, it computes everything at every step.

        Raises:
            ValueError: a network that is given the noise level, with `first_hitting`.
        """
        if takes_noise_level(model) and self.settings.first_hitting:
            raise ValueError(
                "the network is given the noise level (time_conditioning), which first_hitting=True does not have; "
                "denoise with first_hitting=False"
            )
        return NoiseConditionedBlocks(
            model,
            first.content,
            self,
            layout=self.block_layout,
            use_cache=self.use_cache and not takes_noise_level(model),  # what is cached would depend on it
            **self.guidance(model, first),
        )

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.settings = of_run(BD3LMSettings, settings)
        sampler.reference_quirks = bool(settings.get("reference_quirks"))
        return sampler

    def planned_again(self, plan: StepPlan, block_number: int) -> StepPlan:
        """With the steps left in the block, of which the noise level is a function."""
        return replace(plan, remaining=self.settings.block_steps - block_number)

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """`gen_length`.

        Raises:
            ValueError: with `reference_quirks`, a text that does not end with a block, or several rows with
                `first_hitting`.
        """
        if not self.reference_quirks:
            return gen_length
        if self.settings.first_hitting and len(prompts) > 1:
            raise ValueError(
                f"reference_quirks with first_hitting takes one prompt at a time, as the authors' code does, and "
                f"there are {len(prompts)}; denoise them one by one, or leave reference_quirks out"
            )
        for length in (prompts.sum(-1) + gen_length).tolist():
            if length % self.block_length:
                raise ValueError(
                    f"reference_quirks decodes whole blocks of {self.block_length}, and prompt and answer have "
                    f"{length} tokens: give another gen_length, or leave reference_quirks out"
                )
        return gen_length

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step of every block, at most."""
        return self.block_plans(prompt_length, positions, self.settings.block_steps)

    def times(self, plan: StepPlan) -> Times:
        """The noise of a step; none with `first_hitting`, which draws tokens without [MASK]."""
        if self.settings.first_hitting:
            return Times(0.0, 1.0, 0.0)
        step = self.settings.block_steps - plan.remaining
        return self.settings.times(step, reference_quirks=self.reference_quirks)

    def at(self, plan: StepPlan) -> None:
        """Take the step's noise level."""
        self.sigma = self.times(plan).sigma

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row `first_hitting` unmasks: one, or as many as finish the block in time."""
        left = eligible.sum(-1)
        if self.reference_quirks:
            return left.clamp(max=1)
        return -(-left // plan.remaining)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The block that the random stream draws for, and the noise of the step."""
        if self.stream is not None:
            self.stream.span = plan.span
        self.propose.times = self.times(plan)  # type: ignore[assignment]


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The settings; without `steps` those of each block are the default's."""
    values = {**defaults, **given, "steps": given.get("steps", defaults.get("steps"))}
    if "steps" in given and "steps_per_block" not in given:
        values["steps_per_block"] = None
    return values


# The original draws a time for each block of a text, this one for all of them: the same mean.
ALGORITHM = Algorithm(
    "bd3lm",
    BD3LMSettings,
    BD3LMSampler,
    resolve,
    "as in MDLM's sampler; with first_hitting a uniform number",
    corruption=RateCorruption(eps=1e-3),
)
