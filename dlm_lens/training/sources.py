"""Where training sequences come from: rows of a dataset in shuffled epochs, or a packed stream of documents."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch

from dlm_lens.training.rows import Example

Packing = Literal["joined", "isolated"]
Cursor = Mapping[str, int]
"""How far a source has been read: what is stored with a checkpoint."""

Build = Callable[[], Example]
ORDER = 3
"""Stream of random numbers of the order of the rows; the objective has its own."""


class Source(Protocol):
    """Training sequences without end, in an order that depends on the seed alone."""

    @property
    def length(self) -> int:
        """Positions of a row."""
        ...

    @property
    def padding(self) -> int:
        """An id for positions behind a sequence."""
        ...

    def read(self, cursor: Cursor | None, seed: int) -> Iterator[tuple[Build, Cursor]]:
        """The sequences behind `cursor` (None: all), each as a function that builds it, with the cursor behind it.

        Functions, because a process of several builds its own share only.
        """
        ...


def required_column(dataset: Any, name: str) -> None:
    """Raise unless a dataset has the column.

    Raises:
        ValueError: naming the columns that there are.
    """
    columns = getattr(dataset, "column_names", None)
    if columns is None:
        first = next(iter(dataset), None)
        columns = list(first) if isinstance(first, Mapping) else None
    if columns is not None and name not in columns:
        raise ValueError(f"the dataset has no column {name!r}; its columns are {', '.join(map(repr, columns))}")


@lru_cache(maxsize=2)
def epoch_order(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of a dataset's rows in an epoch."""
    return np.random.default_rng((seed, ORDER, epoch)).permutation(rows)


@dataclass(frozen=True)
class RowSource:
    """Rows of a dataset of known size, reshuffled every epoch; one row, one sequence.

    Args:
        rows: indexable, of known length.
        build: from a row to its sequence.
        length: positions of a training row.
        padding: an id for positions behind a sequence; nobody sees them.

    Raises:
        ValueError: the dataset is empty.
    """

    rows: Any = field(repr=False)
    build: Callable[[Any], Example] = field(repr=False)
    length: int
    padding: int = 0

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise ValueError("the training dataset is empty; nothing can be learned from it")

    def read(self, cursor: Cursor | None, seed: int) -> Iterator[tuple[Build, Cursor]]:
        """As in `Source`; `cursor` counts sequences."""
        for sample in count((cursor or {}).get("sample", 0)):
            epoch, place = divmod(sample, len(self.rows))
            row = int(epoch_order(len(self.rows), seed, epoch)[place])
            yield partial(self._built, row), {"sample": sample + 1}

    def _built(self, row: int) -> Example:
        return self.build(self.rows[row])


@dataclass(frozen=True)
class PackedSource:
    """Documents one behind the other, each with an end, cut into full sequences.

    Reading goes on at (document, token): what lies before is skipped, not encoded again.

    Args:
        documents: from an epoch and a number of documents to skip, to texts or ids.
        encode: from a document to ids, with its end (and beginning, if it has one).
        length: positions of a sequence.
        packing: "joined", documents see each other as in SMDM and LLaDA; "isolated", they do not.
        bos: id that never is masked where it begins a document or a sequence; None without.
        padding: any id.
    """

    documents: Callable[[int, int], Iterator[Any]] = field(repr=False)
    encode: Callable[[Any], Sequence[int]] = field(repr=False)
    length: int
    packing: Packing = "joined"
    bos: int | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        if self.packing not in get_args(Packing):
            raise ValueError(
                f"packing is {self.packing!r}; it must be one of {', '.join(map(repr, get_args(Packing)))}"
            )

    def read(self, cursor: Cursor | None, seed: int) -> Iterator[tuple[Build, Cursor]]:
        """As in `Source`; the order of the documents is the stream's own.

        Raises:
            ValueError: an epoch without a document.
        """
        start = dict(cursor or {"epoch": 0, "document": 0, "token": 0})
        tokens: list[int] = []
        owners: list[int] = []
        for number, ids in self._encoded(start):
            skipped = (
                start["token"]
                if (number["epoch"], number["document"]) == (start["epoch"], start["document"])
                else 0
            )
            tokens.extend(ids[skipped:])
            owners.extend([number["order"]] * (len(ids) - skipped))
            while len(tokens) >= self.length:
                left = len(tokens) - self.length
                sequence = torch.tensor(tokens[: self.length]), torch.tensor(owners[: self.length])
                del tokens[: self.length], owners[: self.length]
                place = {"epoch": number["epoch"], "document": number["document"], "token": len(ids) - left}
                yield partial(self._example, *sequence), place

    def _encoded(self, start: Mapping[str, int]) -> Iterator[tuple[dict[str, int], Sequence[int]]]:
        order = 0
        for epoch in count(start["epoch"]):
            first = start["document"] if epoch == start["epoch"] else 0
            empty = True
            for document, text in enumerate(self.documents(epoch, first), first):
                order += 1
                ids = self.encode(text)
                empty = empty and not len(ids)
                yield {"epoch": epoch, "document": document, "order": order}, ids
            if empty and first == 0:
                raise ValueError("the training stream is empty; nothing can be learned from it")

    def _example(self, tokens: torch.Tensor, owners: torch.Tensor) -> Example:
        unmasked = None if self.bos is None else tokens == self.bos
        if unmasked is not None:
            begins = torch.ones_like(unmasked)
            begins[1:] = owners[1:] != owners[:-1]
            unmasked &= begins
        return Example(tokens, documents=owners if self.packing == "isolated" else None, unmasked=unmasked)


def take(source: Source, number: int, seed: int = 0) -> list[Example]:
    """The first sequences of a source: a probe batch, or an evaluation set."""
    return [build() for build, _ in islice(source.read(None, seed), number)]
