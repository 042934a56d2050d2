"""Reading and writing recordings; arrays are read on their first use."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlm_lens.arguments import RULES, check_values, is_whole, rules_of
from dlm_lens.files.locks import held, other_files
from dlm_lens.files.paths import check_directory, check_utf8
from dlm_lens.files.sealed_json import DamagedFileError
from dlm_lens.placement import plain_defaults
from dlm_lens.printable import shown
from dlm_lens.recording.arrays import PADDED, ArraySpec, as_plain, blank, blank_ended_, from_plain, with_zeros_
from dlm_lens.recording.concatenation import joined
from dlm_lens.recording.directories import HEADER, check_recording
from dlm_lens.recording.recording_fields import RecordingFields
from dlm_lens.recording.schema import RunFacts
from dlm_lens.recording.shards import RUN, TENSORS, ShardDirectory
from dlm_lens.sampling import DenoisingRun, FinishedStep, Proposal, RunPart, StepPlan
from dlm_lens.sampling.algorithm_registry import algorithms
from dlm_lens.sampling.token_text import StoredTokenizer

RUN_TENSORS = ("canvases", "masked", "proposals", "confidence", "unmasked", "attention_mask")
OPTIONAL_RUN_TENSORS = ("revised", "origins")
"""Tensors that are stored only where they are not all False."""


MOST_PARTS = 2**20
"""Missing batches that are named; a header can announce more than memory has room for."""


class ShardArrays(Mapping[str, Tensor]):
    """Arrays that are read from their shards on first use, and then kept.

    Args:
        files: a shard per step.
        specs: descriptions of the arrays.
        sizes: length of the axes key and query, to which shorter steps are padded.
        running: which rows are not over at each step; what the shards hold of others is not read. None: all.
    """

    def __init__(
        self,
        files: Sequence[Path],
        specs: Mapping[str, ArraySpec],
        sizes: Mapping[str, int],
        running: Bool[Tensor, "step batch"] | None = None,
    ) -> None:
        self.files, self.specs, self.sizes = tuple(files), specs, dict(sizes)
        self.running = running
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            with plain_defaults():
                self._read[name] = self._stacked(self.specs[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def of_steps(self, steps: Sequence[int]) -> "ShardArrays":
        """The arrays of some steps, not read yet."""
        chosen = list(steps)
        running = None if self.running is None else self.running[chosen]
        return ShardArrays([self.files[step] for step in chosen], self.specs, self.sizes, running)

    def check(self, sizes: Mapping[str, int], sinks: int = 0) -> None:
        """Raise unless every shard holds these arrays, with consistent shapes and dtypes.

        Args:
            sizes: length of the axes that all arrays share; keys and queries may be fewer.
            sinks: the number of learned sink tokens, which are keys at every step.

        Raises:
            ValueError: naming the file.
        """
        kinds: dict[str, tuple[str, dict[str, int]]] = {}
        for file in self.files:
            with _opened(file) as shard:
                found = {name.removeprefix("array.") for name in shard.keys() if name.startswith("array.")}  # noqa: SIM118
                if found != set(self.specs):
                    raise DamagedFileError(
                        f"{file} holds the arrays {sorted(found)}, and run.json names {sorted(self.specs)}; "
                        "delete the recording and record again"
                    )
                for name, spec in self.specs.items():
                    part = shard.get_slice(f"array.{name}")
                    shape, kind = part.get_shape(), part.get_dtype()
                    lengths = dict(zip(spec.dims[1:], shape, strict=False))
                    own = {dim: size for dim, size in lengths.items() if dim not in PADDED}
                    fits = len(shape) == len(spec.dims) - 1 and all(
                        size <= sizes.get(dim, size) if dim in PADDED else size == sizes.get(dim, size)
                        for dim, size in lengths.items()
                    )
                    # Where a padded axis is empty, another may have any length in a file of no size.
                    fits &= lengths.get("key", sinks + 1) > sinks and lengths.get("query", 1) > 0
                    labels = all(
                        lengths.get(dim) == len(names) for dim, names in spec.labels.items() if dim in lengths
                    )
                    if not fits or not labels or kinds.setdefault(name, (kind, own)) != (kind, own):
                        raise DamagedFileError(
                            f"{file} holds {name} as {kind} {shape}, which does not fit the other files; delete "
                            "the recording and record again"
                        )

    def _stacked(self, spec: ArraySpec) -> Tensor:
        # Allocated once and filled: torch.stack would hold every step twice.
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
        if self.running is not None:
            blank_ended_([found], self.running)
        return with_zeros_(found, spec)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    check_utf8(file)
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(
            f"{file} is damaged or missing ({error}); delete the recording and record again"
        ) from None


def load_recording(path: Path, *, verify: bool = True) -> RecordingFields:
    """Read a finished recording; the rows of all batches in the directory.

    Raises:
        FileNotFoundError: the path holds no recording.
        ValueError: a batch or a step is missing, or a file is damaged.
    """
    parts = check_recording(path)
    loaded = [load_part(part, verify=verify) for part in parts]
    missing = missing_parts(path, parts)
    if missing:
        prompts = _batch_of(parts[0])["prompts"]
        there = sum(len(recording.rows) for recording in loaded)
        raise ValueError(
            f"{path} holds {there} of {prompts} prompts ({', '.join(missing[:3])}{', ...' if missing[3:] else ''} "
            "missing); record with the same arguments to continue, or read the others with dlm_lens.RecordingSet"
        )
    return joined(loaded, path)


def part_name(rows: Sequence[int]) -> str:
    """The directory name of a batch with these consecutive rows."""
    return f"rows-{rows[0]:05d}-{rows[-1]:05d}"


def missing_parts(path: Path, parts: Sequence[Path]) -> list[str]:
    """The batches that are missing because a process was killed before it began them, by rows that no batch has.

    Raises:
        ValueError: batches of different recordings, a directory with another batch's name, or more than
            `MOST_PARTS` missing batches.
    """
    if list(parts) == [path]:
        return []  # a batch on its own
    batches = [_batch_of(part) for part in parts]
    if all(batch is None for batch in batches):
        return []
    first = batches[0]
    for part, batch in zip(parts, batches, strict=True):
        if batch is None or any(batch[name] != first[name] for name in ("prompts", "size")):
            raise ValueError(f"{part} and {parts[0]} are batches of different recordings; move one of them")
        if part_name(range(*batch["rows"])) != part.name:
            raise ValueError(
                f"{part} holds the rows {batch['rows'][0]} to {batch['rows'][1] - 1}; rename it to them"
            )
    prompts, size = first["prompts"], max(1, first["size"])
    # Batches may be smaller than `size`: where prompts of unequal length are kept apart.
    gaps, done = [], 0
    for begin, end in [*sorted(tuple(batch["rows"]) for batch in batches), (prompts, prompts)]:
        gaps.append(range(done, begin, size))
        done = max(done, end)
    count = sum(map(len, gaps))
    if count > MOST_PARTS:
        raise DamagedFileError(
            f"{parts[0] / HEADER} is of {prompts} prompts in batches of {size}, of which {count} are missing "
            f"({MOST_PARTS} is the most); delete {path} and record again"
        )
    return [part_name(range(start, min(start + size, gap.stop))) for gap in gaps for start in gap]


def _batch_of(part: Path) -> Any:
    return ShardDirectory(part).header().get("batch")


def load_part(path: Path, tokenizer: Any = None, *, verify: bool = True) -> RecordingFields:
    """Read one batch.

    Args:
        path: of the batch.
        tokenizer: decodes its tokens; None for the token texts in the file.
        verify: compare the shards with their checksums.

    Raises:
        ValueError: the batch is not finished, or damaged.
    """
    shards = ShardDirectory(path)
    lines = shards.lines()
    if not shards.finished:
        raise ValueError(
            f"{path} is not finished (it has {len(lines)} steps); record with the same arguments to continue"
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
        arrays.running = run.running
        arrays.sizes |= {"key": positions + facts.sinks, "query": positions}
        arrays.check(_sizes(facts, positions), facts.sinks)
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
            hooks=None if facts.hooks is None else tuple(facts.hooks),
        )
    except _ContradictionError as error:
        raise DamagedFileError(f"{path / RUN} is damaged ({error}); {shards.remedy}") from None


class _ContradictionError(Exception):
    """Files of a recording that contradict each other."""


def _sizes(facts: RunFacts, positions: int) -> dict[str, int]:
    """Length of the axes that all arrays of a step share; keys and queries may be fewer."""
    found = {"batch": len(facts.rows), "layer": len(facts.layers), "key": positions + facts.sinks}
    return found | {"query": positions} | ({} if facts.heads is None else {"head": len(facts.heads)})


def _check(facts: RunFacts, held: Mapping[str, Tensor]) -> None:
    """Raise if the run's tensors and facts contradict each other."""
    missing = [name for name in (*RUN_TENSORS, "answer") if name not in held]
    if missing:
        raise _ContradictionError(f"{TENSORS} has no {missing[0]}")
    steps, rows = facts.steps_in_all, len(facts.rows)
    positions = held["canvases"].shape[-1] if held["canvases"].ndim else 0
    canvas = (rows, positions)
    wanted = {"canvases": (steps + 1, *canvas), "masked": (steps + 1, *canvas), "answer": canvas}
    wanted |= dict.fromkeys(("proposals", "confidence", "unmasked"), (steps, *canvas))
    wanted["attention_mask"] = canvas
    wanted |= {name: (steps, *canvas) for name in OPTIONAL_RUN_TENSORS if name in held}
    for name, shape in wanted.items():
        kind = torch.int64 if name in ("canvases", "proposals", "origins") else torch.bool
        fits = held[name].is_floating_point() if name == "confidence" else held[name].dtype == kind
        if tuple(held[name].shape) != shape or not fits:
            raise _ContradictionError(
                f"{name} in {TENSORS} is {held[name].dtype} {list(held[name].shape)}; {list(shape)} would fit"
            )
    if (moved := held.get("origins")) is not None and bool(((moved < -1) | (moved >= positions)).any()):
        raise _ContradictionError(f"origins in {TENSORS} are no positions of a canvas of {positions}")
    if facts.rows_ran is not None and (len(facts.rows_ran) != rows or max(facts.rows_ran, default=0) > steps):
        raise _ContradictionError(f"rows_ran {facts.rows_ran} for {rows} rows and {steps} steps")
    if facts.rows_ran_in_all is not None and len(facts.rows_ran_in_all) != rows:
        raise _ContradictionError(f"rows_ran_in_all {facts.rows_ran_in_all} for {rows} rows")
    _check_settings(facts.settings, rows)
    starts = facts.joined_at
    if starts is not None and (len(starts) != rows or max(starts, default=0) > facts.prompt_length):
        raise _ContradictionError(f"joined_at {starts} for {rows} rows and a prompt of {facts.prompt_length}")
    if (planned := facts.rows_planned) is not None:
        own = facts.settings.get("steps")
        if len(planned) != rows or (isinstance(own, list) and len(own) != rows):
            raise _ContradictionError(f"rows_planned {planned} and the setting steps {own} for {rows} rows")
    counts = {name: len(getattr(facts, name)) for name in ("steps", "spans", "blocks")}
    counts |= {name: len(found) for name in ("computed", "block_numbers") if (found := getattr(facts, name))}
    for name, count in counts.items():
        if count != steps:
            raise _ContradictionError(f"{count} {name} for {steps} steps")
    if facts.prompt_length > positions or any(
        not a <= b <= positions for a, b in [*facts.spans, *filter(None, facts.computed)]
    ):
        raise _ContradictionError(f"the prompt or a block ends after the {positions} positions")
    if facts.windows and (len(facts.windows) != len(facts.layers) or facts.sinks):
        raise _ContradictionError(f"sliding windows of {len(facts.windows)} layers for {len(facts.layers)} layers")
    if len({spec.name for spec in facts.specs}) != len(facts.specs):
        raise _ContradictionError("two arrays have one name")


