"""`SplitAttention`: the parts are splits of the queries, of the sizes of the classes, and the scores are theirs."""

from typing import Any

import numpy as np
import pytest

import dlm_lens as dl
from dlm_lens.recording import AttentionPattern, rerun
from dlm_lens.sinks import SplitAttention, received_of_split
from dlm_lens.testing import tiny

PROMPTS = ["w3 w4 w5 w6 w7 w8 w9", "w9 w8 w7"]
CLASSES = dl.ReceivedAttention(queries=("masked", "unmasked"), min_viewers=1)


@pytest.fixture
def recording(tiny_llada: Any) -> Any:
    reducers = [CLASSES, SplitAttention(3, min_viewers=1), SplitAttention(1, "position", min_viewers=1),
                AttentionPattern()]  # fmt: skip
    return dl.record(tiny_llada, PROMPTS, reducers, gen_length=6, steps=6)


def part_of(recording: Any, by: str, draw: int, step: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The queries of each part, solved for from the patterns of all layers and heads in float64."""
    inside = recording.run.attention_mask[row].numpy()
    pattern = recording.pattern[step, row].double().numpy()[..., inside, :][..., inside]
    equations = np.moveaxis(pattern, -2, -1).reshape(-1, inside.sum())
    found = []
    for one in received_of_split(recording, by, draw):
        sums = one.column_sums[step, row].double().numpy()[..., inside].ravel()
        weights, *_ = np.linalg.lstsq(equations, sums, rcond=None)
        assert abs(equations @ weights - sums).max() < 1e-5
        assert abs(weights - weights.round()).max() < 1e-2
        found.append(weights.round().astype(int))
    return found[0], found[1]


@pytest.mark.parametrize("by", ["random", "position"])
def test_split_attention_is_that_of_two_parts_of_the_queries(recording: Any, by: str) -> None:
    masked = recording.masked.numpy()
    for step in (0, 3):
        for row in range(2):
            inside = recording.run.attention_mask[row].numpy()
            for draw in range(3 if by == "random" else 1):
                first, second = part_of(recording, by, draw, step, row)
                assert {*first, *second} == {0, 1}
                assert (first + second == 1).all()
                assert first.sum() == masked[step, row][inside].sum()
                if by == "position":
                    assert (np.diff(first) >= 0).all()


def test_random_splits_differ_between_draws_and_steps(recording: Any) -> None:
    drawn = [tuple(part_of(recording, "random", draw, step, 0)[0]) for draw in range(3) for step in (2, 3)]
    assert len({*drawn}) == len(drawn)


def test_a_row_s_splits_do_not_depend_on_its_batch(tiny_llada: Any, recording: Any) -> None:
    alone = dl.record(tiny_llada, PROMPTS[1:], [CLASSES, SplitAttention(3, min_viewers=1)], gen_length=6, steps=6)
    width = alone.masked.shape[-1]
    for mine, theirs in zip(received_of_split(alone, draw=2), received_of_split(recording, draw=2), strict=True):
        np.testing.assert_allclose(
            mine.values[:, 0].numpy(), theirs.values[:, 1, ..., -width:].numpy(), atol=1e-5, equal_nan=True
        )


def test_the_split_by_position_is_the_split_by_state_while_the_answer_is_masked(recording: Any) -> None:
    state = dl.received_of(recording, "masked").values[0, 0]
    split = received_of_split(recording, "position")[0].values[0, 0]
    np.testing.assert_allclose(state.numpy(), split.numpy(), atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("by", ["random", "position"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_with_a_cache_only_the_computed_queries_are_split(tiny_llada: Any, cache: Any, by: Any) -> None:
    draws = 3 if by == "random" else 1
    run = dl.denoise(tiny_llada, PROMPTS, steps=8, gen_length=8, block_length=4, cache=cache)
    recording = rerun(tiny_llada, run, [CLASSES, SplitAttention(draws, by, min_viewers=1), AttentionPattern()])
    cached = 0
    for step in range(8):
        for row in range(2):
            inside = run.attention_mask[row].numpy()
            pattern = recording.pattern[step, row].double().numpy()[..., inside]
            computed = np.isfinite(pattern).all((0, 1, 3))
            cached += int((~computed & inside).any())
            masked = recording.masked[step, row].numpy() & computed
            sizes = [masked.sum(), (computed & ~masked).sum()]
            equations = np.moveaxis(pattern[:, :, computed], -2, -1).reshape(-1, computed.sum())
            for draw in range(draws):
                total = np.zeros(len(equations))
                for one, size in zip(received_of_split(recording, by, draw), sizes, strict=True):
                    if not size:  # a class without a query has no part
                        continue
                    values = one.values[step, row].double().numpy()[..., inside]
                    np.testing.assert_allclose(values.mean(-1), 1, atol=1e-4)
                    total += values.ravel() * size / inside.sum()
                # Both parts together are all the computed queries.
                np.testing.assert_allclose(total, equations.sum(-1), atol=1e-4)
    assert cached >= 10


def test_split_attention_says_what_it_cannot_do(tiny_causal: Any, tiny_llada: Any) -> None:
    for wrong in ({"by": "token"}, {"by": "position", "draws": 2}):
        with pytest.raises(ValueError, match="by is 'random', or 'position' with draws=1"):
            SplitAttention(**{"draws": 1, **wrong})
    with pytest.raises(ValueError, match="causal model"):
        dl.record(tiny_causal, PROMPTS, [SplitAttention()], gen_length=3)
    plain = dl.record(tiny_llada, PROMPTS, [CLASSES], gen_length=2, steps=2)
    with pytest.raises(ValueError, match="no split_random; record with"):
        received_of_split(plain)


@pytest.mark.parametrize("by", ["random", "position"])
@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_in_block_causal_attention_every_block_is_split(family: str, by: Any) -> None:
    model = tiny(family)
    reducers = [CLASSES, SplitAttention(3 if by == "random" else 1, by, min_viewers=1), AttentionPattern()]
    recording = dl.record(model, PROMPTS, reducers, gen_length=8, block_length=4)
    run = recording.run
    assert run.attention.blocks is not None
    number = run.attention.blocks.numbers(run.tokens.shape[1]).numpy()
    drawn, several = set(), 0
    for step in range(run.steps):
        for row in run.running[step].nonzero().flatten().tolist():
            pattern = recording.pattern[step, row].double().nan_to_num(nan=0.0).numpy()
            queries = pattern.sum((0, 1, 3)) > 0
            masked = run.masked[step, row].numpy() & queries
            seen = (pattern > 0).any((0, 1))
            uniform = seen / np.maximum(seen.sum(-1, keepdims=True), 1)
            for draw in range(3 if by == "random" else 1):
                parts = received_of_split(recording, by, draw)
                sums = [np.nan_to_num(one.column_sums[step, row].double().numpy()) for one in parts]
                first = _solved(pattern, sums[0], queries)
                assert (_solved(pattern, sums[1], queries) == queries & ~first).all()
                for block in {*number[row][queries]}:
                    inside = number[row] == block
                    assert (first & inside).sum() == (masked & inside).sum()
                    if by == "position":
                        assert (np.diff(first[inside & queries].astype(int)) >= 0).all()
                # The scores are relative to the parts' own e_j.
                values = parts[0].values[step, row].double().numpy()
                known, e = np.isfinite(values), uniform[first].sum(0)
                expected = np.broadcast_to(e, values.shape)
                np.testing.assert_allclose((values * expected)[known], sums[0][known], atol=1e-5)
                drawn.add((step, row, tuple(first)))
            several += len({*number[row][queries]}) > 1
    assert several > 4
    assert by == "position" or len(drawn) > 1.5 * run.steps * 2


def _solved(pattern: np.ndarray, sums: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Which queries the column sums [layer, head, key] are of."""
    equations = np.moveaxis(pattern[:, :, queries], -2, -1).reshape(-1, queries.sum())
    weights, *_ = np.linalg.lstsq(equations, sums.ravel(), rcond=None)
    assert abs(weights - weights.round()).max() < 1e-2
    found = np.zeros_like(queries)
    found[queries] = weights.round().astype(bool)
    return found


def test_a_sliding_window_is_refused() -> None:
    model = tiny("modernbert")
    with pytest.raises(ValueError, match=r"a sliding window of \d+.*choose layers without a window"):
        dl.record(model, "w1 " * 60, [CLASSES, SplitAttention()], gen_length=4, steps=4)
