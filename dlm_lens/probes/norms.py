"""`value_norms`: the norms of sinks' values against those of matched other tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import LARGEST_COUNT, ONE_SEED, checked_arguments, whole
from dlm_lens.display import ShowsItself
from dlm_lens.printable import shown
from dlm_lens.recording import Recording
from dlm_lens.recording.recording import as_recording
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import Sinks
from dlm_lens.sinks.detection import SinksLike, as_sinks
from dlm_lens.statistics import (
    POSITIVE_BOUNDS,
    SHARE_BOUNDS,
    Bounds,
    Estimate,
    Floats,
    difference_of,
    estimate,
    mean_of,
    ratio_of,
    summed,
)

ValueMatch = Literal["any", "masked", "open"]

TIE = 1e-5
"""Norms that differ by less than this, relatively, count as equal: equal tokens have equal values in the first
layer, up to a rounding that depends on their row in the batch."""


def shorter(one: Float[Tensor, "*places"], two: Float[Tensor, "*places"]) -> Float[Tensor, "*places"]:
    """1 where the first norm is the shorter one, 0.5 at a tie, 0 where it is longer or undefined."""
    apart = one - two
    tie = apart.abs() <= TIE * two.abs()
    return torch.where(tie, 0.5, (apart < 0).double())


@dataclass(frozen=True, eq=False)
class ValueNorms(ShowsItself):
    """Norms of the values of sinks, each paired with another token of the same prompt, step, layer and head.

    Args:
        sink: norm of the value of each sampled sink.
        other: norm of the value of the token that it is paired with.
        percentile: share of the other tokens of the same pattern whose value is shorter, ties by half: 0 for the
            shortest of all.
        prompt: the number of each pair's prompt (`DenoisingRun.row_prompts`); the bootstrap resamples prompts.
        layer: index in the model.
        rule: rule, scale and level of the sinks.
        formula: formula of the norm.
        match: what the paired token has in common with the sink besides its pattern: "any", nothing; "masked", it
            is masked if and only if the sink is.
        found: how many sinks there were to sample from.
        unmatched: how many sampled sinks had no token to be paired with; they are left out.
        profile: one line per layer, over all sinks and all others, without a sample: how many `sinks`, mean norms
            (`norm_sink`, `norm_other`), and the `share` of attention that the sinks get; each with `_low`, `_high`.
        seed: of the sample and of the intervals.

    Raises:
        ValueError: the arrays have unequal lengths.
    """

    sink: Float[Tensor, "pair"]
    other: Float[Tensor, "pair"]
    percentile: Float[Tensor, "pair"]
    prompt: Int[Tensor, "pair"]
    layer: Int[Tensor, "pair"]
    rule: str
    formula: str
    match: ValueMatch
    found: int
    unmatched: int
    profile: pd.DataFrame
    seed: int = 0

    def __post_init__(self) -> None:
        check_shapes(self)

    def __repr__(self) -> str:
        return (
            f"ValueNorms({len(self.sink)} pairs of {self.found} sinks by {self.rule}; sinks {self.mean_sink}, "
            f"others {self.mean_other}, ratio {self.ratio})"
        )

    @property
    def mean_sink(self) -> Estimate:
        """Mean norm of the sinks' values."""
        return self._estimate(mean_of, self.sink, None, bounds=POSITIVE_BOUNDS)

    @property
    def mean_other(self) -> Estimate:
        """Mean norm of the others' values."""
        return self._estimate(mean_of, self.other, None, bounds=POSITIVE_BOUNDS)

    @property
    def ratio(self) -> Estimate:
        """Mean of the sinks over mean of the others; below 1 where sinks have short values."""
        return self._estimate(ratio_of, self.sink, None, self.other, None, bounds=POSITIVE_BOUNDS)

    @property
    def difference(self) -> Estimate:
        """Mean of the sinks minus mean of the others."""
        return self._estimate(difference_of, self.sink, None, self.other, None)

    @property
    def effect_size(self) -> Estimate:
        """Cohen's d: the difference of the means over the root of the mean variance; NaN of equal norms."""

        def cohen(sums: Floats) -> Floats:
            """Cohen's d, of sums of counts, norms and their squares."""
            count, one, two, one_squared, two_squared = np.moveaxis(sums, -1, 0)
            means = one / count, two / count
            squares = (one_squared + two_squared) / count
            variance = squares - means[0] ** 2 - means[1] ** 2
            # One pair has no variance, and of equal norms only rounding is left.
            variance = np.where(variance > TIE**2 * squares, variance, np.nan)
            found: Floats = (means[0] - means[1]) / np.sqrt(variance / 2)
            return found

        sink, other = self.sink.double(), self.other.double()
        return self._estimate(cohen, None, sink, other, sink**2, other**2)

    @property
    def shorter(self) -> Estimate:
        """Share of the pairs in which the sink's value is the shorter one, ties by half; 0.5 by chance."""
        below = shorter(self.sink, self.other)
        return self._estimate(mean_of, below, None, bounds=SHARE_BOUNDS)

    @property
    def mean_percentile(self) -> Estimate:
        """Mean percentile rank of a sink among the others of its pattern; 0 the shortest, 0.5 by chance."""
        return self._estimate(mean_of, self.percentile, None, bounds=SHARE_BOUNDS)

    @cached_property
    def _measures(self) -> dict[str, Estimate]:
        names = ("mean_sink", "mean_other", "ratio", "difference", "effect_size", "shorter", "mean_percentile")
        return {name: getattr(self, name) for name in names}

    def table(self) -> pd.DataFrame:
        """One line per measure: value, 95% interval, prompts."""
        return pd.DataFrame(
            [
                {"measure": name, "value": e.value, "low": e.low, "high": e.high, "prompts": e.prompts}
                for name, e in self._measures.items()
            ]
        )

    def distribution(self, bins: int = 40) -> pd.DataFrame:
        """How many of the sinks and of the others have which norm (2601.19657, Figure 1): low, high, sinks, others.

        Raises:
            ValueError: fewer than one bin, or no whole number.
        """
        whole(least=1, most=LARGEST_COUNT).check("distribution: bins", bins)
        top = float(torch.cat([self.sink, self.other]).max()) if len(self.sink) else 1.0
        edges = np.linspace(0, top * (1 + 1e-6), bins + 1)
        counts = {
            name: np.histogram(values, edges)[0] for name, values in (("sinks", self.sink), ("others", self.other))
        }
        return pd.DataFrame({"low": edges[:-1], "high": edges[1:], **counts})

    def _estimate(self, statistic: object, *summands: Tensor | None, bounds: Bounds | None = None) -> Estimate:
        ones = torch.ones(len(self.sink), dtype=torch.float64)
        columns = [ones if values is None else values.double() for values in summands]
        prompts = int(self.prompt.max()) + 1 if len(self.prompt) else 0
        sums = summed(torch.stack(columns, -1), self.prompt, prompts)
        return estimate(sums, statistic, bounds=bounds, seed=self.seed)  # type: ignore[arg-type]


