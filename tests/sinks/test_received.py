"""Received attention of patterns: scale, visibility, counted queries, and what is refused."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_lens.sinks import Received, received_from_pattern
from tests.sinks import reference


def softmax_pattern(*shape, visible=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = 2.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0).float()


def causal_visible(size):
    return torch.ones(size, size, dtype=torch.bool).tril()


def as_floats(tensor):
    return [None if math.isnan(v) else v for v in tensor.tolist()]


def assert_close(tensor, expected):
    assert len(tensor) == len(expected)
    for got, want in zip(as_floats(tensor), expected, strict=True):
        assert (got is None) == (want is None), (tensor, expected)
        if want is not None:
            assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("min_viewers", [1, 4])
def test_scores_equal_double_loops_with_padding_and_chosen_queries(relative, causal, min_viewers):
    size = 9
    content = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 1]])
    queries = torch.tensor([[1, 0, 1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1]]).bool()
    visible = content.bool()[:, None, :].expand(2, size, size)
    if causal:
        visible = visible & causal_visible(size)
    pattern = softmax_pattern(2, 3, size, size, visible=visible[:, None])
    found = received_from_pattern(
        pattern,
        attention_mask=content,
        queries=queries,
        causal=causal,
        relative=relative,
        min_viewers=min_viewers,
    )
    counted = (queries & content.bool()).tolist()
    for row in range(2):
        for head in range(3):
            wanted = reference.scores(
                pattern[row, head].double().tolist(), visible[row].tolist(), counted[row], relative, min_viewers
            )
            assert_close(found.values[0, row, 0, head], wanted)
    assert found.counted.tolist() == [[sum(row) for row in counted]]


def test_given_visibility_of_every_pattern_is_also_cut_by_the_attention_mask():
    """Of patterns [batch, head, query, key] with padding, for all of them [query, key] and for each its own."""
    size, content = 9, torch.tensor([[1] * 9, [0, 0, 0, *[1] * 6]])
    seen = causal_visible(size) & content.bool()[:, None, :]
    pattern = softmax_pattern(2, 3, size, size, visible=seen[:, None], seed=8)
    arguments = {"dims": ("batch", "head"), "attention_mask": content, "min_viewers": 2}
    for visible in (causal_visible(size), seen[:, None].expand(2, 3, size, size)):
        found = received_from_pattern(pattern, visible=visible, **arguments)
        for row in range(2):
            for head in range(3):
                counted = content[row].bool().tolist()
                of = pattern[row, head].double().tolist()
                assert_close(
                    found.values[0, row, 0, head], reference.scores(of, seen[row].tolist(), counted, True, 2)
                )


def test_even_causal_attention_raw_first_column_is_the_harmonic_number_and_relative_is_one():
    size = 64
    pattern = torch.tensor(reference.row_uniform(causal_visible(size).tolist()))[None]
    raw = received_from_pattern(pattern, causal=True, relative=False)
    assert float(raw.values[0, 0, 0, 0, 0]) == pytest.approx(reference.harmonic(64), rel=1e-6)
    assert reference.harmonic(64) == pytest.approx(4.744, abs=5e-4)
    relative = received_from_pattern(pattern, causal=True).values[0, 0, 0, 0]
    # 64 - j queries see key j: the last 7 keys have fewer than 8 viewers.
    assert relative.isnan().tolist() == [False] * 57 + [True] * 7
    torch.testing.assert_close(relative[:57], torch.ones(57))


def test_full_pass_relative_score_is_the_column_sum_and_sums_to_the_length():
    pattern = softmax_pattern(4, 32, 32)
    relative = received_from_pattern(pattern)
    raw = received_from_pattern(pattern, relative=False)
    torch.testing.assert_close(relative.values, raw.values)
    torch.testing.assert_close(relative.values.sum(-1), torch.full((1, 1, 1, 4), 32.0))


def test_a_class_of_queries_is_measured_against_its_own_expectation():
    # Masked queries (the last 4) all attend to key 0, the other 12 evenly to everything.
    size, masked = 16, 4
    pattern = torch.full((1, size, size), 1 / size)
    pattern[0, -masked:] = 0
    pattern[0, -masked:, 0] = 1
    counts = torch.arange(size) >= size - masked
    of_masked = received_from_pattern(pattern, queries=counts, min_viewers=4).values[0, 0, 0, 0]
    of_unmasked = received_from_pattern(pattern, queries=~counts, min_viewers=4).values[0, 0, 0, 0]
    # r_0 = 4 of 4 queries, e_0 = 4 / 16: 16 times even, however few masks are left.
    assert of_masked.tolist() == pytest.approx([16.0] + [0.0] * 15)
    assert of_unmasked.tolist() == pytest.approx([1.0] * 16)
    one_left = received_from_pattern(pattern, queries=torch.arange(size) == 15, min_viewers=1)
    assert float(one_left.values[0, 0, 0, 0, 0]) == pytest.approx(16.0)


def test_min_viewers_decides_which_keys_are_defined():
    pattern = softmax_pattern(1, 12, 12, visible=causal_visible(12))
    for least in (1, 5, 8, 12, 13):
        undefined = received_from_pattern(pattern, causal=True, min_viewers=least).values[0, 0, 0, 0].isnan()
        assert undefined.tolist() == [12 - j < least for j in range(12)]


def test_scales_convert_into_each_other_and_shares_sum_to_one():
    visible = causal_visible(20)
    pattern = softmax_pattern(2, 20, 20, visible=visible)
    relative = received_from_pattern(pattern, causal=True, min_viewers=1)
    raw = received_from_pattern(pattern, causal=True, min_viewers=1, relative=False)
    torch.testing.assert_close(relative.on_scale("column sum").values, raw.values)
    torch.testing.assert_close(raw.on_scale("relative to uniform").values, relative.values)
    torch.testing.assert_close(relative.shares.sum(-1), torch.ones(1, 1, 1, 2))
    assert float(relative.shares[0, 0, 0, 1, 3]) == pytest.approx(
        float(pattern[1, :, 3].double().sum()) / 20, rel=1e-5
    )


def test_shares_are_of_the_attention_of_the_counted_queries():
    content, queries = torch.arange(12) >= 2, torch.arange(12) % 2 == 0
    pattern = softmax_pattern(1, 12, 12, visible=content.expand(12, 12))
    found = received_from_pattern(pattern, attention_mask=content, queries=queries, min_viewers=1)
    assert found.counted.tolist() == [[5]]
    wanted = pattern[0, [2, 4, 6, 8, 10]].double().sum(0) / 5
    assert found.shares[0, 0, 0, 0, 2:].tolist() == pytest.approx(wanted[2:].tolist(), rel=1e-5)
    assert float(found.shares[0, 0, 0, 0, 2:].sum()) == pytest.approx(1)


@given(seed=st.integers(0, 2**16), size=st.integers(8, 24), heads=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_permuting_keys_permutes_scores(seed, size, heads):
    pattern = softmax_pattern(heads, size, size, seed=seed)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    plain = received_from_pattern(pattern).values
    permuted = received_from_pattern(pattern[..., order]).values
    torch.testing.assert_close(permuted, plain[..., order])


@given(seed=st.integers(0, 2**16), size=st.integers(8, 20), padding=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_padding_changes_nothing_for_the_content(seed, size, padding):
    alone = softmax_pattern(2, size, size, seed=seed)
    padded = torch.full((2, size + padding, size + padding), 1 / (size + padding))
    padded[:, padding:, :] = 0
    padded[:, padding:, padding:] = alone
    mask = torch.arange(size + padding) >= padding
    found = received_from_pattern(padded, attention_mask=mask).values[0, 0, 0]
    torch.testing.assert_close(found[:, padding:], received_from_pattern(alone).values[0, 0, 0])
    assert bool(found[:, :padding].isnan().all())


def test_leading_axes_get_their_names():
    pattern = softmax_pattern(2, 3, 4, 10, 10)
    steps = received_from_pattern(pattern)
    assert steps.sizes == {"step": 2, "batch": 3, "head": 4, "key": 10}
    layers = received_from_pattern(pattern, dims=("batch", "layer", "head"), layers=[4, 5, 6])
    assert layers.sizes == {"batch": 2, "layer": 3, "head": 4, "key": 10}
    assert layers.layers == (4, 5, 6)
    torch.testing.assert_close(layers.values[0, 1, 2, 3], pattern[1, 2, 3].sum(0))
    torch.testing.assert_close(steps.values[1, 2, 0, 3], pattern[1, 2, 3].sum(0))


def test_visible_replaces_the_masks_and_may_differ_between_heads():
    size = 10
    window = (torch.arange(size)[:, None] - torch.arange(size)).abs() <= 2
    visible = torch.stack([window, torch.ones_like(window)])
    pattern = softmax_pattern(2, size, size, visible=visible)
    found = received_from_pattern(pattern, visible=visible, min_viewers=1).values[0, 0, 0]
    for head in range(2):
        wanted = reference.scores(pattern[head].double().tolist(), visible[head].tolist(), [True] * size)
        assert_close(found[head], wanted)


def test_bfloat16_patterns_pass_and_sum_in_float32():
    exact = softmax_pattern(2, 256, 256)
    found = received_from_pattern(exact.bfloat16()).values
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, received_from_pattern(exact).values, rtol=2**-8, atol=1e-6)


def test_rows_that_do_not_sum_to_one_are_named():
    pattern = softmax_pattern(2, 3, 8, 8)
    pattern[1, 2, 5] *= 0.5
    with pytest.raises(ValueError, match=r"row 1, layer 0, head 2, query 5 sums to 0\.5"):
        received_from_pattern(pattern)
    counts = torch.arange(8) != 5
    assert bool(received_from_pattern(pattern, queries=counts, min_viewers=1).values.isfinite().all())


def test_nan_and_negative_patterns_are_refused():
    pattern = softmax_pattern(1, 8, 8)
    pattern[0, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="query 3 sums to nan"):
        received_from_pattern(pattern)
    pattern = softmax_pattern(1, 8, 8)
    pattern[0, 2, :2] = torch.tensor([-1.0, 2.0]) + pattern[0, 2, :2].sum() / 2 - 0.5
    with pytest.raises(ValueError, match="as low as -1"):
        received_from_pattern(pattern)


def test_a_row_of_zeros_is_refused_only_if_it_counts():
    visible = torch.ones(8, 8, dtype=torch.bool)
    visible[0] = False
    pattern = softmax_pattern(1, 8, 8, visible=visible)
    with pytest.raises(ValueError, match="query 0 sums to 0;"):
        received_from_pattern(pattern, visible=visible)
    found = received_from_pattern(pattern, visible=visible, queries=torch.arange(8) > 0, min_viewers=1)
    torch.testing.assert_close(found.values[0, 0, 0, 0], pattern[0, 1:].sum(0) / (7 / 8))


def test_attention_on_hidden_keys_is_refused():
    with pytest.raises(ValueError, match="cannot see"):
        received_from_pattern(softmax_pattern(1, 10, 10), causal=True)
    with pytest.raises(ValueError, match="cannot see"):
        received_from_pattern(softmax_pattern(1, 10, 10), attention_mask=torch.arange(10) > 3)


def test_a_causal_pattern_without_causal_warns_and_a_hand_made_sink_does_not():
    with pytest.warns(UserWarning, match="pass causal=True"):
        received_from_pattern(softmax_pattern(1, 10, 10, visible=causal_visible(10)))
    first = torch.zeros(1, 10, 10)
    first[..., 0] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received_from_pattern(first)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"attention_mask": torch.ones(3, 9)}, ValueError, r"attention_mask has shape \[3, 9\]"),
        ({"tokens": torch.ones(7, dtype=torch.long)}, ValueError, r"tokens has shape \[7\]"),
        ({"queries": torch.ones(10)}, ValueError, "queries is torch.float32"),
        ({"visible": torch.ones(10, 10)}, ValueError, "visible is torch.float32"),
        ({"visible": torch.ones(9, 10, dtype=torch.bool)}, ValueError, "visible has shape"),
        ({"dims": ("head", "batch")}, ValueError, "in this order"),
        ({"dims": ("head",)}, ValueError, "it names the axes before"),
        ({"layers": (1, 2), "dims": ("layer", "head")}, ValueError, "with layer=2"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        received_from_pattern(softmax_pattern(1, 2, 10, 10), **arguments)


def test_a_pattern_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="give a Received, or a tensor"):
        received_from_pattern([[1.0]])
    with pytest.raises(TypeError, match=r"torch\.int64"):
        received_from_pattern(torch.ones(1, 2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \[4, 4\]"):
        received_from_pattern(torch.full((4, 4), 0.25))


def test_received_validates_its_shapes():
    good = received_from_pattern(softmax_pattern(2, 10, 10))
    assert repr(good) == "Received(head=2, key=10; scale: relative to uniform; level: head; queries: all)"
    with pytest.raises(ValueError, match=r"Received\.counted has shape \[1\]"):
        Received(good.values, good.expected, good.counted[0], dims=good.dims)
    with pytest.raises(ValueError, match=r"must be Float \[step, batch, layer, head, key\]"):
        Received(good.values[0], good.expected, good.counted)
    with pytest.raises(ValueError, match="scale is 'share of attention'"):
        Received(good.values, good.expected, good.counted, scale="share of attention")
    with pytest.raises(ValueError, match="the head axis has size 2"):
        Received(good.values, good.expected, good.counted, dims=("key",))
