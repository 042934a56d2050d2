"""The claims of docs/results.md, made again from the committed results, some of them by hand."""

import json
from pathlib import Path

import pytest

from dlm_lens.experiments import find_experiment, list_experiments, list_items, load_results
from dlm_lens.experiments.attention_sinks import beyond_future, fig4_moving, hooked, page, table1
from dlm_lens.experiments.attention_sinks.harness import read_correct
from dlm_lens.experiments.attention_sinks.table1 import conditions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def lines(name: str) -> list[dict]:
    found = []
    for path in sorted((page.RESULTS / name).glob("results*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if "item" in line]


def test_the_page_is_what_the_results_say() -> None:
    assert page.make_page()[0] == PAGE


def test_every_figure_and_table_is_there() -> None:
    names = {experiment.name for experiment in list_experiments() if "2510.15731" in experiment.shows}
    shown = {experiment.shows for experiment in list_experiments()}
    assert {f"2510.15731, Figure {n}" for n in (1, 3, 4, 5, 6, 7, 8, 9, 10)} | {"2510.15731, Table 1"} <= shown
    for name in names:
        assert f"\n## {name}\n" in PAGE, name
        assert "items are missing" not in PAGE


def test_exact_matches_of_table_1_by_hand() -> None:
    found = lines("table1-masking")
    for model in ("toy", "toy-ar"):
        for k in (0, 1, 5, 10):
            plain = {"choose": "top", "per": "head", "source": "current", "stage": "before_softmax",
                     "scale": "relative"}  # fmt: skip
            mine = [
                line for line in found if {"model": model, "columns": k, **plain}.items() <= line["item"].items()
            ]
            right = [one for line in mine for one in line["value"]["correct"]]
            assert len(right) >= 24
            share = sum(right) / len(right)
            row = next(
                line for line in PAGE.splitlines()
                if line.startswith(f"| {model} | {k} | {'unmasked' if not k else 'top k'}")
            )  # fmt: skip
            assert f"| {share:.2f} [" in row
            assert row.endswith(f"| {len(right)} |")


def test_sinks_matter_more_than_random_columns_in_both_models() -> None:
    found = lines("table1-masking")
    for model in ("toy", "toy-ar"):
        right = {}
        for choose in ("top", "random"):
            wanted = {"model": model, "columns": 1, "choose": choose, "per": "head", "source": "current",
                      "stage": "before_softmax", "scale": "relative"}  # fmt: skip
            right[choose] = [
                one for line in found if wanted.items() <= line["item"].items() for one in line["value"]["correct"]
            ]
        assert sum(right["top"]) < sum(right["random"])


def test_what_the_page_says_first_has_these_directions() -> None:
    held = {
        name: load_results(find_experiment(name), page.RESULTS / name)
        for name in ("table1-masking", "beyond-confidence", "beyond-future", "beyond-context", "fig4-moving")
    }
    masking = held["table1-masking"]
    per_head, per_layer = table1.READINGS[:2]
    ours, theirs = (table1.change(masking, model, 1, **per_layer) for model in ("toy", "toy-ar"))
    assert ours.low > theirs.high
    ours, theirs = (table1.change(masking, model, 1, **per_head) for model in ("toy", "toy-ar"))
    assert ours.low < theirs.high
    ours, theirs = (table1.change(masking, model, 10, choose="random") for model in ("toy", "toy-ar"))
    assert ours.low > -0.1
    assert theirs.high < -0.5
    counts = [one for line in lines("beyond-confidence") for one in line["value"]["flips"]
              if line["item"]["model"] == "toy" and line["item"]["hidden"] == "sinks"]  # fmt: skip
    flipped = sum(one["flipped"] for one in counts) / sum(one["open"] for one in counts)
    first = sum(one["first_flipped"] for one in counts) / sum(one["first"] for one in counts)
    assert first < 0.02 < 0.08 < flipped
    share, base = beyond_future.share_on_masks(held["beyond-future"], "toy")
    assert share < base / 2
    assert hooked.difference(held["beyond-context"], "toy", "window 8 and sinks", "window 8").low > 0
    assert fig4_moving.share(held["fig4-moving"], "toy", "moving").low < fig4_moving.share(
        held["fig4-moving"], "toy-ar", "moving").high  # fmt: skip


def test_eps_of_figure_10_by_hand() -> None:
    found = lines("fig10-eps")
    values = find_experiment("fig10-eps").small["values"]
    for model in ("toy", "toy-ar"):
        mine = [line["value"] for line in found if line["item"]["model"] == model]
        n = [one for value in mine for one in value["head_n"]]
        kept = [one[values.index(3.0)] for value in mine for one in value["head_kept"]]
        left_out = 1 - sum(k * m for k, m in zip(kept, n, strict=True)) / sum(n)
        assert left_out >= 0.96
        assert f"{model}: {left_out:.2f} [" in PAGE


@pytest.mark.parametrize("small", [True, False])
def test_items_differ_and_have_a_cost(small: bool) -> None:
    for experiment in list_experiments():
        if "2510.15731" not in experiment.shows:
            continue
        given = {"task": "toy_arithmetic", "prompts": 32} if not small else {}
        config = experiment.config(small, given=given)
        items = list_items(experiment, config)
        assert items
        assert experiment.cost is not None
        assert all(cost.passes > 0 for item in items for cost in experiment.cost(item, config["settings"]))


def test_table_1_has_a_reading_for_every_axis() -> None:
    every = conditions(find_experiment("table1-masking").full)
    assert len(every) == 1 + 3 + 8 * 3
    for name, values in {
        "choose": {"top", "eps", "random"}, "per": {"head", "layer", "model"}, "scale": {"relative", "raw"},
        "source": {"current", "previous", "clean"}, "stage": {"before_softmax", "after"},
    }.items():  # fmt: skip
        assert {condition[name] for condition in every} == values


def test_the_harness_s_samples_are_read_in_order_and_by_filter() -> None:
    samples = [
        {"doc_id": 3, "filter": "strict-match", "metrics": ["exact_match"], "exact_match": 0.0},
        {"doc_id": 2, "filter": "strict-match", "metrics": ["exact_match"], "exact_match": 0.0},
        {"doc_id": 3, "filter": "flexible-extract", "metrics": ["exact_match"], "exact_match": 1.0},
        {"doc_id": 2, "filter": "flexible-extract", "metrics": ["exact_match"], "exact_match": 0.0},
    ]
    assert read_correct(samples, "exact_match (flexible-extract)") == [False, True]
    assert read_correct(samples, "") == [False, False]
    with pytest.raises(ValueError, match="no 'acc"):
        read_correct(samples, "acc (flexible-extract)")
