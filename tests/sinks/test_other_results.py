"""Analyses of sinks given another result than the one that they read say what to give."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

import dlm_lens as dl
from dlm_lens import sinks as of_sinks
from dlm_lens.probes import (
    commitment,
    decision_order,
    early_attention,
    feature_contexts,
    pattern_stability,
    region_flow,
    sink_updates,
    sink_writes,
    token_effects,
    value_norms,
)
from dlm_lens.viz import emerging_lines, feature_rates, region_mass
from dlm_lens.viz.attention_snapshot import snapshot
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


OF_RUNS: dict[str, Callable[[Any, Any], Any]] = {
    "commitment": lambda model, run: commitment(model, run).token.tolist(),
    "decision_order": lambda model, run: decision_order(run).table(),
    "emerging_lines": lambda model, run: list(map(str, emerging_lines(run))),
    "logit_lens": lambda model, run: dl.logit_lens(model, run).table(),
    "pattern_stability": lambda model, run: pattern_stability(model, run, dl.TopK(1)).table(),
    "replay": lambda model, run: dl.replay(model, run, [dl.hooks.mask_positions(0)]).table(),
    "row_blocks": lambda model, run: row_blocks(run, 0),
    "snapshot": lambda model, run: snapshot(model, run, step=1, layer=0).pattern.tolist(),
    "token_effects": lambda model, run: token_effects(model, run, step=0).table(),
}
"""Functions that read a run, and their numbers."""


@pytest.mark.parametrize("name", OF_RUNS)
def test_a_recording_stands_for_its_run(tiny_llada: Any, results: dict[str, Any], name: str) -> None:
    part = results["Recording"].select(step=[1])
    for recording in (results["Recording"], *([part] if name == "commitment" else [])):
        found, own = OF_RUNS[name](tiny_llada, recording), OF_RUNS[name](tiny_llada, recording.run)
        pd.testing.assert_frame_equal(found, own) if isinstance(own, pd.DataFrame) else check_equal(found, own)
    if name != "row_blocks":
        with pytest.raises(TypeError, match="the run is a Received; give the DenoisingRun that"):
            OF_RUNS[name](tiny_llada, results["Received"])


def check_equal(found: Any, own: Any) -> None:
    """Raise unless both are equal."""
    assert found == own


WITH_SINKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "logit_lens": lambda model, run, sinks: dl.logit_lens(model, run, sinks).table(),
    "sink_updates": lambda model, run, sinks: sink_updates(model, run, sinks).table(),
    "sink_writes": lambda model, run, sinks: sink_writes(model, run, sinks).table(),
    "value_norms": lambda model, run, sinks: value_norms(run, sinks).table(),
}
"""Functions that read the sinks of a run, and their numbers."""


@pytest.mark.parametrize("name", WITH_SINKS)
def test_a_detector_finds_the_sinks_of_a_recording(tiny_llada: Any, name: str) -> None:
    reducers = [dl.ReceivedAttention(), dl.recording.ValueNorm()]
    recording, detector = dl.record(tiny_llada, ["w1 w2"], reducers, gen_length=8, steps=2), dl.TopK(1)
    own = WITH_SINKS[name](tiny_llada, recording, dl.find_sinks(recording, detector))
    pd.testing.assert_frame_equal(WITH_SINKS[name](tiny_llada, recording, detector), own)
    if name != "value_norms":
        with pytest.raises(
            ValueError, match=r"is TopK.*; it must be the Sinks .*, with a recording .*, a detector"
        ):
            WITH_SINKS[name](tiny_llada, recording.run, detector)
