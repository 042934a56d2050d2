import pytest
import torch

from dlm_lens.testing import tiny
from tests.reference import forward64

IDS = torch.tensor([[61, 61, 3, 9, 27, 17, 51], [1, 2, 4, 8, 16, 32, 11]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("attn", ["sdpa", "hooked"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_sinks": 1},
        {"num_sinks": 2, "sink_placement": "end", "zero_sink_value": True},
        {"gated_attention": True, "tie_word_embeddings": True},
        {"num_sinks": 4, "gated_attention": True, "num_key_value_heads": 4},
    ],
)
def test_logits_are_those_of_an_independent_network(options: dict, attn: str) -> None:
    model = tiny("sink_llama", **options)
    model.set_attn_implementation(attn)
    for mask in (None, MASK):
        real = slice(None) if mask is None else mask.bool()
        logits = model(input_ids=IDS, attention_mask=mask).logits[real]
        # A float32 network against float64.
        expected = forward64(model, IDS, mask)["logits"][real]
        torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_fresh_model_ties_its_head() -> None:
    for family in ("sink_llama", "sink_qwen"):
        for sinks in (0, 1):
            model = tiny(family, num_sinks=sinks, tie_word_embeddings=True)
            assert model.lm_head.weight is model.model.embed_tokens.weight
