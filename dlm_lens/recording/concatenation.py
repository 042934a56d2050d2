"""Join several recordings: the rows of all of them in one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dlm_lens.attention.hook_identity import ADDRESS
from dlm_lens.recording.arrays import ArraySpec, widened, with_zeros_
from dlm_lens.recording.directories import parts_of
from dlm_lens.recording.recording_fields import RecordingFields
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.moved_tokens import widened as widened_origins
from dlm_lens.sampling.token_text import merged

Fields = TypeVar("Fields", bound=RecordingFields)

OF_BATCHES = ("seeds", "steps", "hooks", "columns_hidden", "mass_hidden")
"""What a run's settings hold that may differ between batches: seeds, steps (where prompts are filled in, as many as
masks), and what hooks (compared apart) did in one."""


def joined(recordings: Iterable[Fields], stored: Path | None = None) -> Fields:
    """One recording with the rows of several that have the same reducers, layers and settings.

    Seeds and the numbers of steps may differ, and gen_length in AR decoding.

    Shorter prompts are padded on the left, which changes their positions. Runs that ended earlier keep their last
    canvas, and their statistics are NaN after it.

    Args:
        recordings: in the order of rows. Each is checked before the next is taken, which a generator then computes.
        stored: the directory that holds them all, for the error.

    Raises:
        ValueError: the recordings differ in more than their rows.
    """
    recordings = _checked(recordings, stored)
    first = recordings[0]
    if len(recordings) == 1:
        return first
    recordings = _all_name_what_they_computed(recordings)
    before = max(r.run.prompt_length for r in recordings)
    after = max(r.run.tokens.shape[1] - r.run.prompt_length for r in recordings)
    longest = max(recordings, key=lambda r: len(r.steps))
    parts = [fitted(r, before - r.run.prompt_length, before + after, longest) for r in recordings]
    runs, at = [part.run for part in parts], recordings.index(longest)

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(run, name) for run in runs], 1)

    run = replace(
        runs[0],
        canvases=rows("canvases"),
        masked=rows("masked"),
        proposals=rows("proposals"),
        confidence=rows("confidence"),
        unmasked=rows("unmasked"),
        revised=rows("revised"),
        origins=None if any(run.origins is None for run in runs) else rows("origins"),
        attention_mask=torch.cat([run.attention_mask for run in runs]),
        rows_ran=_ran(recordings),
        joined_at=_starts(runs),
        spans=tuple((min(starts), max(stops)) for starts, stops in _by_step([run.spans for run in runs])),
        # Of the longest run: the others lack the last steps.
        blocks=runs[at].blocks,
        computed=runs[at].computed,
        **_plans(recordings),
        part=first.run.part
        and replace(
            first.run.part,
            answer=torch.cat([part.answer for part in parts]),
            rows_ran=tuple(torch.cat([run.steps_in_all for run in runs]).tolist()),
        ),
        tokenizer=merged([run.tokenizer for run in runs]),
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


def _checked(recordings: Iterable[Fields], stored: Path | None) -> Sequence[Fields]:
    """The recordings, after each was compared with the first and with the longest of those before it.

    Raises:
        ValueError: they differ in more than their rows.
    """
    found: list[Fields] = []
    for one in recordings:
        if found:
            _check_alike(found[0], one, stored)
            longest = max(found, key=lambda each: len(each.steps))
            shorter, longer = sorted(_all_name_what_they_computed([longest, one]), key=lambda each: each.run.steps)
            _check_steps(shorter.run, longer.run, stored)
        found.append(one)
    return found


def _remedy(stored: Path | None, otherwise: str) -> str:
    """How recordings that cannot be joined are read: from their directory, where there is one."""
    if stored is None:
        return otherwise
    return (
        f"{stored} holds every one of them: read them with dlm_lens.RecordingSet, or one by its own directory, "
        f"such as {parts_of(stored)[0]}"
    )


def _check_alike(first: RecordingFields, other: RecordingFields, stored: Path | None) -> None:
    """Raise unless two recordings have the same reducers, layers, settings and, if they are parts, steps.

    Raises:
        ValueError: naming what differs.
    """
    names = ("specs", "layers", "heads", "sinks", "causal", "unpadded", "windows", "model", "hooks", "run_hooks")
    pairs = {name: (getattr(first, name), getattr(other, name)) for name in names}
    settings = first.run.settings, other.run.settings
    # An AR row ends with its last token, wherever the canvas of another one ends.
    of_batches = (*OF_BATCHES, "gen_length") if first.run.autoregressive else OF_BATCHES
    for name in {**settings[0], **settings[1]}:
        if name not in of_batches:
            pairs[f"the setting {name}"] = (settings[0].get(name), settings[1].get(name))
    pairs["steps"] = (_places(first.run), _places(other.run))
    for name, (one, two) in pairs.items():
        # Hooks of a user, and functions among the settings, may have addresses in their text.
        if one != two and ADDRESS.sub("", repr(one)) != ADDRESS.sub("", repr(two)):
            remedy = _remedy(stored, "join those that have the same")
            raise ValueError(f"recordings differ in {name}: {one} and {two}; {remedy}")


def _places(run: DenoisingRun) -> str:
    """Which steps of the whole run these are."""
    if run.part is None:
        return "all of the run"
    return f"{run.part.numbers} of the run, {run.part.block_numbers} of their blocks"


def _all_name_what_they_computed(recordings: Sequence[Fields]) -> Sequence[Fields]:
    """Where one cached run has spans, those that never used their cache say that every step computed all."""
    if not any(recording.run.computed for recording in recordings):
        return recordings
    return [
        recording
        if recording.run.computed
        else replace(recording, run=replace(recording.run, computed=(None,) * recording.run.steps))
        for recording in recordings
    ]


def _by_step(
    spans: Sequence[Sequence[tuple[int, int]]],
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The starts and the stops of all runs at every step."""
    for step in zip(*spans, strict=True):
        starts, stops = zip(*step, strict=True)
        yield starts, stops


