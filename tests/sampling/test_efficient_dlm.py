"""Efficient-DLM's sampler: its steps in float64, unequal prompts, ends, statistics, hooks, hosts and likelihood."""

from itertools import product
from math import comb
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
from tests.sampling.test_likelihood_blocks import ANSWER, PROMPT

RUN: dict[str, Any] = {
    "gen_length": 11, "block_length": 4, "threshold": 0.1, "temperature": 0.0, "seed": 1, "stop_tokens": (),
}  # fmt: skip


def visible_to(prompt: int, positions: int, length: int) -> Tensor:
    """The prompt is one block, and each further block sees itself and all before it; entry by entry."""
    found = torch.zeros(positions, positions, dtype=torch.bool)
    for query in range(positions):
        block = (query - prompt) // length if query >= prompt else -1
        for key in range(positions):
            found[query, key] = key < prompt or (key - prompt) // length <= block
    return found[None, None]


def step64(model: Any, run: dl.DenoisingRun, step: int, row: int, shown: Any = True) -> dict[str, Tensor]:
    """The row alone at a step, without padding, in float64."""
    stop, padding = run.spans[step][1], int(run.padding[row])
    ids = run.canvases[step, row : row + 1, padding:stop]
    visible = visible_to(run.prompt_length - padding, stop - padding, run.settings["block_length"])
    return forward64(model, ids, visible=visible & shown)


def alone(model: Any) -> Alone:
    """A row at a step for `block_families`."""

    def found(run: dl.DenoisingRun, step: int, row: int) -> tuple[slice, Tensor, dict[str, Tensor]]:
        stop, padding = run.spans[step][1], int(run.padding[row])
        visible = visible_to(run.prompt_length - padding, stop - padding, run.settings["block_length"])
        return slice(padding, stop), visible, step64(model, run, step, row)

    return found


@pytest.mark.parametrize("options", [{}, {"parallel": False, "steps": 6}])
def test_steps_are_those_of_a_network_in_float64(options: dict[str, Any]) -> None:
    model = sharp("efficient_dlm")
    run = dl.denoise(model, PROMPTS, **RUN | options)
    mask, several = torch.tensor(model.config.mask_token_id), 0
    for step in range(run.steps):
        start, stop = run.spans[step]
        for row in range(3):
            likely = step64(model, run, step, row)["logits"][0].softmax(-1)
            masks = (run.masked[step, row] & (torch.arange(run.tokens.shape[1]) < stop)).nonzero().flatten()
            assert run.confidence[step, row].isfinite().nonzero().flatten().equal(masks)
            if not len(masks):
                continue
            assert masks.min() >= start
            outputs = masks - int(run.padding[row])
            tokens = likely[outputs].index_fill(-1, mask, 0).argmax(-1)
            assert run.proposals[step, row, masks].equal(tokens)
            confidence = likely[outputs].gather(-1, tokens[:, None]).squeeze(-1)
            torch.testing.assert_close(run.confidence[step, row, masks].double(), confidence, atol=1e-5, rtol=1e-4)
            chosen = confidence >= 0.1
            chosen[confidence.argmax()] = True
            if options:  # two steps a block of four: two tokens each; of the last block of three: two and one
                chosen = torch.zeros_like(chosen)
                chosen[confidence.topk(min(2, len(masks))).indices] = True
            assert run.unmasked[step, row].nonzero().flatten().equal(masks[chosen])
            several += int(chosen.sum()) > 1
    assert several > 3
    assert run.masks_left.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"parallel": False}, {"steps": 3, "threshold": 0.9}, {"block_length": 1}]
)
def test_a_row_is_what_it_is_alone_and_the_cache_is_exact(options: dict[str, Any]) -> None:
    model, given = sharp("efficient_dlm"), RUN | options
    together = dl.denoise(model, PROMPTS, **given)
    assert together.masks_left.tolist() == [0, 0, 0]
    assert together.steps <= (3 if "steps" in options else 11)
    whole = dl.denoise(model, PROMPTS, **given, use_cache=False)
    assert whole.canvases.equal(together.canvases)
    for row, prompt in enumerate(PROMPTS):
        alone, kept = dl.denoise(model, [prompt], **given), together.attention_mask[row]
        assert together.tokens[row, kept].equal(alone.tokens[0])


