"""`Responses`: a file of answers, one line per request, from which a killed evaluation resumes."""

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import ItemsView, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dlm_lens.files.atomic_writes import open_to_append
from dlm_lens.files.locks import lock
from dlm_lens.files.paths import user_path
from dlm_lens.files.sealed_json import Document, append_lines, cut_incomplete_line, fitted, line_of, read_lines
from dlm_lens.placement import float32_products, input_device
from dlm_lens.printable import LONGEST_NAME, printable_name
from dlm_lens.recording.model_identity import config_fields, weights_digest

logger = logging.getLogger(__name__)


class HeadLine(Document):
    """The first line: everything that the answers depend on."""

    answers_of: dict[str, Any]


class AnswerLine(Document):
    """An answer, with the key of its request."""

    key: str
    answer: Any


class Responses:
    """A JSONL file of answers, appended to with fsync; without a path, nothing is stored.

    The first line holds model, hooks, settings and seed; answers of another evaluation are refused. An incomplete
    last line, left by a crash, is dropped. Every line has a checksum.

    Args:
        path: the file; created with its folders.
        identity: what the answers depend on; anything JSON.

    Raises:
        ValueError: the file holds answers of another evaluation or other content, or is damaged.
    """

    def __init__(self, path: str | Path | None, identity: Mapping[str, Any]) -> None:
        self.path = None if path is None else user_path(path)
        self.identity = json.loads(json.dumps(dict(identity), default=repr))
        self._answers: dict[str, Any] = {}
        self._made: list[Path] = []
        self._first = b""
        self.refresh()

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Any:
        return self._answers[key]

    def __len__(self) -> int:
        return len(self._answers)

    def items(self) -> ItemsView[str, Any]:
        """Keys and answers, stored ones first."""
        return self._answers.items()

    def append(self, answers: Mapping[str, Any]) -> None:
        """Store new answers by their keys; they are on disk when this returns.

        Raises:
            ValueError: the file was exchanged for that of another evaluation.
        """
        answers = {key: answer for key, answer in answers.items() if key not in self._answers}
        if self.path is None or not answers:
            return
        entries = [{"key": key, "answer": _finite(answer)} for key, answer in answers.items()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(self.path) as file:
            if not os.fstat(file.fileno()).st_size:  # it was removed, by `forget` or by the user
                entries.insert(0, self._head)
                self._first = line_of(self._head)
            else:
                if self._first != _first_line(self.path):
                    self._lines(self.path, self.path.read_bytes())
                cut_incomplete_line(file, self.path)
            append_lines(file, entries, self.path)
        self._answers.update(answers)

    def forget(self) -> None:
        """Remove the file if it was made here and holds no answer, with the folders made for it.

        A refused evaluation then leaves nothing, and a corrected one can use the same file.
        """
        if self.path is None or self.path not in self._made or not self.path.exists():
            return
        with self._locked(self.path):
            empty = self.path.read_bytes() == line_of(self._head)
            if empty and sys.platform != "win32":  # which deletes no open file, and has no lock
                self.path.unlink()
        if not empty:
            return
        if sys.platform == "win32":
            self.path.unlink()
        for folder in self._made[1:]:
            with suppress(OSError):  # not empty
                folder.rmdir()

    def refresh(self) -> None:
        """Read the answers that the file holds; create the file where it is missing.

        Raises:
            ValueError: the file holds other content.
        """
        if self.path is None:
            return
        path = self.path
        if path.is_dir():
            raise ValueError(f"{path} is a directory; give a file")
        missing = [one for one in (path, *path.parents) if not one.exists()]
        self._made += [one for one in missing if one not in self._made]
        path.parent.mkdir(parents=True, exist_ok=True)
        first = line_of(self._head)
        with self._locked(path) as file:
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if not whole and first.startswith(data):
                # Empty, or an incomplete first line left by a crash.
                os.ftruncate(file.fileno(), 0)
                append_lines(file, [self._head], path)
                self._first = first
                return
            lines = self._lines(path, whole)
            self._first = whole[: whole.index(b"\n") + 1]
            cut_incomplete_line(file, path)
        self._answers = {line.key: line.answer for line in lines}
        logger.info("%s: %d stored answers", path, len(self._answers))

    def _lines(self, path: Path, whole: bytes) -> list[AnswerLine]:
        remedy = "choose another file"
        if b'"answers_of"' not in whole.partition(b"\n")[0]:
            raise ValueError(f"{path} exists and does not hold answers of an evaluation; {remedy}")
        lines = read_lines(whole, path, remedy)
        where, head = next(lines)
        self._check(fitted(HeadLine, head, where, remedy).answers_of)
        found = [fitted(AnswerLine, plain, where, remedy) for where, plain in lines]
        return [line.model_copy(update={"answer": _with_infinities(line.answer)}) for line in found]

    def _check(self, theirs: Mapping[str, Any]) -> None:
        # The fingerprint identifies a model, whatever its path.
        for name in sorted({*theirs, *self.identity} - {"model"}):
            if theirs.get(name) != self.identity.get(name):
                where, one, other = _difference(name, theirs.get(name), self.identity.get(name))
                raise ValueError(
                    f"{self.path} holds answers with {where}={one}, this evaluation has {other}; choose another "
                    "file, or the same settings"
                )

    @property
    def _head(self) -> dict[str, Any]:
        return {"answers_of": self.identity}

    @staticmethod
    @contextmanager
    def _locked(path: Path) -> Iterator[IO[bytes]]:
        """The file, open to append to; another process that writes to it waits."""
        while True:
            with open_to_append(path) as file:
                lock(file, wait=True)
                if not os.fstat(file.fileno()).st_nlink:
                    continue  # removed by `forget` between its opening and its lock
                yield file
                return


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


def _difference(name: str, one: Any, other: Any) -> tuple[str, str, str]:
    """The name of the part of a setting that differs, and both values, in at most 120 characters each.

    Long values, such as a config or a list of hooks, begin alike: they are shown from where they differ.
    """
    texts = repr(one), repr(other)
    if max(map(len, texts)) <= LONGEST_NAME:
        return name, *texts
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        inner = min(key for key in {*one, *other} if one.get(key) != other.get(key))
        return _difference(f"{name}.{inner}", one.get(inner), other.get(inner))
    same = next((place for place, pair in enumerate(zip(*texts, strict=False)) if len({*pair}) > 1), 0)
    start = max(0, same - 40)
    first, second = (f"{'...' * (start > 0)}{printable_name(text[start:])}" for text in texts)
    return name, first, second


def _finite(answer: Any) -> Any:
    """An answer with infinities and NaN as {"float": "-inf"}, since JSON has neither."""
    if isinstance(answer, float) and not math.isfinite(answer):
        return {"float": repr(answer)}
    if isinstance(answer, list | tuple):
        return [_finite(each) for each in answer]
    return {key: _finite(each) for key, each in answer.items()} if isinstance(answer, dict) else answer


def _with_infinities(answer: Any) -> Any:
    if isinstance(answer, dict) and answer.keys() == {"float"}:
        return float(answer["float"])
    if isinstance(answer, dict):
        return {key: _with_infinities(each) for key, each in answer.items()}
    return [_with_infinities(each) for each in answer] if isinstance(answer, list) else answer


def fingerprint(model: Any) -> str:
    """A digest of a model: its config, and the dtype and every entry of every weight (`weights_digest`).

    Where torch multiplies float32 matrices in another precision (`float32_products`), it is another digest.
    """
    dtypes = sorted((name, str(weight.dtype)) for name, weight in model.named_parameters())
    about = f"{sorted(config_fields(model.config).items())} {dtypes} {weights_digest(model)}"
    products = float32_products(input_device(model))
    about += "" if products == "float32" else f" products in {products}"
    return hashlib.sha256(about.encode()).hexdigest()[:16]
