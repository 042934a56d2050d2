"""WeDLM's sampler: its distribution in float64, windows, unequal prompts, stops, statistics, hooks and hosts."""

from itertools import product
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions, mask_tokens, mask_top_sinks
from dlm_lens.sampling.noise import RowNoise
from dlm_lens.sampling.samplers.wedlm import WeDLMPropose, WeDLMSettings
from dlm_lens.sampling.settings import SpecialIds
from dlm_lens.testing import tiny
from dlm_lens.training.losses import masked_loss
from dlm_lens.training.objective import MaskedDiffusionLoss, Noised
from dlm_lens.training.sources import Rows
from tests.reference import forward64
from tests.sampling.interrupted import resumed_as_unbroken
from tests.sampling.test_likelihood_blocks import ANSWER, PROMPT

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
RUN: dict[str, Any] = {
    "gen_length": 12, "window_length": 5, "entropy_threshold": 2.9, "position_penalty": 0.05, "temperature": 0.7,
    "seed": 1, "stop_tokens": (),
}  # fmt: skip


def sharp(**fields: Any) -> Any:
    """A tiny network whose entropies differ: some masks are below the threshold and others above."""
    model = tiny("wedlm", **fields)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight.copy_(0.35 * torch.randn(weight.shape, generator=generator))
    return model


def window_of(run: dl.DenoisingRun, step: int, row: int) -> list[int]:
    """The masks of a row that the step sees, by hand."""
    masks = run.masked[step, row].nonzero().flatten().tolist()
    return [place for place in masks if place < masks[0] + run.settings["window_length"]] if masks else []


def order_of(run: dl.DenoisingRun, step: int, row: int) -> list[int]:
    """The positions of a row that the step sees, in the physical order of the authors' code."""
    observed = (run.attention_mask[row] & ~run.masked[step, row]).nonzero().flatten().tolist()
    return observed + window_of(run, step, row)


def reordered64(model: Any, run: dl.DenoisingRun, step: int, row: int) -> tuple[list[int], dict[str, Tensor]]:
    """The row's tokens moved into the physical order, under plain causal attention, in float64."""
    order, padding = order_of(run, step, row), int(run.padding[row])
    ids, positions = run.canvases[step, row, order], torch.tensor([order]) - padding
    return order, forward64(model, ids[None], causal=True, positions=positions)


def test_steps_are_those_of_a_reordered_network_in_float64() -> None:
    model = sharp()
    run = dl.denoise(model, PROMPTS, **RUN | {"temperature": 0.0})
    several = 0
    for step in range(run.steps):
        for row in range(3):
            masks = window_of(run, step, row)
            assert run.confidence[step, row].isfinite().nonzero().flatten().tolist() == masks
            if not masks:
                continue
            order, kept = reordered64(model, run, step, row)
            logits = kept["logits"][0, len(order) - len(masks) :]
            entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
            penalised = entropy + 0.05 * (torch.tensor(masks) - masks[0])
            torch.testing.assert_close(-run.confidence[step, row, masks].double(), penalised, atol=1e-5, rtol=1e-5)
            likely = logits.index_fill(-1, torch.tensor(model.config.mask_token_id), -torch.inf).argmax(-1)
            assert run.proposals[step, row, masks].equal(likely)
            filled = [place for place, value in zip(masks, penalised.tolist(), strict=True) if value < 2.9]
            filled = filled or [masks[int(penalised.argmin())]]
            assert run.unmasked[step, row].nonzero().flatten().tolist() == filled
            several += len(filled) > 1
    assert several > 3
    assert run.counts.amax() > 1 == run.counts[:2].amin()
    assert run.masks_left.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.8}, {"entropy_threshold": 0.0}, {"window_length": 50}],
)
def test_a_row_is_what_it_is_alone(options: dict[str, Any]) -> None:
    model, given = sharp(), RUN | options
    together = dl.denoise(model, PROMPTS, **given)
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(PROMPTS):
        alone, kept = dl.denoise(model, [prompt], **given), together.attention_mask[row]
        assert together.canvases[: alone.steps + 1, row, kept].equal(alone.canvases[:, 0])
        assert together.counts[: alone.steps, row].equal(alone.counts[:, 0])
        assert not together.counts[alone.steps :, row].any()


