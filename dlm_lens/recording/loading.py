"""Recordings from and to their files; arrays are read when asked for."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dlm_lens.recording.arrays import ArraySpec, as_plain, blank, from_plain
from dlm_lens.recording.joining import joined
from dlm_lens.recording.result import Recording
from dlm_lens.recording.shards import HEADER, RUN, TENSORS, ShardDirectory
from dlm_lens.sampling import Denoised, FinishedStep, Proposal, StepPlan

RUN_TENSORS = ("canvases", "masked", "proposals", "confidence", "selected", "attention_mask")


class ShardArrays(Mapping[str, Tensor]):
    """Arrays that are read from their shards when asked for, and then kept.

    Args:
        files: a shard per step.
        specs: what the arrays are.
        sizes: length of the axes key and query, to which shorter steps are widened.
    """

    def __init__(self, files: Sequence[Path], specs: Mapping[str, ArraySpec], sizes: Mapping[str, int]) -> None:
        self.files, self.specs, self.sizes = tuple(files), specs, dict(sizes)
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = self._stacked(self.specs[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def of_steps(self, steps: Sequence[int]) -> "ShardArrays":
        """The arrays of some steps, none of them read yet."""
        return ShardArrays([self.files[step] for step in steps], self.specs, self.sizes)

    def _stacked(self, spec: ArraySpec) -> Tensor:
        # Allocated once and filled: stacking a list would hold every step twice.
        found: Tensor | None = None
        for index, file in enumerate(self.files):
            with safe_open(file, framework="pt") as shard:
                step = shard.get_tensor(f"array.{spec.name}")
            if found is None:
                sizes = zip(spec.dims[1:], step.shape, strict=True)
                shape = [self.sizes.get(name, size) for name, size in sizes]
                found = torch.full((len(self.files), *shape), blank(step.dtype), dtype=step.dtype)
            parts = tuple(slice(0, min(a, b)) for a, b in zip(step.shape, found.shape[1:], strict=True))
            found[index][parts] = step[parts]
        if found is None:
            raise ValueError("this recording has no steps")
        return found


def load_recording(path: Path) -> Recording:
    """A finished recording; of several batches in one directory, their rows in one Recording.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: it is not finished, or damaged.
    """
    parts = parts_of(path)
    if not parts:
        raise FileNotFoundError(f"{path} holds no recording; dlm_lens.record(..., to=) writes one")
    return joined([load_part(part) for part in parts])


def parts_of(path: Path) -> list[Path]:
    """The directories of a recording: itself, or its batches in the order of their rows."""
    if (path / HEADER).exists():
        return [path]
    return sorted(part.parent for part in path.glob(f"*/{HEADER}"))


def load_part(path: Path, tokenizer: Any = None) -> Recording:
    """One batch; `tokenizer` decodes `run.texts`.

    Raises:
        ValueError: it is not finished, or damaged.
    """
    shards = ShardDirectory(path)
    lines = shards.lines()
    if not shards.finished:
        raise ValueError(
            f"{path} is not finished ({len(lines)} steps are there); record with the same arguments to go on"
        )
    facts = shards.facts(RUN)
    held = shards.tensors(TENSORS)
    if len(lines) != facts["steps_in_all"]:
        raise ValueError(f"{path} has {len(lines)} of {facts['steps_in_all']} steps; delete it and record again")
    run = _run_of(facts, held, tokenizer)
    specs = {plain["name"]: from_plain(plain) for plain in facts["specs"]}
    positions = run.tokens.shape[1]
    sizes = {"key": positions + facts["sinks"], "query": positions}
    heads = facts["heads"]
    return Recording(
        run=run,
        arrays=ShardArrays([path / line["file"] for line in lines], specs, sizes),
        specs=specs,
        answer=held["answer"],
        heads=None if heads is None else tuple(heads),
        words={int(i): word for i, word in facts["words"].items()},
        layers=tuple(facts["layers"]),
        steps=tuple(facts["steps"]),
        rows=tuple(facts["rows"]),
        sinks=facts["sinks"],
        causal=facts["causal"],
        unpadded=facts["unpadded"],
        model=facts["model"],
        versions=facts["versions"],
        scale=facts["scale"],
        query_heads=facts["query_heads"],
    )


def _run_of(facts: Mapping[str, Any], held: Mapping[str, Tensor], tokenizer: Any) -> Denoised:
    return Denoised(
        **{name: held[name] for name in RUN_TENSORS},
        prompt_length=facts["prompt_length"],
        spans=tuple((start, stop) for start, stop in facts["spans"]),
        blocks=tuple(facts["blocks"]),
        settings={n: tuple(v) if isinstance(v, list) else v for n, v in facts["settings"].items()},
        eos_token_ids=tuple(facts["eos_token_ids"]),
        tokenizer=tokenizer,
    )


def write_end(
    shards: ShardDirectory, recording: Recording, specs: Sequence[ArraySpec], rows: Sequence[int]
) -> None:
    """Write what a recording is beside its arrays, whose `specs` may be on the disk only."""
    run = recording.run
    facts = {
        "steps_in_all": run.steps,
        "prompt_length": run.prompt_length,
        "spans": run.spans,
        "blocks": run.blocks,
        "settings": dict(run.settings),
        "eos_token_ids": run.eos_token_ids,
        "specs": [as_plain(spec) for spec in specs],
        "rows": list(rows),
        "versions": dict(recording.versions),
        "words": dict(recording.words),
    }
    names = ("layers", "steps", "heads", "sinks", "causal", "unpadded", "model", "scale", "query_heads")
    facts |= {name: getattr(recording, name) for name in names}
    shards.finish(facts, {**{name: getattr(run, name) for name in RUN_TENSORS}, "answer": recording.answer})


def save_recording(recording: Recording, path: Path) -> Path:
    """Write a recording that is in memory.

    Raises:
        FileExistsError: the directory holds something already.
    """
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty; give another directory")
    shards = ShardDirectory(path)
    shards.begin({"saved": True})
    run = recording.run
    for index in range(run.steps):
        plan = StepPlan(index, run.steps, run.blocks[index], run.spans[index], run.steps - index)
        proposal = Proposal(run.proposals[index], run.confidence[index])
        step = FinishedStep(plan, run.canvases[index], run.masked[index], proposal, run.selected[index])
        shards.add(step, None, {name: recording.arrays[name][index] for name in recording.specs})
    write_end(shards, recording, tuple(recording.specs.values()), recording.rows)
    return path
