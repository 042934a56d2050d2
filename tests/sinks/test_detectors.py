"""Every detector on hand-made scores with known answers, and against plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_lens.sinks import AboveMean, AboveStd, AttentionShare, Detector, TopK
from tests.sinks import reference

NAN = math.nan
RULES = [AboveMean(3.0), AboveMean(0.5), AboveStd(1.0), AboveStd(2.5), AttentionShare(0.2), TopK(2)]


def scores_of(seed, keys, undefined=0):
    generator = torch.Generator().manual_seed(seed)
    scores = keys * (3 * torch.randn(2, 3, keys, generator=generator)).softmax(-1)
    return scores.masked_fill(torch.rand(2, 3, keys, generator=generator) < undefined / keys, torch.nan)


def floats(row):
    return [None if math.isnan(v) else v for v in row.tolist()]


def test_above_mean_on_a_known_row():
    # The mean of the others: of key 0 it is 1/3, of the rest (4 + ...) / 3.
    scores = torch.tensor([4.0, 0.0, 0.0, 1.0])
    detector = AboveMean(3.0)
    assert detector.thresholds(scores).tolist() == pytest.approx([1 / 3 + 3, 5 / 3 + 3, 5 / 3 + 3, 4 / 3 + 3])
    assert detector.detect(scores).tolist() == [True, False, False, False]
    assert AboveMean(3.67).detect(scores).tolist() == [False] * 4
    assert AboveMean(3.66).detect(scores).tolist() == [True, False, False, False]


def test_literal_is_a_flag():
    for literal in ("yes", "no", 1, None):
        with pytest.raises(ValueError, match=r"AboveMean\.literal is .*; it must be True or False"):
            AboveMean(0.3, literal=literal)


def test_above_mean_is_strict():
    # 4 - 1 is exactly 3.
    assert AboveMean(3.0).detect(torch.tensor([4.0, 1.0, 1.0])).tolist() == [False] * 3
    assert AboveMean(3.0).detect(torch.tensor([4.0 + 1e-5, 1.0, 1.0])).tolist() == [True, False, False]


def test_above_mean_leaves_undefined_keys_out_of_the_mean():
    scores = torch.tensor([5.0, NAN, 1.0, 1.0, NAN])
    assert AboveMean(3.0).thresholds(scores).tolist() == pytest.approx([4, NAN, 6, 6, NAN], nan_ok=True)
    assert AboveMean(3.0).detect(scores).tolist() == [True, False, False, False, False]


def test_without_others_there_is_no_sink():
    assert AboveMean(0.1).detect(torch.tensor([5.0, NAN])).tolist() == [False, False]
    assert AboveMean(0.1).detect(torch.tensor([NAN, NAN])).tolist() == [False, False]


@given(seed=st.integers(0, 2**16), size=st.integers(2, 40))
@settings(max_examples=50, deadline=None)
def test_the_literal_mean_can_never_exceed_the_others_by_three(seed, size):
    """A-bar_j = (1 / S) sum_i A_ij is at most 1, so A-bar_j - mean of others <= 1 < 3 for every pattern."""
    generator = torch.Generator().manual_seed(seed)
    soft = (10 * torch.randn(size, size, generator=generator)).softmax(-1).mean(-2)
    hardest = torch.eye(size)[0]  # every query gives everything to key 0: A-bar_0 = 1, the others 0
    for literal in (soft, hardest):
        assert not bool(AboveMean(3.0).detect(literal).any())
        assert float((literal - AboveMean(0.0).thresholds(literal)).max()) <= 1 + 1e-6
    assert AboveMean(3.0).detect(size * hardest).tolist()[0] == (size > 3)


@pytest.mark.parametrize(("length", "percent"), [(64, 6.177), (512, 0.780)])
def test_eps_three_is_this_share_of_attention(length, percent):
    """With mean score 1: s > (S - s) / (S - 1) + 3 is s > 4 - 3 / S, a share of (4 - 3 / S) / S."""
    boundary = 4 - 3 / length
    assert 100 * boundary / length == pytest.approx(percent, abs=5e-4)
    for scale, expected in ((1 + 1e-4, True), (1 - 1e-4, False)):
        scores = torch.full((length,), (length - boundary * scale) / (length - 1))
        scores[7] = boundary * scale
        assert bool(AboveMean(3.0).detect(scores)[7]) is expected
        assert int(AboveMean(3.0).detect(scores).sum()) == expected


def test_above_std_on_a_known_row():
    # One 10 among eight 1s: mean 2, population variance (64 + 8) / 9 = 8.
    scores = torch.tensor([10.0] + [1.0] * 8)
    assert AboveStd(2.0).thresholds(scores).tolist() == pytest.approx([2 + 2 * math.sqrt(8)] * 9)
    assert AboveStd(2.82).detect(scores).tolist() == [True] + [False] * 8
    # A z-score is at most sqrt(n - 1), here 2.83.
    assert AboveStd(2.83).detect(scores).tolist() == [False] * 9


def test_above_std_finds_nothing_in_rounding_noise():
    scores = 1 + 1e-7 * torch.tensor([5.0] + [0.0] * 29)
    assert not bool(AboveStd(3.0).detect(scores).any())
    assert bool(AboveStd(3.0).detect(1 + 1e4 * (scores - 1)).any())


@pytest.mark.parametrize("undefined", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_rules_equal_plain_loops(seed, undefined):
    scores = scores_of(seed, 12, undefined)
    for eps in (0.5, 1.5, 3.0):
        found = AboveMean(eps).detect(scores)
        assert found.tolist() == [[reference.above_mean(floats(row), eps) for row in rows] for rows in scores]
    for k in (0.5, 1.5, 2.5):
        found = AboveStd(k).detect(scores)
        assert found.tolist() == [[reference.above_std(floats(row), k) for row in rows] for rows in scores]
    assert 0 < int(AboveMean(1.5).detect(scores).sum()) < scores.numel()
    assert 0 < int(AboveStd(1.5).detect(scores).sum()) < scores.numel()


def test_share_compares_with_a_constant():
    shares = torch.tensor([0.5, 0.3, 0.2, NAN])
    assert AttentionShare(0.3).detect(shares).tolist() == [True, False, False, False]
    assert AttentionShare(0.25).detect(shares).tolist() == [True, True, False, False]
    assert AttentionShare(0.25).thresholds(shares).tolist() == pytest.approx([0.25, 0.25, 0.25, NAN], nan_ok=True)


def test_top_k_takes_the_largest_defined_ones_and_the_earlier_of_equals():
    scores = torch.tensor([[1.0, 3.0, NAN, 3.0, 2.0], [NAN, NAN, 0.5, NAN, NAN]])
    assert TopK(1).detect(scores).tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]
    assert TopK(3).detect(scores).tolist() == [[0, 1, 0, 1, 1], [0, 0, 1, 0, 0]]
    assert TopK(99).detect(scores).tolist() == [[1, 1, 0, 1, 1], [0, 0, 1, 0, 0]]
    assert bool(TopK(2).thresholds(scores).isnan().all())


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_undefined_keys_are_never_sinks(rule):
    scores = scores_of(3, 10, undefined=5)
    assert not bool(rule.detect(scores)[scores.isnan()].any())
    assert not bool(rule.detect(torch.full((4,), torch.nan)).any())


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(seed=st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_permuting_keys_permutes_sinks(rule, seed):
    scores = scores_of(seed, 14, undefined=2)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(rule.detect(scores[..., order]), rule.detect(scores)[..., order])


@given(seed=st.integers(0, 2**16), factor=st.sampled_from([0.25, 2.0, 64.0]))
@settings(max_examples=30, deadline=None)
def test_a_common_factor_moves_eps_with_it_and_leaves_z_scores_alone(seed, factor):
    # Powers of two: scaling is exact.
    scores = scores_of(seed, 14)
    assert torch.equal(AboveStd(1.5).detect(factor * scores), AboveStd(1.5).detect(scores))
    assert torch.equal(AboveMean(1.5 * factor).detect(factor * scores), AboveMean(1.5).detect(scores))


@pytest.mark.parametrize("rule", [r for r in RULES if not isinstance(r, TopK)], ids=repr)
def test_detect_is_the_comparison_with_the_threshold(rule):
    scores = scores_of(5, 16, undefined=2)
    assert torch.equal(rule.detect(scores), scores > rule.thresholds(scores))
    assert torch.equal(rule.thresholds(scores).isnan(), scores.isnan())


def test_detectors_are_values():
    assert AboveMean() == AboveMean(eps=3.0)
    assert hash(AttentionShare(0.3)) == hash(AttentionShare(0.3))
    assert [repr(r) for r in (AboveMean(3.0), AboveStd(3), AttentionShare(0.3), TopK(5))] == [
        "AboveMean(eps=3.0)",
        "AboveStd(k=3.0)",
        "AttentionShare(threshold=0.3)",
        "TopK(k=5)",
    ]
    assert all(isinstance(rule, Detector) for rule in RULES)
    assert [rule.quantity for rule in (AboveMean(), AboveStd(), AttentionShare(), TopK(1))] == [
        "received",
        "received",
        "share",
        "received",
    ]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: AboveMean(math.nan), r"AboveMean\(eps=nan\)"),
        (lambda: AboveMean("3"), r"AboveMean\(eps='3'\)"),
        (lambda: AboveStd(math.inf), r"AboveStd\(k=inf\)"),
        (lambda: AttentionShare(0.0), r"AttentionShare\(threshold=0\.0\)"),
        (lambda: AttentionShare(1), r"AttentionShare\(threshold=1\)"),
        (lambda: AttentionShare(math.nan), r"AttentionShare\(threshold=nan\)"),
        (lambda: TopK(0), r"TopK\(k=0\)"),
        (lambda: TopK(2.5), r"TopK\(k=2\.5\)"),
        (lambda: TopK(True), r"TopK\(k=True\)"),
    ],
)
def test_settings_out_of_range_are_refused(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()
