"""The directories of a recording. Nothing here imports torch."""

import re
from pathlib import Path

HEADER = "header.json"
"""A directory with this file is a recording."""


def parts_of(path: Path) -> list[Path]:
    """The directories of a recording: the path itself, or its batches in the order of their rows."""
    if (path / HEADER).exists():
        return [path]
    return sorted((part.parent for part in path.glob(f"*/{HEADER}")), key=_place)


def _place(part: Path) -> list[str | int]:
    """A name with its numbers as numbers: of rows from 100,000 on they have more digits than of others."""
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"([0-9]+)", part.name)]


def check_recording(path: Path) -> list[Path]:
    """The directories of a recording, finished or not.

    Raises:
        FileNotFoundError: the path holds no recording.
    """
    parts = parts_of(path)
    if not parts:
        raise FileNotFoundError(f"{path} holds no recording; dlm_lens.record(..., to=) writes one")
    return parts
