"""find_sinks: levels, scales, axes, and what the result says."""

import math

import pandas as pd
import pytest
import torch

from dlm_lens.recording import record
from dlm_lens.sinks import (
    AboveMean,
    AboveStd,
    AttentionShare,
    Detector,
    LowKeyNorm,
    MeanReceived,
    Received,
    Sinks,
    TopK,
    find_sinks,
    received_from_pattern,
    received_of,
)
from dlm_lens.testing import tiny
from tests.sinks import reference
from tests.sinks.test_received import causal_visible, softmax_pattern


class StubTokenizer:
    """A tokenizer that counts its calls."""

    def __init__(self):
        self.calls = 0

    def decode(self, ids):
        self.calls += 1
        return f"<{ids[0]}>"


def to_key(key, size, weight=1.0):
    """A pattern in which every query gives `weight` to one key and spreads the rest evenly over all."""
    pattern = torch.full((size, size), (1 - weight) / size)
    pattern[:, key] += weight
    return pattern


def test_a_hand_made_sink_is_found_where_it_is():
    size = 16
    # r_5 = 16 (0.5 + 0.5 / 16) = 8.5, every other column 0.5: 8.5 > 0.5 + 3.
    pattern = torch.stack([to_key(5, size, 0.5), to_key(2, size, 0.1)])
    found = find_sinks(pattern, AboveMean(3.0))
    assert found.is_sink.nonzero().tolist() == [[0, 5]]
    assert float(found.scores[0, 5]) == pytest.approx(8.5)
    assert float(found.threshold[0, 5]) == pytest.approx(3.5)
    # Head 1: r_2 = 16 * 0.1 + 0.9 = 2.5, the others 0.9: 1.6 above them.
    assert find_sinks(pattern, AboveMean(1.5)).is_sink.nonzero().tolist() == [[0, 5], [1, 2]]
    assert find_sinks(pattern, AttentionShare(0.5)).is_sink.nonzero().tolist() == [[0, 5]]
    assert find_sinks(pattern, AttentionShare(0.54)).is_sink.any().item() is False
    assert find_sinks(pattern, TopK(1)).main().tolist() == [5, 2]
    assert find_sinks(pattern, AboveStd(3)).main().tolist() == [5, 2]


def test_the_first_key_of_even_causal_attention_is_a_sink_only_on_the_raw_scale():
    pattern = torch.tensor(reference.row_uniform(causal_visible(64).tolist()))[None]
    raw = find_sinks(pattern, AboveMean(3.0), causal=True, relative=False)
    assert raw.is_sink.nonzero().tolist() == [[0, 0]]
    assert float(raw.scores[0, 0]) == pytest.approx(4.744, abs=5e-4)
    assert not bool(find_sinks(pattern, AboveMean(3.0), causal=True).is_sink.any())
    # As shares: H_S / S, by the mask alone.
    assert find_sinks(pattern, AttentionShare(0.07), causal=True).main().tolist() == [0]


def test_layer_and_model_levels_judge_the_mean_pattern():
    size, visible = 12, causal_visible(12)
    pattern = softmax_pattern(2, 3, 2, 4, size, size, visible=visible, seed=3)
    received = received_from_pattern(pattern, causal=True, min_viewers=3)
    for step, batch in ((0, 0), (1, 2)):
        of = pattern[step, batch].double()
        for layer in range(2):
            wanted = reference.scores(of[layer].mean(0).tolist(), visible.tolist(), [True] * size, True, 3)
            got = find_sinks(received, TopK(1), level="layer").scores[step, batch, layer]
            assert got.tolist() == pytest.approx([math.nan if v is None else v for v in wanted], nan_ok=True)
        wanted = reference.scores(of.mean((0, 1)).tolist(), visible.tolist(), [True] * size, True, 3)
        got = find_sinks(received, TopK(1), level="model").scores[step, batch]
        assert got.tolist() == pytest.approx([math.nan if v is None else v for v in wanted], nan_ok=True)
    raw = find_sinks(pattern, AboveMean(1.0), level="layer", causal=True, relative=False, min_viewers=1)
    torch.testing.assert_close(raw.scores, pattern.mean(3).sum(-2))