def test_rows_have_seeds_of_their_own() -> None:
    model, given = sharp(), RUN | {"seed": [4, 5], "temperature": 1.0}
    both = dl.denoise(model, [PROMPTS[0]] * 2, **given)
    assert not both.tokens[0].equal(both.tokens[1])
    assert both.tokens[1].equal(dl.denoise(model, PROMPTS[0], **RUN | {"seed": 5, "temperature": 1.0}).tokens[0])


def test_no_threshold_fills_one_mask_a_step_and_a_high_one_the_window() -> None:
    model = tiny("wedlm")
    one = dl.denoise(model, PROMPTS, **RUN | {"entropy_threshold": 0.0})
    assert one.counts.eq(1).all()
    assert one.steps == 12
    whole = dl.denoise(model, PROMPTS, **RUN | {"entropy_threshold": 100.0})
    assert whole.counts[:, 0].tolist() == [5, 5, 2]
    left = dl.denoise(model, PROMPTS, **RUN | {"position_penalty": 100.0})  # from left to right
    assert [row.nonzero().flatten().tolist() for row in left.unmasked[:, 0]] == [[10 + step] for step in range(12)]


@pytest.mark.parametrize("name", ["window_length", "gen_length"])
def test_values_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        dl.denoise(tiny("wedlm"), "w5", **RUN | {name: 0})
    with pytest.raises(ValueError, match="has no setting 'steps'"):
        dl.denoise(tiny("wedlm"), "w5", steps=4, gen_length=8)


def counted(settings: WeDLMSettings, logits: Tensor, draws: int = 40_000) -> Tensor:
    """Shares of the tokens that are proposed for one mask."""
    propose = WeDLMPropose(settings, RowNoise(tuple(range(1))), SpecialIds(mask=len(logits) - 1), False)
    here = torch.ones(1, draws, dtype=torch.bool)
    proposal = propose(torch.zeros(1, draws, dtype=torch.long), logits.expand(draws, -1), here, here)
    return proposal.tokens[0].bincount(minlength=len(logits)) / draws


