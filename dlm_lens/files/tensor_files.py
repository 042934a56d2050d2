"""Safetensors files: written atomically, with a SHA-256 digest that is compared when they are read."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from dlm_lens.files.atomic_writes import replacing
from dlm_lens.files.paths import check_utf8
from dlm_lens.files.sealed_json import CHECKSUM, DamagedFileError, file_bytes

METADATA = "__metadata__"
"""The name of the metadata in a safetensors header (its format's documentation)."""


@dataclass(frozen=True)
class WrittenFile:
    """Size and digest of a written file.

    Args:
        size: in bytes.
        digest: SHA-256 of its content.
    """

    size: int
    digest: str


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Write a safetensors file; metadata carries a checksum of itself and the tensors.

    Raises:
        DiskFullError: there is no space for it.
    """
    # safetensors refuses tensors that share memory.
    plain = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
    }
    stored = None if metadata is None else {**metadata, CHECKSUM: _checksum(plain, metadata)}
    header, values = _in_order(save(plain, stored))
    digest = hashlib.sha256(header)
    digest.update(values)
    with replacing(path) as file:
        file.write(header)
        file.write(values)
    return WrittenFile(len(header) + len(values), digest.hexdigest())


def _in_order(content: bytes) -> tuple[bytes, memoryview]:
    """Header and values of a safetensors file, with its metadata in alphabetical order.

    safetensors writes metadata in an order that differs from call to call; so equal files have equal bytes.
    """
    length = int.from_bytes(content[:8], "little")
    header, values = json.loads(content[8 : 8 + length]), memoryview(content)[8 + length :]
    if METADATA in header:
        header[METADATA] = dict(sorted(header[METADATA].items()))
    written = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)  # the values begin at a multiple of 8
    return len(written).to_bytes(8, "little") + written, values


def read_tensors(path: Path, remedy: str, digest: str | None = None) -> dict[str, Tensor]:
    """The tensors of a file.

    Raises:
        DamagedFileError: it is missing, no such file, or not the one of this digest.
    """
    content = file_bytes(path, remedy)
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise DamagedFileError(f"{path} is damaged (its checksum is another); {remedy}")
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}); {remedy}") from None


def metadata_of(path: Path, remedy: str, what: str = "safetensors file") -> dict[str, str]:
    """The metadata of a safetensors file, unchecked; `what` it should be.

    Raises:
        DamagedFileError: it is no such file.
        ValueError: its path is not UTF-8.
    """
    check_utf8(path)
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path} is no {what}, or damaged ({error!s:.200}); {remedy}") from None


def read_with_metadata(path: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file that was written with metadata, and these; both are what was written.

    Raises:
        DamagedFileError: they are not.
    """
    metadata, tensors = metadata_of(path, remedy), read_tensors(path, remedy)
    if metadata.pop(CHECKSUM, None) != _checksum(tensors, metadata):
        raise DamagedFileError(f"{path} is damaged (its checksum is another, or missing); {remedy}")
    return tensors, metadata


def file_digest(path: Path) -> str:
    """The SHA-256 digest of a file, which is read a piece at a time.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(path: Path, digest: str, remedy: str) -> None:
    """Raise unless a file has this digest; it is read a piece at a time.

    Raises:
        DamagedFileError: it has another, or cannot be read.
    """
    try:
        found = file_digest(path)
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror}); {remedy}") from None
    if found != digest:
        raise DamagedFileError(f"{path} is damaged (its checksum is another); {remedy}")


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    found = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
