"""A canvas beyond the positions that a network looks up in a table is refused: torch would raise an index error."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import dlm_lens as dl

# No end of text: a random network draws it by chance, and the answer would end there.
SIZES: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
MODELS: dict[str, Any] = {
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **SIZES)),
    "OPT": lambda: OPTForCausalLM(
        OPTConfig(
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            **SIZES,
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_refused_before_any_pass(name: str, tmp_path: Path) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    model = dl.load(str(tmp_path))
    assert dl.denoise(model, [[5] * 10], gen_length=6).tokens.shape == (1, 16)
    message = "and the model has embeddings of 16; shorten the prompt or the answer"
    with pytest.raises(ValueError, match=f"the canvas has 22 positions, {message}"):
        dl.denoise(model, [[5] * 10], gen_length=12)
    with pytest.raises(ValueError, match=f"the canvas has 23 positions, {message}"):
        dl.log_likelihood(model, [[5] * 3], [[6] * 20])


def test_rotated_positions_go_on_with_a_warning(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        **SIZES,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="the model was trained on 16 at most"):
        run = dl.denoise(dl.load(str(tmp_path)), [[5] * 10], gen_length=12)
    assert run.tokens.shape == (1, 22)
