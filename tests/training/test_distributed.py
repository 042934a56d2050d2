"""Two processes on the CPU against one, and weights that are split by `fully_shard`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlm_lens.training.trainer import end_processes
from tests.training.job import job, losses

ROOT = Path(__file__).parents[2]


def torchrun(*command: str) -> None:
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", *command]
    done = subprocess.run(launch, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_process_group_ends(tmp_path: Path) -> None:
    end_processes()  # there is none
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    end_processes()
    assert not torch.distributed.is_initialized()


@pytest.mark.long
@pytest.mark.parametrize("blocks", [0, 1])
def test_two_processes_are_one(blocks: int, tmp_path: Path) -> None:
    one = job(tmp_path / "one", micro_batch_size=4, save_steps=4, blocks=blocks)
    one.train()
    settings = ("micro_batch_size=2", "save_steps=4", f"blocks={blocks}")
    torchrun("-m", "tests.training.job", str(tmp_path / "two"), *settings)
    two = json.loads((tmp_path / "two" / "losses.json").read_text())
    # The order of additions differs, nothing else.
    assert two == pytest.approx(losses(one), rel=1e-5)
    # One process goes on where two had been.
    (tmp_path / "two" / "checkpoint-8" / "run.json").unlink()
    rest = job(tmp_path / "two", micro_batch_size=4, save_steps=4, blocks=blocks)
    rest.train(resume_from_checkpoint=True)
    assert losses(rest) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.long
def test_the_training_loss_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    given = {"micro_batch_size": 2, "log_steps": 5}  # three steps after the last entry
    one = job(tmp_path / "one", **given).train()
    torchrun("-m", "tests.training.job", str(tmp_path / "two"), *(f"{name}={v}" for name, v in given.items()))
    two = json.loads((tmp_path / "two" / "training_loss.json").read_text())
    assert two == pytest.approx(one.training_loss, rel=1e-5)


@pytest.mark.long
def test_sharded_weights_give_the_same_loss_and_gradients(tmp_path: Path) -> None:
    torchrun("-m", "tests.training.sharded", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["loss"] == pytest.approx(found["expected loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(found["expected norm"], rel=1e-4)
    assert found["split"] is True
    assert found["probe"] == pytest.approx(found["expected probe"], rel=1e-4)