def _check_settings(settings: Mapping[str, Any], rows: int) -> None:
    """Raise for settings of a run that its sampler could not have had; steps are a list where batches differ."""
    seeds = settings.get("seeds")
    known = algorithms().get(str(settings.get("sampler")))
    rules = {**RULES, **({} if known is None else rules_of(known.settings))}
    alike = {name: value for name, value in settings.items() if name != "steps" or not isinstance(value, list)}
    try:
        check_values(alike, rules)
    except ValueError as error:
        raise _ContradictionError(f"settings: {error}") from None
    whole = isinstance(seeds, list) and all(map(is_whole, seeds))
    if seeds is not None and (not whole or (known is not None and len(seeds) != rows)):
        raise _ContradictionError(f"the seeds {shown(seeds)} for {rows} rows")


def _run_of(facts: RunFacts, held: Mapping[str, Tensor], tokenizer: Any) -> DenoisingRun:
    return DenoisingRun(
        **{name: held[name] for name in (*RUN_TENSORS, *OPTIONAL_RUN_TENSORS) if name in held},
        prompt_length=facts.prompt_length,
        spans=tuple((start, stop) for start, stop in facts.spans),
        blocks=tuple(facts.blocks),
        settings={n: tuple(v) if isinstance(v, list) else v for n, v in facts.settings.items()},
        eos_token_ids=tuple(facts.eos_token_ids),
        tokenizer=_tokenizer(facts) if tokenizer is None else tokenizer,
        rows_ran=None if facts.rows_ran is None else tuple(facts.rows_ran),
        joined_at=None if facts.joined_at is None else tuple(facts.joined_at),
        rows_planned=None if facts.rows_planned is None else tuple(facts.rows_planned),
        computed=tuple(None if span is None else (span[0], span[1]) for span in facts.computed),
        model=facts.model,
        planned=facts.steps_planned,
        part=_part(facts, held),
        rows=None,  # `RecordingFields` gives the run its own
    )


