"""Pictures hold the numbers of what they are given: patterns, distributions, profiles, regions, norms, lenses."""

import io
import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import logit_lens, value_norms
from dlm_lens.recording import KEY_REGIONS, QUERY_CLASSES, ReceivedAttention, RegionMass, ValueNorm, record
from dlm_lens.sampling import denoise
from dlm_lens.sinks import (
    AboveMean,
    TopK,
    eps_sweep,
    find_sinks,
    received_of,
    received_over_steps,
    sink_profile,
    trajectories,
)
from dlm_lens.testing import tiny
from dlm_lens.viz.attention_snapshot import snapshot
from dlm_lens.viz.figures.maps import MASKED
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plots

TEXTS = ["w1 w2 w3 w4 w5 w6 w7 w8 w9", "w4 w5", "w10 w11 w12 w13"]
SETTINGS = {"steps": 4, "gen_length": 8, "seed": 3}
RULE = AboveMean(0.3)
"""Random models have weak sinks."""


@pytest.fixture(scope="module")
def model():
    return tiny("llada")


@pytest.fixture(scope="module")
def recording(model):
    return record(model, TEXTS, [ReceivedAttention(), ValueNorm(), RegionMass()], **SETTINGS)


def texts(figure):
    found = [t.get_text() for axes in figure.axes for t in (axes._left_title, axes.title, axes.yaxis.label)]
    return " ".join([*found, figure.get_suptitle()]).replace("\n", " ")


def line(axes, gid):
    found = [drawn for drawn in axes.lines if drawn.get_gid() == gid]
    assert len(found) == 1
    return found[0].get_xydata()


def marks(axes, gid):
    found = [c for c in axes.collections if c.get_gid() == gid]
    assert len(found) == 1
    return found[0].get_offsets()


def rendered(figure):
    figure.savefig(io.BytesIO(), format="png", bbox_inches="tight", dpi=50)


@pytest.mark.parametrize("family", ["llada", "dream", "sink_qwen", "causal"])
def test_a_snapshot_is_the_pattern_that_the_step_formed(family):
    network = tiny(family, num_sinks=2) if family == "sink_qwen" else tiny(family)
    settings = {"gen_length": 8, "seed": 3} | ({} if family == "causal" else {"steps": 4})
    run = denoise(network, TEXTS[:2], **settings)
    received = received_over_steps(network, run)
    for row, step, layer in [(0, 0, 1), (1, 2, 0)]:
        shot = snapshot(network, run, step=step, layer=layer, row=row)
        torch.testing.assert_close(shot.pattern.sum(-1), torch.ones(shot.pattern.shape[:2]))
        # Padding is gone: what is left scores as the whole batch's patterns do, an independent way to the numbers.
        scores = received.values[step, row, layer]
        defined = ~scores.isnan().all(0)
        found = shot.received().values[0, 0, 0]
        keys = torch.tensor([*shot.positions, *range(run.tokens.shape[1], scores.shape[1])])
        assert set(defined.nonzero().flatten().tolist()) <= set(keys.tolist())
        torch.testing.assert_close(found, scores[:, keys], equal_nan=True, rtol=1e-4, atol=1e-5)
        assert shot.tokens == received.tokens[step, row, keys].tolist()
        assert torch.equal(shot.masked, received.masked[step, row, keys])
        assert shot.sinks == received.sinks == (2 if family == "sink_qwen" else 0)


@pytest.mark.parametrize("family", ["sdar", "modernbert"])
def test_scores_of_a_snapshot_are_those_of_the_run(family):
    """Block causal attention, and windows to both sides: e_j is that of the queries that see the key."""
    network = tiny(family)
    settings = {"temperature": 0.0} if family == "sdar" else {"steps": 8, "block_length": 8}
    run = denoise(network, [[5, 9, 14, 3, 20, 6, 7, 30, 31], [7, 8, 9, 1]], gen_length=8, **settings)
    received = received_over_steps(network, run)
    for step, layer, row in ((0, 1, 0), (3, 1, 1), (int(run.row_steps[1]) - 1, 0, 1)):
        shot = snapshot(network, run, step=step, layer=layer, row=row)
        expected = received.values[step, row, layer][:, shot.positions]
        found = shot.received().values.reshape(expected.shape)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert found.isfinite().any()


