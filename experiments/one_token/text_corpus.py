"""`Text`: real English of an installed package or of the user's own files, in two parts that share no document."""

import hashlib
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path

from dlm_lens.files.text_files import read_utf8

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
