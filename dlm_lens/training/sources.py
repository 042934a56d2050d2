"""Training sequences: `Example`, `Rows` of a batch, and the sources that yield them in order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.shapes import check_shapes


@dataclass(frozen=True, eq=False)
class Example:
    """One clean sequence, without padding.

    Args:
        tokens: its ids.
        prompt_length: the first positions, which the loss leaves out: a prompt in fine-tuning, 0 in pre-training.
        documents: which document each position belongs to, if documents share the sequence without seeing each
            other; None if all positions see each other.
        unmasked: positions that are never masked whatever the settings, such as a beginning of text.
    """

    tokens: Int[Tensor, "position"]
    prompt_length: int = 0
    documents: Int[Tensor, "position"] | None = None
    unmasked: Bool[Tensor, "position"] | None = None

    def shortened(self, length: int) -> "Example":
        """Its first `length` positions."""
        documents = None if self.documents is None else self.documents[:length]
        unmasked = None if self.unmasked is None else self.unmasked[:length]
        return Example(self.tokens[:length], min(self.prompt_length, length), documents, unmasked)


@dataclass(frozen=True, eq=False)
class Rows:
    """A batch of clean sequences, padded on the right.

    Args:
        tokens: x_0.
        visible: content (True) or padding (False).
        answer: positions that the noise masks and whose loss counts; in pre-training all content.
        prompt: positions that the noise masks only in a share `whole_share` of the rows.
        documents: as in `Example`, or None.

    Raises:
        ValueError: shapes that differ, or a position in two of answer, prompt and padding.
    """

    tokens: Int[Tensor, "batch position"]
    visible: Bool[Tensor, "batch position"]
    answer: Bool[Tensor, "batch position"]
    prompt: Bool[Tensor, "batch position"]
    documents: Int[Tensor, "batch position"] | None = None

    def __post_init__(self) -> None:
        check_shapes(self)
        if bool(((self.answer | self.prompt) & ~self.visible).any()) or bool((self.answer & self.prompt).any()):
            raise ValueError("a position is marked as two of answer, prompt and padding; mark it as one of them")

    @classmethod
    def of(cls, examples: Sequence[Example], length: int, padding: int) -> "Rows":
        """Examples as rows of `length` positions; the id `padding` is arbitrary, since no position sees it.

        Raises:
            ValueError: an example longer than a row.
        """
        longest = max(len(example.tokens) for example in examples)
        if longest > length:
            raise ValueError(
                f"a sequence of {longest} tokens does not fit rows of {length}; cut it, or raise length"
            )
        tokens = torch.full((len(examples), length), padding)
        visible, answer, prompt = (torch.zeros(len(examples), length, dtype=torch.bool) for _ in range(3))
        packed = any(example.documents is not None for example in examples)
        documents = torch.full((len(examples), length), -1) if packed else None
        for row, example in enumerate(examples):
            size = len(example.tokens)
            tokens[row, :size] = example.tokens
            visible[row, :size] = True
            free = torch.ones(size, dtype=torch.bool) if example.unmasked is None else ~example.unmasked
            prompt[row, : example.prompt_length] = free[: example.prompt_length]
            answer[row, example.prompt_length : size] = free[example.prompt_length :]
            if documents is not None:
                documents[row, :size] = 0 if example.documents is None else example.documents
        return cls(tokens, visible, answer, prompt, documents)

    def first(self) -> Bool[Tensor, "batch position"]:
        """The first position of every row and of every document in it."""
        flags = torch.zeros_like(self.visible)
        flags[:, 0] = True
        if self.documents is not None:
            flags[:, 1:] |= self.documents[:, 1:] != self.documents[:, :-1]
        return flags

    def position_ids(self) -> Int[Tensor, "batch position"]:
        """Rotary positions, from 0 in every row and document."""
        index = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
        return index - index.masked_fill(~self.first(), 0).cummax(-1).values

    def blocks(
        self, block_length: int, from_text: bool, *, whole_prompt: bool = False
    ) -> Int[Tensor, "batch position"]:
        """Number of every position's block, for block diffusion; the earliest block may be short.

        Args:
            block_length: positions of a block.
            from_text: count from the first position of every row and document, instead of from its answer's.
            whole_prompt: what is before the answer is one block, however long; only where blocks are counted from
                the answer.
        """
        positions = self.position_ids()
        if from_text:
            return positions.div(block_length, rounding_mode="floor")
        document = self.first().long().cumsum(-1) - 1
        far = self.tokens.shape[1]
        places = positions.masked_fill(~self.answer, far)
        least = torch.full_like(places, far).scatter_reduce(1, document, places, "amin")
        # A document without an answer counts from its first position.
        begin = least.masked_fill(least == far, 0).gather(1, document)
        numbers = (positions - begin).div(block_length, rounding_mode="floor")
        return numbers.clamp(min=-1) if whole_prompt else numbers

    def network_inputs(self) -> dict[str, Tensor]:
        """Attention mask and position ids of the network; empty where neither padding nor documents need them.

        With isolated documents the mask is block-diagonal `[batch, 1, query, key]`, and positions start at 0 in
        each document. A padded position sees itself, so that no row of the mask is empty.
        """
        if self.documents is not None:
            same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
            own = torch.eye(self.tokens.shape[1], dtype=torch.bool)
            mask = same & self.visible[:, None, None, :] | own
            return {"attention_mask": mask, "position_ids": self.position_ids()}
        return {} if bool(self.visible.all()) else {"attention_mask": self.visible.long()}


Packing = Literal["joined", "isolated"]
Cursor = Mapping[str, int]
"""The position in a source, stored in a checkpoint."""

Build = Callable[[], Example]
ORDER = 3
"""Random stream of the order of rows; the objective uses other streams."""


class Source(Protocol):
    """An endless sequence of training sequences, in an order that depends on the seed alone."""

    @property
    def length(self) -> int:
        """Positions of a row."""
        ...

    @property
    def padding(self) -> int:
        """An id for the positions after a sequence."""
        ...

    def read(self, cursor: Cursor | None, seed: int) -> Iterator[tuple[Build, Cursor]]:
        """The sequences after `cursor` (None: all), each as a function that builds it and the cursor after it.

        Functions, because each process builds only its share of the sequences.
        """
        ...


def required_column(dataset: Any, name: str, rows: Iterable[Any] | None = None) -> None:
    """Raise where a dataset lacks a column.

    Args:
        dataset: of the datasets library, or a list of mappings.
        name: of the column.
        rows: of a dataset that does not say its columns; None for the dataset itself.

    Raises:
        ValueError: naming the columns of the dataset.
    """
    columns = getattr(dataset, "column_names", None)
    if columns is None:
        first = next(iter(dataset if rows is None else rows), None)
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
        padding: an id for the positions after a sequence, which no position sees.

    Raises:
        ValueError: the dataset is empty.
    """

    rows: Any = field(repr=False)
    build: Callable[[Any], Example] = field(repr=False)
    length: int
    padding: int = 0

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise ValueError("the training dataset is empty; give at least one row")

    def read(self, cursor: Cursor | None, seed: int) -> Iterator[tuple[Build, Cursor]]:
        """As in `Source`; `cursor` counts sequences."""
        for sample in count((cursor or {}).get("sample", 0)):
            epoch, index = divmod(sample, len(self.rows))
            row = int(epoch_order(len(self.rows), seed, epoch)[index])
            yield partial(self.example, row), {"sample": sample + 1}

    def once(self, seed: int) -> Iterator[Build]:
        """The sequences of one epoch."""
        return (build for build, _ in islice(self.read(None, seed), len(self.rows)))

    def example(self, row: int) -> Example:
        """The sequence of a row.

        Raises:
            ValueError: naming the row, of which no sequence can be made.
        """
        try:
            return self.build(self.rows[row])
        except ValueError as error:
            raise ValueError(f"row {row} of the data: {error}") from error


