"""`Recording`: statistics of a run as named arrays over (step, batch, layer, head, key), with their coordinates."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import DIRECTORY, check_index, meant, named_arguments, place_of_layer
from dlm_lens.attention import beside_sinks
from dlm_lens.display import Preview, ShowsItself
from dlm_lens.files.paths import user_path
from dlm_lens.placement import plain_defaults
from dlm_lens.printable import printable_name, shown
from dlm_lens.recording.canvas_facts import CanvasFacts
from dlm_lens.recording.query_classes import QueryClass, checked_class, received_name, stored_name
from dlm_lens.recording.recording_fields import RecordingFields
from dlm_lens.recording.storage import ShardArrays, load_recording, save_recording
from dlm_lens.sampling import part_of_run
from dlm_lens.sampling.emerging_text import preview
from dlm_lens.sampling.moved_tokens import answer_of_steps
from dlm_lens.sampling.prompts import is_id
from dlm_lens.sampling.run_rows import own_canvas

if TYPE_CHECKING:
    import xarray

Index = int | slice | Sequence[int]


@dataclass(frozen=True, eq=False)
class Recording(ShowsItself, RecordingFields):
    """Statistics of a run: an attribute per array (`recording.received`, `recording.value_norm`, ...).

    Arrays have the axes (step, batch, layer, head, key), or those in `specs[name].dims`. Keys are the canvas
    positions and, after them, the model's learned sink tokens, with token id -1 - i. A value is NaN where a key or
    query is undefined: padding, not written yet in an AR run, seen by too few queries, or after the end of a row.

    The fields are those of `RecordingFields`.

    Raises:
        ValueError: shapes that contradict each other.
    """

    def __getattr__(self, name: str) -> Tensor:
        arrays: Mapping[str, Tensor] = self.__dict__.get("arrays", {})
        if name not in arrays and "_" in name:
            # received_open is stored as received_masked.
            first, _, queries = name.rpartition("_")
            name = f"{first}_{stored_name(queries)}"
        if name not in arrays:
            known = ", ".join(arrays) or "none"
            raise AttributeError(f"this Recording has no {name!r}; its statistics are {known}")
        array = arrays[name]
        return array.float() if array.dtype == torch.float16 else array

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items() if name != "query")
        under = f"; under {', '.join(self.hooks)}" if self.hooks else ""
        text = f"Recording({', '.join(self.specs) or 'no statistics'}; {sizes}; model: {self.model}{under})"
        # Of names in files, on which a terminal may act; the code of a character has at most 10.
        return printable_name(text, 10 * len(text))

    def _preview(self) -> Preview:
        lines = []
        for name, array in self.arrays.items():
            sizes = zip(self.specs[name].dims, array.shape, strict=True)
            axes = " ".join(f"{axis}={size}" for axis, size in sizes)
            lines.append([name, axes, str(array.dtype).removeprefix("torch."), array.nbytes / 2**20])
        table = pd.DataFrame(lines, columns=["statistic", "axes", "stored as", "MiB"])
        shown = preview(self.run)
        return Preview(shown.lines, shown.strip, table, note="a statistic by its name; .run; .to_xarray()")

    @property
    def settings(self) -> Mapping[str, Any]:
        """The sampler and all of its settings, seeds included."""
        return self.run.settings

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of every row."""
        return tuple(self.run.settings.get("seeds", ()))

    @property
    def prompt_length(self) -> int:
        """Positions before the answer, padding included."""
        return self.run.prompt_length

    @property
    def tokens(self) -> Int[Tensor, "step batch key"]:
        """The canvas of each step, and the learned sink tokens after it."""
        return beside_sinks(self.run.canvases[:-1], self.sinks)

    @property
    def masked(self) -> Bool[Tensor, "step batch key"]:
        """Which keys are open at each step: masked, or holding a random token (in an AR run: not written yet)."""
        return beside_sinks(self.run.masked[:-1], self.sinks, value=False)

    @property
    def open(self) -> Bool[Tensor, "step batch key"]:
        """`masked`, by the word that fits models without a mask token too."""
        return self.masked

    @property
    def valid(self) -> Bool[Tensor, "batch key"]:
        """Content (True) or padding (False)."""
        return beside_sinks(self.run.attention_mask, self.sinks, value=True)

    @property
    def progress(self) -> Float[Tensor, "step batch"]:
        """Share of the answer that is decided, per step and row (`DenoisingRun.progress`)."""
        return self.run.progress[:-1]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Index of the block that each step decodes."""
        return self.run.blocks

    @property
    def facts(self) -> CanvasFacts:
        """The classes of queries at every step, and the keys that they see.

        Raises:
            ValueError: the layers have different sliding windows; use `facts_of(layer)`.
        """
        windows = sorted(set(map(str, self.windows)))
        if len(windows) > 1:
            raise ValueError(
                f"the layers have different sliding windows ({', '.join(windows)}), so that their keys are seen by "
                "different queries: name a layer, as in expected(queries, layer=0) and facts_of(0)"
            )
        return self._facts[self.windows[0] if self.windows else None]

    def facts_of(self, layer: int) -> CanvasFacts:
        """The classes of queries at every step, and the keys that they see in a layer; `layer` as in `layers`.

        Raises:
            ValueError: a layer that was not recorded.
        """
        place = place_of_layer(layer, self.layers, "recorded")
        return self._facts[self.windows[place] if self.windows else None]

    @cached_property
    def _facts(self) -> dict[int | None, CanvasFacts]:
        """By sliding window."""
        return {window: self._with_window(window) for window in dict.fromkeys(self.windows or (None,))}

    def _with_window(self, window: int | None) -> CanvasFacts:
        masked = self.run.masked[:-1]
        return CanvasFacts(
            valid=self.run.seen_content & self.run.running[..., None],
            masked=masked,
            answer=answer_of_steps(self.run) if self.run.origins is not None else self.answer.expand(masked.shape),
            block=self.run.in_block,
            causal=self.causal,
            sinks=self.sinks,
            unpadded=self.unpadded,
            window=window,
            blocks=self.run.attention.counted_blocks(self.run.attention_mask),
            computed=self.run.in_span,
            observed_first=self.run.attention.observed_first,
            own_canvas=own_canvas(self.run),
        )

    def expected(self, queries: QueryClass = "all", *, layer: int | None = None) -> Float[Tensor, "step batch key"]:
        """e_j = sum_i M_ij / sum_k M_ik over these queries: received attention under uniform attention.

        Args:
            queries: which queries count.
            layer: index of the layer, as in `layers`; None without sliding windows, when all layers are equal.

        Raises:
            ValueError: a class or layer that does not exist, or layers that differ.
        """
        return self._facts_at(layer).expected(checked_class(queries, "expected"))

    def viewers(self, queries: QueryClass = "all", *, layer: int | None = None) -> Float[Tensor, "step batch key"]:
        """The number of these queries that see each key; arguments and errors as in `expected`."""
        return self._facts_at(layer).viewers(checked_class(queries, "viewers"))

    def expected_by_layer(self, queries: QueryClass = "all") -> Float[Tensor, "step batch #layer key"]:
        """e_j of every layer; the layer axis has size 1 if all layers are equal."""
        return torch.stack([self.expected(queries, layer=layer) for layer in self._differing], 2)

    def viewers_by_layer(self, queries: QueryClass = "all") -> Float[Tensor, "step batch #layer key"]:
        """The number of these queries that see each key, per layer; size 1 if all layers are equal."""
        return torch.stack([self.viewers(queries, layer=layer) for layer in self._differing], 2)

    def _facts_at(self, layer: int | None) -> CanvasFacts:
        return self.facts if layer is None else self.facts_of(layer)

    @property
    def _differing(self) -> tuple[int, ...]:
        """All layers if their sliding windows differ, else the first one."""
        return self.layers if len(set(self.windows)) > 1 else self.layers[:1]

    def counted(self, queries: QueryClass = "all") -> Int[Tensor, "step batch"]:
        """The number of queries of this class."""
        # Queries do not depend on the window.
        return self.facts_of(self.layers[0]).queries(checked_class(queries, "counted")).sum(-1)

    def received_sums(self, queries: QueryClass = "all") -> Float[Tensor, "step batch layer head key"]:
        """r_j = sum_i A_ij, the raw column sums of a recorded class of queries; NaN where the score is undefined.

        Raises:
            ValueError: ReceivedAttention of this class was not recorded.
        """
        name = received_name(checked_class(queries, "received_sums"))
        if name not in self.specs:
            raise ValueError(f"{name} was not recorded; record with ReceivedAttention(queries={queries!r})")
        return getattr(self, name) * self.expected_by_layer(queries)[:, :, :, None]

    def strings(self, step: int, row: int = 0) -> list[str]:
        """The text of every key at a step: one token each, sink(i) for learned sink tokens, nothing for padding.

        Raises:
            ValueError: a step or row that this part does not have; both count from 0, or from the end if negative.
        """
        check_index("step", step, self.tokens.shape[0])
        check_index("row", row, self.tokens.shape[1])
        return [str(text) for text in _texts(self)[step, row]]

    @named_arguments(row="batch", rows="batch")
    def select(
        self,
        *,
        step: Index | None = None,
        layer: Index | None = None,
        batch: Index | None = None,
        head: Index | None = None,
    ) -> "Recording":
        """A part with all axes: steps, rows and heads by place on the axis, layers by index in the model.

        Negative places count from the end; a slice selects places. Arrays without the axis are unchanged
        (`value_norm` has kv_head; a layer with fewer of these than another has each of them several times).

        Raises:
            ValueError: a step, row, head or layer that was not recorded, or something else than whole numbers.
        """
        return selected(self, {"step": step, "layer": layer, "batch": batch, "head": head})

    def to_xarray(self) -> "xarray.Dataset":
        """An xarray Dataset: the arrays with dims, coordinates, units and formulas."""
        return dataset_of(self)

    def save(self, directory: str | Path) -> Path:
        """Write to a directory: a safetensors shard per step and a manifest, as `record(..., to=)` does.

        Raises:
            FileExistsError: the directory is not empty.
            ValueError: another process writes there.
            OSError: the disk is full; the files written so far are removed.
        """
        DIRECTORY.check("directory", directory)
        return save_recording(self, user_path(directory))

    @classmethod
    @plain_defaults()
    def load(cls, directory: str | Path, *, verify: bool = True) -> "Recording":
        """Read a finished recording; several batches in one directory become the rows of one Recording.

        Coordinates are read at once, an array on its first use.

        Args:
            directory: the recording's.
            verify: compare every shard with its checksum, which reads all of them once; False skips this.

        Raises:
            FileNotFoundError: the directory holds no recording.
            ValueError: the recording is not finished (a prompt or a step is missing) or damaged; names the file.
        """
        if not isinstance(directory, str | Path):
            raise ValueError(f"Recording.load: {shown(directory)} is no directory; give the path of a recording")
        return cls.of(load_recording(user_path(directory), verify=verify))

    @classmethod
    def of(cls, fields: RecordingFields) -> "Recording":
        """The recording with these fields."""
        return cls(**{each.name: getattr(fields, each.name) for each in dataclass_fields(fields)})


def selected(recording: Recording, wanted: Mapping[str, Index | None]) -> Recording:
    """The part of a recording at some indices.

    Args:
        recording: the whole.
        wanted: axis -> indices; None for all.

    Raises:
        ValueError: an index that does not exist.
    """
    heads = (
        recording.heads if recording.heads is not None else _heads(recording) if wanted["head"] is not None else ()
    )
    names = {"step": recording.steps, "batch": recording.rows, "head": heads, "layer": recording.layers}
    places = {axis: _places(axis, index, names[axis]) for axis, index in wanted.items() if index is not None}
    arrays: dict[str, Tensor] = {}
    source = recording.arrays
    # Of arrays on the disk only the chosen steps are read.
    read = "step" in places and isinstance(source, ShardArrays)
    if isinstance(source, ShardArrays) and read:
        source = source.of_steps(places["step"])
    for name, spec in recording.specs.items():
        array = source[name]
        for axis, place in places.items():
            if axis in spec.dims and not (axis == "step" and read):
                array = array.index_select(spec.dims.index(axis), torch.tensor(place, dtype=torch.long))
        arrays[name] = array

    def kept(axis: str) -> tuple[int, ...]:
        return tuple(names[axis][i] for i in places[axis]) if axis in places else names[axis]

    rows = places.get("batch", list(range(len(recording.rows))))
    run = part_of_run(recording.run, places.get("step"), rows)
    return replace(
        recording,
        run=run,
        arrays=arrays,
        layers=kept("layer"),
        windows=_windows(recording, places.get("layer")),
        answer=recording.answer[rows] if run.origins is None else run.answer,
        steps=kept("step"),
        rows=kept("batch"),
        heads=kept("head") if "head" in places else recording.heads,
    )


def _windows(recording: Recording, places: Sequence[int] | None) -> tuple[int | None, ...]:
    if places is None or not recording.windows:
        return recording.windows
    return tuple(recording.windows[place] for place in places)


def _heads(recording: Recording) -> tuple[int, ...]:
    for name, spec in recording.specs.items():
        if "head" in spec.dims:
            return tuple(range(recording.arrays[name].shape[spec.dims.index("head")]))
    raise ValueError("no statistic of this recording has heads")


def _places(axis: str, index: Any, names: Sequence[int]) -> list[int]:
    if isinstance(index, slice):
        found = list(range(len(names)))[index]
    else:
        several = isinstance(index, Iterable) and not is_id(index) and not isinstance(index, str)
        given = list(index) if several else [index]
        if not all(map(is_id, given)):
            raise ValueError(
                f"{axis} is {shown(index)}; give a whole number, several of them, or a slice (for True and False, "
                "the places of True)"
            )
        found = [_place(axis, int(i), names) for i in given]
    if not found:
        raise ValueError(f"{axis}={index!r} selects nothing of {len(names)}")
    return found


def _place(axis: str, index: int, names: Sequence[int]) -> int:
    if axis == "layer" and index >= 0:
        if index not in names:
            raise ValueError(f"layer {index} was not recorded; layers are {', '.join(map(str, names))}")
        return names.index(index)
    if not -len(names) <= index < len(names):
        raise ValueError(f"{axis} {index} of {len(names)}")
    return index % len(names)


def dataset_of(recording: Recording) -> "xarray.Dataset":
    """The arrays with dims, units and formulas; coordinates of steps, keys and axes; settings as attributes."""
    import xarray  # a tenth of a second, which most users of recordings do not need

    arrays: dict[str, Any] = {}
    coordinates: dict[str, Any] = {
        "step": list(recording.steps),
        "batch": list(recording.rows),
        "layer": list(recording.layers),
    }
    for name, spec in recording.specs.items():
        values = getattr(recording, name).numpy()
        arrays[name] = (spec.dims, values, {"units": spec.unit, "formula": spec.formula, "reducer": spec.reducer})
        coordinates |= {axis: list(labels) for axis, labels in spec.labels.items()}
        if "query" in spec.dims:
            coordinates["query"] = np.arange(values.shape[spec.dims.index("query")])
        if "head" in spec.dims:
            count = values.shape[spec.dims.index("head")]
            coordinates["head"] = list(recording.heads if recording.heads is not None else range(count))
    coordinates |= _of_keys(recording)
    return xarray.Dataset(arrays, coordinates, _attributes(recording))


def _of_keys(recording: Recording) -> dict[str, Any]:
    keys, tokens = ("step", "batch", "key"), recording.tokens.numpy()
    return {
        "key": np.arange(tokens.shape[-1]),
        "token": (keys, tokens),
        "token_text": (keys, _texts(recording)),
        "masked": (keys, recording.masked.numpy()),
        "valid": (("batch", "key"), recording.valid.numpy()),
        "progress": (("step", "batch"), recording.progress.numpy()),
        "block": ("step", list(recording.blocks)),
        **({"seed": ("batch", list(recording.seeds))} if recording.seeds else {}),
    }


def _texts(recording: Recording) -> Any:
    """The text of every key at every step [step, batch, key]; none of padding, which after joining is any token."""
    words = np.vectorize(
        lambda i: recording.words.get(i, f"<{i}>") if i >= 0 else f"sink({-1 - i})", otypes=[object]
    )(recording.tokens.numpy())
    return np.where(recording.valid.numpy(), words, "").astype(str)


def _attributes(recording: Recording) -> dict[str, Any]:
    return {
        "model": recording.model,
        "prompt_length": recording.prompt_length,
        "sink_tokens": recording.sinks,
        "causal": int(recording.causal),
        **({"sliding_windows": json.dumps(recording.windows)} if recording.windows else {}),
        "score_scale": recording.scale if recording.scale is not None else "",
        "settings": json.dumps(dict(recording.settings)),
        "hooks": json.dumps(recording.hooks),
        "versions": json.dumps(dict(recording.versions)),
    }


def as_recording(given: Any) -> Recording:
    """A `Recording` as it is, or that of passes which are recorded (`record_forward`).

    Raises:
        TypeError: naming the class of what was given.
    """
    recording = meant(given)
    if not isinstance(recording, Recording):
        raise TypeError(f"the recording is a {type(recording).__name__}; give a Recording of dlm_lens.record")
    return recording
