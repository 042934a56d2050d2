"""Several prompts in one run, patching between runs and steps, and nnsight's own tools with steps."""

from typing import Any

import nnsight
import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.sampling.prompts import read_prompts
from dlm_lens.testing import tiny
from dlm_lens.tracing import diffusion_lm
from tests.reference import forward64

A, B = [5, 9, 14, 3, 8], [7, 2, 33]
RUN = {"steps": 4, "gen_length": 8, "block_length": 4}


@pytest.fixture(scope="module")
def lm() -> dl.DiffusionLM:
    return dl.DiffusionLM(tiny("llada"))


def test_the_prompt_of_an_invoke_is_read_once_and_as_it_was_then(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = dl.denoise(lm._module, [A, B], **RUN)
    read, given = [], list(A)
    monkeypatch.setattr(
        diffusion_lm,
        "read_prompts",
        lambda model, prompt, *rest: read.append(prompt) or read_prompts(model, prompt, *rest),
    )
    with lm.generate(given, **RUN) as tracer:
        one = tracer.result.save()
    assert read == [A]
    read.clear()
    with lm.generate(**RUN) as tracer:
        with tracer.invoke(given):
            first = tracer.result.save()
        given[:] = B
        with tracer.invoke(given):
            second = tracer.result.save()
    assert len(read) == 3, "each invoke once, and the rows of both as one batch"
    assert first.canvases.equal(plain.canvases[:, :1])
    assert second.canvases.equal(plain.canvases[:, 1:])
    assert one.tokens.equal(first.tokens)


@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
def test_each_invoke_sees_and_edits_its_own_rows(lm: Any, cfg_scale: float) -> None:
    plain = dl.denoise(lm._module, [A, B], cfg_scale=cfg_scale, **RUN)
    with lm.generate(cfg_scale=cfg_scale, **RUN) as tracer:
        with tracer.invoke(A):
            seen = [].save()
            for step in tracer.steps[1:3]:
                seen.append((step, lm.canvas.clone(), lm.layers[0].attn.pattern.clone()))
            first = tracer.result.save()
        with tracer.invoke(B):
            for step in tracer.steps[2:]:
                pattern = lm.layers[1].attn.pattern
                lm.layers[1].attn.pattern = pattern * 0
            second = tracer.result.save()
    assert first.canvases.equal(plain.canvases[:, :1])
    assert first.settings["seeds"] == (0,)
    assert second.canvases[:3].equal(plain.canvases[:3, 1:])
    assert not second.canvases.equal(plain.canvases[:, 1:])
    for step, canvas, pattern in seen:
        assert canvas.equal(plain.canvases[step][:1])
        assert step.tokens.equal(canvas)
        assert len(pattern) == (2 if cfg_scale else 1)
        expected = forward64(lm._module, canvas)["pattern0"]
        torch.testing.assert_close(pattern[:1].double(), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", ["layers.0.output", "layers.1.attn.pattern", "layers.1.attn.z", "lm_head.output"])
def test_an_edit_in_place_under_guidance_is_an_assignment(lm: Any, name: str) -> None:
    """Of each invoke in its rows of both halves, whoever reads the value again."""
    runs = []
    owner, _, part = name.rpartition(".")
    for in_place in (True, False):
        with lm.generate(cfg_scale=1.5, **RUN) as tracer:
            with tracer.invoke(A):
                for step in tracer.steps:
                    if in_place:
                        lm.get(name)[:, 2] = 0.25
                        lm.get(name)[:, 0] *= 2.0
                    else:
                        value = lm.get(name).clone()
                        value[:, 2] = 0.25
                        value[:, 0] *= 2.0
                        setattr(lm.get(owner), part, value)
            with tracer.invoke(B):
                for step in tracer.steps[1:]:
                    lm.get(name)[:, 1] = -0.5
            with tracer.invoke():
                seen = [].save()
                for step in tracer.steps:
                    seen.append(lm.get(name).clone())
                run = tracer.result.save()
        runs.append((run, seen))
    (edited, seen), (assigned, wanted) = runs
    assert edited.canvases.equal(assigned.canvases)
    assert edited.confidence.equal(assigned.confidence)
    for one, other in zip(seen, wanted, strict=True):
        assert one.equal(other)
    assert (seen[1][[1, 3], 1] == -0.5).all()
    assert (seen[1][[0, 2], 2] == 0.25).all()


def test_an_invoke_without_a_prompt_sees_all_rows(lm: Any) -> None:
    with lm.generate(**RUN) as tracer:
        with tracer.invoke(A):
            pass
        with tracer.invoke([B, A]):
            for step in tracer.steps[0]:
                rows = len(lm.canvas)
                theirs = nnsight.save(rows)
        with tracer.invoke():
            for step in tracer.steps[3]:
                whole = lm.canvas.clone().save()
            run = tracer.result.save()
    assert theirs == 2
    assert whole.equal(run.canvases[3])
    assert run.tokens[0, -8:].equal(run.tokens[2, -8:])


def test_patching_between_invokes_at_one_step(lm: Any) -> None:
    """The residual stream of the last position moves from A to B; the head then says the same of both."""
    with lm.generate(**RUN) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(A):
            for step in tracer.steps[2]:
                donor = lm.layers[1].output[:, -1].clone()
                barrier()
                theirs = lm.lm_head.output[:, -1].clone().save()
        with tracer.invoke(B):
            for step in tracer.steps[2]:
                barrier()
                lm.layers[1].output[:, -1] = donor
                mine = lm.lm_head.output[:, -1].clone().save()
    torch.testing.assert_close(mine, theirs)


def test_patching_from_one_run_and_step_into_another(lm: Any) -> None:
    with lm.generate(A, **RUN) as tracer:
        for step in tracer.steps[3]:
            donor = lm.layers[0].attn.v.clone().save()
    with lm.generate(A, **RUN) as tracer:
        for step in tracer.steps[1]:
            canvas = lm.canvas.clone().save()
            lm.layers[0].attn.v = donor
            patched = lm.lm_head.output.clone().save()
    expected = forward64(lm._module, canvas, edits={(0, "v"): lambda v: donor.double()})["logits"]
    torch.testing.assert_close(patched.double(), expected, atol=2e-5, rtol=2e-4)
    assert not torch.allclose(expected, forward64(lm._module, canvas)["logits"])


def test_persistent_edits(lm: Any) -> None:
    plain = lm.generate(A, **RUN)
    banned = int(plain.tokens[0, 6])
    with lm.edit() as (tracer, edited):
        for step in tracer.steps[1:]:
            edited.lm_head.output[..., banned] = -torch.inf
    for _ in range(2):
        run = edited.generate(A, **RUN)
        assert run.canvases[:2].equal(plain.canvases[:2])
        assert not run.tokens[0, 5:][~run.masked[1, 0, 5:] == 0].eq(banned).any()
    with edited.generate(A, **RUN) as tracer:
        for step in tracer.steps[2]:
            least = lm.lm_head.output[..., banned].max().save()
    assert least == -torch.inf
    assert lm.generate(A, **RUN).tokens.equal(plain.tokens)


def test_a_persistent_edit_of_steps_leaves_a_single_forward_alone(lm: Any) -> None:
    with lm.edit() as (tracer, edited):
        for step in tracer.steps[0]:
            edited.layers[0].attn.pattern[:] = 0
    with edited.trace(A):
        logits = edited.lm_head.output.clone().save()
    expected = forward64(lm._module, torch.tensor([A]))["logits"]
    torch.testing.assert_close(logits.double(), expected, atol=2e-5, rtol=2e-4)
    assert not edited.generate(A, **RUN).confidence.equal(lm.generate(A, **RUN).confidence)


def test_a_persistent_edit_of_every_forward(lm: Any) -> None:
    with lm.edit() as (_, edited):
        edited.layers[0].attn.pattern[:] = 0
    with edited.trace(A):
        logits = edited.lm_head.output.clone().save()
    expected = forward64(lm._module, torch.tensor([A]), edits={(0, "pattern"): torch.zeros_like})["logits"]
    torch.testing.assert_close(logits.double(), expected, atol=2e-5, rtol=2e-4)


def test_a_cache_holds_every_step(lm: Any) -> None:
    plain = dl.denoise(lm._module, A, **RUN)
    with lm.generate(A, **RUN) as tracer:
        cache = tracer.cache(modules=[lm.layers[1].mlp, lm.layers[0].attn.hook_pattern])
    patterns = cache["model.model.layers.0.self_attn.hook_pattern"].output
    assert len(patterns) == 4
    for step, pattern in enumerate(patterns):
        expected = forward64(lm._module, plain.canvases[step])["pattern0"]
        torch.testing.assert_close(pattern.double(), expected, atol=2e-5, rtol=2e-4)


def test_gradients_through_one_step(lm: Any) -> None:
    """d logit / d pattern against finite differences in float64."""
    with lm.generate(A, grad=True, **RUN) as tracer:
        for step in tracer.steps[2]:
            canvas = lm.canvas.clone().save()
            pattern = lm.layers[0].attn.pattern
            target = lm.lm_head.output[0, -1, 7]
            with target.backward():
                gradient = pattern.grad.clone().save()
        run = tracer.result.save()
    assert not run.confidence.requires_grad
    assert run.tokens.equal(dl.denoise(lm._module, A, **RUN).tokens)

    def logit(delta: float, place: tuple[int, int, int]) -> float:
        def nudge(value: torch.Tensor) -> torch.Tensor:
            value = value.clone()
            value[0, *place] += delta
            return value

        return float(forward64(lm._module, canvas, edits={(0, "pattern"): nudge})["logits"][0, -1, 7])

    for place in [(0, 12, 3), (3, 5, 5), (2, 0, 12)]:
        slope = (logit(1e-4, place) - logit(-1e-4, place)) / 2e-4
        assert gradient[0, *place] == pytest.approx(slope, rel=1e-3, abs=1e-4)


def test_attribution_patching_from_step_to_step(lm: Any) -> None:
    """(v of step 3 - v of step 1) * d logit / d v predicts a small patch, in float64, position by position."""
    with lm.generate(A, grad=True, **RUN) as tracer:
        for step in tracer.steps[1]:
            canvas = lm.canvas.clone().save()
            v = lm.layers[0].attn.v
            target = lm.lm_head.output[0, -1, 7]
            with target.backward():
                gradient = v.grad.clone().save()
            here = v.detach().clone().save()
        for step in tracer.steps[3]:
            donor = lm.layers[0].attn.v.detach().clone().save()
    attribution = ((donor - here) * gradient).sum((0, 2, 3))

    def patched(position: int, share: float) -> float:
        def mix(v: torch.Tensor) -> torch.Tensor:
            v = v.clone()
            v[0, position] += share * (donor - here).double()[0, position]
            return v

        return float(forward64(lm._module, canvas, edits={(0, "v"): mix})["logits"][0, -1, 7])

    for position in attribution.abs().topk(3).indices.tolist():
        slope = (patched(position, 1e-4) - patched(position, -1e-4)) / 2e-4
        assert float(attribution[position]) == pytest.approx(slope, rel=2e-3, abs=1e-4)


def test_gradients_need_to_be_asked_for(lm: Any) -> None:
    with pytest.raises(NotImplementedError, match="require grad"), lm.generate(A, **RUN) as tracer:
        for step in tracer.steps[2]:
            target = lm.lm_head.output[0, -1, 7]
            with target.backward():
                pass


@pytest.mark.parametrize("method", ["generate", "trace"])
def test_a_trace_without_a_prompt_is_refused(lm: Any, method: str) -> None:
    """nnsight calls the model without arguments, whose own errors name `prompt` or `inputs_embeds`."""
    with pytest.raises(TypeError, match=r"there is no prompt; give one to .* tracer\.invoke"):
        with getattr(lm, method)() as tracer:
            with tracer.invoke():
                lm.layers[0].output.save()


def test_embeddings_in_place_of_a_prompt(lm: Any) -> None:
    ids = torch.tensor([A])
    embeddings = lm._module.get_input_embeddings()(ids).detach()
    plain = lm._module(ids).logits
    with lm.trace(inputs_embeds=embeddings):
        pattern = lm.layers[1].attn.pattern.save()
        logits = lm.output.logits.save()
    with lm.trace() as tracer:
        with tracer.invoke(inputs_embeds=embeddings):
            invoked = lm.output.logits.save()
    with lm.trace(ids):
        expected = lm.layers[1].attn.pattern.save()
        beside_pattern = lm.output.logits.save()  # which attention computes without its fused kernel
    assert torch.equal(invoked, plain)
    assert torch.equal(pattern, expected)
    assert torch.equal(logits, beside_pattern)
    with pytest.raises(TypeError, match="there is no prompt"):
        with lm.generate(inputs_embeds=embeddings, **RUN) as tracer:
            tracer.result.save()


def test_shapes_without_computing(lm: Any) -> None:
    with lm.scan("w5 w9 w14"):
        pattern = nnsight.save(lm.layers[1].attn.pattern.shape)
        logits = nnsight.save(lm.lm_head.output.shape)
    assert tuple(pattern) == (1, 4, 3, 3)
    assert tuple(logits) == (1, 3, 64)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llada", "dream", "smdm", "sink_qwen", "causal", "diffugpt"])
def test_shapes_of_a_run(family: str) -> None:
    lm: Any = dl.DiffusionLM(tiny(family, **({"num_sinks": 1} if family == "sink_qwen" else {})))
    settings = {"gen_length": 8} if family == "causal" else {"gen_length": 8, "steps": 8}
    with lm.scan(A, fn=lm.generate, **settings) as tracer:
        seen = [].save()
        for step in tracer.steps[[2, 7]]:
            state = (int(step), tuple(step.tokens.shape), int(step.masked.sum()))
            seen.append((*state, tuple(lm.layers[1].attn.pattern.shape), tuple(lm.lm_head.output.shape)))
    plain = dl.denoise(lm._module, A, **settings)
    assert [row[0] for row in seen] == [2, 7]
    rows = 2 if family == "smdm" else 1
    for index, canvas, left, pattern, logits in seen:
        length = 5 + index if family == "causal" else 13
        sinks = pattern[-1] - length
        assert canvas == (1, 13)
        assert left <= 8 if family in ("dream", "diffugpt", "smdm") else left == int(plain.masked[index].sum())
        assert pattern[0] == rows
        assert logits[-1] == 64
        assert sinks == (1 if family == "sink_qwen" else 0)


def test_each_invoke_of_a_scan_has_its_rows_of_the_result(lm: Any) -> None:
    with lm.scan(fn=lm.generate, **RUN) as tracer:
        with tracer.invoke(A):
            one = tracer.result.save()
        with tracer.invoke(B):
            other = tracer.result.save()
    assert one.tokens[0, :5].tolist() == A
    assert other.tokens[0, 2:5].tolist() == B
    assert not (one.tokens == lm.config.mask_token_id).any()


def test_a_session_passes_values_between_runs(lm: Any) -> None:
    with lm.session():
        with lm.generate(A, **RUN) as tracer:
            for step in tracer.steps[0]:
                donor = lm.layers[1].output.clone()
        with lm.generate(A, **RUN) as tracer:
            for step in tracer.steps[2]:
                lm.layers[1].output = donor
                logits = lm.lm_head.output.clone().save()
    start = torch.tensor([[*A, *[lm.config.mask_token_id] * 8]])
    torch.testing.assert_close(logits.double(), forward64(lm._module, start)["logits"], atol=2e-5, rtol=2e-4)


def test_invokes_that_contradict_each_other_are_refused(lm: Any) -> None:
    """The settings of the last one were those of all."""
    with pytest.raises(
        ValueError, match=r"invoke\(steps=8\): the prompts of a trace share one run, which has steps=4"
    ):
        with lm.generate(gen_length=8) as tracer:
            with tracer.invoke(A, steps=4):
                first = tracer.result.save()
            with tracer.invoke(B, steps=8):
                second = tracer.result.save()
    with pytest.raises(
        ValueError, match=r"invoke\(steps=2\): the prompts of a trace share one run, which has steps=4"
    ):
        with lm.generate(gen_length=8, steps=4) as tracer:
            with tracer.invoke(A, steps=2):
                first = tracer.result.save()
    with lm.generate(gen_length=8) as tracer:
        with tracer.invoke(A, steps=4):
            first = tracer.result.save()
        with tracer.invoke(B, steps=4):
            second = tracer.result.save()
    assert (first.steps, second.steps) == (4, 4)


@pytest.mark.parametrize("remote", [True, "local"])
def test_a_remote_trace_is_refused(lm: Any, remote: Any) -> None:
    message = "traces of a DiffusionLM run in this process, .*; leave remote out"
    with pytest.raises(ValueError, match=message), lm.trace(A, remote=remote):
        lm.lm_head.output.save()
    with pytest.raises(ValueError, match=message), lm.generate(A, remote=remote, **RUN) as tracer:
        tracer.result.save()
    with pytest.raises(ValueError, match=message), lm.session(remote=remote):
        with lm.generate(A, **RUN) as tracer:
            tracer.result.save()
    with pytest.raises(ValueError, match=message):
        lm.generate(A, remote=remote, **RUN)


def test_settings_that_cannot_be_compared_are_not_taken_for_equal(lm: Any) -> None:
    with pytest.raises(ValueError, match=r"invoke\(seed=.*: the prompts of a trace share one run"):
        with lm.generate(gen_length=8) as tracer:
            with tracer.invoke(A, seed=np.array([1, 2])):
                tracer.result.save()
            with tracer.invoke(B, seed=np.array([1, 3])):
                tracer.result.save()
