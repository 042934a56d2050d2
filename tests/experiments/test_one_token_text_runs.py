"""Runs on real English: trained, measured, killed and resumed, planned, and told in tables."""

import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from dlm_lens.adapters.forward_cost import ForwardCost
from dlm_lens.experiments import find_experiment, render_experiment, run_experiment
from dlm_lens.experiments.cost_estimate import NetworkCost
from dlm_lens.experiments.one_token import metrics, tables, text_metrics
from dlm_lens.experiments.one_token.miniature import LONGER, Miniature
from dlm_lens.experiments.one_token.text_corpus import LENGTH, encoded
from dlm_lens.experiments.one_token.text_metrics import STEPS
from dlm_lens.experiments.one_token.text_network import build_network
from dlm_lens.experiments.results import Record, Results
from tests.experiments.one_token_stories import write_story
from tests.preloaded import python

# In float32: a CPU without bfloat16 instructions takes several times as long with bfloat16 products.
TINY = {"steps": 2, "batch_size": 4, "watched": 2, "validation": 4, "seeds": 1, "precision": "fp32"}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_story(tmp_path_factory.mktemp("text") / "story.txt"))


def settings(story: str, trained: Path, **changed: object) -> dict:
    return {**TINY, "text": story, "trained": str(trained), **changed}


# Runs


@pytest.mark.long
def test_table1_trains_converts_and_measures(story: str, tmp_path: Path) -> None:
    table = find_experiment("one-token-table1")
    given = settings(story, tmp_path / "models", variants=["plain", "sink"])
    results = run_experiment(table, tmp_path / "run", small=True, settings=given)
    assert [record.item["variant"] for record in results.records] == ["plain", "sink"]
    held = encoded(story)
    for record in results.records:
        value = record.value
        rows = held.held_out(4)
        assert (value["tokens"], value["bytes"]) == (rows.numel(), held.bytes_of(rows))
        assert value["loss_per_byte"] * value["bytes"] == pytest.approx(value["loss"] * value["tokens"])
        assert value["tokenizer"] == held.digest
        # Two steps behind a short AR training: better than every token alike, not yet good.
        assert 2 < value["loss"] < math.log(len(held.tokenizer)) + 0.5
        assert "right" not in value
    assert len(results.records[1].value["share"]) == 4
    page = render_experiment(table, tmp_path / "run").read_text()
    assert "converted from an AR model of the same text (12 steps), 2 steps of 4 x 64 positions" in page
    assert "nats per byte" in page
    assert "exact match" not in page
    assert "All seeds begin with the weights of an AR model of the same text" in page
    assert "1.5% on one learned sink (one of 65 keys)" in page
    assert "No comparison with the paper: gated has no results." in page


