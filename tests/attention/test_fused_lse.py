"""The log-sum-exp of torch's fused kernel, and statistics of the pattern that take it."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _python_dispatch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from dlm_lens.attention import (
    QUERY_STATS,
    AttentionInputs,
    fused_lse,
    pattern_stats,
    received_by_class,
    tile_sums,
    tiled,
)
from dlm_lens.attention.fused_lse import LEAST_ENTRIES
from dlm_lens.recording import AttentionEntropy, ReceivedAttention, RegionMass, record
from dlm_lens.sampling import denoise
from dlm_lens.sinks import received_of
from dlm_lens.testing import tiny
from tests.attention.test_pattern_reductions import check
from tests.attention.test_received import CLOSE, SCALE, masks, random

fused = fused_lse.fused_lse


@pytest.fixture(autouse=True)
def no_gradient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a run, with the log-sum-exp taken at every length, and tiles of 10 columns."""
    monkeypatch.setattr(fused_lse, "LEAST_ENTRIES", 0)
    monkeypatch.setattr(tiled, "TILE_COLUMNS", 10)
    with torch.no_grad():
        yield


def mixed(q: Tensor, k: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
    with fused(q, k, mask) as found:
        z = scaled_dot_product_attention(q, k, k, attn_mask=mask, scale=SCALE, enable_gqa=True, **options)
    return z, found.value


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mask", [*masks(), "causal"])
def test_it_is_that_of_the_visible_scores_and_z_is_the_same_bits(mask: str, inference: bool) -> None:
    q, k = random()
    visible, causal = masks().get(mask), mask == "causal"
    with torch.inference_mode(inference):
        z, lse = mixed(q, k, visible, is_causal=causal)
        plain = scaled_dot_product_attention(
            q, k, k, attn_mask=visible, scale=SCALE, enable_gqa=True, is_causal=causal
        )
    assert torch.equal(z.view(torch.int32), plain.view(torch.int32))
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * SCALE
    seen = torch.ones(37, 37, dtype=torch.bool).tril() if causal else torch.ones(1, 1, 1, 37, dtype=torch.bool)
    seen = (seen if visible is None else visible).expand_as(scores)
    expected = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    sees = seen.any(-1)
    assert lse is not None
    torch.testing.assert_close(lse[sees].double(), expected[sees], **CLOSE)
    assert lse.isfinite().all()


def test_where_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = random()
    assert mixed(q, k, None)[1] is not None
    for dtype in (torch.bfloat16, torch.float64):
        assert mixed(q.to(dtype), k.to(dtype), None)[1] is None
    assert mixed(q, k, torch.zeros(1, 1, 37, 37))[1] is None  # an additive mask may hold a bias
    with torch.enable_grad():
        assert mixed(q.clone().requires_grad_(), k, None)[1] is None
    with fused(q, k, None) as none:
        q @ k.repeat_interleave(2, 1).mT
    assert none.value is None
    with fused(q, k, None) as twice:
        for _ in range(2):
            scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert twice.value is None
    monkeypatch.setattr(fused_lse, "LEAST_ENTRIES", LEAST_ENTRIES)
    assert mixed(q, k, None)[1] is None
    q, k = random(1, 2, 2, 128)
    assert mixed(q, k, None)[1] is not None


@pytest.mark.parametrize("mask", list(masks()))
def test_statistics_with_it_are_those_of_the_pattern(tile: str, mask: str) -> None:
    q, k = random()
    visible = masks()[mask]
    check(AttentionInputs(0, q, k, k, SCALE, visible, lse=mixed(q, k, visible)[1]), 37)


def test_padding_causality_sinks_and_spans(tile: str) -> None:
    q, k = random()
    content = torch.ones(2, 37, dtype=torch.bool)
    content[0, :9] = False
    padding = masks()["padding"]
    check(AttentionInputs(0, q, k, k, SCALE, padding, lse=mixed(q, k, padding)[1]), 37, content)
    given = AttentionInputs(0, q, k, k, SCALE, causal=True, lse=mixed(q, k, None, is_causal=True)[1])
    check(given, 37, causal=True)
    both = AttentionInputs(0, q, k, k, SCALE, padding, causal=True)
    check(AttentionInputs(0, q, k, k, SCALE, padding, True, lse=mixed(q, k, both.seen())[1]), 37, content, True)
    q, k = random(queries=70, keys=72)  # two learned sink tokens after the canvas
    check(AttentionInputs(0, q, k, k, SCALE, own_start=0, lse=mixed(q, k, None)[1]), 70)
    q, k = random(keys=90)  # a step that computes the positions 20 to 56 of 90
    check(AttentionInputs(0, q, k, k, SCALE, own_start=20, lse=mixed(q, k, None)[1]), 90)


@pytest.mark.parametrize("known", [False, True])
def test_a_query_after_all_seen_keys_that_sees_none_has_zeros(tile: str, known: bool) -> None:
    q, k = random()
    visible = torch.zeros(2, 1, 37, 37, dtype=torch.bool)
    visible[..., :5] = True
    visible[:, :, 30] = False
    lse = mixed(q, k, visible)[1] if known else None
    stats = pattern_stats(AttentionInputs(0, q, k, k, SCALE, visible, lse=lse), None, QUERY_STATS)
    for values in stats.per_query.values():
        assert (values[:, :, 30] == 0).all()
        assert values.isfinite().all()
    torch.testing.assert_close(stats.per_query["past"][:, :, 31], torch.ones(2, 4), atol=1e-6, rtol=0)


@pytest.mark.parametrize("why", ["autocast", "size", "another function"])
def test_it_is_left_where_it_would_be_wrong(why: str) -> None:
    """Autocast rounds queries and keys on their way; the rounding of a score of 10^7 is larger than 1."""
    q, k = random()
    assert mixed(q, k, None)[1] is not None
    if why == "size":
        assert mixed(q * 1e4, k * 1e3, None)[1] is None
        return
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast")
    with autocast, fused(q, k, None, sdpa=why == "autocast") as found:
        scaled_dot_product_attention(q, k, k, scale=SCALE, enable_gqa=True)
    assert found.value is None


def test_threads_that_record_leave_torch_as_it_was() -> None:
    """Torch counts dispatch modes in flags of the process, with which torch.compile would compile nothing."""
    flags = ("_is_in_non_infra_torch_dispatch_mode", "_is_in_any_mode_without_ignore_compile_internals")
    q, k = random()
    inside: list[bool] = []

    def work() -> None:
        with torch.no_grad(), fused(q, k, None):
            inside.extend(getattr(_python_dispatch, flag) for flag in flags)
            scaled_dot_product_attention(q, k, k, scale=SCALE, enable_gqa=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inside) == 8
    assert not any(inside)
    assert not any(getattr(_python_dispatch, flag) for flag in flags)


def test_a_function_of_the_users_own_runs_as_without_a_recording() -> None:
    """Flex attention is an operator that a dispatch mode of ours would have to know."""

    def own(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        z: Any = flex_attention(q, k, v, scale=options["scaling"], enable_gqa=True)
        return z.transpose(1, 2).contiguous(), None

    AttentionInterface.register("own_flex", own)
    AttentionMaskInterface.register("own_flex", lambda *_, **__: None)
    model = tiny("llada")
    model.set_attn_implementation("own_flex")
    prompts = [[5, 9, 11, 3]]
    plain = denoise(model, prompts, gen_length=8, steps=2)
    recording = record(model, prompts, [ReceivedAttention(["all"])], gen_length=8, steps=2)
    assert torch.equal(recording.run.tokens, plain.tokens)
    # Every query's attention is 1: 12 queries over 12 keys, relative to uniform, to a rounding of float32.
    values = received_of(recording).values
    torch.testing.assert_close(values.mean(-1), torch.ones_like(values[..., 0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["llada", "causal"])
def test_a_block_mask_is_refused_with_the_remedy(family: str) -> None:
    model = tiny(family)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(
        ValueError, match=r"the attention mask is a BlockMask; reading attention.*'sdpa' or 'hooked'"
    ):
        record(model, [[5, 9, 11, 3], [6, 2]], gen_length=4)


def test_a_rows_statistics_do_not_depend_on_its_batch(tile: str) -> None:
    q, k = random()
    weights = torch.ones(2, 1, 37)
    visible = masks()["padding"]
    both = AttentionInputs(0, q, k, k, SCALE, visible, lse=mixed(q, k, visible)[1])
    stats = pattern_stats(both, weights, QUERY_STATS)
    for row in (slice(0, 1), slice(1, 2)):
        lse = mixed(q[row], k[row], visible[row])[1]
        alone = AttentionInputs(0, q[row], k[row], k[row], SCALE, visible[row], lse=lse)
        # A product rounds by where its operands lie in memory: a few of float32's 6e-8.
        close = {"atol": 1e-6, "rtol": 1e-6}
        torch.testing.assert_close(pattern_stats(alone, weights[row], QUERY_STATS).sums, stats.sums[row], **close)
        sums = received_by_class(both, weights)[row]
        torch.testing.assert_close(received_by_class(alone, weights[row]), sums, **close)


@pytest.mark.parametrize("family", ["llada", "causal"])
def test_a_recorded_run_takes_it_and_denoises_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    options: dict[str, Any] = {"gen_length": 8, "steps": 4} if family == "llada" else {"gen_length": 4}
    reducers = [ReceivedAttention(["all"]), AttentionEntropy(), RegionMass()]
    taken: list[bool] = []

    def watched(*given: Any) -> Any:
        taken.append(given[6] is not None)
        return tiled.head_groups(*given)

    monkeypatch.setattr(tile_sums, "head_groups", watched)
    prompts = [[5, 9, 11, 3], [6, 2]]
    with_it = record(model, prompts, reducers, **options)
    assert taken
    assert all(taken)
    taken.clear()
    monkeypatch.setattr(fused_lse, "LEAST_ENTRIES", 1 << 60)
    without = record(model, prompts, reducers, **options)
    assert taken
    assert not any(taken)
    assert torch.equal(with_it.run.tokens, without.run.tokens)
    # 1e-5: rounding of scores of up to 10, in a network of two layers.
    for name, values in without.arrays.items():
        torch.testing.assert_close(with_it.arrays[name], values, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("size", [1.5, 4.0, 10.0])
def test_rounding_grows_with_the_scores_and_no_faster(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a length with several tiles each way, sums are off by a few roundings of the largest score."""
    monkeypatch.setattr(tiled, "TILE_COLUMNS", 512)
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 1 << 17)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 4, 600, 64, generator=generator) * size for _ in range(2))
    scores = q.double() @ k.double().mT * 0.125
    expected = scores.softmax(-1).sum(-2)
    with fused(q, k, None) as found:
        scaled_dot_product_attention(q, k, k, scale=0.125)
    got = received_by_class(AttentionInputs(0, q, k, k, 0.125, lse=found.value), torch.ones(1, 1, 600))[:, 0]
    # A probability's relative error is the absolute one of its score and of the log-sum-exp: 2^-24 of each size.
    bound = 8 * 2**-24 * scores.abs().max() * expected.clamp(min=1)
    assert (got.double() - expected).abs().le(bound).all()
