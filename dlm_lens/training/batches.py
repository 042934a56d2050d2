"""Batches as a function of the step: what a process sees, with its noise, whatever was interrupted before."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from dlm_lens.training.objective import Objective
from dlm_lens.training.rows import Rows
from dlm_lens.training.sources import Build, Cursor, Source


@dataclass(frozen=True)
class Batching:
    """How an optimiser's batch of sequences is divided.

    Args:
        batch_size: sequences per optimiser step, over all processes.
        micro_batch_size: sequences per forward pass and process.
        processes: how many there are.
        rank: which one this is.

    Raises:
        ValueError: the batch does not divide.
    """

    batch_size: int
    micro_batch_size: int
    processes: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        share = self.micro_batch_size * self.processes
        if min(self.batch_size, self.micro_batch_size) < 1 or self.batch_size % share:
            raise ValueError(
                f"a batch of {self.batch_size} sequences does not divide into {self.processes} process(es) of "
                f"{self.micro_batch_size} sequences each; choose batch_size as a multiple of {share}"
            )

    @property
    def accumulation(self) -> int:
        """Forward passes of a process per optimiser step."""
        return self.batch_size // (self.micro_batch_size * self.processes)


class BatchStream(IterableDataset[dict[str, Any]]):
    """This process's micro-batches from a step on, without end.

    Sample s of the run is the s-th sequence of the source; its noise depends on the seed and s. Sequences of a
    micro-batch are dealt to the processes in turn, so that any division of a batch sees the same samples.
    The last micro-batch of a step also holds `cursor`.
    """

    def __init__(
        self,
        source: Source,
        objective: Objective,
        batching: Batching,
        seed: int,
        step: int = 0,
        cursor: Cursor | None = None,
    ) -> None:
        self.source, self.objective, self.batching = source, objective, batching
        self.seed, self.step, self.cursor = seed, step, cursor

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The micro-batches."""
        reading = self.source.read(self.cursor, self.seed)
        wide = self.batching.micro_batch_size * self.batching.processes
        sample = self.step * self.batching.batch_size
        while True:
            dealt = list(islice(reading, wide))
            if len(dealt) < wide:
                return
            batch = self._batch([build for build, _ in dealt], sample)
            sample += wide
            if sample % self.batching.batch_size == 0:
                batch["cursor"] = dict(dealt[-1][1])
            yield batch

    def _batch(self, builds: list[Build], sample: int) -> dict[str, Any]:
        size, rank = self.batching.micro_batch_size, self.batching.rank
        samples = [sample + rank * size + i for i in range(size)]
        lengths = self.objective.lengths(samples, self.source.length, self.seed)
        examples = [
            build().shortened(length)
            for build, length in zip(builds[rank * size : (rank + 1) * size], lengths, strict=True)
        ]
        rows = Rows.of(examples, self.source.length, self.source.padding)
        return self.objective.prepare(rows, samples, self.seed)