@pytest.mark.parametrize("family", ["llada", "sink_qwen", "modernbert"])
def test_scores_of_a_snapshot_are_those_of_its_class_of_queries(family):
    network = tiny(family)
    classes = ("all", "masked", "prompt")
    reducers = [dl.ReceivedAttention(classes, min_viewers=1)]
    texts = [[5, 9, 14, 3, 20, 6, 7, 30, 31], [7, 8, 9, 1]]
    rec = dl.record(network, texts, reducers, steps=4, gen_length=12, block_length=12)
    for queries in classes:
        shot = snapshot(network, rec.run, step=1, layer=1, row=1, queries=queries)
        keys = torch.tensor([*shot.positions, *range(rec.run.tokens.shape[1], rec.sizes["key"])])
        wanted = received_of(rec, queries)
        scores = wanted.values[1, 1, 1][:, keys]
        few = (wanted.viewers[1, 1].squeeze(1)[-1] < shot.received().min_viewers)[keys]
        found = shot.received().values[0, 0, 0]
        torch.testing.assert_close(found, scores.masked_fill(few, torch.nan), equal_nan=True, rtol=1e-4, atol=1e-5)
        assert shot.received().queries == queries
        assert int(shot.received().counted) == int(wanted.counted[1, 1])
    settings = {"steps": [1], "layer": 1, "head": None, "row": 1, "detector": TopK(2)}
    figure = dl.viz.attention_maps(network, rec.run, queries="open", **settings)
    shot = snapshot(network, rec.run, step=1, layer=1, row=1, queries="masked")
    drawn = [int(x) for name in ("sink", "sinks") for x, _ in marks(figure.axes[0], name)]
    assert drawn == shot.sinks_of(TopK(2), None)
    assert "queries: masked" in figure.get_suptitle().replace("\n", " ")
    with pytest.raises(ValueError, match="the classes of queries are all, masked"):
        dl.viz.attention_maps(network, rec.run, queries="masks", **settings)


def test_value_norms_of_a_snapshot_are_the_recorded_ones(model, recording):
    shot = snapshot(model, recording.run, step=2, layer=1, row=1)
    # [kv_head, key]; two query heads share a value.
    recorded = recording.value_norm[2, 1, 1][:, shot.positions]
    torch.testing.assert_close(shot.value_norms, recorded.repeat_interleave(2, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"step": 4}, "step 4 of 4"), ({"row": -1}, "row -1 of 3"), ({"layer": 2}, "layer 2 of 2")],
)
def test_a_snapshot_of_what_is_not_there(model, recording, wrong, message):
    with pytest.raises(ValueError, match=message):
        snapshot(model, recording.run, **{"step": 0, "layer": 0, "row": 0} | wrong)
    with pytest.raises(TypeError, match="the run is a Received; give the DenoisingRun"):
        snapshot(model, received_of(recording), step=0, layer=0)
    own, of_run = snapshot(model, recording, step=0, layer=0), snapshot(model, recording.run, step=0, layer=0)
    assert torch.equal(own.pattern, of_run.pattern)