def _check_steps(run: DenoisingRun, longest: DenoisingRun, stored: Path | None) -> None:
    """Raise unless two runs do the same at the steps that both have.

    Raises:
        ValueError: naming the first step at which they do not.
    """
    for step in range(run.steps):
        facts = [(one.blocks[step], one.computed and one.computed[step] is None) for one in (run, longest)]
        if facts[0] != facts[1]:
            remedy = _remedy(
                stored,
                "record these prompts in one batch (batch_size=None; under a hook that names positions, prompts of "
                "other lengths never share one), or with to= and read the batches with dlm_lens.RecordingSet",
            )
            raise ValueError(
                f"the batches are no single recording, since at step {step} one decodes block {facts[0][0]} and "
                f"another block {facts[1][0]}, or one of them computes what the other's cache keeps (the number of "
                f"steps of a block depends on its prompt and tokens); {remedy}"
            )


def _plans(recordings: Sequence[RecordingFields]) -> dict[str, Any]:
    """The settings and the planned steps of all runs; for each row where they are not the same.

    Blocks that are counted from the text are as many as a prompt needs, whatever the setting of the steps.
    """
    runs = [recording.run for recording in recordings]
    settings = {**runs[0].settings, "seeds": _seeds(recordings)}
    if runs[0].autoregressive and "gen_length" in settings:
        settings["gen_length"] = max(run.settings["gen_length"] for run in runs)
    own = [run.settings.get("steps") for run in runs]
    if len({*zip(own, (run.planned for run in runs), strict=True)}) == 1 and runs[0].rows_planned is None:
        return {"settings": settings, "planned": runs[0].planned}
    steps: list[int | None] = []
    planned: list[int] = []
    for run, given in zip(runs, own, strict=True):
        rows = len(run.tokens)
        steps += given if isinstance(given, tuple) else (given,) * rows
        planned += run.rows_planned or (run.planned or run.steps,) * rows
    if len(set(steps)) > 1:
        settings["steps"] = tuple(steps)
    return {"settings": settings, "planned": max(planned), "rows_planned": tuple(planned)}


def _seeds(recordings: Sequence[RecordingFields]) -> tuple[int, ...]:
    return tuple(seed for recording in recordings for seed in recording.run.settings.get("seeds", ()))


def _ran(recordings: Sequence[RecordingFields]) -> tuple[int, ...] | None:
    """The number of steps that each row ran; None if all ran the same number, which their canvases show."""
    ran = tuple(steps for recording in recordings for steps in recording.run.row_steps.tolist())
    same = set(ran) == {max(len(recording.steps) for recording in recordings)}
    return None if same and all(recording.run.rows_ran is None for recording in recordings) else ran


