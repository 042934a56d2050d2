"""The arrays of a recording: their description, and their assembly from the steps of a run."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from dlm_lens.attention.hook_identity import ADDRESS
from dlm_lens.recording.reducers.base import Statistic

PADDED = ("query", "key")
"""Axes as long as the canvas, which grows over the steps of an AR run."""


@dataclass(frozen=True)
class ArraySpec:
    """The description of an array of a Recording.

    Args:
        name: the attribute of the Recording.
        dims: the axes.
        unit: of the numbers.
        formula: with its source.
        reducer: the call that makes the reducer.
        settings: the reducer's settings that are plain values.
        labels: axis -> names along it, for axes of the reducer's own.
        positions: whether the numbers are positions of keys.
        zero_padding: whether a present query has 0, not NaN, at keys that its row lacks.
    """

    name: str
    dims: tuple[str, ...]
    unit: str
    formula: str
    reducer: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    positions: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    zero_padding: bool = False


def specs_of(reducers: Sequence[Statistic]) -> tuple[ArraySpec, ...]:
    """The descriptions of the arrays of these reducers."""
    return tuple(
        ArraySpec(
            name=reducer.name,
            dims=tuple(reducer.dims),
            unit=reducer.unit,
            formula=reducer.formula,
            reducer=ADDRESS.sub("", repr(reducer)),
            labels=dict(reducer.labels),
            positions=reducer.positions,
            settings=dict(reducer.stored_settings),
            zero_padding=reducer.zero_padding,
        )
        for reducer in reducers
    )


def _with_as_many_heads(parts: list[Tensor], spec: ArraySpec) -> list[Tensor]:
    """The layers' arrays with as many key/value heads as the layer with the most.

    A layer with fewer (DiffusionGemma's full layers) has each of its own several times, one after the other, so
    that query head h reads entry h // (head / kv_head) in every layer.
    """
    if "kv_head" not in spec.dims:
        return parts
    axis = spec.dims.index("kv_head") - 2
    most = max(part.shape[axis] for part in parts)
    return [part.repeat_interleave(most // part.shape[axis], axis) for part in parts]


class StepArrays:
    """The arrays of a run in memory. Each is allocated once for all steps, so that steps are not copied again.

    Args:
        specs: descriptions of the arrays.
        dtype: of floating-point numbers.
    """

    def __init__(self, specs: tuple[ArraySpec, ...], dtype: torch.dtype) -> None:
        self.specs, self.dtype = specs, dtype
        self._arrays: dict[str, Tensor] = {}
        self.steps = 0

    def clear(self) -> None:
        """Drop all steps."""
        self._arrays, self.steps = {}, 0

    def of_layers(self, layers: Sequence[MutableMapping[str, Tensor]]) -> dict[str, Tensor]:
        """The arrays of one step, [batch, layer, ...], on the CPU in the dtype of storage; `layers` are emptied.

        Raises:
            ValueError: a number is too large for float16.
        """
        found: dict[str, Tensor] = {}
        for spec in self.specs:
            parts = [layer.pop(spec.name) for layer in layers]  # so that no step is in memory twice
            # Layers may live on several devices; on one, a single copy.
            parts = parts if len({part.device for part in parts}) == 1 else [part.cpu() for part in parts]
            parts = _with_as_many_heads(parts, spec)
            values = torch.stack(parts, 1).cpu()
            if values.is_floating_point():
                values = as_stored(spec.name, values, self.dtype, "record with dtype='float32'")
            found[spec.name] = values
        return found

    def add(self, arrays: Mapping[str, Tensor], *, total: int, positions: int, queries: int) -> None:
        """Add one of `total` steps; later steps have at most `positions` keys and `queries` queries."""
        for spec in self.specs:
            step = arrays[spec.name]
            if spec.name not in self._arrays:
                sizes = {"key": positions, "query": queries}
                shape = [sizes.get(name, size) for name, size in zip(_of_step(spec), step.shape, strict=True)]
                self._arrays[spec.name] = torch.empty(total, *shape, dtype=step.dtype)
            self._arrays[spec.name][self.steps] = widened(
                step, _of_step(spec), {"key": positions, "query": queries}
            )
        self.steps += 1

    def result(self, *, keys: int, queries: int) -> dict[str, Tensor]:
        """The arrays [step, batch, layer, ...], cut to these numbers of keys and queries.

        Raises:
            ValueError: there was no step.
        """
        if not self.steps:
            raise ValueError("the run took no step, so that nothing was recorded; give a longer gen_length")
        sizes = {"key": keys, "query": queries}
        return {
            spec.name: with_zeros_(cut(self._arrays[spec.name][: self.steps], spec.dims, sizes), spec)
            for spec in self.specs
        }


def _of_step(spec: ArraySpec) -> tuple[str, ...]:
    return spec.dims[1:]


def as_stored(name: str, values: Tensor, dtype: torch.dtype, remedy: str) -> Tensor:
    """Numbers in the dtype of storage.

    Raises:
        ValueError: one is too large for float16.
    """
    stored = values.to(dtype)
    if dtype == torch.float16 and bool((stored.isinf() & values.isfinite()).any()):
        # The largest finite one: another may be infinite before it is stored.
        largest = float(values.masked_fill(~values.isfinite(), 0.0).abs().max())
        raise ValueError(f"{name} reaches {largest:.3g}, and float16 ends at 65,504; {remedy}")
    return stored


def blank(dtype: torch.dtype) -> float | int:
    """The value of undefined entries: NaN, or -1 among integers."""
    return torch.nan if dtype.is_floating_point else -1


def blank_ended_(arrays: Iterable[Tensor], running: Bool[Tensor, "step batch"]) -> None:
    """Make arrays [step, batch, ...] undefined where a row is over, in place."""
    if bool(running.all()):
        return
    for array in arrays:
        array[~running] = blank(array.dtype)


def widened(tensor: Tensor, dims: Sequence[str], sizes: Mapping[str, int], *, front: bool = False) -> Tensor:
    """A tensor padded to at least these sizes with undefined entries, at the end of the axes (or at the front)."""
    for axis, name in enumerate(dims):
        missing = sizes.get(name, 0) - tensor.shape[axis]
        if missing > 0:
            shape = [*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :]]
            added = torch.full(shape, blank(tensor.dtype), dtype=tensor.dtype)
            tensor = torch.cat([added, tensor] if front else [tensor, added], axis)
    return tensor


def with_zeros_(array: Tensor, spec: ArraySpec) -> Tensor:
    """An array [step, ...], in place with 0 for NaN in rows of keys that are not all NaN, if its padding is 0."""
    if spec.zero_padding:
        keys = spec.dims.index("key") - 1
        for step in array:  # one at a time: an array over queries and keys is large
            missing = step.isnan()
            step.masked_fill_(missing & ~missing.all(keys, keepdim=True), 0.0)
    return array


def cut(tensor: Tensor, dims: Sequence[str], sizes: Mapping[str, int]) -> Tensor:
    """A tensor cut to at most these sizes, as a view."""
    for axis, name in enumerate(dims):
        if name in sizes and tensor.shape[axis] > sizes[name]:
            tensor = tensor.narrow(axis, 0, sizes[name])
    return tensor


def as_plain(spec: ArraySpec) -> dict[str, Any]:
    """The description as JSON values."""
    return {
        "name": spec.name,
        "dims": list(spec.dims),
        "unit": spec.unit,
        "formula": spec.formula,
        "reducer": spec.reducer,
        "labels": {name: list(labels) for name, labels in spec.labels.items()},
        "positions": spec.positions,
        "settings": dict(spec.settings),
        # Named where it holds alone: other recordings are described as before there was one.
        **({"zero_padding": True} if spec.zero_padding else {}),
    }


def from_plain(plain: Mapping[str, Any]) -> ArraySpec:
    """The description from the JSON values of `as_plain`."""
    labels = {name: tuple(labels) for name, labels in plain["labels"].items()}
    return ArraySpec(**{**plain, "dims": tuple(plain["dims"]), "labels": labels})
