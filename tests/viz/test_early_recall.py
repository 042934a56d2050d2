"""`early_recall` draws the means of `early_attention`."""

import pytest

import dlm_lens as dl
from dlm_lens.probes import early_attention
from dlm_lens.testing import tiny


def test_lines_are_the_tables() -> None:
    reducers = [dl.ReceivedAttention("block", min_viewers=1)]
    recording = dl.record(tiny("llada"), [[5, 6, 7], [8, 9]], reducers, steps=6, gen_length=6, block_length=3)
    early = early_attention(recording)
    left, right = dl.viz.early_recall(early, "kept").axes
    lags = early.lags("kept")
    drawn = {line.get_gid(): list(line.get_ydata()) for line in left.get_lines()}
    assert drawn == {name: pytest.approx(lags[name].tolist()) for name in lags.columns[1:]}
    means = [early.mean("kept", "first steps", layer).value for layer in early.layers]
    assert list(right.containers[0].lines[0].get_ydata()) == pytest.approx(means)
    with pytest.raises(TypeError, match="the first argument is a Recording; give an EarlyAttention"):
        dl.viz.early_recall(recording)