def test_the_strongest_sinks_of_a_table_are_listed_once_with_their_number_of_steps():
    values = torch.full((3, 1, 1, 1, 12), 0.5)
    values[:, ..., 4], values[1:, ..., 9] = torch.tensor([9.0, 12.0, 12.0])[:, None, None, None], 10.0
    received = Received(
        values=values, expected=torch.ones(3, 1, 1, 1, 12), counted=torch.full((3, 1), 12), layers=(0,)
    )
    table = find_sinks(received, AboveMean(3.0)).table(top=2)
    assert table[["step", "position", "score", "steps"]].to_numpy().tolist() == [[1, 4, 12, 3], [1, 9, 10, 2]]
    assert len(find_sinks(received, AboveMean(3.0)).table()) == 5


def test_the_model_mean_of_layer_means_is_the_model_mean():
    received = received_from_pattern(softmax_pattern(2, 1, 3, 4, 9, 9, seed=4))
    wanted = find_sinks(received, TopK(1), level="model")
    found = find_sinks(received.at_level("layer"), TopK(1), level="model")
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-5, atol=1e-6)
    assert (found.level, found.dims) == ("model", wanted.dims)


def test_mean_attention_of_a_layer_counts_the_queries_that_see_a_key():
    """2410.10781, section 3.1: under a causal mask key j of S is seen by S - j queries, in every head."""
    size, visible = 10, causal_visible(10)
    pattern = softmax_pattern(4, size, size, visible=visible, seed=6)
    found = find_sinks(pattern, MeanReceived(0.3), level="layer", causal=True, min_viewers=1)
    sums = pattern.double().mean(0).sum(0).tolist()
    wanted = [sums[key] / (size - key) for key in range(size)]
    assert found.scores.tolist() == pytest.approx(wanted, rel=1e-5)


def test_a_sink_of_one_head_can_vanish_in_the_layer_mean():
    size = 16
    pattern = torch.stack([to_key(5, size, 0.5), *[to_key(0, size, 0.0)] * 3])[None, None, None]
    assert find_sinks(pattern, AboveMean(3.0)).is_sink.nonzero().tolist() == [[0, 0, 0, 0, 5]]
    layer = find_sinks(pattern, AboveMean(3.0), level="layer")
    assert not bool(layer.is_sink.any())
    # (8.5 + 3 * 1) / 4
    assert float(layer.scores[0, 0, 0, 5]) == pytest.approx(2.875)


def test_levels_average_heads_with_different_views_over_their_expectations():
    size = 10
    visible = torch.stack([torch.ones(size, size, dtype=torch.bool), causal_visible(size)])
    pattern = softmax_pattern(2, size, size, visible=visible)
    found = find_sinks(pattern, TopK(1), level="layer", visible=visible, min_viewers=1)
    sums = pattern.double().sum(1).mean(0)
    even = torch.tensor([reference.column_sums(reference.row_uniform(v.tolist()), [True] * size) for v in visible])
    assert found.scores.tolist() == pytest.approx((sums / even.mean(0)).tolist(), rel=1e-5)


def test_axes_of_the_result_follow_the_input_and_the_level():
    pattern = softmax_pattern(2, 3, 4, 10, 10)
    heads = find_sinks(pattern, TopK(1), dims=("batch", "layer", "head"), layers=[7, 9, 11])
    assert heads.dims == ("batch", "layer", "head", "key")
    assert tuple(heads.is_sink.shape) == (2, 3, 4, 10)
    layer = find_sinks(pattern, TopK(1), dims=("batch", "layer", "head"), level="layer", layers=[7, 9, 11])
    assert layer.dims == ("batch", "layer", "key")
    assert layer.layers == (7, 9, 11)
    assert int(layer.main()[1, 2]) == int(pattern[1, 2].sum((0, 1)).argmax())
    model = find_sinks(pattern, TopK(1), dims=("batch", "layer", "head"), level="model")
    assert model.dims == ("batch", "key")
    assert model.main().tolist() == pattern.sum((1, 2, 3)).argmax(-1).tolist()
    single = find_sinks(pattern[:1, 0], TopK(1))
    assert single.dims == ("batch", "head", "key")
    assert single.is_sink.shape == (1, 4, 10)


