"""Statistics under autocast: of queries and keys that it rounded, but themselves in float32."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dlm_lens import record
from dlm_lens.attention import QUERY_STATS, AttentionInputs, pattern_stats, pattern_tiles
from dlm_lens.attention.column_stats import column_sums, expected_received, viewers
from dlm_lens.attention.streaming import stream_columns
from dlm_lens.attention.tiled import batched_received_sums, tiled_lse
from dlm_lens.testing import tiny
from tests.pretend_gpu.scenes import REDUCERS

LENGTH = 300  # counts above 256 are not whole in bfloat16


@pytest.fixture
def inputs() -> AttentionInputs:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, LENGTH, 16, generator=generator) for _ in range(2))
    return AttentionInputs(0, q, k, k, 0.25, causal=True)


def statistics(inputs: AttentionInputs) -> dict[str, Tensor]:
    """Every statistic of the inputs, by tiles of a CPU and by those of other devices."""
    counted, weights = torch.ones(1, LENGTH, dtype=torch.bool), torch.ones(1, 1, LENGTH)
    visible = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    pattern = next(pattern_tiles(inputs, LENGTH))[1]
    columns = stream_columns(inputs, counted)
    found = {"sums": columns.sums, "expected": columns.expected, "viewers": columns.viewers}
    found |= {
        "column sums": column_sums(pattern, counted),
        "expected received": expected_received(visible, counted),
    }
    found |= {"seen by": viewers(visible, counted), "pattern": pattern}
    found["batched"] = batched_received_sums(inputs.q, inputs.k, 0.25, None, weights, True)
    found["lse"] = tiled_lse(inputs.q.clone().requires_grad_(), inputs.k, 0.25, None, True).detach()
    for name, given in {"inputs": inputs, "a pattern": replace(inputs, pattern=pattern)}.items():
        stats = pattern_stats(given, weights, QUERY_STATS)
        assert stats.sums is not None
        found |= {f"sums of {name}": stats.sums, **{f"{key} of {name}": x for key, x in stats.per_query.items()}}
    return found


def test_statistics_of_the_same_inputs_are_the_same(inputs: AttentionInputs) -> None:
    expected = statistics(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = statistics(inputs)
    for name, values in expected.items():
        assert found[name].dtype == torch.float32, name
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("name", REDUCERS)
def test_every_reducer_takes_what_autocast_leaves(name: str) -> None:
    """Streams are in float32, queries, keys and values in bfloat16."""
    model, reducer = tiny("llada"), REDUCERS[name]()
    prompts = [[5, 9, 11, 3, 8, 4, 7, 2, 12, 14], [6, 2, 7]]
    plain = record(model, prompts, [reducer], gen_length=4)
    with torch.autocast("cpu", torch.bfloat16):
        cast = record(model, prompts, [reducer], gen_length=4)
    assert cast.arrays.keys() == plain.arrays.keys()
    for key, values in plain.arrays.items():
        if plain.specs[key].positions:
            continue  # which of two keys is the larger
        # Step 0, of the same canvas; bfloat16 has 8 bits, and two layers round several times.
        torch.testing.assert_close(cast.arrays[key][0], values[0], rtol=0.1, atol=0.1, equal_nan=True)
