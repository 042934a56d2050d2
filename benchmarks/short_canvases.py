"""Recording short canvases in batches: what a run of the embedded model `toy` costs with statistics.

`python -m benchmarks.short_canvases [--rows 1,8] [--rounds 8]`, CPU time of one thread. The prompts of a batch are
of one length, or of as many as it has rows (`--unequal`): then every row has a mask of its own.
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

import dlm_lens
from benchmarks.recording import PATTERN_STATISTICS, STATISTICS
from benchmarks.timing import machine, print_table, side_by_side

STEPS, ANSWER, PROMPT = 16, 32, 8


def candidates(model: Any, rows: int, unequal: bool) -> dict[str, Callable[[], object]]:
    """The plain run, and runs with received attention, with all reducers but two, and with all."""
    prompts = [[5 + place for place in range(PROMPT + (row if unequal else 0))] for row in range(rows)]
    settings = {"steps": STEPS, "gen_length": ANSWER, "block_length": ANSWER}

    def recorded(*reducers: Any) -> Callable[[], object]:
        return lambda: dlm_lens.record(model, prompts, list(reducers), **settings)

    return {
        "denoise": lambda: dlm_lens.denoise(model, prompts, **settings),
        "received": recorded(dlm_lens.ReceivedAttention()),
        "statistics": recorded(*STATISTICS),
        "all": recorded(*STATISTICS, *PATTERN_STATISTICS),
    }


def main(
    rows: str = "1,8",
    rounds: int = 8,
    model: str = "toy",
    unequal: Annotated[bool, typer.Option("--unequal")] = False,
) -> None:
    """Print a table for every number of rows."""
    torch.set_num_threads(1)
    network = dlm_lens.load(model)
    kind = "prompts of unequal lengths" if unequal else "prompts of one length"
    for count in map(int, rows.split(",")):
        seconds = side_by_side(candidates(network, count, unequal), rounds, clock="cpu")
        title = f"{model}, {count} row(s), {kind}, {STEPS} steps, {ANSWER} positions of answer; {machine()}"
        print_table(title, seconds, "denoise")


if __name__ == "__main__":
    typer.run(main)
