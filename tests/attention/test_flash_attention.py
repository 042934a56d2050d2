"""Flash attention as a user sets it: transformers' function, with a stand-in for its kernels, which need a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from dlm_lens import denoise, record
from dlm_lens.attention import AttentionInputs, hooked_attentions
from dlm_lens.attention.cache_argument import cache_argument, returned_cache
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.testing import tiny

NAME = "own_flash"
PROMPTS = [[5, 9, 11, 3, 8, 4], [6, 2, 7]]


@pytest.fixture
def loaded() -> list[str]:
    """The names under which kernels were looked up; queries of padding rows see what transformers' would not."""
    found: list[str] = []

    def flash(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        found.append(module.config._attn_implementation)
        assert module.layer_idx >= 0  # what the function reads beside the config
        assert any(isinstance(part, torch.nn.Linear) for part in module.modules())
        visible = None if mask is None else mask[:, None, None, :].bool()
        causal, length = module.is_causal and q.shape[2] > 1, q.shape[2]
        if causal:
            before = torch.ones(length, k.shape[2], dtype=torch.bool).tril(k.shape[2] - length)
            visible = before if visible is None else visible & before
        z = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=options["scaling"], enable_gqa=True
        )
        return z.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, flash)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    return found


def flashing(model: Any) -> Any:
    """The model, as `set_attn_implementation` leaves it where the kernels are installed."""
    model.config._attn_implementation = NAME
    return model


@pytest.mark.parametrize("family", ["llada", "causal", "sink_qwen"])
def test_kernels_are_looked_up_by_the_users_name(family: str, loaded: list[str]) -> None:
    run = denoise(flashing(tiny(family)), PROMPTS, gen_length=4)
    assert set(loaded) == {NAME}
    assert run.tokens.equal(denoise(tiny(family), PROMPTS, gen_length=4).tokens)


@pytest.mark.parametrize("hooks", [[], [mask_top_sinks(1)]], ids=["", "hidden"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llada", "dream", "causal"])
def test_statistics_and_hooks_equal_those_of_sdpa(
    family: str, rows: int, hooks: list[Any], loaded: list[str]
) -> None:
    """With two rows the second is padded."""
    given: dict[str, Any] = {"gen_length": 4, "hooks": hooks}
    flash, sdpa = (record(model, PROMPTS[:rows], **given) for model in (flashing(tiny(family)), tiny(family)))
    assert flash.run.tokens.equal(sdpa.run.tokens)
    assert (set(loaded) == {NAME}) is not bool(hooks)  # columns are hidden by a kernel of torch
    # float32, and keys of grouped heads are repeated or not
    torch.testing.assert_close(flash.received, sdpa.received, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("family", ["llada", "causal"])
@torch.no_grad()
def test_patterns_of_padded_rows_equal_those_of_sdpa(family: str, loaded: list[str]) -> None:
    ids = torch.tensor([PROMPTS[0], [0, 0, 0, *PROMPTS[1]]])
    content = torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1]])
    found: list[list[Tensor]] = []
    for model in (flashing(tiny(family)), tiny(family)):
        patterns: list[Tensor] = []
        for attention in hooked_attentions(model):
            attention.hook_pattern.register_forward_hook(lambda m, i, out, to=patterns: to.append(out))
        model(ids, attention_mask=content)
        found.append([each.transpose(1, 2)[content.bool()] for each in patterns])
    assert len(found[0]) > 1
    for flash, sdpa in zip(*found, strict=True):
        assert flash.equal(sdpa)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("listens", [False, True])
@torch.no_grad()
def test_the_last_query_of_a_causal_pass_sees_the_last_key(listens: bool, padded: bool, loaded: list[str]) -> None:
    """Queries after a cache, whose causality flash attention is given beside the mask."""
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    content = torch.ones_like(ids)
    content[1, 0] = not padded
    found: list[Tensor] = []
    for model in (flashing(tiny("causal")), tiny("causal")):
        cache = returned_cache(model(ids[:, :3], attention_mask=content[:, :3], use_cache=True))
        attention, seen = hooked_attentions(model)[0], list[Tensor]()
        if listens:
            attention.hook_pattern.register_forward_hook(lambda m, i, out, to=seen: to.append(out))
        else:
            attention.hook_z.readers = (lambda inputs, to=seen: to.append(pattern_of(inputs)),)
        model(ids[:, 3:], attention_mask=content, **cache_argument(model, cache))
        found.append(seen[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)  # float32: sums in another order
    assert bool((found[0][:, :, -1, -1] > 0).all())
    assert bool((found[0][:, :, 0, -1] == 0).all())


def pattern_of(inputs: AttentionInputs) -> Tensor:
    keys = inputs.k.repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], 1)
    scores = inputs.q @ keys.mT * inputs.scale
    seen = inputs.seen()
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)


def test_masks_that_differ_between_queries_are_refused(loaded: list[str]) -> None:
    with pytest.raises(ValueError, match=r"'own_flash' hides padding alone.*attn_implementation='sdpa'"):
        denoise(flashing(tiny("bd3lm")), PROMPTS, gen_length=4)


def test_a_window_beside_the_mask_is_refused_by_readers_alone(loaded: list[str]) -> None:
    model = tiny("causal", model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    model = flashing(model)
    denoise(model, PROMPTS[:1], gen_length=2)
    for prompts in (PROMPTS[:1], PROMPTS):
        with pytest.raises(ValueError, match="the sliding window of 4 keys is not in the attention mask"):
            record(model, prompts, gen_length=2)


@pytest.mark.parametrize("softmax", ["off_by_one", "sink_logits"])
def test_a_spare_entry_is_refused(softmax: str, loaded: list[str]) -> None:
    """transformers gives it to kernels that take one, and to version 2 not, without a message."""
    with pytest.raises(ValueError, match=f"no spare entry of the softmax, and the model's softmax is '{softmax}'"):
        denoise(flashing(tiny("sink_llama", softmax=softmax)), PROMPTS[:1], gen_length=4)


def test_learned_sink_tokens_take_rows_of_equal_length(loaded: list[str]) -> None:
    given: dict[str, Any] = {"gen_length": 4}
    model, plain = flashing(tiny("sink_qwen", num_sinks=1)), tiny("sink_qwen", num_sinks=1)
    assert denoise(model, PROMPTS[:1], **given).tokens.equal(denoise(plain, PROMPTS[:1], **given).tokens)
    with pytest.raises(ValueError, match="'own_flash', in which they cannot be told from the canvas"):
        denoise(model, PROMPTS, **given)
