"""Sinks of a part of a recording count its steps and heads from 0, and say so."""

from typing import Any

import pytest
import torch

from dlm_lens import KeyNorm, ReceivedAttention, find_sinks, received_of, record
from dlm_lens.recording import Recording
from dlm_lens.sinks import key_statistic_of
from dlm_lens.testing import tiny


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(tiny("llada"), [[1, 2, 3], [4, 5, 6]], steps=4, gen_length=4)


@pytest.mark.parametrize(
    ("part", "sentences"),
    [
        ({}, []),
        ({"layer": 1, "batch": 1}, []),
        ({"step": slice(0, 3), "head": [0, 1]}, []),
        ({"step": [0, 3]}, ["some steps of a run", "step 3 is step 1 there"]),
        ({"head": [1, 3]}, ["some heads of a run", "head 1 is head 0 there"]),
    ],
)
def test_it_says_which(
    recording: Recording, part: dict[str, Any], sentences: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    received_of(recording.select(**part) if part else recording)
    assert len(caplog.records) == bool(sentences)
    for sentence in sentences:
        assert sentence in caplog.text


def test_the_key_norms_of_some_heads_are_those_of_their_key_heads() -> None:
    whole = record(tiny("dream"), [[1, 2, 3], [4, 5, 6]], [KeyNorm(), ReceivedAttention()], steps=2, gen_length=4)
    part = whole.select(head=[3, 0])
    assert whole.key_norm.shape[3] == 2  # four query heads, two to a key head
    norms = key_statistic_of(part, "key norm").values
    assert norms.shape[3] == 2
    for place, head in enumerate((3, 0)):
        assert torch.equal(norms[:, :, :, place], whole.key_norm[:, :, :, head // 2])
    found, every = (find_sinks(each, "low-key-norm:0.95").is_sink for each in (part, whole))
    assert bool(every.any())
    assert torch.equal(found, every[:, :, :, [3, 0]])