def test_received_and_its_pattern_give_the_same_sinks_on_every_scale():
    visible = causal_visible(14)
    pattern = softmax_pattern(2, 3, 14, 14, visible=visible)
    relative = received_from_pattern(pattern, causal=True)
    raw = received_from_pattern(pattern, causal=True, relative=False)
    for rule in (AboveMean(0.7), AboveStd(1.5), AttentionShare(0.12), TopK(2)):
        for scale in (True, False):
            direct = find_sinks(pattern, rule, causal=True, relative=scale)
            for received in (relative, raw):
                other = find_sinks(received, rule, relative=scale)
                assert torch.equal(direct.is_sink, other.is_sink)
                assert direct.scale == other.scale
                torch.testing.assert_close(direct.scores, other.scores, equal_nan=True)
        assert bool(direct.is_sink.any())
    assert find_sinks(raw, AboveMean(0.7)).scale == "column sum"
    assert find_sinks(relative, AboveMean(0.7)).scale == "relative to uniform"
    assert find_sinks(relative, AttentionShare(0.12), relative=False).scale == "share of attention"


def test_a_detector_of_your_own():
    class Last(Detector):
        quantity = "received"

        def thresholds(self, scores):
            return torch.full_like(scores, torch.nan)

        def detect(self, scores):
            return torch.arange(scores.shape[-1]).expand(scores.shape) == scores.shape[-1] - 1

    assert find_sinks(softmax_pattern(3, 9, 9), Last()).main().tolist() == [8, 8, 8]


@pytest.fixture
def sinks():
    size = 16
    pattern = torch.stack([to_key(5, size, 0.5), to_key(2, size, 0.4)])  # scores 8.5 and 7.0
    pattern = torch.stack([pattern, pattern.flip(0)])[:, None, None]  # [step=2, batch, layer, head=2, q, k]
    tokens = torch.arange(100, 116).expand(2, 1, size).clone()
    tokens[0, 0, 5] = 999
    masked = torch.zeros(2, 1, size, dtype=torch.bool)
    masked[0, 0, 5] = True
    tokenizer = StubTokenizer()
    return find_sinks(pattern, AboveMean(3.0), tokens=tokens, masked=masked, tokenizer=tokenizer, layers=[20])


def test_table_has_a_line_per_sink_with_everything_needed_to_read_it(sinks):
    table = sinks.table()
    wanted = pd.DataFrame(
        {
            "step": [0, 1, 0, 1],
            "batch": [0] * 4,
            "layer": [20] * 4,
            "head": [0, 1, 1, 0],
            "position": [5, 5, 2, 2],
            "token": ["<999>", "<105>", "<102>", "<102>"],
            "masked": [True, False, False, False],
            "score": [8.5, 8.5, 7.0, 7.0],
            "threshold": [3.5, 3.5, 3.6, 3.6],
            "scale": ["relative to uniform"] * 4,
            "level": ["head"] * 4,
        }
    )
    pd.testing.assert_frame_equal(table, wanted, rtol=1e-5)
    assert sinks.tokenizer.calls == 3  # one per distinct token
    assert sinks.table(top=1)["token"].tolist() == ["<999>"]
    place = sinks.table(sort="place")
    assert place[["step", "head", "position"]].values.tolist() == [[0, 0, 5], [0, 1, 2], [1, 0, 2], [1, 1, 5]]


def test_table_of_a_bare_pattern_has_no_columns_for_what_is_unknown():
    found = find_sinks(to_key(3, 12, 0.8)[None], AboveMean(3.0), level="layer", tokens=torch.arange(12))
    line = found.table().iloc[0].to_dict()
    assert list(line) == ["position", "token", "score", "threshold", "scale", "level"]
    assert (line["position"], line["token"], line["level"]) == (3, 3, "layer")
    assert line["score"] == pytest.approx(12 * 0.8 + 0.2)
    empty = find_sinks(to_key(3, 12, 0.0)[None], AboveMean(3.0)).table()
    assert len(empty) == 0
    assert list(empty.columns) == ["head", "position", "score", "threshold", "scale", "level"]


def test_main_is_the_largest_sink_or_minus_one():
    pattern = torch.stack([to_key(5, 16, 0.5), to_key(2, 16, 0.1)])
    pattern[0, :, 9] += 0.25  # a second, smaller sink
    pattern[0] /= pattern[0].sum(-1, keepdim=True)
    found = find_sinks(pattern, AboveMean(2.0))
    assert found.is_sink.nonzero().tolist() == [[0, 5], [0, 9]]
    assert found.main().tolist() == [5, -1]