@pytest.mark.long
@pytest.mark.parametrize("head", [2, None])
def test_maps_hold_the_patterns_and_mark_the_sinks(model, recording, head):
    rule = TopK(3)
    figure = dl.viz.attention_maps(model, recording.run, steps=(0, 3), layer=1, head=head, row=1, detector=rule)
    received = received_of(recording).at_level("head" if head is not None else "layer")
    sinks = find_sinks(received, rule, level=received.level)
    place = (1, 1, head) if head is not None else (1, 1)
    for axes, step in zip(figure.axes, (0, 3), strict=False):
        shot = snapshot(model, recording.run, step=step, layer=1, row=1)
        values = shot.pattern.mean(0) if head is None else shot.pattern[head]
        np.testing.assert_allclose(axes.collections[0].get_array(), values.numpy())
        triangles = {
            name: [shot.positions[int(x - 0.5)] for x, _ in marks(axes, name)] for name in ("sink", "sinks")
        }
        found = sinks.is_sink[(step, *place)].nonzero().flatten().tolist()
        assert triangles["sink"] == [sinks.main()[(step, *place)].item()]
        assert sorted(triangles["sink"] + triangles["sinks"]) == found
        names = [drawn.get_gid() for drawn in axes.collections]
        assert names.index("sink") > names.index("sinks")  # drawn later, so that no other triangle covers it
        strip = next(c for c in axes.collections if c.get_gid() == "masked").get_array()
        assert strip.flatten().tolist() == shot.masked.float().tolist()
    assert len(found) == 3
    level = "level: head (layer 1, head 2)" if head is not None else "head mean of layer 1"
    for sentence in (level, "TopK(k=3)", "n = 1 sequence (row 1)", "relative to uniform", "10 positions"):
        assert sentence in texts(figure)
    rendered(figure)


def test_maps_name_the_scale_of_the_rule(model, recording):
    for rule, scale in (("attention-share:0.1", "share of attention"), ("above-mean:1", "relative to uniform")):
        figure = dl.viz.attention_maps(model, recording.run, steps=(0,), layer=0, head=0, detector=rule)
        assert f"; scale: {scale}" in figure.get_suptitle().replace("\n", " ")


def test_a_causal_map_shows_what_cannot_be_seen_as_such():
    network = tiny("causal")
    run = denoise(network, TEXTS[0], gen_length=6)
    figure = dl.viz.attention_maps(network, run, steps=(3,), layer=0, head=1)
    shown = figure.axes[0].collections[0].get_array()
    hidden = np.ma.getmaskarray(shown)
    np.testing.assert_array_equal(hidden, np.triu(np.ones(shown.shape, dtype=bool), 1))
    assert "not visible to the query" in [t.get_text() for t in figure.legends[0].get_texts()]


@pytest.mark.parametrize("steps", [(), range(5)])
def test_maps_stand_side_by_side_up_to_four(model, recording, steps):
    with pytest.raises(ValueError, match=f"{len(steps)} steps; give one to 4"):
        dl.viz.attention_maps(model, recording.run, steps=steps, layer=0, head=0)


@pytest.mark.parametrize("steps", [1, "1", (1.5,), [True]])
def test_steps_that_are_no_list_of_whole_numbers_are_named(model, recording, steps):
    run = recording.run
    calls = (
        lambda: dl.viz.attention_maps(model, run, steps=steps, layer=0, head=0),
        lambda: dl.viz.incoming_attention(recording, layer=0, head=0, steps=steps),
        lambda: dl.viz.received_tokens(recording, layer=0, head=0, steps=steps),
        lambda: dl.viz.emerging_text(run, steps=steps),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"steps is .*; it must be a list of whole numbers"):
            call()


@pytest.mark.parametrize("of", [np.array, torch.tensor, tuple, lambda steps: (step for step in steps)])
def test_steps_may_be_an_array(recording, of):
    wanted, found = (
        dl.viz.incoming_attention(recording, layer=0, head=0, steps=steps).axes[0].collections[0].get_array()
        for steps in ([0, 1], of([0, 1]))
    )
    np.testing.assert_array_equal(found, wanted)


