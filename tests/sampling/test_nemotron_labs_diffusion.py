"""Nemotron-Labs-Diffusion's sampler: its steps in float64, unequal prompts, ends, statistics, hooks and hosts."""

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
from dlm_lens.training.losses import masked_loss
from dlm_lens.training.objective import MaskedDiffusionLoss, Noised
from dlm_lens.training.sources import Rows
from tests.bridging.cases import YARN
from tests.reference import forward64
from tests.sampling.block_families import PROMPTS, Alone, check_ends, check_hosts, check_received_attention, sharp
from tests.sampling.interrupted import resumed_as_unbroken
from tests.sampling.test_likelihood_blocks import ANSWER, PROMPT

RUN: dict[str, Any] = {"gen_length": 11, "block_length": 4, "threshold": 0.1, "seed": 1, "stop_tokens": ()}


def scaled() -> Any:
    """A sharp network with scaled queries."""
    return sharp("nemotron_labs_diffusion", rope_parameters=YARN)


def visible_to(positions: int, start: int, stop: int | None = None) -> Tensor:
    """Which query sees which key of a text whose block begins at `start`: causal, and the block both ways."""
    where = torch.arange(positions)
    block = (where >= start) & (where < (positions if stop is None else stop))
    return ((where <= where[:, None]) | (block & block[:, None]))[None, None]


def step64(model: Any, run: dl.DenoisingRun, step: int, row: int, **options: Any) -> dict[str, Tensor]:
    """The row alone at a step, without padding, in float64."""
    (start, stop), padding = run.spans[step], int(run.padding[row])
    ids = run.canvases[step, row : row + 1, padding:stop]
    visible = visible_to(stop - padding, start - padding)
    return forward64(model, ids, visible=visible & options.pop("seen", True), **options)


def alone(model: Any) -> Alone:
    """A row at a step for `block_families`."""

    def found(run: dl.DenoisingRun, step: int, row: int) -> tuple[slice, Tensor, dict[str, Tensor]]:
        (start, stop), padding = run.spans[step], int(run.padding[row])
        visible = visible_to(stop - padding, start - padding)
        return slice(padding, stop), visible, step64(model, run, step, row)

    return found


def first_steps(run: dl.DenoisingRun) -> list[int]:
    """The steps that decide the first token of a block."""
    return [step for step, (start, stop) in enumerate(run.spans) if stop == start + 1]


def test_steps_are_those_of_a_network_in_float64() -> None:
    model = scaled()
    run = dl.denoise(model, PROMPTS, **RUN)
    mask, several, firsts = torch.tensor(model.config.mask_token_id), 0, first_steps(run)
    assert len(firsts) == 3
    for step in range(run.steps):
        start, stop = run.spans[step]
        for row in range(3):
            logits = step64(model, run, step, row)["logits"][0]
            likely = logits.softmax(-1)
            masks = (run.masked[step, row] & (torch.arange(run.tokens.shape[1]) < stop)).nonzero().flatten()
            assert run.confidence[step, row].isfinite().nonzero().flatten().equal(masks)
            if not len(masks):
                continue
            assert masks.min() >= start
            outputs = masks - int(run.padding[row]) - int(step in firsts)
            tokens = likely[outputs].index_fill(-1, mask, 0).argmax(-1)
            assert run.proposals[step, row, masks].equal(tokens)
            confidence = likely[outputs].gather(-1, tokens[:, None]).squeeze(-1)
            torch.testing.assert_close(run.confidence[step, row, masks].double(), confidence, atol=1e-5, rtol=1e-4)
            chosen = confidence >= 0.1
            chosen[confidence.argmax()] = True
            assert run.unmasked[step, row].nonzero().flatten().equal(masks[chosen])
            several += int(chosen.sum()) > 1
    assert several > 3
    assert run.counts.amax() < 4  # not all of a block at once
    assert run.masks_left.tolist() == [0, 0, 0]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"parallel": False}, {"block_length": 1}])
