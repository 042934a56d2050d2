"""Headers of safetensors files: names, dtypes and shapes of tensors, checked before their numbers are read."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_lens.adapters.json_files import printable, shown

LONGEST_HEADER = 100_000_000
"""Bytes, the safetensors library's own bound."""

MOST_TENSORS = 1_000_000
MOST_AXES = 16

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of an element, by the names of safetensors headers."""


@dataclass(frozen=True)
class TensorHeader:
    """What a header says of one tensor.

    Args:
        dtype: by safetensors' name.
        shape: of the tensor.
        size: bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    size: int


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Name -> dtype, shape and size of every tensor of a safetensors file.

    Raises:
        ValueError: no safetensors file, one cut short, or a header that contradicts itself.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start == b"version ":
            raise ValueError(f"{file} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        length = int.from_bytes(start, "little")
        if len(start) == 8 and LONGEST_HEADER < length <= size - 8:
            raise _unreadable(file, f"a header of {length} bytes, {LONGEST_HEADER} is the most")
        content = opened.read(length) if 0 < length <= size - 8 else b""
    try:
        header = json.loads(content.decode("utf-8"), object_pairs_hook=_without_repetition)
    except _RepeatedNameError as error:
        raise _unreadable(file, f"its header holds {printable(str(error))} twice") from None
    except (ValueError, RecursionError):
        raise _unreadable(file) from None
    if not isinstance(header, dict):
        raise _unreadable(file)
    header.pop("__metadata__", None)
    if len(header) > MOST_TENSORS:
        raise _unreadable(file, f"{len(header)} tensors, {MOST_TENSORS} is the most")
    places = {name: _place(file, name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, begin, stop) in sorted(places.items(), key=lambda item: item[1][1:]):
        if begin != end:
            what = "overlaps another tensor" if begin < end else "leaves a gap before it"
            raise _unreadable(file, f"{printable(name)} {what}")
        end = stop
    needed = 8 + length + end
    if size < needed:
        raise ValueError(f"{file} is cut short, {size} of {needed} bytes; fetch it again")
    if size > needed:
        raise _unreadable(file, f"{size - needed} bytes follow its last tensor")
    return {name: entry for name, (entry, _, _) in places.items()}


def _place(file: Path, name: str, entry: Any) -> tuple[TensorHeader, int, int]:
    """The entry of one tensor, and where its numbers begin and end."""
    what = printable(name)
    if not isinstance(entry, Mapping):
        raise _unreadable(file, f"{what} is described by {shown(entry)}")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _unreadable(file, f"{what} has the dtype {shown(dtype)}, none of safetensors'")
    if not _whole(shape) or len(shape) > MOST_AXES:
        raise _unreadable(file, f"{what} has the shape {shown(shape)}")
    if not _whole(offsets) or len(offsets) != 2:
        raise _unreadable(file, f"{what} has the offsets {shown(offsets)}")
    begin, end = offsets
    needed = -(-math.prod(shape) * BITS[dtype] // 8)
    if end - begin != needed:
        raise _unreadable(
            file,
            f"{what} of shape {shown(shape)} and dtype {dtype} needs {shown(needed)} bytes and has "
            f"{shown(end - begin)}",
        )
    return TensorHeader(dtype, tuple(shape), needed), begin, end


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _unreadable(file: Path, why: str = "") -> ValueError:
    return ValueError(f"{file} is no readable safetensors file{f' ({why})' if why else ''}; fetch it again")


class _RepeatedNameError(Exception):
    pass


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _RepeatedNameError(name)
        found[name] = value
    return found
