"""`early_recall` draws the means of `early_attention`."""

import pytest

import dlm_lens as dl
from dlm_lens.probes import early_attention
from dlm_lens.testing import tiny


def test_n_counts_the_prompts_whose_blocks_are_compared() -> None:
    prompts = [[5, 9, 11, 3, 17, 20, 8, 30, 31], [6, 2, 40], [7, 7, 12, 50, 7]]
    reducers = [dl.ReceivedAttention("block", min_viewers=1)]
    early = early_attention(dl.record(tiny("sdlm"), prompts, reducers, seed=[1, 2, 3], gen_length=8), keys="all")
    assert early.chance[2].tolist() == [0, 0]  # its block has one step
    assert early.mean("recall").prompts == 2
    assert dl.viz.early_recall(early).get_suptitle().endswith("n = 2 prompts")


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
