"""`RecordingSet`: many recordings in one directory, read one at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dlm_lens.display import ShowsItself
from dlm_lens.files.paths import user_path
from dlm_lens.recording.directories import parts_of
from dlm_lens.recording.recording import Recording
from dlm_lens.recording.shards import ShardDirectory
from dlm_lens.recording.storage import load_part, missing_parts


class RecordingSet(ShowsItself, Sequence[Recording]):
    """The finished recordings in a directory, as `record(..., to=)` and `dlm-lens record` write them.

    A sequence in the order of rows. Each access reads the recording again, and an array on its first use; nothing
    is cached. `unfinished` has the paths of the others, also of batches that an interrupted run had not begun.

    Args:
        directory: of one recording, or of several.
        tokenizer: decodes tokens; None for the token texts in the files.

    Raises:
        FileNotFoundError: the directory holds no recording.
    """

    def __init__(self, directory: str | Path, tokenizer: Any = None) -> None:
        self.directory, self.tokenizer = user_path(directory), tokenizer
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
        """One recording; a list of them for a slice."""
        if isinstance(index, slice):
            return [Recording.of(load_part(path, self.tokenizer)) for path in self.paths[index]]
        return Recording.of(load_part(self.paths[index], self.tokenizer))

    def __iter__(self) -> Iterator[Recording]:
        return (Recording.of(load_part(path, self.tokenizer)) for path in self.paths)

    def __repr__(self) -> str:
        return f"RecordingSet({str(self.directory)!r}: {len(self.paths)} finished, {len(self.unfinished)} not)"
