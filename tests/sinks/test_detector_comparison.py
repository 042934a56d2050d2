"""Agreement of detectors, sweeps over eps and the profile, against plain loops over every key."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from dlm_lens.adapters import load
from dlm_lens.recording import ReceivedAttention, record
from dlm_lens.sinks import (
    AboveMean,
    AboveStd,
    KeyStatistic,
    LowKeyNorm,
    Received,
    TopK,
    compare_detectors,
    compare_query_classes,
    eps_sweep,
    find_sinks,
    sink_profile,
    token_enrichment,
    trajectories,
)
from dlm_lens.sinks import received_of as recorded
from dlm_lens.sinks.analysis import detector_comparison as module
from dlm_lens.statistics import SHARE_BOUNDS, ratio_by_prompt
from dlm_lens.testing import tiny
from dlm_lens.viz import sinks_over_eps
from tests.sinks import reference


def received_of(keys=(14, 14, 14), seed=0, steps=3, layers=2, heads=3):
    """Random scores; each row has its own number of keys, behind padding."""
    generator = torch.Generator().manual_seed(seed)
    width = max(keys)
    values = width * (2.5 * torch.randn(steps, len(keys), layers, heads, width, generator=generator)).softmax(-1)
    for row, count in enumerate(keys):
        values[:, row, ..., : width - count] = torch.nan
    return Received(
        values=values,
        expected=torch.ones(steps, len(keys), 1, 1, width),
        counted=torch.tensor(keys).expand(steps, -1),
        layers=tuple(range(layers)),
    )


def patterns(received):
    for at in np.ndindex(*received.values.shape[:-1]):
        yield at, [None if math.isnan(v) else v for v in received.values[at].double().tolist()]


def test_jaccard_and_kept_equal_loops():
    received = received_of(keys=(14, 11, 14))
    (line,) = compare_detectors(received, [AboveMean(1.5), AboveStd(1.2)]).to_dict("records")
    both = either = a_count = b_count = n = same = compared = 0
    for _, scores in patterns(received):
        a, b = reference.above_mean(scores, 1.5), reference.above_std(scores, 1.2)
        both += sum(x and y for x, y in zip(a, b, strict=True))
        either += sum(x or y for x, y in zip(a, b, strict=True))
        a_count, b_count = a_count + sum(a), b_count + sum(b)
        n += sum(v is not None for v in scores)
        if any(a) and any(b):
            compared += 1
            tops = [max((v, -j) for j, v in enumerate(scores) if on[j]) for on in (a, b)]
            same += tops[0] == tops[1]
    assert (line["first"], line["second"]) == ("AboveMean(eps=1.5)", "AboveStd(k=1.2)")
    assert line["jaccard"] == pytest.approx(both / either)
    assert 0.2 < line["jaccard"] < 0.98
    assert line["kept_first"] == pytest.approx(a_count / n)
    assert line["kept_second"] == pytest.approx(b_count / n)
    assert line["same_main"] == pytest.approx(same / compared)
    assert (line["n"], line["sequences"]) == (n, 3)
    assert line["low"] <= line["jaccard"] <= line["high"]


def test_sinks_that_do_not_know_their_prompts_are_compared_by_those_that_do():
    received = received_of(keys=(14, 11, 14))
    known = replace(find_sinks(received, AboveMean(1.5)), row_prompts=torch.tensor([0, 1, 0]))
    unknown = replace(find_sinks(received, AboveStd(1.2)), row_prompts=None)
    tables = [compare_detectors(None, pair) for pair in ([known, unknown], [unknown, known])]
    assert [table.prompts.item() for table in tables] == [2, 2]
    assert compare_detectors(None, [unknown, unknown]).prompts.item() == 3


def test_sinks_of_hidden_states_take_part():
    received = received_of()
    norms = KeyStatistic(1 / received.values, "key norm", layers=(0, 1))
    low = find_sinks(norms, LowKeyNorm(0.3))
    table = compare_detectors(received, [TopK(1), low, AboveMean(1.5)])
    assert table["second"].tolist() == ["LowKeyNorm(below=0.3)", "AboveMean(eps=1.5)", "AboveMean(eps=1.5)"]
    both = (find_sinks(received, TopK(1)).is_sink & low.is_sink).sum()
    either = (find_sinks(received, TopK(1)).is_sink | low.is_sink).sum()
    assert table["jaccard"][0] == pytest.approx(int(both) / int(either))
    # The shortest key is the one that receives most, by construction.
    assert table["same_main"][0] == 1
    again = compare_detectors(None, [find_sinks(received, TopK(1)), low])
    assert again["jaccard"][0] == table["jaccard"][0]


def test_what_cannot_be_compared_is_refused():
    received = received_of()
    with pytest.raises(ValueError, match="1 detectors"):
        compare_detectors(received, [TopK(1)])
    with pytest.raises(TypeError, match="needs attention"):
        compare_detectors(None, [TopK(1), TopK(2)])
    with pytest.raises(ValueError, match="the same axes"):
        compare_detectors(received, [TopK(1), find_sinks(received, TopK(1), level="layer")])


@pytest.mark.parametrize("entries", [1, 2**22])
@pytest.mark.parametrize("literal", [False, True])
def test_eps_sweep_equals_loops_per_length(literal, entries, monkeypatch):
    monkeypatch.setattr(module, "ENTRIES_AT_ONCE", entries)
    received = received_of(keys=(14, 11, 14))
    eps_values = [0.02, 0.1, 0.2] if literal else [0.5, 1.0, 3.0]
    table = eps_sweep(received, eps_values, literal=literal)
    assert table["S"].tolist() == [11] * 3 + [14] * 3
    for line in table.itertuples():
        kept = n = hit = count = 0
        for _, scores in patterns(received):
            keys = sum(v is not None for v in scores)
            if keys != line.S:
                continue
            scale = keys if literal else 1
            found = reference.above_mean([None if v is None else v / scale for v in scores], line.eps)
            kept, n, hit, count = kept + sum(found), n + keys, hit + any(found), count + 1
        assert line.kept == pytest.approx(kept / n)
        assert line.removed == pytest.approx(1 - kept / n)
        assert line.with_sink == pytest.approx(hit / count)
        assert (line.n, line.patterns, line.sequences) == (n, count, 1 if line.S == 11 else 2)
        assert line.scale == ("share of attention" if literal else "relative to uniform")
    assert table[table["S"] == 14]["kept"].is_monotonic_decreasing
    assert table[table["S"] == 11]["low"].isna().all()
    assert table[table["S"] == 14]["low"].notna().all()


def test_eps_sweep_keeps_what_find_sinks_finds_where_a_score_is_the_threshold():
    values = torch.zeros(2, 1, 1, 1, 9)
    values[0, ..., 4], values[1, ..., 4] = 2.0, 2.5
    received = Received(
        values=values, expected=torch.ones(2, 1, 1, 1, 9), counted=torch.full((2, 1), 9), layers=(0,)
    )
    assert find_sinks(received, AboveMean(2.0)).is_sink.sum().item() == 1
    table = eps_sweep(received, [2.0])
    assert (table["kept"].item(), table["with_sink"].item()) == (1 / 18, 1 / 2)


def test_without_scores_there_is_no_share_of_patterns():
    """It was 0, as of patterns without a sink; the figure said so too."""
    received = replace(received_of(), values=torch.full_like(received_of().values, math.nan))
    (line,) = eps_sweep(received, [1.0]).itertuples()
    assert (line.n, line.patterns) == (0, 0)
    assert math.isnan(line.kept)
    assert math.isnan(line.with_sink)
    figure = sinks_over_eps(received, [1.0, 2.0])
    assert [text.get_text() for text in figure.axes[0].texts] == ["no key has a score"]
    drawn = next(one for one in figure.axes[1].lines if one.get_gid() == "with sink")
    assert all(map(math.isnan, drawn.get_ydata()))


def test_eps_sweep_takes_several_runs():
    one, other = received_of(seed=1), received_of(keys=(20,), seed=2)
    both = eps_sweep([one, other], [1.0])
    alone = [eps_sweep(one, [1.0]), eps_sweep(other, [1.0])]
    assert both["S"].tolist() == [14, 20]
    for n, table in enumerate(alone):
        assert both["kept"][n] == table["kept"][0]
    with pytest.raises(ValueError, match="eps_values is empty"):
        eps_sweep(one, [])
    for wrong in (3, ["a"], "1", [math.nan]):
        with pytest.raises(ValueError, match=r"eps_values is .*; it must be a list of finite numbers"):
            eps_sweep(one, wrong)


def test_a_recording_stands_for_its_received_attention():
    model, reducer = tiny("llada"), ReceivedAttention(("all", "masked", "unmasked"), min_viewers=1)
    recording = record(model, [[5, 9, 11, 3], [6, 2]], [reducer], gen_length=4)
    received = recorded(recording)
    for found, wanted in (
        (eps_sweep([recording, received], [0.5]), eps_sweep([received, received], [0.5])),
        (eps_sweep(recording, [0.5]), eps_sweep(received, [0.5])),
        (sink_profile(recording).table(), sink_profile(received).table()),
        (
            compare_query_classes(recording, recording),
            compare_query_classes(recorded(recording, "masked"), recorded(recording, "unmasked")),
        ),
    ):
        pd.testing.assert_frame_equal(found, wanted)
    with pytest.raises(ValueError, match="no received_masked; record with"):
        compare_query_classes(record(model, [[5, 9]], gen_length=4), received)
    for call in (lambda: sink_profile(3), lambda: eps_sweep(3, [1.0]), lambda: compare_query_classes(3, received)):
        with pytest.raises(ValueError, match="is 3; it must be a Recording, or the Received of"):
            call()


def test_prompts_are_those_that_have_a_case():
    """A line without an interval has one prompt with a case, or none, however many prompts were run."""
    model = load("toy")
    prompts = [
        f"{name} has {n} apples . {name} buys 2 more . how many apples ? :"
        for name, n in (("tom", 5), ("mia", 6), ("leo", 17))
    ]
    both = ReceivedAttention(queries=("masked", "unmasked"))
    rec = record(model, prompts, [both], gen_length=8, block_length=8, seed=0)
    classes = [find_sinks(recorded(rec, queries=name), AboveMean(2.0)) for name in ("masked", "unmasked")]
    there = (classes[0].main() >= 0) & (classes[1].main() >= 0)  # [step, batch, layer, head]
    table = compare_query_classes(rec, rec, AboveMean(2.0))
    assert table["prompts"].tolist() == there.any(0).sum(0).flatten().tolist()
    assert table["prompts"].nunique() > 2
    assert (table["low"].notna() == (table["prompts"] > 1)).all()
    assert (table["sequences"] == len(prompts)).all()
    paths = trajectories(recorded(rec, queries="unmasked"), AboveMean(2.0))
    enriched = token_enrichment(paths, by="head")
    assert enriched["prompts"].nunique() > 1
    assert (enriched["low"].notna() == (enriched["prompts"] > 1)).all()


def test_ratio_by_prompt_resamples_prompts():
    numerator, denominator = np.array([[1.0], [3.0]]), np.array([[2.0], [4.0]])
    ratio, low, high = ratio_by_prompt(numerator, denominator)
    assert float(ratio[0]) == pytest.approx(4 / 6)
    # A resample is (1, 1), (1, 2) or (2, 2): 1/2, 4/6, 3/4 with probabilities 1/4, 1/2, 1/4.
    # For two prompts their distances from 4/6 grow by t(1) / z * sqrt(2).
    wider = stats.t.ppf(0.975, 1) / stats.norm.ppf(0.975) * 2**0.5
    assert (float(low[0]), float(high[0])) == pytest.approx((4 / 6 - wider / 6, 4 / 6 + wider / 12))
    _, low, high = ratio_by_prompt(numerator, denominator, bounds=SHARE_BOUNDS)
    assert (float(low[0]), float(high[0])) == (0.0, 1.0)
    _, low, high = ratio_by_prompt(np.full((8, 1), 2.0), np.full((8, 1), 4.0))
    assert (float(low[0]), float(high[0])) == (0.5, 0.5)
    _, low, _ = ratio_by_prompt(np.ones((1, 1)), np.ones((1, 1)))
    assert math.isnan(float(low[0]))


def test_ratio_by_prompt_covers_the_truth_about_95_percent_of_the_time():
    """Heads of one prompt are alike: 12 prompts of 40 hits each drawn from the prompt's own probability."""
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        chance = generator.uniform(0.2, 0.6, size=30)
        hits = generator.binomial(40, chance)[:, None].astype(float)
        _, low, high = ratio_by_prompt(hits, np.full((30, 1), 40.0), resamples=400)
        inside += float(low[0]) <= 0.4 <= float(high[0])
    assert 0.92 <= inside / 300 <= 0.98  # the standard deviation of 300 draws is 0.013


