"""Attributions of models in bfloat16 against the same weights in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.probes import (
    LogProbability,
    activation_patching,
    attribution_patching,
    column_attribution,
    edge_attribution,
)
from dlm_lens.probes.attribution.setup import BothSides, Setup, ablated
from dlm_lens.testing import tiny

PROMPTS, OTHERS = [[1, 2, 3, 4, 5], [8, 9, 10]], [[1, 2, 30, 4, 5], [8, 19, 20]]


def both() -> tuple[Any, Any]:
    """A model in bfloat16, and its weights in float64."""
    half = tiny("llada").to(torch.bfloat16)
    return half, copy.deepcopy(half).double()


def error(one: Tensor, exact: Tensor) -> float:
    return float((one.double() - exact.double()).norm() / exact.double().norm())


def test_passes_of_an_integral_are_added_up_in_float32() -> None:
    """In bfloat16 200 passes had an error of 0.08: what one adds is below the rounding of the sum."""
    half, wide = both()
    run = dl.denoise(half, PROMPTS, steps=2, gen_length=4)
    errors = {}
    for passes in (5, 200):
        found, exact = (
            edge_attribution(model, run, OTHERS, steps=[0], integration=passes).scores for model in (half, wide)
        )
        assert found.dtype == torch.float32
        errors[passes] = error(found, exact)
    # The passes themselves are in bfloat16, whose rounding is 0.004; more of them are no worse.
    assert errors[5] < 0.02
    assert errors[200] < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_large_activations_are_means(dtype: torch.dtype) -> None:
    """104 positions of 800 add up to more than float16 holds: the mean was infinite, and effects NaN."""
    model = tiny("llada")
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 3] = 800.0  # one channel, as the massive ones of large models
    model = model.to(dtype)
    run = dl.denoise(model, [[(7 * i * i + i) % 50 for i in range(100)], [3, 4]], steps=2, gen_length=4)
    found = activation_patching(model, run, "mean", "resid", steps=[0], layers=[0])
    assert bool(found.effects.isfinite().all())
    setup = Setup.of(model, run, "mean", LogProbability(), [0], None, "noising", "test")
    kept = 800 + torch.randn(2, 104, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    means = ablated("mean", kept, BothSides(setup).base, 0)
    for row in range(2):
        for opened in (True, False):
            where = (run.masked[0, row] == opened) & run.attention_mask[row]
            exact = kept[row, where].double().mean(0).to(dtype)
            # One step of the dtype: the sum of float32 may round to the other side.
            step = torch.finfo(dtype).eps
            torch.testing.assert_close(means[row, where], exact.expand(int(where.sum()), -1), atol=0, rtol=step)


def test_sums_over_queries_do_not_depend_on_how_many_are_formed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    half, _ = both()
    ids = [[(7 * i * i + i) % 50 for i in range(40)]]
    other = [[token + (place % 5 == 0) for place, token in enumerate(ids[0])]]
    run = dl.denoise(half, ids, steps=2, gen_length=4)

    def measured() -> tuple[Tensor, Tensor, Tensor]:
        return (
            column_attribution(half, run, steps=[0]).log_scale,
            attribution_patching(half, run, other, "k", steps=[0]).effects,
            attribution_patching(half, run, other, "q", steps=[0]).effects,
        )

    whole = measured()
    monkeypatch.setattr("dlm_lens.probes.attribution.softmax.TILE_ENTRIES", 4 * 44)  # one query of four heads
    for one, other_tiles in zip(whole, measured(), strict=True):
        assert float(one.abs().max()) > 0
        # Sums of float64 in another order; in bfloat16 they differed by 0.004.
        torch.testing.assert_close(other_tiles, one, atol=1e-9, rtol=1e-6)
