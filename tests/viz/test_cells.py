"""Files of maps in vector formats are small: many cells are an image in them, few are shapes."""

import re

import pytest

import dlm_lens as dl
from dlm_lens.testing import tiny
from dlm_lens.viz.figures.notebook_figure import MOST_VECTORS
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import write_plot


@pytest.mark.parametrize(("steps", "prompt", "drawn_as"), [(4, 8, "shapes"), (64, 24, "an image")])
def test_many_cells_are_an_image(tmp_path, steps, prompt, drawn_as):
    model = tiny("llada")
    recording = dl.record(model, [[5] * prompt], steps=steps, gen_length=64, block_length=64)
    cells = steps * (prompt + 64)
    assert (cells > MOST_VECTORS) is (drawn_as == "an image")
    for name in ("incoming-attention", "sink-positions"):
        path = tmp_path / f"{name}.svg"
        write_plot(name, PlotOptions({"tiny": recording}, layer=0, head=0), path)
        svg = path.read_text()
        # The colour bar of a heat map is an image too.
        assert svg.count("<image") == (name == "incoming-attention") + (drawn_as == "an image"), name
        shapes = len(re.findall("<path", svg))
        assert (shapes < cells) is (drawn_as == "an image"), name
