"""Muon's Newton-Schulz iteration in bfloat16 (torch) and in float32 (`Float32Muon`), on one thread of this CPU.

`python -m benchmarks.muon` (two to three minutes on a CPU without bfloat16 instructions): a step on the seven
matrices of a layer, by width.
"""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.timing import machine, print_table, side_by_side
from dlm_lens.placement import emulates_bfloat16
from dlm_lens.training.optimizers import Float32Muon

WIDTHS = (128, 192, 512)


def layer(width: int) -> list[nn.Parameter]:
    """The matrices of a layer, whose gated MLP has 8/3 of the width, with gradients."""
    inner = 8 * width // 3
    shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return weights


def step_of(kind: type[torch.optim.Muon], width: int) -> Callable[[], object]:
    """A step of that optimiser."""
    return kind(layer(width), lr=1e-3, adjust_lr_fn="match_rms_adamw").step


def main() -> None:
    """Print a table per width."""
    torch.set_num_threads(1)
    said = "no bfloat16 instructions" if emulates_bfloat16() else "bfloat16 instructions"
    for width in WIDTHS:
        found = side_by_side(
            {"bfloat16": step_of(torch.optim.Muon, width), "float32": step_of(Float32Muon, width)}, 5
        )
        print_table(f"A layer of width {width}, {machine()}, {said}", found, "bfloat16")


if __name__ == "__main__":
    main()
