"""`DiffusionLM` itself: what it wraps, its self-check, and hooks at their sites."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import is_hooked_attention
from dlm_lens.hooks import attach_hooks, mask_positions, sink
from dlm_lens.testing import tiny
from dlm_lens.tracing import SelfCheckError

IDS = [5, 9, 14]
RUN = {"steps": 4, "gen_length": 8, "block_length": 4}


def test_an_embedded_model_by_name() -> None:
    lm: Any = dl.DiffusionLM("toy")
    prompt = "sort 4 2 9 1 :"
    plain = dl.denoise(dl.load("toy"), prompt, steps=4, gen_length=8)
    with lm.generate(prompt, steps=4, gen_length=8) as tracer:
        for step in tracer.steps[-1]:
            left = int(step.masked.sum())
            kept = [left].save()
        run = tracer.result.save()
    assert run.texts == plain.texts
    assert kept == [int(plain.masked[3].sum())]
    assert lm.tokenizer("sort")["input_ids"]


def test_a_directory_with_options(tmp_path: Path) -> None:
    model = tiny("llada")
    model.save_pretrained(tmp_path)
    lm: Any = dl.DiffusionLM(tmp_path, dtype="bfloat16", mask_token_id=60)
    assert lm._module.dtype == torch.bfloat16
    assert lm.config.mask_token_id == 60


def test_a_model_without_a_tokenizer_takes_ids() -> None:
    model: Any = tiny("llada")
    model.tokenizer = None
    lm: Any = dl.DiffusionLM(model)
    with lm.trace(IDS):
        logits = lm.lm_head.output.save()
    assert logits.shape == (1, 3, 64)
    with pytest.raises(ValueError, match="token ids only"), lm.trace("w1 w2"):
        lm.lm_head.output.sum()


def test_a_tokenizer_given_later() -> None:
    model: Any = tiny("llada")
    tokenizer, model.tokenizer = model.tokenizer, None
    lm: Any = dl.DiffusionLM(model)
    lm.tokenizer = tokenizer
    assert lm.generate("w5 w9 w14", **RUN).tokens.equal(lm.generate(IDS, **RUN).tokens)
    assert model.tokenizer is tokenizer


def test_text_lists_and_encodings_are_one_batch() -> None:
    lm: Any = dl.DiffusionLM(tiny("llada"))
    with lm.trace(["w5 w9 w14", "w7"]):
        batch = lm.lm_head.output.clone().save()
    with lm.trace({"input_ids": [[5, 9, 14]]}):
        single = lm.lm_head.output.clone().save()
    with lm.trace(torch.tensor([[7]])):
        short = lm.lm_head.output.clone().save()
    torch.testing.assert_close(batch[:1], single, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch[1:, 2:], short, atol=1e-5, rtol=1e-5)


def test_loading_options_beside_a_loaded_model() -> None:
    with pytest.raises(ValueError, match="dtype: options are for loading"):
        dl.DiffusionLM(tiny("llada"), dtype="bfloat16")


def test_a_model_of_somebody_else() -> None:
    with pytest.raises(ValueError, match=r"dlm_lens\.load"):
        dl.DiffusionLM(torch.nn.Linear(2, 2))


def test_an_unknown_setting_is_named() -> None:
    lm: Any = dl.DiffusionLM(tiny("llada"))
    with pytest.raises(ValueError, match="no setting 'max_new_tokens'"):
        lm.generate(IDS, max_new_tokens=3)


def test_a_prompt_is_needed() -> None:
    lm: Any = dl.DiffusionLM(tiny("llada"))
    with pytest.raises(ValueError, match="needs an input"), lm.generate(steps=4):
        pass
    with pytest.raises(TypeError, match=r"there is no prompt; give one to lm\.generate"):
        lm.generate(steps=4)


def broken(change: Any) -> Any:
    model = tiny("llada")
    change(model)
    return model


def unlinked(model: Any) -> None:
    """The pattern is shown, but z is computed elsewhere."""
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.hook_z.register_forward_hook(lambda *_: torch.ones(1, 6, 4, 8))


def causal(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.hook_scores.register_forward_hook(
            lambda module, inputs, scores: scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -1e9)
        )


def unnormalised(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.hook_pattern.forward = lambda pattern: pattern * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unlinked, "does not change the logits"),
        (causal, "does not see later positions"),
        (unnormalised, "rows that miss 1"),
    ],
)
def test_the_self_check_says_what_is_wrong(change: Any, message: str) -> None:
    model = broken(change)
    with pytest.raises(SelfCheckError, match=message):
        dl.DiffusionLM(model)
    dl.DiffusionLM(broken(change), check=False)


def test_wrapping_changes_nothing_outside_of_traces() -> None:
    model = tiny("llada")
    before = dl.denoise(model, IDS, **RUN)
    first, second = dl.DiffusionLM(model), dl.DiffusionLM(model)
    assert dl.denoise(model, IDS, **RUN).canvases.equal(before.canvases)
    patterns = []
    for lm in (first, second):
        with lm.trace(IDS):
            patterns.append(lm.layers[0].attn.pattern.save())
    assert patterns[0].equal(patterns[1])
    point: Any = model.model.layers[0].self_attn.hook_pattern
    assert len(point.trace_readers) == 2
    assert is_hooked_attention(model.model.layers[0].self_attn)


@pytest.mark.parametrize("stage", ["before_softmax", "after"])
@pytest.mark.parametrize("family", ["llada", "sink_qwen"])
def test_a_hook_at_its_site_is_the_hook_attached(family: str, stage: Any) -> None:
    model = tiny(family, **({"num_sinks": 1} if family == "sink_qwen" else {}))
    hook = mask_positions(*([sink(0)] if family == "sink_qwen" else []), 1, stage=stage)
    with attach_hooks(model, hook, layers=[1]):
        expected = dl.denoise(model, IDS, **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps:
            lm.layers[1].attn.apply(hook, step)
        run = tracer.result.save()
    assert run.canvases.equal(expected.canvases)
    torch.testing.assert_close(run.confidence, expected.confidence)
    assert not torch.allclose(run.confidence, dl.denoise(model, IDS, **RUN).confidence)


@dataclass(frozen=True)
class Recording:
    """A hook that keeps its context."""

    seen: Any
    site: Any = "v"

    def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
        self.seen.append((hook, tensor.shape[0]))
        return tensor


@pytest.mark.parametrize("cfg_scale", [0.0, 1.0])
def test_a_hook_receives_the_step(cfg_scale: float) -> None:
    model = tiny("llada")
    plain = dl.denoise(model, [IDS, [3]], cfg_scale=cfg_scale, **RUN)
    lm: Any = dl.DiffusionLM(model)
    seen: list[Any] = []
    hook = Recording(seen)
    with lm.generate([IDS, [3]], cfg_scale=cfg_scale, **RUN) as tracer:
        for step in tracer.steps[2]:
            lm.layers[1].attn.apply(hook, step)
    ((context, rows),) = seen
    halves = 2 if cfg_scale else 1
    assert rows == 2 * halves
    assert (context.name, context.layer(), context.step) == ("blocks.1.attn.hook_v", 1, 2)
    assert context.tokens.equal(plain.canvases[2].repeat(halves, 1))
    assert context.masked.equal(plain.masked[2].repeat(halves, 1))
    assert context.valid.equal(plain.attention_mask.repeat(halves, 1))


def test_a_hook_in_one_forward() -> None:
    lm: Any = dl.DiffusionLM(tiny("llada"))
    with lm.trace(IDS):
        lm.layers[0].attn.apply(mask_positions(1))
        pattern = lm.layers[0].attn.pattern.save()
    assert pattern[0, :, [0, 2], 1].abs().max() == 0


def test_a_hook_for_a_site_that_is_none_is_refused() -> None:
    lm: Any = dl.DiffusionLM(tiny("llada"))
    with pytest.raises(ValueError, match="belongs at 'elsewhere', which is none of q, k"), lm.trace(IDS):
        lm.layers[0].attn.apply(Recording([], site="elsewhere"))


def test_a_derived_view_refuses_assignment() -> None:
    lm: Any = dl.DiffusionLM(tiny("llada"))
    with pytest.raises(Exception, match=r"follows from lm\.sampler\.proposal"), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[0]:
            lm.sampler.written = step.tokens


@pytest.mark.parametrize(
    ("family", "settings"), [("causal", {}), ("llada", {"steps": 4, "block_length": 4, "cache": "dual"})]
)
@pytest.mark.parametrize("ending", ["end", "stop", "error"])
def test_no_keys_and_values_are_kept_after_a_run(family: str, settings: dict[str, Any], ending: str) -> None:
    lm = dl.DiffusionLM(tiny(family, head_dim=10), check=False)
    gc.freeze()  # the objects of modules and of other tests, which would have to be looked through

    def kept() -> list[Any]:
        gc.collect()
        tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
        return [each for each in tensors if each.ndim == 4 and each.shape[-1] == 10]

    try:
        with lm.generate([[5, 9, 11, 3]], gen_length=8, **settings) as tracer:
            for step in tracer.steps[2]:
                held = len(kept()).save()
                if ending == "stop":
                    tracer.stop()
                elif ending == "error":
                    raise KeyError("a mistake of the user")
    except KeyError:
        held = 1
    assert held > 0
    assert not [each.shape for each in kept()]