@dataclass(frozen=True)
class PackedSource:
    """A stream of documents, each with an end-of-text token, cut into full sequences.

    Reading resumes at (document, token); earlier documents are skipped without encoding them.

    Args:
        documents: (epoch, number of documents to skip) -> texts or ids.
        encode: document -> ids, with the end-of-text token (and a beginning-of-text token, where used).
        length: positions of a sequence.
        packing: "joined", documents in a sequence see each other as in SMDM and LLaDA; "isolated", they do not.
        bos: the beginning-of-text id, never masked at the start of a document or sequence; None for none.
        padding: any id.
        size: documents of an epoch; None where it is not known.
    """

    documents: Callable[[int, int], Iterator[Any]] = field(repr=False)
    encode: Callable[[Any], Sequence[int]] = field(repr=False)
    length: int
    packing: Packing = "joined"
    bos: int | None = None
    padding: int = 0
    size: int | None = None

    def __post_init__(self) -> None:
        if self.packing not in get_args(Packing):
            raise ValueError(
                f"packing is {self.packing!r}; it must be one of {', '.join(map(repr, get_args(Packing)))}"
            )

    def read(self, cursor: Cursor | None, seed: int) -> Iterator[tuple[Build, Cursor]]:
        """As in `Source`; documents keep the order of the stream.

        Raises:
            ValueError: an epoch without a document.
        """
        return self._sequences(cursor)

    def once(self, seed: int) -> Iterator[Build]:
        """The sequences of one epoch; the last one holds the tokens that are left, and may be short.

        Raises:
            ValueError: an epoch without a document.
        """
        return (build for build, _ in self._sequences(None, epochs=1))

    def _sequences(self, cursor: Cursor | None, epochs: int | None = None) -> Iterator[tuple[Build, Cursor]]:
        start = dict(cursor or {"epoch": 0, "document": 0, "token": 0})
        tokens: list[int] = []
        owners: list[int] = []
        for number, ids in self._encoded(start, epochs):
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
                cursor_after = {"epoch": number["epoch"], "document": number["document"], "token": len(ids) - left}
                yield partial(self._example, *sequence), cursor_after
        if tokens:  # of a last epoch, after which the source is at its beginning
            yield partial(self._example, torch.tensor(tokens), torch.tensor(owners)), {}

    def _encoded(
        self, start: Mapping[str, int], epochs: int | None = None
    ) -> Iterator[tuple[dict[str, int], Sequence[int]]]:
        order = 0
        for epoch in count(start["epoch"]) if epochs is None else range(start["epoch"], epochs):
            first = start["document"] if epoch == start["epoch"] else 0
            empty = True
            for document, text in enumerate(self.documents(epoch, first), first):
                order += 1
                ids = self.encode(text)
                empty = empty and not len(ids)
                yield {"epoch": epoch, "document": document, "order": order}, ids
            if empty and first == 0:
                raise ValueError("the stream of texts is empty; give at least one document")

    def _example(self, tokens: torch.Tensor, owners: torch.Tensor) -> Example:
        unmasked = None if self.bos is None else tokens == self.bos
        if unmasked is not None:
            begins = torch.ones_like(unmasked)
            begins[1:] = owners[1:] != owners[:-1]
            unmasked &= begins
        return Example(tokens, documents=owners if self.packing == "isolated" else None, unmasked=unmasked)


def take(source: Source, number: int, seed: int = 0, *, repeat: bool = True) -> list[Example]:
    """The first sequences of a source, for a probe batch or an evaluation set.

    Args:
        source: of sequences.
        number: of sequences, at most.
        seed: of their order.
        repeat: go on with a second epoch where the first has fewer sequences. Without it every token of a small
            set comes once, and the last packed sequence may be short; a source of one's own, which has no `once`,
            is read on in any case.
    """
    if not repeat and isinstance(source, RowSource | PackedSource):
        return [build() for build in islice(source.once(seed), number)]
    return [build() for build, _ in islice(source.read(None, seed), number)]
