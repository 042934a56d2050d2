"""What a trace reads and edits, against an independent float64 model and loop."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import HOOK_POINTS
from dlm_lens.hooks import ablate, mask_top_sinks
from dlm_lens.testing import tiny
from tests.reference import Edit, forward64
from tests.tracing.reference import run64

IDS = [5, 9, 14, 3]
RUN = {"steps": 6, "gen_length": 8, "block_length": 4}
CLOSE = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture(scope="module")
def lm() -> dl.DiffusionLM:
    return dl.DiffusionLM(tiny("llada"))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), **CLOSE)


def same_run(run: Any, canvases: list[torch.Tensor]) -> None:
    assert run.canvases[:, 0].tolist() == [canvas[0].tolist() for canvas in canvases]


def test_the_reference_loop_is_the_library_s(lm: Any) -> None:
    canvases, _ = run64(lm._module, IDS, **RUN)
    same_run(dl.denoise(lm._module, IDS, **RUN), canvases)


@pytest.mark.parametrize("family", ["llada", "sink_qwen"])
def test_every_hook_point_at_every_step(family: str) -> None:
    lm = dl.DiffusionLM(tiny(family, **({"num_sinks": 1} if family == "sink_qwen" else {})))
    _, kept = run64(lm._module, IDS, **RUN)
    with lm.generate(IDS, **RUN) as tracer:
        found = [].save()
        for step in tracer.steps:
            values = {}
            for layer in range(2):
                attn = lm.layers[layer].attn
                for name in HOOK_POINTS:
                    values[f"{name}{layer}"] = getattr(attn, name).clone()
                values[f"resid{layer}"] = lm.layers[layer].output.clone()
            values["logits"] = lm.lm_head.output.clone()
            found.append(values)
        run = tracer.result.save()
    assert len(found) == run.steps == 6
    for seen, expected in zip(found, kept, strict=True):
        for name, value in seen.items():
            # sinks are removed after the head, so that the head's own output still has them
            theirs = expected[name]
            assert value.shape[-1] == theirs.shape[-1]
            close(value[:, -theirs.shape[1] :] if name == "logits" else value, theirs)


def scaled(value: torch.Tensor) -> torch.Tensor:
    return value * torch.linspace(0.2, 1.4, value.shape[-1], dtype=value.dtype)


def first_column(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[..., 1] = value[..., 1] * 0.1
    return value


@pytest.mark.parametrize("name", HOOK_POINTS)
def test_an_assignment_at_one_step_changes_the_rest_as_in_float64(lm: Any, name: str) -> None:
    edit: Edit = first_column if name == "pattern" else scaled
    steps = (1, 3)
    canvases, kept = run64(lm._module, IDS, **RUN, edits=lambda step: {(1, name): edit} if step in steps else {})
    clean, _ = run64(lm._module, IDS, **RUN)
    with lm.generate(IDS, **RUN) as tracer:
        logits = [].save()
        for step in tracer.steps[[1, 3]]:
            attn = lm.layers[1].attn
            setattr(attn, name, edit(getattr(attn, name)))
            logits.append(lm.lm_head.output.clone())
        run = tracer.result.save()
    for step, seen in zip(steps, logits, strict=True):
        close(seen, kept[step]["logits"])
    same_run(run, canvases)
    close(kept[0]["logits"], forward64(lm._module, clean[0])["logits"])
    assert not torch.allclose(kept[1]["logits"], forward64(lm._module, canvases[1])["logits"])


def without_third(v: torch.Tensor) -> torch.Tensor:
    return v * (torch.arange(v.shape[1]) != 2)[:, None, None]


def test_edits_in_place_are_the_same_as_assignments(lm: Any) -> None:
    canvases, _ = run64(lm._module, IDS, **RUN, edits=lambda step: {(0, "v"): without_third})
    with lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps:
            lm.layers[0].attn.v[:, 2] = 0
        run = tracer.result.save()
    same_run(run, canvases)


def test_a_hidden_key_in_the_scores(lm: Any) -> None:
    def hide(scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[..., 2] = torch.finfo(torch.float32).min
        return scores

    canvases, kept = run64(lm._module, IDS, **RUN, edits=lambda step: {(0, "scores"): hide} if step >= 2 else {})
    with lm.generate(IDS, **RUN) as tracer:
        patterns = [].save()
        for step in tracer.steps[2:]:
            lm.layers[0].attn.scores[..., 2] = torch.finfo(torch.float32).min
            patterns.append(lm.layers[0].attn.pattern)
        run = tracer.result.save()
    same_run(run, canvases)
    for index, pattern in enumerate(patterns):
        assert pattern[..., 2].abs().max() == 0
        close(pattern, kept[2 + index]["pattern0"])


def test_the_residual_stream_and_the_mlp(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[2]:
            before = lm.layers[1].input.clone().save()
            attention = lm.layers[1].attn.output[0].clone().save()
            mlp = lm.layers[1].mlp.output.clone().save()
            after = lm.layers[1].output.clone().save()
    close(before + attention + mlp, after)


def test_a_planted_token_and_a_new_mask(lm: Any) -> None:
    mask_id = lm.config.mask_token_id

    def plant(step: int, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if step == 1:
            x[0, 10] = 8
        if step == 4:
            x[0, 4] = mask_id
        return x

    canvases, _ = run64(lm._module, IDS, **RUN, canvas=plant)
    with lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[1]:
            lm.canvas[:, 10] = 8
        for step in tracer.steps[4]:
            x = lm.canvas.clone()
            x[:, 4] = mask_id
            lm.canvas = x
        run = tracer.result.save()
    same_run(run, canvases)
    assert run.tokens[0, 10] == 8
    assert run.masks_left.tolist() == [0]
    assert run.step_of[0, 4] >= 4
    assert dl.denoise(lm._module, IDS, **RUN).tokens[0, 10] != 8


def test_an_in_place_edit_of_the_canvas_leaves_the_step_before_alone(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[3]:
            before = step.tokens.clone().save()
            lm.canvas[:, 0] = 1
            after = step.tokens.clone().save()
        run = tracer.result.save()
    assert before.equal(after)
    assert run.canvases[2][0, 0] == IDS[0]
    assert run.canvases[3:, 0, 0].eq(1).all()


@pytest.mark.parametrize("order", ["left", "right"])
def test_a_forced_order(lm: Any, order: str) -> None:
    settings = {"steps": 8, "gen_length": 8, "block_length": 8}

    def force(step: int, masked: torch.Tensor) -> torch.Tensor:
        if order == "left":
            return masked & (masked.cumsum(-1) == 1)
        return masked & (masked.flip(-1).cumsum(-1).flip(-1) == 1)

    canvases, _ = run64(lm._module, IDS, **settings, force=force)
    with lm.generate(IDS, **settings) as tracer:
        for step in tracer.steps:
            lm.sampler.unmasked = force(0, step.masked)
        run = tracer.result.save()
    same_run(run, canvases)
    expected = list(range(8)) if order == "left" else list(range(7, -1, -1))
    assert run.step_of[0, 4:].tolist() == expected


def test_an_order_against_the_blocks_writes_tokens_and_no_masks(lm: Any) -> None:
    settings = {"steps": 8, "gen_length": 8, "block_length": 4}
    with lm.generate(IDS, **settings) as tracer:
        for step in tracer.steps:
            lm.sampler.unmasked = step.masked & (step.masked.flip(-1).cumsum(-1).flip(-1) == 1)
        run = tracer.result.save()
    assert run.step_of[0, 4:].tolist() == list(range(7, -1, -1))
    assert run.masks_left.tolist() == [0]


def test_an_edited_confidence_decides_the_ranking(lm: Any) -> None:
    settings = {"steps": 8, "gen_length": 8, "block_length": 8}
    canvases, _ = run64(lm._module, IDS, **settings, choose=lambda step, c: -c)
    clean = dl.denoise(lm._module, IDS, **settings)
    with lm.generate(IDS, **settings) as tracer:
        for step in tracer.steps:
            confidence = lm.sampler.confidence
            lm.sampler.confidence = torch.where(confidence.isfinite(), -confidence, confidence)
        run = tracer.result.save()
    same_run(run, canvases)
    assert not run.canvases.equal(clean.canvases)


def test_an_edited_proposal_is_what_is_written(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[0]:
            lm.sampler.proposal[:] = 11
            chosen = lm.sampler.unmasked.clone().save()
            written = lm.sampler.written.clone().save()
        run = tracer.result.save()
    assert run.canvases[1][chosen].tolist() == [11] * int(chosen.sum())
    assert written.equal(run.canvases[1])


def test_the_head_can_forbid_a_token(lm: Any) -> None:
    banned = int(dl.denoise(lm._module, IDS, **RUN).tokens[0, 5])
    with lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps:
            lm.lm_head.output[..., banned] = -torch.inf
        run = tracer.result.save()
    assert not run.tokens[0, 4:].eq(banned).any()


def test_one_forward_sees_both_directions(lm: Any) -> None:
    ids = torch.tensor([[5, 9, 14, 3, lm.config.mask_token_id]])
    with lm.trace(ids):
        pattern = lm.layers[1].attn.pattern.save()
        logits = lm.lm_head.output.save()
    expected = forward64(lm._module, ids)
    close(pattern, expected["pattern1"])
    close(logits, expected["logits"])
    assert (pattern[0, :, 0, -1] > 0).all()


def test_what_a_step_says_of_the_run(lm: Any) -> None:
    plain = dl.denoise(lm._module, IDS, **RUN)
    with lm.generate(IDS, **RUN) as tracer:
        steps = [].save()
        for step in tracer.steps:
            steps.append(step)
    assert [step.index for step in steps] == list(range(6))
    for step in steps:
        assert step.tokens.equal(plain.canvases[step])
        assert step.masked.equal(plain.masked[step])
        assert step.progress.tolist() == plain.progress[step].tolist()
        assert (step.span.start, step.span.stop) == plain.spans[step]
        assert (step.block, step.total) == (plain.blocks[step], 6)
        assert step.valid.all()
    assert repr(steps[3]) == "Step(3 of 6, block 1, 4 masked)"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("unmasked", torch.zeros(1, 3, dtype=torch.bool), r"unmasked was assigned a tensor of shape \[1, 3\]"),
        ("unmasked", None, r"unmasked was assigned None; assign \[batch, position\], of shape \[1, 12\]"),
        ("revised", torch.zeros(5), r"revised was assigned a tensor of shape \[5\]"),
        ("confidence", torch.zeros(1, 3), r"confidence was assigned a tensor of shape \[1, 3\]"),
        ("proposal", torch.zeros(2, 12, dtype=torch.long), r"proposal was assigned a tensor of shape \[2, 12\]"),
        ("proposal", torch.full((1, 12), 3.7), r"proposal was assigned a tensor of torch.float32; it must hold"),
        ("unmasked", torch.tensor([10]), r"unmasked was assigned a Tensor int64 \[1\]; assign truth values"),
        ("unmasked", 10, "unmasked was assigned 10; assign truth values"),
        ("unmasked", [[10]], r"unmasked was assigned \[\[10\]\]; assign truth values"),
        ("unmasked", torch.full((1, 12), 2.0), r"was assigned a Tensor float32 \[1, 12\]; assign truth values"),
        ("revised", torch.tensor([10]), r"revised was assigned a Tensor int64 \[1\]; assign truth values"),
        ("confidence", float("nan"), "confidence was assigned NaN; assign numbers, or -inf where none is"),
        ("canvas", "abc", r"lm.canvas was assigned 'abc'; assign token ids \[batch, position\]"),
        ("canvas", None, r"lm.canvas was assigned None"),
        ("canvas", torch.zeros(1, 3, dtype=torch.long), r"lm.canvas was .* int64 \[1, 3\]; .* of shape \[1, 12\]"),
    ],
)
def test_an_assigned_value_that_does_not_fit_is_named(lm: Any, name: str, value: Any, message: str) -> None:
    """They were errors of torch inside the sampler, which name neither the value nor its shape."""
    with pytest.raises(ValueError, match=message), lm.generate(IDS, **RUN) as tracer:
        for _step in tracer.steps[2]:
            setattr(lm if name == "canvas" else lm.sampler, name, value)
    same_run(dl.denoise(lm._module, IDS, **RUN), run64(lm._module, IDS, **RUN)[0])


def test_a_confidence_that_is_edited_to_nan_is_refused(lm: Any) -> None:
    with pytest.raises(ValueError, match="confidence was assigned NaN"), lm.generate(IDS, **RUN) as tracer:
        for _step in tracer.steps[2]:
            lm.sampler.confidence[:] = float("nan")


def test_truth_values_are_broadcast(lm: Any) -> None:
    last = [False] * 11 + [True]
    with lm.generate(IDS, **RUN) as tracer:
        for _step in tracer.steps[0]:
            lm.sampler.unmasked = last
        run = tracer.result.save()
    assert run.unmasked[0].tolist() == [last]


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_zeros_and_ones_of_every_position_are_truth_values(lm: Any, dtype: torch.dtype) -> None:
    last = torch.zeros(1, 12, dtype=dtype)
    last[0, 11] = 1
    with lm.generate(IDS, **RUN) as tracer:
        for _step in tracer.steps[0]:
            lm.sampler.unmasked = last
        run = tracer.result.save()
    assert run.unmasked[0].equal(last.bool())


def test_an_assigned_value_takes_the_dtype_of_the_sampler_s(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        for _step in tracer.steps[:]:
            lm.sampler.proposal = torch.tensor(7, dtype=torch.int32)
        run = tracer.result.save()
    assert run.tokens[0, 4:].tolist() == [7] * 8


def test_a_layer_that_is_not_there_is_named_with_the_range(lm: Any) -> None:
    for index in (2, -3):
        with pytest.raises(IndexError, match=rf"lm\.layers\[{index}\] is not there: it has 2, 0 to 1, or -2 to -1"):
            lm.layers[index]
    assert lm.layers[-1] is lm.layers[1]
    assert list(lm.layers) == list(lm.layers[:])


def test_hooks_out_of_the_order_of_their_sites_are_named(lm: Any) -> None:
    message = r"had passed the hook's site when it was applied.*: apply hooks in the order in which"
    with pytest.raises(ValueError, match=message), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[:]:
            lm.layers[0].attn.apply(ablate("resid", 0), step)
            lm.layers[0].attn.apply(mask_top_sinks(1), step)