def _starts(runs: Sequence[DenoisingRun]) -> tuple[int, ...] | None:
    """Where each row's own canvas begins; None if all begin at 0."""
    starts = tuple(start for run in runs for start in run.joined_at or (0,) * len(run.tokens))
    return starts if any(starts) else None


def fitted(recording: Fields, shift: int, positions: int, longest: Fields) -> Fields:
    """A recording shifted right by `shift`, on canvases of `positions`, with the steps of the longest one."""
    run = recording.run
    padding = _Padding(shift, positions - run.tokens.shape[1] - shift, len(longest.steps) - run.steps)
    return replace(
        recording,
        run=_run_in(padding, run, longest.run),
        arrays={name: padding.array(recording, spec) for name, spec in recording.specs.items()},
        answer=padding.canvas(recording.answer, False),
        steps=longest.steps,
    )


def _run_in(padding: "_Padding", run: DenoisingRun, longest: DenoisingRun) -> DenoisingRun:
    """A run with padding; the steps that it lacks have the spans and blocks of the longest one."""
    last, length = run.canvases[-1], run.prompt_length + padding.before
    by = length - longest.prompt_length
    spans = [(start + padding.before, stop + padding.before) for start, stop in run.spans]
    spans += [(start + by, stop + by) for start, stop in longest.spans[run.steps :]]
    kept = [span and (span[0] + padding.before, span[1] + padding.before) for span in run.computed]
    kept += [span and (span[0] + by, span[1] + by) for span in longest.computed[run.steps :]]
    return replace(
        run,
        computed=tuple(kept),
        canvases=padding.steps(run.canvases, last),
        masked=padding.steps(run.masked, run.masked[-1]),
        proposals=padding.steps(run.proposals, last),
        confidence=padding.steps(run.confidence, torch.full(last.shape, -torch.inf), -torch.inf),
        unmasked=padding.steps(run.unmasked, torch.zeros_like(run.masked[-1])),
        revised=padding.steps(run.revised, torch.zeros_like(run.masked[-1])),
        attention_mask=padding.canvas(run.attention_mask, False),
        origins=padding.origins(run),
        prompt_length=length,
        joined_at=tuple(padding.before + start for start in run.joined_at or (0,) * len(run.tokens)),
        spans=tuple(spans),
        blocks=run.blocks + longest.blocks[run.steps :],
    )


@dataclass(frozen=True)
class _Padding:
    """The number of positions added before and after a canvas, and of steps added after a run."""

    before: int
    after: int
    steps_after: int

    def canvas(self, tensor: Tensor, value: float) -> Tensor:
        """A tensor over positions, its last axis."""
        if tensor.dtype == torch.bool:
            return torch.nn.functional.pad(tensor.byte(), (self.before, self.after)).bool()
        return torch.nn.functional.pad(tensor, (self.before, self.after), value=value)

    def steps(self, tensor: Tensor, last: Tensor, value: float = 0) -> Tensor:
        """A tensor [step, batch, position], with `last` repeated after its steps."""
        return self.canvas(torch.cat([tensor, last.expand(self.steps_after, *last.shape)]), value)

    def origins(self, run: DenoisingRun) -> Tensor | None:
        """`DenoisingRun.origins`: what is added has not moved."""
        if run.origins is None:
            return None
        return widened_origins(run.origins, before=self.before, after=self.after, steps=self.steps_after)

    def array(self, recording: RecordingFields, spec: ArraySpec) -> Tensor:
        """A statistic, NaN (-1 for integers; 0 for a present query's shares) where it is padded."""
        array, positions = recording.arrays[spec.name], recording.run.tokens.shape[1]
        for axis in ("query", "key"):
            if axis in spec.dims:
                array = self._widened(array, spec, axis, recording.sinks if axis == "key" else 0)
        if spec.positions:
            moved = torch.where(array >= positions, array + self.before + self.after, array + self.before)
            array = moved.where(array >= 0, array)
        return widened(with_zeros_(array, spec), spec.dims, {"step": len(array) + self.steps_after})

    def _widened(self, array: Tensor, spec: ArraySpec, axis: str, sinks: int) -> Tensor:
        at = spec.dims.index(axis)
        length = array.shape[at] - sinks
        own, rest = array.narrow(at, 0, length), array.narrow(at, length, sinks)
        own = widened(own, spec.dims, {axis: length + self.before}, front=True)
        own = widened(own, spec.dims, {axis: length + self.before + self.after})
        return torch.cat([own, rest], at)