def test_the_profile_leaves_out_patterns_and_steps_without_scores():
    received = received_of(steps=3)
    of_steps = sink_profile(received.part(steps=slice(0, 3, 2)), AboveMean(1.5))
    received.values[1] = math.nan
    found = sink_profile(received, AboveMean(1.5))
    for name in ("score", "sinks", "positions", "sinks_of_mean"):
        torch.testing.assert_close(getattr(found, name), getattr(of_steps, name))
    received.values[:, :, 0, 1] = math.nan
    table = sink_profile(received, AboveMean(1.5)).table()
    assert table["sinks_per_head"][0] == pytest.approx(of_steps.sinks[0, [0, 2]].mean().item())
    assert table["score"][0] == pytest.approx(of_steps.score[0, [0, 2]].mean().item())


@pytest.mark.parametrize("main", ["head", "model"])
def test_the_profile_equals_loops(main):
    received = received_of(keys=(14, 11), steps=4)
    profile = sink_profile(received, AboveMean(1.5), main=main)
    steps, batch, layers, heads, _ = received.values.shape
    values = received.values.double()
    for layer in range(layers):
        positions, of_mean = [], []
        for step in range(steps):
            for row in range(batch):
                per_head = [
                    [None if math.isnan(v) else v for v in values[step, row, layer, head].tolist()]
                    for head in range(heads)
                ]
                found = [reference.above_mean(scores, 1.5) for scores in per_head]
                positions.append(sum(any(column) for column in zip(*found, strict=True)))
                mean = [
                    None if column[0] is None else math.fsum(column) / heads
                    for column in zip(*per_head, strict=True)
                ]
                of_mean.append(sum(reference.above_mean(mean, 1.5)))
        assert float(profile.positions[layer]) == pytest.approx(sum(positions) / len(positions))
        assert float(profile.sinks_of_mean[layer]) == pytest.approx(sum(of_mean) / len(of_mean))
        for head in range(heads):
            scores, counts = [], []
            for step in range(steps):
                for row in range(batch):
                    own = values[step, row, layer, head].nan_to_num(-1)
                    model = values[step, row].mean((0, 1)).nan_to_num(-1)
                    scores.append(float(own.max() if main == "head" else own[model.argmax()]))
                    line = [None if v < 0 else v for v in own.tolist()]
                    counts.append(sum(reference.above_mean(line, 1.5)))
            assert float(profile.score[layer, head]) == pytest.approx(sum(scores) / len(scores), rel=1e-5)
            assert float(profile.sinks[layer, head]) == pytest.approx(sum(counts) / len(counts))
    table = profile.table()
    assert table["score"][1] == pytest.approx(float(profile.score[1].mean()))
    assert table["highest_score"][0] == pytest.approx(float(profile.score[0].max()))
    assert f"main sink of the {main}" in repr(profile)


def test_a_profile_needs_heads():
    received = received_of()
    with pytest.raises(ValueError, match="every layer and head"):
        sink_profile(received.at_level("layer"))
    with pytest.raises(ValueError, match="main is 'token'"):
        sink_profile(received, main="token")


def test_steps_without_scores_do_not_count_in_a_profile():
    received = received_of(keys=(14,), steps=4)
    received.values[2:] = torch.nan
    half = received_of(keys=(14,), steps=4).values[:2, 0].double().amax(-1).mean(0)
    torch.testing.assert_close(sink_profile(received, AboveMean(1.5)).score.double(), half, rtol=1e-5, atol=0)


def test_keys_that_one_rule_cannot_judge_are_not_compared():
    received = received_of(keys=(14,))
    other = received_of(keys=(14,))
    other.values[..., :5] = torch.nan
    table = compare_detectors(None, [find_sinks(given, TopK(3)) for given in (received, other)])
    assert table["n"].item() == other.values.shape[:-1].numel() * 9
    kept = find_sinks(received, TopK(3)).is_sink[..., 5:].double().mean()
    assert table["kept_first"].item() == pytest.approx(float(kept))
