"""Whether a checkpoint's weights fit into memory, from the headers of its files."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import constants

from dlm_lens.adapters.hub import check_name, local_file, optional_file
from dlm_lens.adapters.quantisation import floating_dtype
from dlm_lens.adapters.weight_headers import read_header
from dlm_lens.files.json_objects import read_object
from dlm_lens.placement import named_device
from dlm_lens.printable import printable_name, shown

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
    """Bytes that the weights take once loaded as `dtype`; None where no file says. Arguments: `check_memory`.

    Raises:
        FileNotFoundError: the index names a file that is missing.
        ValueError: a file is no safetensors file, or cut short.
    """
    total = 0.0
    files = weight_files(source, options)
    if isinstance(files, int):
        kept = dtype or stored
        return files * kept.itemsize // stored.itemsize if kept and stored else files
    for file in files:
        for entry in read_header(file).values():
            count = math.prod(entry.shape)
            if entry.dtype not in _STORED:
                total += entry.size
            elif element_size is not None and len(entry.shape) > 1:
                total += count * element_size
            else:
                total += count * (dtype or _STORED[entry.dtype]).itemsize
    return int(total) if files else None


def free_bytes(device: torch.device) -> int | None:
    """Memory that a device can still give; None for a kind of device that does not report it."""
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
    refusal = f'device_map {shown(device_map)} names no device; give "cpu", "cuda", "cuda:1" or "auto"'
    listed = list(device_map.values()) if isinstance(device_map, Mapping) else [device_map]
    if not all(isinstance(place, str | int | torch.device | None) for place in listed):
        raise ValueError(refusal)
    places = set(listed)
    if len(places) != 1:
        return None
    (place,) = places
    if place is None:
        return torch.get_default_device()
    if place in ("auto", "balanced", "balanced_low_0", "sequential", "disk"):
        return None
    try:
        device = named_device(place)
    except (RuntimeError, TypeError) as error:
        raise ValueError(refusal) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device_map {device_map!r} asks for {device}, and this machine has {torch.cuda.device_count()} CUDA "
            'devices; leave device_map out for the CPU, or give "auto"'
        )
    return device


def weight_files(source: str, options: Mapping[str, Any]) -> list[Path] | int:
    """The weight files, or how many bytes the index promises where they still have to be downloaded.

    Raises:
        FileNotFoundError: the index names a file that is missing.
        ValueError: the index is no JSON object, or names what is no safetensors file of the checkpoint.
    """
    if Path(source).is_file():
        return [Path(source)]
    single = local_file(source, WEIGHTS, dict(options))
    if single is not None:
        return [single]
    index = optional_file(source, INDEX, dict(options))
    if index is None:
        return []
    listed, names = _listed(Path(index))
    held = {name: local_file(source, name, dict(options)) for name in names}
    files = [file for file in held.values() if file is not None]
    if len(files) < len(names) and (Path(source).is_dir() or constants.HF_HUB_OFFLINE):
        lacking = ", ".join(printable_name(name) for name, file in held.items() if file is None)
        raise FileNotFoundError(f"{index} names {len(names)} files, of which {lacking} is missing: fetch it too")
    return files if len(files) == len(names) else _promised(listed)


def _listed(index: Path) -> tuple[dict[str, Any], list[str]]:
    refusal = f"{index} is no index of weights (a JSON object with a weight_map and metadata); fetch it again"
    try:
        listed = read_object(index, str(index))
    except ValueError as error:
        raise ValueError(refusal) from error
    weights, about = listed.get("weight_map"), listed.get("metadata")  # transformers wants both
    if not isinstance(weights, dict) or not weights or not isinstance(about, dict):
        raise ValueError(refusal)
    for tensor, name in weights.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index} says that {printable_name(tensor)} is in {shown(name)}, which is no safetensors file; "
                "pickled weights are refused because loading them executes code: convert them to safetensors first"
            )
        check_name(str(index), name)
    if about.get("dtype") is not None:
        try:
            floating_dtype(about["dtype"])  # which transformers takes for that of the weights
        except ValueError:
            raise ValueError(
                f"{index} says dtype = {shown(about['dtype'])}, which is none that weights are computed in; fetch "
                "it again"
            ) from None
    return listed, sorted(set(weights.values()))


def _promised(listed: Mapping[str, Any]) -> int | list[Path]:
    """Bytes of the weights, where the index gives them."""
    size = listed.get("metadata", {}).get("total_size", 0)
    return int(size) if isinstance(size, int | float) and size > 0 else []


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
