"""Blocks under an approximate cache, and parallel decoding by a threshold: what LLaDA's and Dream's samplers share.

The algorithms are Fast-dLLM's (2505.22618; NVlabs/Fast-dLLM, v1).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.cached_network import CachedLogits
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import Network
from dlm_lens.sampling.noise import SharedNoise
from dlm_lens.sampling.samplers.base import FirstCanvas, Sampler
from dlm_lens.sampling.samplers.selection import Select

CACHES = ("prefix", "dual")


class ParallelSettings(Protocol):
    """The settings of caches and of parallel decoding."""

    @property
    def cache(self) -> str | None:
        """Which keys and values outside the block are kept while it is decoded.

        "prefix" keeps those before the block, "dual" those after it too; None computes all at every step.
        """
        ...

    @property
    def threshold(self) -> float | None:
        """Every step unmasks all positions whose confidence is at least this, and at least the best one."""
        ...

    @property
    def factor(self) -> float | None:
        """Every step unmasks the n best positions, for the largest n with p_n >= 1 - factor / (n + 1)."""
        ...


def check_parallel(settings: ParallelSettings) -> None:
    """Raise unless cache, threshold and factor can be.

    Raises:
        ValueError: naming the setting and its value.
    """
    if settings.cache not in (None, *CACHES):
        raise ValueError(f"cache is {settings.cache!r}; it must be 'prefix', 'dual' or None")
    if settings.threshold is not None and settings.factor is not None:
        raise ValueError(
            f"threshold {settings.threshold} and factor {settings.factor} both say how many positions a step "
            "unmasks; give one of them"
        )
    if settings.threshold is not None and not 0 < settings.threshold <= 1:
        raise ValueError(f"threshold is {settings.threshold}; it is a probability, above 0 and at most 1")
    if settings.factor is not None and settings.factor <= 0:
        raise ValueError(f"factor is {settings.factor}; it must be positive")


class SelectConfident(Select):
    """All positions that are confident enough, and at least the `count` most confident ones of every row.

    With a threshold t those with p >= t. With a factor f the n best, for the largest n with p_n >= 1 - f / (n + 1):
    the more positions are written at once, the surer each must be (2505.22618, section 3.3).

    Attributes:
        completes: where all but one of a row's positions are confident enough, take that one too, as the authors'
            code does with a factor (NVlabs/Fast-dLLM, llada/generate.py, get_transfer_index_dynamic).
        above: the confidence has to be above the threshold (dLLM-Var).
    """

    def __init__(
        self, threshold: float | None, factor: float | None, *, completes: bool = False, above: bool = False
    ) -> None:
        super().__init__()
        self.threshold, self.factor, self.completes, self.above = threshold, factor, completes, above
        self.ranks_all = factor is None

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        ranked = confidence.masked_fill(~eligible, -torch.inf).sort(dim=-1, descending=True).values
        least: float | Tensor = self.threshold or 0.0
        if self.factor is not None:
            # In a wide dtype: the bounds of one step differ by less than bfloat16 tells apart.
            wide = torch.promote_types(ranked.dtype, torch.float32)
            least = 1 - self.factor / torch.arange(2, ranked.shape[-1] + 2, device=ranked.device, dtype=wide)
        # Confidences fall and bounds do not, so that the accepted ranks are the first ones.
        enough = ranked > least if self.above else ranked >= least
        accepted = (enough & (ranked > -torch.inf)).sum(-1)
        if self.completes:
            # One position is always written, so that of two masks both are.
            accepted = torch.maximum(accepted, eligible.any(-1).long().to(accepted.device))
            accepted = accepted + (accepted + 1 == eligible.sum(-1))
        return super().forward(confidence, eligible, torch.maximum(count.to(accepted.device), accepted))


class SpanNoise(SharedNoise):
    """The random stream of code that draws for the computed part of the canvas alone.

    Attributes:
        span: of the numbers that the step draws; None for the whole canvas.
        twice: the numbers of the vocabulary's columns are drawn twice and used the second time.
        drawn: the positions for which tokens are drawn, evaluated or not; None for the evaluated ones.
    """

    def __init__(self, stream: SharedNoise) -> None:
        self.generator = stream.generator
        self.span: tuple[int, int] | None = None
        self.twice = False
        self.drawn: Bool[Tensor, "batch position"] | None = None

    def columns(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Float[Tensor, "evaluated width"]:
        """Draw for all positions of the span, return the evaluated ones'."""
        inside = evaluated[:, self._span(evaluated)].cpu()
        for _ in range(2 if self.twice else 1):
            values = torch.rand(*inside.shape, width, generator=self.generator, dtype=torch.float64)
        return values[inside]

    def positions(self, eligible: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """Draw for all positions of the span; 0 elsewhere."""
        values, span = torch.zeros(eligible.shape, dtype=torch.float32), self._span(eligible)
        values[:, span] = torch.rand(values[:, span].shape, generator=self.generator, dtype=torch.float32)
        return values

    def tokens(
        self,
        probabilities: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """Tokens of the evaluated positions, drawn for `drawn`."""
        if self.drawn is None:
            return super().tokens(probabilities, evaluated, eligible)
        return self.tokens_among(probabilities, evaluated, self.drawn)

    def draw(
        self,
        weights: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """`torch.multinomial` over the span."""
        chosen, span = torch.zeros_like(eligible), self._span(eligible)
        chosen[:, span] = super().draw(weights[:, span], eligible[:, span], count)
        return chosen

    def _span(self, canvas: Tensor) -> slice:
        return slice(*(self.span or (0, canvas.shape[1])))


class CachedSampler(Sampler):
    """A sampler of blocks whose network may keep the keys and values around the block.

    The first step of a block computes the whole canvas, the others the block (`cache="dual"`) or the block and
    everything after it ("prefix"). With a logit shift the span begins one position earlier, at the output that
    predicts the block's first position; with `reference_quirks` it does not. An edit of the canvas outside the
    span, or masks that such an edit left before the block, make the step compute the whole canvas.

    Without quirks no step runs after the last mask of a block is written. The reference runs at least one step
    after the one that computes all.

    Attributes:
        cache: "prefix", "dual", or None.
        shift: whether the output at i - 1 predicts position i.
        reference_quirks: whether the authors' code is reproduced.
        computes_second: whether that code computes the second step of a block that has no mask left, as its first
            version does; that with a `factor` does not.
        each: most steps of a block.
    """

    shift: bool = False
    reference_quirks: bool = False
    computes_second: bool = True
    each: int = 1

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> "CachedSampler":
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.cache = settings.get("cache")
        sampler.reference_quirks = bool(settings.get("reference_quirks"))
        return sampler

    @classmethod
    def rows_wait(cls, settings: Mapping[str, Any]) -> bool:
        """With a threshold or a factor; with a cache too, which runs no step after the last mask of a block."""
        return any(settings.get(name) is not None for name in ("threshold", "factor", "cache"))

    def network(self, model: Any, first: FirstCanvas) -> Network:
        """The canvas's network, with the cache if there is one.

        Raises:
            ValueError: a cache with masks in the prompt, or with learned sink tokens.
        """
        content = first.content
        self.shift = bool(getattr(model.config, "logit_shift", False))
        if self.cache is None:
            return super().network(model, first)
        if not self.reference_quirks and bool((first.masked & content)[:, : first.prompt_length].any()):
            raise ValueError(
                f"cache={self.cache!r} and mask tokens in the prompt: they lie before the block, where the cache "
                "computes nothing; leave cache out to fill them in"
            )
        seen = self.network_content(content)
        alone = self.reference_quirks and self.shift
        return CachedLogits(model, seen, alone=alone, **self.guidance(model, first))

    def with_span(self, plan: StepPlan, positions: int, *, first: bool) -> StepPlan:
        """The plan with what the cache leaves to compute; `first` in its block it is everything."""
        if self.cache is None or first:
            return plan
        start, stop = plan.span
        start -= int(self.shift and not self.reference_quirks and start > 0)
        return replace(plan, computed=(start, positions if self.cache == "prefix" else stop))

    def planned(
        self, plan: StepPlan, masked: Bool[Tensor, "batch position"], edited: Bool[Tensor, "batch position"]
    ) -> StepPlan:
        """The plan, which computes everything after an edit outside its span."""
        if plan.computed is None:
            return plan
        outside = torch.ones_like(edited)
        outside[:, slice(*plan.computed)] = False
        left = masked[:, : plan.span[0]].any() & torch.tensor(not self.reference_quirks, device=masked.device)
        return replace(plan, computed=None) if bool((edited & outside).any() | left) else plan

    def reach(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Positions that the step predicts: under the cache those from the block's start to the span's end."""
        found = super().reach(masked, plan)
        if plan.computed is None:
            return found
        where = torch.arange(masked.shape[1], device=masked.device)
        return found & (where >= plan.span[0]) & (where < plan.computed[1])

    def leaves_out(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether nothing is left to decide in the block; the reference computes its second step nevertheless."""
        if not self.reference_quirks:
            return super().leaves_out(masked, plan)
        second = self.computes_second and self.cache is not None and plan.remaining == self.each - 1
        return self.adaptive and not second and not bool(masked[:, slice(*plan.span)].any())
