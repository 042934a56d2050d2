"""Analyses of sinks given another result than the one that they read say what to give."""

from collections.abc import Callable
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens import sinks as of_sinks
from dlm_lens.probes import (
    decision_order,
    early_attention,
    feature_contexts,
    pattern_stability,
    region_flow,
    sink_updates,
    token_effects,
    value_norms,
)
from dlm_lens.viz import emerging_text, feature_rates, region_mass
from dlm_lens.viz.sink_tracks import row_blocks

FOLLOWED, RECEIVED = "Trajectories of dlm_lens.trajectories", "Recording, or the Received of dlm_lens.received_of"
TAKES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "sink_consistency": (FOLLOWED, of_sinks.sink_consistency),
    "token_enrichment": (FOLLOWED, of_sinks.token_enrichment),
    "position_enrichment": (FOLLOWED, of_sinks.position_enrichment),
    "frontier_alignment": (FOLLOWED, of_sinks.frontier_alignment),
    "sink_profile": (RECEIVED, of_sinks.sink_profile),
    "eps_sweep": (RECEIVED, lambda given: of_sinks.eps_sweep(given, [1.0])),
    "compare_query_classes": (RECEIVED, lambda given: of_sinks.compare_query_classes(given, given)),
    "sink_rate": ("Sinks of dlm_lens.find_sinks", of_sinks.sink_rate),
}
"""What each function reads, and a call of it."""

OF_RECORDINGS: dict[str, Callable[[Any], Any]] = {
    "received_of": dl.received_of,
    "received_of_split": of_sinks.received_of_split,
    "key_statistic_of": lambda given: of_sinks.key_statistic_of(given, "key norm"),
    "region_flow": region_flow,
    "feature_contexts": lambda given: feature_contexts([given]),
    "feature_rates": feature_rates,
    "region_mass": region_mass,
    "value_norms": lambda given: value_norms(given, "learned"),
    "early_attention": early_attention,
}
"""Functions that read a recording."""


@pytest.fixture
def results(tiny_llada: Any) -> dict[str, Any]:
    """One of every result of a run, by its class."""
    recording = dl.record(tiny_llada, ["w1 w2"], [dl.ReceivedAttention()], gen_length=8, steps=2)
    received = dl.received_of(recording)
    every = (
        recording,
        recording.run,
        received,
        dl.find_sinks(received, dl.TopK(1)),
        dl.trajectories(received, dl.TopK(1)),
    )
    return {type(one).__name__: one for one in every}


@pytest.mark.parametrize("name", TAKES)
def test_another_result_is_named_with_what_to_give(results: dict[str, Any], name: str) -> None:
    must_be, call = TAKES[name]
    wrong = [one for kind, one in results.items() if f"{kind} of " not in must_be and f"{kind}, " not in must_be]
    assert len(wrong) == (3 if must_be == RECEIVED else 4)
    for given in wrong:
        with pytest.raises(ValueError, match=f"it must be (a|the) {must_be}"):
            call(given)


@pytest.mark.parametrize("name", OF_RECORDINGS)
def test_what_is_no_recording_is_named(results: dict[str, Any], name: str) -> None:
    for kind in ("DenoisingRun", "Received", "Sinks", "Trajectories"):
        with pytest.raises(TypeError, match=f"the recording is a {kind}; give a Recording of dlm_lens.record"):
            OF_RECORDINGS[name](results[kind])


def test_a_recording_in_the_place_of_its_run_is_named_with_the_remedy(
    tiny_llada: Any, results: dict[str, Any]
) -> None:
    recording, sinks = results["Recording"], results["Sinks"]
    calls: list[Callable[[], Any]] = [
        lambda: dl.logit_lens(tiny_llada, recording),
        lambda: pattern_stability(tiny_llada, recording, dl.TopK(1)),
        lambda: token_effects(tiny_llada, recording, step=0),
        lambda: sink_updates(tiny_llada, recording, sinks),
        lambda: decision_order(recording),
        lambda: row_blocks(recording, 0),
        lambda: emerging_text(recording),
    ]
    for call in calls:
        with pytest.raises(
            TypeError, match=r"the run is a Recording; give the DenoisingRun .* returned \(its .run\)"
        ):
            call()
    with pytest.raises(ValueError, match=r"sinks is .*; it must be the Sinks of dlm_lens.find_sinks"):
        sink_updates(tiny_llada, recording.run, recording)
