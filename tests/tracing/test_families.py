"""Every family: the traced run is that of `denoise`, and each step's values are those of its canvas."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import SinkLayout
from dlm_lens.testing import tiny
from tests.reference import forward64

IDS = [5, 9, 14, 3]
RUN = {"steps": 4, "gen_length": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llada": ("llada", {}, {"temperature": 0.7, "block_length": 4}),
    "llada-guided": ("llada", {}, {"cfg_scale": 1.0, "remasking": "random"}),
    "mmada": ("mmada", {}, {"block_length": 4}),
    "dream": ("dream", {}, {"remasking": "entropy", "temperature": 0.4}),
    "dream-origin": ("dream", {}, {"remasking": "origin"}),
    "diffugpt": ("diffugpt", {}, {}),
    "smdm": ("smdm", {}, {"remasking": "greedy"}),
    "smdm-origin": ("smdm", {}, {"cfg_scale": 0.0}),
    "a2d": ("a2d_qwen3", {"head_dim": 10}, {"block_length": 4, "temperature": 0.6}),
    "open-dcoder": ("open_dcoder", {}, {"temperature": 0.5}),
    "coda": ("coda", {"head_dim": 10}, {"remasking": "topk_margin"}),
    "rnd1": ("rnd1", {}, {"temperature": 0.7}),
    "sink_qwen": ("sink_qwen", {"num_sinks": 1}, {}),
    "sink_qwen-end": ("sink_qwen", {"num_sinks": 2, "sink_placement": "end"}, {}),
    "gated": ("sink_qwen", {"num_sinks": 0, "gated_attention": True}, {}),
    "uniform": ("uniform_qwen", {}, {"entropy_bound": 6.0}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_traced_run_is_the_run(name: str) -> None:
    family, config, settings = FAMILIES[name]
    model = tiny(family, **config)
    plain = dl.denoise(model, IDS, seed=3, **RUN, **settings)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(IDS, seed=3, **RUN, **settings) as tracer:
        found = [].save()
        for step in tracer.steps[1::2]:
            canvas = lm.canvas.clone()
            pattern = lm.layers[1].attn.pattern.clone()
            unmasked = lm.sampler.unmasked.clone()
            found.append((int(step), canvas, pattern, unmasked))
        run = tracer.result.save()
    assert run.canvases.equal(plain.canvases)
    assert run.settings == plain.settings
    assert [index for index, *_ in found] == [1, 3]
    for index, canvas, pattern, unmasked in found:
        assert canvas.equal(plain.canvases[index])
        # A sampler that renoises also selects the decided positions that stay decided.
        assert (unmasked & plain.open[index]).equal(plain.unmasked[index])
        expected = forward64(model, plain.canvases[index])["pattern1"]
        torch.testing.assert_close(pattern[:1].double(), expected, atol=2e-5, rtol=2e-4)
    untraced = lm.generate(IDS, seed=3, **RUN, **settings)
    assert untraced.canvases.equal(plain.canvases)


@pytest.mark.parametrize("family", ["llada", "dream", "smdm", "sink_qwen", "diffugpt"])
def test_left_padded_rows_are_what_they_are_alone(family: str) -> None:
    lm: Any = dl.DiffusionLM(tiny(family))
    prompts = [[5, 9, 14, 3, 8], [7, 2]]
    sinks = SinkLayout.of(lm._module).count
    with lm.generate(prompts, cfg_scale=0.0, **RUN) if family == "smdm" else lm.generate(prompts, **RUN) as tracer:
        for step in tracer.steps[2]:
            valid = step.valid.save()
            pattern = lm.layers[0].attn.pattern.save()
        run = tracer.result.save()
    extra = {"cfg_scale": 0.0} if family == "smdm" else {}
    alone = dl.denoise(lm._module, prompts[1], **RUN, **extra)
    assert run.tokens[1, 3:].equal(alone.tokens[0])
    assert valid.tolist() == [[True] * 13, [False] * 3 + [True] * 10]
    assert pattern[1, :, sinks + 3 :, sinks : sinks + 3].abs().max() == 0
    assert pattern[0, :, :, sinks : sinks + 3].min() > 0


@pytest.mark.parametrize("use_cache", [True, False])
def test_an_ar_baseline(use_cache: bool) -> None:
    model = tiny("causal")
    plain = dl.denoise(model, IDS, gen_length=5, use_cache=use_cache)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(IDS, gen_length=5, use_cache=use_cache) as tracer:
        seen = [].save()
        for step in tracer.steps:
            pattern = lm.layers[1].attn.pattern
            seen.append((step, pattern, lm.lm_head.output[:, -1].clone()))
        run = tracer.result.save()
    assert run.tokens.equal(plain.tokens)
    assert len(seen) == run.steps
    for step, pattern, logits in seen:
        prefix = plain.canvases[step][:, : 4 + step]
        expected = forward64(model, prefix, causal=True)
        rows = expected["pattern1"][:, :, -1:] if use_cache and step else expected["pattern1"]
        torch.testing.assert_close(pattern.double(), rows, atol=2e-5, rtol=2e-4)
        torch.testing.assert_close(logits.double(), expected["logits"][:, -1], atol=2e-4, rtol=2e-4)
        assert step.masked[0].tolist() == [False] * (4 + step) + [True] * (5 - step)


def test_an_edit_of_an_ar_baseline_changes_what_it_writes() -> None:
    lm: Any = dl.DiffusionLM(tiny("causal"))
    plain = lm.generate(IDS, gen_length=5)
    with lm.generate(IDS, gen_length=5) as tracer:
        for step in tracer.steps[2]:
            lm.lm_head.output[..., int(plain.tokens[0, 6])] = -torch.inf
        run = tracer.result.save()
    assert run.tokens[0, :6].equal(plain.tokens[0, :6])
    assert run.tokens[0, 6] != plain.tokens[0, 6]


def test_an_ar_baseline_has_no_sampler_to_read() -> None:
    lm: Any = dl.DiffusionLM(tiny("causal"))
    with pytest.raises(Exception, match="AR baseline"), lm.generate(IDS, gen_length=5) as tracer:
        for step in tracer.steps[0]:
            lm.sampler.unmasked.sum()


@pytest.mark.parametrize("name", ["mmada", "diffugpt", "dream", "dream-origin", "smdm", "smdm-origin", "sink_qwen"])
def test_an_order_can_be_forced_on_every_family(name: str) -> None:
    family, config, settings = FAMILIES[name]
    model = tiny(family, **config)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(IDS, steps=8, gen_length=8, **{**settings, "temperature": 0.0}) as tracer:
        for step in tracer.steps:
            lm.sampler.unmasked = step.masked & (step.masked.cumsum(-1) == 1)
        run = tracer.result.save()
    assert run.step_of[0, 4:].tolist() == list(range(8))
    assert run.masks_left.tolist() == [0]
    if family in ("mmada", "sink_qwen"):
        for step in range(8):
            logits = forward64(model, run.canvases[step])["logits"][0, 4 + step]
            logits[model.config.mask_token_id] = -torch.inf
            assert run.tokens[0, 4 + step] == logits.argmax()


def test_an_edit_under_guidance_reaches_both_halves() -> None:
    model = tiny("llada")
    mask_id, scale = model.config.mask_token_id, 1.5
    lm: Any = dl.DiffusionLM(model)

    def halved(scores: torch.Tensor) -> torch.Tensor:
        return scores * 0.5

    with lm.generate(IDS, cfg_scale=scale, **RUN) as tracer:
        for step in tracer.steps[2]:
            canvas = lm.canvas.clone().save()
            lm.layers[0].attn.scores = halved(lm.layers[0].attn.scores)
            confidence = lm.sampler.confidence.clone().save()
    hidden = canvas.clone()
    hidden[:, :4] = mask_id
    c, u = (forward64(model, ids, edits={(0, "scores"): halved})["logits"] for ids in (canvas, hidden))
    guided = u + (scale + 1) * (c - u)
    chosen = guided.index_fill(-1, torch.tensor([mask_id]), -torch.inf).argmax(-1, keepdim=True)
    expected = guided.softmax(-1).gather(-1, chosen).squeeze(-1)
    masked = canvas == mask_id
    torch.testing.assert_close(confidence[masked].double(), expected[masked], atol=2e-4, rtol=2e-4)


def test_an_edit_of_a_padded_batch() -> None:
    model = tiny("llada")
    lm: Any = dl.DiffusionLM(model)

    def quiet(v: torch.Tensor) -> torch.Tensor:
        return v * 0.3

    with lm.generate([[5, 9, 14, 3, 8], [7, 2]], **RUN) as tracer:
        for step in tracer.steps[1]:
            lm.layers[0].attn.v = quiet(lm.layers[0].attn.v)
            pattern = lm.layers[1].attn.pattern.save()
            state = (step.tokens, step.valid.long())
            tokens, valid = state
            tokens, valid = tokens.save(), valid.save()
    positions = (valid.cumsum(-1) - 1).clamp(min=0)
    expected = forward64(model, tokens, valid, positions=positions, edits={(0, "v"): quiet})["pattern1"]
    torch.testing.assert_close(pattern[0].double(), expected[0], atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(pattern[1, :, 3:].double(), expected[1, :, 3:], atol=2e-5, rtol=2e-4)


def test_a_run_that_ends_early_ends_its_loops() -> None:
    model = tiny("mmada")
    settings = {"steps": 8, "gen_length": 8, "block_length": 2}
    last = int(dl.denoise(model, IDS, **settings).tokens[0, 7])
    short = dl.denoise(model, IDS, eot_token=last, **settings)
    assert 1 < short.steps < 8
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(IDS, eot_token=last, **settings) as tracer:
        seen = [].save()
        for step in tracer.steps[1:]:
            seen.append(int(step))
        after = [len(seen)].save()
        run = tracer.result.save()
    assert seen == list(range(1, short.steps))
    assert after == [short.steps - 1]
    assert run.canvases.equal(short.canvases)
