"""The request that a recording answers, as plain values, and the recorder that stores its steps and resumes."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.placement import dequantised, named_weights
from dlm_lens.recording.arrays import as_plain
from dlm_lens.recording.provenance import name_of
from dlm_lens.recording.recorder import Recorder, Storage
from dlm_lens.recording.recording import Recording
from dlm_lens.recording.shards import ShardDirectory
from dlm_lens.recording.storage import load_part, write_end
from dlm_lens.sampling import DenoisingRun, FinishedStep, Proposal, RunState, StepPlan

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


class StoringRecorder(Recorder):
    """A `Recorder` that writes a shard behind every step and keeps no array in memory.

    Args:
        model, reducers, layers, dtype: as for `Recorder`.
        path: directory of the recording.
    """

    keeps_state = True

    def __init__(
        self,
        model: Any,
        reducers: Sequence[Any],
        path: Path,
        *,
        layers: Sequence[int] | None = None,
        dtype: Storage = "float32",
    ) -> None:
        super().__init__(model, reducers, layers=layers, dtype=dtype)
        self.shards = ShardDirectory(path)
        self._seen: tuple[Tensor, Tensor] | None = None
        self._step: tuple[FinishedStep, dict[str, Tensor]] | None = None

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins."""
        self._seen = (canvas, masked)
        return super().step(plan, canvas, masked)

    def finish(self, plan: StepPlan, canvas: Tensor, proposal: Proposal, unmasked: Tensor) -> None:
        """A step is over."""
        assert self._seen is not None
        self._step = (FinishedStep(plan, *self._seen, proposal, unmasked), self.step_arrays())

    def keep(self, state: RunState) -> None:
        """Where the run stands behind it: write both."""
        assert self._step is not None
        self.shards.add(self._step[0], state, self._step[1])

    def recording(self, run: DenoisingRun, rows: Sequence[int] = ()) -> Recording:
        """Write the run, and read the Recording back, whose arrays are read when asked for."""
        described = self.described(run, {})
        write_end(self.shards, described, self.arrays.specs, rows or described.rows)
        return load_part(self.shards.path, run.tokenizer, verify=False)  # just written, or read while going on
