"""docs/results_one_token.md against the committed results, computed again from their lines."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dlm_lens.experiments.one_token.page import PAGE, RESULTS, committed, page

TABLES = [f"table{number}" for number in range(1, 6)]


def lines(what: str) -> list[dict]:
    paths = sorted((RESULTS / f"one-token-{what}").glob("results-*.jsonl"))
    return [line for path in paths for line in map(json.loads, path.read_text().splitlines()) if "item" in line]


def section(what: str) -> str:
    title = what.replace("table", "Table ").replace("figure", "Figure ")
    return PAGE.read_text().split(f"## {title}: ")[1].split("\n## ")[0]


def losses(what: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for line in lines(what):
        found.setdefault(line["item"]["variant"], {})[line["item"]["seed"]] = line["value"]["loss"]
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its interval by scipy's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else float("nan")
    return float(np.mean(values)), float(half)


def difference(what: str, one: str, other: str) -> tuple[float, float]:
    both = losses(what)
    return interval([both[one][seed] - both[other][seed] for seed in sorted(both[one].keys() & both[other].keys())])


def row(text: str, start: str, table: int = 0) -> list[str]:
    found = [line for line in text.split("\n") if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in found[table].strip("|").split("|")]


def verdict(text: str, claim: str) -> str:
    return next(line for line in text.split("\n") if f"| {claim}:" in line).split("**")[1]


def test_the_page_is_rendered_from_the_results() -> None:
    assert PAGE.read_text() == page()
    assert [one.name for one in committed()] == [f"one-token-{what}" for what in ("figure1", "figure3", *TABLES)]


@pytest.mark.parametrize("what", TABLES)
def test_losses_and_paired_differences(what: str) -> None:
    text = section(what)
    labels = {"plain": "DLM", "sink": "DLM + sink token", "gated": "DLM + GA", "end": "sink token at the end",
              "sinks2": "2 sink tokens", "sinks4": "4 sink tokens", "zero": "zero-value token",
              "off-by-one": "off-by-one softmax"}  # fmt: skip
    baseline = "sink" if what == "table3" else "plain"
    found = losses(what)
    for variant, own in found.items():
        mean, half = interval(list(own.values()))
        # The paper's own table begins the section; ours has the seeds in its second column.
        (cells,) = [
            cells for number in range(text.count(f"| {labels[variant]} |"))
            if (cells := row(text, labels[variant], number))[1] == str(len(own))
        ]  # fmt: skip
        assert cells[2] == f"{mean:.3f} ± {half:.3f}"
        if variant != baseline:
            mean, half = difference(what, variant, baseline)
            assert cells[3] == f"{mean:+.3f} ± {half:.3f}"


@pytest.mark.parametrize(
    ("what", "claim", "one", "other"),
    [
        ("table1", "sink token - DLM", "sink", "plain"),
        ("table1", "sink token - gate", "sink", "gated"),
        ("table2", "DLM + extra token - DLM", "sink", "plain"),
        ("table2", "DLM + GA - DLM", "gated", "plain"),
        ("table2", "sink token - gate", "sink", "gated"),
        ("table3", "end - DLM", "end", "plain"),
        ("table4", "one - none", "sink", "plain"),
        ("table5", "zero value - DLM", "zero", "plain"),
    ],
)
def test_who_is_better(what: str, claim: str, one: str, other: str) -> None:
    mean, half = difference(what, one, other)
    expected = "agrees" if mean + half < 0 else "disagrees" if mean - half > 0 else "undecided"
    assert verdict(section(what), claim) == expected


@pytest.mark.parametrize(
    ("what", "claim", "one", "other"),
    [
        ("table3", "end - front", "end", "sink"),
        ("table5", "zero value - sink token", "zero", "sink"),
    ],
)
def test_who_is_alike(what: str, claim: str, one: str, other: str) -> None:
    mean, half = difference(what, one, other)
    limit = abs(difference(what, "sink", "plain")[0]) / 2
    expected = "undecided"
    if abs(mean) + half < limit:
        expected = "agrees"
    elif abs(mean) - half > limit:
        expected = "disagrees"
    assert verdict(section(what), claim) == expected


@pytest.mark.parametrize(("claim", "one"), [("2 - one", "sinks2"), ("4 - one", "sinks4")])
def test_more_sinks_are_no_better(claim: str, one: str) -> None:
    mean, half = difference("table4", one, "sink")
    limit = abs(difference("table4", "sink", "plain")[0]) / 2
    expected = "agrees" if mean - half > -limit else "disagrees" if mean + half < 0 else "undecided"
    assert verdict(section("table4"), claim) == expected


def test_the_main_sink_moves() -> None:
    moved: dict[str, dict[int, float]] = {}
    for line in lines("table2"):
        moved.setdefault(line["item"]["variant"], {})[line["item"]["seed"]] = line["value"]["moved"]
    mean, half = interval([moved["sink"][seed] - moved["plain"][seed] for seed in moved["plain"]])
    # Without sinks there is nothing to hold still.
    found = np.mean([line["value"]["found"] for line in lines("table2") if line["item"]["variant"] == "plain"])
    expected = "agrees" if mean + half < 0 else "disagrees" if mean - half > 0 else "undecided"
    expected = "undecided" if found < 0.5 else expected
    claim = next(line for line in section("table2").split("\n") if "whose main sink is another" in line)
    assert f"{mean:+.3f} ± {half:.3f}" in claim
    assert claim.split("**")[1] == expected


def test_value_norms_of_sinks() -> None:
    text = section("figure1")
    for model in ("toy", "toy-sink", "toy-gated"):
        sums = np.concatenate([line["value"]["any"] for line in lines("figure1") if line["item"]["model"] == model])
        sink, other, pairs = sums.sum(0)
        cells = row(text, model)
        assert cells[1] == str(int(pairs))
        assert cells[2].startswith(f"{sink / pairs:.2f} [")
        assert cells[3].startswith(f"{other / pairs:.2f} [")
        # Every prompt's sinks are longer or shorter alike, so that no bootstrap can change the verdict.
        ratios = sums[:, 0] / sums[:, 1]
        assert verdict(text, model) == ("disagrees" if ratios.min() > 1 else "agrees" if ratios.max() < 1 else "?")


def test_the_learned_sink_per_layer() -> None:
    text = section("figure3")
    (line,) = lines("figure3")
    value = line["value"]
    rows = [row(text, "toy-sink", number) for number in range(4)]
    assert [cells[5] for cells in rows] == [f"{100 * share:.2f}%" for share in value["share"]]
    shorter = sum(value["norm_sink"][layer] < value["norm_other"][layer] for layer in (1, 2))
    assert f"shorter in {shorter} of 2 inner layers" in text


def test_every_table_names_a_command_that_gives_its_settings() -> None:
    for experiment in committed():
        shown = section(experiment.name.removeprefix("one-token-"))
        assert f"dlm-lens experiment {experiment.name} --small" in shown


def test_nothing_in_the_results_is_of_an_unfinished_run() -> None:
    assert "Unfinished" not in PAGE.read_text()


def test_the_results_are_small() -> None:
    size = sum(path.stat().st_size for path in Path(RESULTS).rglob("*") if path.is_file())
    assert size < 1_000_000