def test_a_row_is_what_it_is_alone_and_the_cache_is_exact(options: dict[str, Any]) -> None:
    model, given = scaled(), RUN | options
    together = dl.denoise(model, PROMPTS, **given)
    whole = dl.denoise(model, PROMPTS, **given, use_cache=False)
    assert whole.canvases.equal(together.canvases)
    torch.testing.assert_close(whole.confidence, together.confidence, atol=1e-5, rtol=1e-4)
    for row, prompt in enumerate(PROMPTS):
        alone, kept = dl.denoise(model, [prompt], **given), together.attention_mask[row]
        assert together.tokens[row, kept].equal(alone.tokens[0])
        # A step at which only other rows have masks is none of the row alone.
        own = together.counts[:, row] > 0
        assert together.unmasked[own, row][:, kept].equal(alone.unmasked[:, 0])


def test_one_token_a_step_and_the_numbers_of_steps() -> None:
    run = dl.denoise(scaled(), PROMPTS[0], **RUN | {"parallel": False})
    assert run.counts.eq(1).all()
    assert run.steps == 11
    assert first_steps(run) == [0, 4, 8]
    assert dl.denoise(scaled(), PROMPTS[0], **RUN | {"threshold": 0.0}).counts[:, 0].tolist() == [1, 3, 1, 3, 1, 2]
    ones = dl.denoise(scaled(), PROMPTS[0], **RUN | {"block_length": 1})
    assert ones.spans == tuple((7 + step, 8 + step) for step in range(11))


def test_blocks_of_one_are_the_autoregressive_reading_of_the_weights() -> None:
    """With blocks of one every token is the next one: what the same weights decode as an AR model."""
    model, ar = (
        scaled(),
        tiny("causal", model_type="nemotron_labs_diffusion_ar", rope_parameters=YARN),
    )
    ar.load_state_dict(model.state_dict())
    run = dl.denoise(model, PROMPTS, **RUN | {"block_length": 1})
    ar.config.eos_token_id = None
    decoded = dl.denoise(ar, PROMPTS, gen_length=11)
    assert run.tokens.equal(decoded.tokens)
    torch.testing.assert_close(run.confidence.amax(-1), decoded.confidence.amax(-1), atol=1e-5, rtol=1e-4)


def test_values_out_of_range_are_refused() -> None:
    model = tiny("nemotron_labs_diffusion")
    for name in ("block_length", "gen_length"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            dl.denoise(model, "w5", **RUN | {name: 0})
    with pytest.raises(ValueError, match=r"threshold is 1\.5; it is a probability from 0 to 1"):
        dl.denoise(model, "w5", **RUN | {"threshold": 1.5})
    with pytest.raises(ValueError, match="has no setting 'steps'"):
        dl.denoise(model, "w5", steps=4, gen_length=8)
    with pytest.raises(ValueError, match="gen_length 11 is no multiple of block_length 4"):
        dl.denoise(model, "w5", **RUN, reference_quirks=True)
    with pytest.raises(ValueError, match=r"takes no padding, and these prompts have \[7, 3, 10\] tokens"):
        dl.denoise(model, PROMPTS, **RUN | {"gen_length": 8}, reference_quirks=True)


def test_a_stop_token_ends_a_row_once_nothing_before_it_is_masked() -> None:
    model = scaled()
    run, stop = check_ends(model, RUN)
    for row in range(3):
        if bool((run.tokens[row, run.prompt_length :] == stop).any()):
            alone = dl.denoise(model, PROMPTS[row], **RUN | {"stop_tokens": [stop]})
            assert alone.steps <= run.steps
            assert int(run.counts[:, row].sum()) == int(alone.counts.sum())


@pytest.mark.parametrize("options", [{}, {"reference_quirks": True, "gen_length": 12}])
def test_a_recording_is_stored_and_resumed(options: dict[str, Any], tmp_path: Path) -> None:
    model, given = scaled(), RUN | options
    prompts = [PROMPTS[0], PROMPTS[2][:7]] if options else PROMPTS
    free = dl.denoise(model, prompts, **given)
    given["stop_tokens"] = [int(free.tokens[0, free.prompt_length + 1])]
    whole = resumed_as_unbroken(model, prompts, tmp_path / "rec", reducers=[dl.ValueNorm()], **given)
    assert whole.run.steps >= 5


def test_received_attention_and_its_expectation_count_what_each_query_sees() -> None:
    model = scaled()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    assert recording.run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    check_received_attention(model, recording, alone(model))


@pytest.mark.parametrize("queries", ["masked", "unmasked", "prompt", "block"])
def test_classes_of_queries_are_counted_with_what_they_see(queries: Any) -> None:
    model = scaled()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(queries=queries, min_viewers=1)], **RUN)
    run, facts = recording.run, recording.facts
    for step in (0, 1, 2, run.steps - 1):
        start, stop = run.spans[step]
        where = torch.arange(run.tokens.shape[1])
        chosen = {
            "masked": run.masked[step], "unmasked": ~run.masked[step], "prompt": ~run.answer,
            "block": ((where >= start) & (where < stop)).expand(3, -1),
        }[queries]  # fmt: skip
        for row in range(3):
            inside = slice(int(run.padding[row]), stop)
            visible = visible_to(stop - inside.start, start - inside.start)[0, 0].double()
            weights = chosen[row, inside].double()[:, None] / visible.sum(-1, keepdim=True)
            torch.testing.assert_close(
                facts.expected(queries)[step, row, inside].double(),
                (visible * weights).sum(0),
                atol=1e-5,
                rtol=1e-5,
            )
            counted = (visible * chosen[row, inside][:, None]).sum(0)
            assert facts.viewers(queries)[step, row, inside].tolist() == counted.tolist()


