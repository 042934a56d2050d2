"""The statistics and the verdicts of `axis-clock` on results that are written by hand."""

from typing import Any

import numpy as np
import pytest

from dlm_lens.experiments.denoising_axis.axis_clock import (
    EXPERIMENT,
    beyond,
    findings,
    gain_of_training,
    nearer,
    r2,
)
from dlm_lens.experiments.results import Record, Results
from tests.experiments.finished_runs import finished_run

RNG = np.random.default_rng(0)
PROMPTS = 40


def noisy(mean: float) -> list[float]:
    return [float(value) for value in mean * (1 + 0.05 * RNG.standard_normal(PROMPTS))]


def reading(shares: list[float]) -> dict[str, Any]:
    """A class of positions whose squared error is a share of the spread, layer by layer."""
    return {
        "count": [10.0] * PROMPTS,
        "spread": noisy(2.0),
        "errors": [noisy(2.0 * share) for share in shares],
        "absolute": [noisy(5.0) for _ in shares],
        "null": [-0.01] * len(shares),
        "token": noisy(2.0),
        "position": noisy(1.6),
        "by_label": [],
    }


def record(model: str, weights: str, shares: list[float], **value: Any) -> Record:
    names = ("written", "prompt") if model == "toy-ar" else ("open", "written", "prompt")
    found = {"layers": [-1, 0, 1], **{name: reading(shares) for name in names}}
    return Record({"model": model, "weights": weights}, {"reading": found, "layer": 0, **value}, 1.0)


def results(trained: list[float], twin: list[float], effect: float, step: float) -> Results:
    distances = {"time": 0.01, "progress": 0.01, "step": step, "open positions": 0.05, "written positions": 0.05}
    distances["open share of the canvas"] = 0.05
    steering = []
    for by in (-0.5, 0.5):
        for direction, size in (("clock", effect), ("random", 0.001), ("orthogonal", 0.001)):
            changes = {"entropy": noisy(-by * size), "confidence": noisy(by * size), "kl": noisy(abs(size))}
            steering.append({"by": by, "direction": direction, **changes, "flipped": noisy(0.1), "read": noisy(by)})
    others = {
        name: {key: noisy(one) for key, one in distances.items()} for name in ("fewer steps", "longer answer")
    }
    records = [
        record("toy", "trained", trained, **others, steering=steering),
        record("toy", "untrained", twin),
        record("toy-ar", "trained", [1.0, 1.0, 1.0]),
        record("toy-ar", "untrained", [1.0, 1.0, 1.0]),
    ]
    return finished_run({"settings": {"models": ["toy", "toy-ar"]}, "experiment": "axis-clock"}, records)


def verdicts(found: Results) -> dict[str, str]:
    return {f"{one.here.split(':')[0]}: {one.paper}": one.verdict for one in findings(found)}


def test_statistics_are_those_of_the_sums() -> None:
    both = results([1.0, 0.2, 0.4], [1.0, 0.5, 0.5], 0.1, 0.05).records
    one, two = (record.value["reading"]["written"] for record in both[:2])
    assert r2(both[0], "written", 1).value == pytest.approx(1 - sum(one["errors"][1]) / sum(one["spread"]))
    found = r2(both[0], "written", 1)
    assert found.low < found.value < found.high
    wanted = 1 - (sum(one["errors"][1]) + sum(one["errors"][2])) / (2 * sum(one["position"]))
    assert beyond(both[0], "written", "position").value == pytest.approx(wanted)
    errors = [sum(sum(part["errors"][place]) for place in (1, 2)) / 2 for part in (one, two)]
    assert gain_of_training(both[0], both[1], "written").value == pytest.approx(
        (errors[1] - errors[0]) / sum(one["spread"])
    )
    other = both[0].value["fewer steps"]
    assert nearer(both[0], "fewer steps", "progress", "step").value == pytest.approx(
        np.mean(other["step"]) - np.mean(other["progress"])
    )


def test_verdicts_follow_the_rules() -> None:
    clear = verdicts(results([1.0, 0.2, 0.4], [1.0, 0.5, 0.5], 0.1, 0.05))
    assert sum(value == "agrees" for value in clear.values()) == 13
    assert {value for name, value in clear.items() if name.startswith("toy:")} == {"agrees"}
    # An AR model whose written positions say less than their place agrees with the control.
    assert {value for name, value in clear.items() if name.startswith("toy-ar:")} == {"agrees"}
    worse = verdicts(results([1.0, 0.2, 0.7], [1.0, 0.1, 0.1], -0.1, 0.005))
    assert {value for name, value in worse.items() if "in all" in name} == {"disagrees"}
    assert {value for name, value in worse.items() if "has learned" in name} == {"disagrees"}
    assert {value for name, value in worse.items() if "later is surer" in name} == {"disagrees"}
    assert {value for name, value in worse.items() if "not the number of the step" in name} == {"disagrees"}


def test_the_plan_counts_the_passes() -> None:
    small = EXPERIMENT.small
    item = {"model": "toy", "weights": "untrained"}
    assert EXPERIMENT.cost is not None
    assert [one.passes for one in EXPERIMENT.cost(item, small)] == [3 * 16 * 2]  # run, fit and score of two batches
    assert len(list(EXPERIMENT.items(small))) == 6