def _part(facts: RunFacts, held: Mapping[str, Tensor]) -> RunPart | None:
    """The place of these steps in the whole run, if they are a part of one."""
    if not facts.block_numbers:
        return None
    ran = None if facts.rows_ran_in_all is None else tuple(facts.rows_ran_in_all)
    return RunPart(tuple(facts.steps), tuple(facts.block_numbers), held["answer"], ran)


def _tokenizer(facts: RunFacts) -> StoredTokenizer | None:
    """A tokenizer from the token texts in the file; None if the model had none."""
    words = {int(i): word for i, word in facts.words.items()}
    decoding = None if facts.decoding is None else facts.decoding.model_dump()
    return StoredTokenizer.read(words, decoding) if words else None


def write_end(
    shards: ShardDirectory, recording: RecordingFields, specs: Sequence[ArraySpec], rows: Sequence[int]
) -> None:
    """Write all of a recording but its arrays, which the shards hold; `specs` describe them."""
    run = recording.run
    facts = {
        "steps_in_all": run.steps,
        "prompt_length": run.prompt_length,
        "spans": run.spans,
        "blocks": run.blocks,
        **({"computed": run.computed} if run.computed else {}),
        "settings": dict(run.settings),
        "eos_token_ids": run.eos_token_ids,
        "specs": [as_plain(spec) for spec in specs],
        "rows": list(rows),
        "versions": dict(recording.versions),
        "words": dict(recording.words),
        "decoding": _decoding(recording),
        "rows_ran": run.rows_ran,
        **({} if run.joined_at is None else {"joined_at": run.joined_at}),
        **({} if run.rows_planned is None else {"rows_planned": run.rows_planned}),
        **({} if run.planned is None else {"steps_planned": run.planned}),
        **({} if run.part is None else {"block_numbers": run.part.block_numbers}),
        **({} if run.part is None else {"rows_ran_in_all": run.part.rows_ran}),
        **({"hooks": recording.hooks} if recording.hooks != recording.run_hooks else {}),
    }
    names = ("layers", "steps", "heads", "sinks", "causal", "unpadded", "windows", "model", "scale", "query_heads")
    facts |= {name: getattr(recording, name) for name in names}
    tensors = {name: getattr(run, name) for name in RUN_TENSORS}
    optional = {name: getattr(run, name) for name in OPTIONAL_RUN_TENSORS}
    tensors |= {name: each for name, each in optional.items() if each is not None and bool(each.any())}
    shards.finish(facts, {**tensors, "answer": recording.answer})