SAMPLES = 10_000

ENTRIES_AT_ONCE = 2**22
"""Entries of [pair, key] at a time."""


@checked_arguments(seed=ONE_SEED)
def value_norms(
    recording: Recording,
    sinks: SinksLike,
    *,
    samples: int = SAMPLES,
    match: ValueMatch = "any",
    seed: int = 0,
) -> ValueNorms:
    """Norms of the values of sinks, against matched other tokens (2601.19657, Figures 1 and 3).

    The norm of a sink at the head level is that of its value in the head, ||v_j^m||_2 (Eq. 15); at the layer level
    r_j = 1/M sum_m ||v_j^m||_2 (Eq. 16). Up to `samples` sinks are drawn without replacement; each is paired
    with one random token of the same prompt, step, layer and head: a canvas position that is no sink there.
    Intervals resample prompts, since the steps and heads of one prompt are not independent.

    Args:
        recording: with ValueNorm, and for shares of attention with ReceivedAttention.
        sinks: as `find_sinks` found them in this recording, or a detector, which then finds them in each head;
            "learned" for the model's learned sink tokens.
        samples: pairs at most; the paper has 10,000.
        match: "masked" (or "open") to pair masked sinks with masked tokens and decoded ones with decoded ones.
        seed: of the sample.

    Raises:
        ValueError: norms that were not recorded, sinks of another recording or of the model's mean pattern, no sink
            at all.
    """
    recording = as_recording(recording)
    given = None if isinstance(sinks, str) and sinks == "learned" else as_sinks(sinks, recording)
    match = "masked" if match == "open" else match
    if samples < 1 or match not in ("any", "masked"):
        raise ValueError(
            f"value_norms(samples={samples}, match={shown(match)}): samples is at least 1, match 'any' or 'masked'"
        )
    norms, found, undefined = _given(recording, given)
    where = found.nonzero()
    if not len(where):
        raise ValueError(f"there is no sink by {_rule(given)}; lower the threshold")
    generator = torch.Generator().manual_seed(seed)
    drawn = where[torch.randperm(len(where), generator=generator)[:samples]]
    rows = max(1, ENTRIES_AT_ONCE // found.shape[-1])
    parts = [_pairs(norms, found, undefined, recording, part, match, generator) for part in drawn.split(rows)]
    sink, other, percentile = (torch.cat(values) for values in zip(*parts, strict=True))
    kept = other.isfinite()
    layers = torch.tensor(recording.layers)
    return ValueNorms(
        sink=sink[kept],
        other=other[kept],
        percentile=percentile[kept],
        prompt=recording.run.row_prompts[drawn[kept, 1]],
        layer=layers[drawn[kept, 2]],
        rule=_rule(given),
        formula="||v_j^m||_2 (2601.19657, Eq. 15)" if found.ndim == 5 else "1/M sum_m ||v_j^m||_2 (Eq. 16)",
        match=match,
        found=len(where),
        unmatched=int((~kept).sum()),
        profile=_profile(recording, norms, found, undefined, seed),
        seed=seed,
    )


class _Norms:
    """Norms by pattern, without a copy for every query head of a group."""

    def __init__(self, values: Tensor, heads: tuple[int, ...] | None, query_heads: int) -> None:
        self.values = values
        groups = 1 if heads is None else query_heads // values.shape[3]
        self.head = None if heads is None else torch.tensor(heads) // groups

    def at(self, places: Int[Tensor, "place axis"]) -> Float[Tensor, "place key"]:
        """The norms of all keys of the patterns with these indices (step, batch, layer, head)."""
        step, row, layer = places[:, :3].unbind(-1)
        if self.head is None:
            return self.values[step, row, layer]
        return self.values[step, row, layer, self.head[places[:, 3]]]

    def of_layer(self, layer: int) -> Float[Tensor, "step batch *head key"]:
        """All of one layer."""
        found = self.values[:, :, layer]
        return found if self.head is None else found[:, :, self.head]


def _given(
    recording: Recording, sinks: Sinks | None
) -> tuple[_Norms, Bool[Tensor, "step batch layer *head key"], Bool[Tensor, "step batch layer *head key"]]:
    """Norms, which keys are sinks (None: the learned ones), and which are undefined."""
    per_head = sinks is None or (sinks.level == "head" and "head" in sinks.dims)
    heads = recording.heads or tuple(range(recording.query_heads))
    norms = _norms(recording, heads if per_head else None)
    shape = (len(recording.steps), len(recording.rows), len(recording.layers))
    shape = (*shape, *((len(heads),) if per_head else ()), recording.sizes["key"])
    if sinks is not None:
        if sinks.level == "model":
            raise ValueError(
                "the sinks are of the model's mean pattern, and a norm is of a head or a layer; find them at level "
                "'head' or 'layer'"
            )
        if tuple(sinks.is_sink.shape) != shape or sinks.layers != recording.layers:
            raise ValueError(
                f"the sinks have shape {list(sinks.is_sink.shape)} {sinks.dims} and layers {sinks.layers}, the "
                f"recording needs {list(shape)} and {recording.layers}; find them in this recording"
            )
        return norms, sinks.is_sink, sinks.scores.isnan()
    if not recording.sinks:
        raise ValueError(f"{recording.model} has no learned sink tokens; give the Sinks of find_sinks")
    learned = torch.arange(shape[-1]) >= shape[-1] - recording.sinks
    over = ~recording.run.running[..., None, None, None]
    return norms, learned & ~over.expand(shape), over.expand(shape)


def _norms(recording: Recording, heads: tuple[int, ...] | None) -> _Norms:
    if "value_norm" not in recording.specs and (heads is not None or "value_norm_mean" not in recording.specs):
        wanted = "ValueNorm()" if heads is not None else "ValueNorm() or ValueNorm('mean')"
        raise ValueError(f"this recording has no norms of values; record with {wanted}")
    if heads is not None:
        return _Norms(recording.value_norm, heads, recording.query_heads)
    if "value_norm_mean" in recording.specs:
        return _Norms(recording.value_norm_mean, None, recording.query_heads)
    # All key heads have equally many query heads, so that the mean over key heads is the mean over heads.
    return _Norms(recording.value_norm.mean(3), None, recording.query_heads)


def _pairs(
    norms: _Norms,
    found: Bool[Tensor, "step batch layer *head key"],
    undefined: Bool[Tensor, "step batch layer *head key"],
    recording: Recording,
    drawn: Int[Tensor, "pair axis"],
    match: ValueMatch,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "pair"], Float[Tensor, "pair"], Float[Tensor, "pair"]]:
    """Norms of the sinks, of one other each (NaN where there is none), and percentile ranks of the sinks."""
    place, key = drawn[:, :-1], drawn[:, -1:]
    values = norms.at(place)
    cell = tuple(place.unbind(-1))
    others = ~found[cell] & ~undefined[cell] & values.isfinite()
    others[:, recording.run.tokens.shape[1] :] = False  # learned sink tokens are no tokens to compare with
    if match == "masked":
        masked = recording.masked[place[:, 0], place[:, 1]]
        others &= masked == masked.gather(-1, key)
    sink = values.gather(-1, key)[:, 0]
    below = (shorter(values, sink[:, None]) * others).sum(-1)
    chance = torch.rand(values.shape, generator=generator, dtype=torch.float32).masked_fill(~others, -1)
    other = values.gather(-1, chance.argmax(-1, keepdim=True))[:, 0]
    other = other.masked_fill(~others.any(-1), torch.nan)
    return sink, other, below / others.sum(-1).clamp(min=1)


