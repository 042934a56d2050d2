"""Intervals of points without neighbours, which a band does not show, and of shares that are 0."""

from dataclasses import replace

import numpy as np

import dlm_lens as dl
from dlm_lens.testing import tiny
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_band


def bars(axes) -> list[tuple[float, float, float]]:
    """Place and ends of the bars."""
    drawn = [one.get_segments() for one in axes.collections if one.get_gid() == "interval"]
    return [(x, low, high) for segments in drawn for (x, low), (_, high) in segments]


def test_a_point_without_neighbours_has_a_bar():
    axes, nan = NotebookFigure().add_subplot(), np.nan
    draw_band(axes, [0, 1, 2, 3, 4, 5], [1, nan, 2, 3, nan, 5], [2, nan, 4, 4, nan, 7], colour="black")
    assert bars(axes) == [(0, 1, 2), (5, 5, 7)]
    draw_band(axes, [0, 1], [nan, 1], [1, nan], colour="black")
    assert len(bars(axes)) == 2


def test_the_intervals_of_one_step_and_of_one_layer_are_seen():
    model, reducers = tiny("llada"), [dl.ReceivedAttention(), dl.ValueNorm(), dl.RegionMass()]
    rec = dl.record(model, [[5, 6, 7, 8], [7, 8, 9]], reducers, steps=1, gen_length=8)
    axes = dl.viz.region_mass(rec, queries=("masked",)).axes[0]
    ((step, low, high),) = bars(axes)
    (line,) = [one for one in axes.lines if one.get_gid() == "masked"]
    assert (step, low < line.get_ydata()[0] < high) == (0, True)
    part, panels = rec.select(layer=[1]), (("norm_sink", "norm_other"), ("share",))
    norms = dl.value_norms(part, dl.find_sinks(part, dl.TopK(1)))
    for axes, names in zip(dl.viz.value_norm_layers(norms).axes, panels, strict=True):
        ends = [tuple(norms.profile.loc[0, ["layer", f"{name}_low", f"{name}_high"]]) for name in names]
        assert bars(axes) == ends
        assert np.isfinite(ends).all()


def test_a_layer_without_sinks_has_no_interval_of_their_share():
    """The interval of 0 of 2 prompts, 0 to 66%, is not what is known of sinks that there are none of."""
    prompts, reducers = [[5, 6, 7, 8], [7, 8, 9]], [dl.ReceivedAttention(), dl.ValueNorm()]
    rec = dl.record(tiny("llada"), prompts, reducers, gen_length=8)
    sinks = dl.find_sinks(rec, dl.TopK(1))
    found = sinks.is_sink.clone()
    found[:, :, 0] = False
    norms = dl.value_norms(rec, replace(sinks, is_sink=found))
    assert norms.profile.loc[0, "share"] == 0 < norms.profile.loc[0, "share_high"]
    (_, shares) = dl.viz.value_norm_layers(norms).axes
    assert [place for place, _, _ in bars(shares)] == [1]
    assert shares.dataLim.y1 == norms.profile.loc[1, "share_high"]
