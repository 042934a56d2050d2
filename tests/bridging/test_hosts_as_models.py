"""What the functions of this library make of a bridge or a `DiffusionLM` in the place of a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import ablate, attach_hooks, mask_top_sinks
from dlm_lens.testing import tiny

PROMPT, SETTINGS = [[5, 9, 14, 3]], {"steps": 3, "gen_length": 4}

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "hooks": lambda model, run: dl.denoise(model, PROMPT, hooks=[mask_top_sinks(1)], **SETTINGS),
    "compare": lambda model, run: dl.compare(model, PROMPT, [ablate("resid")], **SETTINGS),
    "record": lambda model, run: dl.record(model, PROMPT, [dl.ReceivedAttention(min_viewers=1)], **SETTINGS),
    "received": lambda model, run: dl.received_over_steps(model, run),
    "replay": lambda model, run: dl.replay(model, run, [ablate("z")]),
    "logit_lens": lambda model, run: dl.logit_lens(model, run),
    "patching": lambda model, run: dl.probes.activation_patching(model, run, [[5, 9, 15, 3]]),
    "pattern": lambda model, run: dl.viz.attention_pattern(run, model, step=1, layer=1, head=1),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_bridge_whose_attention_has_no_hook_points_is_refused(call: str) -> None:
    # Hooks at attention had no effect there, and nothing said so.
    model = tiny("llada")
    run = dl.denoise(model, PROMPT, **SETTINGS)
    with pytest.raises(
        ValueError, match=r"is a TransformerLens bridge, or carries one.*use the bridge's own methods"
    ):
        CALLS[call](dl.bridge(model), run)
    with (
        pytest.raises(ValueError, match="is a TransformerLens bridge, or carries one"),
        attach_hooks(dl.bridge(model), ablate("z")),
    ):
        pass
    CALLS[call](model, run)  # the model itself is none


@pytest.mark.parametrize("call", [call for call in CALLS if call != "pattern"])
def test_a_diffusion_lm_stands_for_its_model(call: str) -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPT, **SETTINGS)
    numbers = {
        "hooks": lambda found: found.proposals, "compare": lambda found: found.changed,
        "record": lambda found: found.received, "received": lambda found: found.column_sums,
        "replay": lambda found: found.kl, "logit_lens": lambda found: found.kl,
        "patching": lambda found: found.effects,
    }[call]  # fmt: skip
    found, wanted = (numbers(CALLS[call](each, run)) for each in (dl.DiffusionLM(model), model))
    assert torch.equal(found.nan_to_num(-1), wanted.nan_to_num(-1))


def test_a_diffusion_lm_can_be_bridged() -> None:
    model = tiny("llada")
    ids = torch.tensor(PROMPT)
    assert torch.equal(dl.bridge(dl.DiffusionLM(model))(ids), dl.bridge(model)(ids))


@torch.no_grad()
def test_tokens_attend_to_padding_without_a_mask_and_texts_do_not() -> None:
    model, prompts = dl.load("toy"), ["tom has 5 apples . how many apples ? :", "sort 4 2 :"]
    tl = dl.bridge(model)
    given = model.tokenizer(prompts, return_tensors="pt", padding=True)
    content, tokens = given["attention_mask"].bool(), tl.to_tokens(prompts)
    plain = model(**given).logits[content]
    torch.testing.assert_close(tl(prompts)[content], plain, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(tl(tokens, attention_mask=content.long())[content], plain, rtol=1e-3, atol=1e-4)
    assert float((tl(tokens)[content] - plain).abs().max()) > 1.0
