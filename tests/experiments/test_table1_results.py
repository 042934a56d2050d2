"""The tables that the committed results of Table 1 give, made again by hand from their lines."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dlm_lens.experiments import find_experiment, load_results
from dlm_lens.experiments.attention_sinks import page
from dlm_lens.experiments.experiment import Rendering
from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.results import Results

DIRECTORY = page.RESULTS / "table1-masking"
BASE = {"choose": "top", "per": "head", "source": "current", "stage": "before_softmax", "scale": "relative"}
READINGS: dict[str, dict[str, str]] = {
    "unmasked": {},
    "top k of every head, this pass, before the softmax": {},
    "per layer": {"per": "layer"},
    "per model, source previous": {"per": "model", "source": "previous"},
    "source previous": {"source": "previous"},
    "source clean": {"source": "clean"},
    "stage after": {"stage": "after"},
    "scale raw": {"scale": "raw"},
    "per layer, scale raw": {"per": "layer", "scale": "raw"},
    "the first positions, whatever they receive": {"choose": "first"},
    "choose eps": {"choose": "eps"},
    "only function tokens": {"classes": "function"},
    "only content tokens": {"classes": "content"},
}
WITHOUT_ENTRY = (("classes", None),)
"""What an item that lacks the entry means."""


@pytest.fixture(scope="module")
def results() -> Results:
    return load_results(find_experiment("table1-masking"), DIRECTORY)


@pytest.fixture(scope="module")
def table_1(results: Results) -> Rendering:
    return find_experiment("table1-masking").render(results)


@pytest.fixture(scope="module")
def stored() -> list[dict[str, Any]]:
    found = []
    for path in sorted(DIRECTORY.glob("results*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if "item" in line]


def values(stored: Sequence[dict[str, Any]], model: str, columns: int, **changes: Any) -> dict[str, list[float]]:
    """The values of a condition, prompt by prompt or item by item, of all networks (each has as many prompts)."""
    wanted = {**dict(WITHOUT_ENTRY), **BASE, "model": model, "columns": columns, **changes}
    mine = [line["value"] for line in stored
            if all(line["item"].get(name, dict(WITHOUT_ENTRY).get(name)) == value
                   for name, value in wanted.items())]  # fmt: skip
    found = {name: [value[name] for value in mine] for name in ("hidden", "mass", "learned")}
    return {**found, "right": [one for value in mine for one in value["correct"]]}


def average(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def number(cell: str) -> float:
    return float(cell.split()[0])


def test_every_row_by_hand(stored: list[dict[str, Any]], table_1: Rendering, results: Results) -> None:
    seen: dict[str, int] = {}
    for model, columns, reading, _, hidden, mass, match, lost, n in table_1.tables[0].rows:
        found, plain = (values(stored, model, k, **READINGS[reading] if k else {}) for k in (int(columns), 0))
        right = found["right"]
        networks = 1 if model == "smollm2" else 3
        assert len(right) == len(plain["right"]) == networks * int(n) >= (72 if model == "smollm2" else 90)
        assert number(hidden) == pytest.approx(average(found["hidden"]), abs=0.0051)
        assert float(mass) == pytest.approx(average(found["mass"]), abs=0.00051)
        assert match.startswith(f"{average(right):.2f} [")
        if columns == "0":
            assert lost == "-"
        else:
            assert number(lost) == pytest.approx(average(right) - average(plain["right"]), abs=0.0051)
        seen[model] = seen.get(model, 0) + 1
    assert list(seen) == results.models
    assert min(seen.values()) >= 4


def test_every_control_by_hand(stored: list[dict[str, Any]], table_1: Rendering, results: Results) -> None:
    seen = set()
    for model, columns, reading, *cells in table_1.tables[1].rows:
        right = values(stored, model, int(columns), **READINGS[reading])["right"]
        for place, choose in enumerate(("random", "mass")):
            control = values(stored, model, int(columns), **{**READINGS[reading], "choose": choose})
            hidden, mass, match, more = cells[4 * place : 4 * place + 4]
            if not control["right"]:
                assert {hidden, mass, match, more} == {"-"}
                continue
            seen.add((model, int(columns), choose))
            assert number(hidden) == pytest.approx(average(control["hidden"]), abs=0.0051)
            assert float(mass) == pytest.approx(average(control["mass"]), abs=0.00051)
            assert match.startswith(f"{average(control['right']):.2f} [")
            assert number(more) == pytest.approx(average(right) - average(control["right"]), abs=0.0051)
    toys = [model for model in results.models if model.startswith("toy")]
    assert seen >= {(model, k, choose) for model in toys for k in (1, 5, 10) for choose in ("random", "mass")}


def test_the_control_of_the_same_mass_has_the_mass_and_the_other_one_has_not(stored: list[dict[str, Any]]) -> None:
    for model in ("toy", "toy-sink", "toy-ar"):
        for columns in (1, 5, 10):
            sinks, counted, weighed = (
                values(stored, model, columns, choose=one) for one in ("top", "random", "mass")
            )
            mass = [average(one["mass"]) for one in (sinks, counted, weighed)]
            # Each condition has canvases of its own; in an AR prefix the other columns may hold too little.
            assert mass[2] == pytest.approx(mass[0], rel=0.2 if model == "toy-ar" else 0.06)
            assert mass[1] < 0.55 * mass[0]
            hidden = [average(one["hidden"]) for one in (sinks, counted, weighed)]
            assert hidden[2] > 1.5 * hidden[0]
            assert hidden[1] == pytest.approx(hidden[0], rel=0.02)
    assert 0.15 < average(values(stored, "toy-sink", 1)["learned"]) < 0.3
    assert sum(values(stored, "toy-sink", 1, choose="mass")["learned"]) == 0
    assert sum(values(stored, "toy", 1)["learned"]) == 0


def test_sinks_matter_more_than_random_columns_in_the_shipped_networks(stored: list[dict[str, Any]]) -> None:
    right = {
        (model, choose): average(values(stored, model, 1, choose=choose, network=0)["right"])
        for model in ("toy", "toy-sink", "toy-ar")
        for choose in ("top", "random", "mass")
    }
    for model, choose in right:
        assert choose != "random" or right[model, "top"] < right[model, choose] - 0.3
    # Of the same mass too in the DLMs; in the AR model most of the difference is the mass.
    for model in ("toy", "toy-sink"):
        assert right[model, "top"] < right[model, "mass"] - 0.4 < right[model, "random"] - 0.3
    assert right["toy-ar", "mass"] - right["toy-ar", "top"] < 0.5 * (
        right["toy-ar", "random"] - right["toy-ar", "top"]
    )


def test_classes_split_the_strongest_columns_and_their_controls_match(
    stored: list[dict[str, Any]], results: Results
) -> None:
    for model in results.models:
        if not {"function", "content"} <= set(settings_of(results.settings, model)["variants"]):
            continue
        held = {name: values(stored, model, 1, classes=name) for name in ("function", "content")}
        shares = [average(one["hidden"]) for one in held.values()]
        learned = average(values(stored, model, 1)["learned"])
        # Each run has canvases of its own, so that the shares add up nearly; a few columns are of other classes.
        assert sum(shares) + learned == pytest.approx(1, abs=0.06)
        assert min(shares) > 0.05
        for name, one in held.items():
            counted, weighed = (values(stored, model, 1, classes=name, choose=how) for how in ("random", "mass"))
            # As many and as much in every map of its own run (tests/hooks); the texts of the two runs differ.
            assert average(counted["hidden"]) == pytest.approx(average(one["hidden"]), rel=0.15)
            assert average(weighed["mass"]) == pytest.approx(average(one["mass"]), rel=0.15)
            assert average(counted["mass"]) < 0.75 * average(weighed["mass"])
            assert sum(sum(control["learned"]) for control in (counted, weighed)) == 0
