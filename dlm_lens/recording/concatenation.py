"""Several recordings as one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlm_lens.recording.arrays import ArraySpec, widened
from dlm_lens.recording.recording import Recording
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.token_text import merged


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
        for name in ("specs", "layers", "heads", "sinks", "causal", "unpadded", "windows", "model"):
            if getattr(other, name) != getattr(first, name):
                raise ValueError(f"recordings differ in {name}: {getattr(first, name)} and {getattr(other, name)}")
    front = max(r.prompt_length for r in recordings)
    behind = max(r.run.tokens.shape[1] - r.prompt_length for r in recordings)
    longest = max(recordings, key=lambda r: len(r.steps))
    parts = [_fitted(r, front - r.prompt_length, front + behind, longest) for r in recordings]
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
        attention_mask=torch.cat([run.attention_mask for run in runs]),
        rows_ran=_ran(recordings),
        # Those of the longest run: of the others the steps that they lack.
        spans=runs[at].spans,
        blocks=runs[at].blocks,
        settings={**runs[0].settings, "seeds": tuple(seed for r in recordings for seed in r.seeds)},
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


def _ran(recordings: Sequence[Recording]) -> tuple[int, ...] | None:
    """How many steps each row ran; None if all ran the same."""
    ran = tuple(steps for recording in recordings for steps in recording.run.row_steps.tolist())
    return None if set(ran) == {max(len(recording.steps) for recording in recordings)} else ran


def _fitted(recording: Recording, shift: int, positions: int, longest: Recording) -> Recording:
    """A recording moved to the right by `shift`, on canvases of `positions`, with the steps of the longest one."""
    run = recording.run
    frame = _Frame(shift, positions - run.tokens.shape[1] - shift, len(longest.steps) - run.steps)
    return replace(
        recording,
        run=_run_in(frame, run, longest.run),
        arrays={name: frame.array(recording, spec) for name, spec in recording.specs.items()},
        answer=frame.canvas(recording.answer, False),
        steps=longest.steps,
    )


def _run_in(frame: "_Frame", run: DenoisingRun, longest: DenoisingRun) -> DenoisingRun:
    """A run in a frame; the steps that it lacks have the spans and blocks of the longest one."""
    last, length = run.canvases[-1], run.prompt_length + frame.front
    by = length - longest.prompt_length
    spans = [(start + frame.front, stop + frame.front) for start, stop in run.spans]
    spans += [(start + by, stop + by) for start, stop in longest.spans[run.steps :]]
    return replace(
        run,
        canvases=frame.steps(run.canvases, last),
        masked=frame.steps(run.masked, run.masked[-1]),
        proposals=frame.steps(run.proposals, last),
        confidence=frame.steps(run.confidence, torch.full(last.shape, -torch.inf), -torch.inf),
        unmasked=frame.steps(run.unmasked, torch.zeros_like(run.masked[-1])),
        attention_mask=frame.canvas(run.attention_mask, False),
        prompt_length=length,
        spans=tuple(spans),
        blocks=run.blocks + longest.blocks[run.steps :],
    )


@dataclass(frozen=True)
class _Frame:
    """How many positions come in front of a canvas and behind it, and how many steps behind a run."""

    front: int
    behind: int
    more: int

    def canvas(self, tensor: Tensor, value: float) -> Tensor:
        """A tensor over positions, its last axis."""
        if tensor.dtype == torch.bool:
            return torch.nn.functional.pad(tensor.byte(), (self.front, self.behind)).bool()
        return torch.nn.functional.pad(tensor, (self.front, self.behind), value=value)

    def steps(self, tensor: Tensor, last: Tensor, value: float = 0) -> Tensor:
        """A tensor [step, batch, position], which stays at `last` behind its steps."""
        return self.canvas(torch.cat([tensor, last.expand(self.more, *last.shape)]), value)

    def array(self, recording: Recording, spec: ArraySpec) -> Tensor:
        """A statistic, blank where it is widened."""
        array, positions = recording.arrays[spec.name], recording.run.tokens.shape[1]
        for axis in ("query", "key"):
            if axis in spec.dims:
                array = self._widened(array, spec, axis, recording.sinks if axis == "key" else 0)
        if spec.positions:
            moved = torch.where(array >= positions, array + self.front + self.behind, array + self.front)
            array = moved.where(array >= 0, array)
        return widened(array, spec.dims, {"step": len(array) + self.more})

    def _widened(self, array: Tensor, spec: ArraySpec, axis: str, sinks: int) -> Tensor:
        at = spec.dims.index(axis)
        length = array.shape[at] - sinks
        own, rest = array.narrow(at, 0, length), array.narrow(at, length, sinks)
        own = widened(own, spec.dims, {axis: length + self.front}, front=True)
        own = widened(own, spec.dims, {axis: length + self.front + self.behind})
        return torch.cat([own, rest], at)
