"""What a recording is asked for, as plain values: a run goes on only where all of it is the same."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
) -> dict[str, Any]:
    """Model, prompts, settings, hooks, and what is recorded."""
    model = recorder.model
    return {
        "model": {
            "name": name_of(model),
            "class": type(model).__name__,
            "dtype": str(model.dtype),
            "weights": weights_digest(model),
        },
        "prompts": {"count": len(ids), "digest": _digest(repr([list(map(int, row)) for row in ids]).encode())},
        "settings": {**{name: repr(value) for name, value in settings.items()}, "seeds": list(seeds)},
        "hooks": list(map(repr, hooks)),
        "reducers": {spec.name: as_plain(spec) for spec in recorder.arrays.specs},
        "layers": list(recorder.tap.layers),
        "dtype": recorder.dtype,
    }


def weights_digest(model: Any) -> str:
    """A digest of some entries of every weight: tells checkpoints apart without reading all of them."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        found.update(f"{name} {tuple(weight.shape)}".encode())
        found.update(_sample(weight))
    return found.hexdigest()[:16]


def _sample(weight: Tensor) -> bytes:
    if not weight.is_floating_point() or weight.device.type == "meta":
        return b""
    flat = weight.detach().reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, min(SAMPLED, flat.numel()), device=flat.device).long()
    return flat[places].double().cpu().numpy().tobytes()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