def test_the_distribution_is_the_tail_of_the_scores(recording):
    figure = dl.viz.score_distribution(recording, parts=2, layer=1)
    lines = [drawn.get_xydata() for drawn in figure.axes[0].lines if drawn.get_gid() == "tail"]
    assert len(lines) == 2
    for number, steps in enumerate((slice(0, 2), slice(2, 4))):
        values = received_of(recording).values[steps, :, 1]
        values = values[~values.isnan()]
        for x, y in lines[number][::37]:
            share = float((values >= x * (1 - 1e-6)).double().mean())
            assert y == pytest.approx(share, abs=1.5 / len(values)) or (share == 0 and math.isnan(y))
    (low, _), _ = line(figure.axes[0], "threshold")
    scores = received_of(recording).values[:, :, 1]
    limits = AboveMean(3.0).thresholds(scores)
    assert low == pytest.approx(float(limits[limits.isfinite()].median()), rel=1e-3)
    for sentence in ("relative to uniform", "all heads of layer 1", f"n = {int((~scores.isnan()).sum())} keys"):
        assert sentence in texts(figure)
    rendered(figure)


def test_bands_appear_with_the_second_sequence(recording):
    def bands(figure):
        return [np.isfinite(c.get_paths()[0].vertices).all() for c in figure.axes[0].collections if c.get_paths()]

    assert all(bands(dl.viz.score_distribution(recording)))
    assert not any(bands(dl.viz.score_distribution(recording.select(batch=0))))


@pytest.mark.parametrize("main", ["head", "model"])
def test_strength_per_layer_and_head(recording, main):
    profile = sink_profile(received_of(recording), RULE, main=main)
    figure = dl.viz.sink_strength(profile)
    left, right = figure.axes[:2]
    np.testing.assert_allclose(left.collections[0].get_array(), profile.score.numpy())
    np.testing.assert_allclose(line(right, "per head")[:, 0], profile.sinks.mean(-1).numpy())
    np.testing.assert_allclose(line(right, "positions")[:, 0], profile.positions.numpy())
    assert line(right, "positions")[:, 1].tolist() == [0.5, 1.5]
    assert [t.get_text() for t in left.texts] == [f"{score:.1f}" for score in profile.score.flatten().tolist()]
    whose = {"head": "each head's main sink", "model": "the model's main sink"}[main]
    for sentence in (whose, "AboveMean(eps=0.3)", "n = 4 steps of 3 sequences", "relative to uniform"):
        assert sentence in texts(figure)
    with pytest.raises(TypeError, match="made by AboveMean"):
        dl.viz.sink_strength(profile, TopK(1))
    rendered(figure)


def test_the_sweep_has_a_line_per_length(recording):
    eps = [0.1, 0.3, 1.0]
    table = eps_sweep(received_of(recording), eps)
    figure = dl.viz.sinks_over_eps(recording, eps, marked=0.3)
    keys, patterns = figure.axes
    kept = [drawn.get_xydata() for drawn in keys.lines if drawn.get_gid() == "kept"]
    with_sink = [drawn.get_xydata() for drawn in patterns.lines if drawn.get_gid() == "with sink"]
    assert len(kept) == len(with_sink) == table["S"].nunique() == 3
    for (_, lines), found, share in zip(table.groupby("S"), kept, with_sink, strict=True):
        wanted = lines["kept"].where(lines["kept"] > 0)
        np.testing.assert_allclose(found, np.stack([eps, wanted], -1))
        np.testing.assert_allclose(share, np.stack([eps, lines["with_sink"]], -1))
    assert line(keys, "marked")[:, 0].tolist() == [0.3, 0.3]
    assert "of 3 sequences" in texts(figure)
    with pytest.raises(ValueError, match="give that of eps_sweep"):
        dl.viz.sinks_over_eps(table.drop(columns="kept"))
    with pytest.raises(TypeError, match="own eps"):
        dl.viz.sinks_over_eps(table, eps)
    rendered(figure)


