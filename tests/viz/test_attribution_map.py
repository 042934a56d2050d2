"""`attribution_map` draws the effects of a row, node by node."""

from itertools import pairwise

import numpy as np
import pytest

import dlm_lens as dl
from dlm_lens.probes import LogProbability, attribution_patching
from dlm_lens.testing import tiny
from dlm_lens.viz.figures.labels import token_labels


def test_cells_are_the_effects_of_the_row() -> None:
    model = tiny("llada")
    run = dl.denoise(model, [[5, 6, 7], [8, 9, 10]], steps=3, gen_length=6)
    found = attribution_patching(model, run, [[5, 20, 7], [8, 21, 10]], positions=[1, 4])
    axes = dl.viz.attribution_map(found, row=1).axes[0]
    cells = np.asarray(axes.collections[0].get_array()).reshape(8, 3)
    for step, layer, head in ((0, 0, 3), (2, 1, 0), (1, 1, 2)):
        wanted = found.effects[step, 1, layer, head].sum()
        assert cells[layer * 4 + head, step] == pytest.approx(float(wanted))
    largest = float(found.effects[:, 1].sum(-1).abs().max())  # 0 is white, and the largest effect has a full colour
    assert axes.collections[0].get_clim() == pytest.approx((-largest, largest))
    decided = run.tokens[1, run.unmasked[0, 1]].tolist()
    assert axes.get_xticklabels()[0].get_text() == f"0  {' '.join(f'w{i}' for i in decided)}"
    assert [one.get_text() for one in axes.get_yticklabels(minor=True)] == ["0", "1", "2", "3"] * 2
    assert [one.get_text() for one in axes.get_yticklabels()] == ["layer 0", "layer 1"]
    with pytest.raises(ValueError, match="row 2 is not among"):
        dl.viz.attribution_map(found, row=2)
    with pytest.raises(TypeError, match="give NodeEffects"):
        dl.viz.attribution_map(run)


def test_labels_are_the_tokens_that_a_step_wrote_also_where_they_were_replaced_later() -> None:
    model = tiny("open_dcoder")
    run = dl.denoise(model, [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11], [12, 13]], steps=8, gen_length=8)
    found = attribution_patching(model, run, "mean", target=LogProbability())
    replaced = 0
    for row in range(3):
        labels = [one.get_text() for one in dl.viz.attribution_map(found, row=row).axes[0].get_xticklabels()]
        for step, label in enumerate(labels):
            where = run.unmasked[step, row]
            wrote, final = run.canvases[step + 1, row, where].tolist(), run.tokens[row, where].tolist()
            replaced += wrote[:2] != final[:2]
            tokens = " ".join(token_labels(wrote[:2], run.tokenizer))
            assert label == f"{step}  {tokens}{' …' if len(wrote) > 2 else ''}"
    assert replaced


def test_labels_of_many_steps_do_not_overlap() -> None:
    model = tiny("llada")
    run = dl.denoise(model, [[5, 6, 7]], steps=100, gen_length=100, block_length=100)
    found = attribution_patching(model, run, [[5, 20, 7]], positions=[1])
    figure = dl.viz.attribution_map(found)
    figure.draw_without_rendering()
    labels = figure.axes[0].get_xticklabels()
    assert [one.get_text().split()[0] for one in labels] == [str(step) for step in range(0, 100, 2)]
    boxes = [one.get_window_extent() for one in labels]
    assert all(one.x1 <= other.x0 for one, other in pairwise(boxes))
