"""Sinks in block diffusion: planted sinks, planted counts, and a run with an untrained network."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.experiments import find_experiment
from dlm_lens.experiments.attention_sinks import beyond_blocks
from dlm_lens.experiments.attention_sinks.beyond_blocks import counted, decoded_steps
from dlm_lens.experiments.results import Record, Results
from experiments.toy.checkpoint import export
from experiments.toy.model import build_model
from tests.experiments.finished_runs import finished_run

SPANS = np.array([[4, 6], [4, 6], [6, 8], [6, 8]])


def planted(*places: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sinks [step, map, key], scores that fall with the order of the places, and even weights of the seen keys."""
    sinks, scores = np.zeros((4, len(places), 8), bool), np.ones((4, len(places), 8))
    for number, steps in enumerate(places):
        for step, keys in enumerate(steps):
            for rank, key in enumerate(keys):
                sinks[step, number, key] = True
                scores[step, number, key] = 9.0 - rank
    seen = (np.arange(8) < SPANS[:, 1:]).astype(float)
    return sinks, np.where(seen[:, None] > 0, scores, -np.inf), seen


def test_counts_of_planted_sinks() -> None:
    # The first map's sink stays at 1; the second's largest moves with the block, its other one leaves the prefix.
    sinks, scores, weight = planted([[1], [1], [1], [1]], [[4, 2], [5, 2], [7], [7]])
    alone = np.zeros((4, 8), bool)
    alone[0, 0] = True
    found = counted(sinks, scores, weight, SPANS, alone, followed=True)
    assert (found["maps"], found["with"], found["mask alone"]) == (8, 8, 2)
    assert (found["sinks"], found["prefix"]) == (10, 6)
    # Steps 0 and 1: 3 sinks each and 4 of 6 seen keys before the block; steps 2 and 3: 2 each and 6 of 8.
    assert found["chance"] == pytest.approx(2 * 3 * 4 / 6 + 2 * 2 * 6 / 8)
    # Inside blocks, 0 to 1: sinks 1 and 2, both kept; by chance 1/6 (one sink) and 2/6 (two sinks at step 1).
    # 2 to 3: sink 1, kept, by chance 1/8.
    assert found["inside"] == [3, 3, pytest.approx(1 / 6 + 2 / 6 + 1 / 8)]
    # 1 to 2: sinks 1 and 2 before the block, of which 1 is kept; sink 5 of the finished block is not.
    assert found["crossing"] == [2, 1, pytest.approx(2 / 8)]
    assert found["entering"] == [1, 0, pytest.approx(1 / 8)]
    # The second map's largest sink, at 5 in the finished block, is at 7 in the next one.
    assert found["largest"] == [1, 0, 1, pytest.approx(2 / 8)]


def test_a_largest_sink_that_stays_in_the_finished_block() -> None:
    sinks, scores, weight = planted([[5], [5], [5], [5]], [[5], [5], [0, 7], [0]])
    found = counted(sinks, scores, weight, SPANS, np.zeros((4, 8), bool), followed=True)
    assert found["largest"] == [2, 1, 0, pytest.approx(2 * 2 / 8)]
    assert found["entering"] == [2, 1, pytest.approx(1 / 8 + 2 / 8)]
    still = counted(sinks, scores, weight, SPANS, np.zeros((4, 8), bool), followed=False)
    assert still["inside"] == still["crossing"] == [0, 0, 0.0]
    assert still["prefix"] == found["prefix"]


def test_steps_after_the_end_of_the_text_are_left_out() -> None:
    tokens = torch.tensor([[9, 9, 5, 2, 7, 7, 7, 7], [9, 9, 5, 5, 5, 5, 2, 2], [9, 9, 5, 5, 5, 5, 5, 5]])
    run = SimpleNamespace(
        tokens=tokens, prompt_length=2, spans=((2, 4), (2, 4), (4, 6), (6, 8)), autoregressive=False,
        tokenizer=SimpleNamespace(eos_token_id=2), row_steps=torch.tensor([4, 4, 3]),
    )  # fmt: skip
    assert [len(decoded_steps(run, row)) for row in range(3)] == [2, 4, 3]
    run.autoregressive = True
    assert [len(decoded_steps(run, row)) for row in range(3)] == [4, 4, 3]


PROMPTS = 128
"""So many that a difference which is the same in all is known well (`statistics.within`)."""


