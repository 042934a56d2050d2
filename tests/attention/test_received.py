"""Received attention without a pattern, against float64 patterns written out query by query."""

import math
import platform
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_lens.attention import AttentionInputs, pattern_tiles, tiled, visible_keys
from dlm_lens.attention.received import attention_lse, received_sums
from dlm_lens.attention.streaming import received_by_class

SCALE = 0.35
# Scores of size 10 rounded in float32 (2^-24 relative) move a probability by about 1e-6; sums of up to 100 of them.
CLOSE = {"atol": 3e-5, "rtol": 1e-5}


def pattern64(q: Tensor, k: Tensor, scale: float, visible: Tensor | None = None, causal: bool = False) -> Tensor:
    """The pattern in float64, one query at a time; a query that sees no key has zeros."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    pattern = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            own = k[b, h // (heads // k.shape[1])].double()
            for i in range(queries):
                seen = torch.ones(keys, dtype=torch.bool)
                if visible is not None:
                    full = visible.expand(batch, heads, queries, keys)
                    seen = full[b, h, i].clone()
                if causal:
                    seen[max(0, keys - queries + i + 1) :] = False
                if seen.any():
                    scores = (own[seen] @ q[b, h, i].double()) * scale
                    weights = (scores - scores.max()).exp()
                    pattern[b, h, i, seen] = weights / weights.sum()
    return pattern


def split(pattern: Tensor, queries: Tensor | None) -> Tensor:
    weights = torch.ones(1, 1, pattern.shape[2]) if queries is None else queries
    return (pattern[:, None] * weights.double()[:, :, None, :, None]).sum(-2)


def random(
    batch: int = 2,
    heads: int = 4,
    kv: int = 2,
    queries: int = 37,
    keys: int | None = None,
    width: int = 16,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """q and k as attention has them: transposed views of [batch, position, head, d_head]."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, queries, heads, width, generator=generator).transpose(1, 2) * 2
    k = torch.randn(batch, keys or queries, kv, width, generator=generator).transpose(1, 2) * 2
    return q, k


def masks(seed: int = 1) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    padding = torch.ones(2, 37, dtype=torch.bool)
    padding[0, :9] = False
    by_query = torch.rand(2, 1, 37, 37, generator=generator) > 0.5
    by_query[1, 0, 4] = False
    by_head = torch.rand(2, 4, 37, 37, generator=generator) > 0.7
    everything = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    everything[1] = False
    return {
        "none": None,
        "padding": padding[:, None, None],
        "padding, a row per query": visible_keys(padding).clone(),
        "padding, expanded": visible_keys(padding),
        "a row sees nothing": by_query,
        "by head": by_head,
        "a whole row of the batch sees nothing": everything,
        "one query mask": torch.rand(1, 1, 37, 1, generator=generator) > 0.5,
        "holes": torch.rand(2, 1, 1, 37, generator=generator) > 0.4,
    }


@pytest.mark.parametrize("mask", list(masks()))
@pytest.mark.parametrize("causal", [False, True])
def test_equal_to_the_float64_pattern(tile: str, mask: str, causal: bool) -> None:
    q, k = random()
    visible = masks()[mask]
    pattern = pattern64(q, k, SCALE, visible, causal)
    generator = torch.Generator().manual_seed(2)
    classes = (torch.rand(2, 3, 37, generator=generator) > 0.6).float()
    weights = torch.rand(2, 2, 37, generator=generator)
    options = {"scale": SCALE, "visible": visible, "causal": causal}
    for queries in (None, classes, classes.bool(), weights, classes[:1]):
        got = received_sums(q, k, queries=queries, **options)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), split(pattern, queries), **CLOSE)
    lse = attention_lse(q, k, **options)
    again = received_sums(q, k, queries=weights, lse=lse, **options)
    torch.testing.assert_close(again.double(), split(pattern, weights), **CLOSE)
    # The sums over keys are the counted queries that see something.
    sees = pattern.sum(-1)
    counted = (classes[:, :, None].double() * sees[:, None]).sum(-1)
    got = received_sums(q, k, queries=classes, **options).double().sum(-1)
    torch.testing.assert_close(got, counted, **CLOSE)
    assert torch.equal(lse == -math.inf, sees == 0)