def test_tokens_follow_the_filtered_softmax_of_the_scaled_logits() -> None:
    """top_k, then top_p, both of the unscaled logits, then the temperature; never [MASK]; by hand in float64."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.2, -1.0, 3.0])  # the last is [MASK]
    plain = logits[:5].double().softmax(-1)
    # The nucleus of the three likeliest: 0.5065 + 0.3072 = 0.8137 is above 0.8 with the second.
    three = logits[:3].double().softmax(-1)
    assert 0.8 < float(three[:2].sum()) < 0.83
    cases = [
        (WeDLMSettings(8, 16, temperature=1.0), plain),
        (WeDLMSettings(8, 16, temperature=0.5), (2 * logits[:5].double()).softmax(-1)),
        (WeDLMSettings(8, 16, temperature=1.0, top_k=3), three),
        (WeDLMSettings(8, 16, temperature=2.0, top_k=3, top_p=0.8), (logits[:2].double() / 2).softmax(-1)),
    ]
    for settings, expected in cases:
        found = counted(settings, logits)
        assert found[5] == 0
        wanted = torch.zeros(6, dtype=torch.float64)
        wanted[: len(expected)] = expected
        # Four standard errors of a share of 1/2 in 40,000 draws.
        torch.testing.assert_close(found.double(), wanted, atol=0.01, rtol=0)


def test_the_confidence_is_the_entropy_before_temperature_and_filters() -> None:
    logits = torch.tensor([[3.0, 1.0, -2.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    here = torch.tensor([[False, True, False, True]])
    for settings in (WeDLMSettings(8, 16, temperature=0.1, top_k=1), WeDLMSettings(8, 16, temperature=0.0)):
        propose = WeDLMPropose(settings, RowNoise((0,)), SpecialIds(mask=3), False)
        confidence = propose(torch.zeros(1, 4, dtype=torch.long), logits, here, here).confidence
        likely = logits.double().softmax(-1)
        entropy = -(likely * likely.log()).sum(-1)
        expected = torch.tensor([-torch.inf, -entropy[0], -torch.inf, -(entropy[1] + 2 * 0.02)])
        torch.testing.assert_close(confidence[0].double(), expected.double(), atol=1e-6, rtol=1e-6)
    assert torch.special.entr(torch.tensor([[0.0, -torch.inf]]).softmax(-1)).sum() == 0  # a certain token


def test_a_stop_token_ends_a_row_once_nothing_before_it_is_masked() -> None:
    model = sharp()
    free = dl.denoise(model, PROMPTS, **RUN)
    answer = free.tokens[:, free.prompt_length :]
    stop = int(answer[0, 4])
    run = dl.denoise(model, PROMPTS, **RUN | {"stop_tokens": [stop]})
    for row in range(3):
        places = (answer[row] == stop).nonzero().flatten().tolist()
        # Steps are those of the free run, until the first of the stop tokens has no mask before it.
        ends = [
            step + 1
            for step in range(free.steps)
            if places and not free.masked[step + 1, row, : free.prompt_length + places[0] + 1].any()
        ]
        last = min([*ends, run.steps])
        assert run.canvases[: last + 1, row].equal(free.canvases[: last + 1, row])
        assert not run.counts[last:, row].any()
        if ends and bool(run.masks_left[row]):
            assert int(run.row_steps[row]) <= last
    assert run.masks_left[0] > 0
    assert run.steps <= free.steps


def test_the_reference_draws_for_one_row_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In some builds of torch a call for several rows draws other numbers than calls for each."""
    calls, plain = list[int](), torch.multinomial

    def counted_call(probabilities: Tensor, number: int, **options: Any) -> Tensor:
        calls.append(len(probabilities))
        return plain(probabilities, number, **options)

    monkeypatch.setattr(torch, "multinomial", counted_call)
    run = dl.denoise(sharp(), PROMPTS, **RUN, reference_quirks=True)
    each = [(step, row) for step in range(run.steps) for row in range(3) if run.counts[step, row]]
    assert calls == [len(window_of(run, *one)) for one in each]
    assert len(calls) > run.steps


def test_masks_in_a_prompt_are_filled_in_first() -> None:
    model = sharp()
    mask = model.config.mask_token_id
    prompt = torch.tensor([[5, mask, 6, 7, 8, 9, 10, 11, mask, 12]])
    run = dl.denoise(model, prompt, **RUN | {"entropy_threshold": 0.0, "position_penalty": 0.0})
    first = run.unmasked.int().argmax(0)[0]
    assert run.unmasked[0, 0].nonzero().flatten().tolist() == [1]  # the window of 5 holds no other mask
    assert run.unmasked[1, 0].nonzero().flatten().item() in range(8, 13)
    assert run.masks_left.tolist() == [0]
    assert len(first) == 22
    # At step 0 the hidden mask at 8 is not seen; what follows it keeps its position.
    observed = [0, *range(2, 8), 9]
    order = [*observed, 1]
    logits = forward64(model, run.canvases[0][:, order], causal=True, positions=torch.tensor([order]))["logits"][
        0, -1
    ]
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    assert float(-run.confidence[0, 0, 1]) == pytest.approx(float(entropy), rel=1e-5)
    with pytest.raises(ValueError, match="keeps a \\[MASK\\] in a prompt as a token"):
        dl.denoise(model, prompt, **RUN, reference_quirks=True)


