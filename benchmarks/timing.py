"""Side-by-side timing: candidates take turns, and their best times are compared."""

import platform
import time
from collections.abc import Callable, Mapping

import torch


def side_by_side(candidates: Mapping[str, Callable[[], object]], rounds: int = 15) -> dict[str, float]:
    """Seconds of every candidate: the minimum of `rounds` turns, after one turn to warm up.

    Turns alternate, so that a change of the machine's speed affects all candidates.
    """
    best = dict.fromkeys(candidates, float("inf"))
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                best[name] = min(best[name], time.perf_counter() - started)
    return best


def machine() -> str:
    """Device, threads and version of torch, for titles of tables."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"CPU {platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"


def print_table(title: str, seconds: Mapping[str, float], baseline: str) -> None:
    """Milliseconds and the ratio to the baseline, as a Markdown table."""
    print(f"\n{title}\n\n| | ms | ratio |\n|---|---:|---:|")
    for name, value in seconds.items():
        print(f"| {name} | {value * 1e3:.2f} | {value / seconds[baseline]:.3f} |")
