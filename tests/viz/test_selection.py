"""Which heads and sinks are shown: never a head without a sink, every sink once; empty panels say so."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli import app as cli
from dlm_lens.recording import Recording
from dlm_lens.sinks import LowKeyNorm, Received, find_sinks
from dlm_lens.sinks.key_statistics import KeyStatistic
from dlm_lens.testing import tiny
from dlm_lens.viz.selection import most_moving

STEPS, ROWS, LAYERS, HEADS, KEYS = 6, 2, 2, 3, 12
RULE = dl.AboveMean(3.0)


@pytest.fixture
def received():
    """Row 0: layer 1, head 2 has a sink that moves, layer 0, head 1 one that stays; row 1: the latter alone."""
    values = torch.ones(STEPS, ROWS, LAYERS, HEADS, KEYS)
    for step in range(STEPS):
        values[step, 0, 1, 2, step] = 9.0 + step
        values[step, :, 0, 1, 4] = 8.0
    values[0, 1, 1, 0] = 1.5  # high everywhere: no sink
    return Received(values, torch.ones(STEPS, ROWS, 1, 1, KEYS), torch.full((STEPS, ROWS), KEYS), layers=(5, 7))


def test_moving_never_picks_a_head_without_a_sink(received):
    paths = dl.trajectories(received, RULE)
    assert most_moving(paths) == (7, 2)
    assert most_moving(paths, 0) == (7, 2)
    assert most_moving(paths, 1) == (5, 1)  # in this row the other has none
    assert "layer 5, head 1), whose sinks move most" in dl.viz.sink_positions(received, RULE, row=1).axes[
        0
    ].get_title(loc="left").replace("\n", " ")
    with pytest.raises(ValueError, match=r"no head has a sink in row 1 by AboveMean\(eps=20.0\)"):
        most_moving(dl.trajectories(received, dl.AboveMean(20.0)), 1)
    with pytest.raises(ValueError, match="row 2 is not among the rows 0, 1"):
        most_moving(paths, 2)


def test_the_command_refuses_to_pick_where_there_is_none(tmp_path):
    rec = dl.record(tiny("llada"), [[5, 6, 7]], steps=3, gen_length=6, block_length=6)
    path = rec.save(tmp_path / "rec")
    arguments = [
        "plot",
        "sink-positions",
        str(path),
        "-o",
        str(tmp_path / "a.png"),
        "--pick",
        "moving",
        "--detector",
        "above-mean:50",
    ]
    with pytest.raises(ValueError, match="no head has a sink in row 0"):
        CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert not (tmp_path / "a.png").exists()
    shown = CliRunner().invoke(
        cli.app, ["sinks", str(path), "--detector", "above-mean:0.2", "--top", "50"], catch_exceptions=False
    )
    lines = shown.stdout.split("\nsinks\n")[1].splitlines()
    names = lines[0].split()
    at = [names.index(name) for name in ("batch", "layer", "head", "position")]
    places = [tuple(line.split()[i] for i in at) for line in lines[1:]]
    assert len(places) == len(set(places)) > 3
    found = find_sinks(Recording.load(path), dl.AboveMean(0.2))
    assert len(places) == min(50, len({tuple(place[1:]) for place in found.is_sink.nonzero().tolist()}))


def test_a_table_lists_each_sink_once_at_its_strongest_step(received):
    sinks = find_sinks(received, RULE)
    every = sinks.table()
    assert len(every) == 3 * STEPS  # by step
    table = sinks.table(top=100)
    place = ["batch", "layer", "head", "position"]
    assert len(table) == len(every.drop_duplicates(place)) == STEPS + 2
    for _, line in table.iterrows():
        same = every[(every[place] == line[place]).all(axis=1)]
        assert line["steps"] == len(same)
        assert line["score"] == same["score"].max()
        assert line["step"] == same.loc[same["score"].idxmax(), "step"]
    assert table["score"].is_monotonic_decreasing
    assert sinks.table(top=3)["position"].tolist() == [5, 4, 3]
    by_place = sinks.table(top=3, sort="place")
    assert by_place["step"].tolist() == [3, 4, 5]
    norms = KeyStatistic(1 / received.values, "key norm", layers=(5, 7))
    low = find_sinks(norms, LowKeyNorm(0.5)).table(top=1)
    assert (low["layer"][0], low["head"][0], low["step"][0], low["steps"][0]) == (7, 2, 5, 1)


def notes(axes):
    return [text.get_text() for text in axes.texts if text.get_gid() == "note"]


def test_sinks_of_low_scores_are_at_the_lowest(received):
    norms = KeyStatistic(1 / received.values, "key norm", layers=(5, 7))
    sinks = find_sinks(norms, LowKeyNorm(0.5))
    for layer, head in ((5, 0), (5, 1), (7, 2)):
        figure = dl.viz.sink_positions(sinks, layer=layer, head=head)
        scores = norms.values[:, 0, (5, 7).index(layer), head]
        passes = scores.amin(-1) < 0.5 * scores.median(-1).values
        points = {c.get_gid(): c.get_offsets().tolist() for c in figure.axes[0].collections if c.get_gid()}
        assert sorted(points["sink"] + points["largest"]) == [[t, int(scores[t].argmin())] for t in range(STEPS)]
        assert [int(t) for t, _ in points["sink"]] == passes.nonzero().flatten().tolist()
        assert notes(figure.axes[0]) == ([] if bool(passes.any()) else ["no sink by the rule at any step"])
        assert figure.axes[0].get_title(loc="left").startswith("Position with the lowest score")
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert legend[:2] == ["lowest, a sink by the rule", "lowest, no sink"]


def test_an_empty_figure_says_so(received):
    some = dl.viz.sink_positions(received, RULE, layer=5, head=1)
    none = dl.viz.sink_positions(received, dl.AboveMean(50.0), layer=5, head=1)
    assert (notes(some.axes[0]), notes(none.axes[0])) == ([], ["no sink by the rule at any step"])
    assert notes(dl.viz.sinks_over_eps(received, [1.0, 2.0]).axes[0]) == []
    assert notes(dl.viz.sinks_over_eps(received, [50.0]).axes[0]) == ["no key is a sink at any of these eps"]
    undefined = replace(received, values=received.values.clone())
    undefined.values[:, 0, 0, 0] = torch.nan
    figure = dl.viz.incoming_attention(undefined, layer=5, head=0)
    assert notes(figure.axes[0]) == ["no key has a score at these steps"]
    # That no key is a sink would be a result.
    for source in (undefined, find_sinks(undefined, RULE), dl.trajectories(undefined, RULE)):
        assert notes(dl.viz.sink_positions(source, layer=5, head=0).axes[0]) == ["no key has a score"]
    undefined.values[:] = torch.nan
    assert notes(dl.viz.sink_strength(undefined).axes[0]) == ["no key has a score"]


def test_maps_of_short_canvases_say_that_no_key_has_a_score():
    model = tiny("llada")
    run = dl.denoise(model, [[5, 6]], steps=2, gen_length=4)
    with pytest.warns(UserWarning, match="no key has a score"):
        short = dl.viz.attention_maps(model, run, steps=[0], layer=0, head=0)
    run = dl.denoise(model, [list(range(5, 20))], steps=2, gen_length=4)
    longer = dl.viz.attention_maps(model, run, steps=[0], layer=0, head=0, detector=dl.AboveMean(50.0))
    titles = [figure.axes[0].get_title() for figure in (short, longer)]
    assert titles == ["step 0: no key has a score", "step 0: no sink by the rule"]


def test_an_empty_region_says_so():
    rec = dl.record(tiny("llada"), [[5, 6, 7]], [dl.recording.RegionMass()], steps=3, gen_length=6, block_length=6)
    mass = rec.region_mass.clone()
    mass[..., 0], mass[..., 1] = 0.0, 0.0004
    rec = replace(rec, arrays={"region_mass": mass})
    figure = dl.viz.region_mass(rec)
    assert notes(figure.axes[0]) == ["nothing on prompt"]
    assert notes(figure.axes[1]) == ["at most 0.0004 of the attention"]
    assert notes(figure.axes[2]) == []


def test_an_empty_region_has_no_band():
    """The interval of 0 of 2 sequences, 0 to 66%, is not what is known of a region that has no keys."""
    rec = dl.record(tiny("llada"), [[5, 6], [7, 8]], [dl.recording.RegionMass()], gen_length=6, block_length=6)
    mass = rec.region_mass.clone()
    mass[..., 0] = 0.0
    figure = dl.viz.region_mass(replace(rec, arrays={"region_mass": mass}))
    bands = [
        [band for band in axes.collections if np.isfinite(band.get_datalim(axes.transData).y1)]
        for axes in figure.axes
    ]
    assert bands[0] == [] != bands[1]


def test_layer_and_head_may_be_tensors_without_axes(received):
    """As an argmax returns them."""
    head = received.values[..., 1, :, :].amax(-1).mean((0, 1)).argmax()
    drawn = dl.viz.sink_positions(received, RULE, layer=torch.tensor(7), head=head).axes[0]
    wanted = dl.viz.sink_positions(received, RULE, layer=7, head=2).axes[0]
    assert drawn.get_title(loc="left") == wanted.get_title(loc="left")
    assert "level: head (layer 7, head 2)" in drawn.get_title(loc="left")
    with pytest.raises(ValueError, match="head is a Tensor float32"):
        dl.viz.sink_positions(received, RULE, layer=7, head=torch.tensor([2.0]))
