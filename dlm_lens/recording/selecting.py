"""Parts of a Recording."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlm_lens.recording.result import Index, Recording
from dlm_lens.sampling import Denoised


def selected(recording: Recording, wanted: Mapping[str, Index | None]) -> Recording:
    """The part of a recording that `wanted` names, by axis.

    Raises:
        ValueError: something that is not there.
    """
    heads = (
        recording.heads if recording.heads is not None else _heads(recording) if wanted["head"] is not None else ()
    )
    names = {"step": recording.steps, "batch": recording.rows, "head": heads, "layer": recording.layers}
    places = {axis: _places(axis, index, names[axis]) for axis, index in wanted.items() if index is not None}
    arrays: dict[str, Tensor] = {}
    source: Any = recording.arrays
    # Arrays on the disk are read for the chosen steps only.
    read = "step" in places and hasattr(source, "of_steps")
    source = source.of_steps(places["step"]) if read else source
    for name, spec in recording.specs.items():
        array = source[name]
        for axis, place in places.items():
            if axis in spec.dims and not (axis == "step" and read):
                array = array.index_select(spec.dims.index(axis), torch.tensor(place, dtype=torch.long))
        arrays[name] = array

    def kept(axis: str) -> tuple[int, ...]:
        return tuple(names[axis][i] for i in places[axis]) if axis in places else names[axis]

    rows = places.get("batch", list(range(len(recording.rows))))
    return replace(
        recording,
        run=_part(recording.run, places.get("step"), rows),
        arrays=arrays,
        layers=kept("layer"),
        windows=_windows(recording, places.get("layer")),
        answer=recording.answer[rows],
        steps=kept("step"),
        rows=kept("batch"),
        heads=kept("head") if "head" in places else recording.heads,
    )


def _windows(recording: Recording, places: Sequence[int] | None) -> tuple[int | None, ...]:
    """The sliding windows of some layers."""
    if places is None or not recording.windows:
        return recording.windows
    return tuple(recording.windows[place] for place in places)


def _heads(recording: Recording) -> tuple[int, ...]:
    """Every head."""
    for name, spec in recording.specs.items():
        if "head" in spec.dims:
            return tuple(range(recording.arrays[name].shape[spec.dims.index("head")]))
    raise ValueError("no statistic of this recording has heads")


def _places(axis: str, index: Index, names: Sequence[int]) -> list[int]:
    if isinstance(index, slice):
        found = list(range(len(names)))[index]
    else:
        given = [index] if isinstance(index, int) else [int(i) for i in index]
        found = [_place(axis, i, names) for i in given]
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


def _part(run: Denoised, steps: Sequence[int] | None, rows: Sequence[int]) -> Denoised:
    """Some steps and rows of a run; its last canvas stays the last."""
    chosen = list(range(run.steps)) if steps is None else list(steps)
    seeds = run.settings.get("seeds")
    settings, ran = dict(run.settings), run.rows_ran
    if seeds is not None and len(seeds) == len(run.tokens):
        settings["seeds"] = tuple(seeds[row] for row in rows)
    return replace(
        run,
        canvases=run.canvases[[*chosen, run.steps]][:, rows],
        masked=run.masked[[*chosen, run.steps]][:, rows],
        proposals=run.proposals[chosen][:, rows],
        confidence=run.confidence[chosen][:, rows],
        selected=run.selected[chosen][:, rows],
        attention_mask=run.attention_mask[rows],
        rows_ran=None if ran is None else tuple(sum(step < ran[row] for step in chosen) for row in rows),
        spans=tuple(run.spans[i] for i in chosen),
        blocks=tuple(run.blocks[i] for i in chosen),
        settings=settings,
    )
