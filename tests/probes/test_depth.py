"""The serial depth against depths that are counted by hand."""

import math

import pytest
import torch

from dlm_lens.probes import SerialDepth, serial_depth
from dlm_lens.probes.depth import depths_of
from dlm_lens.testing import tiny


def tree(count: int) -> int:
    return math.ceil(math.log2(count))


def test_the_reference_counts_its_example_the_same() -> None:
    # google-deepmind/serial_depth, README: an MLP from 1 over 8 and 8 units to 1 has depth 2 + 5 + 4.
    first, second, last = torch.ones(1, 8), torch.ones(8, 8), torch.ones(8, 1)
    found, unknown = depths_of(lambda x: [((x @ first).relu() @ second).relu() @ last], torch.ones(3, 1))
    assert found == [11]
    assert not unknown


def test_what_is_written_into_a_view_counts_for_the_whole() -> None:
    def work(x: torch.Tensor) -> list[torch.Tensor]:
        whole = torch.zeros(4, 4)
        before = whole[0]
        whole[:, 1:3] = x * 2.0 + 1.0
        whole[1].add_(1.0)
        return [whole, before, whole.sum(), x.cumsum(0), x.topk(2, dim=1).values, x.amax()]

    # Two for the product and the sum, one for the sum in place; then reductions of 16, 4, 2 and 8 numbers.
    assert depths_of(work, torch.ones(4, 2)) == ([3, 3, 7, 2, 1, 3], ())


@pytest.mark.parametrize(
    ("positions", "width", "inner", "layers"), [(16, 32, 48, 2), (5, 32, 48, 1), (33, 64, 200, 3)]
)
def test_a_llada_has_the_depth_that_is_counted_by_hand(positions: int, width: int, inner: int, layers: int) -> None:
    model = tiny("llada", hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, vocab_size=80)
    norm = 6 + tree(width)  # square, mean (sum and division), + eps, rsqrt, two products
    product = 1 + tree(width)
    rotated, scaled = 3, 1  # -x, x sin, sum; q scaled
    scores = 1 + tree(width // 4)
    softmax = tree(positions) + 2 + tree(positions) + 1 + 1  # max, difference, exp, sum, division; rows of -inf
    mixed = 1 + tree(positions)
    attention = norm + product + rotated + scaled + scores + softmax + mixed + product + 1
    mlp = norm + product + 3 + 1 + tree(inner) + 1  # silu and the product with the other half
    found = serial_depth(model, positions)
    each = attention + mlp
    assert found.layers == tuple(each * (layer + 1) for layer in range(layers))
    assert found.logits == layers * each + norm + product
    assert found.decision == tree(80)
    assert found.unknown == ()
    assert found.per_layer == each


FAMILIES = ("dream", "mmada", "smdm", "sink_qwen", "causal", "a2d_qwen3", "llada2", "bd3lm")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_of_the_families_is_counted(family: str) -> None:
    found = serial_depth(tiny(family), 12)
    assert found.unknown == ()
    assert 0 < found.layers[0] < found.layers[-1] < found.logits
    # Twice the positions: one more at maximum and sum of the softmax and at the mixture of values, in both layers.
    assert serial_depth(tiny(family), 24).logits - found.logits >= 6


def test_a_model_without_memory_has_the_same_depth() -> None:
    assert serial_depth(tiny("llada").to("meta"), 16) == serial_depth(tiny("llada"), 16)


def test_the_depth_of_a_run() -> None:
    found = SerialDepth(positions=16, layers=(10, 20), logits=25, decision=6)
    assert found.opaque(8) == 25  # tokens are read at every step
    assert found.opaque(8, tokens=False) == 8 * 25 + 7 * 6
    with pytest.raises(ValueError, match="steps is 0; it must be a whole number of at least 1"):
        found.opaque(0)


def test_self_conditioning_lengthens_the_chain_through_the_steps() -> None:
    model = tiny("diffusion_gemma")
    found = serial_depth(model, 16)
    assert found.unknown == ()
    # A softmax over the vocabulary and the mean embedding come before the decoder's layers.
    assert found.conditioned is not None
    assert found.conditioned > found.logits - found.layers[0]
    assert found.opaque(10) == found.logits + 9 * found.conditioned
    assert found.opaque(10, conditioning=True) == found.logits
    # Three chained passes are two steps longer.
    ids = torch.zeros(1, 16, dtype=torch.long)

    def chained(ids: torch.Tensor) -> list[torch.Tensor]:
        logits = model(input_ids=ids).logits
        for _ in range(2):
            logits = model(input_ids=ids, self_conditioning_logits=logits).logits
        return [logits]

    with torch.no_grad():
        assert depths_of(chained, ids)[0] == [found.opaque(3)]


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_every_operation_of_experts_is_counted(implementation: str) -> None:
    model = tiny("llada_moe")
    model.set_experts_implementation(implementation)
    found = serial_depth(model, 8)
    assert found.unknown == ()
    # Router, choice and experts are deeper than the MLP that is counted above.
    assert found.per_layer > 77
