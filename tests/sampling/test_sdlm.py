"""SDLM's sampler: steps in float64, unequal prompts, ends, statistics, hooks, hosts and likelihood."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions
from dlm_lens.sinks.analysis.query_splits import SplitAttention
from dlm_lens.testing import tiny
from dlm_lens.training import MaskedDiffusionLoss
from tests.adapters.test_sdlm import visible_to
from tests.reference import forward64
from tests.sampling.block_families import PROMPTS, Alone, check_ends, check_hosts, check_received_attention, sharp
from tests.sampling.interrupted import resumed_as_unbroken

RUN: dict[str, Any] = {"gen_length": 11, "threshold": 0.1, "seed": 1, "stop_tokens": ()}


def step64(model: Any, run: dl.DenoisingRun, step: int, row: int, shown: Any = True) -> dict[str, Tensor]:
    """The row alone at a step, up to the end of its window, without padding, in float64."""
    padding, masked = int(run.padding[row]), run.masked[step, row]
    stop = end_of(run, step, row)
    ids = run.canvases[step, row : row + 1, padding:stop]
    visible = visible_to(masked[padding:stop].tolist(), run.settings["window_length"])
    return forward64(model, ids, visible=visible & shown)


def alone(model: Any) -> Alone:
    """A row at a step for `block_families`."""

    def found(run: dl.DenoisingRun, step: int, row: int) -> tuple[slice, Tensor, dict[str, Tensor]]:
        inside = slice(int(run.padding[row]), end_of(run, step, row))
        visible = visible_to(run.masked[step, row, inside].tolist(), run.settings["window_length"])
        return inside, visible, step64(model, run, step, row)

    return found


def end_of(run: dl.DenoisingRun, step: int, row: int) -> int:
    first = int(run.masked[step, row].nonzero()[0])
    return min(first - 1 + run.settings["window_length"], run.tokens.shape[1])


@pytest.mark.parametrize("options", [{}, {"window_length": 2}, {"threshold": 0.2, "remasking": "entropy"}])
def test_steps_are_those_of_a_network_in_float64(options: dict[str, Any]) -> None:
    model, given = sharp("sdlm"), RUN | options
    run = dl.denoise(model, PROMPTS, **given)
    mask, several, length = torch.tensor(model.config.mask_token_id), 0, run.tokens.shape[1]
    for step in range(run.steps):
        for row, padding in enumerate(run.padding.tolist()):
            if not run.masked[step, row].any():
                continue
            first = int(run.masked[step, row].nonzero()[0])
            masks = torch.arange(first, min(first + run.settings["window_length"], length))
            assert run.confidence[step, row].isfinite().nonzero().flatten().equal(masks)
            likely = step64(model, run, step, row)["logits"][0].softmax(-1)[masks - 1 - padding]
            tokens = likely.index_fill(-1, mask, 0).argmax(-1)
            assert run.proposals[step, row, masks].equal(tokens)
            confidence = likely.gather(-1, tokens[:, None]).squeeze(-1)
            if options.get("remasking") == "entropy":
                columns = torch.tensor(likely.shape[-1], dtype=torch.double)
                confidence = 1 + (likely * likely.log()).sum(-1) / columns.log()
            torch.testing.assert_close(run.confidence[step, row, masks].double(), confidence, atol=1e-5, rtol=1e-4)
            count = 1
            while count < len(masks) and bool((confidence[: count + 1] > given["threshold"]).all()):
                count += 1
            assert run.unmasked[step, row].nonzero().flatten().equal(masks[:count])
            several += count > 1
    assert several > 2
    assert run.masks_left.tolist() == [0, 0, 0]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"window_length": 1}, {"window_length": 8}])
def test_a_row_is_what_it_is_alone(options: dict[str, Any]) -> None:
    model, given = sharp("sdlm"), RUN | options
    together = dl.denoise(model, PROMPTS, **given)
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(PROMPTS):
        alone, kept = dl.denoise(model, [prompt], **given), together.attention_mask[row]
        assert together.tokens[row, kept].equal(alone.tokens[0])


def test_a_window_of_one_position_is_ar_decoding() -> None:
    model = sharp("sdlm")
    run = dl.denoise(model, PROMPTS[:1], **RUN | {"window_length": 1})
    text = list(PROMPTS[0])
    for _ in range(11):
        ids = torch.tensor([text])
        logits = forward64(model, ids, visible=torch.ones(len(text), len(text)).tril().bool()[None, None])["logits"]
        logits[..., model.config.mask_token_id] = -torch.inf
        text.append(int(logits[0, -1].argmax()))
    assert run.tokens[0].tolist() == text
    assert run.steps == 11


def test_values_out_of_range_are_refused() -> None:
    model = tiny("sdlm")
    with pytest.raises(ValueError, match="threshold is -1; it is a confidence, from 0 to 1"):
        dl.denoise(model, "w5", **RUN | {"threshold": -1})
    with pytest.raises(ValueError, match="SDLM"):
        dl.denoise(model, "w5", **RUN | {"remasking": "topk_margin"})
    with pytest.raises(ValueError, match="window_length"):
        dl.denoise(model, "w5", **RUN | {"window_length": 0})
    with pytest.raises(ValueError, match="SDLMModel is not trained here: its loss is that of a window of masks"):
        MaskedDiffusionLoss().for_model(model, 2)


def test_a_stop_token_ends_a_row_once_nothing_before_it_is_masked(tmp_path: Path) -> None:
    model, given = sharp("sdlm"), RUN | {"threshold": 1.0}
    _, stop = check_ends(model, given)
    resumed_as_unbroken(model, PROMPTS, tmp_path / "rec", passes=3, **given | {"stop_tokens": [stop]})


def test_received_attention_and_its_expectation_count_what_each_query_sees() -> None:
    model = sharp("sdlm")
    recording = dl.record(
        model, PROMPTS, [dl.ReceivedAttention(min_viewers=1), SplitAttention(draws=2, min_viewers=1)], **RUN
    )
    assert recording.run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    check_received_attention(model, recording, alone(model))
    received = dl.received_of(recording)
    # The parts of a split are of the queries that see the same keys, so that e_j is that of the classes.
    shares = torch.stack([recording.expected("masked"), recording.expected("unmasked")], -1)
    parts = (recording.split_random.nan_to_num() * shares[:, :, None, None, :, None, :]).sum(-1)
    sums = received.column_sums.nan_to_num()[..., None].expand(parts.shape)
    torch.testing.assert_close(parts, sums, atol=2e-5, rtol=2e-4)


def test_a_forward_pass_sees_what_is_after_the_window_too() -> None:
    model = sharp("sdlm")
    mask = model.config.mask_token_id
    ids = torch.tensor([[0, 0, 3, 4, 5, mask, mask, 6, mask, mask, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
    content = torch.tensor([[0] * 2 + [1] * 9, [1] * 11])
    with dl.record_forward(model, [dl.ReceivedAttention(min_viewers=1)]) as found:
        model(ids, attention_mask=content)
    received = dl.received_of(found)
    for row, padding in enumerate((2, 0)):
        shown = ids[row : row + 1, padding:]
        visible = visible_to((shown[0] == mask).tolist(), 4)
        kept = forward64(model, shown, visible=visible)
        counts = visible[0, 0].double()
        even = (counts / counts.sum(-1, keepdim=True)).sum(0)
        torch.testing.assert_close(found.expected()[0, row, padding:].double(), even, atol=1e-5, rtol=1e-5)
        assert found.viewers()[0, row, padding:].tolist() == counts.sum(0).tolist()
        for layer in range(2):
            sums = received.column_sums[0, row, layer][:, padding:].double()
            torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)


def test_a_hook_acts_as_in_the_row_alone() -> None:
    model, seen = sharp("sdlm"), list[Tensor]()

    def keep(step: int, canvas: Tensor, logits: Tensor) -> None:
        seen.append(logits.clone())

    run = dl.denoise(model, PROMPTS[1:2], hooks=[mask_positions(2)], on_logits=keep, **RUN)
    for step in range(run.steps):
        stop = end_of(run, step, 0)
        logits = step64(model, run, step, 0, torch.arange(stop) != 2)["logits"][0]
        first = int(run.masked[step, 0].nonzero()[0])
        torch.testing.assert_close(seen[step][0, first:stop].double(), logits[first - 1 : -1], atol=2e-5, rtol=2e-4)


def test_hosts_run_the_same() -> None:
    model = sharp("sdlm")
    check_hosts(model, sharp("sdlm"), RUN, alone(model))


def test_likelihoods_are_those_of_a_window_after_each_prefix() -> None:
    model, prompt, answer = sharp("sdlm"), [3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    mask = model.config.mask_token_id
    wanted, greedy = list[float](), list(prompt)
    for place, token in enumerate(answer):
        masks = min(4, len(answer) - place)
        for text in (prompt + answer[:place], greedy):
            ids = torch.tensor([text + [mask] * masks])
            logits = forward64(model, ids, visible=visible_to((ids[0] == mask).tolist(), 4))["logits"][0]
            if text is greedy:
                logits[:, mask] = -torch.inf
                following = int(logits[len(text) - 1].argmax())
            else:
                wanted.append(float(logits[len(text) - 1].log_softmax(-1)[token]))
        greedy = [*greedy, following]
    found = dl.log_likelihood(model, prompt, answer)
    assert found.method == "chain_rule"
    assert (-found.losses[0]).tolist() == pytest.approx(wanted, rel=1e-4)
    (ids,) = dl.log_likelihood(model, prompt, answer, "greedy_completion").completions
    assert ids.tolist() == greedy[len(prompt) :]
    with pytest.raises(ValueError, match="the sampler 'sdlm' has no mc likelihood; use method='chain_rule'"):
        dl.log_likelihood(model, prompt, answer, "mc")
    with pytest.raises(ValueError, match="order"):
        dl.log_likelihood(model, prompt, answer, "chain_rule", order="right_to_left")
