"""Intervals of correlations, shares and R^2 end at what these can be."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import EarlyAttention, decision_order
from dlm_lens.probes.clock.readings import _r2
from dlm_lens.probes.early_patterns import MEASURES, PREDICTORS
from dlm_lens.sinks.statistics import R2_BOUNDS, estimate, estimate_mean


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


def test_r2_is_at_most_1() -> None:
    # Per prompt 1, y, y^2 and the squared error: two prompts read exactly, one badly.
    sums = [[2.0, 1.0, 1.0, 0.0], [2.0, 1.0, 1.0, 0.4], [2.0, 1.0, 1.0, 0.0]]
    assert estimate(sums, _r2).high > 1
    found = estimate(sums, _r2, bounds=R2_BOUNDS)
    assert (found.high, found.low) == (1.0, estimate(sums, _r2).low)