def test_many_lengths_have_a_colour_bar(recording):
    """Thirty lengths in a legend covered both panels, and the layout collapsed."""
    table = eps_sweep(received_of(recording), [0.1, 0.3, 1.0])
    first = table[table["S"] == table["S"].min()]
    many = pd.concat([first.assign(S=length) for length in range(20, 50)], ignore_index=True)
    for marked, named in ((0.3, ["eps = 0.3"]), (None, [])):
        figure = dl.viz.sinks_over_eps(many, marked=marked)
        rendered(figure)
        keys, patterns, bar = figure.axes
        legend = keys.get_legend()
        assert [one.get_text() for one in (legend.get_texts() if legend else [])] == named
        lines = [one for one in keys.lines if one.get_gid() == "kept"]
        assert len(lines) == 30
        shades = [bar.collections[-1].cmap(bar.collections[-1].norm(length)) for length in range(20, 50)]
        assert [tuple(one.get_color()) for one in lines] == shades
        assert bar.get_ylabel() == "sequence length S (30 lengths)"
        for axes in (keys, patterns):  # inches; a collapsed panel has hardly any
            assert axes.get_position().height * figure.get_figheight() > 2
    assert len(dl.viz.sinks_over_eps(table).axes) == 2


def test_captions_of_profiles_and_sweeps_name_the_queries(model, recording):
    """A mean over masked queries had the caption of one over all."""
    for queries in ("all", "masked"):
        received = dl.received_over_steps(model, recording.run, queries=queries)
        assert sink_profile(received).queries == queries
        for figure in (dl.viz.sink_strength(received), dl.viz.sinks_over_eps(received, [0.5])):
            assert f"queries: {queries}" in texts(figure)
    both = [received_of(recording), received]
    assert set(eps_sweep(both, [0.5])["queries"]) == {"all / masked"}


@pytest.mark.long
def test_region_mass_is_the_mean_over_sequences_and_its_base_even_attention(recording):
    figure = dl.viz.region_mass(recording, queries=("masked", "prompt"), layer=1, head=3)
    mass = recording.region_mass[:, :, 1, 3].double()
    for axes, region in zip(figure.axes, KEY_REGIONS, strict=False):
        for name in ("masked", "prompt"):
            wanted = mass[..., QUERY_CLASSES.index(name), KEY_REGIONS.index(region)].nanmean(1)
            np.testing.assert_allclose(line(axes, name)[:, 1], wanted.numpy(), rtol=1e-6)
        assert axes.get_title() == f"on {region}"
    run, even = recording.run, []
    for step in range(4):
        shares = [run.masked[step, row].sum() / run.attention_mask[row].sum() for row in range(3)]
        even.append(float(torch.stack(shares).mean()))
    np.testing.assert_allclose(line(figure.axes[1], "even")[:, 1], even, rtol=1e-6)
    assert "learned sink tokens alone" in texts(figure)
    assert "n = 3 sequences, 4 steps" in texts(figure)
    rendered(figure)


def test_even_attention_has_even_region_mass(model, recording):
    """Planted truth: where every pattern is even, the grey line is the black one."""
    flat = tiny("llada", initializer_range=1e-9)
    even = record(flat, TEXTS, [RegionMass()], **SETTINGS)
    figure = dl.viz.region_mass(even, queries=("all",))
    for axes, region in zip(figure.axes, KEY_REGIONS, strict=False):
        if region not in ("past", "future"):
            np.testing.assert_allclose(line(axes, "all"), line(axes, "even"), atol=1e-6)


@pytest.fixture(scope="module")
def with_padding_keys():
    """Rows of unequal prompts whose network takes padding for content: MMaDA's code with guidance."""
    network = tiny("mmada")
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
    settings = {"steps": 4, "gen_length": 8, "cfg_scale": 1.0, "reference_quirks": True}
    reducers = [ReceivedAttention(min_viewers=1), RegionMass(), dl.recording.AttentionPattern()]
    return network, record(network, prompts, reducers, **settings)


