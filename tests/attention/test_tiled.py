"""The pattern tile by tile, and column sums by class of queries, without a whole pattern."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dlm_lens.attention import AttentionInputs, pattern_tiles, received_by_class, tiled, visible_keys


def inputs(seed: int = 0) -> AttentionInputs:
    generator = torch.Generator().manual_seed(seed)
    keep = torch.ones(2, 37, dtype=torch.bool)
    keep[0, :5] = False
    return AttentionInputs(
        layer=0,
        q=torch.randn(2, 6, 37, 8, generator=generator) * 2,
        k=torch.randn(2, 2, 37, 8, generator=generator),
        v=torch.randn(2, 2, 37, 8, generator=generator),
        scale=8**-0.5,
        visible=visible_keys(keep),
    )


def whole_pattern(given: AttentionInputs) -> Tensor:
    """The pattern in float64, head by head."""
    pattern = torch.zeros(2, 6, 37, 37, dtype=torch.float64)
    for row in range(2):
        for head in range(6):
            scores = given.q[row, head].double() @ given.k[row, head // 3].double().T * given.scale
            pattern[row, head] = scores.masked_fill(~given.visible[row, 0], -torch.inf).softmax(-1)
    return pattern


def test_tiles_are_the_pattern() -> None:
    given = inputs()
    got = list(pattern_tiles(given, tile=10))
    assert [(rows.start, rows.stop) for rows, _ in got] == [(0, 10), (10, 20), (20, 30), (30, 37)]
    torch.testing.assert_close(
        torch.cat([p for _, p in got], -2).double(), whole_pattern(given), atol=1e-6, rtol=1e-5
    )


def test_the_default_tile_holds_a_fixed_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    monkeypatch.setattr(tiled, "TILE_ENTRIES", 2 * 6 * 37 * 9 + 5)
    got = list(pattern_tiles(given))
    assert [rows.stop - rows.start for rows, _ in got] == [9, 9, 9, 9, 1]
    whole = torch.cat([pattern for _, pattern in got], -2)
    torch.testing.assert_close(whole.double(), whole_pattern(given), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("device", "most"), [("cpu", 2**20), ("meta", 2**24)])
def test_tiles_are_larger_off_the_cpu(device: str, most: int) -> None:
    """A GPU runs a launch of four queries as fast as one of 64."""
    q = torch.empty(8, 32, 1024, 4, device=device)
    _, tile = next(pattern_tiles(AttentionInputs(0, q, q[:, :2], q[:, :2], 0.5)))
    assert tile.numel() == most


def test_sums_by_class_are_those_of_the_pattern_also_of_an_edited_one() -> None:
    given = inputs()
    weights = torch.rand(2, 3, 37, generator=torch.Generator().manual_seed(1))
    for case in (given, replace(given, pattern=whole_pattern(given).float() * 0.5)):
        pattern = whole_pattern(given) if case.pattern is None else case.pattern.double()
        expected = torch.einsum("bcq,bhqk->bchk", weights.double(), pattern)
        torch.testing.assert_close(received_by_class(case, weights).double(), expected, atol=1e-5, rtol=1e-5)


def test_a_query_that_sees_nothing_contributes_nothing() -> None:
    given = inputs()
    hidden = given.visible.clone().expand(2, 1, 37, 37).clone()
    hidden[1, :, 4] = False
    got = torch.cat([p for _, p in pattern_tiles(AttentionInputs(0, given.q, given.k, given.v, 1.0, hidden))], -2)
    assert (got[1, :, 4] == 0).all()
    torch.testing.assert_close(got[1, :, 5].sum(-1), torch.ones(6))
