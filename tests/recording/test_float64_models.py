"""Reducers and probes on a model in float64 against the same model in float32."""

import copy
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.recording import (
    AttentionEntropy,
    AttentionPattern,
    ChannelActivations,
    FeatureActivations,
    KeyNorm,
    MassiveActivations,
    QueryNorm,
    ReceivedAttention,
    RegionMass,
    ResidualNorm,
    StaleAttention,
    TopKeys,
    UpdateNorm,
    ValueNorm,
    WeightedValue,
    rerun,
)
from dlm_lens.testing import tiny
from tests.recording.test_features import autoencoder

RUN: dict[str, Any] = {"steps": 4, "gen_length": 8, "block_length": 4}
REDUCERS = (
    ReceivedAttention(("all", "masked", "prompt")),
    WeightedValue(),
    TopKeys(2),
    AttentionPattern(),
    AttentionEntropy(),
    RegionMass(dl.AboveMean(1.0)),
    StaleAttention(),
    ValueNorm("both"),
    KeyNorm("both"),
    QueryNorm(),
    ResidualNorm(),
    MassiveActivations(),
    ChannelActivations(),
    UpdateNorm(),
)
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5, "equal_nan": True, "check_dtype": False}


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any, dl.DenoisingRun]:
    model = tiny("llada")
    return model, copy.deepcopy(model).double(), dl.denoise(model, [5, 9, 11, 3, 17], **RUN)


@pytest.mark.parametrize("reducer", REDUCERS, ids=lambda one: type(one).__name__)
def test_a_reducer_is_the_same_in_float64(models: Any, reducer: Any) -> None:
    narrow, wide, run = models
    one, other = rerun(narrow, run, [reducer]), rerun(wide, run, [reducer])
    for name in one.specs:
        assert getattr(one, name).dtype == getattr(other, name).dtype
        torch.testing.assert_close(getattr(other, name), getattr(one, name), msg=name, **CLOSE)


def test_features_are_the_same_in_float64(models: Any) -> None:
    narrow, wide, run = models
    sae = autoencoder(narrow)
    one, other = (rerun(model, run, [FeatureActivations(sae, (1, 2))], layers=[1]) for model in (narrow, wide))
    for name in one.specs:
        torch.testing.assert_close(getattr(other, name), getattr(one, name), msg=name, **CLOSE)


def test_probes_of_sinks_are_the_same_in_float64(models: Any) -> None:
    narrow, wide, run = models
    detector = dl.AboveMean(0.5)
    sinks = dl.find_sinks(rerun(narrow, run, [ReceivedAttention()]), detector)
    causes, wide_causes = (probes.sink_anatomy(model, run, detector) for model in (narrow, wide))
    assert causes.is_sink[..., 0].equal(wide_causes.is_sink[..., 0])
    for name in ("mean_cosine", "query_norm", "key_norm", "variance_shares"):
        torch.testing.assert_close(getattr(wide_causes, name), getattr(causes, name), msg=name, **CLOSE)
    writes, wide_writes = (probes.sink_writes(model, run, sinks, steps=[0]) for model in (narrow, wide))
    torch.testing.assert_close(wide_writes.norm, writes.norm, **CLOSE)
