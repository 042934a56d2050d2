"""`ForwardCost` against the operations that torch counts in one forward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlm_lens.adapters.forward_cost import PUBLISHED, ForwardCost, network_without_weights
from dlm_lens.testing import tiny

ROWS, LENGTH = 2, 64

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llada", {}),
    ("causal", {}),
    ("diffugpt", {}),  # fused projections, and a table of positions
    ("modernbert", {}),  # sliding windows, and a layer in the head
    ("modernbert", {"tie_word_embeddings": False}),
    ("llada_moe", {}),  # experts, of which a position uses some
    ("llada2", {}),  # experts of groups, and one that all positions share
    ("sdar", {}),
    ("duo", {}),  # a modulation that acts on a row
    ("sink_qwen", {"num_sinks": 3}),
    ("smdm", {"num_sinks": 3, "gated_attention": True}),
]


@pytest.mark.parametrize(("family", "fields"), FAMILIES)
def test_the_operations_of_a_pass_are_those_that_torch_counts(family: str, fields: dict[str, Any]) -> None:
    model = tiny(family, **fields)
    model.config._experts_implementation = "eager"  # torch does not count grouped products
    model.set_attn_implementation("hooked")  # nor the fused kernel of a CPU
    ids = torch.randint(0, 60, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    cost, seen = ForwardCost.of(model), LENGTH + fields.get("num_sinks", 0)
    # What a DiT computes of the noise level before its layers is an embedding of another width. Sinks leave after
    # the head.
    tolerance = 0.01 if family == "duo" else 0
    counted = ROWS * (cost.layers(seen, seen) + cost.head(seen))
    assert counter.get_total_flops() == pytest.approx(counted, rel=tolerance)


@pytest.mark.parametrize("family", ["llada", "llada_moe", "sink_llama", "diffugpt", "diffusion_gemma"])
def test_a_config_alone_costs_what_the_model_does(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.config.save_pretrained(tmp_path)
    assert ForwardCost.of(network_without_weights(str(tmp_path))) == ForwardCost.of(model)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # By hand from the widths, to the published 8.02e9: embedding and head, and 32 layers of four products of
        # attention, three of the MLP and two norms.
        ("GSAI-ML/LLaDA-8B-Instruct", 2 * 126464 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 12288 + 2 * 4096) + 4096),
        # Published totals; Dream has the layout of Qwen2.5-7B, and its total.
        ("Dream-org/Dream-v0-Base-7B", 7_615_616_512),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("smollm2", 134_515_008),
    ],
)
def test_published_checkpoints_have_their_number_of_parameters(name: str, parameters: int) -> None:
    cost = ForwardCost.of(network_without_weights(name))
    assert cost.parameters == parameters
    # A table of embeddings is looked up, not multiplied with; tied, it is the head too.
    table = cost.d_model * cost.d_vocab
    tables = 1 if PUBLISHED[name].get("tie_word_embeddings") else 2
    assert cost.active == cost.matrices
    assert parameters - cost.matrices - tables * table < 1e-3 * parameters
