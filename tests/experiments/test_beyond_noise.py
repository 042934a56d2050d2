"""Sinks under uniform noise: planted sinks, nulls by permutation, rules, and a run with an untrained network."""

from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.experiments import find_experiment
from dlm_lens.experiments.attention_sinks import beyond_noise
from dlm_lens.experiments.attention_sinks.beyond_noise import active_steps, counted
from dlm_lens.experiments.results import Record
from experiments.toy.checkpoint import export
from experiments.toy.model import build_model
from tests.experiments.finished_runs import finished_run

ANSWER = np.array([False, False, True, True, True, True])


def planted() -> tuple[np.ndarray, np.ndarray]:
    """Sinks [step, map, key] of two maps, with a learned sink token, and the open positions of four steps."""
    sinks = np.zeros((4, 2, 7), bool)
    for step, at, key in ((0, 0, 3), (1, 0, 2), (1, 0, 3), (1, 1, 5), (2, 0, 4), (2, 1, 0), (3, 1, 6)):
        sinks[step, at, key] = True
    opened = np.zeros((4, 6), bool)
    opened[0, 2:] = True
    opened[1, [3, 5]] = opened[2, [4]] = True
    return sinks, opened


def test_counts_of_planted_sinks() -> None:
    sinks, opened = planted()
    alone = np.zeros((4, 7), bool)
    alone[2, 1] = True
    found = counted(sinks, alone, opened, ANSWER, 6)
    assert (found["maps"], found["with"], found["mask alone"]) == (8, 6, 2)
    # Steps 1 and 2 have open and decided positions: sinks at 2, 3, 5 and 4, of which 3, 5 and 4 are open.
    assert (found["steps"], found["sinks"], found["open"]) == (2, 4, 3)
    assert found["share open"] == pytest.approx(2 / 4 + 1 / 4)


def test_the_nulls_are_means_over_all_permutations() -> None:
    sinks, opened = planted()
    found = counted(sinks, np.zeros((4, 7), bool), opened, ANSWER, 6)
    shown, here = sinks[1:3, :, 2:6].sum(1), opened[1:3, 2:]
    steps = [
        np.mean([(shown[step] * here[step][list(order)]).sum() for order in permutations(range(4))])
        for step in range(2)
    ]
    places = [
        np.mean([(shown[:, key] * here[list(order), key]).sum() for order in permutations(range(2))])
        for key in range(4)
    ]
    assert found["by step"] == pytest.approx(sum(steps))
    assert found["by place"] == pytest.approx(sum(places))
    none = counted(sinks, np.zeros((4, 7), bool), opened, ANSWER & False, 6)
    assert (none["steps"], none["sinks"], none["by step"]) == (0, 0, 0.0)


def test_steps_after_a_row_ended_are_left_out() -> None:
    changed = torch.zeros(5, 2, 3, dtype=torch.bool)
    changed[1, 0, 2] = changed[3, 1, 0] = True
    revised = torch.zeros_like(changed).index_fill(0, torch.tensor(0), True)
    run = SimpleNamespace(unmasked=changed, revised=revised, row_steps=torch.tensor([5, 5]))
    assert [len(active_steps(run, row)) for row in range(2)] == [2, 4]
    run.row_steps = torch.tensor([1, 3])
    assert [len(active_steps(run, row)) for row in range(2)] == [1, 1]


PROMPTS = 128
"""So many that a difference which is the same in all is known well (`statistics.within`)."""


def one(**changes: Any) -> dict[str, Any]:
    base = {"maps": 100, "with": 40, "mask alone": 0, "sinks": 50, "open": 40, "by step": 20.0, "by place": 25.0,
            "share open": 8.0, "steps": 20}  # fmt: skip
    return base | changes


def verdicts(noise: dict[str, Any], toy: dict[str, Any]) -> dict[str, str]:
    def record(model: str, value: dict[str, Any], uniform: bool) -> Record:
        values = {name: [value] * PROMPTS for name in beyond_noise.READINGS}
        return Record({"model": model, "start": 0}, {**values, "uniform noise": uniform}, 0.0)

    results = finished_run({"settings": {}}, [record("toy-uniform", noise, True), record("toy", toy, False)])
    return {finding.paper.split(" (")[0]: finding.verdict for finding in beyond_noise._findings(results)}


def test_findings_follow_their_rules() -> None:
    exist, like = "a uniform-noise model has attention sinks", "as many maps have sinks as in toy"
    random, masks = (
        f"open positions, which hold {held}, become sinks" for held in ("random tokens", "the mask token")
    )
    for changes, wanted in (
        ({}, {exist: "agrees", like: "agrees", random: "agrees", masks: "agrees"}),
        ({"mask alone": 60}, {exist: "disagrees"}),
        ({"with": 70}, {like: "disagrees"}),
        ({"open": 22}, {random: "disagrees", masks: "agrees"}),
        ({"open": 10}, {random: "disagrees", masks: "agrees"}),
    ):
        found = verdicts(one(**changes), one())
        assert {name: found[name] for name in wanted} == wanted, changes


@pytest.mark.long
def test_a_run_with_an_untrained_network(tmp_path: Path) -> None:
    export(build_model("toy-uniform", 0), "toy-uniform", tmp_path / "toy-uniform-3000steps-seed0")
    experiment = find_experiment("beyond-noise")
    sampler = {"gen_length": 12, "steps": 10, "entropy_bound": 20.0}
    own = {"prompts": 2, "batch": 2, "trained": str(tmp_path), "sampler": sampler, "eps": 0.05}
    settings = {**experiment.small, **own}
    bench = SimpleNamespace(model=lambda name: dl.load(name))
    value = experiment.run({"model": "toy-uniform", "network": 0, "start": 0}, settings, bench)
    assert value["uniform noise"] is True
    model = dl.load(tmp_path / "toy-uniform-3000steps-seed0")
    problems = beyond_noise.recorded_runs.problems_of(settings, 0)
    recording = dl.record(model, [problem.prompt for problem in problems], [dl.ReceivedAttention()], **sampler)
    scores, opened = recording.received, recording.run.open
    for row in range(2):
        # Again, key by key: above 0.05 times the mean of the others.
        values = scores[:, row].nan_to_num(nan=-1.0)
        there = ~scores[:, row].isnan()
        others = (scores[:, row].nansum(-1, keepdim=True) - values) / (there.sum(-1, keepdim=True) - 1)
        sinks = (values > others + 0.05) & there
        for scale in beyond_noise.READINGS:
            assert value[scale][row]["maps"] % 16 == 0
        got, total = value["relative"][row], 0
        for step in active_steps(recording.run, row):
            now = opened[step, row]
            if bool(now.any()) and bool((opened[0, row] & ~now).any()):
                total += int((sinks[step] & now).sum())
        assert got["open"] == total
        assert total > 0
