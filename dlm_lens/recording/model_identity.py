"""What identifies a model in a recording beside its name: versions of the packages, a digest of its weights."""

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from dlm_lens.placement import dequantised, named_weights

SAMPLED = 64
"""Entries of every weight that go into the digest."""


@cache
def versions() -> dict[str, str]:
    """Package -> version, for the packages that compute the arrays."""
    import dlm_lens

    return {"dlm_lens": dlm_lens.__version__} | {name: version(name) for name in ("torch", "transformers")}


def weights_digest(model: Any) -> str:
    """A digest of some entries of every weight, which distinguishes checkpoints without reading all of them."""
    found = hashlib.sha256()
    for name, weight in named_weights(model):
        found.update(f"{name} {tuple(weight.shape)}".encode())
        found.update(_sample(weight))
    return found.hexdigest()[:16]


def _sample(weight: Tensor) -> bytes:
    if not weight.is_floating_point() or weight.device.type == "meta" or not weight.numel():
        return b""
    return entries_at(weight, sampled_places(weight.numel())).double().cpu().numpy().tobytes()


def entries_at(weight: Tensor, places: Sequence[int]) -> Tensor:
    """The entries of a weight at indices of its flattened form, without flattening: that may copy gigabytes."""
    plain = dequantised(weight.detach())
    if plain.ndim < 2 or not plain.numel():
        return plain.reshape(-1)[list(places)]
    return plain[torch.unravel_index(torch.tensor(places, device=plain.device), plain.shape)]


def sampled_places(entries: int) -> list[int]:
    """Up to `SAMPLED` evenly spaced indices of so many entries, with the first and the last.

    In integers: the float32 numbers of torch.linspace are rounded above 2^24, past the last entry.
    """
    count = min(SAMPLED, entries)
    return [place * (entries - 1) // max(1, count - 1) for place in range(count)]