def test_a_scale_may_be_negative_or_zero(tile: str) -> None:
    q, k = random()
    wide = q * 40  # scores of up to 500: 2^score overflows unless the greatest one is subtracted
    assert (wide @ k.repeat_interleave(2, 1).mT * SCALE).abs().max() > 300
    got = received_sums(wide, k, scale=-SCALE)
    torch.testing.assert_close(got, received_sums(-wide, k, scale=SCALE), atol=1e-4, rtol=1e-4)  # rounding of 500
    even = received_sums(q, k, scale=0.0)
    torch.testing.assert_close(even, torch.ones_like(even), atol=1e-6, rtol=1e-5)


def test_log_sum_exp() -> None:
    q, k = random()
    visible = masks()["a row sees nothing"]
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * SCALE
    expected = scores.masked_fill(~visible, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(attention_lse(q, k, scale=SCALE, visible=visible).double(), expected, **CLOSE)
    grad = attention_lse(q.clone().requires_grad_(), k, scale=SCALE, visible=visible)
    torch.testing.assert_close(grad.detach().double(), expected, **CLOSE)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40), st.integers(1, 40),
    st.integers(1, 24), st.booleans(), st.sampled_from([16, 200, 1 << 19]), st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_any_shape(
    batch: int,
    kv: int,
    groups: int,
    queries: int,
    keys: int,
    width: int,
    causal: bool,
    size: int,
    short: bool,
    seed: int,
) -> None:
    q, k = random(batch, kv * groups, kv, queries, keys, width, seed)
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(batch, 1, queries, keys, generator=generator) > 0.3
    weights = torch.rand(batch, 2, queries, generator=generator)
    kept = tiled.TILE_ELEMENTS, tiled.SHORT_HEAD
    tiled.TILE_ELEMENTS, tiled.SHORT_HEAD = size, kept[1] if short else 0
    try:
        got = received_sums(q, k, scale=SCALE, visible=visible, queries=weights, causal=causal)
    finally:
        tiled.TILE_ELEMENTS, tiled.SHORT_HEAD = kept
    torch.testing.assert_close(got.double(), split(pattern64(q, k, SCALE, visible, causal), weights), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_is_computed_in_float32(dtype: torch.dtype) -> None:
    q, k = (x.to(dtype) for x in random())
    got = received_sums(q, k, scale=SCALE, causal=True)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), split(pattern64(q, k, SCALE, causal=True), None), **CLOSE)


@pytest.mark.parametrize("visible", [None, "by head"])
def test_extreme_scores(visible: str | None) -> None:
    """Scores beyond +-1e4: neither overflow nor NaN, and rows still sum to 1."""
    q, k = random(width=4)
    q, k = (q * 100).round(), k.round()
    mask = None if visible is None else masks()[visible]
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 20
    assert scores.max() > 1e4
    assert scores.min() < -1e4
    expected = split(pattern64(q, k, 20.0, mask), None)
    lse = attention_lse(q, k, scale=20.0, visible=mask)
    got = received_sums(q, k, scale=20.0, visible=mask)
    assert got.isfinite().all()
    # float32 scores of 3e4 are 2e-3 apart: that much is a probability's relative error near a tie.
    torch.testing.assert_close(got.double(), expected, atol=2e-2, rtol=1e-2)
    known = received_sums(q, k, scale=20.0, visible=mask, lse=lse)
    torch.testing.assert_close(known.double(), expected, atol=4e-2, rtol=2e-2)


def test_hidden_keys_do_not_matter_however_large() -> None:
    q, k = random()
    visible = masks()["a row sees nothing"] & (torch.arange(37) != 5)
    expected = received_sums(q, k, scale=SCALE, visible=visible)
    k = k.clone()
    k[:, :, 5] *= 1e6
    got = received_sums(q, k, scale=SCALE, visible=visible)
    torch.testing.assert_close(got, expected, atol=0, rtol=0)
    assert (got[..., 5] == 0).all()


