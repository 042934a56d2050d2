"""Norms: of values and keys, of the residual stream, of what attention mixes and adds."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.recording.reducers.base import LayerStep


@dataclass(frozen=True)
class _HeadNorms:
    """Norms of keys or values in the forms asked for: one reducer per statistic."""

    heads: Literal["each", "mean", "both"] = "each"

    of: ClassVar[Literal["key", "value"]]

    def __post_init__(self) -> None:
        if self.heads not in ("each", "mean", "both"):
            raise ValueError(f"{type(self).__name__}(heads={self.heads!r}): it must be 'each', 'mean' or 'both'")

    @property
    def parts(self) -> "tuple[_HeadNorm, ...]":
        """One reducer per statistic."""
        wanted = {"each": (False,), "mean": (True,), "both": (False, True)}[self.heads]
        return tuple(_HeadNorm(self.of, mean) for mean in wanted)


@dataclass(frozen=True)
class ValueNorm(_HeadNorms):
    """L2 norm of every value, per key head, or its mean over query heads.

    ||v_j^m||_2 (2601.19657, Eq. 15) and r_j = 1/M sum_m ||v_j^m||_2 (Eq. 16), in the units of the values. With
    grouped queries the M query heads of Eq. 16 share their group's value.

    Args:
        heads: "each" for `value_norm` with an axis kv_head, "mean" for `value_norm_mean` without, "both".

    Raises:
        ValueError: another word.
    """

    of = "value"


@dataclass(frozen=True)
class KeyNorm(_HeadNorms):
    """L2 norm of every key, per key head, or its mean over query heads; rotation does not change it.

    ||k_j^m||_2, as Eq. 15 and 16 of 2601.19657 have it for values; sinks have short keys (2410.10781, section 4).

    Args:
        heads: "each" for `key_norm` with an axis kv_head, "mean" for `key_norm_mean` without, "both".

    Raises:
        ValueError: another word.
    """

    of = "key"


@dataclass(frozen=True)
class _HeadNorm:
    """The norm of keys or values."""

    of: Literal["key", "value"]
    mean: bool

    reads: ClassVar[tuple[str, ...]] = ()

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
        # Every group has as many query heads: their mean is the mean over groups.
        norms = tensor.norm(dim=-1, dtype=torch.float32)
        return layer.only_keys(norms.mean(1) if self.mean else norms)


@dataclass(frozen=True)
class ResidualNorm:
    """L2 norm of the residual stream that enters each layer, ||h_j||_2, at every position."""

    name = "residual_norm"
    dims = ("step", "batch", "layer", "key")
    unit = "norm of the residual stream"
    formula = "||h_j||_2 of the stream that enters the layer"
    reads = ("resid",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch key"]:
        """The norm, NaN at padding."""
        return layer.only_keys(_stream(layer).norm(dim=-1, dtype=torch.float32))


@dataclass(frozen=True)
class MassiveActivations:
    """Massive activations of the residual stream that enters each layer (2402.17762, section 2).

    `max_activation` is max_d |h_jd| at every position; `median_activation` the (lower) median of |h| over content
    positions and features, which a massive one exceeds about 1,000 times. Learned sink tokens have a max, but are
    not in the median.
    """

    @property
    def parts(self) -> "tuple[_MaxActivation, _MedianActivation]":
        """The largest one and the median."""
        return _MaxActivation(), _MedianActivation()


@dataclass(frozen=True)
class _MaxActivation:
    name = "max_activation"
    dims = ("step", "batch", "layer", "key")
    unit = "residual stream"
    formula = "max_d |h_jd| of the stream that enters the layer (2402.17762, section 2)"
    reads = ("resid",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch key"]:
        return layer.only_keys(_stream(layer).abs().amax(-1).float())


@dataclass(frozen=True)
class _MedianActivation:
    name = "median_activation"
    dims = ("step", "batch", "layer")
    unit = "residual stream"
    formula = "median of |h| over content positions and features (2402.17762, section 2)"
    reads = ("resid",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch"]:
        present = layer.facts.present
        size = _stream(layer)[:, : present.shape[1]].abs().float()
        # Without a boolean index, whose result has a size that a GPU would be waited for.
        median = size.masked_fill(~present[..., None], torch.nan).flatten(1).nanmedian(-1).values
        return median.masked_fill((size.isnan() & present[..., None]).flatten(1).any(-1), torch.nan)


@dataclass(frozen=True)
class UpdateNorm:
    """How large an update attention makes at every position of the canvas: three norms.

    `mixed_norm` ||o_i^m|| of what a head mixes (2601.19657, Eq. 20, whose bound is sum_j A_ij ||v_j||),
    `update_norm` ||z_i|| of what all heads together add (Eq. 21), `updated_norm` ||h_i + z_i|| of the stream behind
    attention (Eq. 22). With gated attention o_i is what is mixed, before the gate. Hooks have acted: o_i is what
    those at "z" left, z_i what those at "attn_out" left.
    """

    @property
    def parts(self) -> "tuple[_MixedNorm, _StreamNorm, _StreamNorm]":
        """The three."""
        return _MixedNorm(), _StreamNorm("update_norm"), _StreamNorm("updated_norm")


@dataclass(frozen=True)
class _MixedNorm:
    name = "mixed_norm"
    dims = ("step", "batch", "layer", "head", "query")
    unit = "norm of a value"
    formula = "||o_i^m||_2 (2601.19657, Eq. 20)"
    reads: ClassVar[tuple[str, ...]] = ()

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head query"]:
        if layer.inputs.z is None:
            raise ValueError("UpdateNorm needs what attention mixed (z), which this host does not show")
        return layer.only_queries(layer.inputs.z.norm(dim=-1, dtype=torch.float32).transpose(1, 2))


@dataclass(frozen=True)
class _StreamNorm:
    name: str

    dims = ("step", "batch", "layer", "query")
    unit = "norm of the residual stream"
    reads = ("resid",)

    @property
    def formula(self) -> str:
        if self.name == "update_norm":
            return "||z_i||_2 (2601.19657, Eq. 21)"
        return "||h_i + z_i||_2 (2601.19657, Eq. 22)"

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch query"]:
        if layer.attn_out is None:
            raise ValueError("UpdateNorm needs the output of attention, which this host does not show")
        added = layer.attn_out
        vector = added if self.name == "update_norm" else _stream(layer) + added
        positions = layer.facts.present.shape[1]
        return layer.only_queries(vector[:, :positions].norm(dim=-1, dtype=torch.float32))


def _stream(layer: LayerStep) -> Float[Tensor, "batch key d_model"]:
    if layer.resid is None:
        raise ValueError("this reducer reads the residual stream, which this host does not show")
    return layer.resid
