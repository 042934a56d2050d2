"""Base against instruct: pairs, planted overlaps, twins, and counts made again by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.experiments import Bench, find_experiment, list_items
from dlm_lens.experiments.attention_sinks import instruct_sinks, instruct_tables, twin_networks
from dlm_lens.experiments.attention_sinks.beyond_instruct import pairs
from dlm_lens.experiments.attention_sinks.masking_conditions import BASE
from dlm_lens.experiments.attention_sinks.problems import problems_of
from dlm_lens.experiments.results import Record, Results
from dlm_lens.training.checkpoints import read_run, step_of

EXPERIMENT = find_experiment("beyond-instruct")
SAMPLER = {"gen_length": 16, "steps": 16}


def settings(**changed: Any) -> dict[str, Any]:
    found: dict[str, Any] = EXPERIMENT.config(True, given=changed)["settings"]
    return found


def test_models_come_in_pairs_and_every_model_is_masked_once() -> None:
    config = EXPERIMENT.config(True, given={"masked_prompts": 8})
    found = list_items(EXPERIMENT, config)
    masked = [item["model"] for item in found if item["measure"] == "masking"]
    assert masked == ["toy"] * 3 + ["toy+sft"] * 3 + ["toy+pretraining"] * 3
    assert [(item["base"], item["instruct"]) for item in found if item["measure"] == "sinks"] == [
        ("toy", "toy+sft"), ("toy", "toy+pretraining")
    ]  # fmt: skip
    assert pairs(EXPERIMENT.config(False)["settings"]) == [
        ("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct"),
        ("Dream-org/Dream-v0-Base-7B", "Dream-org/Dream-v0-Instruct-7B"),
    ]
    for models in (["toy"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="give pairs, as in --models GSAI-ML/LLaDA-8B-Base,"):
            list_items(EXPERIMENT, EXPERIMENT.config(True, models))


def test_overlap_of_planted_sinks() -> None:
    one, two = (torch.zeros(1, 1, 4, 6, dtype=torch.bool) for _ in range(2))
    one[0, 0, 0, [1, 2]] = two[0, 0, 0, [1, 2]] = True  # equal
    one[0, 0, 1, [1, 2]], two[0, 0, 1, [2, 3]] = True, True  # one of three
    one[0, 0, 2, 5] = True  # the other has none
    assert instruct_sinks.overlap(one, two) == [3, 6, 2, 1]
    assert instruct_sinks.overlap(two, one) == [3, 6, 2, 1]


@pytest.fixture(scope="module")
def compared() -> tuple[dict[str, Any], dict[str, Any]]:
    """A model beside itself, whose sinks are the same by definition, and beside another one."""
    given, bench = settings(prompts=2, batch=2, sampler=SAMPLER), Bench()
    return tuple(
        instruct_sinks.compare({"base": "toy", "instruct": name, "start": 0}, given, bench)
        for name in ("toy", "toy-gated")
    )  # type: ignore[return-value]


def test_a_model_beside_itself_has_its_sinks_at_the_same_places(compared: Any) -> None:
    found, _ = compared
    assert found["base"] == found["instruct"]
    for row in found["overlap"]:
        for name in ("own", "same"):
            both, either, have, equal = row[name]
            assert both == either > 50
            assert have == equal
        assert row["other head"][0] < row["other head"][1] / 10


@pytest.mark.long
def test_counts_of_a_prompt_by_hand(compared: Any) -> None:
    found, other = compared
    model, given = dl.load("toy"), settings(prompts=2, batch=2, sampler=SAMPLER)
    texts = [problem.prompt for problem in problems_of(given)]
    run = dl.denoise(model, texts, **SAMPLER)
    received = dl.received_over_steps(model, run)
    for row in range(2):
        sinks = maps = with_sink = 0
        for scores in received.values[:, row].double().flatten(0, 2):
            known = scores[~scores.isnan()]
            others = (known.sum() - known) / (len(known) - 1)
            count = int((known > others + 3.0).sum())  # Eq. 3
            sinks, maps, with_sink = sinks + count, maps + 1, with_sink + (count > 0)
        mine = found["base"][row]
        assert [mine["sinks"], mine["maps"], mine["with_sink"]] == [sinks, maps, with_sink]
        assert instruct_sinks.ratio(mine, "sinks per map") == sinks / maps
        # A kind's share among the sinks; all kinds together are all sinks.
        assert sum(share for share, _ in mine["kinds"].values()) == pytest.approx(1, abs=1e-3)
        assert sum(base for _, base in mine["kinds"].values()) == pytest.approx(1, abs=1e-3)
    gated = dl.find_sinks(dl.received_over_steps(dl.load("toy-gated"), run), dl.AboveMean(3.0)).is_sink
    plain = dl.find_sinks(received, dl.AboveMean(3.0)).is_sink
    for row in range(2):
        both, either, *_ = other["overlap"][row]["same"]
        assert both == int((plain[:, row] & gated[:, row]).sum())
        assert either == int((plain[:, row] | gated[:, row]).sum())
        rolled = gated[:, row].roll(1, 2)
        assert other["overlap"][row]["other head"][0] == int((plain[:, row] & rolled).sum())
        assert either > 2 * both  # two networks trained apart share few sinks


def test_models_without_common_positions_are_refused() -> None:
    given = settings(prompts=1, batch=1, sampler={"gen_length": 8, "steps": 1})
    with pytest.raises(ValueError, match="toy and toy-sink do not share positions, layers and heads"):
        instruct_sinks.compare({"base": "toy", "instruct": "toy-sink", "start": 0}, given, Bench())


@pytest.mark.long
def test_twins_differ_in_what_is_masked_and_are_trained_once(tmp_path: Path) -> None:
    given = settings(trained=str(tmp_path), sft_steps=2, sft_batch=2)
    shares = {
        ending: twin_networks.training_settings(ending, given, tmp_path).objective.whole_share
        for ending in twin_networks.OBJECTIVES
    }
    assert shares == {"+sft": 0.0, "+pretraining": 0.3}
    bench = twin_networks.FinetunedBench(Bench(), given)
    tuned = bench.model("toy+sft")
    base = dl.load("toy")
    changed = [not torch.equal(a, b) for a, b in zip(tuned.parameters(), base.parameters(), strict=True)]
    assert sum(changed) > 0.9 * len(changed)
    (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (checkpoint,) = directory.glob("checkpoint-*")
    assert step_of(checkpoint) == 2
    assert read_run(checkpoint)["settings"]["objective"]["whole_share"] == 0.0
    before = (checkpoint / "run.json").stat().st_mtime_ns
    assert twin_networks.trained("toy", "+sft", given) == checkpoint
    assert (checkpoint / "run.json").stat().st_mtime_ns == before
    assert bench.model("toy").config.hidden_size == base.config.hidden_size


def test_twins_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(trained=str(tmp_path))
    for base in ("toy-ar", "GSAI-ML/LLaDA-8B-Base"):
        with pytest.raises(ValueError, match="BASE,INSTRUCT"):
            twin_networks.trained(base, "+sft", given)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="run the command once in one process"):
        twin_networks.trained("toy", "+sft", given)


def test_differences_are_paired_by_prompt_and_prompts_without_a_value_left_out() -> None:
    found = instruct_tables.difference([0.5, None, 0.25, 1.0], [0.25, 0.5, None, 0.5])
    assert (found.value, found.n) == (0.375, 2)
    plain, hidden = {"columns": 0, **BASE}, {"columns": 1, **BASE}
    answers = {
        ("toy", 0): [True, True, False], ("toy", 1): [False, True, False],
        ("tuned", 0): [True, True, True], ("tuned", 1): [True, True, False],
    }  # fmt: skip
    records = [
        Record({"measure": "masking", "model": model, **(hidden if columns else plain)}, {"correct": right}, 0.0)
        for (model, columns), right in answers.items()
    ]
    results = Results({"settings": {}}, records)
    assert list(instruct_tables.change(results, "toy", hidden).values()) == [-1, 0, 0]
    # (0, 0, -1) - (-1, 0, 0)
    assert instruct_tables.apart(results, ("toy", "tuned"), hidden).value == 0
    assert instruct_tables.apart(results, ("toy", "tuned"), hidden).low < 0
