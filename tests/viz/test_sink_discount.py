"""`sink_discount` draws the weights of a row without its padding."""

from dataclasses import replace

import pytest
import torch

import dlm_lens as dl
from dlm_lens.testing import tiny


def test_cells_are_the_weights_and_dots_the_open_positions() -> None:
    run = dl.denoise(tiny("llada"), [[5, 6, 7], [8, 9]], steps=2, gen_length=4)
    weights = torch.rand(run.unmasked.shape)
    axes = dl.viz.sink_discount(weights, run, row=1).axes[0]
    cells = torch.tensor(axes.collections[0].get_array().data).reshape(6, 2)
    torch.testing.assert_close(cells, weights[:, 1, 1:].T.double())
    dots = {(int(x), int(y)) for x, y in axes.collections[1].get_offsets()}
    there = run.masked[:-1, 1, 1:].nonzero().tolist()
    assert dots == {(step, place) for step, place in there}
    short = dl.viz.sink_discount(weights, replace(run, rows_ran=(2, 1)), row=1).axes[0]
    torch.testing.assert_close(torch.tensor(short.collections[0].get_array().data).flatten(), cells[:, 0])
    assert f"{weights[0, 1, 1:].sum():.2f} positions discounted" in short.figure.get_suptitle().replace("\n", " ")
    # A step's number is in the middle of its column.
    assert [(x, label.get_text()) for x, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)] == [
        (0.5, "0"),
        (1.5, "1"),
    ]
    with pytest.raises(ValueError, match=r"the weights have shape .*; give the run of which"):
        dl.viz.sink_discount(weights[:1], run)
