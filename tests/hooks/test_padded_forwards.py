"""Hooks in single padded forward passes, outside any run: every row gets what it gets alone."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import dlm_lens as dl
from dlm_lens.hooks import (
    ablate,
    at_heads,
    attach_hooks,
    keep_only,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_top_sinks,
)
from dlm_lens.sampling.network import network_inputs
from dlm_lens.testing import tiny
from tests.hooks.by_hand import model_of
from tests.hooks.test_columns_everywhere import Looks

ROWS = [[5, 9, 11, 40, 3, 22, 8, 17, 30, 2, 51, 12], [7, 1, 30, 2, 22, 44, 9, 10, 5]]

HOOKS = [
    mask_top_sinks(2),
    mask_sinks(dl.AboveMean(0.2), stage="after", keep_self=True),
    mask_sinks(dl.sinks.AttentionShare(0.12), per="layer"),
    mask_random(2, seed=3),
    mask_random(like=mask_top_sinks(2)),
    keep_only(1, 3),
]


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, ROWS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in ROWS])
    content = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in ROWS])
    return ids, content


@pytest.mark.parametrize("hook", HOOKS, ids=repr)
@pytest.mark.parametrize("family", ["llada", "dream", "diffugpt", "front", "end"])
@pytest.mark.parametrize("looked", [False, True], ids=["in stream", "materialised"])
def test_a_padded_row_is_what_it_is_alone(family: str, hook: Any, looked: bool) -> None:
    model = model_of(family)
    ids, content = padded()
    looks = (Looks("scores"), Looks("pattern")) if looked else ()
    with torch.no_grad(), attach_hooks(model, hook, *looks):
        together = model(input_ids=ids, **network_inputs(content)).logits
        alone = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in ROWS]
    for row, expected in enumerate(alone):
        # float32 sums in another order.
        torch.testing.assert_close(together[row, content[row]], expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        plain = model(input_ids=ids, **network_inputs(content)).logits
    assert (plain - together)[content].abs().max() > 1e-3  # the hook did something


def test_hooks_that_hide_columns_refuse_a_static_cache() -> None:
    model, (ids, content) = tiny("causal"), padded()
    hook = mask_top_sinks(1)
    with torch.no_grad(), attach_hooks(model, hook):
        plain = model(ids, attention_mask=content.long(), use_cache=False).logits
        kept = model(ids, attention_mask=content.long(), past_key_values=DynamicCache(config=model.config)).logits
        torch.testing.assert_close(kept, plain)
        static = StaticCache(config=model.config, max_cache_len=32)
        with pytest.raises(ValueError, match="hide columns take no static cache"):
            model(ids, attention_mask=content.long(), past_key_values=static)
    static = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad(), attach_hooks(model, ablate("z")):  # hides no column
        model(ids, attention_mask=content.long(), past_key_values=static)


READERS = [
    mask_top_sinks(1),
    mask_sinks(dl.AboveMean(0.2), stage="after", per="layer"),
    at_heads(mask_top_sinks(1), [1]),
    mask_random(like=mask_top_sinks(2)),
    mask_random(like=mask_positions(0), match="mass"),
    keep_only(2, 3),
]


@pytest.mark.parametrize("hook", READERS, ids=repr)
@pytest.mark.parametrize("looked", [False, True], ids=["in stream", "materialised"])
def test_hooks_that_read_received_attention_refuse_decoding_with_a_cache(hook: Any, looked: bool) -> None:
    model, ids = tiny("causal"), torch.tensor(ROWS[:1])
    looks = (Looks("scores"), Looks("pattern")) if looked else ()
    kept = DynamicCache(config=model.config)
    with torch.no_grad(), attach_hooks(model, hook, *looks):
        whole = model(ids, use_cache=False).logits
        torch.testing.assert_close(model(ids, past_key_values=kept).logits, whole)
        for more in (1, 10):
            sentence = rf"reads the attention .* queries of {more} of {12 + more} positions: .*use_cache=False"
            with pytest.raises(ValueError, match=sentence):
                model(ids[:, :more], past_key_values=copy.deepcopy(kept))
        assert model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False).shape == (1, 15)
        with pytest.raises(ValueError, match="use_cache=False"):
            model.generate(ids, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("hook", [mask_positions(0), mask_random(2), keep_only((), 4)], ids=repr)
def test_hooks_that_read_no_received_attention_act_in_decoding_with_a_cache(hook: Any) -> None:
    model, ids = tiny("causal"), torch.tensor(ROWS[:1])
    with torch.no_grad():
        kept = model(ids[:, :-1], use_cache=True).past_key_values
        plain = model(ids[:, -1:], past_key_values=copy.deepcopy(kept)).logits
        with attach_hooks(model, hook):
            hooked = model(ids[:, -1:], past_key_values=copy.deepcopy(kept)).logits
    assert not plain.equal(hooked)


def test_a_network_with_an_encoder_reads_the_attention_of_its_canvas() -> None:
    model, ids = tiny("diffusion_gemma"), torch.tensor([[*ROWS[0], *ROWS[0], *ROWS[0]]])
    with torch.no_grad():
        plain = model(ids).logits
        with attach_hooks(model, mask_top_sinks(1)):
            assert not model(ids).logits.equal(plain)
