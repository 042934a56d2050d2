"""`StoringRecorder`: a recorder that writes every finished step, and the request by which a run is continued."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.adapters.model_names import name_of
from dlm_lens.attention.hook_identity import identity_of
from dlm_lens.recording.arrays import as_plain
from dlm_lens.recording.model_identity import request_of_model, weights_digest
from dlm_lens.recording.recorder import Recorder, Storage
from dlm_lens.recording.recording import Recording
from dlm_lens.recording.shards import ShardDirectory
from dlm_lens.recording.storage import load_part, write_end
from dlm_lens.sampling import DenoisingRun, FinishedStep, Proposal, RunState, StepPlan
from dlm_lens.sampling.history import revised_positions


def request_of(
    recorder: Recorder,
    ids: Sequence[Sequence[int]],
    seeds: Sequence[int],
    hooks: Sequence[Any],
    settings: Mapping[str, Any],
    batch: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The header of a recording: model, prompts, settings, hooks, reducers, layers, and which batch this is."""
    model = recorder.model
    # The digest of the weights does not contain the windows. Models without windows have no such entry.
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
        # What only its place in memory distinguishes, such as a lock, is left out.
        "hooks": [identity_of(hook, strict=False) for hook in hooks],
        "reducers": {spec.name: as_plain(spec) for spec in recorder.arrays.specs},
        **reducer_identities(recorder),
        "layers": list(recorder.tap.layers),
        "dtype": recorder.dtype,
        "batch": None if batch is None else dict(batch),
        **request_of_model(model, settings),
    }


def reducer_identities(recorder: Recorder) -> dict[str, dict[str, str]]:
    """{"identities": name -> `identity_of`} of the reducers that their repr does not determine, or {}.

    The repr of a reducer shows neither all entries of a tensor nor the code of a function that it holds.
    """
    known = {reducer.name: identity_of(reducer, strict=False) for reducer in recorder.reducers}
    known = {name: text for name, text in known.items() if "#" in text}
    return {"identities": known} if known else {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class StoringRecorder(Recorder):
    """A `Recorder` that writes a shard after every step and keeps no array in memory.

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
        """Keep the arrays of a finished step until its state is known."""
        assert self._seen is not None
        opened = self.sampler.open_positions(canvas, plan.index + 1)
        revised = revised_positions(*self._seen, canvas, opened)
        step = FinishedStep(plan, *self._seen, proposal, unmasked, revised, self.sampler.origins)
        self._step = (step, self.step_arrays())

    def keep(self, state: RunState) -> None:
        """Write the finished step with the state of the run after it."""
        assert self._step is not None
        self.shards.add(self._step[0], state, self._step[1])

    def recording(self, run: DenoisingRun, rows: Sequence[int] = ()) -> Recording:
        """Write the run, and return the Recording of the files, whose arrays are read on first use."""
        described = self.described(run, {})
        write_end(self.shards, described, self.arrays.specs, rows or described.rows)
        # Without checksums: the files were written, or read to continue the run, a moment ago.
        return Recording.of(load_part(self.shards.path, run.tokenizer, verify=False))
