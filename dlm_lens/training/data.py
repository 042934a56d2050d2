"""From a dataset to the batches of a step: `build_source`, `BatchStream`."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from dlm_lens.printable import shown
from dlm_lens.training.dataset_files import READERS, files_of, read_rows
from dlm_lens.training.objective import Objective, check_embedded, check_no_mask
from dlm_lens.training.settings import IDS, DataSettings
from dlm_lens.training.sources import (
    Build,
    Cursor,
    Example,
    PackedSource,
    Rows,
    RowSource,
    Source,
    epoch_order,
    required_column,
)

logger = logging.getLogger(__name__)


def build_source(
    dataset: Any, settings: DataSettings, tokenizer: Any, *, shift: bool = False, seed: int = 0
) -> Source:
    """Sequences of a dataset: fine-tuning rows, or packed documents.

    Args:
        dataset: of the datasets library, streamed or not, or a list of mappings.
        settings: columns, length, packing.
        tokenizer: None if the column holds ids.
        shift: whether the model's outputs are shifted, so that texts need a beginning-of-text token.
        seed: of a stream's shuffling.

    Raises:
        ValueError: a missing column, an empty dataset, or texts without a tokenizer or its end-of-text token.
    """
    bos = shift if settings.bos is None else settings.bos
    if settings.prompt_column is not None and settings.answer_column is not None:
        return _fine_tuning(dataset, settings, tokenizer, bos)
    required_column(dataset, settings.column, read_rows(dataset, settings))
    encode = _encoder(settings, tokenizer, bos)
    first = _bos(tokenizer) if bos else None
    return PackedSource(
        partial(_documents, dataset, settings, seed),
        encode,
        settings.length,
        settings.packing,
        first,
        _padding(tokenizer),
        len(dataset) if hasattr(dataset, "__len__") else None,
    )


def sequences(source: Source) -> Fraction | None:
    """Sequences of one epoch, tokens / length for packed documents, which are encoded to count them.

    None for a stream, and for a source of one's own without `rows`.
    """
    if isinstance(source, PackedSource):
        if source.size is None:
            return None
        return Fraction(sum(len(source.encode(text)) for text in source.documents(0, 0)), source.length)
    rows = getattr(source, "rows", None)
    return None if rows is None else Fraction(len(rows))


CHECKED_TEXTS = 100_000
"""The largest dataset whose texts are all looked at before the first step, and when a run is resumed."""


def data_record(dataset: Any, settings: DataSettings) -> dict[str, Any]:
    """What identifies the training data, for run.json; empty where nothing is known cheaply.

    Of a dataset of known size its rows and the first 16 digits of a SHA-256 of the columns that are read, over all
    rows, or over at most `CHECKED_TEXTS` evenly spaced ones of a larger dataset; of local files that are streamed
    their sizes in bytes; of a `Source` of one's own the rows, where it has them.
    """
    if hasattr(dataset, "read") and hasattr(dataset, "length"):
        own = getattr(dataset, "rows", None)
        return {} if own is None else {"rows": len(own)}
    if hasattr(dataset, "__len__"):
        rows, digest = len(dataset), hashlib.sha256()
        columns = [name for name in (settings.prompt_column, settings.answer_column) if name is not None]
        for row in range(0, rows, -(-rows // CHECKED_TEXTS) or 1):
            values = dataset[row]
            for column in columns or [settings.column]:
                part = _bytes(values.get(column))
                digest.update(len(part).to_bytes(8, "little") + part)
        return {"rows": rows, "sha256": digest.hexdigest()[:16]}
    path = os.path.expanduser(settings.path)
    if Path(path).suffix in READERS:
        return {"bytes": {name: Path(name).stat().st_size for name in files_of(path)}}
    return {}


def evaluation_record(examples: Sequence[Example] | None, samples: int) -> str:
    """What tells evaluation losses apart that no one may compare, for run.json; empty without evaluation data.

    The first 16 digits of a SHA-256 of the masks per sequence, and of the ids and the prompt of each sequence.
    """
    if examples is None:
        return ""
    digest = hashlib.sha256(str(samples).encode())
    for example in examples:
        digest.update(f" {example.prompt_length} {example.tokens.tolist()}".encode())
    return digest.hexdigest()[:16]


def _bytes(value: Any) -> bytes:
    """A text, or ids as 64-bit integers whatever holds them; nothing where the value is missing."""
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return np.asarray(value, np.int64).tobytes()


def check_texts(source: Source, mask_token_id: int | None, embedded: int | None = None) -> None:
    """Encode every text of a source of known size, at most `CHECKED_TEXTS`, so that a bad one is known at once.

    A stream, and a larger dataset, is checked while it is read. 100,000 texts of 200 tokens took 32 s on a core.

    Args:
        source: of the training.
        mask_token_id: of the objective; None for none.
        embedded: ids that the model embeds, 0 to `embedded` - 1; None to check none.

    Raises:
        ValueError: a text that holds the mask token or an id that is not embedded, or cannot be made a sequence.
    """
    if isinstance(source, RowSource) and len(source.rows) <= CHECKED_TEXTS:
        logger.info("checking %d rows before the first step", len(source.rows))
        for row in range(len(source.rows)):
            check_tokens(source.example(row).tokens, mask_token_id, embedded, f"row {row} of the data")
    elif isinstance(source, PackedSource) and source.size is not None and source.size <= CHECKED_TEXTS:
        logger.info("checking %d texts before the first step", source.size)
        for text in source.documents(0, 0):
            where = f"the document that begins {str(text)[:40]!r}"
            check_tokens(torch.tensor(source.encode(text)), mask_token_id, embedded, where)


def check_tokens(
    tokens: Int[Tensor, "position"], mask_token_id: int | None, embedded: int | None, where: str
) -> None:
    """Check that a text holds ids that the model embeds, and not the mask token; None for what is not checked.

    Raises:
        ValueError: naming the id and where it is.
    """
    if embedded is not None:
        check_embedded(tokens, embedded, where)
    if mask_token_id is not None:
        check_no_mask(tokens, mask_token_id, where)


def _fine_tuning(dataset: Any, settings: DataSettings, tokenizer: Any, bos: bool) -> RowSource:
    """Rows of prompt, answer and end-of-text tokens up to the length, which count in the loss (2502.09992, B.1)."""
    if tokenizer is None:
        raise ValueError("fine-tuning needs a tokenizer, and the model has none; set model.tokenizer")
    for column in (settings.prompt_column, settings.answer_column):
        required_column(dataset, str(column))
    if not hasattr(dataset, "__len__"):
        raise ValueError("fine-tuning needs a dataset of known size; set data.streaming to false")
    begin, end = ([_bos(tokenizer)] if bos else []), _eos(tokenizer)
    build = partial(_fine_tuning_row, settings, tokenizer, begin, end)
    return RowSource(dataset, build, settings.length, _padding(tokenizer))


def _fine_tuning_row(
    settings: DataSettings, tokenizer: Any, begin: list[int], end: int, row: Mapping[str, Any]
) -> Example:
    prompt = begin + _ids(tokenizer, _value(row, str(settings.prompt_column)))
    answer = _ids(tokenizer, _value(row, str(settings.answer_column)))
    if len(prompt) >= settings.length:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens leaves no room for its answer in {settings.length} positions; "
            "raise data.length or leave such rows out"
        )
    ids = (prompt + answer)[: settings.length]
    ids += [end] * (settings.length - len(ids))
    unmasked = torch.zeros(settings.length, dtype=torch.bool)
    unmasked[: len(begin)] = True
    return Example(torch.tensor(ids), len(prompt), unmasked=unmasked)


def _documents(dataset: Any, settings: DataSettings, seed: int, epoch: int, skipped: int) -> Iterator[Any]:
    """The documents of an epoch in their order, without the first `skipped`."""
    if not hasattr(dataset, "__len__"):
        # Skip after the shuffle, so that a resumed stream continues with the same documents.
        ordered = dataset
        if settings.shuffle_buffer:
            ordered = ordered.shuffle(seed=seed + epoch, buffer_size=settings.shuffle_buffer)
        rows = ordered.skip(skipped) if hasattr(ordered, "skip") else _skipped(iter(ordered), skipped)
        rows = read_rows(_rows_of(rows), settings)
        numbered: Iterator[tuple[int, Any]] = enumerate(rows, skipped)
    else:
        order = epoch_order(len(dataset), seed, epoch)[skipped:]
        numbered = ((int(row), dataset[int(row)]) for row in order)
    return (_document(row, settings.column, number) for number, row in numbered)


def _rows_of(stream: Any) -> Iterator[Mapping[str, Any]]:
    """The rows of a stream, in the same order in every process.

    In a worker of a DataLoader, `__iter__` of the datasets library shuffles with other random numbers; its `iter`
    does not.
    """
    if not hasattr(stream, "iter"):
        yield from stream
        return
    if get_worker_info() is not None:
        import fsspec

        fsspec.asyn.reset_lock()  # the worker has a copy of a lock that its parent may have held
    for batch in stream.iter(batch_size=1):
        yield {name: values[0] for name, values in batch.items()}


def _document(row: Mapping[str, Any], column: str, number: int) -> Any:
    try:
        return _value(row, column)
    except ValueError as error:
        raise ValueError(f"row {number} of the data: {error}") from error


def _value(row: Mapping[str, Any], column: str) -> Any:
    """A column of a row: ids where it is called input_ids, else a text.

    Raises:
        ValueError: neither, naming the column; or the row is no mapping.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"it is {str(row)[:40]!r}, which is no mapping from columns to values; mend it")
    value = row.get(column)
    if value is None or isinstance(value, str) == (column == IDS):
        kind = "a list of ids" if column == IDS else "a text"
        raise ValueError(
            f"the column {column!r} holds {str(value)[:40]!r}, which is not {kind}; leave such rows out, or mend "
            "them"
        )
    return value


