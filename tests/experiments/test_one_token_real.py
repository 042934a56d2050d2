import json
from dataclasses import replace
from pathlib import Path

import pytest

from dlm_lens.evaluation import presets
from dlm_lens.experiments import find_experiment, list_experiments, render_experiment, run_experiment
from dlm_lens.experiments.one_token import paper_scale
from dlm_lens.experiments.one_token.miniature import VARIANTS
from dlm_lens.experiments.results import Record, Results
from dlm_lens.training import trainer
from dlm_lens.training.checkpoints import RUN_FILE
from dlm_lens.training.config_files import read_settings
from dlm_lens.training.data import data_record
from dlm_lens.training.dataset_files import read_dataset

TABLES = [find_experiment(f"one-token-table{number}") for number in range(1, 6)]

OF_CONFIG = {"": "plain", "-sink": "sink", "-gated": "gated", "-end": "end", "-sinks2": "sinks2",
             "-sinks4": "sinks4", "-zero-value": "zero", "-off-by-one": "off-by-one"}  # fmt: skip


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_config_is_the_variant_and_the_papers_setting(table) -> None:
    for config in table.full["configs"]:
        found = paper_scale.training_settings({"config": config, "seed": 3}, table.full)
        size, ending = next((size, config.removeprefix(size)) for size in
                            ("qwen2.5-0.5b", "qwen2.5-1.5b", "smdm-472m") if config.startswith(size))  # fmt: skip
        options = VARIANTS[OF_CONFIG[ending]].options()
        assert {name: getattr(found.model, name) for name in options} == options
        assert found.seed == 3
        assert found.output.endswith(f"{config}-seed3")
        # A.1 of the paper.
        tokens, batch, rate = {"qwen2.5-0.5b": (30e9, 512, 1e-4), "qwen2.5-1.5b": (100e9, 4096, 1e-4),
                               "smdm-472m": (100e9, 256, 2e-4)}[size]  # fmt: skip
        assert (found.tokens, found.batch_size, found.optimisation.rate) == (tokens, batch, rate)
        assert found.optimisation.min_rate == pytest.approx(rate / 10)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_cell_is_a_preset(table) -> None:
    columns = [column for column in table.paper[0].head[1:] if column != "GSM8K"]
    assert [presets.find_preset(task).task for task in table.full["tasks"]] == [
        {"ARC-e": "arc_easy", "ARC-c": "arc_challenge", "HellaSwag": "hellaswag", "PIQA": "piqa", "RACE": "race",
         "SIQA": "social_iqa", "LAMBADA": "lambada_standard"}[column] for column in columns
    ]  # fmt: skip


def test_items_train_before_they_ask() -> None:
    given = {**TABLES[1].full, "configs": ["smdm-472m"], "tasks": ["one-token/table2/piqa"], "sft": "gsm8k.jsonl"}
    tasks = [item["task"] for item in paper_scale.items(given)]
    assert tasks == ["train", "one-token/table2/piqa", "sft-gsm8k", "one-token/table2/gsm8k"]
    tuned = paper_scale.training_settings({"config": "smdm-472m", "seed": 0}, given, fine_tuned=True)
    # 100e9 tokens of 256 x 2048 positions are 190,734 steps.
    assert tuned.model.start.endswith("smdm-472m-seed0/checkpoint-190734")
    assert (tuned.data.path, tuned.epochs) == ("gsm8k.jsonl", 10)


def test_the_plan_needs_no_weights() -> None:
    table = TABLES[3]
    costs = [cost for item in table.items(table.full) for cost in table.cost(item, table.full)]
    assert len(costs) == 4
    # 30e9 tokens in micro-batches of 8 x 2048: 28,610 steps of 64.
    assert {(one.passes, one.rows, one.positions, one.backward) for one in costs} == {(28_610 * 64, 8, 2048, True)}


