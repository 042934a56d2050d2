"""LLaDA's sampler: block-wise, low-confidence or random remasking, classifier-free guidance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.sampling.algorithm_registry import RANKED, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.network import by_rows, most_likely
from dlm_lens.sampling.noise import Noise, SharedNoise, add_gumbel
from dlm_lens.sampling.samplers.cached_blocks import CachedSampler, SelectConfident, SpanNoise, check_parallel
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.settings import (
    SpecialIds,
    at_least_one,
    block_settings,
    check_blocks,
    known_remasking,
    not_negative,
)

REMASKING = ("low_confidence", "random")


@dataclass(frozen=True)
class LLaDASettings:
    """Settings of LLaDA's sampler (ML-GSAI/LLaDA, generate.py), under its own names, and of MMaDA's copy of it.

    Args:
        steps: denoising steps in all.
        gen_length: tokens of the answer.
        block_length: tokens of a block.
        temperature: 0 takes the most likely token.
        cfg_scale: guidance; 0 for none.
        remasking: "low_confidence" or "random".
        logits_eos_inf: never propose the end of the text.
        confidence_eos_eot_inf: unmask the end of the text or of the turn last.
        float64_confidence: softmax of the confidence in float64 (MMaDA; LLaDA before June 2025).
        eot_token: a row ends after a block whose last token is this one, and its later blocks stay masked
            (MMaDA's mmu_generate_fast); None: every block of every row is decoded.
        cache: "prefix" keeps the keys and values before the block while it is decoded, "dual" those after it too,
            which is approximate; None computes everything at every step.
        threshold: a step unmasks all positions of the block with at least this confidence, and at least one;
            `steps` is then not used.
        factor: likewise the n best, for the largest n with p_n >= 1 - factor / (n + 1).
        unpadded_guidance: with `reference_quirks`, a run with guidance sees the padding as content (MMaDA).

    Raises:
        ValueError: lengths and steps do not fit each other, or a value is out of its range.
    """

    steps: int
    gen_length: int
    block_length: int
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: str = "low_confidence"
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    float64_confidence: bool = False
    eot_token: int | None = None
    unpadded_guidance: bool = False
    cache: str | None = None
    threshold: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "block_length")
        check_blocks(self)
        not_negative(self, "temperature", zero="greedy")
        not_negative(self, "cfg_scale", zero="no guidance")
        known_remasking(self.remasking, REMASKING, REMASKING, "LLaDA")
        check_parallel(self)

    @property
    def parallel(self) -> bool:
        """Whether confidence says how many positions a step unmasks."""
        return self.threshold is not None or self.factor is not None

    @property
    def blocks(self) -> int:
        """Number of blocks; infilling without an answer (gen_length 0) is one block."""
        return max(1, self.gen_length // self.block_length)


class GumbelSettings(Protocol):
    """The settings that `GumbelPropose` reads."""

    @property
    def temperature(self) -> float:
        """0 takes the most likely token."""
        ...

    @property
    def remasking(self) -> str:
        """The rule that chooses positions; "random" at random."""
        ...

    @property
    def float64_confidence(self) -> bool:
        """Whether the softmax of the confidence runs in float64."""
        ...


class GumbelPropose(nn.Module):
    """x0 = argmax of the (noisy) logits; confidence = softmax probability of x0 under the clean ones.

    The softmax runs in the dtype of the logits, as in LLaDA's reference since June 2025, or in float64. With random
    remasking the confidence is a uniform number instead. [MASK] is never an x0, since it decides nothing; the
    references allow it. With `reference_quirks` the confidence keeps the dtype of its softmax: torch rounds a
    threshold that it compares with a tensor to the tensor's dtype, so that 0.9 is 0.8984375 in bfloat16.
    """

    def __init__(self, settings: GumbelSettings, noise: Noise, ids: SpecialIds, reference_quirks: bool) -> None:
        super().__init__()
        self.temperature, self.random = settings.temperature, settings.remasking == "random"
        self.float64, self.noise = settings.float64_confidence, noise
        self.reference_quirks = reference_quirks
        self.never = [] if reference_quirks else [ids.mask]

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        uniform = None
        if self.temperature > 0:
            uniform = self.noise.column_rows(evaluated, eligible, logits.shape[-1])
        chosen, likely = by_rows(self._chosen, logits, uniform)
        if self.random:
            confidence = self.noise.positions(eligible).to(canvas.device)
        else:
            confidence = likely.new_zeros(canvas.shape).masked_scatter(evaluated, likely)
        tokens = canvas.masked_scatter(evaluated, chosen)
        return Proposal(tokens, confidence.masked_fill(~eligible, -torch.inf))

    def _chosen(
        self, logits: Float[Tensor, "n d_vocab"], uniform: Float[Tensor, "n d_vocab"] | None
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        """The tokens and their probabilities, which are not computed where positions are ranked at random."""
        logits = self.proposable(logits)
        scores = logits if uniform is None else add_gumbel(logits, uniform, self.temperature)
        chosen = most_likely(without(scores, self.never))
        if self.random:
            return chosen, logits.new_zeros(len(chosen))
        wide = torch.float64 if self.float64 else logits.dtype
        likely = self.ranked(logits).softmax(-1, dtype=wide).gather(-1, chosen[:, None]).squeeze(-1)
        return chosen, likely if self.float64 or self.reference_quirks else likely.float()

    def proposable(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        """The logits without the tokens that are never proposed."""
        return logits

    def ranked(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        """The logits whose softmax is the confidence, without the tokens that are unmasked last."""
        return logits


class LLaDAPropose(GumbelPropose):
    """`GumbelPropose` with the two settings that postpone the end, which read `eos` and `eot`."""

    def __init__(self, settings: LLaDASettings, noise: Noise, ids: SpecialIds, reference_quirks: bool) -> None:
        super().__init__(settings, noise, ids, reference_quirks)
        # As in Fast-dLLM's code.
        self.float64 = self.float64 or settings.parallel or settings.cache is not None
        # In the reference the EOS suppression lands on the noisy copy of the logits when there is noise, so
        # that the confidence still sees EOS. By default it is suppressed at every temperature.
        unlikely = [ids.eot] if reference_quirks and settings.temperature > 0 else [ids.eos, ids.eot]
        self.unlikely = unlikely if settings.confidence_eos_eot_inf else []
        self.unproposed = [ids.eos] if settings.logits_eos_inf else []

    def proposable(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        """With `logits_eos_inf` without the end of the text."""
        return without(logits, self.unproposed)

    def ranked(self, logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, "n d_vocab"]:
        """With `confidence_eos_eot_inf` without the ends of the text and of the turn."""
        return without(logits, self.unlikely)


def without(logits: Float[Tensor, "n d_vocab"], ids: Sequence[int | None]) -> Float[Tensor, "n d_vocab"]:
    """The logits with -inf for these tokens.

    Raises:
        ValueError: one that is not in the vocabulary.
    """
    if not ids:
        return logits
    known = [i for i in ids if i is not None]
    if max(known, default=0) >= logits.shape[-1]:
        raise ValueError(
            f"token {max(known)} is to be suppressed, and the model has {logits.shape[-1]} tokens, 0 to "
            f"{logits.shape[-1] - 1}; give ids of its vocabulary"
        )
    columns = torch.tensor(known, dtype=torch.long, device=logits.device)
    return logits.index_fill(-1, columns, -torch.inf)


class LLaDASampler(CachedSampler):
    """Blocks from left to right; in each, every step unmasks its share of the masks that are left.

    Of a block's m masks, each of s steps unmasks ceil(left / steps left), which is m // s with one more in the
    first m % s steps, as in the reference. Masks are recounted, so that masks which an intervention puts back are
    unmasked too. Masks before the block (in the prompt, or put back by an intervention) are eligible and counted.
    In parallel decoding (`threshold`, `factor`) and under a `cache` a step is left out once the block has no masks.
    `reference_quirks` fixes the counts when the block starts, from the block alone: masks in the prompt then
    compete for its budget, and as many are left at the end.

    With `eot_token` a row whose block ends with it is done; `reference_quirks` stops only when all rows are.
    """

    decodes_in_order = True
    withholds = ("logits_eos_inf",)
    stream: SpanNoise | None = None

    def __init__(
        self,
        settings: LLaDASettings,
        noise: Noise,
        ids: SpecialIds,
        *,
        reference_quirks: bool = False,
    ) -> None:
        super().__init__()
        needs_eos = settings.logits_eos_inf or settings.confidence_eos_eot_inf
        if needs_eos and ids.eos is None:
            raise ValueError(
                "logits_eos_inf and confidence_eos_eot_inf need an end-of-text token; "
                "pass eos_token_id= to dlm_lens.load"
            )
        self.settings, self.reference_quirks, self.cfg_scale = settings, reference_quirks, settings.cfg_scale
        self.mask = ids.mask
        self.cache, self.adaptive = settings.cache, self.rows_wait(vars(settings))
        self.each = settings.steps // settings.blocks
        if settings.parallel and settings.remasking == "random" and not reference_quirks:
            raise ValueError(
                "threshold and factor compare probabilities, which remasking='random' does not have; leave one out"
            )
        if reference_quirks and self.cache and not settings.parallel and self.each == 1:
            raise ValueError(
                f"reference_quirks with cache={self.cache!r} and one step per block: the authors' code fails "
                "there; give more steps, or leave reference_quirks out"
            )
        if isinstance(noise, SharedNoise) and self.cache is not None:
            noise = self.stream = SpanNoise(noise)
        self.propose = LLaDAPropose(settings, noise, ids, reference_quirks)
        self.select = Select()
        if settings.parallel:
            completes = reference_quirks and settings.factor is not None
            self.select = SelectConfident(settings.threshold, settings.factor, completes=completes)
        self.computes_second = settings.factor is None
        self.select.by_topk = reference_quirks
        self.unpadded = reference_quirks and settings.unpadded_guidance and settings.cfg_scale > 0
        self._block_masks: Tensor | None = None
        self._done: Tensor | None = None

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step: steps / blocks of them for each block, in parallel decoding at most one per position."""
        settings = self.settings
        if settings.parallel:
            # The reference computes a step more than it needs.
            needed = settings.block_length if settings.gen_length else positions
            second = self.computes_second and self.cache is not None
            self.each = needed + int(self.reference_quirks and second)
        each, found = self.each, list[StepPlan]()
        for index in range(each * settings.blocks):
            block = index // each
            stop = positions if settings.gen_length == 0 else prompt_length + (block + 1) * settings.block_length
            start = 0 if settings.gen_length == 0 else stop - settings.block_length
            plan = StepPlan(index, each * settings.blocks, block, (start, stop), each - index % each)
            found.append(self.with_span(plan, positions, first=index % each == 0))
        return found

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Masked positions up to the end of the block, in rows that have not ended."""
        until = masked & (torch.arange(masked.shape[1], device=masked.device) < plan.span[1])
        until = until & self.reach(masked, plan)
        return until if self._done is None else until & ~self._done[:, None]

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row this step unmasks."""
        if not self.reference_quirks:
            return (eligible.sum(-1) + plan.remaining - 1) // plan.remaining
        if self.settings.parallel:
            return eligible.any(-1).long()
        each = self.each
        done = each - plan.remaining
        if done == 0 or self._block_masks is None:
            self._block_masks = masked[:, slice(*plan.span)].sum(-1)
        return self._block_masks // each + (done < self._block_masks % each)

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended, and with `reference_quirks` the counts of the block."""
        found = {"done": self._done, "block_masks": self._block_masks}
        return {name: value for name, value in found.items() if value is not None}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        self._done, self._block_masks = state.get("done"), state.get("block_masks")

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The span that the random stream draws for and that `torch.topk` is given."""
        self.select.span = plan.computed  # type: ignore[assignment]
        if self.stream is not None:
            self.stream.span = plan.computed
            self.stream.twice = self.cache == "prefix" and plan.computed is not None

    @classmethod
    def ends_rows(cls, settings: Mapping[str, Any]) -> bool:
        """With `eot_token` alone; the authors' code goes on with every row until all have ended."""
        return settings.get("eot_token") is not None and not settings.get("reference_quirks")

    @classmethod
    def continues(cls, settings: Mapping[str, Any]) -> bool:
        """Where a block depends on no random number, not on guidance, and ends no row."""
        draws = settings.get("temperature") or settings.get("remasking") != "low_confidence"
        return not (draws or settings.get("cfg_scale") or settings.get("eot_token") is not None)

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row ended with this step's block."""
        if self.settings.eot_token is None or (plan.remaining > 1 and self._has_masks(canvas, plan)):
            return False
        ends = canvas[:, plan.span[1] - 1] == self.settings.eot_token
        if self.reference_quirks:
            return bool(ends.all())
        self._done = ends if self._done is None else self._done | ends
        return bool(self._done.all())

    def _has_masks(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether steps of the block follow; all of them do, unless the sampler leaves out those without masks."""
        masks: Tensor = canvas[:, slice(*plan.span)].eq(self.mask if self.mask is not None else -1)
        return not self.adaptive or bool((masks if self._done is None else masks & ~self._done[:, None]).any())


ALGORITHM = Algorithm("llada", LLaDASettings, LLaDASampler, block_settings, RANKED, corruption=CountCorruption())
