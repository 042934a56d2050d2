"""A recording on disk: a safetensors shard per finished step, a manifest line for each, and the finished run.

header.json            the request; a run is continued only with an equal one
step-00000.safetensors arrays of a step, its canvas and proposal, and the state after it
manifest.jsonl         a line per complete shard, with its digest
run.safetensors        the tensors of the run
run.json               its other data, and the digests of the files; written last, when the run has ended
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from dlm_lens.files.atomic_writes import open_to_append, remove_stale, replacing
from dlm_lens.files.locks import other_files
from dlm_lens.files.sealed_json import (
    CHECKSUM,
    DamagedFileError,
    append_lines,
    file_bytes,
    fitted,
    line_of,
    parsed,
    read_lines,
    sealed,
    unsealed,
)
from dlm_lens.files.tensor_files import WrittenFile, check_digest, read_tensors, write_tensors
from dlm_lens.recording.directories import HEADER
from dlm_lens.recording.model_identity import in_both
from dlm_lens.recording.schema import FORMAT, Header, ManifestLine, RunFacts, SavedHeader
from dlm_lens.sampling import FinishedStep, Proposal, Resumption, RunState, StepPlan

MANIFEST, RUN, TENSORS = "manifest.jsonl", "run.json", "run.safetensors"
_OWN = re.compile(r"(header\.json|manifest\.jsonl|run\.json|run\.safetensors|step-\d{5,}\.safetensors)")
_LEFT = re.compile(r"\.(header|manifest|run|step-\d+)\..*")
"""Names of temporary files of earlier versions."""


def shard_name(step: int) -> str:
    """The file of a step."""
    return f"step-{step:05d}.safetensors"


@dataclass(frozen=True)
class ShardDirectory:
    """The files of one recording; writes are atomic and flushed to the disk before the manifest names them."""

    path: Path

    @property
    def remedy(self) -> str:
        """The advice in an error about a damaged file."""
        return f"delete {self.path} and record again"

    def begin(self, request: Mapping[str, Any]) -> None:
        """Write the request, or compare it with the stored one.

        Raises:
            ValueError: the directory holds the recording of another request, or of another format.
            FileExistsError: it holds other files.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        plain = json.loads(json.dumps({"format": FORMAT, **request}, allow_nan=False))
        if (self.path / HEADER).exists():
            _check_same(self.path, self.header(), plain)
        elif other_files(self.path):
            raise FileExistsError(f"{self.path} is not empty and holds no recording; give another directory")
        else:
            self.remove_stale()
            self.write(HEADER, sealed(plain), indent=1)

    def forget(self) -> None:
        """Delete the header of a refused request without steps, so that a corrected one can use the directory."""
        if not (self.path / MANIFEST).exists():
            (self.path / HEADER).unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()

    def clear(self) -> None:
        """Delete every file of the recording, in the reverse order of writing; other files stay."""
        self.remove_stale()
        own = [path for path in self.path.iterdir() if _OWN.fullmatch(path.name)]
        for path in sorted(own, key=lambda path: (path.name != RUN, path.name == HEADER)):
            path.unlink()

    def remove_stale(self) -> None:
        """Delete temporary files of killed processes."""
        remove_stale(self.path)
        for path in self.path.iterdir():
            if _LEFT.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()

    @property
    def finished(self) -> bool:
        """Whether the run has ended and all files are written."""
        return (self.path / RUN).exists()

    @property
    def half_saved(self) -> bool:
        """Whether a process was killed while it saved a recording from memory here."""
        return not self.finished and (self.path / HEADER).exists() and "saved" in self.header()

    def header(self) -> dict[str, Any]:
        """The stored request, without the checksum.

        Raises:
            ValueError: the header is damaged, or of another format.
        """
        where = self.path / HEADER
        found = parsed(file_bytes(where, self.remedy), where, self.remedy)
        if type(found.get("format")) is not int or found["format"] != FORMAT:
            raise DamagedFileError(
                f"{where} has the format {found.get('format')!r:.80}, and this version of dlm_lens reads {FORMAT}; "
                "record again, or read it with the version that wrote it"
            )
        plain = dict(found)
        plain.pop(CHECKSUM, None)
        fitted(SavedHeader if "saved" in plain else Header, plain, where, self.remedy)
        return unsealed(found, where, self.remedy)

    def seeds(self) -> list[int] | None:
        """The seeds of the stored request; None if there is none."""
        if not (self.path / HEADER).exists():
            return None
        found: list[int] | None = self.header().get("settings", {}).get("seeds")
        return found

    def lines(self) -> list[ManifestLine]:
        """The lines of the manifest, without an incomplete last line.

        Raises:
            ValueError: the manifest is damaged, or a shard is missing or of another size.
        """
        if not (self.path / MANIFEST).exists():
            return []
        found: list[ManifestLine] = []
        manifest, of = self.path / MANIFEST, sealed(self.header())[CHECKSUM]
        data = file_bytes(manifest, self.remedy)
        for where, plain in read_lines(data, manifest, self.remedy, required=True):
            line = fitted(ManifestLine, plain, where, self.remedy)
            if line.of != of or line.file != shard_name(line.step) or line.plan[0] != line.step:
                raise DamagedFileError(f"{where} is damaged (step {line.step} is not this run's); {self.remedy}")
            if line.step != len(found):
                raise DamagedFileError(
                    f"{where} is damaged (it names step {line.step} after {len(found)} steps); {self.remedy}"
                )
            shard = self.path / line.file
            if not shard.is_file() or shard.stat().st_size != line.bytes:
                raise DamagedFileError(f"{shard} is missing or damaged; {self.remedy}")
            found.append(line)
        return found

    @cached_property
    def _request(self) -> str:
        """The checksum of the header, which every line of the manifest repeats."""
        return str(sealed(self.header())[CHECKSUM])

    def add(self, step: FinishedStep, state: RunState | None, arrays: Mapping[str, Tensor]) -> None:
        """Write a finished step."""
        tensors = {f"array.{name}": array for name, array in arrays.items()}
        tensors |= {
            "run.canvas": step.canvas,
            "run.masked": step.masked,
            "run.proposal": step.proposal.tokens,
            "run.confidence": step.proposal.confidence,
            "run.unmasked": step.unmasked,
        }
        if step.revised is not None:
            tensors["run.revised"] = step.revised
        if step.origins is not None:
            tensors["run.origins"] = step.origins
        if state is not None:
            tensors |= {"state.canvas": state.canvas, **{f"own.{n}": value for n, value in state.own.items()}}
        plan = step.plan
        name = shard_name(plan.index)
        written = self.write_tensors(name, tensors)
        line = {
            "step": plan.index,
            "file": name,
            "bytes": written.size,
            "digest": written.digest,
            "of": self._request,
            "plan": [plan.index, plan.total, plan.block, *plan.span, plan.remaining],
            **({} if plan.computed is None else {"computed": plan.computed}),
            "over": state is None or state.over,
            "remembers": state is not None and state.remembers,
        }
        with open_to_append(self.path / MANIFEST) as file:
            append_lines(file, [line], self.path / MANIFEST)

    def finish(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the run, which completes the recording."""
        written = self.write_tensors(TENSORS, tensors)
        files = {name: hashlib.sha256((self.path / name).read_bytes()).hexdigest() for name in (HEADER, MANIFEST)}
        self.write(RUN, sealed({**facts, "files": {**files, TENSORS: written.digest}}))

    def run_facts(self) -> RunFacts:
        """The contents of run.json.

        Raises:
            ValueError: the file is damaged.
        """
        where = self.path / RUN
        found = parsed(file_bytes(where, self.remedy), where, self.remedy)
        plain = {name: value for name, value in found.items() if name != CHECKSUM}
        facts = fitted(RunFacts, plain, where, self.remedy)
        unsealed(found, where, self.remedy)
        if set(facts.files) != {HEADER, MANIFEST, TENSORS}:
            raise DamagedFileError(f"{where} is damaged (it names the files {sorted(facts.files)}); {self.remedy}")
        return facts

    def check_files(self, facts: RunFacts) -> None:
        """Raise unless header, manifest and the run's tensors have the digests in run.json.

        Raises:
            ValueError: a file is missing or has another digest.
        """
        for name, digest in facts.files.items():
            if not (self.path / name).exists():
                raise DamagedFileError(f"{self.path / name} is missing; {self.remedy}")
            check_digest(self.path / name, digest, self.remedy)

    def check_shards(self, lines: Sequence[ManifestLine]) -> None:
        """Raise unless every shard has the digest of its line; this reads all of them.

        Raises:
            ValueError: a shard has another digest.
        """
        for line in lines:
            check_digest(self.path / line.file, line.digest, self.remedy)

    def resumption(self) -> Resumption | None:
        """The finished steps, after which a run is continued; None to start from the beginning.

        A run whose hooks keep state from earlier steps starts again, because that state is not on the disk.

        Raises:
            ValueError: a file is damaged.
        """
        lines = self.lines()
        if any(line.remembers for line in lines):
            lines = []
        self._trim(lines)
        if not lines:
            return None
        held = [read_tensors(self.path / line.file, self.remedy, line.digest) for line in lines]
        steps = tuple(self._step(line, tensors) for line, tensors in zip(lines, held, strict=True))
        own = {name.removeprefix("own."): value for name, value in held[-1].items() if name.startswith("own.")}
        canvas = self._of(held[-1], "state.canvas", lines[-1])
        return Resumption(steps, RunState(canvas, own, over=lines[-1].over))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file.

        Raises:
            ValueError: the file is missing or damaged.
        """
        return read_tensors(self.path / name, self.remedy)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> WrittenFile:
        """Write a safetensors file."""
        return write_tensors(self.path / name, tensors)

    def write(self, name: str, values: Mapping[str, Any], indent: int | None = None) -> None:
        """Write a JSON file."""
        with replacing(self.path / name) as file:
            file.write(json.dumps(values, indent=indent, allow_nan=False).encode())

    def _trim(self, lines: Sequence[ManifestLine]) -> None:
        """Delete all lines of the manifest but these, and the shards of the others."""
        self.remove_stale()
        for path in [self.path / RUN, self.path / TENSORS]:
            path.unlink(missing_ok=True)
        if (self.path / MANIFEST).exists():
            text = b"".join(line_of(line.model_dump(exclude_unset=True)) for line in lines)
            if text != file_bytes(self.path / MANIFEST, self.remedy):
                with replacing(self.path / MANIFEST) as file:
                    file.write(text)
        kept = {line.file for line in lines}
        for path in self.path.glob("step-*.safetensors"):
            if path.name not in kept:
                path.unlink()

    def _step(self, line: ManifestLine, held: Mapping[str, Tensor]) -> FinishedStep:
        index, total, block, start, stop, remaining = line.plan
        return FinishedStep(
            plan=StepPlan(
                index,
                total,
                block,
                (start, stop),
                remaining,
                computed=None if line.computed is None else (line.computed[0], line.computed[1]),
            ),
            canvas=self._of(held, "run.canvas", line),
            masked=self._of(held, "run.masked", line),
            proposal=Proposal(self._of(held, "run.proposal", line), self._of(held, "run.confidence", line)),
            unmasked=self._of(held, "run.unmasked", line),
            revised=held.get("run.revised"),
            origins=held.get("run.origins"),
        )

    def _of(self, held: Mapping[str, Tensor], name: str, line: ManifestLine) -> Tensor:
        if name not in held:
            raise DamagedFileError(f"{self.path / line.file} is damaged (it has no {name}); {self.remedy}")
        return held[name]


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless a header is that of this call.

    Raises:
        ValueError: with all that differs; of many values the first `NAMED`.
    """
    found = _differences(before, now)
    if found:
        more = f"; {len(found) - NAMED} more differ" if len(found) > NAMED else ""
        raise ValueError(
            f"{path} holds a recording {'; '.join(found[:NAMED])}{more}; give the same to continue it, or another "
            "directory"
        )


NAMED = 8
"""Differences in a sentence; another model has dozens of them in its config."""


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """What a header says and the call does not, such as the settings of a reducer that one of them lacks."""
    lost, gained, found = [], [], []
    for name in {**before, **now}:
        old, new = in_both(name, before.get(name), now.get(name))
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{within}{name} ")
        elif isinstance(old, dict) and new is None:
            lost.append(name)
        elif isinstance(new, dict) and old is None:
            gained.append(name)
        elif old != new:
            found.append(f"with {within}{name} = {old!r:.200}, and now it is {new!r:.200}")
    if gained:
        there = "is one" if len(gained) == 1 else f"are {len(gained)}"
        found.insert(0, f"without {within}{', '.join(gained)}, and now there {there}")
    if lost:
        there = "is" if len(lost) == 1 else "are"
        found.insert(0, f"with {within}{', '.join(lost)}, and now there {there} none")
    return found
