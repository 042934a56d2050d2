"""Trainings that are interrupted, killed or resumed."""

import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import TrainerCallback

import dlm_lens as dl
from dlm_lens.files.sealed_json import CHECKSUM, sealed
from dlm_lens.testing import tiny
from dlm_lens.training import (
    DataSettings,
    MaskedDiffusionLoss,
    MaskedDiffusionTrainer,
    Optimisation,
    TrainingSettings,
)
from dlm_lens.training.checkpoints import TrainingStoppedError, checkpoints, read_run
from dlm_lens.training.dataset_files import read_dataset
from tests.preloaded import python
from tests.training.job import ROWS, STEPS, dropping, job, losses, weights

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen", [{}, {"optimizer": "muon"}, {"schedule": "warmup_stable_decay", "decay_share": 0.75}]
)
def test_a_resumed_run_is_the_unbroken_one(
    chosen: dict[str, Any], tmp_path: Path, unbroken: MaskedDiffusionTrainer
) -> None:
    settings = {"save_steps": 3, "optimisation": Optimisation(rate=1e-2, **chosen)}
    whole = job(tmp_path / "whole", **settings)
    whole.train()
    first = job(tmp_path / "broken", **settings)
    first.train()
    for path in checkpoints(tmp_path / "broken")[1:]:
        (path / "run.json").unlink()  # as if they had never been finished
    second = job(tmp_path / "broken", **settings)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == STEPS
    assert losses(second) == losses(whole)
    rates = [entry["learning_rate"] for entry in second.state.log_history if "loss" in entry]
    assert rates == pytest.approx([e["learning_rate"] for e in whole.state.log_history if "loss" in e])
    for name, value in weights(tmp_path / "whole" / f"checkpoint-{STEPS}").items():
        assert torch.equal(value, weights(tmp_path / "broken" / f"checkpoint-{STEPS}")[name]), name


def test_a_resumed_run_with_dropout_is_the_unbroken_one(tmp_path: Path) -> None:
    whole = dropping(tmp_path / "whole")
    whole.train()
    first = dropping(tmp_path / "broken")
    first.train()
    (tmp_path / "broken" / "checkpoint-2" / "run.json").unlink()  # as if it had never been finished
    torch.manual_seed(1)
    second = dropping(tmp_path / "broken")
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(whole)
    for name, value in weights(tmp_path / "whole" / "checkpoint-2").items():
        assert torch.equal(value, weights(tmp_path / "broken" / "checkpoint-2")[name]), name