def test_uniform_attention_is_over_padding_too_where_it_is_a_key(with_padding_keys):
    _, found = with_padding_keys
    assert found.unpadded
    assert float(found.pattern[0, 2, 0, 0, 5:, :5].min()) > 0
    figure = dl.viz.region_mass(found)
    for region, share in (("self", 1 / 15), ("prompt", (7 + 4 + 2) / 3 / 15), ("masked", 8 / 15)):
        assert line(figure.axes[KEY_REGIONS.index(region)], "even")[0, 1] == pytest.approx(share)
    # Planted truth: where every pattern is even, the grey line is the black one.
    flat = tiny("mmada", initializer_range=1e-9)
    settings = {key: found.run.settings[key] for key in ("steps", "gen_length", "cfg_scale")}
    figure = dl.viz.region_mass(
        record(flat, [[1, 2, 3, 4], [5]], [RegionMass()], reference_quirks=True, **settings), queries=("all",)
    )
    for axes, region in zip(figure.axes, KEY_REGIONS, strict=False):
        if region not in ("past", "future"):
            np.testing.assert_allclose(line(axes, "all"), line(axes, "even"), atol=1e-6)


def test_scores_of_a_snapshot_are_the_recorded_ones_where_padding_is_a_key(with_padding_keys):
    network, found = with_padding_keys
    for row, step, layer in ((2, 0, 1), (1, 2, 0), (0, 3, 1)):
        shot = snapshot(network, found.run, step=step, layer=layer, row=row)
        assert shot.padding_keys == shot.padding == (0, 3, 5)[row]
        received = shot.received()
        recorded = found.received[step, row, layer][:, shot.positions]
        torch.testing.assert_close(received.values[0, 0, 0], recorded, rtol=1e-4, atol=1e-5)
        assert received.expected.shape[-1] == received.viewers.shape[-1] == len(shot.tokens)
        sums = found.pattern[step, row, layer][:, shot.positions][..., shot.positions].sum(-1)
        assert shot.row_sums == pytest.approx((float(sums.min()), float(sums.max())))


def test_region_mass_says_why_the_panel_of_learned_sinks_is_empty(recording):
    panel = dl.viz.region_mass(recording).axes[KEY_REGIONS.index("sink")]
    assert [text.get_text() for text in panel.texts] == ["no learned sink tokens\nin this model"]
    assert not len(panel.get_yticks())


def test_region_mass_of_what_has_none(recording):
    with pytest.raises(ValueError, match="no region_mass; record with RegionMass"):
        dl.viz.region_mass(record(tiny("llada"), TEXTS[:1], [ValueNorm()], **SETTINGS))
    with pytest.raises(ValueError, match="queries is"):
        dl.viz.region_mass(recording, queries=("sinks",))
    with pytest.raises(TypeError, match="give a Recording"):
        dl.viz.region_mass(received_of(recording))


@pytest.mark.long
def test_norms_are_drawn_as_they_are(recording):
    norms = value_norms(recording, find_sinks(recording, RULE))
    figure = dl.viz.value_norm_scatter(norms)
    points, counts = figure.axes
    for place, (name, values) in enumerate((("sinks", norms.sink), ("others", norms.other))):
        drawn = marks(points, name)
        np.testing.assert_allclose(drawn[:, 1], values.numpy())
        assert (abs(drawn[:, 0] - place) < 0.5).all()
        np.testing.assert_allclose(
            points.lines[place].get_ydata(), [norms.mean_sink, norms.mean_other][place].value
        )
    assert sum(float(patch.get_data().values.sum()) for patch in counts.patches) == pytest.approx(2)
    for sentence in (norms.rule, f"n = {len(norms.sink)} pairs of {norms.found} sinks, 3 prompts"):
        assert sentence in texts(figure)
    assert len(counts.get_xticks()) <= 5
    for mean, label in zip((norms.mean_sink, norms.mean_other), points.texts, strict=True):
        assert label.xy[1] == max(mean.value, mean.high)  # above the line and its interval, which it would hide
        assert label.get_verticalalignment() == "bottom"
    high = replace(norms, sink=norms.sink.clamp(max=1.0), other=norms.other.clamp(max=1.0))  # below the intervals
    for drawn in (figure, dl.viz.value_norm_scatter(high)):
        drawn.draw_without_rendering()
        points = drawn.axes[0]
        assert all(one.get_window_extent().y1 <= points.get_window_extent().y1 for one in points.texts)
    assert points.get_ylabel() == "norm ‖vⱼᵐ‖₂"
    assert "||" not in texts(figure)
    layers = dl.viz.value_norm_layers(norms)
    for axes, name in ((0, "norm_sink"), (0, "norm_other"), (1, "share")):
        np.testing.assert_allclose(line(layers.axes[axes], name), norms.profile[["layer", name]])
    rendered(figure)
    rendered(layers)
    with pytest.raises(TypeError, match="give the ValueNorms"):
        dl.viz.value_norm_scatter(recording)


