"""Norms of queries, keys and values, of the residual stream and its updates; massive activations."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.recording.reducer_registry import ReducerEntry
from dlm_lens.recording.reducers.base import LayerStep, Reducer, ReducerGroup

HEADS = ("each", "mean", "both")

ENTRIES = (
    ReducerEntry(name="value-norm", kind="ValueNorm", setting="heads", values=("each", "mean", "both")),
    ReducerEntry(name="key-norm", kind="KeyNorm", setting="heads", values=("each", "mean", "both")),
    ReducerEntry(name="query-norm", kind="QueryNorm"),
    ReducerEntry(name="residual-norm", kind="ResidualNorm"),
    ReducerEntry(name="massive", kind="MassiveActivations"),
    ReducerEntry(name="channels", kind="ChannelActivations"),
    ReducerEntry(name="update-norm", kind="UpdateNorm"),
)


def norm32(vectors: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes"]:
    """L2 norm over the last axis in float32, from whatever precision; torch itself does not narrow float64."""
    return torch.linalg.vector_norm(
        vectors, dim=-1, dtype=torch.promote_types(vectors.dtype, torch.float32)
    ).float()


@dataclass(frozen=True)
class _HeadNorms(ReducerGroup):
    """Norms of keys or values, per key head, averaged over query heads, or both."""

    heads: Literal["each", "mean", "both"] = "each"

    of: ClassVar[Literal["key", "value"]]

    def __post_init__(self) -> None:
        if self.heads not in HEADS:
            raise ValueError(f"{type(self).__name__}(heads={self.heads!r}): it must be 'each', 'mean' or 'both'")

    @property
    def parts(self) -> "tuple[_HeadNorm, ...]":
        """The norm per key head, its mean, or both."""
        means = {"each": (False,), "mean": (True,), "both": (False, True)}[self.heads]
        return tuple(_HeadNorm(self.of, mean) for mean in means)


@dataclass(frozen=True)
class ValueNorm(_HeadNorms):
    """L2 norm of every value, per key head, or its mean over query heads.

    ||v_j^m||_2 (2601.19657, Eq. 15) and r_j = 1/M sum_m ||v_j^m||_2 (Eq. 16), in the units of the values. With
    grouped queries the M query heads of Eq. 16 share their group's value.

    Args:
        heads: "each" for `value_norm` with an axis kv_head, "mean" for `value_norm_mean` without, "both".

    Raises:
        ValueError: another value of `heads`.
    """

    of = "value"


@dataclass(frozen=True)
class KeyNorm(_HeadNorms):
    """L2 norm of every key, per key head, or its mean over query heads; rotation does not change it.

    ||k_j^m||_2, as Eq. 15 and 16 of 2601.19657 have it for values; sinks have short keys (2410.10781, section 4).

    Args:
        heads: "each" for `key_norm` with an axis kv_head, "mean" for `key_norm_mean` without, "both".

    Raises:
        ValueError: another value of `heads`.
    """

    of = "key"


@dataclass(frozen=True)
class _HeadNorm(Reducer):
    """The norm of keys or values."""

    of: Literal["key", "value"]
    mean: bool

    @property
    def name(self) -> str:
        return f"{self.of}_norm_mean" if self.mean else f"{self.of}_norm"

    @property
    def dims(self) -> tuple[str, ...]:
        return ("step", "batch", "layer", *(() if self.mean else ("kv_head",)), "key")

    @property
    def unit(self) -> str:
        return f"norm of a {self.of}"

    @property
    def formula(self) -> str:
        letter = self.of[0]
        if self.mean:
            return f"1/M sum_m ||{letter}_j^m||_2 over query heads (2601.19657, Eq. 16)"
        return f"||{letter}_j||_2 (2601.19657, Eq. 15)"

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch kv_head key"] | Float[Tensor, "batch key"]:
        tensor = layer.inputs.v if self.of == "value" else layer.inputs.k
        # Position by position, as projections lie in memory: half the time.
        norms = layer.once(f"{self.of}_norm", lambda: norm32(tensor.transpose(1, 2)).transpose(1, 2))
        # Every group has as many query heads: their mean is the mean over groups.
        return layer.only_keys(norms.mean(1) if self.mean else norms)


@dataclass(frozen=True)
class QueryNorm(Reducer):
    """L2 norm of every query, ||q_i||_2, per query head; rotation does not change it. NaN at padding."""

    name = "query_norm"
    dims = ("step", "batch", "layer", "head", "query")
    unit = "norm of a query"
    formula = "||q_i||_2"

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head query"]:
        """The norm, NaN at padding."""
        return layer.only_queries(norm32(layer.inputs.q))


@dataclass(frozen=True)
class ResidualNorm(Reducer):
    """L2 norm of the residual stream that enters each layer, ||h_j||_2, at every position."""

    name = "residual_norm"
    dims = ("step", "batch", "layer", "key")
    unit = "norm of the residual stream"
    formula = "||h_j||_2 of the stream that enters the layer"
    reads = ("resid_in",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch key"]:
        """The norm, NaN at padding."""
        return layer.only_keys(norm32(_stream(layer)))


@dataclass(frozen=True)
class MassiveActivations(ReducerGroup):
    """Massive activations of the residual stream that enters each layer (2402.17762, section 2).

    `max_activation` is max_d |h_jd| at every position. `median_activation` is the (lower) median of |h| over
    content positions and features; a massive activation is about 1,000 times larger. Learned sink tokens have a
    maximum but are not in the median.
    """

    @property
    def parts(self) -> "tuple[_MaxActivation, _MedianActivation]":
        """The maximum and the median."""
        return _MaxActivation(), _MedianActivation()


@dataclass(frozen=True)
class _MaxActivation(Reducer):
    name = "max_activation"
    dims = ("step", "batch", "layer", "key")
    unit = "residual stream"
    formula = "max_d |h_jd| of the stream that enters the layer (2402.17762, section 2)"
    reads = ("resid_in",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch key"]:
        stream = _stream(layer)
        # Two passes over the stream, without a copy of its magnitudes.
        return layer.only_keys(torch.maximum(stream.amax(-1), -stream.amin(-1)).float())


@dataclass(frozen=True)
class _MedianActivation(Reducer):
    name = "median_activation"
    dims = ("step", "batch", "layer")
    unit = "residual stream"
    formula = "median of |h| over content positions and features (2402.17762, section 2)"
    reads = ("resid_in",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch"]:
        """Over the present positions and all features; NaN where a row has none, or one of them is NaN."""
        present = layer.facts.attending
        stream = _stream(layer)[:, : present.shape[1]]
        if stream.device.type == "cpu":
            # Without padding nothing is taken out: a boolean index copies, a quarter of the median's time.
            rows = zip(stream, present, strict=True)
            return torch.stack([_median(row if bool(seen.all()) else row[seen]) for row, seen in rows])
        size = stream.abs().float()
        # Not a boolean index: the CPU would wait for the GPU to learn the size of its result.
        median = size.masked_fill(~present[..., None], torch.nan).flatten(1).nanmedian(-1).values
        return median.masked_fill((size.isnan() & present[..., None]).flatten(1).any(-1), torch.nan)


def _median(stream: Float[Tensor, "position d_model"]) -> Float[Tensor, ""]:
    """The lower median of the magnitudes, NaN if one of them is; NumPy selects faster (`benchmarks/README.md`)."""
    size = stream.abs().float().flatten().numpy()
    if not size.size or np.isnan(size.max()):
        return torch.tensor(torch.nan)
    return torch.tensor(_selected(size, (size.size - 1) // 2))


SAMPLE = 31
"""Of so many numbers one is in the sample that narrows down a selection; a prime, to meet every channel."""
LEAST_NARROWED = 1 << 14
"""Fewer numbers than this are selected from as they are."""


def _selected(values: Float[np.ndarray, "value"], k: int) -> np.float32:
    """The value that has k others before it in rising order; none is NaN. `values` may be reordered.

    Two order statistics of a sample, four standard deviations of its rank to either side, hold the value between
    them in nearly all cases (Floyd and Rivest 1975), and only what lies between is partitioned. Where they do not
    hold it, everything is.
    """
    if values.size < LEAST_NARROWED:
        values.partition(k)
        return values[k]
    sample = values[::SAMPLE].copy()
    middle, reach = k * sample.size // values.size, int(2 * sample.size**0.5) + 1
    ends = max(0, middle - reach), min(sample.size - 1, middle + reach)
    sample.partition(ends)
    least, greatest = sample[list(ends)]
    below = values < least
    between = values.take(np.flatnonzero((values <= greatest) ^ below))
    rank = k - int(np.count_nonzero(below))
    if not 0 <= rank < between.size:
        between, rank = values, k
    between.partition(rank)
    return between[rank]


@dataclass(frozen=True)
class ChannelActivations(ReducerGroup):
    """Activations of every channel of the residual stream that enters each layer, over content positions.

    `channel_max` is max_j |h_jc| of channel c (massive activations, 2402.17762, section 2, per channel), and
    `channel_mean` is 1/n sum_j |h_jc|, the magnitude by which 2605.06366 ranks channels. Learned sink tokens are in
    neither. Memory: two numbers per step, row, layer and channel, whatever the length; nothing per position.
    """

    @property
    def parts(self) -> "tuple[_ChannelActivation, _ChannelActivation]":
        """The maximum and the mean."""
        return _ChannelActivation("max"), _ChannelActivation("mean")


@dataclass(frozen=True)
class _ChannelActivation(Reducer):
    over: Literal["max", "mean"]

    dims = ("step", "batch", "layer", "channel")
    unit = "residual stream"
    reads = ("resid_in",)

    @property
    def name(self) -> str:
        return f"channel_{self.over}"

    @property
    def formula(self) -> str:
        return "max_j |h_jc|" if self.over == "max" else "1/n sum_j |h_jc| (2605.06366)"

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch channel"]:
        """Over the present positions, per channel; NaN where a row has none."""
        present = layer.facts.attending
        size = _stream(layer)[:, : present.shape[1]].abs().float()
        size = size.masked_fill(~present[..., None], 0.0)  # where a cache computes nothing there is NaN
        count = present.sum(-1, keepdim=True)
        found = size.amax(1) if self.over == "max" else size.sum(1) / count
        return found.masked_fill(count == 0, torch.nan)


@dataclass(frozen=True)
class UpdateNorm(ReducerGroup):
    """The norm of the update that attention makes at every canvas position: three statistics.

    `mixed_norm` is ||o_i^m||, o_i^m = sum_j A_ij^m v_j (2601.19657, Eq. 17), at most sum_j A_ij ||v_j|| (Eq. 20).
    `update_norm` is ||z_i||, the update of all heads together (Eq. 21). `updated_norm` is ||h_i + z_i||, the
    residual stream after attention (Eq. 22). With gated attention o_i is taken before the gate. Hooks at "z" and
    "attn_out" are applied first.
    """

    @property
    def parts(self) -> "tuple[_MixedNorm, _StreamNorm, _StreamNorm]":
        """The norms of the mixed values, of the update, and of the stream after it."""
        return _MixedNorm(), _StreamNorm("update_norm"), _StreamNorm("updated_norm")


@dataclass(frozen=True)
class _MixedNorm(Reducer):
    name = "mixed_norm"
    dims = ("step", "batch", "layer", "head", "query")
    unit = "norm of a value"
    formula = "||o_i^m||_2 (2601.19657, Eq. 20)"

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head query"]:
        if layer.inputs.z is None:
            raise ValueError("UpdateNorm needs the attention output per head (z), which this recorder lacks")
        return layer.only_queries(norm32(layer.inputs.z).transpose(1, 2))


@dataclass(frozen=True)
class _StreamNorm(Reducer):
    kind: Literal["update_norm", "updated_norm"]

    dims = ("step", "batch", "layer", "query")
    unit = "norm of the residual stream"
    reads = ("attn_out",)

    @property
    def name(self) -> str:
        return self.kind

    @property
    def formula(self) -> str:
        if self.kind == "update_norm":
            return "||z_i||_2 (2601.19657, Eq. 21)"
        return "||h_i + z_i||_2 (2601.19657, Eq. 22)"

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch query"]:
        """The norm, NaN at padding."""
        if layer.attn_out is None:
            raise ValueError("UpdateNorm needs the output of attention, which this recorder lacks")
        added = layer.attn_out
        vector = added if self.kind == "update_norm" else _stream(layer) + added
        positions = layer.facts.present.shape[1]
        return layer.only_queries(norm32(vector[:, :positions]))


def _stream(layer: LayerStep) -> Float[Tensor, "batch key d_model"]:
    if layer.resid is None:
        raise ValueError("this reducer reads the residual stream, which this recorder lacks")
    return layer.resid
