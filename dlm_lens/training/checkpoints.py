"""Checkpoint directories, written atomically: into a temporary directory, flushed to the disk, then renamed."""

import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import Field

from dlm_lens.adapters.hub import check_name
from dlm_lens.files.atomic_writes import remove_stale, sync_directory, write_file
from dlm_lens.files.sealed_json import CHECKSUM, Document, file_bytes, fitted, parsed, sealed, unsealed
from dlm_lens.files.tensor_files import check_digest, file_digest

RUN_FILE = "run.json"
"""The last file of a checkpoint: settings, position in the data, and digests of the other files."""

MOMENTS_FILE = "optimizer.safetensors"
PARTIAL, BEFORE = ".partial", "before"
THREADS = 8
"""Threads that compute digests."""

_NAME = re.compile(r"checkpoint-(\d+)")


class TrainingStoppedError(RuntimeError):
    """Training stopped; the message names the step and the last complete checkpoint."""


class NonFiniteLossError(TrainingStoppedError):
    """The loss, the gradient or a weight is not a finite number."""


class TrainingDataError(TrainingStoppedError, ValueError):
    """A text that was read during the training cannot be used."""


class CheckpointError(TrainingStoppedError):
    """A checkpoint could not be written."""


def checkpoints(output: str | Path) -> list[Path]:
    """The complete checkpoints in a run's directory, oldest first."""
    found = [path for path in Path(output).glob("checkpoint-*") if (path / RUN_FILE).is_file()]
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def last_checkpoint(output: str | Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(reversed(checkpoints(output)), None)


def step_of(path: Path) -> int:
    """The number of optimiser steps of a checkpoint."""
    return int(path.name.rsplit("-", 1)[1])


class RunRecord(Document):
    """run.json of a checkpoint.

    `files` holds the digests of the other files, `data` is of `data_record`, `evaluation` of `evaluation_record`.
    """

    step: int
    total_steps: int | None = None
    cursor: Any = None
    settings: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    evaluation: str = ""
    seconds: float = 0.0
    open_loss: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)


def read_run(path: str | Path) -> dict[str, Any]:
    """The run.json of a checkpoint.

    Raises:
        FileNotFoundError: the directory has no run.json.
        ValueError: the file is damaged.
    """
    file = Path(path) / RUN_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{path} holds no {RUN_FILE}: it is not a checkpoint of dlm_lens.training")
    remedy = _remedy(path)
    values = parsed(file_bytes(file, remedy), file, remedy)
    plain = {name: value for name, value in values.items() if name != CHECKSUM}
    record = fitted(RunRecord, plain, file, remedy)
    unsealed(values, file, remedy, required=bool(record.files))  # records of earlier versions have no checksum
    return record.model_dump()


def check_files(path: str | Path, record: Mapping[str, Any]) -> None:
    """Compare every file of a checkpoint with its digest.

    Raises:
        ValueError: naming a file that is missing or differs, or whose name leads out of the checkpoint.
    """
    base = Path(path)
    for name in record["files"]:
        check_name(str(path), name)
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(
            lambda one: check_digest(base / one[0], one[1], _remedy(path)), dict(record["files"]).items()
        ):
            pass


def _remedy(path: str | Path) -> str:
    return f"delete {path} to resume from the checkpoint before it"


def tidy(output: str | Path) -> None:
    """Remove partial files of a killed process, and restore a checkpoint that it was about to replace.

    Only for the process that holds the lock of the directory.
    """
    partial = Path(output) / PARTIAL
    for before in sorted((partial / BEFORE).glob("checkpoint-*")):
        if (before / RUN_FILE).is_file() and not (Path(output) / before.name).exists():
            os.replace(before, Path(output) / before.name)
    shutil.rmtree(partial, ignore_errors=True)
    if Path(output).is_dir():
        remove_stale(Path(output))


def partial_directory(output: str | Path) -> Path:
    """An empty directory for the next checkpoint, on the disk of `output`."""
    tidy(output)
    partial = Path(output) / PARTIAL
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, record: dict[str, Any], keep: int, best: int | None = None) -> Path:
    """Complete the checkpoint in `partial`: write run.json, flush, rename, and delete the oldest beyond `keep`.

    That of step `best` is not deleted, and not counted.
    """
    (written,) = partial.glob("checkpoint-*")
    files = sorted(path for path in written.rglob("*") if path.is_file())
    with ThreadPoolExecutor(THREADS) as pool:
        digests = dict(
            zip((path.relative_to(written).as_posix() for path in files), pool.map(file_digest, files), strict=True)
        )
    write_file(written / RUN_FILE, json.dumps(sealed({**record, "files": digests}), indent=1) + "\n")
    mode = stat.S_IMODE((written / RUN_FILE).stat().st_mode)
    for path in files:
        path.chmod(mode)  # safetensors makes files that only their owner may read
        _flush(path)
    for folder in {written, *(path.parent for path in files)}:
        sync_directory(folder)
    target = partial.parent / written.name
    if target.exists():
        (partial / BEFORE).mkdir()
        os.replace(target, partial / BEFORE / target.name)
    os.replace(written, target)
    sync_directory(partial.parent)
    # Renamed before it is deleted: a killed process leaves no incomplete checkpoint.
    for old in [path for path in checkpoints(partial.parent) if step_of(path) != best][:-keep]:
        os.replace(old, partial / old.name)
    shutil.rmtree(partial, ignore_errors=True)
    return target


def _flush(path: Path) -> None:
    with path.open("rb+") as file:  # Windows flushes only what is open for writing
        os.fsync(file.fileno())
