"""Whether a checkpoint's weights fit into memory, told from the headers of its files before anything is read."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import constants

from dlm_lens.adapters.hub import local_file, optional_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Floating dtypes by the names of safetensors headers."""


def check_memory(
    source: str,
    dtype: torch.dtype | None,
    device_map: Any,
    *,
    options: Mapping[str, Any],
    stored: torch.dtype | None = None,
    element_size: float | None = None,
) -> None:
    """Refuse weights that are larger than the free memory of the one device that they go to.

    Counts the weights alone: what a forward pass needs comes on top. Where device_map names several places, or
    lets accelerate choose, there is nothing to check.

    Args:
        source: a safetensors file, a checkpoint's directory or a hub name.
        dtype: in which the weights are kept; None for that of the files.
        device_map: as given to `load`.
        options: `revision`, if any.
        stored: dtype of files that are not here yet, where known.
        element_size: bytes per weight of a matrix that is quantised while loading.

    Raises:
        MemoryError: with both numbers.
        FileNotFoundError: the index names a file that is missing.
        ValueError: a file is no safetensors file, or cut short, or the device is none of this machine.
    """
    needed = weight_bytes(source, dtype, options=options, stored=stored, element_size=element_size)
    device = _device(device_map)
    free = None if device is None else free_bytes(device)
    if needed is None or free is None or needed <= free:
        return
    half = weight_bytes(source, torch.bfloat16, options=options, stored=stored, element_size=element_size)
    smaller = f'dtype="bfloat16" ({_gigabytes(half)}), ' if half is not None and half < 0.9 * needed else ""
    raise MemoryError(
        f"the weights of {source} need {_gigabytes(needed)}, and {_gigabytes(free)} are free on {device}; pass "
        f'{smaller}device_map="auto" to spread them over the devices, or a quantization_config, or free memory'
    )


def weight_bytes(
    source: str,
    dtype: torch.dtype | None,
    *,
    options: Mapping[str, Any],
    stored: torch.dtype | None = None,
    element_size: float | None = None,
) -> int | None:
    """Bytes that the weights take once loaded as `dtype`; None where no file tells. Arguments: `check_memory`.

    Raises:
        FileNotFoundError: the index names a file that is missing.
        ValueError: a file is no safetensors file, or cut short.
    """
    total = 0.0
    files = _files(source, options)
    if isinstance(files, int):
        kept = dtype or stored
        return files * kept.itemsize // stored.itemsize if kept and stored else files
    for file in files:
        for entry in _header(file).values():
            count = torch.Size(entry["shape"]).numel()
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in _STORED:
                total += end - begin
            elif element_size is not None and len(entry["shape"]) > 1:
                total += count * element_size
            else:
                total += count * (dtype or _STORED[entry["dtype"]]).itemsize
    return int(total) if files else None


def free_bytes(device: torch.device) -> int | None:
    """Memory that a device can still give; None for a kind that cannot be asked."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch keeps in reserve is free for its next tensors too.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return None


def _device(device_map: Any) -> torch.device | None:
    """The one device of a device map; None where there are several, or accelerate chooses.

    Raises:
        ValueError: no device, or none of this machine.
    """
    places = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    if len(places) != 1:
        return None
    (place,) = places
    if place is None:
        return torch.get_default_device()
    if place in ("auto", "balanced", "balanced_low_0", "sequential", "disk"):
        return None
    try:
        device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f'device_map {device_map!r} names no device; give "cpu", "cuda", "cuda:1" or "auto"'
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device_map {device_map!r} asks for {device}, and this machine has {torch.cuda.device_count()} CUDA "
            'devices; leave device_map out for the CPU, or give "auto"'
        )
    return device


def _files(source: str, options: Mapping[str, Any]) -> list[Path] | int:
    """The weight files, or how many bytes the index promises where they still have to be downloaded."""
    if Path(source).is_file():
        return [Path(source)]
    single = local_file(source, WEIGHTS, dict(options))
    if single is not None:
        return [single]
    index = optional_file(source, INDEX, dict(options))
    if index is None:
        return []
    try:
        listed = json.loads(Path(index).read_text(encoding="utf-8"))
        names = sorted(set(listed["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is no index of weights (a JSON object with a weight_map); fetch it again"
        ) from error
    held = {name: local_file(source, name, dict(options)) for name in names}
    files = [file for file in held.values() if file is not None]
    if len(files) < len(names) and (Path(source).is_dir() or constants.HF_HUB_OFFLINE):
        lacking = ", ".join(name for name, file in held.items() if file is None)
        raise FileNotFoundError(f"{index} names {len(names)} files, of which {lacking} is missing: fetch it too")
    return files if len(files) == len(names) else int(listed.get("metadata", {}).get("total_size", 0)) or []


def _header(file: Path) -> dict[str, Any]:
    """Name -> dtype, shape and place of every tensor."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start == b"version ":
            raise ValueError(f"{file} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        length = int.from_bytes(start, "little")
        try:
            header = json.loads(opened.read(length)) if 0 < length <= size - 8 else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"{file} is no readable safetensors file; fetch it again")
    header.pop("__metadata__", None)
    needed = 8 + length + max(_ends(header), default=0)
    if size < needed:
        raise ValueError(f"{file} is cut short, {size} of {needed} bytes; fetch it again")
    return header


def _ends(header: Mapping[str, Any]) -> Iterator[int]:
    return (int(entry["data_offsets"][1]) for entry in header.values())


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
