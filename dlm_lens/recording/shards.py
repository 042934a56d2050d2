"""A recording on disk: a safetensors shard per finished step, a manifest line for each, and the finished run.

header.json            what was asked for, so that a run goes on only with the same
step-00000.safetensors arrays of a step, its canvas and proposal, and the state behind it
manifest.jsonl         a line per shard that is whole
run.safetensors        the run's tensors, and
run.json               everything else of it: the last file to appear, when the run is over
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlm_lens.sampling import FinishedStep, Proposal, Resumption, RunState, StepPlan

FORMAT = 1
HEADER, MANIFEST, RUN, TENSORS = "header.json", "manifest.jsonl", "run.json", "run.safetensors"


@dataclass(frozen=True)
class ShardDirectory:
    """The files of one recording; writes are atomic and flushed to the disk before the manifest tells of them."""

    path: Path

    def begin(self, request: Mapping[str, Any]) -> None:
        """Write what is asked for, or compare it with what was.

        Raises:
            ValueError: the directory holds a recording of something else, or of another format.
            FileExistsError: it holds other files.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        plain = json.loads(json.dumps({"format": FORMAT, **request}))
        if (self.path / HEADER).exists():
            _compare(self.path, self.facts(HEADER), plain)
        elif any(self.path.iterdir()) and not all(p.name.startswith(".") for p in self.path.iterdir()):
            raise FileExistsError(f"{self.path} is not empty and holds no recording; give another directory")
        else:
            self.write(HEADER, json.dumps(plain, indent=1).encode())

    def forget(self) -> None:
        """Take the header of a refused request away, where no step is: the corrected one may use the directory."""
        if not (self.path / MANIFEST).exists():
            (self.path / HEADER).unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()

    @property
    def finished(self) -> bool:
        """Whether the run is over and whole."""
        return (self.path / RUN).exists()

    def seeds(self) -> list[int] | None:
        """The seeds that the recording was begun with, where it was."""
        if not (self.path / HEADER).exists():
            return None
        found: list[int] | None = self.facts(HEADER).get("settings", {}).get("seeds")
        return found

    def lines(self) -> list[dict[str, Any]]:
        """The manifest; a last line that was cut off in the middle does not count.

        Raises:
            ValueError: a shard is missing or of another size.
        """
        if not (self.path / MANIFEST).exists():
            return []
        found: list[dict[str, Any]] = []
        for text in (self.path / MANIFEST).read_text().split("\n")[:-1]:
            line = self._read(MANIFEST, text)
            shard = self.path / line["file"]
            if line["step"] != len(found):
                raise ValueError(f"{self.path / MANIFEST} names step {line['step']} behind {len(found)} steps")
            if not shard.exists() or shard.stat().st_size != line["bytes"]:
                raise ValueError(f"{shard} is missing or damaged; delete {self.path} and record again")
            found.append(line)
        return found

    def add(self, step: FinishedStep, state: RunState | None, arrays: Mapping[str, Tensor]) -> None:
        """Write a finished step."""
        tensors = {f"array.{name}": array for name, array in arrays.items()}
        tensors |= {
            "run.canvas": step.canvas,
            "run.masked": step.masked,
            "run.proposal": step.proposal.tokens,
            "run.confidence": step.proposal.confidence,
            "run.selected": step.selected,
        }
        if state is not None:
            tensors |= {"state.canvas": state.canvas, **{f"own.{n}": value for n, value in state.own.items()}}
        plan = step.plan
        name = f"step-{plan.index:05d}.safetensors"
        size = self.write_tensors(name, tensors)
        line = {
            "step": plan.index,
            "file": name,
            "bytes": size,
            "plan": [plan.index, plan.total, plan.block, *plan.span, plan.remaining],
            "over": state is None or state.over,
            "remembers": state is not None and state.remembers,
        }
        with (self.path / MANIFEST).open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the run; from now on the recording is whole."""
        self.write_tensors(TENSORS, tensors)
        self.write(RUN, json.dumps(facts).encode())

    def resumption(self) -> Resumption | None:
        """The steps that are there, to go on behind them; None to start from the beginning.

        A run whose hooks remember earlier steps starts again: what they remember is not on the disk.
        """
        lines = self.lines()
        self._trim(lines)
        if not lines or any(line["remembers"] for line in lines):
            self._trim([])
            return None
        steps = tuple(self._step(line) for line in lines)
        last = self.tensors(lines[-1]["file"])
        own = {name.removeprefix("own."): value for name, value in last.items() if name.startswith("own.")}
        return Resumption(steps, RunState(last["state.canvas"], own, over=lines[-1]["over"]))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file.

        Raises:
            ValueError: it is missing or damaged.
        """
        try:
            return load_file(self.path / name)
        except FileNotFoundError:
            raise ValueError(f"{self.path / name} is missing; delete {self.path} and record again") from None
        except SafetensorError as error:
            raise ValueError(
                f"{self.path / name} is damaged ({error}); delete {self.path} and record again"
            ) from None

    def facts(self, name: str) -> dict[str, Any]:
        """What a JSON file says.

        Raises:
            ValueError: it is damaged.
        """
        return self._read(name, (self.path / name).read_text(errors="replace"))

    def _read(self, name: str, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{self.path / name} is damaged ({error}); delete {self.path} and record again"
            ) from None
        if not isinstance(found, dict):
            raise ValueError(f"{self.path / name} is damaged; delete {self.path} and record again")
        return found

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Write a safetensors file; returns its size."""
        # Of tensors that share memory safetensors would refuse one.
        plain = {
            key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()
        }
        part = self.path / f".{name}"
        save_file(plain, part)
        return self._settle(part, name)

    def write(self, name: str, content: bytes) -> int:
        """Write a file; returns its size."""
        part = self.path / f".{name}"
        part.write_bytes(content)
        return self._settle(part, name)

    def _settle(self, part: Path, name: str) -> int:
        """Flush a file to the disk and give it its name."""
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        size = part.stat().st_size
        part.replace(self.path / name)
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return size

    def _trim(self, lines: list[dict[str, Any]]) -> None:
        """Leave only these lines in the manifest."""
        if (self.path / MANIFEST).exists():
            self.write(MANIFEST, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def _step(self, line: Mapping[str, Any]) -> FinishedStep:
        held = self.tensors(line["file"])
        index, total, block, start, stop, remaining = line["plan"]
        return FinishedStep(
            plan=StepPlan(index, total, block, (start, stop), remaining),
            canvas=held["run.canvas"],
            masked=held["run.masked"],
            proposal=Proposal(held["run.proposal"], held["run.confidence"]),
            selected=held["run.selected"],
        )


def _compare(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            for key in {**old, **new}:
                if old.get(key) != new.get(key):
                    raise ValueError(_difference(path, f"{name} {key}", old.get(key), new.get(key)))
        elif old != new:
            raise ValueError(_difference(path, name, old, new))


def _difference(path: Path, name: str, old: Any, new: Any) -> str:
    return (
        f"{path} holds a recording with {name} = {old!r:.200}, and now it is {new!r:.200}; give the same to go on, "
        "or another directory"
    )
