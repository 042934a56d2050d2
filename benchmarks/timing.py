"""Side-by-side timing: candidates take turns, and the medians of their times are compared."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from dlm_lens.attention.kernel_selection import SWITCH

Clock = Literal["wall", "cpu"]
"""Wall time, or the CPU time of the process (all threads), which other jobs of the machine disturb less. With a GPU
wall time is taken in either case."""


class Timings(dict[str, float]):
    """The median of every candidate's seconds, and the seconds of all its turns.

    Args:
        turns: of every candidate, the seconds of turn 0, 1, ...; turn i of all candidates ran one after the other.
    """

    def __init__(self, turns: Mapping[str, list[float]]) -> None:
        super().__init__({name: statistics.median(seconds) for name, seconds in turns.items()})
        self.turns = dict(turns)

    def ratio(self, name: str, baseline: str) -> float:
        """The median of a candidate over the median of the baseline."""
        return self[name] / self[baseline]

    def difference(self, name: str, baseline: str) -> float:
        """The median of the seconds that a candidate takes longer than the baseline in the same round."""
        return statistics.median(a - b for a, b in zip(self.turns[name], self.turns[baseline], strict=True))

    def spread(self, name: str, baseline: str) -> tuple[float, float]:
        """The least and the greatest ratio of two turns that ran one after the other."""
        ratios = [a / b for a, b in zip(self.turns[name], self.turns[baseline], strict=True)]
        return min(ratios), max(ratios)


def seconds_of(run: Callable[[], object], clock: Clock = "wall") -> float:
    """Seconds of one call, until the GPU is done where there is one."""
    gpu = torch.cuda.is_available()
    now = time.perf_counter if gpu or clock == "wall" else time.process_time
    if gpu:
        torch.cuda.synchronize()
    started = now()
    run()
    if gpu:
        torch.cuda.synchronize()
    return now() - started


def side_by_side(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 15, clock: Clock = "wall"
) -> Timings:
    """The seconds of every candidate in `rounds` turns, after one turn to warm up.

    Turns alternate, so that a change of the machine's speed affects all candidates.
    """
    turns: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            seconds = seconds_of(run, clock)
            if turn:
                turns[name].append(seconds)
    return Timings(turns)


def on_device(model: Any) -> Any:
    """The model on the GPU in bfloat16 where there is one, else unchanged."""
    return model.to("cuda", torch.bfloat16) if torch.cuda.is_available() else model


def machine() -> str:
    """Device, threads and version of torch, for titles of tables."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"CPU {platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"


def print_table(title: str, seconds: Mapping[str, float], baseline: str) -> None:
    """Milliseconds and the ratio to the baseline, as a Markdown table; of `Timings` also the ratio's spread."""
    spread = seconds.spread if isinstance(seconds, Timings) else None
    heads, lines = ("| | ms | ratio | from | to |", "|---|---:|---:|---:|---:|")
    if spread is None:
        heads, lines = "| | ms | ratio |", "|---|---:|---:|"
    print(f"\n{title}\n\n{heads}\n{lines}")
    for name, value in seconds.items():
        ends = "".join(f" {end:.3f} |" for end in spread(name, baseline)) if spread else ""
        print(f"| {name} | {value * 1e3:.2f} | {value / seconds[baseline]:.3f} |{ends}")


def without_kernels(run: Callable[[], Any]) -> Any:
    """The result of a run without the kernels of Triton and numba."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "off"
    try:
        return run()
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before
