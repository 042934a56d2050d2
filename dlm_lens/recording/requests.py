"""What a recording is asked for, as plain values: a run goes on only where all of it is the same."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlm_lens.placement import dequantised, named_weights
from dlm_lens.recording.arrays import as_plain
from dlm_lens.recording.names import name_of
from dlm_lens.recording.recorder import Recorder

SAMPLED = 64
"""Entries of every weight that identify a model."""


def request_of(
    recorder: Recorder,
    ids: Sequence[Sequence[int]],
    seeds: Sequence[int],
    hooks: Sequence[Any],
    settings: Mapping[str, Any],
    batch: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Model, prompts, settings, hooks, what is recorded, and which batch of all prompts this is."""
    model = recorder.model
    # Weights do not tell how far queries see; headers of models without windows are as they always were.
    slides = any(window is not None for window in recorder.windows)
    return {
        "model": {
            "name": name_of(model),
            "class": type(model).__name__,
            "dtype": str(model.dtype),
            "weights": weights_digest(model),
            **({"windows": list(recorder.windows)} if slides else {}),
        },
        "prompts": {"count": len(ids), "digest": _digest(repr([list(map(int, row)) for row in ids]).encode())},
        "settings": {**{name: repr(value) for name, value in settings.items()}, "seeds": list(seeds)},
        "hooks": list(map(repr, hooks)),
        "reducers": {spec.name: as_plain(spec) for spec in recorder.arrays.specs},
        "layers": list(recorder.tap.layers),
        "dtype": recorder.dtype,
        "batch": None if batch is None else dict(batch),
    }


def weights_digest(model: Any) -> str:
    """A digest of some entries of every weight: tells checkpoints apart without reading all of them."""
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
    """The entries of a weight at places of its flat form, which is not made: it may be a copy of gigabytes."""
    plain = dequantised(weight.detach())
    if plain.ndim < 2 or not plain.numel():
        return plain.reshape(-1)[list(places)]
    return plain[torch.unravel_index(torch.tensor(places, device=plain.device), plain.shape)]


def sampled_places(entries: int) -> list[int]:
    """Up to `SAMPLED` places among so many entries, evenly spaced, the first and the last among them.

    In integers: the float32 numbers of torch.linspace round above 2^24, past the last entry.
    """
    count = min(SAMPLED, entries)
    return [place * (entries - 1) // max(1, count - 1) for place in range(count)]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