@torch.no_grad()
def test_a_recorded_pass_sees_the_whole_canvas() -> None:
    model = scaled()
    ids = torch.randint(5, 40, (2, 9))
    with dl.record_forward(model, [dl.ReceivedAttention(min_viewers=1)]) as recording:
        model(ids)
    assert recording.viewers().eq(9).all()
    found = recording.received_sums()[0, 0, 1].double()
    torch.testing.assert_close(found, forward64(model, ids[:1])["pattern1"][0].sum(-2), atol=2e-5, rtol=2e-4)


def test_hooks_act_in_every_row_as_alone() -> None:
    model, seen = scaled(), list[Tensor]()

    def keep(step: int, canvas: Tensor, logits: Tensor) -> None:
        seen.append(logits.clone())

    run = dl.denoise(model, PROMPTS[1:2], hooks=[mask_positions(2)], on_logits=keep, **RUN)
    for step in range(run.steps):
        shown = torch.arange(run.spans[step][1]) != 2
        logits = step64(model, run, step, 0, seen=shown)["logits"][0]
        found = seen[step][0, : run.spans[step][1]].double()
        if step in first_steps(run):  # the output before predicts
            found, logits = found[1:], logits[:-1]
        torch.testing.assert_close(found, logits, atol=2e-5, rtol=2e-4)
    # In float64, so that equal sinks are not chosen by the batch's rounding.
    model = model.double()
    together = dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], **RUN)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], hooks=[mask_top_sinks(1)], **RUN)
        assert together.tokens[row][together.attention_mask[row]].equal(alone.tokens[0])
    assert not together.tokens.equal(dl.denoise(model, PROMPTS, **RUN).tokens)


def test_hosts_run_the_same() -> None:
    model = scaled()
    check_hosts(model, scaled(), RUN, alone(model))


def test_the_lens_reads_the_output_that_predicts() -> None:
    model = scaled()
    run = dl.denoise(model, PROMPTS, **RUN)
    lens, firsts, counted = dl.logit_lens(model, run), first_steps(run), [0, 0]
    places = zip(*(getattr(lens, name).tolist() for name in ("step", "batch", "position", "predicts")), strict=True)
    for entry, (step, row, place, predicts) in enumerate(places):
        if not lens.predicted[entry]:
            continue
        assert predicts == place + int(step in firsts)
        likely = step64(model, run, step, row)["logits"][0, place - int(run.padding[row])].softmax(-1)
        torch.testing.assert_close(
            lens.top_probabilities[entry, -1, 0].double(), likely.max(), atol=1e-5, rtol=1e-4
        )
        assert float(lens.kl[entry, -1]) < 1e-5
        counted[int(step in firsts)] += 1
    assert counted[0] > 20
    assert counted[1] == 9