@pytest.mark.parametrize(("family", "before"), [("causal", 1), ("dream", 1), ("llada", 0)])
def test_the_plotted_lens_table_has_the_state_that_predicts_the_first_token(family, before):
    network = tiny(family)
    recording = record(network, [[5, 6, 7], [8, 9]], gen_length=6)
    for row, prompt in ((0, 3), (1, 2)):
        options = PlotOptions({"rec": recording}, row=row, steps=(0,))
        vars(options)["network"] = network  # which the recording does not name
        figure = plots()["lens-table"].draw(options)
        labels = figure.axes[0].get_xticklabels()
        # The strip is above the state that predicts: the legend does not call that position masked.
        strip = figure.legends[0].get_texts()[1].get_text()
        assert strip == (
            "predicts the next position, which is masked" if before else "masked position, which the model predicts"
        )
        shown = [int(label.get_text().split("\n")[0]) for label in labels]
        # An AR model has read only the prompt at step 0.
        last = prompt - 1 if family == "causal" else prompt + 5
        assert shown == [*range(prompt - before, last + 1)]


def test_the_lens_table_names_the_likeliest_tokens(model, recording):
    run = recording.run
    lens = logit_lens(model, run, [run.prompt_length + 1, run.prompt_length + 4])
    figure = dl.viz.lens_table(lens, position=run.prompt_length + 4, row=1)
    chosen = (lens.batch == 1) & (lens.position == run.prompt_length + 4)
    np.testing.assert_allclose(
        figure.axes[0].collections[0].get_array(), lens.top_probabilities[chosen][:, :, 0].T.numpy()
    )
    names = [f"w{i}" if i < 61 else ("<pad>", "<eos>", "[MASK]")[i - 61] for i in range(64)]
    wanted = [names[i] for i in lens.top_tokens[chosen][:, :, 0].flatten().tolist()]
    assert [t.get_text() for t in figure.axes[0].texts] == wanted
    frames = [p for p in figure.axes[0].patches if p.get_gid() == "right"]
    assert len(frames) == int((lens.predicted[chosen, None] & (lens.rank[chosen] == 0)).sum())
    masks = replace(lens, top_tokens=torch.full_like(lens.top_tokens, 63), rank=torch.zeros_like(lens.rank))
    shown = dl.viz.lens_table(masks, position=run.prompt_length + 4, row=1)
    assert not [p for p in shown.axes[0].patches if p.get_gid() == "right"]  # [MASK] is not the token decoded
    strips = [p.get_x() for p in figure.axes[0].patches if p.get_gid() == "predicted"]
    assert strips == lens.predicted[chosen].nonzero().flatten().tolist()
    at_step = dl.viz.lens_table(lens, step=2, row=0)
    assert len(at_step.axes[0].texts) == 2 * len(lens.layers)
    rendered(figure)
    for wrong, message in (({}, "give one of them"), ({"position": 0}, "read nothing at position 0")):
        with pytest.raises(ValueError, match=message):
            dl.viz.lens_table(lens, **wrong)


