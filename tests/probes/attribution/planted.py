"""Networks whose circuits are known: linear after the softmax, with planted heads."""

from typing import Any

from torch import nn

import dlm_lens as dl
from dlm_lens.sampling import DenoisingRun
from dlm_lens.testing import tiny

WRITTEN, AGAINST, CLEAN, CORRUPTED = 7, 3, 5, 6
PROMPT, OTHER = [[CLEAN, CLEAN, 9, 10]], [[CORRUPTED, CLEAN, 9, 10]]


def linear(seed: int = 0, *, layers: int = 2, fixed_attention: bool = True, **config: Any) -> Any:
    """A tiny LLaDA in float64 without norms and MLPs; with fixed attention its logits are linear."""
    model = tiny("llada", seed=seed, num_hidden_layers=layers, **config).double()
    for block in model.model.layers:
        block.input_layernorm = block.post_attention_layernorm = nn.Identity()
        block.mlp.down_proj.weight.data.zero_()
        if fixed_attention:
            block.self_attn.q_proj.weight.data.zero_()
    model.model.norm = nn.Identity()
    return model


def planted(heads: dict[tuple[int, int], tuple[int, int, float]]) -> Any:
    """Heads (layer, head) -> (read, write, factor): each adds factor times the mean of a dimension to another one.

    Dimension 0 holds +1 at the token CLEAN and -1 at CORRUPTED, which else are equal; the logit of WRITTEN is 10
    times dimension 2, the others are 0.
    """
    model = linear(num_key_value_heads=4)
    embedding, width = model.get_input_embeddings().weight.data, 8
    embedding[CORRUPTED] = embedding[CLEAN]
    embedding[:, :4] = 0.0
    embedding[CLEAN, 0], embedding[CORRUPTED, 0] = 1.0, -1.0
    for block in model.model.layers:
        block.self_attn.v_proj.weight.data.zero_()
        block.self_attn.o_proj.weight.data.zero_()
    for (layer, head), (read, write, factor) in heads.items():
        attention = model.model.layers[layer].self_attn
        attention.v_proj.weight.data[head * width, read] = 1.0
        attention.o_proj.weight.data[write, head * width] = factor
    model.lm_head.weight.data.zero_()
    model.lm_head.weight.data[WRITTEN, 2] = 10.0
    return model


CIRCUIT = {(0, 1): (0, 1, 1.0), (1, 2): (1, 2, 1.0), (0, 0): (0, 3, 1.0), (1, 0): (20, 2, 0.01)}
"""Head 0.1 moves the signal to dimension 1, head 1.2 from there to the logit; 0.0 writes it where nobody reads, and
1.0 adds something that is equal in both runs."""


def run_of(model: Any, prompt: Any = None, **settings: Any) -> DenoisingRun:
    """A short run."""
    return dl.denoise(model, PROMPT if prompt is None else prompt, **{"steps": 2, "gen_length": 4, **settings})
