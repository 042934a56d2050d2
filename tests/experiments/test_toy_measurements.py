"""Intervals, sink statistics and knock-outs, on inputs whose right answer is known by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

import dlm_lens as dl
from experiments.toy import hidden_sink
from experiments.toy.claims import below
from experiments.toy.hidden_sink import measure
from experiments.toy.knockout import hide_column
from experiments.toy.phenomena import CLASSES, Maps, differs, learned_sink, summarise, token_classes
from experiments.toy.statistics import clustered_ratio, wilson
from experiments.toy.tokenizer import build_tokenizer


def test_wilson_interval_of_published_values() -> None:
    # Newcombe 1998, table I, method 3: 81 of 263 and 15 of 148.
    assert wilson(81, 263).low == pytest.approx(0.2553, abs=5e-5)
    assert wilson(81, 263).high == pytest.approx(0.3662, abs=5e-5)
    assert wilson(15, 148).low == pytest.approx(0.0624, abs=5e-5)
    assert wilson(15, 148).high == pytest.approx(0.1605, abs=5e-5)
    assert (wilson(20, 20).value, wilson(20, 20).high, wilson(0, 20).low) == (1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="n = 0"):
        wilson(0, 0)


def test_bootstrap_draws_whole_prompts() -> None:
    # 40 prompts, half all true and half all false: the interval is that of 40 coins, not of 4000 cases.
    share = clustered_ratio([100.0] * 20 + [0.0] * 20, [100.0] * 40, bounds=(0, 1))
    assert share.value == 0.5
    assert (share.n, share.clusters) == (4000, 40)
    assert share.high - share.low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 40), rel=0.15)
    constant = clustered_ratio([3.0, 6.0], [1.0, 2.0], bounds=None)
    assert (constant.low, constant.value, constant.high) == (3.0, 3.0, 3.0)
    assert math.isnan(clustered_ratio([0.0], [0.0], bounds=(0, 1)).value)


NAN = math.nan
WORD, MASK = CLASSES.index("word"), CLASSES.index("mask")


def two_steps() -> Maps:
    """One prompt, one layer, two heads, two steps, four keys of which the last has no score.

    Head 0 has a sink on key 0 (others: mean 0.5), then on key 1; head 1 never has one.
    """
    first = torch.tensor([[4.0, 0.5, 0.5, NAN], [1.1, 1.0, 0.9, NAN]])
    last = torch.tensor([[0.5, 4.0, 0.5, NAN], [1.1, 1.0, 0.9, NAN]])
    score = torch.stack([first, last]).view(2, 1, 1, 2, 4)
    norm = torch.tensor([1.0, 2.0, 4.0, 100.0]).expand_as(score)
    classes = torch.tensor([[WORD, MASK, WORD, WORD], [WORD, WORD, WORD, WORD]]).view(2, 1, 4)
    return Maps(score, score, norm, classes)


def test_sinks_of_hand_made_maps() -> None:
    maps = two_steps()
    assert maps.sink.flatten(0, 3).tolist() == [
        [True, False, False, False],
        [False] * 4,
        [False, True, False, False],
        [False] * 4,
    ]
    assert maps.main.flatten().tolist() == [0, 0, 1, 0]


def test_statistics_of_hand_made_maps() -> None:
    found = summarise(two_steps())
    assert (found["maps_with_a_sink"].value, found["maps_with_a_sink"].n) == (0.5, 4)
    assert (found["tokens_filtered_out"].value, found["tokens_filtered_out"].n) == (10 / 12, 12)
    assert found["main_sink_differs_first_to_last"].value == 0.5
    assert found["main_sink_differs_where_both_pass"].value == 1.0
    assert found["main_sink_changes_per_step"].value == 0.5
    assert found["main_sink_distinct_positions"].value == 1.5
    # Both sinks are words; of the 12 keys with a score 2 are masks (one per head at the first step).
    assert found["classes"]["word"]["sinks"].value == 1.0
    assert found["classes"]["mask"]["base_rate"].value == pytest.approx(2 / 12)
    # Sinks have norms 1 and 2, the others of their maps mean 3 and 2.5; key 3 counts nowhere.
    assert found["value_norm"]["sinks"].value == 1.5
    assert found["value_norm"]["ratio_within_map"].value == pytest.approx((1 / 3 + 2 / 2.5) / 2)


def test_a_learned_sink_of_hand_made_maps() -> None:
    # Two layers of one head, two steps; the last of four keys is the learned sink.
    first = torch.tensor([[[1.0, 0.5, 0.5, 2.0]], [[2.0, 1.0, 0.5, 0.5]]])
    last = torch.tensor([[[0.5, 1.0, 0.5, 2.0]], [[2.0, 1.0, 0.5, 0.5]]])
    score = torch.stack([first, last]).view(2, 1, 2, 1, 4)
    norm = torch.tensor([1.0, 2.0, 6.0, 0.5]).expand_as(score)
    maps = Maps(score, score, norm, torch.zeros(2, 1, 4, dtype=torch.long))
    found = learned_sink(maps, 1)
    assert [share.value for share in found["share"]] == [0.5, 0.125]
    assert [share.value for share in found["is_main"]] == [1.0, 0.0]
    assert [norm.value for norm in found["value_norm"]] == [0.5, 0.5]
    assert [norm.value for norm in found["value_norm_others"]] == [3.0, 3.0]
    assert summarise(maps)["main_sink_differs_first_to_last"].value == 0.0
    # Without the learned sink, layer 0's largest key moves from 0 to 1.
    assert found["main_sink_differs_exempted"].value == 0.5


def test_a_new_key_counts_as_a_move_unless_keys_are_kept_equal() -> None:
    first, last = torch.tensor([2.0, 1.0, NAN]), torch.tensor([2.0, 1.0, 5.0])
    score = torch.stack([first, last]).view(2, 1, 1, 1, 3)
    assert differs(score).value == 1.0
    assert differs(score, same_keys=True).value == 0.0
    moved = torch.stack([first, torch.tensor([1.0, 2.0, 5.0])]).view(2, 1, 1, 1, 3)
    assert differs(moved, same_keys=True).value == 1.0


def test_token_classes() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer("tom has 30 apples . [MASK] <eos>", return_tensors="pt").input_ids
    with_sink = torch.cat([ids[0], torch.tensor([-1])])
    named = [CLASSES[i] for i in token_classes(SimpleNamespace(tokenizer=tokenizer), with_sink).tolist()]
    assert named == ["bos", "word", "word", "number", "word", "sign", "mask", "eos", "learned sink"]


@pytest.mark.parametrize("causal", [False, True])
def test_hiding_the_strongest_column(causal: bool) -> None:
    scores = torch.zeros(1, 2, 12, 12)
    scores[0, 0, :, 2] += 5.0
    scores[0, 1, :, 4] += 5.0
    floor = torch.finfo(scores.dtype).min
    if causal:
        scores = scores.masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), floor)
    pattern = hide_column(scores, "strongest", torch.Generator()).softmax(-1)
    for head, column in ((0, 2), (1, 4)):
        others = torch.arange(12) != column
        assert bool((pattern[0, head, others, column] == 0).all())
        assert pattern[0, head, column, column] > 0.5  # a query keeps its own position
    torch.testing.assert_close(pattern.sum(-1), torch.ones(1, 2, 12))


def test_hiding_a_random_column_hides_one_visible_column_per_head() -> None:
    scores = torch.zeros(3, 4, 16, 16)
    floor = torch.finfo(scores.dtype).min
    scores[..., :5] = floor  # padding on the left
    hidden = hide_column(scores, "random", torch.Generator().manual_seed(0)) == floor
    newly = hidden[..., 5:].sum(-2) >= 10
    assert newly.sum(-1).eq(1).all()
    assert newly.float().argmax(-1).unique().numel() > 3


def test_intervals_decide() -> None:
    low, high, wide = ({"low": a, "high": b} for a, b in ((0.1, 0.2), (0.3, 0.4), (0.15, 0.35)))
    assert (below(low, high), below(high, low), below(low, wide)) == (True, False, None)


def test_a_model_with_its_learned_sink_hidden_answers_worse_than_with_the_controls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sorted(hidden_sink.TASKS) == ["A", "F", "L"]
    monkeypatch.setattr(hidden_sink, "TASKS", ("L", "A"))  # what is asserted below is of these
    lines = {line[0]: line[2:] for line in measure(dl.load("toy-sink"), 6, rows=1000)}
    assert list(lines) == ["L", "A"]
    for nothing, hidden, columns, mass in ([float(cell.split()[0]) for cell in cells] for cells in lines.values()):
        assert nothing > 0.95
        assert hidden < 0.5 < min(columns, mass)