def _profile(recording: Recording, norms: _Norms, found: Tensor, undefined: Tensor, seed: int) -> pd.DataFrame:
    """Per layer, over all sinks and all others: mean norms, and the share of attention that the sinks get."""
    canvas = recording.run.tokens.shape[1]
    received, prompt = "received" in recording.specs, recording.run.row_prompts
    lines = []
    for place, layer in enumerate(recording.layers):
        values, here = norms.of_layer(place), found[:, :, place]
        usable = values.isfinite() & ~undefined[:, :, place]
        other = usable & ~here
        other[..., canvas:] = False
        line: dict[str, float | int] = {"layer": layer, "sinks": int((here & usable).sum())}
        for name, kept in (("sink", here & usable), ("other", other)):
            pairs = torch.stack([_per_row(values.nan_to_num(), kept), _per_row(kept, kept)], -1)
            e = estimate(
                summed(pairs, prompt, len(prompt)),
                mean_of,
                bounds=POSITIVE_BOUNDS,
                seed=seed,
            )
            line |= e.columns(f"norm_{name}")
        if received:
            scores = recording.arrays["received"][:, :, place].float()
            sums = (scores * recording.expected(layer=layer)[:, :, None]).nan_to_num()
            sums = sums.mean(2) if here.ndim == 3 else sums
            # As `Received.shares`: the sums leave out keys without a score, as the last ones of an AR model.
            given = recording.counted().double().sum(0) * (1 if here.ndim == 3 else here.shape[2])
            pairs = torch.stack([_per_row(sums, here), given], -1)
            e = estimate(summed(pairs, prompt, len(prompt)), mean_of, bounds=SHARE_BOUNDS, seed=seed)
            line |= e.columns("share")
        lines.append(line)
    return pd.DataFrame(lines)


def _per_row(values: Tensor, kept: Tensor) -> Float[Tensor, "batch"]:
    """Sum over all axes but that of the rows, axis 1."""
    return (values.double() * kept).transpose(0, 1).flatten(1).sum(-1)


def _rule(sinks: Sinks | None) -> str:
    return "learned sink tokens" if sinks is None else sinks.rule
