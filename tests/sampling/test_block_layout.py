"""Blocks counted from each row's first token: where they are, who sees whom, and the cache, entry by entry."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_lens.attention import BlockLayout
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import LogitsRequest
from dlm_lens.sampling.samplers.blocks import block_plans
from dlm_lens.sampling.two_copies import predicting_output
from dlm_lens.testing import tiny
from tests.reference import forward64

LENGTHS = (7, 3, 10, 1)
ANSWER, BLOCK, POSITIONS = 10, 4, 19


def rows() -> tuple[Tensor, Tensor]:
    """Canvases of prompts of these lengths, padded on the left, with an answer of nine."""
    torch.manual_seed(3)
    content = torch.arange(POSITIONS) >= ANSWER - torch.tensor(LENGTHS)[:, None]
    return torch.randint(1, 60, content.shape), content


def layout_of(content: Tensor) -> BlockLayout:
    return BlockLayout(BLOCK, content.int().argmax(-1))


def block_of(length: int, place: int) -> int:
    """The block, counted from the text, of a canvas position of a row."""
    return (place - (ANSWER - length)) // BLOCK


def test_spans_hold_the_blocks_of_all_rows() -> None:
    _, content = rows()
    layout = layout_of(content)
    spans = layout.spans(ANSWER, POSITIONS)
    # Rows' texts begin at 3, 7, 0 and 9: the answer's first position 10 is in blocks that begin at 7, 7, 8 and 9.
    assert spans == [(7, 13), (11, 17), (15, 19)]
    for number, span in enumerate(spans):
        inside = layout.inside(span, POSITIONS)
        until = layout.until(span, POSITIONS)
        for row, length in enumerate(LENGTHS):
            own = block_of(length, ANSWER) + number
            expected = [block_of(length, place) == own for place in range(POSITIONS)]
            assert inside[row].tolist() == expected
            assert until[row].tolist() == [block_of(length, place) <= own for place in range(POSITIONS)]
    assert BlockLayout(4, torch.tensor([10, 10])).spans(10, 19) == [(10, 14), (14, 18), (18, 19)]


def test_a_row_whose_blocks_are_finished_has_none() -> None:
    # The answer ends at 12: the first row needs the blocks at 8, the second those at 9 alone.
    layout = BlockLayout(4, torch.tensor([3, 9]))
    assert layout.spans(10, 12) == [(7, 12), (11, 12)]
    assert layout.inside((11, 12), 12).tolist() == [[False] * 11 + [True], [False] * 12]


def number_of(context: str, begin: int, place: int) -> int:
    """The number of a position's block of 3, counted from `begin`, on a canvas of `POSITIONS`."""
    if context == "causal":  # the block that is decoded holds the last position
        return min(place, begin + (POSITIONS - 1 - begin) // 3 * 3)
    number = (place - begin) // 3
    return max(number, -1) if context == "whole" else number


@pytest.mark.parametrize("context", ["blocks", "whole", "causal"])
@pytest.mark.parametrize("first", [4, [4, 1, 6, 0]])
def test_visibility_and_bounds_entry_by_entry(first: Any, context: Any) -> None:
    _, content = rows()
    begins = [first] * 4 if isinstance(first, int) else first
    layout = BlockLayout(3, torch.tensor(begins), context)
    found = layout.visible(content)
    numbers = [[number_of(context, begin, place) for place in range(POSITIONS)] for begin in begins]
    last = torch.tensor([[number == row[-1] for number in row] for row in numbers])
    starts, stops = layout.bounds(last)
    for row, own in enumerate(numbers):
        for query in range(POSITIONS):
            block = [place for place in range(POSITIONS) if own[place] == own[query]]
            assert (int(starts[row, query]), int(stops[row, query])) == (block[0], block[-1])
            for key in range(POSITIONS):
                seen = own[key] <= own[query] and bool(content[row, query]) and bool(content[row, key])
                assert bool(found[row, 0, query, key]) == seen


def test_the_first_position_of_a_text_is_predicted_by_its_own_output() -> None:
    blocks = torch.tensor([[-1, -1, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2]])
    begins = torch.tensor([[False, False, True, False, False, False], [True] + [False] * 5])
    found = predicting_output(blocks, begins, shift=True)
    # Of the six noisy outputs that before a position, of the clean ones after them that before its block.
    assert found[0, 2:].tolist() == [2, 2, 6 + 3, 4]
    assert found[1].tolist() == [0, 0, 6 + 1, 2, 6 + 3, 4]
    assert predicting_output(blocks, begins, shift=False).tolist() == [list(range(6))] * 2


def alone64(model: Any, ids: Tensor, content: Tensor, row: int, stop: int) -> Tensor:
    """Logits of a row alone up to `stop`, in float64, without padding and without a cache."""
    keep = content[row].clone()
    keep[stop:] = False
    of = [block_of(LENGTHS[row], place) for place in keep.nonzero()[:, 0].tolist()]
    visible = torch.tensor([[key <= query for key in of] for query in of])[None, None]
    return forward64(model, ids[row][keep][None], visible=visible)["logits"][0]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("shift", [False, True])
@torch.no_grad()
def test_logits_are_those_of_every_row_alone(use_cache: bool, shift: bool) -> None:
    """Three steps in each block, between which its positions change; then a finished block is edited."""
    model: Any = tiny("a2d_qwen3", sampler="dllm_blocks", logit_shift=shift)
    ids, content = rows()
    layout = layout_of(content)
    network = BlockLogits(model, content, layout=layout, use_cache=use_cache)
    spans = layout.spans(ANSWER, POSITIONS)
    queries: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _m, _a, given: queries.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    for number, span in enumerate(spans):
        inside = layout.inside(span, POSITIONS)
        for step in range(4):
            ids = torch.where(inside & (torch.rand(ids.shape) < 0.5), (ids + 7) % 60, ids)
            if step == 3:  # beyond the end of the cache, in a block that is finished in this row only
                place = span[0] - 1 if number else 6
                ids[2, place] = (ids[2, place] + 1) % 60
            plan = StepPlan(step, 4, number, span, 1, span[1])
            found = network.of_step(ids, plan, LogitsRequest(inside & content))
            expected = []
            for row in range(4):
                stop = int(layout.starts(span)[row]) + BLOCK
                logits = alone64(model, ids, content, row, min(stop, POSITIONS))
                wanted = (inside & content)[row].nonzero()[:, 0] - (ANSWER - LENGTHS[row])
                expected.append(logits[(wanted - int(shift)).clamp(min=0)])
            # Float32 noise of logits of up to 10.
            torch.testing.assert_close(found.double(), torch.cat(expected), atol=2e-5, rtol=2e-4)
    # With the cache: what became finished and the blocks in one pass; two steps; all again after the edit.
    cached = [13, 6, 6, 13, 10, 6, 6, 17, 8, 4, 4, 19]
    assert queries == (cached if use_cache else [13] * 4 + [17] * 4 + [19] * 4)


@torch.no_grad()
def test_an_edit_behind_the_cache_is_seen() -> None:
    """Row 0's block from 3 to 6 reaches beyond the cache, which ends at 5 because of row 1; 6 is edited."""
    model: Any = tiny("a2d_qwen3", sampler="dllm_blocks")
    content = torch.ones(2, 16, dtype=torch.bool)
    content[0, :3], content[1, :1] = False, False
    torch.manual_seed(5)
    ids = torch.randint(1, 60, content.shape)
    layout = BlockLayout(4, torch.tensor([3, 1]))
    span = layout.spans(8, 16)[0]
    assert span == (5, 11)
    cached, whole = (BlockLogits(model, content, layout=layout, use_cache=use) for use in (True, False))
    plan, inside = StepPlan(0, 1, 0, span, 1, span[1]), layout.inside(span, 16)
    before = cached.of_step(ids, plan, LogitsRequest(inside))
    ids[0, 6] = (ids[0, 6] + 1) % 60
    after, plain = (network.of_step(ids, plan, LogitsRequest(inside)) for network in (cached, whole))
    torch.testing.assert_close(after, plain, atol=1e-5, rtol=1e-5)
    assert (after - before)[:4].abs().max() > 1e-2


def test_blocks_may_have_unequal_numbers_of_steps():
    plans = block_plans([(2, 6), (6, 9), (9, 12)], [2, 0, 1])
    found = [(one.index, one.total, one.block, one.span, one.remaining, one.seen) for one in plans]
    assert found == [(0, 3, 0, (2, 6), 2, 6), (1, 3, 0, (2, 6), 1, 6), (2, 3, 2, (9, 12), 1, 12)]
