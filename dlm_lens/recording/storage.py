"""Recordings from and to their files; arrays are read when asked for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlm_lens.files.locks import held
from dlm_lens.files.sealed_json import DamagedFileError
from dlm_lens.recording.arrays import PADDED, ArraySpec, as_plain, blank, from_plain
from dlm_lens.recording.concatenation import joined
from dlm_lens.recording.directories import HEADER, check_recording
from dlm_lens.recording.recording_fields import RecordingFields
from dlm_lens.recording.schema import RunFacts
from dlm_lens.recording.shards import RUN, TENSORS, ShardDirectory
from dlm_lens.sampling import DenoisingRun, FinishedStep, Proposal, StepPlan
from dlm_lens.sampling.token_text import StoredTokenizer

RUN_TENSORS = ("canvases", "masked", "proposals", "confidence", "unmasked", "attention_mask")


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

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise unless every shard holds these arrays, in sizes and kinds that fit each other.

        Raises:
            ValueError: naming the file.
        """
        kinds: dict[str, tuple[str, dict[str, int]]] = {}
        for file in self.files:
            with _opened(file) as shard:
                found = {name.removeprefix("array.") for name in shard.keys() if name.startswith("array.")}  # noqa: SIM118
                if found != set(self.specs):
                    raise DamagedFileError(
                        f"{file} holds the arrays {sorted(found)}, and run.json tells of {sorted(self.specs)}; "
                        "delete the recording and record again"
                    )
                for name, spec in self.specs.items():
                    part = shard.get_slice(f"array.{name}")
                    shape, kind = part.get_shape(), part.get_dtype()
                    told = dict(zip(spec.dims[1:], shape, strict=False))
                    own = {dim: size for dim, size in told.items() if dim not in PADDED}
                    fits = len(shape) == len(spec.dims) - 1 and all(
                        size <= sizes.get(dim, size) if dim in PADDED else size == sizes.get(dim, size)
                        for dim, size in told.items()
                    )
                    labels = all(told.get(dim) == len(names) for dim, names in spec.labels.items() if dim in told)
                    if not fits or not labels or kinds.setdefault(name, (kind, own)) != (kind, own):
                        raise DamagedFileError(
                            f"{file} holds {name} as {kind} {shape}, which does not fit the other files; delete "
                            "the recording and record again"
                        )

    def _stacked(self, spec: ArraySpec) -> Tensor:
        # Allocated once and filled: stacking a list would hold every step twice.
        found: Tensor | None = None
        for index, file in enumerate(self.files):
            with _opened(file) as shard:
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


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(
            f"{file} is damaged or missing ({error}); delete the recording and record again"
        ) from None


def load_recording(path: Path, *, verify: bool = True) -> RecordingFields:
    """A finished recording; of several batches in one directory, their rows in one Recording.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: it is not finished (a batch or a step is missing), or damaged.
    """
    parts = check_recording(path)
    loaded = [load_part(part, verify=verify) for part in parts]
    missing = missing_parts(path, parts)
    if missing:
        prompts = _batch_of(parts[0])["prompts"]
        there = sum(len(recording.rows) for recording in loaded)
        raise ValueError(
            f"{path} holds {there} of {prompts} prompts ({', '.join(missing[:3])}{', ...' if missing[3:] else ''} "
            "not there); record with the same arguments to go on, or read what is there with dlm_lens.RecordingSet"
        )
    return joined(loaded)


def part_name(rows: Sequence[int]) -> str:
    """The directory of a batch with these rows, which follow each other."""
    return f"rows-{rows[0]:05d}-{rows[-1]:05d}"


def missing_parts(path: Path, parts: Sequence[Path]) -> list[str]:
    """The batches that a recording lacks: a process was killed before it began them.

    Raises:
        ValueError: batches of different recordings, or one in another's place.
    """
    if list(parts) == [path]:
        return []  # a batch on its own
    batches = [_batch_of(part) for part in parts]
    if all(batch is None for batch in batches):
        return []
    first = batches[0]
    for part, batch in zip(parts, batches, strict=True):
        if batch is None or any(batch[name] != first[name] for name in ("prompts", "size")):
            raise ValueError(f"{part} is no batch of the recording that {parts[0]} is of; take it away")
        if part_name(range(*batch["rows"])) != part.name:
            raise ValueError(
                f"{part} holds the rows {batch['rows'][0]} to {batch['rows'][1] - 1}; give it their name"
            )
    prompts, size = first["prompts"], max(1, first["size"])
    there = {part.name for part in parts}
    wanted = [part_name(range(start, min(start + size, prompts))) for start in range(0, prompts, size)]
    return [name for name in wanted if name not in there]