@pytest.mark.long
def test_kill_9_and_resume_is_the_unbroken_run(unbroken: MaskedDiffusionTrainer, tmp_path: Path) -> None:
    command = [python(), "-m", "tests.training.job", str(tmp_path), "save_steps=2"]
    killed = subprocess.run([*command, "kill=5"], cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert json.loads((tmp_path / "losses.json").read_text()) == losses(unbroken)
    expected = weights(Path(unbroken.settings.output) / f"checkpoint-{STEPS}")
    for name, value in weights(tmp_path / f"checkpoint-{STEPS}").items():
        assert torch.equal(value, expected[name]), name


class Signal(TrainerCallback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "error", "sentence"),
    [
        (signal.SIGINT, KeyboardInterrupt, "^$"),
        (signal.SIGTERM, TrainingStoppedError, "SIGTERM at step 4 of 8; .*checkpoint-4, which is complete"),
    ],
)
def test_an_interrupted_run_saves_its_step_and_goes_on(
    number: int, error: type[BaseException], sentence: str, unbroken: MaskedDiffusionTrainer, tmp_path: Path
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(error, match=sentence):
        job(tmp_path, callbacks=(Signal(number, 3),)).train()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4"]
    second = job(tmp_path)
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(unbroken)


def test_a_second_interruption_does_not_wait(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        job(tmp_path, callbacks=(Signal(signal.SIGINT, 2), Signal(signal.SIGINT, 2))).train()
    assert checkpoints(tmp_path) == []


@pytest.mark.long
def test_a_signal_at_the_last_step_is_no_interruption(tmp_path: Path) -> None:
    trainer = job(tmp_path, callbacks=(Signal(signal.SIGINT, STEPS - 1),))
    trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{STEPS}"]


@pytest.mark.long
def test_a_resumed_run_opens_no_pickle_beside_its_checkpoint(
    tmp_path: Path, unbroken: MaskedDiffusionTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted under the names that transformers' own Trainer reads."""
    job(tmp_path, save_steps=2).train()
    for path in checkpoints(tmp_path)[1:]:
        (path / "run.json").unlink()
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> Any:
            return open, (str(marker), "w")

    (first,) = checkpoints(tmp_path)
    for name in (
        "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth",
        "training_args.bin", "pytorch_model.bin", "adapter_model.bin", "pytorch_model_fsdp.bin",
    ):  # fmt: skip
        (first / name).write_bytes(pickle.dumps(Bomb()))
    for reader in ("torch.load", "pickle.load", "pickle.loads"):
        monkeypatch.setattr(reader, lambda *a, reader=reader, **k: pytest.fail(f"{reader} was called"))
    trainer = job(tmp_path, save_steps=2)
    trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == losses(unbroken)
    assert not marker.exists()


def test_a_resume_with_other_settings_is_refused(unbroken: MaskedDiffusionTrainer) -> None:
    directory = Path(unbroken.settings.output)
    other = job(
        directory, objective=MaskedDiffusionLoss(floor=0.5, low_discrepancy=True, random_length_share=0.2), seed=3
    )
    with pytest.raises(ValueError, match=r"objective\.floor was 0\.001 and is 0\.5; seed was 0 and is 3"):
        other.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"exists already; resume it with train\(resume_from_checkpoint=True\)"):
        job(directory).train()
    # How a batch is divided does not change what is learned, nor does the evaluation.
    split = DataSettings(length=12, eval_split="test", eval_path="other.txt")
    again = job(directory, micro_batch_size=2, data=split, eval_steps=2, eval_dataset=ROWS)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == STEPS


def test_a_resume_of_before_a_setting_was_added_has_its_default(
    unbroken: MaskedDiffusionTrainer, tmp_path: Path
) -> None:
    shutil.copytree(Path(unbroken.settings.output) / "checkpoint-2", tmp_path / "checkpoint-2")
    record = read_run(tmp_path / "checkpoint-2")
    for part, name in (("objective", "ar_weight"), ("objective", "floor"), ("optimisation", "clip")):
        del record["settings"][part][name]
    del record["settings"]["compile"]
    (tmp_path / "checkpoint-2" / "run.json").write_text(json.dumps(sealed(record)))
    objective = MaskedDiffusionLoss(floor=0.5, low_discrepancy=True, random_length_share=0.2)
    with pytest.raises(ValueError, match=r"other settings: objective\.floor was 0\.001 and is 0\.5\. Resume"):
        job(tmp_path, objective=objective).train(resume_from_checkpoint=True)
    again = job(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(unbroken)


def test_a_checkpoint_whose_directory_was_renamed_goes_on(unbroken: MaskedDiffusionTrainer, tmp_path: Path) -> None:
    """Its step was read from the name, with an IndexError."""
    shutil.copytree(Path(unbroken.settings.output) / "checkpoint-2", tmp_path / "kept")
    again = job(tmp_path / "run")
    again.train(resume_from_checkpoint=str(tmp_path / "kept"))
    assert losses(again) == losses(unbroken)
    shutil.copytree(Path(unbroken.settings.output) / f"checkpoint-{STEPS}", tmp_path / "ended-1")
    ended = job(tmp_path / "other")
    ended.train(resume_from_checkpoint=str(tmp_path / "ended-1"))
    assert ended.state.global_step == STEPS
    assert losses(ended) == losses(unbroken)


def test_a_run_that_ended_has_its_weights_when_it_is_resumed(unbroken: MaskedDiffusionTrainer) -> None:
    directory = Path(unbroken.settings.output)
    again = job(directory, eval_dataset=ROWS)
    before = again.evaluate()["eval_loss"]
    output = again.train(resume_from_checkpoint=True)
    assert output.global_step == again.state.global_step == again.state.max_steps == STEPS
    stored = weights(directory / f"checkpoint-{STEPS}")
    assert all(torch.equal(value, stored[name]) for name, value in again.model.state_dict().items())
    assert losses(again) == losses(unbroken)
    after = again.evaluate()
    assert after["eval_loss"] < before - 0.1
    assert again.state.log_history[-1]["epoch"] == 1.0


def test_a_resume_with_other_data_is_refused(unbroken: MaskedDiffusionTrainer) -> None:
    directory = Path(unbroken.settings.output)
    assert read_run(directory / "checkpoint-2")["data"]["rows"] == 64
    with pytest.raises(ValueError, match=r"other training data: rows was 64 and is 63; sha256 was '\w+' and is"):
        job(directory, train_dataset=ROWS[:-1]).train(resume_from_checkpoint=True)
    edited = [*ROWS[:20], {"text": ROWS[20]["text"] + " w1"}, *ROWS[21:]]
    with pytest.raises(
        ValueError, match=r"other training data: sha256 was '\w+' and is '\w+'\. Resume with the old"
    ):
        job(directory, train_dataset=edited).train(resume_from_checkpoint=True)
    same = datasets.Dataset.from_list([{**row, "other": 1} for row in ROWS])  # other columns are not read
    job(directory, train_dataset=same).train(resume_from_checkpoint=True)


def test_a_resume_of_moments_that_another_engine_saved_is_refused(
    unbroken: MaskedDiffusionTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(unbroken.settings.output, directory)
    with monkeypatch.context() as patch:
        patch.setattr(MaskedDiffusionTrainer, "_sharded", True)
        with pytest.raises(ValueError, match=r"saved without FSDP or DeepSpeed, and this run is with them"):
            job(directory).train(resume_from_checkpoint=True)
    newest = directory / f"checkpoint-{STEPS}"
    (newest / "optimizer.safetensors").rename(newest / "optimizer.bin")  # the name of FSDP's file
    record = json.loads((newest / "run.json").read_text())
    record["files"]["optimizer.bin"] = record["files"].pop("optimizer.safetensors")
    del record[CHECKSUM]
    (newest / "run.json").write_text(json.dumps(sealed(record)))
    with pytest.raises(ValueError, match=r"saved by FSDP or DeepSpeed, and this run is without them"):
        job(directory).train(resume_from_checkpoint=True)


def test_a_resume_with_another_streamed_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = DataSettings(length=12, path=str(file))
    job(tmp_path / "run", train_dataset=read_dataset(data), data=data, steps=1).train()
    job(tmp_path / "run", train_dataset=read_dataset(data), data=data, steps=1).train(resume_from_checkpoint=True)
    size = file.stat().st_size
    file.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, {"text": "w1"}]))
    with pytest.raises(ValueError, match=rf"bytes\.\S*text\.jsonl was {size} and is {size + 15}\. Resume"):
        job(tmp_path / "run", train_dataset=read_dataset(data), data=data, steps=1).train(
            resume_from_checkpoint=True
        )


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_training_of_an_adapter_is_resumed(tmp_path: Path) -> None:
    """Its checkpoints hold PEFT's files: the factors go on as they were, and `load` merges them into the base."""
    from peft import LoraConfig, get_peft_model

    def trained(output: Path, *, resume: bool = False) -> MaskedDiffusionTrainer:
        torch.manual_seed(0)  # of the factors
        model = get_peft_model(tiny("sink_qwen"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        settings = TrainingSettings(
            output=str(output), steps=6, save_steps=3, batch_size=4, micro_batch_size=2, precision="fp32",
            data=DataSettings(length=12), optimisation=Optimisation(rate=1e-2), report_to=(),
        )  # fmt: skip
        trainer = MaskedDiffusionTrainer(model, settings, ROWS)
        if resume:
            (output / "checkpoint-6" / "run.json").unlink()
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    def factors(trainer: MaskedDiffusionTrainer) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in trainer.model.named_parameters() if "lora_" in name}

    whole = trained(tmp_path / "run")
    expected = {name: value.clone() for name, value in factors(whole).items()}
    rest = trained(tmp_path / "run", resume=True)
    assert all(torch.equal(value, expected[name]) for name, value in factors(rest).items())
    assert any(bool(value.any()) for name, value in expected.items() if "lora_B" in name)
    tiny("sink_qwen").save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"checkpoint-6 holds adapter_config\.json, an adapter of PEFT"):
        dl.load(rest.last_checkpoint)
    merged = dl.load(tmp_path / "base", adapter=str(rest.last_checkpoint))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        # W + s B A rounded once, against two products.
        torch.testing.assert_close(merged(ids).logits, rest.model.eval()(ids).logits, rtol=1e-4, atol=1e-5)
