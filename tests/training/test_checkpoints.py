"""Checkpoints under force: whole or not there, one trainer per directory, damage told."""

import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import dlm_lens
from dlm_lens.files.locks import DirectoryHeldError
from dlm_lens.files.sealed_json import sealed
from dlm_lens.training import checkpoints as module
from dlm_lens.training.checkpoints import BEFORE, PARTIAL, check_files, checkpoints, read_run, tidy
from tests.files.damage import damage
from tests.training.job import STEPS, job, losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "run"
    before = os.umask(0o027)
    try:
        job(output, save_steps=4).train()
    finally:
        os.umask(before)
    return output


def test_files_have_the_mode_of_the_umask(trained: Path) -> None:
    files = [path for path in trained.rglob("checkpoint-*/*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "optimizer.safetensors", "run.json"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


@pytest.mark.long
def test_one_trainer_per_directory(tmp_path: Path) -> None:
    told: list[str] = []

    class Second(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                thread = threading.Thread(target=self.other)
                thread.start()
                thread.join()

        def other(self) -> None:
            try:
                job(tmp_path).train(resume_from_checkpoint=True)
            except DirectoryHeldError as error:
                told.append(str(error))

    trainer = job(tmp_path, callbacks=(Second(),))
    trainer.train()
    assert len(told) == 1
    assert told[0].startswith(f"another process or thread writes {tmp_path}")
    assert len(losses(trainer)) == STEPS


def test_a_checkpoint_that_was_about_to_be_replaced_comes_back(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    before = tmp_path / "run" / PARTIAL / BEFORE
    before.mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-8").rename(before / "checkpoint-8")
    trainer = job(tmp_path / "run", save_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-4", "checkpoint-8"]
    assert not (tmp_path / "run" / PARTIAL).exists()


@pytest.mark.long
@pytest.mark.parametrize("place", range(6))
def test_a_kill_while_old_checkpoints_go_leaves_no_half(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    calls, real = [0], os.unlink

    def unlink(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] > place:
            raise KilledError
        real(*args, **kwargs)

    usual = module.shutil.rmtree

    def rmtree(*args: Any, **kwargs: Any) -> None:
        with monkeypatch.context() as patch:
            if any(path.name != BEFORE for path in Path(args[0]).glob("checkpoint-*")):
                patch.setattr(os, "unlink", unlink)
            usual(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", rmtree)
        with pytest.raises(KilledError):
            job(tmp_path, save_steps=2, keep=1).train()
    (left,) = checkpoints(tmp_path)
    check_files(left, read_run(left))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [left.name]
    again = job(tmp_path, save_steps=2, keep=1)
    again.train(resume_from_checkpoint=True)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {f"checkpoint-{STEPS}"}


@pytest.mark.parametrize("cases", [25, pytest.param(400, marks=pytest.mark.long)])
def test_a_damaged_checkpoint_is_told_or_whole(cases: int, trained: Path, tmp_path: Path) -> None:
    wanted = dlm_lens.load(trained / "checkpoint-4").state_dict()
    draw, told = random.Random(3), 0
    trainer = job(tmp_path / "other", save_steps=4)
    for case in range(cases):
        path = tmp_path / f"case{case}" / "checkpoint-4"
        shutil.copytree(trained / "checkpoint-4", path)
        how = damage(path, draw)
        try:
            trainer._resumed(path)
            found = dlm_lens.load(path).state_dict()
            right = all(torch.equal(found[name], value) for name, value in wanted.items())
        except (ValueError, FileNotFoundError) as error:
            told, how = told + 1, f"{how}: {error}"
            right = str(path) in str(error) and "\n" not in str(error)
        assert right, how
        shutil.rmtree(path.parent)
    assert told >= 0.9 * cases


@pytest.mark.parametrize("name", ["/dev/zero", "../other/model.safetensors", "", "a:b"])
def test_digests_are_compared_inside_a_checkpoint_alone(name: str, trained: Path, tmp_path: Path) -> None:
    """A run.json with the right checksum and the name of an endless file would be read for ever."""
    path = tmp_path / "checkpoint-4"
    shutil.copytree(trained / "checkpoint-4", path)
    record = read_run(path)
    record["files"][name] = "0" * 64
    (path / "run.json").write_text(json.dumps(sealed(record)))
    with pytest.raises(
        ValueError, match=r"checkpoint-4 names the file '.*', which is no path inside the checkpoint"
    ):
        job(tmp_path / "other", save_steps=4)._resumed(path)


def test_stale_files_go_when_training_begins(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / PARTIAL / "checkpoint-12").mkdir(parents=True)
    (tmp_path / "run" / PARTIAL / "checkpoint-12" / ".tmpAbCdEf").write_bytes(b"half")
    (tmp_path / "run" / f".dlm-lens-{'0' * 16}.part").write_bytes(b"half")
    tidy(tmp_path / "run")
    assert [path.name for path in sorted((tmp_path / "run").iterdir()) if path.name.startswith(".")] == []


def test_a_resumed_run_logs_the_losses_of_the_unbroken_one(tmp_path: Path) -> None:
    given = {"log_steps": 4, "save_steps": 3, "keep": 3}
    whole = job(tmp_path / "whole", **given)
    whole.train()
    job(tmp_path / "broken", **given).train()
    for path in checkpoints(tmp_path / "broken")[1:]:
        (path / "run.json").unlink()  # as if they had never been finished
    (left,) = (path for path in checkpoints(tmp_path / "broken") if (path / "run.json").exists())
    assert read_run(left)["open_loss"]["since"] == 0
    second = job(tmp_path / "broken", **given)
    second.train(resume_from_checkpoint=True)
    assert len(losses(whole)) == 2
    assert losses(second) == pytest.approx(losses(whole), rel=1e-6)


@pytest.mark.parametrize("log_steps", [4, 5])  # losses since the last entry: at the checkpoint alone, at both ends
def test_the_training_loss_of_a_resumed_run_is_the_mean_of_its_own_steps(log_steps: int, tmp_path: Path) -> None:
    each = job(tmp_path / "each")
    each.train()
    given = {"log_steps": log_steps, "save_steps": 3}
    whole = job(tmp_path / "run", **given).train()
    assert whole.training_loss == pytest.approx(sum(losses(each)) / STEPS, rel=1e-6)
    for path in checkpoints(tmp_path / "run")[1:]:
        (path / "run.json").unlink()  # as if they had never been finished
    rest = job(tmp_path / "run", **given).train(resume_from_checkpoint=True)
    assert rest.training_loss == pytest.approx(sum(losses(each)[3:]) / (STEPS - 3), rel=1e-6)
    assert rest.metrics["train_loss"] == rest.training_loss


@pytest.mark.parametrize(("before", "now", "logged"), [(4, 1, [4, 5, 6, 7, 8]), (1, 2, [1, 2, 3, 4, 6, 8])])
def test_a_resumed_run_logs_as_often_as_its_own_settings_say(
    before: int, now: int, logged: list[int], tmp_path: Path
) -> None:
    job(tmp_path, log_steps=before, save_steps=4).train()
    (tmp_path / "checkpoint-8" / "run.json").unlink()  # as if it had never been finished
    rest = job(tmp_path, log_steps=now, save_steps=4)
    rest.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in rest.state.log_history if "loss" in entry] == logged
