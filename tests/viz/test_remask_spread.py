"""`remask_spread` draws the changed tokens and the means of `remask`."""

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import RemaskSensitivity, remask
from dlm_lens.testing import tiny


def test_cells_and_lines_are_the_sensitivitys() -> None:
    model = tiny("llada")
    found = remask(model, [[5, 6, 7], [8, 9]], steps=6, gen_length=6, at=[2, 3, 5], share=0.5)
    tokens = found.tokens.clone()
    tokens[1, 0, int(found.remasked[1, 0].nonzero()[0])] += 1  # one token changed, whatever the network does
    found = RemaskSensitivity(found.run, found.steps, found.remasked, tokens)
    left, right = dl.viz.remask_spread(found, row=0).axes
    where = found.run.open[0, 0]
    cells = np.asarray(left.collections[0].get_array()).reshape(int(where.sum()), len(found.steps))
    wanted = found.changed[:, 0, where].long() + 2 * found.remasked[:, 0, where].long()
    assert torch.from_numpy(cells).long().equal(wanted.T)
    assert 3 in cells
    drawn = {line.get_gid(): list(line.get_ydata()) for line in right.get_lines()}
    for name in ("direct", "collateral"):
        assert drawn[name] == pytest.approx([found.mean(name, step).value for step in found.steps])
    assert "right: n = 2, band: 95% interval" in dl.viz.remask_spread(found).get_suptitle()
    # A row that has ended before every one of the steps has no share.
    one = RemaskSensitivity(found.run, found.steps, found.remasked & torch.tensor([[True], [False]]), tokens)
    assert one.mean("direct", 2).prompts == 1
    assert dl.viz.remask_spread(one).get_suptitle().endswith("right: n = 1")  # one prompt has no interval
    with pytest.raises(TypeError, match="this is a DenoisingRun; give a RemaskSensitivity"):
        dl.viz.remask_spread(found.run)
    with pytest.raises(ValueError, match="row"):
        dl.viz.remask_spread(found, row=2)


def test_the_legend_is_below_the_labels_of_a_short_answer_and_unknown_steps_are_gaps():
    run = dl.denoise(tiny("llada"), [[5, 6, 7]], steps=3, gen_length=3)
    remasked = torch.zeros(3, *run.tokens.shape, dtype=torch.bool)
    remasked[0, 0, 3] = remasked[2, 0, 4] = True  # at the second step nothing is masked again
    found = RemaskSensitivity(run, (0, 1, 2), remasked, run.tokens.expand(3, -1, -1).clone())
    figure = dl.viz.remask_spread(found)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 <= figure.axes[0].xaxis.label.get_window_extent().y0
    # That of the lines is above them, however they vary.
    of_lines = figure.axes[1].get_legend()
    assert of_lines is not None
    assert of_lines.get_window_extent().y0 >= figure.axes[1].get_window_extent().y1
    direct = next(line for line in figure.axes[1].get_lines() if line.get_gid() == "direct")
    assert direct.get_xdata().tolist() == [0, 1, 2]
    assert np.isnan(direct.get_ydata()).tolist() == [False, True, False]