@pytest.mark.long
def test_tables_share_networks_on_a_text(story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(story, tmp_path / "models", variants=["end"])
    first = run_experiment(find_experiment("one-token-table3"), tmp_path / "three", small=True, settings=given)
    monkeypatch.setattr(text_metrics, "measure", lambda *_: pytest.fail("measured again"))
    second = run_experiment(find_experiment("one-token-table4"), tmp_path / "four", small=True, settings=given)
    assert second.records[0].value == first.records[0].value
    # Another number of canvases is another measurement.
    monkeypatch.setattr(text_metrics, "measure", lambda path, _: {"at": path.name})
    run = Miniature.of({"variant": "end", "seed": 0}, {**tables.SMALL, **given})
    assert metrics.measured(run, {**tables.SMALL, **given, "watched": 3}) == {"at": "checkpoint-2"}


KILLED = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from dlm_lens.experiments import find_experiment, run_experiment
run_experiment(find_experiment("one-token-table1"), Path({out!r}), small=True, settings={given!r})
"""


@pytest.mark.long
@pytest.mark.in_turn
def test_kill_9_in_a_training_changes_no_number(story: str, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    # 120 steps of the AR model are saved at 100; then 20 of each conversion.
    shared = {"variants": ["plain", "sink"], "steps": 20, "batch_size": 2}

    def script(name: str) -> str:
        given = settings(story, tmp_path / name / "models", **shared)
        return KILLED.format(root=root, out=str(tmp_path / name / "run"), given=given)

    broken = tmp_path / "broken"
    reached = (
        lambda: list(broken.glob("models/text-scratch-ar-120steps-*/checkpoint-100/run.json")),
        lambda: '"item"' in text if (text := _read(broken / "run" / "results-00000.jsonl")) else False,
    )
    for arrived in reached:
        process = subprocess.Popen(
            [python(), "-c", script("broken")], stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 300
            while not arrived():
                assert process.poll() is None, "it ended before it was killed"
                assert time.monotonic() < deadline, "no checkpoint, or no item, within five minutes"
                time.sleep(0.05)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    values = []
    for name in ("broken", "whole"):
        subprocess.run([python(), "-c", script(name)], stderr=subprocess.DEVNULL, check=True)
        lines = [json.loads(line) for line in _read(tmp_path / name / "run" / "results-00000.jsonl").splitlines()]
        found = [line for line in lines if "item" in line]
        assert [line["item"]["variant"] for line in found] == ["plain", "sink"]
        values.append([{**line["value"], "training_seconds": 0} for line in found])
    assert values[0] == values[1]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# Plan


def test_the_plan_counts_the_ar_model_once(story: str) -> None:
    table = find_experiment("one-token-table1")
    given = {**table.small, "text": story, "seeds": 2, "steps": 50}
    trainings = [cost for item in table.items(given) for cost in table.cost(item, given) if cost.backward]
    assert [one.passes for one in trainings] == [50 + 50 * LONGER, *[50] * 5]
    assert {(one.rows, one.positions) for one in trainings} == {(16, LENGTH)}
    scratch = find_experiment("one-token-table2")
    given = {**scratch.small, "text": story, "seeds": 1, "steps": 50}
    found = [[cost.passes for cost in scratch.cost(item, given)] for item in scratch.items(given)]
    # 64 rows under 4 masks in batches of 32, and 16 canvases.
    assert found == [[50, 8, STEPS]] * 3


def test_the_plan_knows_the_networks_size() -> None:
    class Tokenizer:
        eos_token_id, pad_token_id, mask_token_id = 1, 0, 1023

        def __len__(self) -> int:
            return 1024

    model = build_network(Tokenizer(), 0)
    known = NetworkCost.of("one-token-text")
    assert known.forward == ForwardCost.of(model)
    assert known.forward.parameters == sum(one.numel() for one in model.parameters())


def test_a_text_goes_with_small(story: str) -> None:
    table = find_experiment("one-token-table2")
    with pytest.raises(ValueError, match=r"goes with --small; the configs of the full settings read data.path"):
        list(table.items({**table.full, "text": story}))


# Tables


def test_findings_of_planted_losses_follow_the_same_rules() -> None:
    losses = {("plain", 0): 5.0, ("plain", 1): 5.2, ("sink", 0): 4.5, ("sink", 1): 4.69, ("gated", 0): 5.6,
              ("gated", 1): 5.79}  # fmt: skip
    value = {"moved": 0.5, "found": 0.5, "found_norm": None, "found_other": None}
    records = [
        Record({"variant": name, "seed": seed}, {"loss": loss, "loss_per_byte": loss / 4, **value}, 1.0)
        for (name, seed), loss in losses.items()
    ]
    given = {**tables.SMALL, "seeds": 2, "text": "kjv"}
    results = Results({"experiment": "one-token-table2", "small": True, "settings": given}, records)
    rendering = find_experiment("one-token-table2").render(results)
    assert [one.verdict for one in rendering.findings] == ["agrees", "disagrees", "agrees", "undecided"]
    quality, sinks = rendering.tables
    assert list(quality.head)[-1] == "nats per byte"
    assert quality.rows[1][3] == "-0.505 ± 0.064"  # -0.5 and -0.51: 12.706 * 0.005
    assert quality.rows[0][4] == f"{np.mean([5.0, 5.2]) / 4:.3f} ± {12.706 * 0.025:.3f}"
    assert sinks.title.startswith("sinks, learned or not, over the steps of canvases of held-out text")
