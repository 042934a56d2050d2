"""The reducer protocol carries the statistics that recording needs, without a whole pattern."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_lens.attention import (
    AttentionInputs,
    column_sums,
    expected_received,
    pattern_tiles,
    reduce_attention,
    visible_keys,
)


@dataclass(frozen=True)
class Received:
    """Received attention, as recording will have it: a running column sum, then the division by e_j."""

    name: str = "received"
    dims: tuple[str, ...] = ("batch", "head", "key")
    unit: str = "relative to uniform"

    def start(self, inputs: AttentionInputs) -> Tensor:
        return torch.zeros(*inputs.q.shape[:2], inputs.k.shape[2])

    def tile(self, state: Tensor, inputs: AttentionInputs, rows: slice, pattern: Tensor) -> Tensor:
        queries = None if inputs.queries is None else inputs.queries[:, rows]
        return state + column_sums(pattern, queries)

    def finish(self, state: Tensor, inputs: AttentionInputs) -> Tensor:
        assert inputs.visible is not None
        return state / expected_received(inputs.visible, inputs.queries)


@dataclass(frozen=True)
class WeightedValue:
    """How much each key writes: column sum times the norm of W_O v_j."""

    name: str = "weighted_value"
    dims: tuple[str, ...] = ("batch", "head", "key")
    unit: str = "norm of the residual update"

    def start(self, inputs: AttentionInputs) -> Tensor:
        return torch.zeros(*inputs.q.shape[:2], inputs.k.shape[2])

    def tile(self, state: Tensor, inputs: AttentionInputs, rows: slice, pattern: Tensor) -> Tensor:
        return state + pattern.sum(-2)

    def finish(self, state: Tensor, inputs: AttentionInputs) -> Tensor:
        assert inputs.output is not None
        values = inputs.v.repeat_interleave(inputs.q.shape[1] // inputs.v.shape[1], 1)
        return state * torch.einsum("bhkd,hdm->bhkm", values, inputs.output).norm(dim=-1)


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
        queries=keep,
        output=torch.randn(6, 8, 16, generator=generator),
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
    tiles = list(pattern_tiles(given, tile=10))
    assert [(rows.start, rows.stop) for rows, _ in tiles] == [(0, 10), (10, 20), (20, 30), (30, 37)]
    torch.testing.assert_close(
        torch.cat([p for _, p in tiles], -2).double(), whole_pattern(given), atol=1e-6, rtol=1e-5
    )


def test_reducers_share_one_pass_and_do_not_depend_on_the_tiles() -> None:
    given = inputs()
    pattern = whole_pattern(given)
    counted = (pattern * given.queries[:, None, :, None]).sum(-2)
    norms = torch.zeros(2, 6, 37, dtype=torch.float64)
    for head in range(6):
        norms[:, head] = (given.v[:, head // 3].double() @ given.output[head].double()).norm(dim=-1)
    for tile in (1, 7, 128):
        got = reduce_attention(given, [Received(), WeightedValue()], tile=tile)
        visible = given.visible[:, 0, 0]
        # Every counted query of a row sees the same keys, so that e_j = 1 for each of them.
        torch.testing.assert_close(
            got["received"].double().movedim(1, -1)[visible], counted.movedim(1, -1)[visible], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(got["weighted_value"].double(), pattern.sum(-2) * norms, atol=1e-4, rtol=1e-4)


def test_a_query_that_sees_nothing_contributes_nothing() -> None:
    given = inputs()
    hidden = given.visible.clone().expand(2, 1, 37, 37).clone()
    hidden[1, :, 4] = False
    tiles = torch.cat([p for _, p in pattern_tiles(AttentionInputs(0, given.q, given.k, given.v, 1.0, hidden))], -2)
    assert (tiles[1, :, 4] == 0).all()
    torch.testing.assert_close(tiles[1, :, 5].sum(-1), torch.ones(6))