def _skipped(rows: Iterator[Any], number: int) -> Iterator[Any]:
    for _ in range(number):
        next(rows, None)
    return rows


def _encoder(settings: DataSettings, tokenizer: Any, bos: bool) -> Callable[[Any], Sequence[int]]:
    if settings.column == IDS:
        return _whole_numbers
    if tokenizer is None:
        raise ValueError(
            f"the column {settings.column!r} holds text and the model has no tokenizer; set model.tokenizer, or "
            "give a dataset with a column input_ids"
        )
    begin, end = ([_bos(tokenizer)] if bos else []), [_eos(tokenizer)]
    return partial(_encoded, tokenizer, begin, end)


def _encoded(tokenizer: Any, begin: list[int], end: list[int], text: str) -> list[int]:
    return begin + _ids(tokenizer, text) + end


def _whole_numbers(ids: Any) -> list[int]:
    """The ids of a document as they are in its column.

    Raises:
        ValueError: something else than a list of whole numbers.
    """
    try:
        found = np.asarray(ids)
    except ValueError:  # lists of unequal lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise ValueError(
            f"the column {IDS!r} holds {shown(ids)}, which is not a list of whole numbers; leave such rows out, or "
            "mend them"
        )
    return [int(each) for each in found]


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _bos(tokenizer: Any) -> int:
    """The beginning-of-text token, or the end-of-text token where there is none, as in Qwen.

    Raises:
        ValueError: there is neither, or no tokenizer.
    """
    if tokenizer is None:
        raise ValueError(
            "the outputs are shifted, and without a tokenizer it is not known which id begins a text, and is never "
            "masked; set data.bos to false to mask every id, or model.tokenizer"
        )
    own = getattr(tokenizer, "bos_token_id", None)
    found = own if own is not None else getattr(tokenizer, "eos_token_id", None)
    if found is None:
        raise ValueError(
            "the tokenizer has neither a beginning-of-text nor an end-of-text token; set data.bos to false"
        )
    return int(found)


