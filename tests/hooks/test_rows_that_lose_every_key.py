"""No row loses every key (docs/hooks.md): what a row keeps, under every kind of mask, against loops in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import dlm_lens as dl
from dlm_lens.attention.hook_points import hooked_attentions
from dlm_lens.attention.layers import attention_blocks
from dlm_lens.hooks import attach_hooks, mask_positions
from dlm_lens.testing import tiny

PROMPT = [20, 21, 22, 23, 24, 25]
BLOCKS = ["sdar", "bd3lm", "stable_diffcoder", "nemotron_labs_diffusion", "efficient_dlm", "wedlm", "sdlm", "i_dlm"]


def kept(attention: Any, names: tuple[str, ...], run: Any) -> dict[str, Tensor]:
    """What the first pass of `run()` has at some hook points of an attention layer."""
    found: dict[str, Tensor] = {}
    handles = [
        getattr(attention, f"hook_{name}").register_forward_hook(
            lambda module, args, out, name=name: found.setdefault(name, out.detach().double()) is None or None
        )
        for name in names
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def without(pattern: Tensor, hidden: list[int]) -> Tensor:
    """The pattern [head, query, key] without columns; a row that would lose every key keeps its own."""
    changed = pattern.clone()
    queries, keys = pattern.shape[1:]
    for i in range(queries):
        visible = [j for j in range(keys) if float(pattern[:, i, j].sum()) > 0]
        left = [j for j in visible if j not in hidden]
        own = i + keys - queries
        for j in hidden:
            spared = not left and (j == own or own not in visible)
            if not spared:
                changed[:, i, j] = 0
    return changed


@pytest.mark.parametrize("family", [*BLOCKS, "llada", "causal"])
@pytest.mark.parametrize("hidden", [[0], [0, 1, 2, 3]])
def test_a_column_hidden_after_the_softmax_leaves_a_row_its_own_value(family: str, hidden: list[int]) -> None:
    model = tiny(family)
    attention = hooked_attentions(model)[0]
    settings = {"gen_length": 4, "seed": 0}
    plain = kept(attention, ("pattern",), lambda: dl.denoise(model, [PROMPT], **settings))
    hook = mask_positions(*hidden, stage="after")
    found = kept(attention, ("v", "z"), lambda: dl.denoise(model, [PROMPT], hooks=[hook], **settings))
    values = found["v"][0].movedim(1, 0)
    values = values.repeat_interleave(plain["pattern"].shape[1] // len(values), 0)
    wanted = (without(plain["pattern"][0], hidden) @ values).movedim(0, 1)
    # float32 sums of at most 32 products
    torch.testing.assert_close(found["z"][0], wanted, atol=5e-6, rtol=1e-5)


def test_a_decoder_that_is_causal_by_its_own_flag_keeps_the_first_row() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bart", d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, max_position_embeddings=64, init_std=0.3,
    )  # fmt: skip
    model = dl.add_hook_points(AutoModelForSeq2SeqLM.from_config(config).eval())
    ids, answer = torch.randint(3, 60, (1, 8)), torch.randint(3, 60, (1, 6))
    attention = attention_blocks(model)[1].self_attn

    def run() -> None:
        with torch.no_grad(), attach_hooks(model, mask_positions(0, stage="after"), layers=[1]):
            model(input_ids=ids, decoder_input_ids=answer, use_cache=False)

    found = kept(attention, ("v", "z"), run)
    torch.testing.assert_close(found["z"][0, 0], found["v"][0, 0])


@pytest.mark.parametrize(
    ("hooks", "place"),
    [
        ([mask_positions(4, stage="after")], 4),
        ([mask_positions(4), mask_positions(5, stage="after")], 5),
    ],
)
def test_a_row_after_padding_keeps_its_own_value(hooks: list[Any], place: int) -> None:
    """The second prompt begins at position 4: hiding that key, or it and the next one, leaves its queries none."""
    model = tiny("causal")
    attention = hooked_attentions(model)[0]
    prompts, settings = [PROMPT, [30, 31]], {"gen_length": 1, "seed": 0}
    found = kept(attention, ("v", "z"), lambda: dl.denoise(model, prompts, hooks=hooks, **settings))
    values = found["v"][1, place].repeat_interleave(2, 0)
    torch.testing.assert_close(found["z"][1, place], values)