def _decoding(recording: RecordingFields) -> dict[str, Any] | None:
    if not recording.words or recording.run.tokenizer is None:
        return None
    return StoredTokenizer.of(recording.run.tokenizer, recording.words).facts()


def save_recording(recording: RecordingFields, path: Path, *, replace: bool = False) -> Path:
    """Write a recording from memory, completely or not at all.

    Args:
        recording: to be written.
        path: its directory.
        replace: whether to replace a recording that is there.

    Raises:
        FileExistsError: the directory is not empty.
        ValueError: another process writes there.
        OSError: the disk is full or read-only; the files written so far are removed.
    """
    check_directory(path)
    with held(path):
        shards = ShardDirectory(path)
        shards.remove_stale()
        if shards.half_saved or (replace and (path / HEADER).exists()):
            shards.clear()
        if other_files(path):
            raise FileExistsError(f"{path} is not empty; give another directory")
        try:
            _save(recording, shards)
        except BaseException:
            shards.clear()
            raise
    return path


def _save(recording: RecordingFields, shards: ShardDirectory) -> None:
    shards.begin({"saved": True})
    run = recording.run
    for index in range(run.steps):
        plan = StepPlan(
            index,
            run.steps,
            run.blocks[index],
            run.spans[index],
            run.steps - index,
            computed=run.computed[index] if run.computed else None,
        )
        proposal = Proposal(run.proposals[index], run.confidence[index])
        revised = run.revised[index] if bool(run.revised[index].any()) else None
        origins = None if run.origins is None else run.origins[index]
        canvas, masked, unmasked = run.canvases[index], run.masked[index], run.unmasked[index]
        step = FinishedStep(plan, canvas, masked, proposal, unmasked, revised, origins)
        shards.add(step, None, {name: recording.arrays[name][index] for name in recording.specs})
    write_end(shards, recording, tuple(recording.specs.values()), recording.rows)
