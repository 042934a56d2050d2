"""Cost of masking the top sinks: a denoising run under `mask_top_sinks(5)` against the plain one.

`python -m benchmarks.masking [--steps 4 --rounds 5]`. The shape is about 100M parameters without the embeddings (12
layers, width 768, heads of 64) with LLaDA's vocabulary; half of the positions are the answer. Two more rows:
hiding columns that are given in advance (`mask_positions`), and the same hook while another hook reads patterns.
"""

from functools import partial
from typing import Any

import torch
import typer

import dlm_lens
from benchmarks.sampling import build
from benchmarks.timing import machine, on_device, print_table, side_by_side
from dlm_lens.hooks import mask_positions, mask_top_sinks


class ReadsPattern:
    """A hook that needs the pattern and changes nothing."""

    site = "pattern"

    def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
        """The pattern itself."""
        return tensor


def main(
    hidden: int = 768, layers: int = 12, lengths: str = "256,512,1024", steps: int = 4, rounds: int = 3, k: int = 5
) -> None:
    """Time the runs at each length and print the ratios."""
    torch.set_num_threads(1)
    longest = max(map(int, lengths.split(",")))
    model = on_device(build(hidden, layers, longest))
    for length in map(int, lengths.split(",")):
        prompt = torch.randint(0, 1000, (1, length // 2), generator=torch.Generator().manual_seed(0))
        run = partial(
            dlm_lens.denoise, model, prompt, gen_length=length // 2, block_length=length // 2, steps=steps
        )
        hook = mask_top_sinks(k)
        candidates = {
            "plain": run,
            f"mask_positions, {k} given columns": partial(run, hooks=[mask_positions(*range(k))]),
            f"mask_top_sinks({k})": partial(run, hooks=[hook]),
            f"mask_top_sinks({k}), stage='after'": partial(run, hooks=[mask_top_sinks(k, stage="after")]),
            f"mask_top_sinks({k}) and a hook that reads patterns": partial(run, hooks=[hook, ReadsPattern()]),
        }
        seconds = side_by_side(candidates, rounds)
        print_table(f"S = {length}, {steps} steps; {machine()}", seconds, "plain")


if __name__ == "__main__":
    typer.run(main)
