"""Verdicts of the figures, on planted results: each needs its whole interval on one side."""

from pathlib import Path

import pytest

from dlm_lens.experiments import find_experiment, render_experiment
from dlm_lens.experiments.attention_sinks import (
    beyond_future,
    fig1_incoming,
    fig4_moving,
    fig7_paths,
    fig8_static,
    page,
    two_scales,
)
from dlm_lens.experiments.results import Record, Results
from tests.experiments.finished_runs import finished_run


def results_of(model: str, **values: list) -> Results:
    return finished_run({"settings": {}}, [Record({"model": model, "start": 0}, values, 0.0)])


def scales(**values: list) -> dict[str, list]:
    """The same values on both scales."""
    return {f"{scale} {name}": value for scale in two_scales.SCALES for name, value in values.items()}


def beside(dlm: dict[str, list], baseline: dict[str, list]) -> Results:
    records = [
        Record({"model": model, "start": 0}, values, 0.0) for model, values in (("toy", dlm), ("toy-ar", baseline))
    ]
    return finished_run({"settings": {}}, records)


@pytest.mark.parametrize(
    ("sums", "relative", "verdicts"),
    [([0] * 40, [3] * 40, ("agrees", "undecided")), ([3, 4] * 20, [9] * 40, ("undecided", "disagrees"))],
)
def test_sinks_that_move_unlike_an_ar_model_s_on_each_scale(
    sums: list[int], relative: list[int], verdicts: tuple[str, str]
) -> None:
    # Ten patterns a prompt; the DLM's move in three or four of them.
    n = [10] * 40
    dlm = scales(moved=[3, 4] * 20, compared=n, chance=[1] * 40, beyond=[2, 3] * 20)
    even = scales(**{"uniform moved": [0] * 40, "uniform compared": [1] * 40})
    baseline = even | {"sums moved": sums, "relative moved": relative, "sums compared": n, "relative compared": n}
    if relative == [3] * 40:
        baseline["relative moved"] = [3, 4] * 20
    first, *others = fig1_incoming._findings(beside(dlm, baseline))
    assert first.verdict == "agrees"
    assert "0.25 [" in first.here
    assert "random order: 0.10" in first.null
    assert tuple(one.verdict for one in others) == verdicts
    assert all("0.00 of 40" in one.null for one in others)


def test_an_ar_model_without_sinks_at_both_ends_decides_nothing() -> None:
    dlm = scales(moved=[3, 4], compared=[10, 10], chance=[1, 1], beyond=[2, 3])
    none = scales(**{"moved": [0, 0], "compared": [0, 0], "uniform moved": [0, 0], "uniform compared": [0, 0]})
    others = list(fig1_incoming._findings(beside(dlm, none)))[1:]
    assert [one.verdict for one in others] == ["undecided"] * 2
    assert all("no pattern with a sink at both ends" in one.why for one in others)


def test_moving_patterns_need_more_than_coincidence_and_an_ar_model_is_judged_on_each_scale() -> None:
    n = 40
    common = {"patterns": [16] * n, "pairs": [400] * n}
    even = {f"{scale} uniform {kind}": [0] * n for scale in two_scales.SCALES for kind in fig4_moving.KINDS}
    dlm = common | even | scales(**{"moving": [1, 2] * 20, "static": [9, 10] * 20, "chance moving": [0.5] * n,
                                    "beyond": [0.5, 1.5] * 20})  # fmt: skip
    baseline = common | even | scales(moving=[0] * n, static=[14, 13] * 20)
    baseline |= {"relative moving": [3, 4] * 20, "relative static": [3, 4] * 20, "sums uniform static": [1] * n}
    first, on_sums, relative = fig4_moving._findings(beside(dlm, baseline))
    assert (first.verdict, on_sums.verdict, relative.verdict) == ("agrees", "agrees", "disagrees")
    assert "uniform attention: 1.00 static" in on_sums.null
    assert "uniform attention: no sink" in relative.null
    by_chance = dlm | scales(beyond=[-0.5, 0.5] * 20)
    assert next(fig4_moving._findings(beside(by_chance, baseline))).verdict == "undecided"


def test_what_no_pattern_does_has_one_interval_and_a_rate_is_not_negative() -> None:
    n = 40
    common = {"patterns": [16] * n, "pairs": [400] * n} | scales(static=[14, 13] * 20, **{"chance moving": [0] * n})
    found = results_of("toy-ar", **common, **scales(moving=[0] * n, moves=[0] * n))
    none = fig4_moving.share(found, "toy-ar", "moving")
    assert none.low == 0.0 < none.high < 0.03  # of 40 prompts alone Wilson's bound is 0.09
    assert fig4_moving.chance(found, "toy-ar", "sums") == none
    assert fig4_moving._rate(found, "toy-ar", "moves", "sums") == f"0.0 [0.0, {100 * none.high:.1f}]"
    # Of two networks one moves: Student's interval over both reaches below 0.
    records = [
        Record({"model": "toy", "start": 0, "network": each}, common | scales(moves=[2 * each] * n), 0.0)
        for each in (0, 1)
    ]
    assert fig4_moving._rate(finished_run({"settings": {}}, records), "toy", "moves", "sums").startswith(
        "0.2 [0.0, "
    )


