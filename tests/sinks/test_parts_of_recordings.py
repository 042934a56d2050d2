"""Sinks of a part of a recording count its steps and heads from 0, and say so."""

from typing import Any

import pytest

from dlm_lens import received_of, record
from dlm_lens.recording import Recording
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
