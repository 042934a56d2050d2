"""SDAR's sampler: unequal prompts, statistics, hooks and hosts, against a float64 network without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions, mask_tokens, mask_top_sinks
from dlm_lens.sampling.samplers.sdar import SdarSettings, SelectAbove, SelectBounded, SelectFirst
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.interrupted import resumed_as_unbroken
from tests.sampling.test_likelihood_blocks import ANSWER, PROMPT, blocks_of, bound64, logits64

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
RUN: dict[str, Any] = {"gen_length": 9, "seed": 1, "temperature": 0.7, "threshold": 0.3, "stop_tokens": ()}


def own_block(run: dl.DenoisingRun, step: int, row: int) -> tuple[int, int]:
    """Start and stop of the row's block at a step, counted from its first token."""
    padding, width = int(run.padding[row]), int(run.settings["block_length"])
    number = (run.prompt_length - padding) // width + run.blocks[step]
    return padding + number * width, min(padding + (number + 1) * width, run.tokens.shape[1])


def alone64(model: Any, run: dl.DenoisingRun, step: int, row: int, hidden: int | None = None) -> dict[str, Tensor]:
    """Everything that a float64 network computes of one row at a step, up to the end of its block."""
    padding, (_, stop) = int(run.padding[row]), own_block(run, step, row)
    of = [place // int(run.settings["block_length"]) for place in range(stop - padding)]
    visible = torch.tensor([[key <= query for key in of] for query in of])[None, None]
    if hidden is not None:
        visible[..., hidden] = False
    return forward64(model, run.canvases[step, row, padding:stop][None], visible=visible)


def active(run: dl.DenoisingRun, step: int, row: int) -> bool:
    """Whether the row still has a block: rows whose texts end with a whole block need one block less."""
    start, _ = own_block(run, step, row)
    return start < run.tokens.shape[1]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "remasking", ["low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded"]
)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.8}, {"steps_per_block": 2}])
def test_a_row_is_what_it_is_alone(remasking: str, options: dict[str, Any], use_cache: bool) -> None:
    model, given = tiny("sdar"), RUN | {"remasking": remasking, "use_cache": use_cache} | options
    together = dl.denoise(model, PROMPTS, **given)
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **given)
        kept = together.attention_mask[row]
        # A row waits while others decode their block, so that steps at which nothing of it changes are left out.
        mine = [
            canvas
            for canvas, step in zip(together.canvases[:, row, kept], [True, *together.counts[:, row]], strict=True)
            if step
        ]
        assert torch.stack(mine).equal(alone.canvases[:, 0])
        assert [count for count in together.counts[:, row].tolist() if count] == alone.counts[:, 0].tolist()
    assert len({tuple(span) for span in together.spans}) == 3


def test_confidences_are_those_of_a_float64_network() -> None:
    model = tiny("sdar")
    for use_cache in (True, False):
        run = dl.denoise(model, PROMPTS, **RUN | {"temperature": 0.0, "use_cache": use_cache})
        for step in range(run.steps):
            for row in range(3):
                known = run.confidence[step, row].isfinite()
                if not active(run, step, row):
                    assert not known.any()
                    continue
                (start, stop), padding = own_block(run, step, row), int(run.padding[row])
                inside = torch.zeros_like(known)
                inside[start:stop] = True
                assert known.equal(run.masked[step, row] & inside)
                likely = alone64(model, run, step, row)["logits"][0].softmax(-1)[known[padding:stop]]
                proposed = likely.index_fill(-1, torch.tensor(model.config.mask_token_id), 0).argmax(-1)
                assert run.proposals[step, row][known].equal(proposed)
                expected = likely.gather(-1, proposed[:, None])[:, 0]
                found = run.confidence[step, row][known].double()
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_received_attention_and_its_expectation() -> None:
    model = tiny("sdar")
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    run, received = recording.run, dl.received_of(recording)
    assert run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    expected, viewers, widths = recording.expected(), recording.viewers(), set()
    for step in range(run.steps):
        for row in range(3):
            keep = torch.zeros(run.tokens.shape[1], dtype=torch.bool)
            if active(run, step, row) and run.masked[step:, row].any():  # a row without masks is over
                keep[int(run.padding[row]) : own_block(run, step, row)[1]] = True
                widths.add((run.spans[step][1], own_block(run, step, row)[1]))
                kept, count = alone64(model, run, step, row), int(keep.sum())
                of = [place // 4 for place in range(count)]
                visible = torch.tensor([[key <= query for key in of] for query in of])
                even = (visible.double() / visible.sum(-1, keepdim=True)).sum(0)
                torch.testing.assert_close(expected[step, row][keep].double(), even, atol=1e-5, rtol=1e-5)
                assert viewers[step, row][keep].tolist() == visible.sum(0).tolist()
                for layer in range(2):
                    sums = received.column_sums[step, row, layer][:, keep].double()
                    torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)
            assert not expected[step, row][~keep].any()
            assert received.values[step, row, ..., ~keep].isnan().all()
    assert any(seen != own for seen, own in widths)
    again = dl.received_over_steps(model, run, min_viewers=1)
    torch.testing.assert_close(again.values, received.values, equal_nan=True)
    # Batches of one row, whose blocks begin at other positions, joined.
    static = RUN | {
        "remasking": "low_confidence_static",
        "steps_per_block": 1,
        "temperature": 0.0,
        "gen_length": 10,
    }
    whole, parts = (
        dl.record(
            model, [PROMPTS[0], [5, 6, 7, 8, 9]], [dl.ReceivedAttention(min_viewers=1)], batch_size=size, **static
        )
        for size in (None, 1)
    )
    assert parts.run.spans == whole.run.spans
    assert parts.expected().equal(whole.expected())
    torch.testing.assert_close(dl.received_of(parts).values, dl.received_of(whole).values, equal_nan=True)
    # A row of the batch taken out has the blocks that it had.
    assert recording.select(batch=1).expected()[:, 0].equal(expected[:, 1])


