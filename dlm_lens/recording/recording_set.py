"""`RecordingSet`: many recordings in one directory, read one at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dlm_lens.recording.directories import parts_of
from dlm_lens.recording.recording import Recording
from dlm_lens.recording.shards import ShardDirectory
from dlm_lens.recording.storage import load_part, missing_parts


class RecordingSet(Sequence[Recording]):
    """The finished recordings below a directory, as `record(..., to=)` and `dlm-lens record` write them.

    Each is read when asked for, and of each only the arrays that are asked for; nothing is kept. Those in the order
    of their rows; `unfinished` names the others, those too that a killed run had not begun.

    Args:
        directory: with a recording, or with recordings.
        tokenizer: decodes tokens; by default the texts that the files hold.

    Raises:
        FileNotFoundError: there is none.
    """

    def __init__(self, directory: str | Path, tokenizer: Any = None) -> None:
        self.directory, self.tokenizer = Path(directory), tokenizer
        found = parts_of(self.directory)
        if not found:
            raise FileNotFoundError(f"{self.directory} holds no recording; dlm_lens.record(..., to=) writes some")
        self.paths = tuple(path for path in found if ShardDirectory(path).finished)
        started = [path for path in found if path not in self.paths]
        missing = [self.directory / name for name in missing_parts(self.directory, found)]
        self.unfinished = tuple(sorted([*started, *missing]))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        """One recording, or a list of some."""
        if isinstance(index, slice):
            return [Recording.of(load_part(path, self.tokenizer)) for path in self.paths[index]]
        return Recording.of(load_part(self.paths[index], self.tokenizer))

    def __iter__(self) -> Iterator[Recording]:
        return (Recording.of(load_part(path, self.tokenizer)) for path in self.paths)

    def __repr__(self) -> str:
        return f"RecordingSet({str(self.directory)!r}: {len(self.paths)} finished, {len(self.unfinished)} not)"