def _eos(tokenizer: Any) -> int:
    """The end-of-text token.

    Raises:
        ValueError: there is none.
    """
    if getattr(tokenizer, "eos_token_id", None) is None:
        raise ValueError(
            "the tokenizer has no end-of-text token, which ends every document and fills the rows of fine-tuning; "
            "set its eos_token"
        )
    return int(tokenizer.eos_token_id)


def _padding(tokenizer: Any) -> int:
    own = getattr(tokenizer, "pad_token_id", None)
    return int(own if own is not None else getattr(tokenizer, "eos_token_id", None) or 0)


@dataclass(frozen=True)
class Batching:
    """The division of an optimiser step's batch into micro-batches.

    Args:
        batch_size: sequences per optimiser step, over all processes.
        micro_batch_size: sequences per forward pass and process.
        processes: number of processes.
        rank: of this process.

    Raises:
        ValueError: the batch does not divide evenly.
    """

    batch_size: int
    micro_batch_size: int
    processes: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        share = self.micro_batch_size * self.processes
        if min(self.batch_size, self.micro_batch_size) < 1 or self.batch_size % share:
            raise ValueError(
                f"a batch of {self.batch_size} sequences does not divide into {self.processes} process(es) of "
                f"{self.micro_batch_size} sequences each; choose batch_size as a multiple of {share}"
            )

    @property
    def accumulation(self) -> int:
        """Forward passes of a process per optimiser step."""
        return self.batch_size // (self.micro_batch_size * self.processes)


class BatchStream(IterableDataset[dict[str, Any]]):
    """An endless stream of this process's micro-batches, from a given step on; it can be pickled for a worker.

    Sample s of the run is the s-th sequence of the source, and its noise depends on the seed and s. Every process
    takes its slice of consecutive sequences, so any division of a batch has the same samples. The last micro-batch
    of a step also holds `cursor`. An id from `embedded` on, if it is given, is refused with a ValueError.
    """

    def __init__(
        self,
        source: Source,
        objective: Objective,
        batching: Batching,
        seed: int,
        step: int = 0,
        cursor: Cursor | None = None,
        embedded: int | None = None,
    ) -> None:
        self.embedded = embedded
        self.source, self.objective, self.batching = source, objective, batching
        self.seed, self.step, self.cursor = seed, step, cursor

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the micro-batches."""
        reading = self.source.read(self.cursor, self.seed)
        wide = self.batching.micro_batch_size * self.batching.processes
        sample = self.step * self.batching.batch_size
        while True:
            dealt = list(islice(reading, wide))
            if len(dealt) < wide:
                return
            batch = self._batch([build for build, _ in dealt], sample)
            sample += wide
            if sample % self.batching.batch_size == 0:
                batch["cursor"] = dict(dealt[-1][1])
            yield batch

    def _batch(self, builds: list[Build], sample: int) -> dict[str, Any]:
        size, rank = self.batching.micro_batch_size, self.batching.rank
        samples = [sample + rank * size + i for i in range(size)]
        lengths = self.objective.lengths(samples, self.source.length, self.seed)
        examples = [
            build().shortened(length)
            for build, length in zip(builds[rank * size : (rank + 1) * size], lengths, strict=True)
        ]
        rows = Rows.of(examples, self.source.length, self.source.padding)
        if self.embedded is not None:
            check_embedded(rows.tokens, self.embedded)
        return self.objective.prepare(rows, samples, self.seed)