def _batch_of(part: Path) -> Any:
    return ShardDirectory(part).header().get("batch")


def load_part(path: Path, tokenizer: Any = None, *, verify: bool = True) -> RecordingFields:
    """One batch; `tokenizer` decodes its tokens, by default the texts in the file.

    Without `verify` the checksums of the shards are not compared.

    Raises:
        ValueError: it is not finished, or damaged.
    """
    shards = ShardDirectory(path)
    lines = shards.lines()
    if not shards.finished:
        raise ValueError(
            f"{path} is not finished ({len(lines)} steps are there); record with the same arguments to go on"
        )
    facts = shards.run_facts()
    if len(lines) != facts.steps_in_all:
        raise ValueError(f"{path} has {len(lines)} of {facts.steps_in_all} steps; {shards.remedy}")
    shards.check_files(facts)
    if verify:
        shards.check_shards(lines)
    held = shards.tensors(TENSORS)
    specs = {spec.name: from_plain(spec.model_dump()) for spec in facts.specs}
    arrays = ShardArrays([path / line.file for line in lines], specs, {})
    try:
        _check(facts, held)
        run = _run_of(facts, held, tokenizer)
        positions = run.tokens.shape[1]
        arrays.sizes |= {"key": positions + facts.sinks, "query": positions}
        arrays.check(_sizes(facts, positions))
        return RecordingFields(
            run=run,
            arrays=arrays,
            specs=specs,
            answer=held["answer"],
            heads=None if facts.heads is None else tuple(facts.heads),
            words={int(i): word for i, word in facts.words.items()},
            layers=tuple(facts.layers),
            steps=tuple(facts.steps),
            rows=tuple(facts.rows),
            sinks=facts.sinks,
            causal=facts.causal,
            unpadded=facts.unpadded,
            windows=tuple(facts.windows),
            model=facts.model,
            versions=facts.versions,
            scale=facts.scale,
            query_heads=facts.query_heads,
        )
    except _ContradictionError as error:
        raise DamagedFileError(f"{path / RUN} is damaged ({error}); {shards.remedy}") from None


class _ContradictionError(Exception):
    """Files of a recording that do not fit each other."""


def _sizes(facts: RunFacts, positions: int) -> dict[str, int]:
    """Length of every axis that the arrays of a step share; keys and queries may be fewer."""
    found = {"batch": len(facts.rows), "layer": len(facts.layers), "key": positions + facts.sinks}
    return found | {"query": positions} | ({} if facts.heads is None else {"head": len(facts.heads)})


def _check(facts: RunFacts, held: Mapping[str, Tensor]) -> None:
    """Raise unless the run's tensors and facts fit each other."""
    missing = [name for name in (*RUN_TENSORS, "answer") if name not in held]
    if missing:
        raise _ContradictionError(f"{TENSORS} has no {missing[0]}")
    steps, rows = facts.steps_in_all, len(facts.rows)
    positions = held["canvases"].shape[-1] if held["canvases"].ndim else 0
    canvas = (rows, positions)
    wanted = {"canvases": (steps + 1, *canvas), "masked": (steps + 1, *canvas), "answer": canvas}
    wanted |= dict.fromkeys(("proposals", "confidence", "unmasked"), (steps, *canvas))
    wanted["attention_mask"] = canvas
    for name, shape in wanted.items():
        kind = torch.int64 if name in ("canvases", "proposals") else torch.bool
        fits = held[name].is_floating_point() if name == "confidence" else held[name].dtype == kind
        if tuple(held[name].shape) != shape or not fits:
            raise _ContradictionError(
                f"{name} in {TENSORS} is {held[name].dtype} {list(held[name].shape)}; {list(shape)} would fit"
            )
    if facts.rows_ran is not None and (len(facts.rows_ran) != rows or max(facts.rows_ran, default=0) > steps):
        raise _ContradictionError(f"rows_ran {facts.rows_ran} for {rows} rows and {steps} steps")
    counts = {name: len(getattr(facts, name)) for name in ("steps", "spans", "blocks")}
    for name, count in counts.items():
        if count != steps:
            raise _ContradictionError(f"{count} {name} for {steps} steps")
    if facts.prompt_length > positions or any(not a <= b <= positions for a, b in facts.spans):
        raise _ContradictionError(f"the prompt or a block ends after the {positions} positions")
    if facts.windows and (len(facts.windows) != len(facts.layers) or not facts.causal or facts.sinks):
        raise _ContradictionError(f"sliding windows of {len(facts.windows)} layers for {len(facts.layers)} layers")
    if len({spec.name for spec in facts.specs}) != len(facts.specs):
        raise _ContradictionError("two arrays have one name")