@pytest.mark.parametrize("mask", ["none", "a row sees nothing", "padding"])
def test_gradients_flow_where_they_are_wanted(tile: str, mask: str) -> None:
    q, k = (x.double().float().requires_grad_() for x in random(batch=2))
    visible = masks()[mask]
    weights = torch.randn(2, 1, 4, 37, generator=torch.Generator().manual_seed(3))
    got = received_sums(q, k, scale=SCALE, visible=visible, causal=True)
    plain = received_sums(q.detach(), k.detach(), scale=SCALE, visible=visible, causal=True)
    torch.testing.assert_close(got.detach(), plain, **CLOSE)
    (got * weights).sum().backward()
    q64, k64 = (x.detach().double().requires_grad_() for x in (q, k))
    seen = torch.ones(37, 37, dtype=torch.bool).tril() & (True if visible is None else visible)
    scores = (q64 @ k64.repeat_interleave(2, 1).mT * SCALE).masked_fill(~seen, -1e9)
    pattern = scores.softmax(-1) * seen
    (pattern.sum(-2)[:, None] * weights).sum().backward()
    torch.testing.assert_close(q.grad.double(), q64.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(k.grad.double(), k64.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "intel"), [("vendor_id\t: GenuineIntel\n", True), ("AuthenticAMD", False), ("", False)]
)
def test_who_made_the_processor(text: str, intel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled.Path, "exists", lambda path: True)
    monkeypatch.setattr(tiled.Path, "read_text", lambda path, **options: text)
    assert tiled._of_intel() is intel
    monkeypatch.setattr(tiled.Path, "exists", lambda path: False)
    monkeypatch.setattr(platform, "processor", lambda: text)
    assert tiled._of_intel() is intel


