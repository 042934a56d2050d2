"""`Received`: the attention that every key receives at every step, with what is needed to change its scale."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import SLICE, checked_arguments, instance, level_of_caller, whole
from dlm_lens.attention import padding_before
from dlm_lens.display import ShowsItself
from dlm_lens.printable import shown
from dlm_lens.shapes import taken
from dlm_lens.sinks.detectors.base import AttentionQuantity, Quantity
from dlm_lens.sinks.key_axes import AXES, KeyAxes, axis_sizes

Scale = Literal[
    "relative to uniform", "column sum", "share of attention", "mean attention", "max activation", "key norm"
]
"""The unit of a score.

r_j / e_j (1 = as under even attention), r_j (in queries), r_j / n of n counted queries (0 to 1), r_j / n_j of n_j
viewers (0 to 1), max_d |h_jd| of the residual stream, ||k_j|| of a key.
"""

Level = Literal["head", "layer", "model"]
"""Whose pattern a score describes: one head's, the head-mean of a layer, the mean over layers and heads."""

RELATIVE: Scale = "relative to uniform"
COLUMN_SUM: Scale = "column sum"
SHARE: Scale = "share of attention"
MEAN: Scale = "mean attention"

MERGED: dict[Level, tuple[str, ...]] = {"head": (), "layer": ("head",), "model": ("layer", "head")}
"""The axes over which a level averages the pattern."""


def in_model(
    at: Mapping[str, Any], layers: Sequence[int], heads: Sequence[int], rows: Sequence[int] = ()
) -> dict[str, Any]:
    """Places on the axes "layer" and "head" as the model's indices, on "batch" as the whole run's numbers.

    Other axes stay as they are.

    Args:
        at: axis -> places on it, an array or one number.
        layers: the model's index of each layer; empty for the places themselves.
        heads: likewise.
        rows: the whole run's number of each row; likewise.
    """
    numbers = {"layer": layers, "head": heads, "batch": rows}
    return {name: np.asarray(numbers[name])[index] if numbers.get(name) else index for name, index in at.items()}


