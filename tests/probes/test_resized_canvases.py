"""Probes of runs whose canvas has positions that a step does not see: room for masks (DreamOn), later blocks."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import activation_patching, input_norms
from dlm_lens.probes.attribution.passes import with_prompt
from dlm_lens.testing import tiny
from tests.sampling.test_dreamon import MASK, PROMPTS, resizing

GREEDY: dict[str, Any] = {"temperature": 0.0, "expand_budget": 6, "seed": 0}
CLOSE: dict[str, Any] = {"atol": 1e-9, "rtol": 1e-6}
"""Of float64 networks, which sum over more hidden keys in the wider canvas."""


@pytest.fixture(scope="module")
def model() -> Any:
    """A network whose texts grow and shrink, and have more room than they need."""
    return resizing(seed=4).double()


@pytest.fixture(scope="module")
def runs(model: Any) -> list[dl.DenoisingRun]:
    """The same texts, on canvases with more and with less room."""
    found = [dl.denoise(model, PROMPTS, gen_length=length, **GREEDY) for length in (8, 11)]
    assert found[0].texts == found[1].texts
    lengths = found[0].seen_content.sum(-1)
    assert {-1, 1} <= set(lengths.diff(dim=0).flatten().tolist())
    return found


def test_means_and_norms_do_not_count_the_room(model: Any, runs: list[dl.DenoisingRun]) -> None:
    steps = [2, 5]
    one, two = (activation_patching(model, run, "mean", "mlp_out", steps=steps).effects for run in runs)
    assert bool((one.abs() > 1e-6).any())
    torch.testing.assert_close(one, two, **CLOSE)
    for discount in ("none", "sinks"):
        one, two = (input_norms(model, run, discount=discount) for run in runs)
        assert one.discounted == pytest.approx(two.discounted)
        for name, values in one.values.items():
            torch.testing.assert_close(values, two.values[name], rtol=1e-5, atol=1e-6)  # stored in float32


def test_a_mean_does_not_count_blocks_to_come() -> None:
    model = tiny("llada", sampler="dllm_var", seed=4).double()
    given: dict[str, Any] = {"block_length": 4, "threshold": 0.4, "stop_tokens": [], "use_cache": False}
    short, long = (dl.denoise(model, [[1, 2, 3, 4, 5]], gen_length=length, **given) for length in (4, 12))
    steps = list(range(short.steps))
    one, two = (activation_patching(model, run, "mean", "mlp_out", steps=steps).effects for run in (short, long))
    torch.testing.assert_close(one, two, **CLOSE)


def test_a_corrupted_prompt_reaches_both_sides_of_a_gap(model: Any) -> None:
    clean, other = ([a, MASK, MASK, MASK, b, MASK, c, d] for a, b, c, d in ((4, 6, 8, 9), (14, 16, 18, 19)))
    run = dl.denoise(model, [clean], gen_length=6, **GREEDY)
    changed = with_prompt(model, run, [other])
    new = {4: 14, 6: 16, 8: 18, 9: 19}
    places = set()
    for step in range(run.steps):
        seen = run.seen_content[step, 0]
        text = run.canvases[step, 0, seen].tolist()
        assert [token for token in text if token in new] == [4, 6, 8, 9]  # the network writes none of them
        assert changed.canvases[step, 0, seen].tolist() == [new.get(token, token) for token in text]
        places.add(run.canvases[step, 0].tolist().index(6))
    assert len(places) > 1
    effects = activation_patching(model, run, [other], "resid").effects
    assert bool((effects.abs() > 1e-6).any())
    with pytest.raises(ValueError, match=r"has \[3\] tokens a row and the run's \[8\]"):
        activation_patching(model, run, [[1, 2, 3]])
