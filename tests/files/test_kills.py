"""Killed at every disk call and at random: the next run is the unbroken one, and nothing is left of the kill."""

import gc
import json
import random
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from safetensors.torch import load_file

from dlm_lens.evaluation import HarnessLM
from dlm_lens.experiments import read_results, run_experiment
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.recording import ReceivedAttention, ValueNorm, record
from dlm_lens.testing import tiny
from dlm_lens.training.checkpoints import checkpoints
from tests.evaluation.conftest import ask
from tests.experiments.test_runner import squares
from tests.files.kills import contents, count_calls, hidden, kill_at_call, kill_at_random, run_forked
from tests.recording.reference import PROMPTS
from tests.training.job import job

torch.set_num_threads(1)
LLADA, CAUSAL = tiny("llada"), tiny("causal")
SETTINGS: dict[str, Any] = {"gen_length": 4, "temperature": 0.7, "seed": [3, 4], "batch_size": 1}
HELD = record(LLADA, PROMPTS, steps=2, gen_length=4, seed=1)
POINTS = 16
"""Disk calls of a scene at which it is killed, evenly spread where it has more."""


def diffusion(path: Path) -> None:
    record(LLADA, PROMPTS, [ReceivedAttention(), ValueNorm()], to=path, steps=2, **SETTINGS)


def hooked(path: Path) -> None:
    # A hook that remembers: such a run starts again.
    hooks = [mask_top_sinks(1, source="previous")]
    record(LLADA, PROMPTS, [ReceivedAttention()], hooks=hooks, to=path, steps=3, gen_length=6, seed=[3, 4])


def autoregressive(path: Path) -> None:
    record(CAUSAL, PROMPTS, [ValueNorm()], to=path, **SETTINGS)


def saved(path: Path) -> None:
    if not (path / "run.json").exists():
        HELD.save(path)


def evaluation(path: Path) -> None:
    lm = HarnessLM(
        LLADA,
        generation={"steps": 2, "gen_length": 4, "temperature": 0.5},
        likelihood={"method": "chain_rule", "is_greedy": False},
        record_to=path / "recordings",
        responses=path / "answers.jsonl",
    )
    lm.generate_until(ask("generate_until", ("w1 w2", {"until": []})))
    for number, pair in enumerate((("w1 w2", " w3 w4"), ("w5", " w6"))):
        lm.loglikelihood([Instance("loglikelihood", {}, pair, 0, metadata=("other", number, 1))])


def experiment(path: Path) -> None:
    run_experiment(squares(), path, settings={"count": 5})


def training(path: Path) -> None:
    job(path, save_steps=1, keep=1, steps=3).train(resume_from_checkpoint=True)


def same_files(found: Path, wanted: Path) -> None:
    assert contents(found) == contents(wanted)


def same_records(found: Path, wanted: Path) -> None:
    one, other = ([(r.item, r.value) for r in read_results(path).records] for path in (found, wanted))
    assert one == other
    lines = [json.loads(line) for line in (found / "results-00000.jsonl").read_text().splitlines()]
    assert sum("item" in line for line in lines) == 5


def same_training(found: Path, wanted: Path) -> None:
    (one,), (other,) = checkpoints(found), checkpoints(wanted)
    assert one.name == other.name
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = load_file(one / name), load_file(other / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert {path.name for path in found.iterdir()} == {path.name for path in wanted.iterdir()}


SCENES: dict[str, tuple[Callable[[Path], None], Callable[[Path, Path], None]]] = {
    "diffusion": (diffusion, same_files),
    "hooked": (hooked, same_files),
    "autoregressive": (autoregressive, same_files),
    "saved": (saved, same_files),
    "evaluation": (evaluation, same_files),
    "experiment": (experiment, same_records),
    "training": (training, same_training),
}


def do(scene: str, path: Path) -> None:
    """The work of a scene in this process, which knows as little of the killed ones as a new child would."""
    if scene != "training" or not torch.cuda.is_available():
        SCENES[scene][0](path)
        return
    # A child cannot use a GPU that its parent uses.
    status, told = run_forked(lambda: SCENES[scene][0](path))
    assert status == 0, told


@cache
def warm(scene: str) -> None:
    """Do the work of a scene once: what it imports and makes once a process, every later one has already."""
    with tempfile.TemporaryDirectory() as directory:
        do(scene, Path(directory) / "it")
    gc.collect()
    gc.freeze()  # Trainer collects garbage in every training: not among what is made once


def check_again(scene: str, path: Path, wanted: Path, how: str) -> None:
    same = SCENES[scene][1]
    try:
        do(scene, path)
        same(path, wanted)
        assert hidden(path) == []
    except Exception as error:
        raise AssertionError(f"{how}: {error}") from error


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("scene", SCENES)
def test_killed_at_disk_calls(scene: str, tmp_path: Path) -> None:
    warm(scene)
    work = SCENES[scene][0]
    calls = count_calls(lambda: work(tmp_path / "wanted"), tmp_path / "wanted")
    assert calls >= 8
    assert hidden(tmp_path / "wanted") == []
    stride = max(1, calls // (POINTS if scene != "training" else 8))
    for number, at in enumerate(range(0, calls, stride)):
        path = tmp_path / f"at{at}"
        path.mkdir()
        kill_at_call(lambda path=path: work(path / "it"), path / "it", at, tear=number % 2 == 1)
        check_again(scene, path / "it", tmp_path / "wanted", f"killed at call {at} of {calls}")


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("scene", SCENES)
def test_killed_at_random(scene: str, tmp_path: Path) -> None:
    warm(scene)
    work, draw = SCENES[scene][0], random.Random(scene)
    start = time.monotonic()
    assert run_forked(lambda: work(tmp_path / "wanted"))[0] == 0
    seconds, killed = time.monotonic() - start, 0
    for case in range(4 if scene == "training" else 6):
        path = tmp_path / f"case{case}"
        for _ in range(2):
            died = kill_at_random(lambda path=path: work(path), seconds, draw)
            killed, seconds = killed + died, seconds if died else 0.6 * seconds
        check_again(scene, path, tmp_path / "wanted", f"case {case}")
    assert killed >= 1
