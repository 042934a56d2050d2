"""Stable-DiffCoder's sampler: steps in float64, unequal prompts, ends, statistics, hooks and hosts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.block_families import (
    PROMPTS,
    Alone,
    check_ends,
    check_hook,
    check_hosts,
    check_received_attention,
    sharp,
)
from tests.sampling.interrupted import resumed_as_unbroken

RUN: dict[str, Any] = {"gen_length": 11, "threshold": 0.1, "seed": 1, "stop_tokens": ()}


def visible_to(positions: int, length: int = 4) -> Tensor:
    """A position sees its own block of the text and all before it; entry by entry."""
    found = torch.zeros(positions, positions, dtype=torch.bool)
    for query in range(positions):
        for key in range(positions):
            found[query, key] = key // length <= query // length
    return found[None, None]


def step64(
    model: Any, run: dl.DenoisingRun, step: int, row: int, stop: int, shown: Any = True
) -> dict[str, Tensor]:
    """The row alone up to `stop`, without padding, in float64."""
    padding = int(run.padding[row])
    ids = run.canvases[step, row : row + 1, padding:stop]
    return forward64(model, ids, visible=visible_to(stop - padding) & shown)


def alone(model: Any) -> Alone:
    """A row at a step for `block_families`."""

    def found(run: dl.DenoisingRun, step: int, row: int) -> tuple[slice, Tensor, dict[str, Tensor]]:
        padding = int(run.padding[row])
        block = int(run.blocks[step]) + (run.prompt_length - padding) // 4
        stop = min(padding + 4 * block + 4, run.tokens.shape[1])
        return slice(padding, stop), visible_to(stop - padding), step64(model, run, step, row, stop)

    return found


@pytest.mark.parametrize("options", [{}, {"parallel": False, "steps": 6}])
def test_steps_are_those_of_a_network_in_float64(options: dict[str, Any]) -> None:
    model = sharp("stable_diffcoder")
    run = dl.denoise(model, PROMPTS, **RUN | options)
    mask, several, length = torch.tensor(model.config.mask_token_id), 0, run.tokens.shape[1]
    planned = dict[tuple[int, int], tuple[int, int]]()
    for step in range(run.steps):
        for row, padding in enumerate(run.padding.tolist()):
            block = len(PROMPTS[row]) // 4 + int(run.blocks[step])
            stop = min(padding + 4 * block + 4, length)
            masks = (run.canvases[step, row, :stop] == mask).nonzero().flatten()
            assert run.confidence[step, row].isfinite().nonzero().flatten().equal(masks)
            if not len(masks):  # the row waits for the others' blocks
                continue
            likely = step64(model, run, step, row, stop)["logits"][0].softmax(-1)[masks - padding]
            tokens = likely.index_fill(-1, mask, 0).argmax(-1)
            assert run.proposals[step, row, masks].equal(tokens)
            confidence = likely.gather(-1, tokens[:, None]).squeeze(-1)
            torch.testing.assert_close(run.confidence[step, row, masks].double(), confidence, atol=1e-5, rtol=1e-4)
            chosen = confidence >= 0.1
            chosen[confidence.argmax()] = True
            if options:  # two steps a block
                of_block, done = planned.get((row, block), (len(masks), 0))
                count = of_block // 2 + (done < of_block % 2)
                planned[row, block] = of_block, done + 1
                chosen = torch.zeros_like(chosen)
                chosen[confidence.topk(count).indices] = True
            assert run.unmasked[step, row].nonzero().flatten().equal(masks[chosen])
            several += int(chosen.sum()) > 1
    assert several > 3
    assert run.masks_left.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"parallel": False}, {"steps": 3, "threshold": 0.9}, {"block_length": 1},
     {"block_length": 8, "steps": 4, "parallel": False, "remasking": "random"}],
)  # fmt: skip
def test_a_row_is_what_it_is_alone_and_the_cache_is_exact(options: dict[str, Any]) -> None:
    model, given = sharp("stable_diffcoder"), RUN | options
    together = dl.denoise(model, PROMPTS, **given)
    assert together.masks_left.tolist() == [0, 0, 0]
    assert "steps" not in options or together.steps <= 6
    whole = dl.denoise(model, PROMPTS, **given, use_cache=False)
    assert whole.canvases.equal(together.canvases)
    for row, prompt in enumerate(PROMPTS):
        alone, kept = dl.denoise(model, [prompt], **given), together.attention_mask[row]
        assert together.tokens[row, kept].equal(alone.tokens[0])


def test_values_out_of_range_are_refused() -> None:
    model = tiny("stable_diffcoder")
    with pytest.raises(ValueError, match="4 steps do not divide into 3 blocks"):
        dl.denoise(model, "w5", **RUN | {"steps": 4})
    with pytest.raises(ValueError, match=r"threshold is -0\.5; it is a probability from 0 to 1"):
        dl.denoise(model, "w5", **RUN | {"threshold": -0.5})
    with pytest.raises(ValueError, match="Stable-DiffCoder"):
        dl.denoise(model, "w5", **RUN | {"remasking": "topk_margin"})


@pytest.mark.parametrize("options", [{"threshold": 0.9}, {"parallel": False}])
def test_with_quirks_a_block_has_no_more_steps_than_masks(options: dict[str, Any]) -> None:
    model = tiny("stable_diffcoder")
    mask = int(model.config.mask_token_id)
    settings = {"gen_length": 4, "steps": 6, "stop_tokens": (), "reference_quirks": True, **options}

    def propose_mask(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor(mask), 100.0)

    # The authors' code plans a token for each mask, and with [MASK] as every proposal leaves the block as it is.
    stuck = dl.denoise(model, [[5, 6, 7, 8]], on_logits=propose_mask, **settings)
    assert (stuck.steps, stuck.tokens[0, 4:].tolist()) == (4, [mask] * 4)


def test_blocks_of_another_length_than_those_of_the_training_warn() -> None:
    with pytest.warns(UserWarning, match="block_length is 8, but the model was trained with blocks of 4"):
        dl.denoise(tiny("stable_diffcoder"), "w5", **RUN | {"block_length": 8})


def test_a_stop_token_ends_a_row_once_nothing_before_it_is_masked(tmp_path: Path) -> None:
    model, given = sharp("stable_diffcoder"), RUN | {"parallel": False}
    _, stop = check_ends(model, given)
    resumed_as_unbroken(model, PROMPTS, tmp_path / "rec", passes=3, **given | {"stop_tokens": [stop]})


def test_received_attention_and_its_expectation_count_what_each_query_sees() -> None:
    model = sharp("stable_diffcoder")
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    assert recording.run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    check_received_attention(model, recording, alone(model))


def test_a_hook_acts_as_in_the_row_alone() -> None:
    model = sharp("stable_diffcoder")

    def hidden64(run: dl.DenoisingRun, step: int) -> Tensor:
        stop = run.spans[step][1]
        return step64(model, run, step, 0, stop, torch.arange(stop) != 2)["logits"][0]

    check_hook(model, RUN, hidden64)


def test_hosts_run_the_same() -> None:
    model = sharp("stable_diffcoder")
    check_hosts(model, sharp("stable_diffcoder"), RUN, alone(model))