def one(**changes: Any) -> dict[str, Any]:
    base = {"maps": 100, "with": 40, "mask alone": 0, "sinks": 50, "prefix": 40, "chance": 25.0,
            "inside": [100, 90, 5.0], "crossing": [40, 35, 3.0], "entering": [20, 10, 1.0],
            "largest": [20, 9, 2, 4.0]}  # fmt: skip
    return base | changes


def results_of(blocks: dict[str, Any], toy: dict[str, Any]) -> Results:
    found = {name: [blocks] * PROMPTS for name in beyond_blocks.READINGS}
    others = {name: [toy] * PROMPTS for name in beyond_blocks.READINGS}
    return finished_run({"settings": {}}, [
        Record({"model": "toy-blocks", "start": 0}, {**found, "block causal": True}, 0.0),
        Record({"model": "toy", "start": 0}, {**others, "block causal": False}, 0.0),
    ])  # fmt: skip


def verdicts(results: Results) -> dict[str, str]:
    found: dict[str, str] = {}
    for finding in beyond_blocks._findings(results):
        found.setdefault(finding.paper.split(" (")[0], finding.verdict)
    return found


def test_findings_follow_their_rules() -> None:
    names = {
        "exist": "a block-diffusion model has attention sinks", "prefix": "its sinks are in the cached prefix",
        "stay": "they stay there when a block is finished", "move": "they move with the block",
        "toy": "as many maps have sinks as in toy",
    }  # fmt: skip
    for changes, wanted in (
        ({}, {"exist": "agrees", "prefix": "agrees", "stay": "agrees", "move": "disagrees", "toy": "agrees"}),
        ({"mask alone": 60}, {"exist": "disagrees"}),
        ({"chance": 45.0}, {"prefix": "disagrees"}),
        ({"crossing": [40, 20, 3.0]}, {"stay": "disagrees"}),
        ({"largest": [20, 2, 9, 4.0]}, {"move": "agrees"}),
        ({"with": 70}, {"toy": "disagrees"}),
    ):
        found = verdicts(results_of(one(**changes), one()))
        for name, verdict in wanted.items():
            assert found[names[name]] == verdict, (changes, name)


@pytest.mark.long
def test_a_run_with_an_untrained_network(tmp_path: Path) -> None:
    export(build_model("toy-blocks", 0), "toy-blocks", tmp_path / "toy-blocks-3000steps-seed0")
    experiment = find_experiment("beyond-blocks")
    sampler = {"gen_length": 16, "steps": 16}
    settings = {
        **experiment.small,
        "prompts": 2,
        "batch": 2,
        "trained": str(tmp_path),
        "sampler": sampler,
        "eps": 0.05,
    }
    bench = SimpleNamespace(model=lambda name: dl.load(name))
    value = experiment.run({"model": "toy-blocks", "network": 0, "start": 0}, settings, bench)
    assert value["block causal"] is True
    model = dl.load(tmp_path / "toy-blocks-3000steps-seed0")
    assert model.config.sampler == "dllm_blocks"
    for row, got in enumerate(value["block"]):
        assert got["maps"] % 16 == 0
        # Again, from the recording: positions count from the canvas's start, the second row has padding.
        problems = beyond_blocks.recorded_runs.problems_of(settings, 0)
        recording = dl.record(
            model, [problem.prompt for problem in problems], [dl.ReceivedAttention(queries="block")], **sampler
        )
        steps = decoded_steps(recording.run, row)
        scores = dl.received_of(recording, "block").values[steps, row]
        here = scores.nan_to_num(nan=-1.0)
        n = (~scores.isnan()).sum(-1, keepdim=True)
        others = (scores.nansum(-1, keepdim=True) - here) / (n - 1)
        sinks = (here > others + 0.05) & ~scores.isnan()
        assert got["sinks"] == int(sinks.sum())
        before = sum(int(sinks[t, ..., : recording.run.spans[t][0]].sum()) for t in steps)
        assert got["prefix"] == before
        assert 0 < before < got["sinks"]
    results = finished_run({"settings": settings}, [Record({"model": "toy-blocks", "start": 0}, value, 0.0)])
    rendering = experiment.render(results)
    assert set(rendering.figures) == {"maps"}
    assert len(rendering.tables[0].rows) == 3
