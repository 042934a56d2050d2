"""Intervals of correlations, shares, R^2, norms, entropies and divergences end at what these can be."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import ChannelRemoval, EarlyAttention, decision_order, logit_lens, sink_writes, value_norms
from dlm_lens.probes.clock.readings import _r2
from dlm_lens.probes.early_patterns import MEASURES, PREDICTORS
from dlm_lens.statistics import POSITIVE_BOUNDS, R2_BOUNDS, estimate, estimate_mean


@pytest.mark.parametrize(("tau", "end"), [([1.0, 0.2, 1.0], "high"), ([-1.0, -0.2, -1.0], "low")])
def test_a_rank_correlation_s_interval_ends_at_one(tiny_llada: Any, tau: list[float], end: str) -> None:
    run = dl.denoise(tiny_llada, ["w1 w2", "w3 w4", "w5 w6"], gen_length=4, steps=4)
    found = replace(decision_order(run), tau=torch.tensor(tau)).mean
    assert abs(getattr(estimate_mean(tau, range(3), 3), end)) > 1  # of three rows the interval is wide
    assert abs(getattr(found, end)) == 1
    assert found.low < found.value < found.high


def test_shares_and_correlations_of_predictors_have_their_own_bounds() -> None:
    sums = torch.zeros(len(PREDICTORS), len(MEASURES), 3, 1, 1, 2)
    sums[..., 0], sums[..., 1] = torch.tensor([0.1, 0.9, 0.1])[:, None, None], 1.0
    early = EarlyAttention(
        sums, sums[:, :, :, 0], torch.ones(*sums.shape[:-1], 3), torch.ones(3, 2), (0,), 1, 0.1, "all"
    )
    found = {name: early.mean(name) for name in MEASURES}
    assert found["correlation"].low < 0
    assert found["recall"].low == found["kept"].low == 0
    table = early.heads("recall")
    assert float(table["first_steps_low"].iloc[0]) == 0


def test_divergences_exceed_1_and_shares_do_not() -> None:
    """Sums and numbers of `ChannelRemoval`: of three prompts that differ the interval is wide."""
    pairs = torch.tensor(
        [[[9.0, 1], [10, 10], [0, 10]], [[0.1, 1], [10, 10], [3, 10]], [[8.0, 1], [4, 10], [0, 10]]]
    )
    sums = torch.stack([pairs, pairs]).double()
    found = ChannelRemoval((0,), ((1,),), torch.ones(1, 2), torch.ones(1, 2), sums, (0,), dl.AboveMean(3.0))
    kl, changed, gone = (found.mean(name) for name in ("kl", "changed", "sinks gone"))
    assert (kl.value, changed.value, gone.value) == pytest.approx((17.1 / 3, 0.8, 0.1))
    assert kl.low == 0 < 1 < kl.high
    assert (changed.high, gone.low) == (1, 0)


def test_r2_is_at_most_1() -> None:
    # Per prompt 1, y, y^2 and the squared error: two prompts read exactly, one badly.
    sums = [[2.0, 1.0, 1.0, 0.0], [2.0, 1.0, 1.0, 0.4], [2.0, 1.0, 1.0, 0.0]]
    assert estimate(sums, _r2).high > 1
    found = estimate(sums, _r2, bounds=R2_BOUNDS)
    assert (found.high, found.low) == (1.0, estimate(sums, _r2).low)


def test_norms_entropies_and_divergences_are_not_below_0(tiny_llada: Any) -> None:
    prompts = ["w1 w2", "w3 w4"]
    rec = dl.record(tiny_llada, prompts, [dl.ReceivedAttention(), dl.ValueNorm()], gen_length=8, steps=4)
    sinks = dl.find_sinks(rec, dl.TopK(1))
    tables = {}
    norms = value_norms(rec, sinks)
    apart = torch.where(norms.prompt == 0, 0.01, 1.0)  # of two prompts that differ the interval is wide
    norms = replace(norms, sink=norms.sink * apart, other=torch.ones_like(norms.other))
    for name in ("mean_sink", "ratio"):
        assert getattr(norms, name).low == 0 < getattr(norms, name).value
    lens = logit_lens(tiny_llada, rec.run, sinks)
    apart = torch.where(lens.batch == 0, 0.01, 1.0)[:, None]
    tables["lens"] = replace(lens, entropy=lens.entropy * apart, kl=lens.kl * apart).summary()
    writes = sink_writes(tiny_llada, rec.run, sinks)
    apart = torch.where(writes.batch == 0, 0.01, 1.0)
    tables["writes"] = replace(writes, norm=writes.norm * apart, entropy=writes.entropy * apart).summary()
    for table, columns in (("lens", ("entropy", "kl")), ("writes", ("norm", "entropy"))):
        for name in columns:
            low = tables[table][f"{name}_low"].dropna()
            assert len(low) > 0
            assert bool((low == 0).all()), (table, name)
    values, prompt = [0.01, 1.0], [0, 1]
    assert estimate_mean(values, prompt, 2).low < 0 == estimate_mean(values, prompt, 2, bounds=POSITIVE_BOUNDS).low