def test_result_names_rule_scale_and_level(sinks):
    assert sinks.rule == "AboveMean(eps=3.0); scale: relative to uniform; level: head; queries: all"
    assert repr(sinks) == f"Sinks(4 of 64 columns by {sinks.rule}; step=2, batch=1, layer=1, head=2, key=16)"


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda p, r: find_sinks(p, AboveMean), TypeError, "is not a detector"),
        (lambda p, r: find_sinks(p, 3.0), TypeError, r"3\.0 is not a detector"),
        (lambda p, r: find_sinks(r, TopK(1), causal=True), TypeError, "causal: for patterns only"),
        (lambda p, r: find_sinks(p, TopK(1), level="block"), ValueError, "level is 'block'"),
        (lambda p, r: find_sinks(p, TopK(1), level="model"), ValueError, "no layer axis"),
        (lambda p, r: r.at_level("layer").at_level("head"), ValueError, "level='layer' where it is"),
        (lambda p, r: find_sinks(p.log(), TopK(1)), ValueError, "row sums"),
        (lambda p, r: find_sinks(r.values[None], TopK(1)), ValueError, "give the recording itself"),
        (lambda p, r: find_sinks([0.5], TopK(1)), TypeError, "attention is a list"),
    ],
)
def test_what_cannot_work_is_refused(call, error, sentence):
    pattern = softmax_pattern(2, 10, 10)
    with pytest.raises(error, match=sentence):
        call(pattern, received_from_pattern(pattern))


def test_sinks_validates_its_shapes(sinks):
    values = {"scale": sinks.scale, "level": "head", "detector": sinks.detector}
    with pytest.raises(ValueError, match=r"Sinks\.threshold has shape \[3\]"):
        Sinks(torch.zeros(2, 4).bool(), torch.zeros(2, 4), torch.zeros(3), dims=("head", "key"), **values)
    with pytest.raises(ValueError, match="does not fit the axes"):
        Sinks(torch.zeros(4).bool(), torch.zeros(4), torch.zeros(4), dims=("head", "key"), **values)
    with pytest.raises(ValueError, match="sort is 'token'; it must be 'score' or 'place'"):
        sinks.table(sort="token")
    with pytest.raises(TypeError, match=r"table has no argument 'layer' \(layer is a column of the table here\)"):
        sinks.table(layer=2)
    for top in (-1, 1.5, "a"):
        with pytest.raises(ValueError, match=f"top is {top!r}; it must be a whole number of at least 0"):
            sinks.table(top=top)


def test_sinks_of_a_recorded_class_of_queries() -> None:
    recording = record(tiny("llada"), [[1, 2, 3]], "received:all+masked,key-norm", gen_length=12, steps=4)
    rule = AboveMean(0.3)
    for given in ("masked", "open"):
        found = find_sinks(recording, rule, queries=given)
        expected = find_sinks(received_of(recording, "masked"), rule)
        assert torch.equal(found.is_sink, expected.is_sink)
        assert found.queries == expected.queries == "masked"
    assert not torch.equal(found.is_sink, find_sinks(recording, rule).is_sink)
    for attention, detector, queries, error, sentence in (
        (recording, rule, "prompt", ValueError, "no received_prompt; record with"),
        (recording, LowKeyNorm(), "masked", ValueError, "reads hidden states, for which no queries count"),
        (recording, rule, torch.ones(12), TypeError, "of a Recording give a class"),
        (softmax_pattern(2, 10, 10), rule, "masked", ValueError, "of a pattern give a tensor"),
        (received_of(recording), rule, "masked", ValueError, "a class is of a Recording"),
    ):
        with pytest.raises(error, match=sentence):
            find_sinks(attention, detector, queries=queries)


def test_level_of_a_received_is_kept(sinks):
    received = received_from_pattern(softmax_pattern(2, 10, 10)).at_level("layer")
    assert isinstance(received, Received)
    found = find_sinks(received, TopK(1), level="layer")
    assert found.level == "layer"
    assert found.dims == ("key",)


@pytest.mark.parametrize(("level", "is_sink"), [(float("nan"), False), (float("-inf"), True)])
def test_a_key_without_others_is_a_sink_where_a_rule_returns_less_than_its_score(
    level: float, is_sink: bool
) -> None:
    class Alone(Detector):
        """Returns one number for every key."""

        def thresholds(self, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, level)

    scores = torch.full((1, 1, 1, 1, 4), torch.nan)
    scores[..., 0] = 1.0
    one = Received(
        values=scores,
        expected=torch.ones(1, 1, 1, 1, 4),
        counted=torch.ones(1, 1, dtype=torch.long),
        layers=(0,),
    )
    assert find_sinks(one, Alone()).is_sink.sum().item() == int(is_sink)
    assert not find_sinks(one, AboveMean(0.0)).is_sink.any()