@pytest.mark.parametrize("intel", [True, False])
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_with_and_without_onednn_the_same(capability: str, intel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(tiled, "_of_intel", lambda: intel)
    linear = tiled._onednn_linear.__wrapped__()
    if platform.machine() == "x86_64":  # a torch without the operator is slower there
        assert (linear is not None) == (capability == "AVX512" and not intel)
    monkeypatch.setattr(tiled, "_onednn_linear", lambda: linear)
    q, k = random(queries=300, width=64)
    expected = split(pattern64(q, k, SCALE), None)
    torch.testing.assert_close(received_sums(q, k, scale=SCALE).double(), expected, **CLOSE)
    tiles = torch.cat([pattern for _, pattern in pattern_tiles(AttentionInputs(0, q, k, k, SCALE))], -2)
    torch.testing.assert_close(tiles.double(), pattern64(q, k, SCALE), **CLOSE)


def test_pattern_tiles_are_the_same_patterns() -> None:
    q, k = random()
    for mask in ("none", "padding", "a row sees nothing", "by head"):
        inputs = AttentionInputs(0, q, k, k, SCALE, masks()[mask])
        tiles = torch.cat([pattern for _, pattern in pattern_tiles(inputs, 10)], -2)
        torch.testing.assert_close(tiles.double(), pattern64(q, k, SCALE, masks()[mask]), **CLOSE)
        wanted = AttentionInputs(0, q.clone().requires_grad_(), k, k, SCALE, masks()[mask])
        slow = torch.cat([pattern for _, pattern in pattern_tiles(wanted, 10)], -2)
        assert slow.requires_grad
        torch.testing.assert_close(slow.detach(), tiles, **CLOSE)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_of_the_size_of_a_pattern_is_made(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 8000)
    q, k = random(1, 4, 2, queries=200, width=8)
    padding = torch.ones(1, 1, 1, 200, dtype=torch.bool)
    with Largest() as largest:
        received_sums(q, k, scale=SCALE, visible=padding, causal=causal)
        attention_lse(q, k, scale=SCALE, visible=padding, causal=causal)
    assert largest.elements == 8000  # one tile; q has 6,400, one head's pattern 40,000


def test_no_queries_and_no_keys() -> None:
    q, k = random(queries=3)
    nothing = torch.zeros(2, 2, 3)
    assert (received_sums(q, k, scale=1.0, queries=nothing) == 0).all()
    assert received_sums(q[:, :, :0], k, scale=1.0).eq(0).all()
    assert received_sums(q, k[:, :, :0], scale=1.0).shape == (2, 1, 4, 0)


def test_errors_say_what_was_given() -> None:
    q, k = random()
    with pytest.raises(ValueError, match=r"q of \(2, 4, 37, 16\) and k of \(2, 2, 37, 8\) do not fit"):
        received_sums(q, k[..., :8], scale=1.0)
    with pytest.raises(ValueError, match="multiple of the number of key heads"):
        received_sums(q[:, :3], k, scale=1.0)
    with pytest.raises(ValueError, match=r"visible has shape \(2, 1, 37, 36\).*need \(2, 4, 37, 37\)"):
        received_sums(q, k, scale=1.0, visible=torch.ones(2, 1, 37, 36, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"boolean.*float32"):
        attention_lse(q, k, scale=1.0, visible=torch.zeros(2, 1, 37, 37))
    with pytest.raises(ValueError, match=r"queries has shape \(2, 37\).*batch 2 or 1 and 37 queries"):
        received_sums(q, k, scale=1.0, queries=torch.ones(2, 37))
    with pytest.raises(ValueError, match=r"lse has shape \(2, 4, 36\)"):
        received_sums(q, k, scale=1.0, lse=torch.zeros(2, 4, 36))
    with pytest.raises(ValueError, match=r"floating point, got torch\.int64"):
        received_sums(q.long(), k, scale=1.0)


@pytest.mark.parametrize("mask", ["none", "one for all", "padding", "by query", "by head"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_share_tiles_have_the_sums_of_each_alone(tile: str, mask: str, causal: bool) -> None:
    """Of six rows with three masks not all queries count."""
    q, k = random(6)
    generator = torch.Generator().manual_seed(4)
    kinds = torch.tensor([0, 1, 0, 2, 1, 0])
    shape = {"padding": (3, 1, 1, 37), "by query": (3, 1, 37, 37), "by head": (3, 4, 37, 37)}.get(mask)
    visible = None if shape is None else (torch.rand(shape, generator=generator) > 0.3)[kinds]
    if mask == "one for all":
        visible = torch.rand(1, 1, 37, 37, generator=generator) > 0.3
    if mask == "padding":
        visible = visible.expand(-1, -1, 37, -1)
    weights = torch.rand(6, 2, 37, generator=generator)
    weights[0, :, :7] = weights[2, :, :7] = weights[5, :, 30:] = 0
    got = received_sums(q, k, scale=SCALE, visible=visible, queries=weights, causal=causal)
    lse = attention_lse(q, k, scale=SCALE, visible=visible, causal=causal)
    torch.testing.assert_close(
        got.double(), split(pattern64(q, k, SCALE, visible, causal), weights), **CLOSE, msg=mask
    )
    for row in range(6):
        own = slice(row, row + 1)
        seen = visible if visible is None or len(visible) == 1 else visible[own]
        alone = received_sums(q[own], k[own], scale=SCALE, visible=seen, queries=weights[own], causal=causal)
        # A product rounds by where its operands lie in memory: a few of float32's 6e-8.
        torch.testing.assert_close(got[own], alone, atol=1e-6, rtol=1e-6)
        alone = attention_lse(q[own], k[own], scale=SCALE, visible=seen, causal=causal)
        torch.testing.assert_close(lse[own], alone, atol=1e-6, rtol=1e-6)


def test_short_heads_of_all_rows_share_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = random(6)
    visible = torch.rand(6, 1, 1, 37, generator=torch.Generator().manual_seed(4)) > 0.3

    def groups() -> list[tuple[slice, slice]]:
        return [group[:2] for group in tiled.head_groups(q, k, SCALE, visible, [None] * 6, False)]

    assert groups() == [(slice(0, 6), slice(0, 4))]
    monkeypatch.setattr(tiled, "SHARED_TILE_ELEMENTS", 37 * 37 * 9)  # two rows of four heads, and one head more
    assert groups() == [(slice(row, row + 2), slice(0, 4)) for row in (0, 2, 4)]
    monkeypatch.setattr(tiled, "SHARED_TILE_ELEMENTS", 37 * 37 * 3)
    parts = (slice(0, 3), slice(3, 4))
    assert groups() == [(slice(row, row + 1), heads) for row in range(6) for heads in parts]
    monkeypatch.setattr(tiled, "SHORT_HEAD", 37)
    alone = [(slice(row, row + 1), slice(head, head + 1)) for row in range(6) for head in range(4)]
    assert groups() == alone


def test_queries_that_are_not_the_last_keys_see_those_up_to_their_own() -> None:
    """As in an empty static cache, whose later keys no query has written."""
    q, k = random(queries=9, keys=16)
    inputs = AttentionInputs(0, q, k, k, SCALE, None, causal=True, own_start=0)
    weights = torch.ones(2, 1, 9)
    wanted = split(pattern64(q, k, SCALE, torch.ones(1, 1, 9, 16, dtype=torch.bool).tril()), None)
    torch.testing.assert_close(received_by_class(inputs, weights).double(), wanted, **CLOSE)
    assert not wanted[..., 9:].any()
