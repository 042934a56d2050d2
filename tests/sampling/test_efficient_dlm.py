"""Efficient-DLM's sampler: its steps in float64, unequal prompts, ends, statistics, hooks, hosts and likelihood."""

from itertools import product
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions, mask_top_sinks
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.interrupted import resumed_as_unbroken
from tests.sampling.test_likelihood_blocks import ANSWER, PROMPT

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
RUN: dict[str, Any] = {
    "gen_length": 11, "block_length": 4, "threshold": 0.1, "temperature": 0.0, "seed": 1, "stop_tokens": (),
}  # fmt: skip


def sharp() -> Any:
    """A tiny network whose confidences are on both sides of the threshold."""
    model = tiny("efficient_dlm")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    return model


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


@pytest.mark.parametrize("options", [{}, {"parallel": False, "steps": 6}])
def test_steps_are_those_of_a_network_in_float64(options: dict[str, Any]) -> None:
    model = sharp()
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
    model, given = sharp(), RUN | options
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
    model, given = sharp(), RUN | {"parallel": False}
    free = dl.denoise(model, PROMPTS, **given)
    answer = free.tokens[:, free.prompt_length :]
    stop = int(answer[0, 2])
    run = dl.denoise(model, PROMPTS, **given | {"stop_tokens": [stop]})
    assert run.masks_left[0] > 0
    for row in range(3):
        places = (answer[row] == stop).nonzero().flatten().tolist()
        kept = places[0] + 1 if places else 11
        assert run.tokens[row, free.prompt_length :][:kept].equal(answer[row, :kept])


@pytest.mark.parametrize(
    "options", [{}, {"reference_quirks": True, "gen_length": 12, "steps": 9, "parallel": False}]
)
def test_a_recording_is_stored_and_resumed(options: dict[str, Any], tmp_path: Path) -> None:
    model, given = sharp(), RUN | options
    prompts = [PROMPTS[0], PROMPTS[2][:7]] if options else PROMPTS
    free = dl.denoise(model, prompts, **given)
    given["stop_tokens"] = [int(free.tokens[0, free.prompt_length + 1])]
    whole = resumed_as_unbroken(model, prompts, tmp_path / "rec", passes=3, **given)
    assert whole.run.steps < free.steps or not options


def test_received_attention_and_its_expectation_count_what_each_query_sees() -> None:
    model = sharp()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    run, received = recording.run, dl.received_of(recording)
    assert run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    expected, viewers = recording.expected(), recording.viewers()
    for step in range(run.steps):
        stop = run.spans[step][1]
        for row in range(3):
            if not run.running[step, row]:
                continue
            padding = int(run.padding[row])
            visible = visible_to(run.prompt_length - padding, stop - padding, 4)[0, 0].double()
            even = (visible / visible.sum(-1, keepdim=True)).sum(0)
            inside = slice(padding, stop)
            torch.testing.assert_close(expected[step, row, inside].double(), even, atol=1e-5, rtol=1e-5)
            assert viewers[step, row, inside].tolist() == visible.sum(0).tolist()
            assert recording.facts.pairs()[step, row][inside, inside].equal(visible.bool())
            kept = step64(model, run, step, row)
            for layer in range(2):
                sums = received.column_sums[step, row, layer][:, inside].double()
                torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)
    again = dl.received_over_steps(model, run, min_viewers=1)
    torch.testing.assert_close(again.values, received.values, equal_nan=True)


def test_hooks_and_hosts_act_as_in_every_row_alone() -> None:
    model, seen = sharp(), list[Tensor]()

    def keep(step: int, canvas: Tensor, logits: Tensor) -> None:
        seen.append(logits.clone())

    run = dl.denoise(model, PROMPTS[1:2], hooks=[mask_positions(2)], on_logits=keep, **RUN)
    for step in range(run.steps):
        stop = run.spans[step][1]
        logits = step64(model, run, step, 0, torch.arange(stop) != 2)["logits"][0]
        torch.testing.assert_close(seen[step][0, :stop].double(), logits, atol=2e-5, rtol=2e-4)
    plain = dl.denoise(model, PROMPTS, **RUN)
    hooked = dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        patterns = [].save()
        for step in tracer.steps[:]:
            patterns.append((int(step), lm.layers[0].attn.pattern))
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    for number, pattern in patterns:
        want = step64(model, plain, number, 2)["pattern0"]
        torch.testing.assert_close(pattern[2:].double(), want, atol=2e-5, rtol=2e-4)
    tl = dl.bridge(sharp())
    assert tl.denoise(PROMPTS, **RUN).canvases.equal(plain.canvases)
    assert tl.denoise(PROMPTS, hooks=[mask_top_sinks(1)], **RUN).canvases.equal(hooked.canvases)


@pytest.mark.parametrize("length", [1, 4])
def test_likelihoods_see_the_prompt_whole(length: int) -> None:
    model, bound, end = sharp(), 0.0, len(PROMPT + ANSWER)
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
