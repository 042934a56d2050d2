"""`Responses`: what a model answered, one line per request, so that a killed evaluation goes on."""

import hashlib
import json
import logging
import os
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch

from dlm_lens.placement import named_weights

logger = logging.getLogger(__name__)


class Responses:
    """A JSONL file of answers, appended to with fsync; without a path, nothing is kept.

    The first line says what answered: model, hooks, settings, seed. Answers of another evaluation are never mixed
    in. A last line that a crash tore apart is dropped.

    Args:
        path: the file; created with its folders.
        identity: what the answers depend on; anything JSON.

    Raises:
        ValueError: the file holds answers of another evaluation, or is no such file.
    """

    def __init__(self, path: str | Path | None, identity: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.identity = json.loads(json.dumps(dict(identity), default=repr))
        self._known: dict[str, Any] = {}
        if self.path is not None:
            self._open()

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def __len__(self) -> int:
        return len(self._known)

    def items(self) -> ItemsView[str, Any]:
        """Keys and answers, those from before first."""
        return self._known.items()

    def append(self, answers: Mapping[str, Any]) -> None:
        """Keep answers by their keys, but those that are kept already; they are on disk when this returns."""
        answers = {key: answer for key, answer in answers.items() if key not in self._known}
        if self.path is None or not answers:
            return
        lines = [json.dumps({"key": key, "answer": answer}) + "\n" for key, answer in answers.items()]
        self._write("".join(lines))
        self._known.update(answers)

    def _open(self) -> None:
        path = self._path()
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        first = json.dumps({"answers_of": self.identity}) + "\n"
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and first.encode().startswith(data):
            # Nothing, or a first line that a crash tore apart.
            path.write_bytes(b"")
            self._write(first)
            return
        head, *lines = self._lines(whole)
        self._check(head["answers_of"])
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        self._known = {line["key"]: line["answer"] for line in lines}
        logger.info("%s: %d answers are kept from before", path, len(self._known))

    def _lines(self, whole: bytes) -> list[dict[str, Any]]:
        try:
            found = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            found = []
        if not found or not all(isinstance(line, dict) for line in found) or "answers_of" not in found[0]:
            raise ValueError(f"{self.path} exists and holds no answers of an evaluation; choose another file")
        return found

    def _check(self, theirs: Mapping[str, Any]) -> None:
        # The fingerprint knows a model, wherever it lies.
        for name in sorted({*theirs, *self.identity} - {"model"}):
            if theirs.get(name) != self.identity.get(name):
                raise ValueError(
                    f"{self.path} holds answers with {name}={theirs.get(name)!r:.120}, this evaluation has "
                    f"{self.identity.get(name)!r:.120}; choose another file, or the same settings"
                )

    def _write(self, text: str) -> None:
        # One write, so that another process's lines never stand in the middle of these.
        data = text.encode()
        with self._path().open("ab", buffering=0) as file:
            if file.write(data) != len(data):
                raise OSError(f"{self.path}: the disk took a part of a line; is it full?")
            os.fsync(file.fileno())

    def _path(self) -> Path:
        if self.path is None:
            raise ValueError("these responses have no file")
        return self.path


def fingerprint(model: Any) -> str:
    """A digest of a model: its config, and the shape and a few numbers of every weight."""
    digest = hashlib.sha256(repr(sorted(_plain(model.config).items())).encode())
    for name, weight in named_weights(model, by_name=True):
        length = weight.numel()
        starts = (0, length // 2, max(0, length - 8))
        places = torch.tensor([place for start in starts for place in range(start, min(start + 8, length))])
        # Indexed in its own shape: flattening would copy a weight that is expanded or transposed.
        some = weight.detach()[torch.unravel_index(places.to(weight.device), weight.shape)].float().cpu()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {some.tolist()}".encode())
    return digest.hexdigest()[:16]


def identity_of(hook: Any) -> str:
    """A hook as it is written, with a digest of the tensors in it, which its text does not tell apart."""
    tensors = list(_tensors(hook, set()))
    if not tensors:
        return repr(hook)
    digest = hashlib.sha256()
    for name, tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(plain.shape)} {plain.dtype} ".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return f"{hook!r} #{digest.hexdigest()[:16]}"


def _tensors(value: Any, seen: set[int], name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a value, with where they are: in modules, mappings, lists, fields of dataclasses and hooks."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, torch.nn.Module):
        inside = value.state_dict().items()
    elif isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    elif not isinstance(value, type) and (is_dataclass(value) or hasattr(value, "site")):
        inside = getattr(value, "__dict__", {}).items()
    for key, one in inside:
        yield from _tensors(one, seen, f"{name}.{key}")


def _plain(config: Any) -> dict[str, str]:
    """Settings of a config, without where it was loaded from."""
    private = ("_name_or_path", "transformers_version")
    return {name: repr(value) for name, value in config.to_dict().items() if name not in private}
