"""Where a recording's files are: what can be said of a path before torch is imported."""

from pathlib import Path

HEADER = "header.json"
"""The file that makes a directory a recording."""


def parts_of(path: Path) -> list[Path]:
    """The directories of a recording: itself, or its batches in the order of their rows."""
    if (path / HEADER).exists():
        return [path]
    return sorted(part.parent for part in path.glob(f"*/{HEADER}"))


def check_recording(path: Path) -> list[Path]:
    """The directories of a recording that is there, finished or not.

    Raises:
        FileNotFoundError: there is none.
    """
    parts = parts_of(path)
    if not parts:
        raise FileNotFoundError(f"{path} holds no recording; dlm_lens.record(..., to=) writes one")
    return parts
