"""Parts of a Recording, and several recordings as one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlm_lens.recording.arrays import widened
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
        answer=recording.answer[rows],
        steps=kept("step"),
        rows=kept("batch"),
        heads=kept("head") if "head" in places else recording.heads,
    )


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
    settings = dict(run.settings)
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
        spans=tuple(run.spans[i] for i in chosen),
        blocks=tuple(run.blocks[i] for i in chosen),
        settings=settings,
    )


def joined(recordings: Sequence[Recording]) -> Recording:
    """The rows of several recordings with the same reducers, layers and settings as one.

    Shorter prompts are padded on the left, which moves their positions; runs that ended earlier stay at their last
    canvas and have NaN from there on.

    Raises:
        ValueError: they do not fit.
    """
    first = recordings[0]
    if len(recordings) == 1:
        return first
    for other in recordings[1:]:
        for name in ("specs", "layers", "heads", "sinks", "causal", "unpadded", "model"):
            if getattr(other, name) != getattr(first, name):
                raise ValueError(f"recordings differ in {name}: {getattr(first, name)} and {getattr(other, name)}")
    front = max(r.prompt_length for r in recordings)
    behind = max(r.run.tokens.shape[1] - r.prompt_length for r in recordings)
    longest = max(recordings, key=lambda r: len(r.steps))
    parts = [_fitted(r, front - r.prompt_length, front + behind, longest) for r in recordings]
    runs = [part.run for part in parts]

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(run, name) for run in runs], 1)

    run = replace(
        runs[0],
        canvases=rows("canvases"),
        masked=rows("masked"),
        proposals=rows("proposals"),
        confidence=rows("confidence"),
        selected=rows("selected"),
        attention_mask=torch.cat([run.attention_mask for run in runs]),
        settings={**runs[0].settings, "seeds": tuple(seed for r in recordings for seed in r.seeds)},
    )
    arrays = {
        name: torch.cat([part.arrays[name] for part in parts], spec.dims.index("batch"))
        for name, spec in first.specs.items()
    }
    return replace(
        parts[0],
        run=run,
        arrays=arrays,
        answer=torch.cat([part.answer for part in parts]),
        rows=tuple(row for r in recordings for row in r.rows),
        words={i: word for r in recordings for i, word in r.words.items()},
    )


def _fitted(recording: Recording, shift: int, positions: int, longest: Recording) -> Recording:
    """A recording moved to the right by `shift`, on canvases of `positions`, with the steps of the longest one."""
    run, steps = recording.run, len(longest.steps)
    behind = positions - run.tokens.shape[1] - shift
    more = steps - run.steps

    def canvas(tensor: Tensor, value: float | int, extra: Tensor | None) -> Tensor:
        tensor = torch.nn.functional.pad(tensor, (shift, behind), value=value)
        if extra is None or not more:
            return tensor
        extra = torch.nn.functional.pad(extra, (shift, behind), value=value)
        return torch.cat([tensor, extra.expand(more, *extra.shape)])

    def moved(name: str) -> Tensor:
        array, spec = recording.arrays[name], recording.specs[name]
        sinks = recording.sinks
        for axis in ("query", "key"):
            if axis not in spec.dims:
                continue
            at = spec.dims.index(axis)
            own = array.narrow(at, 0, array.shape[at] - (sinks if axis == "key" else 0))
            rest = array.narrow(at, own.shape[at], array.shape[at] - own.shape[at])
            own = widened(own, spec.dims, {axis: own.shape[at] + shift}, front=True)
            own = widened(own, spec.dims, {axis: positions})
            array = torch.cat([own, rest], at)
        if spec.positions:
            on_canvas = run.tokens.shape[1]
            array = torch.where(
                array >= on_canvas, array + positions - on_canvas, (array + shift).where(array >= 0, array)
            )
        return widened(array, spec.dims, {"step": steps})

    last = run.canvases[-1]
    spans = [(start + shift, stop + shift) for start, stop in run.spans]
    first_spans = _shifted(longest, positions, recording, shift)
    return replace(
        recording,
        run=replace(
            run,
            canvases=canvas(run.canvases, 0, last),
            masked=canvas(run.masked.byte(), 0, run.masked[-1].byte()).bool(),
            proposals=canvas(run.proposals, 0, last),
            confidence=canvas(run.confidence, -torch.inf, torch.full(last.shape, -torch.inf)),
            selected=canvas(run.selected.byte(), 0, torch.zeros(last.shape, dtype=torch.uint8)).bool(),
            attention_mask=torch.nn.functional.pad(run.attention_mask.byte(), (shift, behind)).bool(),
            prompt_length=run.prompt_length + shift,
            spans=tuple(spans) + first_spans[len(spans) :],
            blocks=run.blocks + longest.run.blocks[len(spans) :],
        ),
        arrays={name: moved(name) for name in recording.specs},
        answer=torch.nn.functional.pad(recording.answer.byte(), (shift, behind)).bool(),
        steps=longest.steps,
    )


def _shifted(longest: Recording, positions: int, recording: Recording, shift: int) -> tuple[Any, ...]:
    by = recording.prompt_length + shift - longest.prompt_length
    return tuple((start + by, stop + by) for start, stop in longest.run.spans)