@dataclass(frozen=True, eq=False)
class Received(ShowsItself, KeyAxes):
    """Received attention r_j = sum_i A_ij of every key, at every step, in every layer and head.

    The A-bar of 2510.15731, section 4.1, is r_j divided by the number of queries; docs/sinks.md explains the
    scales. Further arguments, by name, are those of `KeyAxes`.

    Args:
        values: the scores on `scale`; NaN where a key is undefined (padding, not decoded yet in an AR baseline,
            or seen by fewer than `min_viewers` counted queries).
        expected: e_j = sum_i M_ij / sum_k M_ik, the value under even attention; values times e_j are column sums
            if `scale` is "relative to uniform".
        counted: how many queries count; the sum of all column sums where the rows of the pattern sum to 1.
        valid: content (True) or padding (False); None if there is no padding.
        scale: "relative to uniform" or "column sum".
        level: whose pattern the scores describe, see `at_level`.
        queries: the class of counted queries, as text.
        min_viewers: fewest counted queries that must see a key for it to have a score.
        viewers: n_j, how many counted queries see each key; None if unknown. Only needed for the mean attention,
            and only if not every counted query sees every key.

    Raises:
        ValueError: the shapes contradict each other.
    """

    IDENTITY_ORDER = (
        "values expected counted tokens masked valid final_tokens scale level layers steps heads queries "
        "min_viewers dims sinks tokenizer viewers"
    )

    values: Float[Tensor, "step batch layer head key"]
    expected: Float[Tensor, "step batch #layer #head key"]
    counted: Int[Tensor, "step batch"]
    _: KW_ONLY
    valid: Bool[Tensor, "batch key"] | None = None
    scale: Scale = RELATIVE
    level: Level = "head"
    queries: str = "all"
    min_viewers: int = 1
    viewers: Float[Tensor, "step batch #layer #head key"] | None = None

    def __post_init__(self) -> None:
        if self.scale not in (RELATIVE, COLUMN_SUM):
            raise ValueError(f"Received.scale is {self.scale!r}; it must be {RELATIVE!r} or {COLUMN_SUM!r}")
        super().__post_init__()
        for name, size in zip(AXES, self.values.shape, strict=True):
            if name not in self.dims and (size > 1 or name == "key"):
                raise ValueError(f"the {name} axis has size {size}, but dims {self.dims} do not name it")

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"Received({sizes}; scale: {self.scale}; level: {self.level}; queries: {self.queries})"

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every axis in `dims`."""
        return axis_sizes(self.values.shape, self.dims)

    @property
    def padding(self) -> Int[Tensor, "batch"] | None:
        """How many keys of each row are padding before its first token; None if there is no padding."""
        return None if self.valid is None else padding_before(self.valid)

    @property
    def column_sums(self) -> Float[Tensor, "step batch layer head key"]:
        """r_j in queries: the paper's A-bar_j times the number of counted queries."""
        return _wide(self.values) * _wide(self.expected) if self.scale == RELATIVE else _wide(self.values)

    @property
    def shares(self) -> Float[Tensor, "step batch layer head key"]:
        """r_j / n, the share of the attention of n counted queries that goes to key j.

        Over the keys they sum to 1, or to less where rows of the pattern do (off-by-one softmax, sink logits, hooks
        after the softmax).
        """
        return self.column_sums / self.counted[..., None, None, None].clamp(min=1)

    @property
    def mean_attention(self) -> Float[Tensor, "step batch layer head key"]:
        """r_j / n_j, the mean attention to key j of the queries that see it (2410.10781, section 3.1).

        Raises:
            ValueError: the queries see different keys, and `viewers` are unknown.
        """
        viewers = self._viewers()
        if viewers is None:
            raise ValueError("the mean attention of a key needs Received.viewers, how many queries see it")
        return self.column_sums / viewers.clamp(min=1)

    def _viewers(self) -> Float[Tensor, "step batch #layer #head key"] | None:
        """How many counted queries see each key; None if unknown."""
        if self.viewers is not None:
            return self.viewers
        # Keys that every query sees have one common e_j; under a causal mask e_j differs from key to key.
        scored = ~self.values.isnan().all((2, 3), keepdim=True)
        most = self.expected.masked_fill(~scored, -torch.inf).amax(-1, keepdim=True)
        if bool(((self.expected < most * (1 - 1e-4)) & scored).any()):
            return None
        return self.counted[..., None, None, None].expand(self.expected.shape).to(self.expected.dtype)

    def has(self, quantity: Quantity) -> bool:
        """Whether `read` has the scores of this quantity."""
        if quantity == "mean attention":
            return self._viewers() is not None
        return quantity in get_args(AttentionQuantity)

    def read(self, quantity: Quantity) -> tuple[Float[Tensor, "step batch layer head key"], Scale]:
        """The scores that a detector of this quantity reads, and their scale; half precision is widened to float32.

        Raises:
            ValueError: a quantity of hidden states, which is not in received attention, or as `mean_attention`.
        """
        if quantity == "received":
            return _wide(self.values), self.scale
        if quantity == "share":
            return self.shares, SHARE
        if quantity == "mean attention":
            return self.mean_attention, MEAN
        raise ValueError(
            f"this detector reads {quantity!r}, not attention; give find_sinks a KeyStatistic "
            "(key_statistic_over_steps) instead of received attention"
        )

    @checked_arguments(**dict.fromkeys(("rows", "layers", "heads", "steps"), SLICE))
    def part(
        self,
        rows: slice = slice(None),
        layers: slice = slice(None),
        heads: slice = slice(None),
        steps: slice = slice(None),
    ) -> "Received":
        """Some rows of the batch, layers, heads and steps, as views; slices of the axes, not layer indices.

        Raises:
            ValueError: something else than a slice forwards.
        """
        return replace(
            self,
            **taken(self, {"step": steps, "batch": rows, "layer": layers, "head": heads}),
            layers=self.layers[layers],
            steps=self.steps if steps == slice(None) else self.step_numbers[steps],
            heads=self.heads if heads == slice(None) else self.head_numbers[heads],
            rows=self.rows if rows == slice(None) else self.row_numbers[rows],
        )

    @checked_arguments(count=whole(least=0))
    def first_steps(self, count: int) -> "Received":
        """The first `count` steps, or all that there are, as views.

        Raises:
            ValueError: a count that is negative, or no whole number.
        """
        return self.part(steps=slice(count))

    def on_scale(self, scale: Scale) -> "Received":
        """The same attention relative to uniform, or as column sums.

        Raises:
            ValueError: another scale; shares are at `shares`.
        """
        if scale == self.scale:
            return self
        values = self.column_sums if scale == COLUMN_SUM else _wide(self.values) / _wide(self.expected)
        return replace(self, values=values, scale=scale)

    def at_level(self, level: Level) -> "Received":
        """Received attention of the mean pattern: mean r_j over heads (and layers) divided by mean e_j.

        The merged axes keep size 1 and leave `dims`. A key is undefined where it is undefined in any of the
        patterns that are averaged.

        Raises:
            ValueError: an unknown level, an axis that does not exist, or a finer level than this one's.
        """
        if level not in get_args(Level):
            raise ValueError(f"level is {shown(level)}; it must be one of {', '.join(get_args(Level))}")
        if level == self.level:
            return self
        if len(MERGED[level]) < len(MERGED[self.level]):
            raise ValueError(
                f"these scores are of the {self.level} mean, which has no {level} level left; give the "
                f"scores of the {level} level, or level={self.level!r} where it is a setting"
            )
        merged = [name for name in MERGED[level] if name not in MERGED[self.level]]
        missing = [name for name in merged if name not in self.dims]
        if missing:
            raise ValueError(
                f"level {level!r} averages over {' and '.join(merged)}, but there is no {missing[0]} axis among "
                f"{self.dims}; name the leading axes of a pattern with dims="
            )
        axes = [AXES.index(name) for name in merged]
        sums = self.column_sums.mean(axes, keepdim=True)
        expected = _wide(self.expected).mean(axes, keepdim=True)
        viewers = None if self.viewers is None else self.viewers.float().mean(axes, keepdim=True)
        return replace(
            self,
            values=sums / expected if self.scale == RELATIVE else sums,
            expected=expected,
            viewers=viewers,
            level=level,
            layers=self.layers if "layer" not in merged else (),
            heads=self.heads if "head" not in merged else (),
            dims=tuple(name for name in self.dims if name not in merged),
        )


RECEIVED = instance(Received, "a Recording, or the Received of dlm_lens.received_of")


def warn_unscored(counted: Int[Tensor, "..."], min_viewers: int) -> None:
    """Warn where no step has as many queries as a score needs, so that every score is NaN and no key is a sink.

    Args:
        counted: how many queries count, per step and row.
        min_viewers: fewest that must see a key.
    """
    most = int(counted.max()) if counted.numel() else min_viewers
    if most < min_viewers:
        warnings.warn(
            f"no key has a score: at most {most} queries count, and a score needs {min_viewers}; give longer "
            "prompts, answers or blocks, or a smaller min_viewers",
            stacklevel=level_of_caller(),
        )


def _wide(values: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Values of at least float32: a threshold rounded to half precision could change a decision."""
    return values.float() if values.dtype.itemsize < 4 else values