def test_hooks_act_in_every_row_as_alone() -> None:
    """Sinks are chosen from what a row's own queries pay; positions after its block do not count."""
    model, seen = tiny("sdar"), []
    greedy = RUN | {"temperature": 0.0}

    def keep(step: int, canvas: Tensor, logits: Tensor) -> None:
        seen.append(logits.clone())

    run = dl.denoise(model, PROMPTS[1:2], hooks=[mask_positions(2)], on_logits=keep, **greedy)
    for step in range(run.steps):
        logits = alone64(model, run, step, 0, hidden=2)["logits"][0]
        torch.testing.assert_close(seen[step][0, : len(logits)].double(), logits, atol=2e-5, rtol=2e-4)
    # `mask_positions` counts canvas positions; what a row's keys receive does not depend on the batch. In float64:
    # in float32 the two strongest keys of a random network can be equal to rounding, and rounding is the batch's.
    model = model.double()
    for hooks in ([mask_top_sinks(1)], [mask_top_sinks(2), mask_tokens("prompt")]):
        together = dl.denoise(model, PROMPTS, hooks=hooks, **greedy)
        for row, prompt in enumerate(PROMPTS):
            alone = dl.denoise(model, [prompt], hooks=hooks, **greedy)
            assert together.tokens[row][together.attention_mask[row]].equal(alone.tokens[0])
    assert not together.tokens.equal(dl.denoise(model, PROMPTS, **greedy).tokens)


def test_hosts_run_the_same() -> None:
    model = tiny("sdar")
    plain = dl.denoise(model, PROMPTS, **RUN)
    hooked = dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        shapes = [].save()
        for _ in tracer.steps[:]:
            shapes.append(tuple(lm.layers[0].attn.pattern.shape))
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    assert [shape[-1] for shape in shapes] == [span[1] for span in plain.spans]
    with lm.generate(PROMPTS, **RUN) as tracer:
        for step in tracer.steps[:]:
            for layer in lm.layers:
                layer.attn.apply(mask_top_sinks(1), step)
        edited = tracer.result.save()
    assert edited.canvases.equal(hooked.canvases)
    tl = dl.bridge(tiny("sdar"))
    assert tl.denoise(PROMPTS, **RUN).canvases.equal(plain.canvases)
    assert tl.denoise(PROMPTS, hooks=[mask_top_sinks(1)], **RUN).canvases.equal(hooked.canvases)


def test_a_recording_is_stored_and_resumed(tmp_path: Path) -> None:
    whole = resumed_as_unbroken(tiny("sdar"), PROMPTS, tmp_path / "rec", reducers=[dl.ValueNorm()], **RUN)
    assert whole.run.steps < 12


def test_the_lens_reads_each_row_as_alone() -> None:
    model = tiny("sdar")
    run = dl.denoise(model, PROMPTS, **RUN)
    lens = dl.logit_lens(model, run)
    known: list[Tensor] = []
    places = zip(
        lens.step.tolist(), lens.batch.tolist(), lens.position.tolist(), lens.predicted.tolist(), strict=True
    )
    for entry, (step, row, place, predicted) in enumerate(places):
        start, stop = own_block(run, step, row)
        assert int(run.padding[row]) <= place < stop or not active(run, step, row)
        assert not predicted or start <= place
        if not predicted:
            continue
        likely = alone64(model, run, step, row)["logits"][0, place - int(run.padding[row])].softmax(-1)
        torch.testing.assert_close(
            lens.top_probabilities[entry, -1, 0].double(), likely.max(), atol=1e-5, rtol=1e-5
        )
        known.append(lens.kl[entry, -1])
    assert len(known) == int((run.masked[:-1] & run.in_block).sum())
    assert torch.stack(known).abs().max() < 1e-5


