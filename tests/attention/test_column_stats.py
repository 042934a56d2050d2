import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlm_lens.attention import (
    column_sums,
    expected_received,
    received_attention,
    top_columns,
    viewers,
    visible_keys,
)
from dlm_lens.attention.column_stats import largest


def pattern(*shape: int, seed: int = 0, visible: Tensor | None = None) -> Tensor:
    scores = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1)


def by_hand(p: Tensor, visible: Tensor, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """r_j, e_j and the viewers of [head, query, key] with plain loops in float64."""
    heads, size, _ = p.shape
    received, expected, count = (torch.zeros(heads, size, dtype=torch.float64) for _ in range(3))
    for h in range(heads):
        for j in range(size):
            for i in range(size):
                if queries[i]:
                    received[h, j] += p[h, i, j].double()
                    expected[h, j] += float(visible[i, j]) / float(visible[i].sum())
                    count[h, j] += float(visible[i, j])
    return received, expected, count


@given(seed=st.integers(0, 10**6), size=st.integers(3, 14), causal=st.booleans())
@settings(max_examples=30, deadline=None)
def test_statistics_equal_plain_loops(seed: int, size: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(size, generator=generator) > 0.3
    keep[0] = True
    visible = visible_keys(keep, causal=causal)[0]
    queries = keep & (torch.rand(size, generator=generator) > 0.3)
    p = pattern(2, size, size, seed=seed, visible=visible)
    received, expected, count = by_hand(p, visible, queries)
    torch.testing.assert_close(column_sums(p, queries).double(), received, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        expected_received(visible[None], queries).double().expand(2, -1), expected, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(viewers(visible[None], queries).double().expand(2, -1), count)
    score = received_attention(p, visible=visible[None], queries=queries, min_viewers=3)
    assert score.isnan().equal(count < 3)
    defined = count >= 3
    torch.testing.assert_close(score.double()[defined], (received / expected)[defined], atol=1e-4, rtol=1e-4)


def test_even_attention_scores_one_whatever_the_mask() -> None:
    keep = torch.ones(2, 20, dtype=torch.bool)
    keep[1, :6] = False
    for causal in (False, True):
        visible = visible_keys(keep, causal=causal)
        even = visible / visible.sum(-1, keepdim=True).clamp(min=1)
        score = received_attention(even.expand(2, 3, 20, 20), visible=visible, queries=keep)
        seen_enough = (viewers(visible, keep) >= 8).expand(2, 3, 20)
        torch.testing.assert_close(score[seen_enough], torch.ones(int(seen_enough.sum())))
        assert score[~seen_enough].isnan().all()
        assert seen_enough.sum() > 20


def test_the_first_key_of_a_causal_pass_receives_a_harmonic_number_by_the_mask_alone() -> None:
    visible = visible_keys(torch.ones(64), causal=True)
    even = visible / visible.sum(-1, keepdim=True)
    harmonic = sum(1 / i for i in range(1, 65))
    raw = received_attention(even, visible=visible, relative=False)
    assert raw[0, 0].item() == pytest.approx(harmonic, abs=1e-5)
    assert harmonic == pytest.approx(4.7439, abs=1e-4)
    assert received_attention(even, visible=visible)[0, 0].item() == pytest.approx(1, abs=1e-6)


def test_padding_changes_no_score() -> None:
    p = pattern(1, 2, 12, 12)
    padded = torch.zeros(1, 2, 15, 15)
    padded[..., 3:, 3:] = p
    padded[..., :3, 3:] = 1 / 12  # padding queries attend too; they do not count
    keep = torch.arange(15)[None] >= 3
    score = received_attention(padded, visible=visible_keys(keep), queries=keep)
    torch.testing.assert_close(score[..., 3:], received_attention(p))
    assert score[..., :3].isnan().all()


def test_bfloat16_patterns_are_summed_in_float32() -> None:
    even = torch.full((1, 1, 1024, 1024), 1 / 1024, dtype=torch.bfloat16)
    assert column_sums(even).dtype == torch.float32
    torch.testing.assert_close(column_sums(even), torch.ones(1, 1, 1024))


def test_top_columns_takes_the_largest_defined_ones_and_the_earlier_of_equals() -> None:
    received = torch.tensor([[1.0, 5.0, torch.nan, 5.0, 0.5], [torch.nan, torch.nan, 2.0, 1.0, 3.0]])
    assert top_columns(received, 1).nonzero().tolist() == [[0, 1], [1, 4]]
    assert top_columns(received, 3).nonzero().tolist() == [[0, 0], [0, 1], [0, 3], [1, 2], [1, 3], [1, 4]]
    assert top_columns(received, 9).sum(-1).tolist() == [4, 3]
    valid = torch.tensor([True, False, True, True, True])
    assert top_columns(received, 1, valid=valid).nonzero().tolist() == [[0, 3], [1, 4]]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        top_columns(received, 0)


@pytest.mark.parametrize("keys", [40, 256, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_largest_is_the_head_of_a_stable_sort(keys: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (torch.randn(3, 5, keys, generator=generator) * 2).round().to(dtype)  # many ties, -0 among them
    scores[:, 1, ::3] = -torch.inf
    scores[:, 2] = 1e-40
    scores[:, 3, 7] = torch.inf
    assert (scores.signbit() & (scores == 0)).any()
    for k in (1, 5, keys, keys + 9):
        values, positions = largest(scores, k)
        in_order = scores.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(values, in_order.values[..., :k])
        assert torch.equal(positions, in_order.indices[..., :k])
