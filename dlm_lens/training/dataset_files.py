"""`read_dataset`: the dataset of the settings, from local files or the hub."""

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlm_lens.training.settings import DataSettings

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text", ".csv": "csv"}

LINES = ".txt"
"""The ending of files in which every line is a document."""


def read_evaluation(settings: DataSettings) -> Any | None:
    """The evaluation data of the settings, as `read_dataset` reads them; None where none are named.

    Raises:
        FileNotFoundError: as `read_dataset`.
        ValueError: as `read_dataset`.
    """
    if settings.eval_path is None:
        return None if settings.eval_split is None else read_dataset(settings, settings.eval_split)
    own = replace(settings, path=settings.eval_path, name=None, split="train")
    return read_dataset(own, settings.eval_split, option="data.eval_path")


def read_dataset(settings: DataSettings, split: str | None = None, *, option: str = "data.path") -> Any:
    """The dataset of the settings, from local files or the hub; no code of it is executed.

    Args:
        settings: path, split, streaming.
        split: in place of the settings' own.
        option: the setting that named the path, for the errors.

    Raises:
        FileNotFoundError: a missing local file, or a dataset that the hub does not deliver.
        ValueError: no path, an unknown file ending, an empty file, one that cannot be read in its form, or a slice
            of a split that would be streamed.
    """
    import datasets

    if not settings.path:
        raise ValueError(f"{option} is empty; name a dataset of the hub, or a .jsonl, .parquet or .txt file")
    split = split or settings.split
    if settings.streaming and "[" in split:
        raise ValueError(
            f"the split is {split!r} and data.streaming is true, which reads whole splits; set data.streaming to "
            "false"
        )
    if Path(settings.path).suffix in READERS or settings.path.startswith((".", "/", "~")):
        return _local_files(settings, split, option)
    try:
        with reading(settings):
            return datasets.load_dataset(settings.path, settings.name, split=split, streaming=settings.streaming)
    except (OSError, RuntimeError, datasets.exceptions.DatasetNotFoundError) as error:
        # A RuntimeError is that of a dataset with a script, which is not run.
        why = " ".join(str(error).split())
        raise FileNotFoundError(
            f"the dataset {settings.path} cannot be read from a directory or the hub ({why}); check its name and "
            "the connection, or give a local file"
        ) from error


def _local_files(settings: DataSettings, split: str, option: str) -> Any:
    """The dataset of a file or a pattern; of a .txt file the lines that hold text."""
    import datasets

    path = os.path.expanduser(settings.path)
    suffix = Path(path).suffix
    if suffix not in READERS:
        raise ValueError(f"{option} {settings.path} has an unknown ending; use one of {', '.join(READERS)}")
    files = files_of(path)
    if not files:
        raise FileNotFoundError(f"{option} {settings.path} is not a file, or matches none")
    if not any(Path(file).stat().st_size for file in files):
        raise ValueError(f"{option} {settings.path} is empty; give at least one document")
    # The datasets library takes [1] in the name of a file for a pattern too, which it then does not find.
    data_files = path if "*" in path else glob.escape(path)
    options: dict[str, Any] = {"split": split, "streaming": settings.streaming}
    if suffix == LINES:  # the other readers leave out a byte order mark by themselves
        options["encoding"] = "utf-8-sig"
    elif suffix == ".csv":  # NA, null, None and nan are texts
        options |= {"keep_default_na": False, "na_values": [""]}
    with reading(settings):
        found: Any = datasets.load_dataset(READERS[suffix], data_files=data_files, **options)
        if suffix != LINES:
            return found
        found = found.filter(_has_text, input_columns=["text"])
        first = next(iter(found), None)
    if first is None:
        raise ValueError(f"{option} {settings.path} holds blank lines alone; give at least one line of text")
    return found


def files_of(path: str) -> list[str]:
    """The files of a path or, with a "*", of a pattern, in alphabetical order."""
    found = glob.glob(path, recursive=True) if "*" in path else [path]
    return sorted(file for file in found if Path(file).is_file())


def _has_text(line: str) -> bool:
    return bool(line.strip())


@contextmanager
def reading(settings: DataSettings) -> Iterator[None]:
    """In this block, what the datasets library cannot read is one sentence with the path.

    Raises:
        ValueError: a file that is damaged, of another form or not UTF-8, or a split that is not there.
    """
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import ArrowInvalid

    try:
        yield
    except (ValueError, DatasetGenerationError) as error:
        chain = (error, error.__cause__, error.__context__)
        # The reader's own error has the row and the byte.
        own = next((each for each in chain if isinstance(each, ArrowInvalid | UnicodeDecodeError)), error)
        why = " ".join(str(own).split())
        raise ValueError(
            f"the data of {settings.path or 'the dataset'} cannot be read ({why}); mend the file (texts are "
            "UTF-8), or see data.path and data.split"
        ) from error


def read_rows(rows: Iterable[Any], settings: DataSettings) -> Iterator[Any]:
    """The rows of a stream, read under `reading`."""
    with reading(settings):
        yield from rows
