"""Two processes on the CPU against one, and weights that are split by `fully_shard`."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from dlm_lens.training.trainer import end_processes
from tests.preloaded import python
from tests.training.job import ROWS, evaluations, job, losses, note_evaluation, weights

ROOT = Path(__file__).parents[2]


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
"""accelerate-fsdp.yaml as environment variables, in float32."""

MODEL_IN_A_CYCLE = """
import gc
from pathlib import Path
import torch
from dlm_lens.training.trainer import end_processes

def threads():
    return sum("gloo_runloop" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))

gc.disable()
torch.distributed.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model.itself = [model]
before = threads()
del model
end_processes()
print(before, threads())
"""


def torchrun(*command: str, **variables: str) -> None:
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | variables
    launch = [
        python(),
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
        "--no-python",
        python(),
    ]
    done = subprocess.run(
        [*launch, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_process_group_ends(tmp_path: Path) -> None:
    end_processes()  # there is none
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    end_processes()
    assert not torch.distributed.is_initialized()


def test_no_model_holds_the_process_group_when_it_ends(tmp_path: Path) -> None:
    """Else gloo's threads, for which the last holder waits, run on until a DDP model is freed."""
    script = tmp_path / "script.py"
    script.write_text(MODEL_IN_A_CYCLE.format(store=tmp_path / "store"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([python(), script], env=environment, check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert before > 0
    assert after == 0


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("kind", [{}, {"blocks": 1}, {"average": 1}])
def test_two_processes_are_one(kind: dict[str, int], tmp_path: Path) -> None:
    one = job(tmp_path / "one", micro_batch_size=4, save_steps=4, **kind)
    one.train()
    settings = ("micro_batch_size=2", "save_steps=4", *(f"{name}={value}" for name, value in kind.items()))
    torchrun("-m", "tests.training.job", str(tmp_path / "two"), *settings)
    two = json.loads((tmp_path / "two" / "losses.json").read_text())
    # The order of additions differs, nothing else.
    assert two == pytest.approx(losses(one), rel=1e-5)
    found, expected = weights(tmp_path / "two" / "checkpoint-8"), weights(tmp_path / "one" / "checkpoint-8")
    for name, value in expected.items():
        # Adam divides by the root of small moments, which rounding changes.
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    # One process goes on where two had been.
    (tmp_path / "two" / "checkpoint-8" / "run.json").unlink()
    rest = job(tmp_path / "two", micro_batch_size=4, save_steps=4, **kind)
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
def test_two_processes_divide_the_evaluation(tmp_path: Path) -> None:
    given = {"eval_rows": 5, "eval_steps": 3, "steps": 4}  # 5 batches of 4 rows
    one = job(tmp_path / "one", eval_dataset=ROWS, **given)
    note_evaluation(one, tmp_path / "one.json")
    whole = json.loads((tmp_path / "one.json").read_text())
    torchrun("-m", "tests.training.job", str(tmp_path / "two"), *(f"{name}={v}" for name, v in given.items()))
    parts = [json.loads((tmp_path / "two" / f"evaluation-{rank}.json").read_text()) for rank in (0, 1)]
    assert [part["rows"] for part in parts] == [12, 8]
    assert whole["rows"] == 20
    assert [part["loss"] for part in parts] == [whole["loss"]] * 2  # the same batches, added in the same order
    one.train()
    two = json.loads((tmp_path / "two" / "evaluations.json").read_text())
    # The weights differ by the order of additions.
    assert two == pytest.approx(evaluations(one), rel=1e-5)


@pytest.mark.long
def test_sharded_weights_give_the_same_loss_and_gradients(tmp_path: Path) -> None:
    torchrun("-m", "tests.training.sharded", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["loss"] == pytest.approx(found["expected loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(found["expected norm"], rel=1e-4)
    assert found["split"] is True
    assert found["probe"] == pytest.approx(found["expected probe"], rel=1e-4)


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_training_under_fsdp_is_that_of_one_process_and_is_resumed(kind: str, tmp_path: Path) -> None:
    given = {"steps": 4, "micro_batch_size": 4, "save_steps": 2, "eval_steps": 3, "eval_rows": 5}
    one = job(tmp_path / "one", eval_dataset=ROWS, **given)
    one.train()
    # A probe gathers the weights for every canvas: those of one row are enough to be in the way of a step.
    settings = (*(f"{name}={value}" for name, value in given.items()), "probe_steps=2", "probe_rows=1")
    two = tmp_path / "two"
    for _ in range(2):  # from the start, and from step 2
        torchrun("-m", "tests.training.fsdp", str(two), *settings, **FSDP, FSDP_STATE_DICT_TYPE=kind)
        assert json.loads((two / "sharded.json").read_text()) is True
        # The order of additions differs, nothing else.
        assert json.loads((two / "losses.json").read_text()) == pytest.approx(losses(one), rel=1e-5)
        # Five batches for two processes, of which one repeats the last.
        found = json.loads((two / "evaluations.json").read_text())
        assert found == pytest.approx(evaluations(one), rel=1e-5)
        if kind == "FULL_STATE_DICT":
            found, expected = weights(two / "checkpoint-4"), weights(tmp_path / "one" / "checkpoint-4")
            for name, value in expected.items():
                # Adam divides by the root of small moments, which rounding changes.
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
        (two / "checkpoint-4" / "run.json").unlink()
