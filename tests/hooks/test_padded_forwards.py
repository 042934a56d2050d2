"""Hooks in single padded forward passes, outside any run: every row gets what it gets alone."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import dlm_lens as dl
from dlm_lens.hooks import ablate, attach_hooks, keep_only, mask_random, mask_sinks, mask_top_sinks
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