def test_a_training_is_not_begun_by_many_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = {**TABLES[0].full, "trained": str(tmp_path)}
    item = {"config": "qwen2.5-0.5b-end", "seed": 1, "task": "train"}
    with pytest.raises(ValueError, match="accelerate launch") as refused:
        paper_scale.run(item, given)
    # The command that the sentence names trains with the same settings.
    config, *words = str(refused.value).partition(".cli train ")[2].partition("`")[0].split()
    assert words[::2] == ["--set"] * (len(words) // 2)
    assert read_settings(config, words[1::2]) == paper_scale.training_settings(item, given)


@pytest.mark.parametrize("said", [{"total_steps": 300}, {}])
def test_a_fine_tuning_that_was_killed_is_gone_on_with(
    said: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**TABLES[0].full, "trained": str(tmp_path), "sft": "gsm8k.jsonl"}
    item = {"config": "qwen2.5-0.5b", "seed": 0, "task": paper_scale.SFT}
    output = Path(paper_scale.training_settings(item, given, fine_tuned=True).output)
    trained = []

    def run_training(settings) -> Path:
        trained.append(settings.output)
        return output / "checkpoint-300"

    monkeypatch.setattr(trainer, "run_training", run_training)
    (output / "checkpoint-100").mkdir(parents=True)
    (output / "checkpoint-100" / RUN_FILE).write_text(json.dumps({"step": 100, **said}))
    assert paper_scale.run(item, given)["checkpoint"].endswith("checkpoint-300")
    assert trained == [str(output)]
    (output / "checkpoint-300").mkdir()
    (output / "checkpoint-300" / RUN_FILE).write_text(json.dumps({"step": 300, "total_steps": 300}))
    assert paper_scale.run(item, given)["checkpoint"].endswith("checkpoint-300")
    assert len(trained) == 1


def test_a_network_that_was_trained_with_other_settings_is_not_measured(tmp_path: Path) -> None:
    """It was, under the settings of the run: its directory has the name of config and seed alone."""
    given = {**TABLES[0].full, "trained": str(tmp_path), "sft": "gsm8k.jsonl"}
    rate = {**given, "overrides": ["optimisation.rate=3e-4"]}
    for task, changed, said in (
        ("train", rate, r"optimisation.rate was 0.0001 and is 0.0003.*--set trained=DIR"),
        (paper_scale.SFT, given | {"sft": "other.jsonl"}, "data.path was 'gsm8k.jsonl' and is 'other.jsonl'"),
    ):
        item = {"config": "qwen2.5-0.5b", "seed": 0, "task": task}
        wanted = paper_scale.training_settings(item, given, fine_tuned=task != "train")
        steps = 300 if wanted.epochs else wanted.total_steps()
        record = {"step": steps, "total_steps": steps, "settings": wanted.identity()}
        made = Path(wanted.output) / f"checkpoint-{steps}"
        made.mkdir(parents=True)
        (made / RUN_FILE).write_text(json.dumps(record))
        assert paper_scale.run(item, given) == {"checkpoint": str(made)}
        with pytest.raises(ValueError, match=f"checkpoint-{steps} was trained with other settings: {said}"):
            paper_scale.run(item, changed)
    moved = tmp_path.rename(tmp_path.parent / "moved")
    assert paper_scale.run(item, given | {"trained": str(moved)})["checkpoint"].startswith(str(moved))


def test_a_network_that_was_trained_on_another_text_is_not_measured(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("tom has 5 apples .\nanna has 7 .\n")
    given = {**TABLES[0].full, "trained": str(tmp_path), "overrides": [f"data.path={text}", "steps=2"]}
    item = {"config": "laptop", "seed": 0, "task": "train"}
    for streaming, known in ((False, "sha256"), (True, "bytes")):
        settings = given | {"overrides": [*given["overrides"], f"data.streaming={str(streaming).lower()}"]}
        wanted = paper_scale.training_settings(item, settings)
        data = data_record(read_dataset(wanted.data), wanted.data)
        made = Path(wanted.output) / "checkpoint-2"
        made.mkdir(parents=True, exist_ok=True)
        record = {"step": 2, "total_steps": 2, "settings": wanted.identity(), "data": data}
        (made / RUN_FILE).write_text(json.dumps(record))
        assert paper_scale.run(item, settings) == {"checkpoint": str(made)}
        before = text.read_text()
        text.write_text(before.replace("5", "55"))
        with pytest.raises(ValueError, match=rf"checkpoint-2 was trained with other settings: data\.{known}"):
            paper_scale.run(item, settings)
        text.unlink()  # it is not needed to measure what was trained on it
        assert paper_scale.run(item, settings) == {"checkpoint": str(made)}
        text.write_text(before)


def test_the_table_of_real_results() -> None:
    given = {
        **TABLES[2].full,
        "configs": ["qwen2.5-0.5b-end"],
        "tasks": ["one-token/table1/piqa", "one-token/table1/race"],
    }
    item = {"config": "qwen2.5-0.5b-end", "seed": 0, "task": "one-token/table1/piqa"}
    value = {"metric": "acc", "value": 0.6431, "stderr": 0.0112, "n": 1838}
    results = Results(
        {"experiment": "one-token-table3", "small": False, "settings": given}, [Record(item, value, 1.0)]
    )
    table = paper_scale.table(results)
    assert list(table.head) == ["", "PIQA", "RACE"]
    assert table.rows == [["qwen2.5-0.5b-end, seed 0", "64.31 (1.12)", "-"]]


@pytest.mark.long
def test_the_real_path_with_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    text = tmp_path / "text.txt"
    text.write_text("tom has 5 apples . tom buys 4 more . how many apples ? : 5 + 4 = 9 . answer 9 .\n" * 40)
    cell = replace(presets.find_preset("one-token/table1/piqa"), name="one-token/table1/piqa", task="toy_choice")
    monkeypatch.setattr("dlm_lens.evaluation.find_preset", lambda name: cell)
    given = {
        "configs": ["laptop"], "tasks": ["one-token/table1/piqa"], "trained": str(tmp_path / "models"), "limit": 2,
        "overrides": [f"data.path={text}", "steps=2", "batch_size=4", "micro_batch_size=4", "probe_steps=0",
                      "report_to=[]"],
    }  # fmt: skip
    table = TABLES[0]
    results = run_experiment(table, tmp_path / "run", settings=given)
    trained, asked = results.records
    assert trained.value["checkpoint"].endswith("laptop-seed0/checkpoint-2")
    assert (asked.value["metric"], asked.value["n"]) == ("acc", 2)
    assert asked.value["value"] in (0.0, 0.5, 1.0)
    shown = render_experiment(table, tmp_path / "run").read_text()
    assert f"laptop, seed 0 | {100 * asked.value['value']:.2f}" in shown


def test_no_experiment_of_the_paper_is_left_without_full_settings() -> None:
    for one in list_experiments():
        if one.name.startswith("one-token"):
            assert one.full != one.small
