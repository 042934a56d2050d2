"""Pages of unfinished runs: of every experiment with stored results, after any number of items."""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from dlm_lens.experiments import runner
from dlm_lens.experiments.attention_sinks.recorded_runs import per_network
from dlm_lens.experiments.experiment import Experiment, find_experiment
from dlm_lens.experiments.results import Record, Results
from dlm_lens.experiments.runner import load_results, render_experiment

FOLDERS = sorted((Path(__file__).resolve().parents[2] / "experiments").glob("*/results/*/"))
IDS = [folder.name for folder in FOLDERS]


def part_of(folder: Path, to: Path, kept: Any) -> tuple[Experiment, int, int]:
    """A copy of stored results with the items at the indices `kept` (from their number).

    Returns:
        Their experiment, how many items are kept, and how many of the finished run are missing.
    """
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines(keepends=True)]
    is_item = [line.startswith('{"item"') for line in lines]
    chosen = {*kept(sum(is_item))}
    places = [sum(is_item[:place]) for place in range(len(lines))]
    text = [line for line, item, place in zip(lines, is_item, places, strict=True) if not item or place in chosen]
    to.mkdir()
    (to / "results-00000.jsonl").write_text("".join(text))
    return find_experiment(folder.name.removesuffix("-text")), len(chosen), sum(is_item) - len(chosen)


def stored(folder: Path, *wanted: tuple[int, int]) -> list[int]:
    """The indices of toy-gated's items of these networks and prompts, in the order in which they were stored."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    items = [found["item"] for line in lines if "item" in (found := json.loads(line))]
    return [
        place
        for place, one in enumerate(items)
        if one["model"] == "toy-gated" and (one["network"], one["start"]) in wanted
    ]


SHARES = {
    "1": lambda n: range(1),
    "2": lambda n: range(min(2, n)),
    "a quarter": lambda n: range(max(1, n // 4)),
    "half": lambda n: range(max(1, n // 2)),
    "all but one": lambda n: range(max(1, n - 1)),
    "every second": lambda n: range(0, n, 2),
    "the last": lambda n: range(n - 1, n),
}
QUICK = (
    "beyond-confidence",
    "fig1-incoming",
    "fig9-distributions",
    "one-token-figure3",
    "axis-circuits",
    "axis-pruning",
)


DISJOINT = ("beyond-confidence", "beyond-freezing")
"""Experiments of which every second item is of other prompts in one condition than in the next."""


def drawn_in_turn(folder: Path, share: str) -> bool:
    """Whether the figures are written too: after one item, and of the other shares one per experiment, in turn.

    All figures are made in every share; to draw them takes two thirds of the time. What one experiment's figures do
    with few or many items is drawn after one item and in one more share, and every share in six experiments.
    """
    first, *others = SHARES
    return share in (first, others[FOLDERS.index(folder) % len(others)])


@pytest.mark.in_turn
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "folder",
    [pytest.param(one, marks=[] if one.name in QUICK else pytest.mark.long) for one in FOLDERS],
    ids=IDS,
)
def test_an_unfinished_run_renders_and_says_what_is_missing(
    folder: Path, share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, kept, missing = part_of(folder, tmp_path / "run", SHARES[share])
    if share == "every second" and folder.name in DISJOINT:
        with pytest.raises(ValueError, match=f"and no prompt that all .*, {missing} items are missing$"):
            render_experiment(experiment, tmp_path / "run")
        return
    if not drawn_in_turn(folder, share):
        monkeypatch.setattr(runner, "write_figure", lambda path, figure: path.touch())
    text = render_experiment(experiment, tmp_path / "run").read_text()
    plt.close("all")
    assert all((tmp_path / "run" / name).exists() for name in re.findall(r"^!\[.*\]\((.*)\)$", text, re.MULTILINE))
    if missing:
        assert f"**Unfinished: {missing} of {missing + kept} items are missing" in text


def test_only_prompts_that_all_networks_have_are_compared(tmp_path: Path) -> None:
    folder = next(one for one in FOLDERS if one.name == "fig9-distributions")
    done = stored(folder, *((0, start) for start in (0, 16, 32, 48, 64, 80)), (1, 0), (1, 16), (1, 48))
    experiment, kept, _ = part_of(folder, tmp_path / "run", lambda n: done)
    results = load_results(experiment, tmp_path / "run")
    model = "toy-gated"
    starts: dict[int, list[int]] = {}
    for record in results.where(model=model):
        starts.setdefault(record.item["network"], []).append(record.item["start"])
    assert starts == {0: [0, 16, 48], 1: [0, 16, 48]}
    assert len(results.records) + results.left_out == kept == 9
    assert results.left_out == 3
    name = next(name for name, value in results.records[0].value.items() if isinstance(value, list))
    assert len({len(values) for values in per_network(results, name, model=model)}) == 1
    page = render_experiment(experiment, tmp_path / "run").read_text()
    assert f"of the finished ones {results.left_out} are left out" in page
    plt.close("all")


def item(**names: Any) -> dict[str, Any]:
    return {"model": "toy", "network": 0, "start": 0, "hidden": "sinks", **names}


def test_prompts_are_shared_within_a_model_by_networks_and_conditions() -> None:
    planned = [
        item(network=network, start=start, hidden=hidden, model=model)
        for model in ("toy", "toy-ar")
        for network in (0, 1)
        for hidden in ("sinks", "random")
        for start in (0, 8, 16)
    ]
    done = [
        item(), item(start=8), item(start=16), item(hidden="random", start=8), item(hidden="random", start=16),
        item(network=1, start=16), item(network=1, start=0), item(model="toy-ar", start=8),
    ]  # fmt: skip
    records = [Record(one, {}, 0.0) for one in done]
    found = Results({"settings": {}}, records, len(planned) - len(done)).with_shared_prompts(planned)
    # Prompt 0 is missing at random columns, 8 in network 1. Random columns of network 1 are not begun.
    assert [one.item for one in found.records] == [done[2], done[4], done[5], done[7]]
    assert (found.left_out, found.missing) == (4, 16)
    assert found.unfinished.startswith(
        "Unfinished: 16 of 24 items are missing; of the finished ones 4 are left out"
    )
    whole = Results({"settings": {}}, [Record(one, {}, 0.0) for one in planned])
    assert whole.with_shared_prompts(planned) == whole
    assert whole.unfinished == ""


def test_networks_without_a_prompt_in_common_are_told(tmp_path: Path) -> None:
    folder = next(one for one in FOLDERS if one.name == "fig9-distributions")
    experiment, _, _ = part_of(folder, tmp_path / "run", lambda n: stored(folder, (0, 0), (1, 80)))
    with pytest.raises(
        ValueError, match="holds 2 finished items of fig9-distributions, and no prompt that all netw"
    ):
        load_results(experiment, tmp_path / "run")
