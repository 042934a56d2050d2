"""Hooks in the encoder of DiffusionGemma, against transformers' own class in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import ColumnHook, attention_blocks, attention_of, listening
from dlm_lens.hooks import (
    ablate,
    at_encoder,
    at_layers,
    at_steps,
    attach_hooks,
    capture,
    mask_positions,
    mask_random,
    mask_tokens,
    mask_top_sinks,
    parse_hooks,
    patch_from,
    steer,
)
from dlm_lens.sampling import StepObserver, StepPlan
from dlm_lens.testing import tiny
from tests.adapters.test_diffusion_gemma import pair
from tests.recording.test_diffusion_gemma import PROMPTS, RUN, steps64


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    model, theirs = pair(torch.float64)
    theirs.set_attn_implementation("eager")
    return model, theirs


@pytest.fixture(scope="module")
def plain(models: tuple[Any, Any]) -> Any:
    return dl.denoise(models[0], PROMPTS, **RUN)


def logits_of(model: Any, **given: Any) -> tuple[Any, dict[int, Tensor]]:
    kept: dict[int, Tensor] = {}
    run = dl.denoise(model, on_logits=lambda t, _c, x: kept.__setitem__(t, x), **{**RUN, **given})
    return run, kept


def hidden_in_the_encoder(theirs: Any, position: int) -> list[Any]:
    """No query of transformers' encoder sees this key."""

    def hide(_module: Any, _args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[..., position] = torch.finfo(mask.dtype).min
        return _args, {**kwargs, "attention_mask": mask}

    layers = theirs.model.encoder.language_model.layers
    return [layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True) for layer in layers]


def steered_in_the_encoder(theirs: Any, direction: Tensor, layer: int) -> list[Any]:
    """The output of one layer of transformers' encoder, plus a direction."""

    def add(_module: Any, _args: Any, output: Any) -> Any:
        return output + direction if isinstance(output, Tensor) else (output[0] + direction, *output[1:])

    return [theirs.model.encoder.language_model.layers[layer].register_forward_hook(add)]


@pytest.mark.parametrize("what", ["hidden", "steered"])
def test_logits_of_every_step_are_transformers_own_with_the_same_edit(models: tuple[Any, Any], what: str) -> None:
    """Two canvases: the prompt's pass, and that of the first canvas, which sees the prompt's keys."""
    model, theirs = models
    direction = torch.linspace(-1, 1, 32, dtype=torch.float64)
    hook = (
        at_encoder(mask_positions(4)) if what == "hidden" else at_layers(at_encoder(steer(direction, scale=1.0)), 1)
    )
    run, kept = logits_of(model, prompt=PROMPTS, hooks=[hook])
    for row in range(2):
        padding = int(run.padding[row])
        edits = (
            hidden_in_the_encoder(theirs, 4 - padding)
            if what == "hidden"
            else steered_in_the_encoder(theirs, direction, 1)
        )
        found = steps64(theirs, run, row)
        for handle in edits:
            handle.remove()
        without = steps64(theirs, run, row)
        for step, (logits, _) in enumerate(found):
            start, stop = run.spans[step]
            torch.testing.assert_close(kept[step][row, start:stop].float(), logits.float(), rtol=1e-4, atol=2e-4)
        assert float((found[0][0] - without[0][0]).abs().max()) > 1e-2


def test_the_decoders_layers_are_not_edited(models: tuple[Any, Any], plain: Any) -> None:
    """In a replay of step 1 alone, where the encoder has nothing to read, a hook in it does nothing."""
    model, _ = models
    late = at_steps(at_encoder(ablate("resid")), [1])
    replayed = dl.replay(model, plain, [late])
    assert float(replayed.kl.nan_to_num().abs().max()) < 1e-9
    early = dl.replay(model, plain, [at_steps(at_encoder(ablate("resid")), [0])])
    # The keys that the first step left are read by the later steps of its canvas, and by the next canvas.
    assert all(float(early.kl[step].nanmean()) > 1e-4 for step in range(plain.steps) if early.predicted[step].any())


def test_a_control_acts_where_its_hook_acts(models: tuple[Any, Any]) -> None:
    model, _ = models
    settings = {**RUN, "gen_length": 8}
    like = at_layers(at_encoder(mask_positions(0)), 1)
    runs = [
        dl.denoise(model, PROMPTS[:1], hooks=[hook], **settings)
        for hook in (mask_random(like=like), at_layers(at_encoder(mask_random(like=mask_positions(0))), 1))
    ]
    assert runs[0].canvases.equal(runs[1].canvases)
    assert runs[0].settings["columns_hidden"] == runs[1].settings["columns_hidden"] == (1.0,)
    with attach_hooks(model, mask_random(like=like)):
        hooked = [
            name
            for name, module in model.named_modules()
            if name.endswith("hook_scores") and len(module._forward_hooks)
        ]
    assert hooked == ["model.encoder.language_model.layers.1.self_attn.hook_scores"]