def test_values_out_of_range_are_refused() -> None:
    model = tiny("efficient_dlm")
    with pytest.raises(ValueError, match="4 steps do not divide into 3 blocks"):
        dl.denoise(model, "w5", **RUN | {"steps": 4})
    with pytest.raises(ValueError, match=r"threshold is 1\.5; it is a probability from 0 to 1"):
        dl.denoise(model, "w5", **RUN | {"threshold": 1.5})
    with pytest.raises(ValueError, match="compares probabilities, which remasking='random' does not have"):
        dl.denoise(model, "w5", **RUN | {"remasking": "random"})
    with pytest.raises(ValueError, match="remasking"):
        dl.denoise(model, "w5", **RUN | {"remasking": "topk_margin"})
    with pytest.raises(ValueError, match="disable_qk_norm is True"):
        tiny("efficient_dlm", disable_qk_norm=True)


def test_a_stop_token_ends_a_row_once_nothing_before_it_is_masked() -> None:
    check_ends(sharp("efficient_dlm"), RUN | {"parallel": False})


@pytest.mark.parametrize(
    "options", [{}, {"reference_quirks": True, "gen_length": 12, "steps": 9, "parallel": False}]
)
def test_a_recording_is_stored_and_resumed(options: dict[str, Any], tmp_path: Path) -> None:
    model, given = sharp("efficient_dlm"), RUN | options
    prompts = [PROMPTS[0], PROMPTS[2][:7]] if options else PROMPTS
    free = dl.denoise(model, prompts, **given)
    given["stop_tokens"] = [int(free.tokens[0, free.prompt_length + 1])]
    whole = resumed_as_unbroken(model, prompts, tmp_path / "rec", passes=3, **given)
    assert whole.run.steps < free.steps or not options


def test_received_attention_and_its_expectation_count_what_each_query_sees() -> None:
    model = sharp("efficient_dlm")
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    assert recording.run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    check_received_attention(model, recording, alone(model))


def test_a_hook_acts_as_in_the_row_alone() -> None:
    model = sharp("efficient_dlm")

    def hidden64(run: dl.DenoisingRun, step: int) -> Tensor:
        stop = run.spans[step][1]
        return step64(model, run, step, 0, torch.arange(stop) != 2)["logits"][0]

    check_hook(model, RUN, hidden64)


def test_hosts_run_the_same() -> None:
    model = sharp("efficient_dlm")
    check_hosts(model, sharp("efficient_dlm"), RUN, alone(model))


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("family", ["efficient_dlm", "nemotron_labs_diffusion"])
def test_likelihoods_see_the_prompt_whole(family: str, length: int) -> None:
    """Also in a network that is trained after a causal context: the sampler says how a likelihood attends."""
    model, bound, end = sharp(family, sampler="efficient_dlm"), 0.0, len(PROMPT + ANSWER)
    for start in range(len(PROMPT), end, length):
        stop = min(start + length, end)
        for mask in product([False, True], repeat=stop - start):
            masked = [start + i for i, flag in enumerate(mask) if flag]
            if masked:
                canvas = [model.config.mask_token_id if i in masked else (PROMPT + ANSWER)[i] for i in range(stop)]
                visible = visible_to(len(PROMPT), stop, length)
                likely = forward64(model, torch.tensor([canvas]), visible=visible)["logits"][0].log_softmax(-1)
                each = sum(float(likely[i, (PROMPT + ANSWER)[i]]) for i in masked)
                bound += each / len(masked) / comb(stop - start, len(masked))
    found = dl.log_likelihood(model, PROMPT, ANSWER, samples=2048, strata=16, seed=5, block_length=length)
    # 128 independent estimates, an interval of 4 standard errors; one mask a block has no variance.
    error = float(found.standard_error)
    assert float(found.value) == pytest.approx(bound, abs=4 * error + 1e-4)
    assert error < 0.02 * abs(bound)
    (greedy,) = dl.log_likelihood(model, PROMPT, ANSWER[:1], "greedy_completion", block_length=length).completions
    canvas = torch.tensor([[*PROMPT, model.config.mask_token_id]])
    logits = forward64(model, canvas)["logits"][0, -1]
    assert int(greedy) == int(logits.index_fill(-1, canvas[0, -1:], -torch.inf).argmax())