def test_received_attention_is_that_of_the_moved_tokens_and_so_is_its_expectation() -> None:
    model = sharp()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    run, received = recording.run, dl.received_of(recording)
    assert run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    expected, viewers, hidden = recording.expected(), recording.viewers(), 0
    for step in range(run.steps):
        for row in range(3):
            if not run.running[step, row]:
                continue
            order, kept = reordered64(model, run, step, row)
            keep = torch.zeros(run.tokens.shape[1], dtype=torch.bool)
            keep[order] = True
            hidden += int((run.attention_mask[row] & ~keep).sum())
            visible = torch.ones(len(order), len(order)).tril().double()
            even = (visible / visible.sum(-1, keepdim=True)).sum(0)
            torch.testing.assert_close(expected[step, row, order].double(), even, atol=1e-5, rtol=1e-5)
            assert viewers[step, row, order].tolist() == visible.sum(0).tolist()
            for layer in range(2):
                sums = received.column_sums[step, row, layer][:, order].double()
                torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)
            assert not expected[step, row][~keep].any()
            assert received.values[step, row, ..., ~keep].isnan().all()
    assert hidden > 20
    again = dl.received_over_steps(model, run, min_viewers=1)
    torch.testing.assert_close(again.values, received.values, equal_nan=True)
    assert recording.select(batch=1).expected()[:, 0].equal(expected[:, 1])


@pytest.mark.parametrize("queries", ["masked", "unmasked", "prompt", "block"])
def test_classes_of_queries_are_counted_in_the_order_of_attention(queries: Any) -> None:
    model = sharp()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(queries=queries, min_viewers=1)], **RUN)
    run, facts, step = recording.run, recording.facts, 2
    chosen = {
        "masked": run.masked[step], "unmasked": ~run.masked[step], "prompt": ~run.answer,
        "block": run.in_block[step],
    }[queries]  # fmt: skip
    for row in range(3):
        order = order_of(run, step, row)
        visible = torch.ones(len(order), len(order)).tril().double() * chosen[row, order][:, None]
        even = (visible / torch.arange(1, len(order) + 1)[:, None]).sum(0)
        torch.testing.assert_close(facts.expected(queries)[step, row, order].double(), even, atol=1e-5, rtol=1e-5)
        assert facts.viewers(queries)[step, row, order].tolist() == visible.sum(0).tolist()
        pairs = facts.pairs()[step, row][order][:, order]
        assert pairs.equal(torch.ones_like(pairs).tril())
        assert facts.pairs()[step, row].sum() == pairs.sum()


@torch.no_grad()
def test_a_recorded_pass_has_all_masks_and_its_own_order() -> None:
    model = tiny("wedlm")
    ids = torch.randint(5, 40, (2, 9))
    ids[:, [2, 5, 6]] = model.config.mask_token_id
    with dl.record_forward(model, [dl.ReceivedAttention(min_viewers=1)]) as recording:
        model(ids)
    order = [0, 1, 3, 4, 7, 8, 2, 5, 6]
    visible = torch.ones(9, 9).tril()
    assert recording.viewers()[0, 0, order].tolist() == visible.sum(0).tolist()
    kept = forward64(model, ids[:1, order], causal=True, positions=torch.tensor([order]))
    found = recording.received_sums()[0, 0, 1][:, order].double()
    torch.testing.assert_close(found, kept["pattern1"][0].sum(-2), atol=2e-5, rtol=2e-4)


def test_hooks_act_in_every_row_as_alone() -> None:
    """Sinks are chosen from what a row's own queries pay; masks after the window do not count."""
    model, seen, greedy = sharp(), list[Tensor](), RUN | {"temperature": 0.0}

    def keep(step: int, canvas: Tensor, logits: Tensor) -> None:
        seen.append(logits.clone())

    run = dl.denoise(model, PROMPTS[1:2], hooks=[mask_positions(2)], on_logits=keep, **greedy)
    for step in range(run.steps):
        order = order_of(run, step, 0)
        visible = torch.ones(1, 1, len(order), len(order), dtype=torch.bool).tril()
        visible[..., order.index(2)] = False
        logits = forward64(model, run.canvases[step, :, order], visible=visible, positions=torch.tensor([order]))
        torch.testing.assert_close(seen[step][0, order].double(), logits["logits"][0], atol=2e-5, rtol=2e-4)
    # In float64, so that equal sinks are not chosen by the batch's rounding.
    model = model.double()
    for hooks in ([mask_top_sinks(1)], [mask_top_sinks(2), mask_tokens("prompt")]):
        together = dl.denoise(model, PROMPTS, hooks=hooks, **greedy)
        for row, prompt in enumerate(PROMPTS):
            alone = dl.denoise(model, [prompt], hooks=hooks, **greedy)
            assert together.tokens[row][together.attention_mask[row]].equal(alone.tokens[0])
    assert not together.tokens.equal(dl.denoise(model, PROMPTS, **greedy).tokens)