def test_a_control_refuses_the_layers_that_its_hook_refuses(models: tuple[Any, Any]) -> None:
    class OnlyElsewhere(ColumnHook):
        def check_layer(self, block: Any) -> None:
            raise ValueError(f"{type(block).__name__} is not where it acts")

    with (
        pytest.raises(ValueError, match="is not where it acts"),
        attach_hooks(models[0], mask_random(like=OnlyElsewhere())),
    ):
        pass


def test_keys_and_values_of_another_prompt_give_its_answer(models: tuple[Any, Any]) -> None:
    """All that a decoder knows of a prompt are keys and values: patched in all layers, they give its answer."""
    model, _ = models
    settings = {**RUN, "gen_length": 8}
    one, two = [[5, 9, 13, 2, 7, 30, 31]], [[8, 8, 21, 40, 3, 17, 2]]
    (other, expected), (own, _) = (logits_of(model, prompt=prompt, gen_length=8) for prompt in (two, one))
    assert not own.tokens[:, 7:].equal(other.tokens[:, 7:])
    keys = capture(model, two, "k", encoder=True, **settings)
    values = capture(model, two, "v", **settings)
    assert keys.stack == "encoder"
    assert keys.steps == (0,)
    patches = [patch_from(keys, site="k"), patch_from(values, site="v", positions="prompt")]
    run, got = logits_of(model, prompt=one, gen_length=8, hooks=patches)
    assert run.tokens[:, 7:].equal(other.tokens[:, 7:])
    for step, logits in got.items():
        torch.testing.assert_close(logits.nan_to_num(), expected[step].nan_to_num(), rtol=1e-6, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("site", ["resid", "z", "k", "pattern"])
def test_capture_keeps_what_the_encoder_computed(models: tuple[Any, Any], plain: Any, site: Any) -> None:
    model, _ = models
    seen: list[Tensor] = []
    blocks = attention_blocks(model, "encoder")
    point = blocks[1] if site == "resid" else attention_of(blocks[1])._modules[f"hook_{site}"]
    with listening(model):
        handle = point.register_forward_hook(
            lambda _m, _i, out: seen.append(out if isinstance(out, Tensor) else out[0])
        )
        dl.denoise(model, PROMPTS, **RUN)
        handle.remove()
    assert len(seen) == 2  # the prompt, and the first canvas; nothing reads the second
    for given in ({"prompt": PROMPTS, **RUN}, {"prompt": plain}):
        kept = capture(model, sites=site, layers=[1], encoder=True, **given)
        for step, expected in zip((0, 4), seen, strict=True):
            torch.testing.assert_close(kept[site, 1, step], expected, rtol=1e-5, atol=1e-6)
    late = capture(model, plain, site, cache_steps=[4], encoder=True)
    torch.testing.assert_close(late[site, 1, 4], seen[1], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"the encoder ran at none of the steps \[2\]"):
        capture(model, plain, site, cache_steps=[2], encoder=True)


def test_what_the_encoder_reads_again_after_an_edit_is_kept_before_the_canvas(models: tuple[Any, Any]) -> None:
    """An edit of the prompt at the second canvas empties the cache: the encoder reads prompt and first canvas."""
    model, theirs = models

    class Edit(StepObserver):
        def step(self, plan: StepPlan, canvas: Tensor, masked: Tensor) -> Tensor:
            return canvas if plan.index < 4 else canvas.index_fill(1, torch.tensor(3), 11)

    run = dl.denoise(model, PROMPTS, observers=Edit(model), **RUN)
    assert run.spans[4] == (15, 23)
    kept = capture(model, run, ["k", "scores", "pattern"], layers=[2], cache_steps=[4], encoder=True)
    attention = theirs.model.encoder.language_model.layers[2].self_attn
    seen: list[Any] = []
    handles = [
        attention.k_proj.register_forward_hook(lambda _m, _i, out: seen.append(attention.k_norm(out))),
        attention.register_forward_hook(lambda _m, _i, out: seen.append(out[1])),
    ]
    for row, padding in enumerate(run.padding.tolist()):
        ids = run.canvases[4, row, padding:][None]
        seen.clear()
        with torch.no_grad():
            theirs(input_ids=ids[:, : 15 - padding], decoder_input_ids=ids[:, 15 - padding : 23 - padding])
        found, scores = (kept[name, 2, 4][row, :, padding:, padding:] for name in ("pattern", "scores"))
        torch.testing.assert_close(found, seen[1][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(scores.softmax(-1), found, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(kept["k", 2, 4][row, padding:, 0], seen[0][0], rtol=1e-5, atol=1e-6)
    for handle in handles:
        handle.remove()


@pytest.mark.long
def test_classes_of_tokens_and_sinks_are_those_of_the_encoders_canvas(models: tuple[Any, Any], plain: Any) -> None:
    """A prompt of 16 tokens, of which every key that 8 queries see can be a sink."""
    model, _ = models
    prompt = [list(range(16))]
    seen: dict[str, list[Any]] = {"tokens": [], "open": [], "causal": [], "queries": []}

    class Looking:
        site = "z"
        stack = "encoder"

        def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
            if hook.index == 0:
                seen["tokens"].append(hook.run.tokens.clone())
                seen["open"].append(bool(hook.run.open.any()))
                seen["causal"].append(hook.causal)
                seen["queries"].append(hook.run.queries)
                assert hook.name == "encoder.blocks.0.attn.hook_z"
            return tensor

    hooks = [at_encoder(mask_top_sinks(2)), at_encoder(mask_tokens(5, "prompt")), Looking()]
    run = dl.denoise(model, prompt, hooks=hooks, **RUN)
    assert [list(tokens.shape) for tokens in seen["tokens"]] == [[1, 16], [1, 24]]
    assert seen["tokens"][1].equal(run.canvases[4, :, :24])
    assert seen["open"] == [False, False]
    assert seen["causal"] == [True, True]
    assert seen["queries"] == [(0, 16), (16, 24)]
    columns, mass = run.settings["columns_hidden"], run.settings["mass_hidden"]
    # Two columns of the full layer: no key of a window of 6 is seen by 8 queries.
    assert columns[:2] == (pytest.approx(2 / 3), 16.0)
    assert 0 < mass[0] < 1
    # In a replay they act on the pass that the run made, also beside a hook that needs clean passes.
    both = [at_encoder(mask_positions(4)), mask_top_sinks(1, source="clean")]
    alone = dl.replay(model, run, [both[1]])
    together = dl.replay(model, run, both)
    assert not torch.allclose(alone.kl.nan_to_num(), together.kl.nan_to_num(), atol=1e-6)


@pytest.mark.long
def test_traces_apply_hooks_in_the_encoder(models: tuple[Any, Any]) -> None:
    model, _ = models
    lm = dl.DiffusionLM(model)
    hook = mask_positions(1)
    with lm.generate(PROMPTS, **RUN) as tracer:
        for step in tracer.steps:
            if step in (0, 4):
                for layer in range(3):
                    lm.encoder_layers[layer].attn.apply(hook, step)
        run = tracer.result.save()
    assert run.tokens.equal(dl.denoise(model, PROMPTS, hooks=[at_encoder(hook)], **RUN).tokens)

    def applied_to_the_decoder() -> None:
        with lm.generate(PROMPTS, **RUN) as tracer:
            for step in tracer.steps:
                lm.layers[0].attn.apply(at_encoder(hook), step)

    with pytest.raises(Exception, match=r"acts in the encoder, .* apply it to lm.encoder_layers\[i\].attn"):
        applied_to_the_decoder()


def test_outside_a_run_hooks_act_on_forward_passes(models: tuple[Any, Any]) -> None:
    model, _ = models
    ids = torch.tensor([list(range(20))])
    plain = model(input_ids=ids).logits
    with attach_hooks(model, at_encoder(mask_positions(2))):
        edited = model(input_ids=ids).logits
    assert float((edited - plain).abs().max()) > 1e-3
    torch.testing.assert_close(model(input_ids=ids).logits, plain)


def test_expressions_and_refusals() -> None:
    (hook,) = parse_hooks("at_encoder(at_layers(mask_positions(2), [0]))")
    assert repr(hook) == "at_encoder(at_layers(mask_positions(2), [0]))"
    assert (hook.stack, hook.layers, hook.site) == ("encoder", (0,), "scores")
    for family in ("llada", "causal"):
        with pytest.raises(ValueError, match="has no encoder"):
            dl.denoise(tiny(family), [[1, 2]], gen_length=2, hooks=[hook])
        with pytest.raises(ValueError, match="has no encoder"):
            capture(tiny(family), [[1, 2]], "z", encoder=True, gen_length=2)
    with pytest.raises(ValueError, match="has no encoder"):
        dl.bridge(tiny("llada")).denoise([[1, 2]], gen_length=2, hooks=[hook])
    for wrong in (mask_top_sinks(1, source="clean"), mask_top_sinks(1, source="previous", per="model")):
        with pytest.raises(ValueError, match="reads sinks of the decoder's layers"):
            at_encoder(wrong)
