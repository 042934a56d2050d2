"""The directories of a recording. Nothing here imports torch."""

from pathlib import Path

HEADER = "header.json"
"""A directory with this file is a recording."""


def parts_of(path: Path) -> list[Path]:
    """The directories of a recording: the path itself, or its batches in the order of their rows."""
    if (path / HEADER).exists():
        return [path]
    return sorted(part.parent for part in path.glob(f"*/{HEADER}"))


def check_recording(path: Path) -> list[Path]:
    """The directories of a recording, finished or not.

    Raises:
        FileNotFoundError: the path holds no recording.
    """
    parts = parts_of(path)
    if not parts:
        raise FileNotFoundError(f"{path} holds no recording; dlm_lens.record(..., to=) writes one")
    return parts