@pytest.mark.parametrize("fields", [{}, {"qk_norm": False, "attention_bias": True}])
def test_hosts_run_the_same(fields: dict[str, Any]) -> None:
    model = sharp(**fields)
    plain = dl.denoise(model, PROMPTS, **RUN)
    hooked = dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        valid = [].save()
        for step in tracer.steps[:]:
            valid.append((int(step), step.valid.clone(), lm.layers[0].attn.pattern))
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    for number, seen, pattern in valid:
        assert seen.equal(plain.seen_content[number])
        row = torch.zeros(seen.shape[1], dtype=torch.bool)
        row[order_of(plain, number, 1)] = True
        assert row.equal(seen[1])
        assert not pattern[1][:, :, ~row].any()
    with lm.generate(PROMPTS, **RUN) as tracer:
        for step in tracer.steps[:]:
            for layer in lm.layers:
                layer.attn.apply(mask_top_sinks(1), step)
        edited = tracer.result.save()
    assert edited.canvases.equal(hooked.canvases)
    tl = dl.bridge(sharp(**fields))
    assert tl.denoise(PROMPTS, **RUN).canvases.equal(plain.canvases)
    assert tl.denoise(PROMPTS, hooks=[mask_top_sinks(1)], **RUN).canvases.equal(hooked.canvases)


@pytest.mark.parametrize("options", [{}, {"reference_quirks": True}])
def test_a_recording_is_stored_and_resumed(options: dict[str, Any], tmp_path: Path) -> None:
    model, given = sharp(), RUN | options
    # The first row ends before the others.
    free = dl.denoise(model, PROMPTS, **given)
    given["stop_tokens"] = [int(free.tokens[0, free.prompt_length + 2])]
    whole = resumed_as_unbroken(model, PROMPTS, tmp_path / "rec", reducers=[dl.ValueNorm()], **given)
    assert whole.run.steps >= 5


def test_the_lens_reads_each_row_as_alone() -> None:
    model = sharp()
    run = dl.denoise(model, PROMPTS, **RUN)
    lens, known = dl.logit_lens(model, run), list[Tensor]()
    places = zip(
        lens.step.tolist(), lens.batch.tolist(), lens.position.tolist(), lens.predicted.tolist(), strict=True
    )
    for entry, (step, row, place, predicted) in enumerate(places):
        assert not predicted or place in window_of(run, step, row)
        if not predicted:
            continue
        order, kept = reordered64(model, run, step, row)
        likely = kept["logits"][0, order.index(place)].softmax(-1)
        torch.testing.assert_close(
            lens.top_probabilities[entry, -1, 0].double(), likely.max(), atol=1e-5, rtol=1e-5
        )
        known.append(lens.kl[entry, -1])
    assert len(known) == sum(len(window_of(run, step, row)) for step in range(run.steps) for row in range(3))
    assert torch.stack(known).abs().max() < 1e-5


def test_a_mask_that_is_put_back_is_decoded_again() -> None:
    model, given = sharp(), RUN | {"entropy_threshold": 2.4}
    mask, free = model.config.mask_token_id, dl.denoise(model, PROMPTS[2], **given)
    place = int(free.unmasked[0, 0].nonzero()[0])
    assert 4 < free.steps < 11  # as many steps as masks are planned

    def back(step: int, canvas: Tensor) -> Tensor | None:
        if step != 3:
            return None
        canvas[:, place] = mask
        return canvas

    run = dl.denoise(model, PROMPTS[2], **given, on_canvas=back)
    assert run.masked[3, 0, place]
    assert not run.masked[-1, 0].any()


