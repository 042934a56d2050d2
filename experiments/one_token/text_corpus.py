"""`Text`: real English of an installed package or of the user's own files, in two parts that share no document."""

import hashlib
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from dlm_lens.files.paths import read_utf8
from dlm_lens.training.sources import Example, RowSource

KJV = "kjv"
"""Name of the text of Debian's package bible-kjv."""

LENGTH = 64
"""Positions of a row of tokens."""

VERSES = 31_102
"""Of the whole text; a `bible` that prints another number is another program."""


@dataclass(frozen=True)
class Text:
    """Documents in their order, cut into blocks, of which some are held out.

    The documents lie in `blocks` stretches of about equal bytes; every `every`-th stretch is for validation. A
    document belongs to the stretch in which it begins, and one that training holds word for word is left out of
    validation.

    Args:
        documents: not empty.
        blocks: stretches.
        every: how many stretches there are for one of validation.

    Raises:
        ValueError: a part without documents.
    """

    documents: tuple[str, ...] = field(repr=False)
    blocks: int = 40
    every: int = 10

    def __post_init__(self) -> None:
        if not self.training or not self.validation:
            raise ValueError(
                f"a text of {len(self.documents)} documents has {len(self.training)} for training and "
                f"{len(self.validation)} for validation; give a longer one (documents end at empty lines)"
            )

    @cached_property
    def held_out(self) -> tuple[bool, ...]:
        """For each document, whether its stretch is for validation: of ten, the sixth, so not the last pages."""
        sizes = [len(document.encode()) for document in self.documents]
        begins = [0, *accumulate(sizes)]
        blocks = (begin * self.blocks // max(1, begins[-1]) for begin in begins[:-1])
        return tuple(block % self.every == self.every // 2 for block in blocks)

    @cached_property
    def training(self) -> tuple[str, ...]:
        """Documents to learn from."""
        return tuple(one for one, held in zip(self.documents, self.held_out, strict=True) if not held)

    @cached_property
    def validation(self) -> tuple[str, ...]:
        """Documents held out."""
        known = set(self.training)
        pairs = zip(self.documents, self.held_out, strict=True)
        return tuple(one for one, held in pairs if held and one not in known)

    @cached_property
    def digest(self) -> str:
        """Of the documents and how they are parted."""
        made = hashlib.sha256(f"{self.blocks} {self.every}".encode())
        for document in self.documents:
            made.update(b"\0" + document.encode())
        return made.hexdigest()[:12]

    def repeated(self) -> float:
        """Share of the lines of validation that training has too, word for word."""
        known = {line for document in self.training for line in document.split("\n")}
        lines = [line for document in self.validation for line in document.split("\n")]
        return sum(line in known for line in lines) / len(lines)


@cache
def read_text(place: str) -> Text:
    """The text of that name or at that place.

    Args:
        place: "kjv", or a .txt file or a folder of them in UTF-8, whose documents end at empty lines.

    Raises:
        FileNotFoundError: the package is not installed, or there is no such file.
        ValueError: a text too short to be parted, or not in UTF-8.
    """
    return Text(tuple(_chapters(_verses()) if place == KJV else _paragraphs(Path(place).expanduser())))


def _verses() -> list[str]:
    """The lines of the program `bible`, "Ge1:1 In the beginning ..."."""
    program = shutil.which("bible")
    if program is None:
        raise FileNotFoundError(
            "text=kjv is the King James Version as Debian packages it (4.1 MB; the text's copyright has expired, "
            "the program that prints it is GPL-2+), and it is not installed: `apt-get install bible-kjv`, or give "
            "a .txt file or a folder of them with --set text=PATH"
        )
    command = [program, "-f", "gen1:1-rev22:21"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if done.returncode or len(lines) != VERSES:
        raise ValueError(
            f"{program} printed {len(lines)} verses instead of {VERSES}: it is not that of Debian's package "
            "bible-kjv; install it, or give a .txt file with --set text=PATH"
        )
    return lines


def _chapters(verses: Iterable[str]) -> list[str]:
    """A chapter is a document, its verses are lines, their numbers are left out."""
    chapters: dict[str, list[str]] = {}
    for line in verses:
        place, verse = line.split(" ", 1)
        chapters.setdefault(place.split(":")[0], []).append(verse)
    return ["\n".join(chapter) for chapter in chapters.values()]


def _paragraphs(path: Path) -> list[str]:
    if not path.exists():
        raise FileNotFoundError(f"text={path} is not there; give a .txt file, a folder of them, or {KJV}")
    files: Sequence[Path] = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"the folder {path} holds no .txt file")
    found: list[str] = []
    for file in files:
        marked = "\n".join(line.strip() for line in read_utf8(file, "texts: convert it first").splitlines())
        found += [part.strip("\n") for part in marked.split("\n\n") if part.strip()]
    return found


VOCABULARY = 1024
"""Tokens at most: 256 bytes, merges, and the three below."""

PAD, EOS, MASK = "<pad>", "<eos>", "[MASK]"


def build_tokenizer(documents: Sequence[str], size: int = VOCABULARY) -> Any:
    """A byte-level BPE of `size` tokens at most, learned from the documents; nothing begins a text.

    `<eos>` ends a document, `[MASK]` has the last id. The same documents give the same tokenizer.

    Raises:
        ValueError: a size that leaves no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if size < len(alphabet) + 3:
        raise ValueError(f"a vocabulary of {size} has no room for {len(alphabet)} bytes and three special tokens")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(documents, trainer)
    # Last, so that a conversion, which sets the mask's row to the mean of the rows before it, averages all tokens.
    backend.add_special_tokens([MASK])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        mask_token=MASK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text as full rows, with `<eos>` after every document; an incomplete last row is dropped.

    Args:
        tokenizer: of the training part.
        training: rows to learn from.
        validation: rows held out.
    """

    tokenizer: Any
    training: Int[Tensor, "row position"]
    validation: Int[Tensor, "row position"]

    def source(self) -> RowSource:
        """The training rows without end, for the trainer."""
        return RowSource(self.training, Example, LENGTH, self.tokenizer.pad_token_id)

    def held_out(self, count: int) -> Int[Tensor, "row position"]:
        """`count` validation rows, evenly over the held-out text; all, if there are no more."""
        rows = len(self.validation)
        return self.validation[torch.arange(min(count, rows)) * rows // min(count, rows)]

    def bytes_of(self, rows: Int[Tensor, "row position"]) -> int:
        """UTF-8 bytes that the tokens stand for; `<eos>` stands for one, the empty line between documents."""
        return int(self._sizes()[rows].sum())

    def _sizes(self) -> Int[Tensor, "d_vocab"]:
        """A character of a byte-level token is a byte."""
        words = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        special = {PAD: 0, EOS: 1, MASK: 0}
        return torch.tensor([special.get(word, len(word)) for word in words])

    @property
    def digest(self) -> str:
        """Of the tokenizer, with all its merges."""
        return hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:12]


@cache
def encoded(place: str) -> Encoded:
    """The text at that place, encoded.

    Raises:
        FileNotFoundError: as `read_text`.
        ValueError: as `read_text`, or a part shorter than a row.
    """
    return encode(read_text(place))


def encode(text: Text) -> Encoded:
    """A text as rows.

    Raises:
        ValueError: a part shorter than a row.
    """
    tokenizer = build_tokenizer(text.training)
    return Encoded(tokenizer, *(_rows(tokenizer, part) for part in (text.training, text.validation)))


def _rows(tokenizer: Any, documents: Sequence[str]) -> Int[Tensor, "row position"]:
    found = tokenizer(list(documents), add_special_tokens=False)["input_ids"]
    ids = [token for document in found for token in (*document, tokenizer.eos_token_id)]
    rows = len(ids) // LENGTH
    if not rows:
        raise ValueError(
            f"a part of the text has {len(ids)} tokens, and a row has {LENGTH}; give a longer text (a twentieth of "
            "it and more is held out)"
        )
    return torch.tensor(ids[: rows * LENGTH]).view(rows, LENGTH)