def test_a_mask_that_is_put_back_is_decoded_again() -> None:
    model = scaled()
    mask, free = model.config.mask_token_id, dl.denoise(model, PROMPTS[2], **RUN | {"parallel": False})

    def back(step: int, canvas: Tensor) -> Tensor | None:
        if step != 2:
            return None
        canvas[:, free.prompt_length] = mask  # the first of the block, which its own output predicts now
        return canvas

    run = dl.denoise(model, PROMPTS[2], **RUN | {"parallel": False}, on_canvas=back)
    assert run.masked[2, 0, free.prompt_length]
    assert run.masks_left.tolist() == [0]
    assert run.steps == free.steps
    assert run.counts[3].tolist() == [2]  # the last step of the block


def blocks64(length: int) -> list[tuple[int, int]]:
    """The blocks of the answer."""
    end = len(PROMPT + ANSWER)
    return [(start, min(start + length, end)) for start in range(len(PROMPT), end, length)]


def noisy64(model: Any, masked: list[int], start: int, stop: int) -> Tensor:
    """Logits of a noisy block after the clean text before it, in float64."""
    canvas = [model.config.mask_token_id if i in masked else (PROMPT + ANSWER)[i] for i in range(stop)]
    return forward64(model, torch.tensor([canvas]), visible=visible_to(stop, start))["logits"][0]


@pytest.mark.parametrize("length", [1, 4, 32])
def test_likelihoods_are_those_of_blocks_after_a_causal_context(length: int) -> None:
    model, options, bound = (
        scaled(),
        {} if length == 32 else {"block_length": length},
        0.0,
    )
    for start, stop in blocks64(length):
        for mask in product([False, True], repeat=stop - start):
            masked = [start + i for i, flag in enumerate(mask) if flag]
            if masked:
                likely = noisy64(model, masked, start, stop).log_softmax(-1)
                each = sum(float(likely[i, (PROMPT + ANSWER)[i]]) for i in masked)
                bound += each / len(masked) / comb(stop - start, len(masked))
    found = dl.log_likelihood(model, PROMPT, ANSWER, samples=2048, strata=16, seed=5, **options)
    # 128 independent estimates, an interval of 4 standard errors; one mask a block has no variance.
    error = float(found.standard_error)
    assert float(found.value) == pytest.approx(bound, abs=4 * error + 1e-4)
    assert error < 0.02 * abs(bound)
    assert found.settings["block_length"] == length


def test_the_chain_rule_predicts_every_token_in_its_block() -> None:
    model = scaled()
    found = dl.log_likelihood(model, PROMPT, ANSWER, "chain_rule", block_length=4)
    for start, stop in blocks64(4):
        for i in range(start, stop):
            likely = noisy64(model, list(range(i, stop)), start, stop).log_softmax(-1)
            wanted = -float(likely[i, (PROMPT + ANSWER)[i]])
            assert float(found.losses[0][i - len(PROMPT)]) == pytest.approx(wanted, rel=1e-4)


def test_a_greedy_completion_decodes_block_by_block() -> None:
    model, text = scaled(), PROMPT + [0] * len(ANSWER)
    mask = model.config.mask_token_id
    found = dl.log_likelihood(model, [PROMPT, PROMPT], [ANSWER, ANSWER[:3]], "greedy_completion", block_length=4)
    for start, stop in blocks64(4):
        left = list(range(start, stop))
        while left:
            canvas = torch.tensor([[mask if i in left else text[i] for i in range(stop)]])
            logits = forward64(model, canvas, visible=visible_to(stop, start))["logits"][0, left]
            likely = logits.softmax(-1).index_fill(-1, torch.tensor(mask), 0)
            best = int(likely.amax(-1).argmax())
            text[left[best]] = int(likely[best].argmax())
            del left[best]
    assert found.completions[0].tolist() == text[len(PROMPT) :]
    (alone,) = dl.log_likelihood(model, PROMPT, ANSWER[:3], "greedy_completion", block_length=4).completions
    assert found.completions[1].equal(alone)


