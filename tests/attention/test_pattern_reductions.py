"""Column sums and numbers per query in one pass, against float64 patterns written out query by query."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dlm_lens.attention import QUERY_STATS, AttentionInputs, pattern_stats, received_by_class, tiled
from tests.attention.test_received import CLOSE, SCALE, Largest, masks, pattern64, random


def by_hand(pattern: Tensor, own: Tensor, canvas: int) -> dict[str, Tensor]:
    """Entropy, and the attention to itself, to the canvas keys before and after, query by query."""
    found = {name: torch.zeros(pattern.shape[:3], dtype=torch.float64) for name in QUERY_STATS}
    for query, place in enumerate(own.tolist()):
        row = pattern[:, :, query]
        found["entropy"][:, :, query] = -(row * row.clamp(min=1e-300).log()).sum(-1)
        found["self"][:, :, query] = row[..., place]
        found["past"][:, :, query] = row[..., :place].sum(-1)
        found["future"][:, :, query] = row[..., place + 1 : canvas].sum(-1)
    return found


def check(inputs: AttentionInputs, canvas: int, counted: Tensor | None = None, causal: bool = False) -> None:
    weights = torch.rand(2, 3, inputs.q.shape[2], generator=torch.Generator().manual_seed(5)) > 0.4
    weights = weights if counted is None else weights & counted[:, None]
    stats = pattern_stats(inputs, weights.float(), QUERY_STATS, counted=counted, canvas=canvas)
    visible = inputs.visible
    pattern = (
        pattern64(inputs.q, inputs.k, inputs.scale, visible, causal) if inputs.pattern is None else inputs.pattern
    )
    expected = torch.einsum("bcq,bhqk->bchk", weights.double(), pattern.double())
    torch.testing.assert_close(stats.sums.double(), expected, **CLOSE)
    counts = torch.ones(2, 1, inputs.q.shape[2]) if counted is None else counted[:, None]
    for name, values in by_hand(pattern.double(), inputs.own, canvas).items():
        got = stats.per_query[name].double()
        assert (got * (1 - counts.double()) == 0).all()
        got = got * counts
        torch.testing.assert_close(got, values * counts, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
        alone = pattern_stats(inputs, None, [name], counted=counted, canvas=canvas).per_query
        torch.testing.assert_close(
            alone[name].double(), got, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("mask", list(masks()))
def test_every_number_is_that_of_the_pattern(tile: str, mask: str) -> None:
    q, k = random()
    check(AttentionInputs(0, q, k, k, SCALE, masks()[mask]), 37)


def test_padding_causality_sinks_and_spans(tile: str) -> None:
    q, k = random()
    content = torch.ones(2, 37, dtype=torch.bool)
    content[0, :9] = False
    check(AttentionInputs(0, q, k, k, SCALE, masks()["padding"]), 37, content)
    check(AttentionInputs(0, q, k, k, SCALE, causal=True), 37, causal=True)
    check(AttentionInputs(0, q, k, k, SCALE, masks()["padding"], causal=True), 37, content, causal=True)
    # Two learned sink tokens after a canvas of 70 positions, in more than one block of lanes.
    q, k = random(queries=70, keys=72)
    check(AttentionInputs(0, q, k, k, SCALE, own_start=0), 70)
    # A step that computes the positions 20 to 56 of 90.
    q, k = random(keys=90)
    check(AttentionInputs(0, q, k, k, SCALE, own_start=20), 90)


def test_an_edited_pattern_is_read_as_it_is() -> None:
    q, k = random()
    edited = pattern64(q, k, SCALE).float() * 0.5
    check(AttentionInputs(0, q, k, k, SCALE, pattern=edited), 37)
    check(AttentionInputs(0, q, k, k, SCALE, pattern=edited), 37, torch.arange(37).expand(2, -1) > 5)


def test_a_query_that_sees_no_key_has_zeros(tile: str) -> None:
    q, k = random()
    hidden = torch.ones(2, 1, 37, 37, dtype=torch.bool)
    hidden[1, :, 4] = False
    stats = pattern_stats(AttentionInputs(0, q, k, k, SCALE, hidden), None, QUERY_STATS)
    assert stats.sums is None
    for values in stats.per_query.values():
        assert (values[1, :, 4] == 0).all()
        assert values.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("what", ["a query that does not count", "a key that no query sees"])
def test_what_is_not_finite_and_does_not_count_changes_nothing(tile: str, what: str, bad: float) -> None:
    q, k = random()
    visible = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    visible[0, ..., :5] = False
    counted = visible[:, 0, 0]
    weights = counted[:, None].float()
    clean = pattern_stats(AttentionInputs(0, q, k, k, SCALE, visible), weights, QUERY_STATS, counted=counted)
    (q if what.startswith("a query") else k)[0, :, :5] = bad
    found = pattern_stats(AttentionInputs(0, q, k, k, SCALE, visible), weights, QUERY_STATS, counted=counted)
    close = {"atol": 1e-6, "rtol": 1e-5}  # other tiles: a few roundings of sums of up to 37
    torch.testing.assert_close(found.sums, clean.sums, **close)
    for name, values in clean.per_query.items():
        torch.testing.assert_close(found.per_query[name], values, **close)


def test_one_pass_delivers_what_each_would_alone() -> None:
    q, k = random(queries=150)
    inputs = AttentionInputs(0, q, k, k, SCALE)
    weights = torch.ones(2, 1, 150)
    whole = pattern_stats(inputs, weights, QUERY_STATS)
    for name in QUERY_STATS:
        assert torch.equal(pattern_stats(inputs, None, [name]).per_query[name], whole.per_query[name])
    torch.testing.assert_close(whole.sums, received_by_class(inputs, weights), atol=1e-6, rtol=2e-6)  # rounding
    total = sum(whole.per_query[name] for name in ("self", "past", "future"))
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-6, rtol=0)


def test_the_entropy_of_one_key_and_of_equal_keys_is_exact() -> None:
    k = torch.zeros(1, 1, 50, 8)
    inputs = AttentionInputs(0, torch.ones(1, 1, 50, 8), k, k, 1.0)
    even = pattern_stats(inputs, None, ["entropy"]).per_query["entropy"]
    torch.testing.assert_close(even, torch.full_like(even, 50).log(), atol=0, rtol=1e-6)
    sharp = k.clone()
    sharp[:, :, 7] = 100.0
    one = pattern_stats(replace(inputs, k=sharp), None, ["entropy"]).per_query["entropy"]
    assert (one == 0).all()


def test_the_default_dtype_does_not_matter() -> None:
    q, k = random()
    inputs = AttentionInputs(0, q, k, k, SCALE, masks()["padding"])
    weights = torch.ones(2, 1, 37)
    expected = pattern_stats(inputs, weights, QUERY_STATS)
    torch.set_default_dtype(torch.float64)
    try:
        got = pattern_stats(inputs, weights, QUERY_STATS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.sums, expected.sums)
    assert all(torch.equal(got.per_query[name], expected.per_query[name]) for name in QUERY_STATS)


def test_memory_is_two_tiles_whatever_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 8000)
    q, k = random(1, 4, 2, queries=200, width=8)
    with Largest() as largest:
        pattern_stats(AttentionInputs(0, q, k, k, SCALE), torch.ones(1, 5, 200), QUERY_STATS)
    assert largest.elements <= 8000  # one head's pattern has 40,000