def noisy64(model: Any, masked: list[int], start: int, stop: int) -> Tensor:
    """Logits of a noisy block after the clean text before it: moved into the physical order, in float64."""
    text = PROMPT + ANSWER
    order = [*range(start), *(i for i in range(start, stop) if i not in masked), *sorted(masked)]
    canvas = [model.config.mask_token_id if i in masked else text[i] for i in order]
    logits = forward64(model, torch.tensor([canvas]), causal=True, positions=torch.tensor([order]))["logits"][0]
    return logits[torch.tensor(order).argsort()]


def blocks64(length: int) -> list[tuple[int, int]]:
    """The blocks that hold the answer, counted from the text."""
    return [(start, min(start + length, 9)) for start in range(0, 9, length) if start + length > len(PROMPT)]


@pytest.mark.parametrize("length", [1, 4, 32])
def test_likelihoods_have_the_authors_blocks_and_order(length: int) -> None:
    """Every noisy block sees the clean text before it, and its own observed tokens first."""
    model, options = sharp(), {} if length == 32 else {"block_length": length}
    bound = 0.0
    for start, stop in blocks64(length):
        where = range(max(start, len(PROMPT)), stop)
        for mask in product([False, True], repeat=len(where)):
            masked = [i for i, flag in zip(where, mask, strict=True) if flag]
            if masked:
                likely = noisy64(model, masked, start, stop).log_softmax(-1)
                each = sum(float(likely[i, (PROMPT + ANSWER)[i]]) for i in masked)
                bound += each / len(masked) / comb(len(where), len(masked))
    found = dl.log_likelihood(model, PROMPT, ANSWER, samples=2048, strata=16, seed=5, **options)
    # 128 independent estimates, an interval of 4 standard errors; one mask a block has no variance.
    error = float(found.standard_error)
    assert float(found.value) == pytest.approx(bound, abs=4 * error + 1e-4)
    assert error < 0.02 * abs(bound)
    assert found.settings["block_length"] == length


@pytest.mark.parametrize("order", ["left_to_right", "right_to_left"])
def test_the_chain_rule_predicts_every_token_in_its_block(order: str) -> None:
    model = sharp()
    found = dl.log_likelihood(model, PROMPT, ANSWER, "chain_rule", order=order, block_length=4)
    for start, stop in blocks64(4):
        for i in range(max(start, len(PROMPT)), stop):
            masked = range(i, stop) if order == "left_to_right" else range(max(start, len(PROMPT)), i + 1)
            wanted = -float(noisy64(model, list(masked), start, stop).log_softmax(-1)[i, (PROMPT + ANSWER)[i]])
            assert float(found.losses[0][i - 3]) == pytest.approx(wanted, rel=1e-4)


def test_a_greedy_completion_is_the_run_without_a_penalty_in_one_window() -> None:
    """Of the most probable tokens, not of the lowest entropies: by hand."""
    model = sharp()
    (found,) = dl.log_likelihood(model, PROMPT, ANSWER, "greedy_completion").completions
    left, text = list(range(3, 9)), PROMPT + [0] * 6
    while left:
        observed = [i for i in range(9) if i not in left]
        order = observed + left
        canvas = torch.tensor([[text[i] for i in observed] + [model.config.mask_token_id] * len(left)])
        logits = forward64(model, canvas, causal=True, positions=torch.tensor([order]))["logits"][0, -len(left) :]
        likely = logits.softmax(-1).index_fill(-1, torch.tensor(model.config.mask_token_id), 0)
        best = int(likely.amax(-1).argmax())
        text[left[best]] = int(likely[best].argmax())
        del left[best]
    assert found.tolist() == text[3:]


@pytest.mark.parametrize("length", [0, 4])
def test_the_training_loss_is_that_of_the_same_order(length: int) -> None:
    """One pass over the canvas, or the authors' blocks over [x_t, x_0], against float64 block by block."""
    model = sharp()
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
    for start, stop in blocks64(length or 9):
        chosen = [i for i in range(start, stop) if masked[0, i]]
        likely = noisy64(model, chosen, start, stop).log_softmax(-1)
        wanted -= sum(float(likely[i, tokens[0, i]]) for i in chosen)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    own = MaskedDiffusionLoss().for_model(model, 1)
    assert (own.block_length, own.blocks_from_text) == (32, True)