@pytest.mark.parametrize("length", [4, 32])
@pytest.mark.parametrize("sampler", ["nemotron_labs_diffusion", "efficient_dlm"])
def test_the_training_loss_has_a_causal_clean_copy(sampler: str, length: int) -> None:
    """Blocks over [x_t, x_0], against float64 block by block; as the authors train, whichever sampler decodes."""
    model = sharp("nemotron_labs_diffusion", rope_parameters=YARN, sampler=sampler)
    tokens = torch.tensor([PROMPT + ANSWER])
    masked = torch.tensor([[False] * 3 + [True, False, True, True, False, True]])
    answer = torch.tensor([[False] * 3 + [True] * 6])
    rows = Rows(tokens, torch.ones_like(answer), answer, torch.zeros_like(answer))
    objective = MaskedDiffusionLoss(block_length=length).for_model(model, 1)
    one = torch.ones(1, dtype=torch.float64)
    asked = objective.loss_arguments(rows, Noised(masked, one, one, answer))
    with torch.no_grad():
        loss = masked_loss(model, **{name: value for name, value in asked.items() if name != "count"})
    wanted = 0.0
    for start, stop in blocks64(length):
        chosen = [i for i in range(start, stop) if masked[0, i]]
        likely = noisy64(model, chosen, start, stop).log_softmax(-1)
        wanted -= sum(float(likely[i, tokens[0, i]]) for i in chosen)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    own = MaskedDiffusionLoss().for_model(model, 1)
    assert (own.block_length, own.blocks_from_text) == (32, False)


@pytest.mark.parametrize(("normalisation", "size"), [("token", 1.0), ("sequence", 6.0)])
def test_the_ar_loss_is_that_of_the_causal_clean_copy(normalisation: Any, size: float) -> None:
    """0.5 times the AR loss of the answer beside that of diffusion, in two rows, one padded; against float64."""
    model = scaled()
    tokens = torch.tensor([PROMPT + ANSWER, [7, *ANSWER, 0, 0]])
    visible = torch.tensor([[True] * 9, [True] * 7 + [False] * 2])
    answer = torch.tensor([[False] * 3 + [True] * 6, [False] + [True] * 6 + [False] * 2])
    masked = torch.zeros(2, 9, dtype=torch.bool)
    masked[0, [4, 8]] = masked[1, 5] = True
    rows, two = Rows(tokens, visible, answer, torch.zeros_like(answer)), torch.full((2,), 2.0, dtype=torch.float64)
    losses = []
    for weight in (0.0, 0.5):
        objective = MaskedDiffusionLoss(block_length=4, ar_weight=weight, normalisation=normalisation)
        asked = objective.for_model(model, 2).loss_arguments(rows, Noised(masked, two / 4, two, answer))
        with torch.no_grad():
            losses.append(
                float(masked_loss(model, **{name: value for name, value in asked.items() if name != "count"}))
            )
    wanted = 0.0
    for row, first in ((0, 3), (1, 1)):
        likely = forward64(model, tokens[row : row + 1, : first + 6], causal=True)["logits"][0].log_softmax(-1)
        wanted -= sum(float(likely[i - 1, tokens[row, i]]) for i in range(first, first + 6))
    assert losses[1] - losses[0] == pytest.approx(0.5 * wanted / size, rel=1e-5)
    with pytest.raises(ValueError, match=r"ar_weight is 0\.5, and a .* with block_length=0 has no clean"):
        MaskedDiffusionLoss(block_length=0, ar_weight=0.5).for_model(model, 2)
    with pytest.raises(ValueError, match="with block_length=4 has no clean copy that attends causally"):
        MaskedDiffusionLoss(block_length=4, ar_weight=0.5).for_model(tiny("sdar"), 2)
    with pytest.raises(ValueError, match="ar_weight is -1; it must be 0"):
        MaskedDiffusionLoss(ar_weight=-1)