@pytest.mark.long
def test_models_side_by_side_take_whatever_tells_their_sinks(recording):
    received = received_of(recording)
    sinks = find_sinks(received, RULE)
    given = {"a": received, "b": recording, "c": sinks, "d": trajectories(sinks, hysteresis=1.0)}
    figure = dl.viz.sink_positions_by_model(given, RULE, heads=dict.fromkeys(given, (1, 2)), rows={"a": 1, "d": 1})
    filled = {}
    for axes, name in zip(figure.axes, given, strict=False):
        filled[name] = [tuple(point) for point in marks(axes, "sink").tolist()]
        assert axes._left_title.get_text().startswith(name)
    main = sinks.main()[:, :, 1, 2]
    padding = int(recording.run.padding[1])
    assert padding > 0  # positions count from the row's first token
    assert filled["a"] == filled["d"] == [(t, int(p) - padding) for t, p in enumerate(main[:, 1]) if p >= 0]
    wanted = [(t, int(p)) for t, p in enumerate(main[:, 0]) if p >= 0]
    assert wanted
    assert filled["b"] == filled["c"] == wanted != filled["d"]
    assert "rule: AboveMean(eps=0.3)" in texts(figure)
    with pytest.raises(ValueError, match=r"no \(layer, head\) for b"):
        dl.viz.sink_positions_by_model({"b": received}, heads={})
    for other in ({"rows": {"B": 1}}, {"blocks": {"B": [(0, 4)]}}):
        with pytest.raises(ValueError, match="rows or blocks have 'B'; the models are b"):
            dl.viz.sink_positions_by_model({"b": received}, heads={"b": (1, 2)}, **other)
    rendered(figure)


def test_a_recording_is_as_good_as_its_received_attention(recording, tmp_path):
    loaded = dl.Recording.load(recording.save(tmp_path / "rec"))
    for given in (loaded, received_of(recording)):
        figure = dl.viz.incoming_attention(given, layer=1, head=2)
        drawn = figure.axes[0].collections[0].get_array().filled(np.nan)
        np.testing.assert_allclose(drawn, received_of(recording).values[:, 0, 1, 2][:, -17:].numpy())
        # A loaded recording has no tokenizer, but the texts of its tokens.
        assert [t.get_text() for t in figure.axes[0].get_xticklabels()][:3] == ["w1", "w2", "w3"]


def test_colours_of_masks_are_those_of_the_legend(model, recording):
    figure = dl.viz.attention_maps(model, recording.run, steps=(0,), layer=0, head=0)
    strip = next(c for c in figure.axes[0].collections if c.get_gid() == "masked")
    assert MASKED == "#d3e3f0"
    np.testing.assert_allclose(strip.cmap(1.0)[:3], [0xD3 / 255, 0xE3 / 255, 0xF0 / 255])


def test_logarithmic_axes_of_shares_are_in_percent():
    """Between powers of ten matplotlib's own labels, 6 x 10^-1, stood beside 100%."""
    model = tiny("llada", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    rec = record(model, [[30]], [ReceivedAttention(min_viewers=1)], steps=1, gen_length=1)
    for figure in (dl.viz.score_distribution(rec), dl.viz.sinks_over_eps(rec, [0.01, 0.05])):
        figure.savefig(io.BytesIO(), format="png")
        axis = figure.axes[0].yaxis
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        labels = {tick.label1.get_text(): tick.get_loc() for tick in ticks if tick.label1.get_text()}
        assert len(labels) > 1
        assert [float(text.removesuffix("%")) / 100 for text in labels] == pytest.approx([*labels.values()])
        assert {tick.label1.get_fontsize() for tick in ticks} == {7}


@pytest.mark.parametrize(("heads", "numbers"), [(32, 32), (64, 0)])
def test_numbers_of_many_heads_do_not_overlap(heads, numbers):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 128}
    model = tiny("llada", num_hidden_layers=1, **sizes)
    rec = record(model, [[5, 6, 7]], [ReceivedAttention(min_viewers=1)], steps=1, gen_length=2)
    figure = dl.viz.sink_strength(rec)
    figure.savefig(io.BytesIO(), format="png")
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == numbers
    assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))