@pytest.mark.parametrize(("right", "verdicts"), [(6, ("agrees", "disagrees")), (2, ("disagrees", "agrees"))])
def test_direction_of_the_drift_in_each_order(right: int, verdicts: tuple[str, str]) -> None:
    n = 20
    values: dict[str, list] = {}
    for order in ("blocks", "no blocks"):
        values |= {f"{order}: {kind} {name}": [0.9] * n for kind in ("block", "any") for name in ("right", "drift")}
        values |= {f"{order}: {name}": value for name, value in scales(**{
            "drift": [1.0] * n, "drifting": [8] * n, "right": [right, right + 1] * 10, "directed": [8] * n,
            "static": [7, 8] * 10, "with sink": [10] * n, "static at random": [1] * n,
        }).items()}  # fmt: skip
    found = list(fig7_paths._findings(results_of("toy", **values)))
    assert tuple(one.verdict for one in found if "static" not in one.paper) == verdicts
    assert ["LLaDA" in one.paper for one in found] == [True, False, False, False]
    assert [one.verdict for one in found if "static" in one.paper] == ["agrees"] * 2


def test_what_the_causal_mask_alone_gives_is_no_evidence() -> None:
    n = 20
    values = {f"left to right: {name}": value for name, value in scales(**{
        "static": [10] * n, "first": [9, 10] * 10, "by chance": [1.0] * n, "beyond": [8.0, 9.0] * 10,
        "uniform static": [1] * n, "uniform first": [1] * n,
    }).items()}  # fmt: skip
    values["left to right: relative uniform static"] = values["left to right: relative uniform first"] = [0] * n
    on_sums, relative = fig8_static._findings(results_of("toy-ar", **values))
    assert on_sums.verdict == "no counterpart"
    assert "uniform attention 1.00 of 20" in on_sums.null
    assert relative.verdict == "agrees"


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [([0.5, 0.6, 0.5] * 2, "agrees"), ([0.1, 0.2, 0.1] * 2, "disagrees"), ([0.1, 0.9, 0.2] * 2, "undecided")],
)
def test_more_future_sinks_than_a_random_key(shares: list[float], verdict: str) -> None:
    places = [{place: [share, 0.3] for place in beyond_future.PLACES} for share in shares]
    lens = [{group: [[0, 0.0, 1]] for group in beyond_future.GROUPS}] * len(shares)
    finding, *_ = beyond_future._findings(results_of("toy", places=places, lens=lens))
    assert finding.verdict == verdict
    assert f"{sum(shares) / 6:.3f} of the sinks" in finding.here


@pytest.mark.parametrize("name", ["beyond-context", "beyond-freezing", "beyond-places", "table1-masking"])
def test_an_unfinished_run_is_rendered(name: str, tmp_path: Path) -> None:
    whole = (page.RESULTS / name / "results-00000.jsonl").read_text().splitlines(keepends=True)
    first = next(place for place, line in enumerate(whole) if line.startswith('{"item"'))
    (tmp_path / "results-00000.jsonl").write_text("".join(whole[: first + 4]))
    text = render_experiment(find_experiment(name), tmp_path).read_text()
    assert "**Unfinished: " in text
    assert "| toy |" in text


@pytest.mark.parametrize(
    ("near", "distance", "verdicts"),
    [([6, 7] * 10, 40.0, ("agrees", "agrees")), ([1, 2] * 10, 99.0, ("disagrees", "disagrees"))],
)
def test_sinks_at_the_rightmost_mask_without_blocks(
    near: list[int], distance: float, verdicts: tuple[str, str]
) -> None:
    n = 20
    values: dict[str, list] = {}
    for order in ("blocks", "no blocks"):
        values |= {f"{order}: {name}": value for name, value in {
            "onsets": [10] * n, "onsets near": near, "onsets by chance": [0.5] * n, "rightmost mask n": [4] * n,
            "onsets beyond": [one - 0.5 for one in near], "rightmost mask distance": [distance, distance - 2] * 10,
            "rightmost mask random order": [100.0] * n,
        }.items()}  # fmt: skip
        values |= {f"{order}: {name}": value for name, value in scales(**{
            "static": [10] * n, "first": [1, 2] * 10, "by chance": [0.7] * n, "beyond": [0.3, 1.3] * 10,
            "uniform static": [0] * n, "uniform first": [0] * n,
        }).items()}  # fmt: skip
    first, *blocks = fig8_static._findings(results_of("toy", **values))
    assert first.verdict == "disagrees"  # 0.15 is not often, although above a random key's 0.07
    assert "random key 0.07" in first.null
    assert [one.verdict for one in blocks[:2]] == ["no counterpart"] * 2
    assert tuple(one.verdict for one in blocks[2:]) == verdicts
