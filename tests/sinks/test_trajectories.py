"""Planted sinks are recovered exactly; everything else equals plain loops."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_lens.recording import MassiveActivations, record
from dlm_lens.sampling import denoise
from dlm_lens.sinks import (
    AboveMean,
    AboveMedian,
    AboveStd,
    AttentionShare,
    Detector,
    KeyStatistic,
    LowKeyNorm,
    MeanReceived,
    Received,
    TopK,
    find_sinks,
    received_over_steps,
    trajectories,
)
from dlm_lens.sinks import sink_trajectories as module
from dlm_lens.testing import tiny
from tests.sinks import reference
from tests.sinks.planted import plans, planted, truth

RULE = AboveMean(3.0)


def received_of(values, **fields):
    """Scores [step, key] or [step, batch, layer, head, key] as a Received."""
    values = torch.as_tensor(values)
    values = values if values.ndim == 5 else values[:, None, None, None]
    steps, batch, layers, _, keys = values.shape
    defaults = {
        "expected": torch.ones(steps, batch, 1, 1, keys),
        "counted": torch.full((steps, batch), keys),
        "layers": tuple(range(layers)),
    }
    return Received(values=values, **{**defaults, **fields})


def spells(paths, pattern=0):
    lifetimes = paths.lives
    mine = lifetimes.pattern == pattern
    return sorted(
        zip(
            lifetimes.position[mine].tolist(),
            lifetimes.first[mine].tolist(),
            lifetimes.last[mine].tolist(),
            strict=True,
        )
    )


def links(paths, pattern=0):
    lifetimes, found = paths.lives, []
    for index in np.flatnonzero((lifetimes.pattern == pattern) & (paths.before >= 0)):
        a, b = paths.before[index], index
        found.append(
            tuple((int(lifetimes.position[i]), int(lifetimes.first[i]), int(lifetimes.last[i])) for i in (a, b))
        )
    return sorted(found)


def as_floats(scores):
    return [[None if math.isnan(v) else v for v in row] for row in scores.double().tolist()]


@pytest.mark.parametrize(("steps", "keys"), [(2, 16), (7, 16), (12, 24), (32, 64), (61, 40), (128, 128)])
@pytest.mark.parametrize("from_sinks", [False, True])
def test_planted_sinks_are_recovered_exactly(steps, keys, from_sinks):
    received, chosen = planted(steps, keys)
    paths = trajectories(find_sinks(received, RULE)) if from_sinks else trajectories(received, RULE)
    table = paths.table()
    for row in range(2):
        for number, plan in enumerate(chosen):
            layer, head = 10 + number // 4, number % 4
            pattern = row * 8 + number
            assert spells(paths, pattern) == sorted(plan.spells)
            mine = table[(table.batch == row) & (table["layer"] == layer) & (table["head"] == head)]
            got = sorted(zip(mine.position, mine.first_step, mine.last_step, strict=True))
            assert got == sorted(plan.spells)
            moved = mine[mine.came_from.notna()]
            assert sorted(zip(moved.came_from, moved.position, strict=True)) == sorted(plan.moves)
            assert (moved.moved_by == moved.position - moved.came_from).all()
            assert paths.kinds[row, number // 4, number % 4] == plan.kind
            assert paths.switched[:, row, number // 4, number % 4].nonzero().flatten().tolist() == list(
                plan.switches
            )
            assert mine.transient.tolist() == [
                last - first < 2 and last < steps - 1 for _, first, last in sorted(plan.spells, key=lambda s: s[1])
            ]
            assert torch.equal(paths.counts[:, row, number // 4, number % 4], truth(plan, steps, keys).sum(-1))


def test_the_end_of_the_run_makes_no_sink_transient():
    """Sinks that would stay on for ten steps each, with onsets up to the last step, as in AR decoding."""
    values = torch.full((12, 40), 0.5)
    for key in range(12):
        values[key : key + 10, key] = 20.0
    paths = trajectories(received_of(values), AttentionShare(0.05))
    assert (paths.lives.steps <= 2).sum() == 2  # begun at the last two steps
    assert not paths.table()["transient"].any()
    assert "(0 transient)" in repr(paths)
    assert paths.summary("all")["transient"].item() == 0


def test_a_sink_that_moves_is_one_trajectory_and_two_that_stay_are_two():
    received, _ = planted(32, 64, batch=1)
    summary = trajectories(received, RULE).summary().set_index(["layer", "head"])
    assert summary.loc[(10, 1), "trajectories"] == 1
    assert summary.loc[(10, 1), "moves"] == 7
    assert summary.loc[(10, 1), "moves_right"] == 1
    assert summary.loc[(10, 1), "jump"] == 2
    assert summary.loc[(10, 2), "moves_right"] == 0
    assert summary.loc[(10, 2), "jump"] == 3
    assert summary.loc[(11, 1), "trajectories"] == 2
    assert summary.loc[(11, 1), "moves"] == 0
    assert summary.loc[(11, 1), "switches"] == 10
    # A life of 4 steps and 2 positions a move: half a position per step, to the right.
    assert summary.loc[(10, 1), "drift"] == pytest.approx(0.5, abs=0.02)
    assert summary.loc[(10, 2), "drift"] == pytest.approx(-1.0, abs=0.05)
    assert summary.loc[(10, 0), "drift"] == 0
    assert math.isnan(summary.loc[(10, 0), "drift_right"])
    assert summary.loc[(10, 1), "drift_right"] == 1
    assert summary.loc[(10, 0), "variance"] == 0
    assert summary.loc[(10, 0), "moved_over_run"] == 0
    assert summary.loc[(10, 1), "moved_over_run"] == 1


@pytest.mark.parametrize(("noise", "precision"), [(0.3, 1.0), (0.7, 0.99), (1.0, 0.85)])
def test_precision_and_recall_under_noise(noise, precision):
    """Sinks stand 11 above the others' mean, which noise of 1 does not hide (recall 1). But a key that is no sink
    passes eps = 3 when noise of 1 exceeds 2.5 to 3.5 standard deviations: 0.2% of 4,096 entries a pattern, next to
    56 planted ones, hold it against a precision of 1.
    """
    steps, keys = 64, 64
    received, chosen = planted(steps, keys, batch=2, noise=noise, seed=3)
    paths = trajectories(received, RULE)
    found = torch.zeros(16, steps, keys, dtype=torch.bool)
    for pattern, position, first, last in zip(
        paths.lives.pattern, paths.lives.position, paths.lives.first, paths.lives.last, strict=True
    ):
        found[pattern, first : last + 1, position] = True
    wanted = torch.stack([truth(plan, steps, keys) for plan in chosen]).repeat(2, 1, 1)
    hits = int((found & wanted).sum())
    assert hits == int(wanted.sum())
    assert hits / int(found.sum()) >= precision
    if noise == 1.0:
        assert hits / int(found.sum()) < 0.95


def test_hysteresis_holds_a_sink_down_to_three_quarters_of_eps():
    # One key above nine zeros: its excess is its score. eps = 4: on above 4, off below 3.
    track = [0, 4.0, 4.1, 3.5, 3.0, 2.99, 3.5, 4.5, 2.0]
    values = torch.zeros(len(track), 10)
    values[:, 6] = torch.tensor(track)
    assert spells(trajectories(received_of(values), AboveMean(4.0))) == [(6, 2, 4), (6, 7, 7)]
    assert spells(trajectories(received_of(values), AboveMean(4.0), hysteresis=1.0)) == [(6, 2, 2), (6, 7, 7)]
    assert spells(trajectories(received_of(values), AboveMean(4.0), hysteresis=0.5)) == [(6, 2, 8)]


@given(seed=st.integers(0, 2**16), steps=st.integers(2, 14), keys=st.integers(2, 9), holes=st.booleans())
@settings(max_examples=80, deadline=None)
def test_lives_and_moves_equal_plain_loops(seed, steps, keys, holes):
    generator = torch.Generator().manual_seed(seed)
    values = 5 * torch.rand(steps, 1, 1, 2, keys, generator=generator, dtype=torch.float64)
    # Some persistence, or no life is longer than two steps.
    for step in range(1, steps):
        values[step] = 0.6 * values[step - 1] + 0.5 * values[step]
    if holes:
        values = values.masked_fill(torch.rand(values.shape, generator=generator) < 0.1, torch.nan)
    paths = trajectories(received_of(values.float()), AboveMean(1.0))
    for head in range(2):
        scores = as_floats(values.float()[:, 0, 0, head])
        wanted = reference.lifetimes(scores, 1.0, 0.75)
        assert spells(paths, head) == wanted
        if not holes:
            assert links(paths, head) == reference.moves(wanted, steps)
        on = {(t, j) for j, first, last in wanted for t in range(first, last + 1)}
        for step in range(steps):
            there = [(scores[step][j], -j) for t, j in on if t == step]
            assert int(paths.main[step, 0, 0, head]) == (-max(there)[1] if there else -1)
            assert int(paths.counts[step, 0, 0, head]) == len(there)
        switches = [
            t
            for t in range(1, steps)
            if (a := int(paths.main[t - 1, 0, 0, head])) >= 0
            and (b := int(paths.main[t, 0, 0, head])) >= 0
            and a != b
            and {(t - 1, a), (t, a), (t - 1, b), (t, b)} <= on
        ]
        assert paths.switched[:, 0, 0, head].nonzero().flatten().tolist() == switches
        with_sink = len({t for t, _ in on})
        if with_sink:
            most = max(sum((t, j) in on for t in range(steps)) for j in range(keys))
            assert float(paths.static_share[0, 0, head]) == pytest.approx(most / with_sink)


@given(seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_life_statistics_and_the_main_path_equal_plain_loops(seed):
    generator = torch.Generator().manual_seed(seed)
    values = 4 * torch.rand(11, 1, 1, 1, 7, generator=generator)
    paths = trajectories(received_of(values), AboveMean(0.8))
    for line in paths.table().itertuples():
        mine = values[line.first_step : line.last_step + 1, 0, 0, 0, line.position].double().tolist()
        assert line.mean == pytest.approx(math.fsum(mine) / len(mine))
        assert line.peak == max(mine)
        assert line.peak_step == line.first_step + mine.index(max(mine))
        main = paths.main[line.first_step : line.last_step + 1].flatten().tolist()
        assert line.main_steps == main.count(line.position)
        assert line.steps == len(mine)
        assert line.born == (line.first_step > 0)
        assert line.died == (line.last_step < 10)
    (measures,) = paths.measures.itertuples()
    points = [(t, p) for t, p in enumerate(paths.main.flatten().tolist()) if p >= 0]
    if len(points) > 1:
        positions = [p for _, p in points]
        mean = sum(positions) / len(positions)
        assert measures.drift == pytest.approx(reference.slope(points), abs=1e-9)
        assert measures.displacement == positions[-1] - positions[0]
        assert measures.variance == pytest.approx(sum((p - mean) ** 2 for p in positions) / len(positions))
        at = dict(points)
        steps = [abs(at[t + 1] - at[t]) for t in at if t + 1 in at and at[t + 1] != at[t]]
        assert measures.changes == len(steps)
        assert (math.isnan(measures.change) and not steps) or measures.change == pytest.approx(
            sum(steps) / len(steps)
        )
    lifetimes = paths.table()
    assert measures.lives == len(lifetimes)
    assert measures.with_sink == pytest.approx(len(points) / 11)
    assert measures.sinks == pytest.approx(lifetimes.steps.sum() / 11)
    assert measures.move_rate == pytest.approx(lifetimes.came_from.notna().sum() / 10)
    lengths = (lifetimes.last_step - lifetimes.first_step + 1).tolist()
    if lengths:
        assert measures.life == pytest.approx(sum(lengths) / len(lengths))
        ended = (lifetimes.last_step < 10).tolist()
        short = [end for length, end in zip(lengths, ended, strict=True) if length <= 2]
        known = sum(short) + sum(length > 2 for length in lengths)
        assert measures.transient == pytest.approx(sum(short) / known if known else math.nan, nan_ok=True)
    moved = [int(line.position - line.came_from) for line in lifetimes.itertuples() if not pd.isna(line.came_from)]
    if moved:
        assert measures.moves_right == pytest.approx(sum(by > 0 for by in moved) / len(moved))
        assert measures.jump == pytest.approx(sum(map(abs, moved)) / len(moved))


def test_the_drift_of_a_part_is_per_step_of_the_run():
    values = torch.full((24, 1, 1, 1, 40), 0.5)
    for step in range(24):
        values[step, ..., 4 + step] = 12.0
    part = trajectories(received_of(values[::4], steps=tuple(range(0, 24, 4))), AboveMean(3.0))
    assert part.measures["drift"].tolist() == pytest.approx([1.0])


def test_a_move_is_off_within_one_step_of_on():
    def moves_of(first_until, second_from):
        values = torch.full((12, 20), 0.5)
        values[:first_until, 4] = 10
        values[second_from:, 9] = 10
        paths = trajectories(received_of(values), RULE)
        return [(a[0], b[0]) for a, b in links(paths)]

    assert moves_of(6, 6) == [(4, 9)]  # off and on at once
    assert moves_of(6, 5) == [(4, 9)]  # one step together
    assert moves_of(6, 7) == [(4, 9)]  # one step apart
    assert moves_of(6, 4) == []
    assert moves_of(6, 8) == []
    assert moves_of(12, 6) == []  # both stay: no move


def test_a_sink_that_comes_back_to_its_place_did_not_move():
    values = torch.full((10, 20), 0.5)
    values[:4, 3] = values[5:, 3] = 10
    paths = trajectories(received_of(values), RULE)
    assert spells(paths) == [(3, 0, 3), (3, 5, 9)]
    assert links(paths) == []
    assert paths.kinds.tolist() == [[["static"]]]


def test_each_death_is_linked_to_one_birth_and_the_nearest_wins():
    values = torch.full((8, 40), 0.5)
    values[:4, 10] = values[:4, 30] = 10
    values[4:, 12] = values[4:, 29] = 10
    assert links(trajectories(received_of(values), RULE)) == [((10, 0, 3), (12, 4, 7)), ((30, 0, 3), (29, 4, 7))]
    values[4:, 29] = 0.5
    assert links(trajectories(received_of(values), RULE)) == [((10, 0, 3), (12, 4, 7))]


def test_static_is_ninety_percent_of_the_steps_with_a_sink():
    def kind(steady, steps=20, empty=0):
        values = torch.full((steps + empty, 20), 0.5)
        values[:steady, 3] = 10
        values[steady:steps, 8] = 10
        return str(trajectories(received_of(values), RULE).kinds.item())

    assert kind(18) == "static"
    assert kind(17) == "moving"
    assert (kind(90, steps=100), kind(89, steps=100)) == ("static", "moving")
    assert kind(18, empty=10) == "static"  # steps without a sink do not count
    assert kind(17, empty=10) == "moving"
    values = torch.full((20, 20), 0.5)
    values[:5, 3] = values[10:15, 8] = 10
    assert trajectories(received_of(values), RULE).kinds.item() == "unsettled"


def test_steps_without_any_score_cut_lives_and_are_no_death():
    values = torch.full((9, 12), 0.5)
    values[:, 4] = 10
    values[3:5] = torch.nan
    values[5:, 4], values[5:, 7] = 0.5, 10
    paths = trajectories(received_of(values), RULE)
    assert spells(paths) == [(4, 0, 2), (7, 5, 8)]
    assert paths.lives.died.tolist() == [False, False]
    assert paths.lives.born.tolist() == [False, False]
    assert paths.summary("all")["with_sink"].item() == 1  # of the steps that have scores
    assert paths.defined.flatten().tolist() == [True] * 3 + [False] * 2 + [True] * 4


def test_a_learned_sink_token_has_no_position_and_does_not_move():
    values = torch.full((6, 11), 0.5)
    values[:3, 10] = 10  # the learned sink, behind the canvas
    values[3:, 2] = 10
    tokens = torch.cat([torch.arange(10), torch.tensor([-1])]).expand(6, 1, 11)
    paths = trajectories(received_of(values, sinks=1, tokens=tokens), RULE)
    table = paths.table()
    assert table.position.isna().tolist() == [True, False]
    assert table.token.tolist() == ["sink(0)", 2]
    assert links(paths) == []
    everything = paths.summary("all")
    assert everything["displacement"].item() == 0  # only the canvas has places
    assert not {"index", "layer", "head"} & set(everything.columns)


@pytest.mark.parametrize(
    "detector", [AboveStd(2.0), AttentionShare(0.1), MeanReceived(0.1), TopK(2), AboveMean(0.1, literal=True)]
)
def test_every_rule_can_be_followed(detector):
    received, chosen = planted(16, 32, batch=1)
    paths = trajectories(received, detector)
    assert spells(paths, 0) == sorted(chosen[0].spells) or isinstance(detector, TopK)
    if isinstance(detector, TopK):
        assert (paths.counts == 2).all()


def test_a_recording_is_followed_like_a_replay_of_its_run():
    model, settings = tiny("llada"), {"steps": 6, "gen_length": 12, "block_length": 6, "seed": 1}
    prompts = [[5, 9, 11, 3, 17, 20, 8], [6, 2, 40]]
    recorded = trajectories(record(model, prompts, **settings), AboveStd(1.5))
    replayed = trajectories(received_over_steps(model, denoise(model, prompts, **settings)), AboveStd(1.5))
    assert len(recorded.lives) > 10
    # float32 sums in another order: to the last digits of a score.
    pd.testing.assert_frame_equal(recorded.table(), replayed.table(), rtol=1e-4)


def test_levels_follow_the_mean_pattern():
    received, _ = planted(12, 48, batch=1)
    for level in ("layer", "model"):
        paths = trajectories(received, AboveMean(1.0), level=level)
        other = trajectories(find_sinks(received, AboveMean(1.0), level=level))
        assert paths.level == level
        assert "head" not in paths.table().columns
        assert len(paths.lives) > 0
        pd.testing.assert_frame_equal(paths.table(), other.table())
        assert len(paths.summary()) == (2 if level == "layer" else 1)


def test_pieces_make_no_difference(monkeypatch):
    received, _ = planted(16, 24, batch=3, noise=1.5)
    whole = trajectories(received, RULE)
    for entries in (1, 16 * 24 * 3, 16 * 24 * 9):
        monkeypatch.setattr(module, "ENTRIES_AT_ONCE", entries)
        again = trajectories(received, RULE)
        pd.testing.assert_frame_equal(again.table(), whole.table())
        pd.testing.assert_frame_equal(again.summary("pattern"), whole.summary("pattern"))
        assert torch.equal(again.main, whole.main)


def test_half_precision_scores_are_followed():
    received, chosen = planted(16, 24, batch=1, dtype=torch.float16)
    paths = trajectories(received, RULE)
    assert [spells(paths, n) for n in range(8)] == [sorted(plan.spells) for plan in chosen]


@given(seed=st.integers(0, 2**16))
@settings(max_examples=15, deadline=None)
def test_mirrored_positions_mirror_the_drift_and_reversed_steps_keep_the_lives(seed):
    received, _ = planted(14, 20, batch=1, noise=1.0, seed=seed)
    paths = trajectories(received, RULE, hysteresis=1.0)
    mirrored = trajectories(received_of(received.values.flip(-1), layers=(10, 11)), RULE, hysteresis=1.0)
    a, b = paths.summary("pattern"), mirrored.summary("pattern")
    np.testing.assert_allclose(a["displacement"], -b["displacement"])
    np.testing.assert_allclose(a["drift"], -b["drift"], atol=1e-9)
    reversed_ = trajectories(received_of(received.values.flip(0), layers=(10, 11)), RULE, hysteresis=1.0)
    for pattern in range(8):
        assert spells(reversed_, pattern) == sorted((p, 13 - z, 13 - a) for p, a, z in spells(paths, pattern))


def test_the_result_names_its_rule_and_counts():
    received, _ = planted(16, 24, batch=1)
    paths = trajectories(received, RULE)
    moves = sum(len(plan.moves) for plan in plans(16, 24))
    assert f"{moves} moves, 5 switches; 8 patterns over 16 steps: 1 none, 4 static, 3 moving, 0 unsettled" in repr(
        paths
    )
    assert (
        "AboveMean(eps=3.0), off below 0.75 of its threshold; scale: relative to uniform; level: head" in paths.rule
    )
    assert trajectories(received, "top-k:2").rule.startswith("TopK(k=2), no hysteresis; scale:")


def test_means_of_a_summary_are_means_over_sequences():
    received, _ = planted(16, 24, batch=3, noise=2.0)
    paths = trajectories(received, RULE)
    each, mean = paths.summary("pattern"), paths.summary("head").set_index(["layer", "head"])
    for (layer, head), group in each.groupby(["layer", "head"]):
        for column in ("lives", "moves", "variance", "jump", "drift", "life"):
            values = [v for v in group[column] if not math.isnan(v)]
            if values:
                assert mean.loc[(layer, head), column] == pytest.approx(sum(values) / len(values))
        assert mean.loc[(layer, head), "patterns"] == 3
        assert mean.loc[(layer, head), "static"] == pytest.approx((group.kind == "static").mean())


def low_norms(received):
    return find_sinks(KeyStatistic(received.values, "key norm", layers=received.layers), LowKeyNorm())


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda r: trajectories(r), TypeError, "None is not a detector"),
        (lambda r: trajectories(r, AboveMean), TypeError, "is not a detector; give one with its settings"),
        (lambda r: trajectories(r.values, RULE), TypeError, "of a Tensor"),
        (lambda r: trajectories(find_sinks(r, RULE), RULE), TypeError, "were found by"),
        (lambda r: trajectories(find_sinks(r, RULE), level="layer"), TypeError, "level head"),
        (lambda r: trajectories(low_norms(r)), TypeError, "sinks with low scores"),
        (lambda r: trajectories(r, RULE, hysteresis=0.0), ValueError, "hysteresis is 0.0"),
        (lambda r: trajectories(r, RULE, hysteresis=1.2), ValueError, "hysteresis is 1.2"),
        (lambda r: trajectories(r, RULE).summary("heads"), ValueError, "by is 'heads'"),
        (lambda r: trajectories(find_sinks(torch.full((2, 9, 9), 1 / 9), RULE)), ValueError, "need a step axis"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, sentence):
    received, _ = planted(4, 16, batch=1)
    with pytest.raises(error, match=sentence):
        call(received)


def test_a_rule_without_holds_asks_for_no_hysteresis():
    class Above(Detector):
        quantity = "received"

        def thresholds(self, scores):
            return torch.full_like(scores, 4.0)

        def detect(self, scores):
            return scores > 4.0

    received, chosen = planted(6, 16, batch=1)
    with pytest.raises(TypeError, match=r"hysteresis=1\.0"):
        trajectories(received, Above())
    assert spells(trajectories(received, Above(), hysteresis=1.0)) == sorted(chosen[0].spells)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("detector", [AboveMean(0.25), AboveStd(1.0), AttentionShare(0.125)])
@pytest.mark.parametrize("level", ["head", "layer"])
def test_half_precision_is_judged_alike_everywhere(dtype, detector, level):
    # Scores near the threshold, where one rounded to half precision would decide otherwise.
    generator = torch.Generator().manual_seed(0)
    values = (1 + torch.rand(20, 2, 2, 2, 12, generator=generator)).to(dtype)
    expected = torch.ones(20, 2, 1, 1, 12, dtype=dtype)
    received = Received(values, expected, torch.full((20, 2), 12), layers=(0, 1))
    wide = Received(values.float(), expected.float(), torch.full((20, 2), 12), layers=(0, 1))
    found, exact = (find_sinks(each, detector, level=level) for each in (received, wide))
    assert found.is_sink.equal(exact.is_sink)
    assert found.scores.equal(exact.scores)
    assert found.is_sink.any()
    direct, through = (
        trajectories(received, detector, level=level, hysteresis=1.0),
        trajectories(exact, hysteresis=1.0),
    )
    assert direct.counts.equal(through.counts)
    assert direct.main.equal(through.main)


def test_massive_activations_of_a_recording_are_followed():
    rec = record(tiny("llada"), ["w1 w2 w3", "w4"], [MassiveActivations()], gen_length=6, steps=6)
    found = trajectories(rec, AboveMedian(3.5, at_least=0), hysteresis=1.0)
    on = (rec.max_activation > 3.5 * rec.median_activation[..., None]).permute(1, 2, 3, 0).flatten(0, 2).numpy()
    edges = np.diff(np.pad(on, ((0, 0), (1, 1))).astype(int), axis=1)
    assert len(found.lives) == (edges == 1).sum() > 0
    assert sorted(found.lives.steps) == sorted((edges == -1).nonzero()[1] - (edges == 1).nonzero()[1])
    assert found.scale == "max activation"


def test_a_column_given_to_the_table_is_told():
    received, _ = planted(2, 16)
    with pytest.raises(TypeError, match=r"^table has no argument 'layer' \(layer is a column .*\); it has none$"):
        trajectories(received, RULE).table(layer=2)
