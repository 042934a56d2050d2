"""Softmax with a spare entry, against float64, in the fused and the materialising path."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens
from dlm_lens.attention import AttentionInputs, received_by_class
from dlm_lens.attention.pattern_reductions import TileStats, pattern_stats
from dlm_lens.attention.tile_sums import QUERY_STATS
from dlm_lens.attention.tiled import pattern_tiles
from dlm_lens.testing import tiny
from tests.reference import forward64, softmax64

FAMILIES = ["sink_qwen", "sink_llama"]
IDS = torch.tensor([[60, 60, 3, 9, 27, 17, 51], [1, 2, 4, 8, 16, 32, 11]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])


def model(family: str, softmax: str) -> Any:
    found = tiny(family, softmax=softmax)
    if softmax == "sink_logits":
        torch.manual_seed(3)
        for layer in found.model.layers:
            layer.self_attn.sink_logits.data.normal_(0, 2)
    return found


def reference(found: Any, mask: Tensor | None) -> dict[str, Tensor]:
    """The standard network, its patterns replaced by exp(s) / (exp(b) + sum exp(s))."""
    scores: dict[int, Tensor] = {}
    edits: dict[tuple[int, str], Any] = {}
    for index, layer in enumerate(found.model.layers):
        b = getattr(layer.self_attn, "sink_logits", torch.zeros(4)).detach().double()

        def keep(value: Tensor, index: int = index) -> Tensor:
            scores[index] = value
            return value

        def spare(value: Tensor, index: int = index, b: Tensor = b) -> Tensor:
            exp = torch.exp(scores[index])
            return exp / (torch.exp(b)[:, None, None] + exp.sum(-1, keepdim=True))

        edits[index, "scores"], edits[index, "pattern"] = keep, spare
    return forward64(found, IDS, mask, edits=edits)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("softmax", ["off_by_one", "sink_logits"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_patterns(family: str, softmax: str, mask: Tensor | None) -> None:
    found = model(family, softmax)
    expected = reference(found, mask)
    real = slice(None) if mask is None else mask.bool()
    fused = found(input_ids=IDS, attention_mask=mask).logits
    torch.testing.assert_close(fused[real].double(), expected["logits"][real], rtol=1e-4, atol=1e-4)
    patterns: list[Tensor] = []
    points = [layer.self_attn.hook_pattern for layer in found.model.layers]
    handles = [p.register_forward_hook(lambda module, args, value: patterns.append(value)) for p in points]
    watched = found(input_ids=IDS, attention_mask=mask).logits
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(watched[real].double(), expected["logits"][real], rtol=1e-4, atol=1e-4)
    for index, pattern in enumerate(patterns):
        rows = pattern.transpose(1, 2)[real], expected[f"pattern{index}"].transpose(1, 2)[real]
        torch.testing.assert_close(rows[0].double(), rows[1], rtol=1e-4, atol=1e-5)
        assert bool((rows[0].sum(-1) < 1).all())


@pytest.mark.parametrize("attn", ["sdpa", "eager", "hooked"])
def test_every_attention_function_learns_the_logits(attn: str) -> None:
    found = model("sink_qwen", "sink_logits")
    found.config._attn_implementation = attn
    found(input_ids=IDS, labels=IDS).loss.backward()
    gradients = torch.stack([layer.self_attn.sink_logits.grad for layer in found.model.layers])
    other = model("sink_qwen", "sink_logits")
    layer, change = other.model.layers[0].self_attn, 1e-2
    losses = []
    for sign in (1, -1):
        layer.sink_logits.data[2] += sign * change
        losses.append(float(other(input_ids=IDS, labels=IDS).loss.detach()))
        layer.sink_logits.data[2] -= sign * change
    # A difference quotient in float32: a loss of 5 is rounded to 5e-7, which divided by 0.02 is 0.5% of this slope.
    assert float(gradients[0, 2]) == pytest.approx((losses[0] - losses[1]) / (2 * change), rel=0.05)


def test_zero_logits_are_off_by_one_and_very_low_ones_the_standard() -> None:
    one, learned, standard = (tiny("sink_qwen", softmax=name) for name in ("off_by_one", "sink_logits", "standard"))
    one.load_state_dict(standard.state_dict())
    learned.load_state_dict(standard.state_dict(), strict=False)
    logits = [m(input_ids=IDS).logits for m in (one, learned, standard)]
    torch.testing.assert_close(logits[0], logits[1])
    assert float((logits[0] - logits[2]).detach().abs().max()) > 0.05
    for layer in learned.model.layers:
        layer.self_attn.sink_logits.data.fill_(-50.0)
    torch.testing.assert_close(learned(input_ids=IDS).logits, logits[2], rtol=1e-4, atol=1e-5)


def test_received_attention_counts_what_is_left() -> None:
    """Streamed statistics see the same pattern as a hook does: each row gives less than 1."""
    found = model("sink_qwen", "sink_logits")
    run = dlm_lens.denoise(found, "w1 w2 w3 w4 w5 w6", steps=2, gen_length=4, seed=0)
    received = dlm_lens.received_over_steps(found, run)
    patterns: list[Tensor] = []
    point = found.model.layers[1].self_attn.hook_pattern
    handle = point.register_forward_hook(lambda module, args, value: patterns.append(value))
    found(input_ids=run.canvases[0])
    handle.remove()
    # One row of queries, all of which count: relative to uniform attention r_j / 1.
    torch.testing.assert_close(received.values[0, 0, 1], patterns[0][0].sum(-2), rtol=1e-4, atol=1e-5)
    assert float(received.values[0, 0, 1].sum(-1).max()) < 10 - 0.05


@pytest.mark.parametrize("length", [9, 700])  # one tile for all heads, and tiles of one head
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("hidden", ["nothing", "keys", "later keys"])
def test_statistics_of_rows_with_a_spare_entry(length: int, known: bool, hidden: str) -> None:
    """Sums per key and class, and numbers per query, from queries and keys alone, against a float64 pattern."""
    draw = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, heads, length, 8, generator=draw) for heads in (4, 2, 2))
    spare = torch.tensor([0.0, -3.0, 2.0, 40.0])
    visible = None
    if hidden == "keys":
        visible = torch.rand(2, 1, 1, length, generator=draw) > 0.3
        visible[1] = False  # a row of the batch that sees nothing
        visible[1, ..., :1] = True
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT) * 0.5
    seen = torch.ones(2, 4, length, length, dtype=torch.bool)
    seen = seen if visible is None else seen & visible
    seen = seen.tril() if hidden == "later keys" else seen
    pattern = softmax64(scores.masked_fill(~seen, -torch.inf), spare.double())
    whole = torch.cat(
        [scores.masked_fill(~seen, -torch.inf), spare.double()[:, None, None].expand(2, -1, length, 1)], -1
    )
    lse = whole.logsumexp(-1).float() if known else None
    inputs = AttentionInputs(0, q, k, v, 0.5, visible, causal=hidden == "later keys", lse=lse, spare=spare)
    weights = torch.rand(2, 3, length, generator=draw)
    # Sums of up to 700 numbers of float32.
    close = {"atol": 3e-5, "rtol": 1e-4}
    expected = torch.einsum("bcq,bhqk->bchk", weights.double(), pattern)
    torch.testing.assert_close(received_by_class(inputs, weights).double(), expected, **close)
    own = torch.arange(length)
    rows = {
        "entropy": torch.special.entr(pattern).sum(-1), "self": pattern.diagonal(0, -2, -1),
        "past": pattern.tril(-1).sum(-1), "future": pattern.triu(1).sum(-1),
    }  # fmt: skip
    counted = (own % 3 > 0).expand(2, -1)
    stats = pattern_stats(inputs, weights, QUERY_STATS, counted=counted)
    assert stats.sums is not None
    torch.testing.assert_close(stats.sums.double(), expected, **close)
    tiles = TileStats(inputs, weights, QUERY_STATS)
    halved = replace(inputs, spare=spare.bfloat16())  # of a model in bfloat16, which holds these numbers exactly
    for (some, tile), (_, again) in zip(pattern_tiles(inputs), pattern_tiles(halved), strict=True):
        torch.testing.assert_close(again, tile)
        torch.testing.assert_close(tile.double(), pattern[:, :, some], **close)
        tiles.add(some, tile)
    for name, values in rows.items():
        torch.testing.assert_close(
            stats.per_query[name].double(), values.masked_fill(~counted[:, None], 0.0), **close, msg=name
        )
        torch.testing.assert_close(tiles.result().per_query[name].double(), values, **close, msg=name)
    assert float(pattern[:, 3].sum(-1).max()) < 1e-6  # attention that goes to the spare entry alone


@pytest.mark.parametrize("softmax", ["off_by_one", "sink_logits"])
def test_statistics_form_no_pattern_and_hooks_do(softmax: str) -> None:
    found = model("sink_qwen", softmax)
    patterns: list[Tensor] = []
    run = {"steps": 2, "gen_length": 6}
    plain = dlm_lens.denoise(found, "w1 w2 w3", **run)
    reducers = [dlm_lens.ReceivedAttention(), dlm_lens.RegionMass(), dlm_lens.recording.AttentionEntropy()]
    recording = dlm_lens.record(found, "w1 w2 w3", reducers, **run)
    assert recording.run.canvases.equal(plain.canvases)
    assert recording.run.confidence.equal(plain.confidence)
    point = found.model.layers[1].self_attn.hook_pattern
    handle = point.register_forward_hook(lambda module, args, value: patterns.append(value))
    formed = dlm_lens.record(found, "w1 w2 w3", reducers, **run)
    handle.remove()
    assert len(patterns) == 2
    names = ("received", "region_mass", "entropy")
    for name in names:
        found, expected = getattr(recording, name), getattr(formed, name)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, equal_nan=True, msg=name)


def test_tiles_of_long_heads_have_the_gradient_of_a_learned_entry() -> None:
    """Of frozen projections and a learned b: tiles in a CPU's cache have no gradient."""
    draw = torch.Generator().manual_seed(1)
    q, k, v, weights = (torch.randn(1, 2, 700, width, generator=draw) for width in (4, 4, 4, 700))
    spare = torch.tensor([0.5, -1.0], requires_grad=True)
    inputs = AttentionInputs(0, q, k, v, 0.5, spare=spare)
    torch.stack([(weights[:, :, rows] * tile).sum() for rows, tile in pattern_tiles(inputs)]).sum().backward()
    pattern = softmax64(q.double() @ k.double().mT * 0.5, spare.detach().double())
    # dA_ij / db = -A_ij (1 - sum_k A_ik)
    expected = -(weights * pattern * (1 - pattern.sum(-1, keepdim=True))).sum((0, 2, 3))
    assert spare.grad is not None
    torch.testing.assert_close(spare.grad.double(), expected, atol=1e-4, rtol=1e-3)
