"""The claims of docs/results.md, made again from the committed results, some of them by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlm_lens.experiments import find_experiment, list_experiments, list_items, load_results
from dlm_lens.experiments.attention_sinks import (
    beyond_future,
    fig1_incoming,
    fig4_moving,
    hook_conditions,
    instruct_tables,
    masking_findings,
    page,
)
from dlm_lens.experiments.attention_sinks.harness_tasks import read_correct
from dlm_lens.experiments.attention_sinks.masking_conditions import BASE, READINGS, conditions
from dlm_lens.experiments.model_settings import settings_of_item

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def lines(name: str) -> list[dict]:
    found = []
    for path in sorted((page.RESULTS / name).glob("results*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if "item" in line]


@pytest.mark.long
def test_the_page_is_what_the_results_say() -> None:
    assert page.make_page()[0] == PAGE


def test_every_figure_and_table_is_there() -> None:
    names = {experiment.name for experiment in list_experiments() if "2510.15731" in experiment.shows}
    shown = {experiment.shows for experiment in list_experiments()}
    figures = {f"2510.15731, Figure {n}" for n in (1, 3, 4, 5, 6, 7, 8, 9, 10)}
    assert figures | {"2510.15731, Table 1", "2510.15731, Section 8"} <= shown
    for name in names:
        assert f"\n## {name}\n" in PAGE, name
        assert "items are missing" not in PAGE


def masked(model: str, columns: int, **changes: Any) -> dict[str, list[float]]:
    """The committed values of a condition of Table 1, prompt by prompt or item by item."""
    wanted = {"model": model, "columns": columns, "network": 0, **BASE, **changes}
    mine = [line["value"] for line in lines("table1-masking")
            if all(line["item"].get(name) == value for name, value in wanted.items())]  # fmt: skip
    found = {name: [value[name] for value in mine] for name in ("hidden", "mass", "learned")}
    return {**found, "right": [one for value in mine for one in value["correct"]]}


def test_what_the_page_says_first_has_these_directions() -> None:
    held = {name: load_results(find_experiment(name), page.RESULTS / name) for name in page.SUMMARISED}
    masking, change = held["table1-masking"], masking_findings.change
    per_head, per_layer = READINGS[:2]
    for reading in (per_head, per_layer):
        beside = masking_findings.change_beside(masking, "toy", "toy-ar", **reading)
        assert beside.low < 0 < beside.high
    sinks, counted, weighed = (change(masking, "toy", 5, choose=name) for name in ("top", "random", "mass"))
    # In every network, and over networks, more than columns that receive as much.
    for network in range(3):
        right = {
            choose: sum(masked("toy", 5, choose=choose, network=network)["right"]) / 96
            for choose in ("top", "mass")
        }
        assert right["top"] < 0.05 < 0.25 < right["mass"]
        of_class = {
            name: sum(masked("toy", 1, network=network, classes=name)["right"]) / 96
            for name in ("function", "content")
        }
        assert of_class["content"] < of_class["function"] - 0.1
    assert sinks.high < -0.8
    assert change(masking, "toy", 5, against={"columns": 5, "choose": "mass"}).high < 0
    assert sinks.high < min(counted.low, weighed.low)
    # The networks differ too much to decide this one.
    content = change(masking, "toy", 1, classes="content", against={"columns": 1, "classes": "function"})
    assert content.low < content.value < -0.3 < 0 < content.high
    assert "that of content: undecided over its networks" in page.PAGE.read_text()
    theirs, theirs_weighed = (change(masking, "toy-ar", 5, choose=name) for name in ("top", "mass"))
    assert theirs_weighed.high < -0.8
    assert theirs.low < -0.9
    # In every network of toy-sink too, but its three networks differ too much to exclude a loss below 0.05.
    for network, lost in enumerate(page.change_by_network(masking, "toy-sink", 1)):
        kept, all_right = (masked("toy-sink", columns, network=network)["right"] for columns in (1, 0))
        assert lost == pytest.approx(sum(kept) / 96 - sum(all_right) / 96)
        assert lost < -0.4
        assert sum(all_right) == 96
    assert -0.05 < change(masking, "toy-sink", 1).high < 0
    assert "robust here: undecided over its networks" in page.PAGE.read_text()
    counts = [one for line in lines("beyond-confidence") for one in line["value"]["flips"]
              if line["item"]["model"] == "toy" and line["item"]["hidden"] == "sinks"]  # fmt: skip
    flipped = sum(one["flipped"] for one in counts) / sum(one["open"] for one in counts)
    first = sum(one["first_flipped"] for one in counts) / sum(one["first"] for one in counts)
    assert first < 0.02 < 0.08 < flipped
    share, base = beyond_future.share_on_masks(held["beyond-future"], "toy")
    assert share < base / 2
    more = beyond_future.more_on_masks(held["beyond-future"], "toy")
    assert more.value == pytest.approx(share - base)
    assert more.high < 0
    assert hook_conditions.difference(held["beyond-context"], "toy", "window 8 and sinks", "window 8").low > 0
    moves = held["fig4-moving"]
    # On the paper's scale alone: the page's headline says so.
    assert fig4_moving.apart(moves, "toy", "toy-ar", "sums").low > 0
    relative = fig4_moving.apart(moves, "toy", "toy-ar", "relative")
    assert relative.low < 0 < relative.high
    assert "distinguish toy from the AR model on one of the two scales" in page.PAGE.read_text()
    for scale in ("sums", "relative"):
        beside = fig4_moving.apart(moves, "toy-sink", "toy-ar", scale)
        assert beside.low < 0 < beside.high
    assert "undecided on column sums and on the relative scale." in page.PAGE.read_text()
    # Most are static, as many as by the causal mask alone.
    static, alone = (
        fig4_moving.share(moves, "toy-ar", "static", "sums"),
        moves.listed("sums uniform static", model="toy-ar"),
    )
    assert 0.5 < static.low < sum(alone) / len(alone) < static.high


def test_moving_sinks_on_both_scales_by_hand() -> None:
    """Figures 1 and 4: sums over the stored prompts, mean over networks."""

    def share(name: str, model: str, top: str, bottom: str) -> float:
        sums: dict[int, list[float]] = {}
        for line in lines(name):
            if line["item"]["model"] == model:
                network = sums.setdefault(line["item"].get("network", 0), [0.0, 0.0])
                network[0] += sum(line["value"][top])
                network[1] += sum(line["value"][bottom])
        return sum(a / b for a, b in sums.values()) / len(sums)

    moves, incoming = (
        load_results(find_experiment(name), page.RESULTS / name) for name in ("fig4-moving", "fig1-incoming")
    )
    found = {}
    for model in ("toy", "toy-ar"):
        for scale in ("sums", "relative"):
            for kind in ("static", "moving"):
                by_hand = share("fig4-moving", model, f"{scale} {kind}", "patterns")
                assert fig4_moving.share(moves, model, kind, scale).value == pytest.approx(by_hand)
                found[model, scale, kind] = by_hand
            by_hand = share("fig1-incoming", model, f"{scale} moved", f"{scale} compared")
            assert fig1_incoming.moved(incoming, model, scale).value == pytest.approx(by_hand)
            found[model, scale, "moved"] = by_hand
    # The DLM has one scale; the AR model's sinks move on one of the two.
    assert all(
        found["toy", "sums", kind] == found["toy", "relative", kind] for kind in ("static", "moving", "moved")
    )
    assert found["toy-ar", "sums", "moving"] < 0.01 < 0.05 < found["toy", "sums", "moving"]
    assert found["toy-ar", "relative", "moving"] > 0.05
    assert found["toy-ar", "sums", "moved"] < 0.1 < 0.2 < found["toy", "sums", "moved"]


def test_base_and_tuned_by_hand() -> None:
    found = load_results(find_experiment("beyond-instruct"), page.RESULTS / "beyond-instruct")
    sinks = [line for line in lines("beyond-instruct") if line["item"]["measure"] == "sinks"]
    shared = {}
    for tuned in ("toy+sft", "toy+pretraining"):
        mine = [line["value"] for line in sinks if line["item"]["instruct"] == tuned]  # in batches of prompts
        value = {name: [one for part in mine for one in part[name]] for name in ("base", "instruct", "overlap")}
        assert len(value["base"]) == len(value["instruct"]) == 96
        more = [
            b["sinks"] / b["maps"] - a["sinks"] / a["maps"]
            for a, b in zip(value["base"], value["instruct"], strict=True)
        ]
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| toy, {tuned} | sinks per map |"))
        assert f"| {sum(more) / 96:.3f} [" in row
        shared[tuned] = [one["same"][0] / one["same"][1] for one in value["overlap"]]
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| toy, {tuned} | both on the base"))
        assert f"| {sum(shared[tuned]) / 96:.3f} [" in row
        assert max(one["other head"][0] / one["other head"][1] for one in value["overlap"]) < 0.05
    # Both kinds of training move sinks, fine-tuning more of them.
    assert sum(shared["toy+sft"]) < sum(shared["toy+pretraining"]) < 0.9 * 96
    cost = instruct_tables.apart(found, ("toy", "toy+sft"), {"columns": 1, **BASE})
    assert cost.low < 0 < cost.high
    # The same condition of the same model in both experiments.
    again = found.listed("correct", model="toy", columns=1, **BASE)
    assert again == masked("toy", 1)["right"]


def test_eps_of_figure_10_by_hand() -> None:
    found = lines("fig10-eps")
    place = find_experiment("fig10-eps").small["values"].index(3.0)
    for model in ("toy", "toy-ar"):
        mine = [line["value"] for line in found if line["item"]["model"] == model]
        n = [one for value in mine for one in value["n"]]
        kept = [one[place] for value in mine for one in value["measured relative"]]
        left_out = 1 - sum(k * m for k, m in zip(kept, n, strict=True)) / sum(n)
        assert left_out >= 0.96
        assert f"{model}: {left_out:.3f} [" in PAGE


@pytest.mark.parametrize("small", [True, False])
def test_items_differ_and_have_a_cost(small: bool) -> None:
    for experiment in list_experiments():
        if "2510.15731" not in experiment.shows:
            continue
        given = {"task": "toy_arithmetic", "prompts": 32} if not small and "task" in experiment.full else {}
        config = experiment.config(small, given=given)
        items = list_items(experiment, config)
        assert items
        assert experiment.cost is not None
        settings = config["settings"]
        costs = (experiment.cost(item, settings_of_item(settings, item)) for item in items)
        assert all(one.passes > 0 for found in costs for one in found)


def test_table_1_has_a_reading_for_every_axis() -> None:
    every = conditions(find_experiment("table1-masking").full)
    # Unmasked, the base reading, every variant, and the controls of those that get a verdict.
    assert len(every) == 1 + 3 + 13 * 3 + (1 + 1 + 1 + 2 + 2) * 3
    for name, values in {
        "choose": {"top", "eps", "random", "mass", "first"}, "per": {"head", "layer", "model"},
        "scale": {"relative", "raw"},
        "source": {"current", "previous", "clean"}, "stage": {"before_softmax", "after"},
        "classes": {None, "function", "content"},
    }.items():  # fmt: skip
        assert {condition.get(name) for condition in every} == values


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
