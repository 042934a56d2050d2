"""Checkpoints that are whole or not there: written aside, flushed to the disk, then renamed."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
"""Written last into a checkpoint: what it was trained with, and how far the data had been read."""

MOMENTS_FILE = "optimizer.safetensors"
PARTIAL = ".partial"
_NAME = re.compile(r"checkpoint-(\d+)")


class TrainingStoppedError(RuntimeError):
    """Training cannot go on; the message says at which step and which checkpoint is whole."""


class NonFiniteLossError(TrainingStoppedError):
    """The loss, the gradient or a weight is not a finite number."""


class CheckpointError(TrainingStoppedError):
    """A checkpoint could not be written."""


def checkpoints(output: str | Path) -> list[Path]:
    """Whole checkpoints below a run's directory, oldest first."""
    found = [path for path in Path(output).glob("checkpoint-*") if (path / RUN_FILE).is_file()]
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def last_checkpoint(output: str | Path) -> Path | None:
    """The newest whole checkpoint, if there is one."""
    return next(reversed(checkpoints(output)), None)


def step_of(path: Path) -> int:
    """The optimiser steps behind a checkpoint."""
    return int(path.name.rsplit("-", 1)[1])


def read_run(path: str | Path) -> dict[str, Any]:
    """The record of a checkpoint.

    Raises:
        FileNotFoundError: the directory holds none.
    """
    file = Path(path) / RUN_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{path} holds no {RUN_FILE}: it is no checkpoint of dlm_lens.training")
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values


def aside(output: str | Path) -> Path:
    """An empty directory for the next checkpoint, on the same disk."""
    partial = Path(output) / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, record: dict[str, Any], keep: int) -> Path:
    """Finish the one checkpoint in `partial`: record, flush, rename, and forget the oldest beyond `keep`."""
    (written,) = partial.glob("checkpoint-*")
    (written / RUN_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for path in sorted(written.rglob("*")):
        if path.is_file():
            _flush(path)
    target = partial.parent / written.name
    if target.exists():
        os.replace(target, partial / "before")
    os.replace(written, target)
    _flush(partial.parent)
    shutil.rmtree(partial, ignore_errors=True)
    for old in checkpoints(partial.parent)[:-keep]:
        shutil.rmtree(old)
    return target


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
