"""Every hook that hides columns, in every family: with and without a pattern, and through the three hosts."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import dlm_lens as dl
from dlm_lens.attention import ColumnMask, hide_columns
from dlm_lens.hooks import (
    at_heads,
    at_layers,
    at_progress,
    at_steps,
    attach_hooks,
    freeze_sinks,
    keep_only,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_tokens,
    mask_top_sinks,
)
from dlm_lens.testing import tiny
from tests.attention.test_hook_points import build
from tests.hooks.by_hand import FAMILIES, PROMPTS, model_of, settings_of

HOOKS: dict[str, Any] = {
    "current": mask_top_sinks(2),
    "previous": mask_sinks(dl.AboveMean(0.3), top=3, source="previous", per="layer"),
    "model": mask_top_sinks(2, source="previous", per="model"),
    "clean": mask_top_sinks(2, source="clean", stage="after"),
    "kept": mask_top_sinks(3, keep_self=True, stage="after"),
    "renormalised": mask_top_sinks(3, stage="after", renormalise=True),
    "positions": mask_positions(3, -9, 0, stage="after"),
    # Not at the first step: without a prompt all masks are alike, and rounding decides what is written.
    "prompt": at_steps(mask_tokens("prompt"), slice(1, None)),
    "ids": mask_tokens(7, "eos", keep_self=True),
    "random": mask_random(3),
    "control": mask_random(like=at_heads(mask_top_sinks(2), [0, 3]), seed=5),
    "mass": mask_random(like=mask_top_sinks(2), match="mass", seed=2),
    "frozen": freeze_sinks(dl.TopK(2), step=1),
    "window": keep_only(2, 4),
    "past and future": keep_only((0,), 3, ahead=2, stage="after"),
    "steps": at_steps(mask_top_sinks(2, source="previous"), [-1, 1]),
    "layers": at_layers(at_heads(mask_top_sinks(2, stage="after"), -1), [-1]),
    "when": at_progress(mask_top_sinks(3), (0.3, 1)),
}


@cache
def plain_model_of(name: str) -> Any:
    """A model that no test puts into another state: bridges and traces have one of their own."""
    return model_of(name) if name in FAMILIES else spare_model_of(name)


@cache
def run_of(name: str, key: str) -> dl.DenoisingRun:
    """The run of a network under one hook, without a pattern: what the other ways of running are compared with."""
    return dl.denoise(plain_model_of(name), PROMPTS, hooks=[HOOKS[key]], **settings_of(name))


class Looks:
    """A hook that reads the pattern or the scores, so that they are computed."""

    def __init__(self, site: str) -> None:
        self.site = site

    def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
        return tensor


def close(one: dl.DenoisingRun, other: dl.DenoisingRun) -> None:
    assert one.canvases.equal(other.canvases)
    # float32 sums in another order; confidences lie between 0 and 1.
    torch.testing.assert_close(one.confidence, other.confidence, atol=2e-5, rtol=1e-5)


def same_mass(one: float | None, other: float | None) -> None:
    # None where the hook did not ask; float32 sums in another order.
    assert one == (None if other is None else pytest.approx(other, rel=1e-4))


SPARE: dict[str, tuple[str, dict[str, Any]]] = {
    "off by one": ("sink_qwen", {"softmax": "off_by_one"}),
    "sink logits": ("sink_qwen", {"softmax": "sink_logits"}),
    "sumi": ("sumi", {}),
}
"""Networks whose softmax has an entry of no key."""


def spare_model_of(name: str) -> Any:
    family, config = SPARE[name]
    model: Any = tiny(family, **config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("sink_logits"):
                value.copy_(torch.randn(value.shape, generator=generator))
    return model


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("name", [*FAMILIES, *SPARE])
def test_a_run_without_a_pattern_is_the_run_with_one_token_for_token(name: str) -> None:
    model, options = plain_model_of(name), settings_of(name)
    plain = dl.denoise(model, PROMPTS, **options)
    changed = 0
    for key, hook in HOOKS.items():
        streamed = run_of(name, key)
        materialised = dl.denoise(model, PROMPTS, hooks=[Looks("scores"), hook, Looks("pattern")], **options)
        close(streamed, materialised)
        assert streamed.settings["columns_hidden"] == pytest.approx(
            materialised.settings["columns_hidden"][1:2], rel=1e-6
        )
        same_mass(streamed.settings["mass_hidden"][0], materialised.settings["mass_hidden"][1])
        same = streamed.confidence.equal(plain.confidence) and streamed.proposals.equal(plain.proposals)
        changed += not same
    assert changed >= len(HOOKS) - 3  # Dream's confidence is random, so that only other proposals show a change


def test_sink_logits_of_transformers_are_streamed() -> None:
    """gpt-oss under an attention function of its own kind, as its kernels on a GPU are: against formed patterns."""
    AttentionInterface.register("takes_s_aux", eager_attention_forward)
    AttentionMaskInterface.register("takes_s_aux", eager_mask)
    formed, streamed = build("gpt_oss"), build("gpt_oss")
    with torch.no_grad():
        for name, value in formed.named_parameters():
            if name.endswith("sinks"):
                value.copy_(torch.linspace(-1, 2, len(value)))
    streamed.load_state_dict(formed.state_dict())
    streamed.set_attn_implementation("takes_s_aux")
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    assert streamed(ids).logits.equal(formed(ids).logits)
    for hook in (mask_top_sinks(2), mask_positions(3, 5, keep_self=True), mask_top_sinks(1, stage="after")):
        found = []
        for model in (formed, streamed):
            with attach_hooks(dl.add_hook_points(model), hook), torch.no_grad():
                found.append(model(ids).logits)
        torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(found[0], formed(ids).logits, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llada", "mmada", "smdm", "front"])
def test_guidance_masks_both_halves_alike(name: str) -> None:
    model, options = model_of(name), settings_of(name, guided=True)
    for key in ("current", "previous", "clean", "control", "mass", "frozen", "window", "when", "model"):
        streamed = dl.denoise(model, PROMPTS, hooks=[HOOKS[key]], **options)
        close(
            streamed, dl.denoise(model, PROMPTS, hooks=[Looks("scores"), HOOKS[key], Looks("pattern")], **options)
        )


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["llada", "dream", "diffugpt", "front", "end", "llama"])
def test_a_padded_row_is_what_it_is_alone(name: str) -> None:
    model, options = plain_model_of(name), settings_of(name)
    keys = [key for key in HOOKS if key != "positions"]  # positions are the canvas's, which padding shifts
    for key in keys:
        if key == "past and future":
            continue  # names a position too
        together = run_of(name, key)
        for row in (0, 1):
            alone = dl.denoise(model, [PROMPTS[row]], hooks=[HOOKS[key]], **options)
            content = together.tokens[row][together.attention_mask[row]]
            # Alone an AR row stops at its end of text.
            assert content[: alone.tokens.shape[1]].equal(alone.tokens[0]), key


@pytest.mark.long
def test_two_column_hooks_see_each_other_alike_with_and_without_a_pattern() -> None:
    model, options = model_of("llada"), settings_of("llada")
    pairs = [
        (mask_top_sinks(2), mask_top_sinks(2, per="layer")),
        (mask_top_sinks(2), mask_sinks(dl.AboveMean(0.3), stage="after")),
        (mask_top_sinks(2, keep_self=True), mask_sinks(dl.AboveMean(0.3), stage="after")),
        (mask_top_sinks(2, stage="after"), mask_top_sinks(2, stage="after", keep_self=True)),
    ]
    for first, second in pairs:
        streamed = dl.denoise(model, PROMPTS, hooks=[first, second], **options)
        looks = (Looks("scores"), Looks("pattern"))
        close(streamed, dl.denoise(model, PROMPTS, hooks=[first, second, *looks], **options))
        assert not streamed.confidence.equal(dl.denoise(model, PROMPTS, hooks=[first], **options).confidence)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llada", "front", "llama"])
def test_a_transformerlens_bridge_gives_the_same(name: str) -> None:
    model, options = model_of(name), settings_of(name)
    bridged = dl.bridge(model)
    for key, hook in HOOKS.items():
        ours = run_of(name, key)
        theirs = bridged.denoise(PROMPTS, hooks=[hook], **options)
        assert ours.canvases.equal(theirs.canvases), key
        torch.testing.assert_close(ours.confidence, theirs.confidence, atol=2e-5, rtol=1e-5)
        same_mass(ours.settings["mass_hidden"][0], theirs.settings["mass_hidden"][0])


@pytest.mark.long
@pytest.mark.parametrize("name", ["llada", "front", "llama"])
def test_an_nnsight_trace_gives_the_same(name: str) -> None:
    model, options = model_of(name), settings_of(name)
    lm = dl.DiffusionLM(model, check=False)
    cache = {"use_cache": False} if name == "llama" else {}
    for key, hook in HOOKS.items():
        ours = run_of(name, key)
        with lm.generate(PROMPTS, **options, **cache) as tracer:
            for step in tracer.steps[:]:
                for layer in range(2):
                    lm.layers[layer].attn.apply(hook, step)
            theirs = tracer.result.save()
        assert ours.canvases.equal(theirs.canvases), key
        torch.testing.assert_close(ours.confidence, theirs.confidence, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_bare_run_with_hooks_calls_work_where_no_run_is_needed() -> None:
    model = model_of("llada")
    bridged = dl.bridge(model)
    ids = torch.tensor([PROMPTS[0] + [63] * 6])
    for hook in (
        mask_top_sinks(2),
        mask_sinks(dl.AboveMean(0.3), stage="after", per="layer"),
        at_layers(at_heads(mask_top_sinks(2), [1, -1]), [0, 1]),
        mask_random(2, seed=3),
        mask_random(like=mask_top_sinks(2)),
        keep_only(1, 3, ahead=3),
    ):
        names = [f"blocks.{i}.attn.hook_{'attn_scores' if hook.site == 'scores' else 'pattern'}" for i in range(2)]
        theirs = bridged.run_with_hooks(ids, fwd_hooks=[(name, hook) for name in names])
        with dl.hooks.attach_hooks(model, hook):
            ours = model(input_ids=ids).logits
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
        assert not torch.allclose(ours, model(input_ids=ids).logits, atol=1e-3)


def test_a_cached_ar_run_is_refused_where_columns_are_to_be_hidden() -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match="use_cache=True with hooks"):
        dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], gen_length=3, use_cache=True)
    lm = dl.DiffusionLM(model, check=False)

    def traced() -> None:
        with lm.generate(PROMPTS, gen_length=3) as tracer:
            for step in tracer.steps[:]:
                lm.layers[0].attn.apply(mask_top_sinks(1), step)

    with pytest.raises(ValueError, match=r"keeps keys and values in a cache.*use_cache=False"):
        traced()


def test_a_column_hook_of_the_users_own_need_not_be_hashable() -> None:
    class Own:
        __hash__ = None  # type: ignore[assignment]
        site = "scores"

        def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
            return hide_columns(self, tensor, hook)

        def hidden(self, keys: int, columns: Any, hook: Any) -> ColumnMask:
            received = columns().sums
            return ColumnMask(received == received.amax(-1, keepdim=True))

    model, options = model_of("llada"), settings_of("llada")
    own = dl.denoise(model, PROMPTS, hooks=[Own()], **options)
    ours = dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1, relative=False)], **options)
    close(own, ours)
    assert own.settings["columns_hidden"] == (1.0,)
