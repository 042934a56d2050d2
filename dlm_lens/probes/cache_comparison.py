"""`compare`: without and with hooks, or without and with an approximate cache (`CacheComparison`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import checked_arguments
from dlm_lens.attention import MIN_VIEWERS, HookLike, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.recording import ReceivedAttention, StaleAttention, rerun
from dlm_lens.sampling import Comparison, DenoisingRun, RunObserver, Sampler, StepPlan, denoise
from dlm_lens.sampling import compare as compare_hooks
from dlm_lens.sampling.network import CanvasLogits
from dlm_lens.sampling.samplers.base import FirstCanvas
from dlm_lens.sinks import AboveMean, Detector, Sinks, find_sinks, received_of
from dlm_lens.sinks.detectors.base import as_detector

Cache = Literal["prefix", "dual"]

DEFAULT = AboveMean(3.0)
"""The detector of the sinks that a cache changes."""


@dataclass(frozen=True, eq=False)
class CacheComparison(ShowsItself):
    """A run with an approximate cache, compared with a run without one, and with the exact network on its canvases.

    `pair` holds two runs from one seed: after the first difference they see other canvases. Everything else is
    measured on the canvases of the cached run, where the exact network computes all positions; a step that computes
    all is exact, and its entries are 0. Sinks are those of the block's queries, which both networks compute.

    Args:
        pair: `plain` without the cache, `hooked` with it.
        cache: "prefix" or "dual".
        kl: KL(exact || cached) of the predicted token in nats, at the masks of the block; NaN elsewhere.
        flipped: where the exact network's likeliest token (not [MASK]) is another one.
        outranked: positions that the step decided, and that are not among the as many positions of the block that
            are the most probable ones of the exact network. All False where the sampler does not decide the most
            probable positions (a temperature or `alg_temp` above 0, `remasking` "random", "origin", "topk_margin"
            or "entropy", `top_p`, `top_k`, or LLaDA's settings that postpone the end): its own rule would count.
        exact: its sinks.
        cached: the cached network's.
        stale: the share of attention of the computed queries that comes to kept keys.

    Raises:
        ValueError: the sinks are of other shapes.
    """

    pair: Comparison
    cache: Cache
    kl: Float[Tensor, "step batch position"]
    flipped: Bool[Tensor, "step batch position"]
    outranked: Bool[Tensor, "step batch position"]
    exact: Sinks
    cached: Sinks
    stale: Float[Tensor, "step batch layer head"]

    def __post_init__(self) -> None:
        if self.exact.is_sink.shape != self.cached.is_sink.shape:
            shapes = list(self.exact.is_sink.shape), list(self.cached.is_sink.shape)
            raise ValueError(f"CacheComparison: sinks of shapes {shapes[0]} and {shapes[1]} do not pair")

    def __repr__(self) -> str:
        changed, answer = int(self.pair.tokens_changed.sum()), int(self.pair.answer.sum())
        sinks = int(self._counts[0].sum())
        return (
            f"CacheComparison({self.cache!r}: {changed} of {answer} tokens differ; decisions changed "
            f"{self.decisions_changed:.1%}, KL of a decided token {self.kl_decided:.3g} nats; of {sinks} sinks "
            f"{self.sinks_lost:.1%} lost, {self.sinks_moved:.1%} moved; {self.stale_share:.1%} of attention to "
            f"kept keys, which are {self.stale_keys:.1%} of the keys)"
        )

    @property
    def run(self) -> DenoisingRun:
        """The run with the cache."""
        return self.pair.hooked

    @property
    def from_cache(self) -> Bool[Tensor, "step"]:
        """The steps that use kept keys."""
        return torch.tensor([span is not None for span in self.run.computed or (None,) * self.run.steps])

    @property
    def _decided(self) -> Bool[Tensor, "step batch position"]:
        return self.run.unmasked & self.from_cache[:, None, None]

    @property
    def kl_decided(self) -> float:
        """Mean KL at the positions that steps with kept keys decided; NaN without any."""
        return float(self.kl[self._decided].mean())

    @property
    def decisions_changed(self) -> float:
        """The share of the positions decided with kept keys that are `flipped` or `outranked`; NaN without any.

        Of `flipped` alone where the sampler does not decide the most probable positions (see `outranked`).
        """
        return float((self.flipped | self.outranked)[self._decided].float().mean())

    @property
    def _counts(self) -> Float[Tensor, "kind step"]:
        """Per step: sinks of the exact network, those of them lost, and those moved."""
        used = self.from_cache[:, None, None, None, None]
        exact, cached = self.exact.is_sink & used, self.cached.is_sink & used
        gone, new = (exact & ~cached).sum(-1), (cached & ~exact).sum(-1)
        moved = torch.minimum(gone, new)
        return torch.stack([each.flatten(1).sum(-1).float() for each in (exact.sum(-1), gone - moved, moved)])

    @property
    def sinks_lost(self) -> float:
        """The share of the exact network's sinks that are none under the cache, without another in their place."""
        sinks, lost, _ = self._counts.sum(-1)
        return float(lost / sinks)

    @property
    def sinks_moved(self) -> float:
        """The share of the exact network's sinks in whose place the map has a sink elsewhere under the cache."""
        sinks, _, moved = self._counts.sum(-1)
        return float(moved / sinks)

    @property
    def stale_share(self) -> float:
        """Mean share of attention that comes to kept keys, over the steps that use them, layers and heads."""
        return float(self.stale[self.from_cache].nanmean())

    @property
    def stale_per_step(self) -> Float[Tensor, "step batch"]:
        """Mean share of attention that comes to kept keys, over layers and heads."""
        return self.stale.nanmean((-2, -1))

    @property
    def stale_keys(self) -> float:
        """The mean share of keys that are kept ones: `stale_share` under uniform attention."""
        return float(self.stale_keys_per_step[self.from_cache].nanmean())

    @property
    def stale_keys_per_step(self) -> Float[Tensor, "step batch"]:
        """The share of keys that are kept ones; NaN after the end of a row."""
        valid, inside = self.run.attention_mask, self.run.in_span
        kept = torch.zeros_like(self.run.unmasked) if inside is None else valid & ~inside
        return (kept.sum(-1) / valid.sum(-1)).masked_fill(~self.run.running, torch.nan)

    def table(self) -> pd.DataFrame:
        """One line per step and row.

        Columns: step, batch, block, from_cache, decided (positions), kl and kl_decided (means in nats), changed
        (decisions), sinks, lost, moved (counts over the row's maps), stale and stale_keys (shares).
        """
        steps, batch = self.run.unmasked.shape[:2]
        exact, cached = self.exact.is_sink, self.cached.is_sink
        gone, new = (exact & ~cached).sum(-1), (cached & ~exact).sum(-1)
        moved = torch.minimum(gone, new)
        unmasked = self.run.unmasked
        columns: dict[str, Any] = {
            "step": [step for step in range(steps) for _ in range(batch)],
            "batch": [*self.run.row_numbers] * steps,
            "block": [block for block in self.run.blocks for _ in range(batch)],
            "from_cache": self.from_cache.repeat_interleave(batch).tolist(),
            "decided": unmasked.sum(-1).flatten().tolist(),
            "kl": self.kl.nanmean(-1).flatten().tolist(),
            "kl_decided": self.kl.masked_fill(~unmasked, torch.nan).nanmean(-1).flatten().tolist(),
            "changed": ((self.flipped | self.outranked) & unmasked).sum(-1).flatten().tolist(),
        }
        counts = {"sinks": exact.sum(-1), "lost": gone - moved, "moved": moved}
        columns |= {name: count.flatten(2).sum(-1).flatten().tolist() for name, count in counts.items()}
        columns["stale"] = self.stale_per_step.flatten().tolist()
        columns["stale_keys"] = self.stale_keys_per_step.flatten().tolist()
        return pd.DataFrame(columns)


class _ExactLogits(RunObserver):
    """Compares the logits of every step of a cached run with those of the exact network on the same canvas."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.kl: list[Tensor] = []
        self.flipped: list[Tensor] = []
        self.likely: list[Tensor] = []

    def start(
        self,
        sampler: Sampler,
        content: Bool[Tensor, "batch position"],
        answer: Bool[Tensor, "batch position"] | None = None,
    ) -> None:
        """The run begins."""
        self.sampler, self.content = sampler, content

    def step(self, plan: StepPlan, canvas: Tensor, masked: Bool[Tensor, "batch position"]) -> Tensor:
        """A step begins."""
        if plan.index == 0:
            seen = torch.ones_like(self.content) if self.sampler.unpadded else self.content
            first = FirstCanvas(canvas, self.content, masked, plan.span[0])
            self.network = CanvasLogits(self.model, seen, **self.sampler.guidance(self.model, first))
        self.plan, self.masked = plan, masked
        return canvas

    def logits(self, step: int, canvas: Tensor, logits: Float[Tensor, "batch position d_vocab"]) -> None:
        """The logits of the step: NaN where it computes none."""
        where = torch.arange(canvas.shape[1], device=canvas.device)
        start, stop = self.plan.span
        here = self.masked & (where >= start) & (where < stop)
        ours = logits[here].double().log_softmax(-1)
        exact = ours
        if self.plan.computed is not None:
            exact = self.network.at(canvas, here).double().log_softmax(-1)
        shape = canvas.shape
        found = (exact.exp() * (exact - ours)).sum(-1).clamp(min=0).float().cpu()
        mask = torch.tensor([self.model.config.mask_token_id], device=canvas.device)
        best = [one.index_fill(-1, mask, -torch.inf).max(-1) for one in (exact, ours)]
        here = here.cpu()
        self.kl.append(torch.full(shape, torch.nan).masked_scatter(here, found))
        flips = (best[0].indices != best[1].indices).cpu()
        self.flipped.append(torch.zeros(shape, dtype=torch.bool).masked_scatter(here, flips))
        self.likely.append(torch.full(shape, -torch.inf).masked_scatter(here, best[0].values.float().cpu()))

    def outranked(self, run: DenoisingRun) -> Bool[Tensor, "step batch position"]:
        """Decided positions that are not among the (as many) most probable ones of the exact network."""
        if not _ranks_by_probability(run.settings):
            return torch.zeros_like(run.unmasked)
        order = torch.stack(self.likely).argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order))
        # A step that computes all is exact, also where equal probabilities are ranked in another order.
        used = torch.tensor([span is not None for span in run.computed or (None,) * run.steps])
        return run.unmasked & (rank >= run.counts[..., None]) & used[:, None, None]


def _ranks_by_probability(settings: Mapping[str, Any]) -> bool:
    """Whether a run with these settings decides the positions whose most likely token is most probable."""
    drawn = any(settings.get(name) for name in ("temperature", "alg_temp"))
    ends = any(settings.get(name) for name in ("logits_eos_inf", "confidence_eos_eot_inf"))
    filtered = settings.get("top_k") is not None or (settings.get("top_p") or 1) < 1
    # Fast-dLLM's code for Dream takes "entropy" in place of "maskgit_plus".
    rules = ["low_confidence", "confidence_threshold"] + ["maskgit_plus"] * (not settings.get("reference_quirks"))
    return settings.get("remasking") in rules and not (drawn or ends or filtered)


@overload
def compare(
    model: Any, prompts: Any, hooks: Sequence[HookLike], *, seed: int | list[int] | None = 0, **settings: Any
) -> Comparison: ...


@overload
def compare(
    model: Any,
    prompts: Any,
    *,
    cache: Cache,
    detector: Detector | str = DEFAULT,
    seed: int | list[int] | None = 0,
    **settings: Any,
) -> CacheComparison: ...


@exclusive
@checked_arguments()
def compare(
    model: Any,
    prompts: Any,
    hooks: Sequence[HookLike] | None = None,
    *,
    cache: Any = None,
    detector: Any = DEFAULT,
    seed: int | list[int] | None = 0,
    **settings: Any,
) -> Comparison | CacheComparison:
    """Denoise prompts twice from the same seed: without and with hooks, or without and with an approximate cache.

    Both runs draw the same random numbers, so that they are equal until the hooks or the cache change a token. With
    hooks an AR model decodes without a cache in both, and `cache` is a setting of both runs.

    With `cache` and no hooks the result says too what the cache changes on the canvases of its own run:
    predictions, decisions and sinks; and which share of attention comes to kept keys. This takes one more pass per
    step for the predictions and two for the sinks.

    Args:
        model: from `dlm_lens.load`.
        prompts: as for `dlm_lens.denoise`.
        hooks: interventions (`dlm_lens.hooks`).
        cache: "prefix" or "dual".
        detector: of the sinks that a cache changes.
        seed: one number, or one per row; None for a fresh one, the same for both.
        **settings: of `dlm_lens.denoise`: steps, gen_length, block_length, temperature, ...

    Returns:
        With hooks a `Comparison`: `plain` and `hooked`, each a `DenoisingRun`, and what differs between them. With
        `cache` and no hooks a `CacheComparison`: `pair`, a `Comparison`; `kl` (nats), `flipped`, `outranked` [step,
        batch, position]; the sinks `exact` and `cached`; `stale` [step, batch, layer, head].

    Raises:
        ValueError: neither hooks nor a cache, a detector beside hooks, observers among the settings, or what
            `denoise` refuses.
    """
    if hooks is not None:
        if detector is not DEFAULT:
            raise ValueError(
                "compare: detector is for the sinks that a cache changes, and hooks are given; leave it out, or "
                "call replay(model, run, hooks).new_sinks(detector)"
            )
        options = settings if cache is None else {**settings, "cache": cache}
        return compare_hooks(model, prompts, hooks, seed=seed, **options)
    if cache is None:
        raise ValueError("compare: nothing to compare; give hooks, or cache='prefix' or 'dual'")
    for name in ("observers", "on_logits"):
        if name in settings:
            raise ValueError(f"compare makes several runs, which one {name!r} cannot follow; call dlm_lens.denoise")
    detector = as_detector(detector)
    exact = _ExactLogits(model)
    run = denoise(model, prompts, seed=seed, cache=cache, observers=exact, on_logits=exact.logits, **settings)
    plain = denoise(model, prompts, seed=list(run.settings["seeds"]) if seed is None else seed, **settings)
    viewers = min([MIN_VIEWERS, *(stop - start for start, stop in run.spans)])
    received = ReceivedAttention("block", min_viewers=viewers)
    ours = rerun(model, run, [received, StaleAttention()])
    theirs = rerun(model, replace(run, computed=(), settings={**run.settings, "cache": None}), [received])
    exact_sinks, cached_sinks = (find_sinks(received_of(one, "block"), detector) for one in (theirs, ours))
    return CacheComparison(
        Comparison(plain, run, (f"cache={cache!r}",)),
        cache,
        torch.stack(exact.kl),
        torch.stack(exact.flipped),
        exact.outranked(run),
        exact_sinks,
        cached_sinks,
        ours.stale_attention,
    )
