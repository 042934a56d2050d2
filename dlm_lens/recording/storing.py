"""A recorder whose steps go to the disk as they finish, and go on from there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.recording.loading import load_part, write_end
from dlm_lens.recording.recorder import Recorder, Storage
from dlm_lens.recording.result import Recording
from dlm_lens.recording.shards import ShardDirectory
from dlm_lens.sampling import Denoised, FinishedStep, Proposal, RunState, StepPlan


class StoringRecorder(Recorder):
    """A `Recorder` that writes a shard behind every step and keeps no array in memory.

    Args:
        model, reducers, layers, dtype: as for `Recorder`.
        path: directory of the recording.
    """

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

    def finish(self, plan: StepPlan, canvas: Tensor, proposal: Proposal, selected: Tensor) -> None:
        """A step is over."""
        assert self._seen is not None
        self._step = (FinishedStep(plan, *self._seen, proposal, selected), self.step_arrays())

    def keep(self, state: RunState) -> None:
        """Where the run stands behind it: write both."""
        assert self._step is not None
        self.shards.add(self._step[0], state, self._step[1])

    def recording(self, run: Denoised, rows: Sequence[int] = ()) -> Recording:
        """Write the run, and read the Recording back, whose arrays are read when asked for."""
        described = self.described(run, {})
        write_end(self.shards, described, self.arrays.specs, rows or described.rows)
        return load_part(self.shards.path, run.tokenizer, verify=False)  # just written, or read while going on
