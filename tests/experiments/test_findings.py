"""Verdicts of the figures, on planted results: each needs its whole interval on one side."""

from pathlib import Path

import pytest

from dlm_lens.experiments import find_experiment, render_experiment
from dlm_lens.experiments.attention_sinks import beyond_future, fig1_incoming, fig6_kinds, page
from dlm_lens.experiments.results import Record, Results


def results_of(model: str, **values: list) -> Results:
    return Results({"settings": {}}, [Record({"model": model, "start": 0}, values, 0.0)])


@pytest.mark.parametrize(
    ("moved", "verdict"),
    [([0] * 8, "agrees"), ([5] * 8, "disagrees"), ([0, 0, 0, 4, 0, 0, 0, 4], "undecided"), ([0] * 2, "undecided")],
)
def test_an_ar_model_s_sinks_do_not_shift(moved: list[int], verdict: str) -> None:
    # Ten patterns a prompt; two prompts have fewer than 30.
    (finding,) = fig1_incoming._findings(results_of("toy-ar", moved=moved, compared=[10] * len(moved)))
    assert finding.verdict == verdict


@pytest.mark.parametrize(
    ("transient", "verdict"),
    [([1, 2, 1, 2], "agrees"), ([0] * 4, "undecided"), ([9, 8, 9, 8], "disagrees"), ([1, 9, 1, 7], "undecided")],
)
def test_transient_sinks_are_edge_cases(transient: list[int], verdict: str) -> None:
    found = results_of("toy", both=[[4]] * 4, differ=[[1]] * 4, lives=[10] * 4, transient=transient)
    assert [one.verdict for one in fig6_kinds._findings(found) if "vanish" in one.paper] == [verdict]


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [([0.5, 0.6, 0.5], "agrees"), ([0.1, 0.2, 0.1], "disagrees"), ([0.1, 0.9, 0.2], "undecided")],
)
def test_more_future_sinks_than_a_random_key(shares: list[float], verdict: str) -> None:
    places = [{place: [share, 0.3] for place in beyond_future.PLACES} for share in shares]
    lens = [{group: [[0, 0.0, 1]] for group in beyond_future.GROUPS}] * len(shares)
    finding, *_ = beyond_future._findings(results_of("toy", places=places, lens=lens))
    assert finding.verdict == verdict
    assert f"{sum(shares) / 3:.3f} of the sinks" in finding.here


@pytest.mark.parametrize("name", ["beyond-context", "beyond-freezing", "beyond-places", "table1-masking"])
def test_an_unfinished_run_is_rendered(name: str, tmp_path: Path) -> None:
    whole = (page.RESULTS / name / "results-00000.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results-00000.jsonl").write_text("".join(whole[:6]))
    text = render_experiment(find_experiment(name), tmp_path).read_text()
    assert "**Unfinished: " in text
    assert "| toy |" in text
