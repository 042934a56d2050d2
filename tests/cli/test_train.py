import json
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import dlm_lens
from dlm_lens.cli.app import app

RUN = CliRunner()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "text.jsonl"
    lines = [{"text": f"tom has {i % 9} apples . sort 4 {i % 7} 9 1 : answer 1 {i % 5} 4 9 ."} for i in range(50)]
    text.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, lines[::7])))
    values = {
        "output": str(tmp_path / "run"),
        "model": {"start": "toy-ar", "sinks": 1},
        "data": {"path": str(text), "length": 24, "streaming": False, "eval_path": str(tmp_path / "other.jsonl")},
        "optimisation": {"rate": 2e-3, "optimizer": "muon"},
        "steps": 6, "batch_size": 8, "micro_batch_size": 4, "precision": "bf16",
        "probe_steps": 3, "eval_steps": 3, "log_steps": 1,
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def scalars(output: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (directory,) = {file.parent for file in output.rglob("events.out.*")}
    events = EventAccumulator(str(directory)).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("reporters", ["[tensorboard]", "[]"])
def test_train_names_the_logs_that_there_are(reporters: str, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlm_lens.training.trainer.run_training", lambda settings: config.parent / "run")
    result = RUN.invoke(app, ["train", str(config), "--set", f"report_to={reporters}"], catch_exceptions=False)
    assert "trained: " in result.output
    assert ("tensorboard --logdir" in result.output) == (reporters != "[]")


@pytest.mark.parametrize("whole", [True, False])
def test_train_says_whether_load_opens_the_checkpoint(
    whole: bool, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that FSDP or DeepSpeed sharded has no config.json and no whole weights."""
    checkpoint = config.parent / "checkpoint-6"
    checkpoint.mkdir()
    if whole:
        (checkpoint / "config.json").write_text("{}")
    monkeypatch.setattr("dlm_lens.training.trainer.run_training", lambda settings: checkpoint)
    output = " ".join(RUN.invoke(app, ["train", str(config)], catch_exceptions=False).output.split())
    assert ("(dlm_lens.load opens it)" in output) is whole
    assert ("(sharded weights, to resume;" in output) is not whole


@pytest.mark.long
def test_train_writes_checkpoints_and_curves(config: Path) -> None:
    result = RUN.invoke(app, ["train", str(config)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    output = config.parent / "run"
    assert f"trained: {output}/checkpoint-6" in result.output
    model = dlm_lens.load(output / "checkpoint-6")
    assert (model.config.num_sinks, model.dtype) == (1, torch.float32)
    found = scalars(output)
    assert len(found["train/loss"]) == 6
    assert len(found["train/tokens_per_second"]) == 6
    assert len(found["eval/loss"]) == 2
    for name in ("learned_share", "main_share", "moved", "value_norm_ratio"):
        assert len(found[f"train/sink/{name}"]) == 3, name  # before the first step, at 3, at 6
    assert found["eval/loss"][-1] < found["train/loss"][0]


@pytest.mark.long
def test_the_same_command_goes_on(config: Path) -> None:
    RUN.invoke(app, ["train", str(config), "--set", "save_steps=2"], catch_exceptions=False)
    output = config.parent / "run"
    before = (output / "checkpoint-6" / "model.safetensors").read_bytes()
    (output / "checkpoint-6" / "run.json").unlink()
    result = RUN.invoke(app, ["train", str(config), "--set", "save_steps=2"], catch_exceptions=False)
    assert result.exit_code == 0
    assert (output / "checkpoint-6" / "model.safetensors").read_bytes() == before
    refused = RUN.invoke(app, ["train", str(config), "--set", "seed=1"])
    assert "belongs to a run with other settings: seed was 0 and is 1" in str(refused.exception)


def test_a_dry_run_builds_nothing(config: Path) -> None:
    result = RUN.invoke(app, ["train", str(config), "--dry-run", "--devices", "2", "--device", "a100"])
    assert result.exit_code == 0, result.output
    assert "optimiser steps             6\n" in result.output
    assert "tokens                      1,152\n" in result.output
    assert "a100 hours at 40% of the peak" in result.output
    assert not (config.parent / "run").exists()


def test_options_of_a_dry_run_are_refused_without_it(config: Path) -> None:
    refused = RUN.invoke(app, ["train", str(config), "--device", "a100", "--devices", "7", "--utilisation", "0.5"])
    said = "--device a100 and --devices 7 and --utilisation 0.5 apply to --dry-run alone"
    assert str(refused.exception).startswith(said)
    assert not (config.parent / "run").exists()


def test_a_dry_run_does_not_take_documents_for_sequences(config: Path) -> None:
    asked = ["train", str(config), "--dry-run", "--set", "steps=null", "--set", "epochs=2"]
    refused = RUN.invoke(app, asked)
    assert "epochs is 2.0 of packed text, whose tokens only a run counts; give tokens" in str(refused.exception)
    pairs = ["--set", "data.prompt_column=text", "--set", "data.answer_column=text"]
    rows = RUN.invoke(app, [*asked, *pairs], catch_exceptions=False)
    assert "optimiser steps             12\n" in rows.output  # 2 * 50 // 8


def test_a_dry_run_of_the_laptop_config_needs_no_options_and_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = RUN.invoke(app, ["train", "laptop", "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "optimiser steps             500\n" in result.output
    assert "on 1" in result.output
    refused = RUN.invoke(app, ["train", "laptop", "--dry-run", "--devices", "8"])
    assert "a batch of 64 sequences does not divide into 8 device(s) of 64" in str(refused.exception)
    assert not list(tmp_path.iterdir())