def test_likelihoods_have_the_blocks_of_the_text() -> None:
    """The prompt of three tokens shares its block with the answer's first token."""
    model = tiny("sdar")
    assert blocks_of(4, 0) == [(3, 4), (4, 8), (8, 9)]
    got = dl.log_likelihood(model, PROMPT, ANSWER, "chain_rule")
    for start, stop in blocks_of(4, 0):
        for i in range(start, stop):
            canvas = (PROMPT + ANSWER)[:i] + [model.config.mask_token_id] * (stop - i)
            wanted = -float(logits64(model, canvas, 4, 0).log_softmax(-1)[i, ANSWER[i - 3]])
            assert float(got.losses[0][i - 3]) == pytest.approx(wanted, rel=1e-5)
    estimate = dl.log_likelihood(model, PROMPT, ANSWER, samples=1024, strata=16, seed=5)
    # 64 independent estimates, an interval of 4 standard errors.
    assert float(estimate.value) == pytest.approx(bound64(model, 4, 0), abs=4 * float(estimate.standard_error))


def test_a_row_ends_with_the_block_that_has_a_stop_token() -> None:
    model, greedy = tiny("sdar"), RUN | {"temperature": 0.0, "remasking": "sequential", "threshold": 0.85}
    run = dl.denoise(model, PROMPTS, **greedy)
    # Row 1's first block has its prompt's rest (none: 3 tokens, one mask) and one answer token.
    stop = int(run.tokens[1, run.prompt_length + 2])
    ended = dl.denoise(model, PROMPTS, **greedy | {"stop_tokens": [stop]})
    for row, prompt in enumerate(PROMPTS):
        answer, padding = run.tokens[row, run.prompt_length :].tolist(), int(run.padding[row])
        kept = len(answer)
        if stop in answer:
            place = run.prompt_length - padding + answer.index(stop)
            kept = min(kept, (place // 4 + 1) * 4 - len(prompt))
        assert ended.tokens[row, run.prompt_length :][:kept].tolist() == answer[:kept]
        assert (ended.tokens[row, run.prompt_length :][kept:] == model.config.mask_token_id).all()
    assert ended.masks_left[1] > 0
    # By default the model's own ends stop a row.
    model.config.eos_token_id = stop
    assert dl.denoise(model, PROMPTS, **greedy | {"stop_tokens": None}).canvases.equal(ended.canvases)


def test_rules_by_hand() -> None:
    confidence = torch.tensor([[0.9, 0.2, 0.95, 0.86, -torch.inf], [0.1, 0.3, 0.2, 0.05, -torch.inf]])
    eligible = torch.tensor([[True, True, True, True, False], [True, True, False, True, False]])
    count = torch.tensor([1, 2])
    assert SelectAbove(0.85)(confidence, eligible, count).tolist() == [
        [True, False, True, True, False], [True, True, False, False, False],
    ]  # fmt: skip
    assert SelectFirst()(confidence, eligible, count).tolist() == [
        [True, False, False, False, False], [True, True, False, False, False],
    ]  # fmt: skip
    entropies = -torch.tensor([[0.1, 0.5, 0.05, 0.12, 9.0], [0.4, 0.3, 0.01, 0.5, 9.0]])
    # Row 0: 0.05 + 0.1 + 0.12 = 0.27 < 0.3, with 0.5 it is more; row 1: 0.3 is not below 0.3, but two are planned.
    assert SelectBounded(0.3)(entropies, eligible, count).tolist() == [
        [True, False, True, True, False], [True, True, False, False, False],
    ]  # fmt: skip


def test_the_last_planned_step_of_a_block_writes_what_was_masked_again() -> None:
    def hide(step: int, canvas: Tensor) -> Tensor:
        return canvas.index_fill(-1, torch.arange(4, 8), 63) if step == 1 else canvas

    given = RUN | {"gen_length": 8, "block_length": 4, "remasking": "sequential", "steps": 4}
    run = dl.denoise(tiny("sdar"), [[1, 2, 3, 4]], on_canvas=hide, **given)
    assert run.steps == 4  # two for each block
    assert run.counts[:, 0].tolist() == [2, 4, 2, 2]
    assert run.masks_left.tolist() == [0]


@pytest.mark.parametrize(
    ("options", "steps", "planned"),
    [({"steps_per_block": 3}, 3, [3, 3, 2]), ({}, 8, [1] * 8), ({"steps": 6}, 3, [3, 3, 2])],
)
def test_planned_numbers(options: dict[str, Any], steps: int, planned: list[int]) -> None:
    settings = SdarSettings(gen_length=16, block_length=8, **options)
    assert settings.block_steps == steps
    assert [settings.planned(step) for step in range(steps)] == planned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remasking": "origin"}, "none of SDAR's: low_confidence_dynamic"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"threshold": 1.5}, "threshold is 1.5; it is a probability"),
        ({"gen_length": 0}, "gen_length is 0"),
        ({"steps_per_block": 0}, "steps_per_block is 0"),
        ({"confidence_threshold": 0.9}, "confidence_threshold is threshold here"),
        ({"reference_quirks": True, "remasking": "entropy_bounded"}, "the authors' code stops with an error"),
        ({"reference_quirks": True}, r"these prompts have \[7, 3, 10\] tokens; denoise them one at a time"),
        ({"use_cache": True, "hooks": [mask_top_sinks(1)]}, "use_cache=True with hooks"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dl.denoise(tiny("sdar"), PROMPTS, **RUN | options)
