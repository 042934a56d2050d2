"""`sink_causes` draws the tables of `sink_anatomy`."""

from dataclasses import replace

import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import sink_anatomy
from dlm_lens.testing import tiny


def test_bars_are_the_shares_of_the_tables() -> None:
    model = tiny("llada")
    run = dl.denoise(model, [[5, 6, 7], [8, 9]], steps=2, gen_length=6)
    anatomy = sink_anatomy(model, run, dl.AboveMean(0.5))
    left, right = dl.viz.sink_causes(anatomy).axes
    layers = anatomy.by_layer()
    for cause in ("norms", "angles", "either", "together"):
        drawn = [bar.get_height() for bar in left.patches if bar.get_gid() == cause]
        assert drawn == pytest.approx(layers[cause].tolist())
    assert [one.get_text() for one in left.texts] == [str(count) for count in layers["sinks"]]
    survival = anatomy.survival()
    assert [bar.get_width() for bar in right.patches] == pytest.approx(survival["survive"].tolist())
    chances = [line.get_xdata()[0] for line in right.get_lines() if line.get_gid() == "chance"]
    assert chances == pytest.approx(survival["chance"].tolist())
    assert dl.viz.sink_causes(anatomy).get_suptitle().endswith(f"n = {anatomy.sinks} sinks in 2 prompts")
    first = torch.tensor([True, False])[:, None, None, None, None]
    one = replace(anatomy, is_sink=anatomy.is_sink & first)
    assert dl.viz.sink_causes(one).get_suptitle().endswith(f"n = {one.sinks} sinks in 1 prompt")
    with pytest.raises(TypeError, match="the first argument is a DenoisingRun; give a SinkAnatomy"):
        dl.viz.sink_causes(run)