def _run_of(facts: RunFacts, held: Mapping[str, Tensor], tokenizer: Any) -> DenoisingRun:
    return DenoisingRun(
        **{name: held[name] for name in RUN_TENSORS},
        prompt_length=facts.prompt_length,
        spans=tuple((start, stop) for start, stop in facts.spans),
        blocks=tuple(facts.blocks),
        settings={n: tuple(v) if isinstance(v, list) else v for n, v in facts.settings.items()},
        eos_token_ids=tuple(facts.eos_token_ids),
        tokenizer=_tokenizer(facts) if tokenizer is None else tokenizer,
        rows_ran=None if facts.rows_ran is None else tuple(facts.rows_ran),
    )


def _tokenizer(facts: RunFacts) -> StoredTokenizer | None:
    """The texts of the file's tokens; None where the model had no tokenizer."""
    words = {int(i): word for i, word in facts.words.items()}
    decoding = None if facts.decoding is None else facts.decoding.model_dump()
    return StoredTokenizer.read(words, decoding) if words else None


def write_end(
    shards: ShardDirectory, recording: RecordingFields, specs: Sequence[ArraySpec], rows: Sequence[int]
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
        "decoding": _decoding(recording),
        "rows_ran": run.rows_ran,
    }
    names = ("layers", "steps", "heads", "sinks", "causal", "unpadded", "windows", "model", "scale", "query_heads")
    facts |= {name: getattr(recording, name) for name in names}
    shards.finish(facts, {**{name: getattr(run, name) for name in RUN_TENSORS}, "answer": recording.answer})


def _decoding(recording: RecordingFields) -> dict[str, Any] | None:
    """What decodes the words beside themselves."""
    if not recording.words or recording.run.tokenizer is None:
        return None
    return StoredTokenizer.of(recording.run.tokenizer, recording.words).facts()


def save_recording(recording: RecordingFields, path: Path, *, replace: bool = False) -> Path:
    """Write a recording that is in memory, whole or not at all; `replace` takes a recording's place.

    Raises:
        FileExistsError: the directory holds something already.
        ValueError: another process writes there.
        OSError: the disk is full, or takes no files; what was written is removed.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; give a directory")
    there = path.exists()
    with held(path):
        shards = ShardDirectory(path)
        shards.remove_stale()
        if shards.half_saved or (replace and (path / HEADER).exists()):
            shards.clear()
        if any(path.iterdir()):
            raise FileExistsError(f"{path} is not empty; give another directory")
        try:
            _save(recording, shards)
        except BaseException:
            shards.clear()
            if not there:
                path.rmdir()
            raise
    return path


def _save(recording: RecordingFields, shards: ShardDirectory) -> None:
    shards.begin({"saved": True})
    run = recording.run
    for index in range(run.steps):
        plan = StepPlan(index, run.steps, run.blocks[index], run.spans[index], run.steps - index)
        proposal = Proposal(run.proposals[index], run.confidence[index])
        step = FinishedStep(plan, run.canvases[index], run.masked[index], proposal, run.unmasked[index])
        shards.add(step, None, {name: recording.arrays[name][index] for name in recording.specs})
    write_end(shards, recording, tuple(recording.specs.values()), recording.rows)
