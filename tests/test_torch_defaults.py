"""torch's default device and inference mode do not change what is computed, nor where it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import dlm_lens as dl
from dlm_lens import viz
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.probes import (
    attribution_patching,
    commitment,
    decision_order,
    edge_attribution,
    logit_lens,
    replay,
    retrieval_heads,
    train_tuned_lens,
)
from dlm_lens.recording import ReceivedAttention
from dlm_lens.sampling import log_likelihood
from dlm_lens.testing import tiny
from tests import model_calls
from tests.model_calls import Case

PROMPTS = ["w1 w2 w3", "w4 w5 w6 w7"]
SETTINGS: dict[str, Any] = {"steps": 4, "gen_length": 8, "block_length": 4}


@contextmanager
def default_device(name: str) -> Iterator[None]:
    """torch's default device for the time of the block; "meta" has no numbers, so that its use fails."""
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(before if before.type != "cpu" else None)


CALLS: dict[str, Callable[[Any], Any]] = {
    "denoise": lambda model: dl.denoise(model, PROMPTS, **SETTINGS).confidence,
    "sampled": lambda model: dl.denoise(model, PROMPTS, temperature=1.0, seed=3, **SETTINGS).tokens,
    "hooks": lambda model: dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], **SETTINGS).confidence,
    "record": lambda model: dl.record(model, PROMPTS, [ReceivedAttention()], **SETTINGS).received_sums(),
    "likelihood": lambda model: log_likelihood(model, PROMPTS, ["w3", "w4 w5"], "mc", samples=4).value,
    "compare": lambda model: dl.compare(model, PROMPTS, [mask_top_sinks(1)], **SETTINGS).first_difference,
}
OF_RUNS: dict[str, Callable[[Any, dl.DenoisingRun], Any]] = {
    "replay": lambda model, run: replay(model, run, hooks=[mask_top_sinks(1)]).kl,
    "lens": lambda model, run: logit_lens(model, run, steps=[1]).entropy,
    "commitment": lambda model, run: commitment(model, run).committed_at,
    "order": lambda model, run: decision_order(run).table().to_numpy(),
    "heads": lambda model, run: retrieval_heads(model, run).sums,
}


def numbers(value: Any) -> torch.Tensor:
    assert not isinstance(value, torch.Tensor) or value.device.type == "cpu"
    return torch.as_tensor(value, device="cpu")


@pytest.mark.parametrize("name", CALLS)
def test_calls_do_not_follow_the_default_device(name: str) -> None:
    model = tiny("llada")
    plain = numbers(CALLS[name](model))
    with default_device("meta"):
        found = numbers(CALLS[name](model))
    torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OF_RUNS)
def test_probes_of_runs_do_not_follow_the_default_device(name: str) -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, **SETTINGS)
    plain = numbers(OF_RUNS[name](model, run))
    with default_device("meta"):
        found = numbers(OF_RUNS[name](model, run))
    torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)


def test_recordings_and_their_sinks_are_on_the_cpu(tmp_path: Path) -> None:
    model = tiny("llada")
    recording = dl.record(model, PROMPTS, [ReceivedAttention()], **SETTINGS)
    recording.save(tmp_path / "here")
    wanted = dl.find_sinks(recording, dl.AboveMean(1.0)).is_sink
    with default_device("meta"):
        read = dl.Recording.load(tmp_path / "here")
        assert read.run.last_written.equal(recording.run.last_written)
        assert read.run.in_block.equal(recording.run.in_block)
        assert read.run.texts == recording.run.texts
        found = read.received_sums()
        torch.testing.assert_close(found, recording.received_sums(), rtol=0, atol=0, equal_nan=True)
        assert dl.find_sinks(read, dl.AboveMean(1.0)).is_sink.equal(wanted)
        paths = dl.trajectories(read, dl.AboveMean(1.0))
        assert len(paths.table()) > 0


def test_a_run_of_inference_mode_is_read_by_probes_with_gradients() -> None:
    model = tiny("llada")
    plain = attribution_patching(model, dl.denoise(model, PROMPTS, **SETTINGS), "mean")
    with torch.inference_mode():
        run = dl.denoise(model, PROMPTS, **SETTINGS)
        inside = attribution_patching(model, run, "mean")
        edges = edge_attribution(model, run, ["w9 w2 w3", "w4 w5 w6 w8"])
    assert not run.canvases.is_inference()
    outside = attribution_patching(model, run, "mean")
    for found in (inside, outside):
        torch.testing.assert_close(found.effects, plain.effects, rtol=0, atol=0)
    assert edges.scores.isfinite().any()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_a_tuned_lens_is_trained_in_any_mode(context: Any, tmp_path: Path) -> None:
    model, text = tiny("llada"), tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 40}" for i in range(400)), encoding="utf-8")
    settings: dict[str, Any] = {"steps": 3, "batch_size": 2, "length": 16}
    plain = train_tuned_lens(model, text, **settings)
    with context():
        found = train_tuned_lens(model, text, **settings)
    assert found.weight.equal(plain.weight)
    assert not found.weight.equal(torch.zeros_like(found.weight))


def drawn(value: Any) -> Any:
    """What a figure or view shows: pixels, HTML or text."""
    if isinstance(value, Figure):
        value.canvas = FigureCanvasAgg(value)
        value.canvas.draw()
        return np.asarray(value.canvas.buffer_rgba()).tobytes()
    if isinstance(value, Path):
        return value.read_text(encoding="utf-8")
    return str(value) if isinstance(value, viz.View) else repr(value)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    found = Case("duo", tmp_path_factory.mktemp("case"))
    for name in ("run", "recording", "received", "sinks"):
        getattr(found, name)
    return found


@pytest.mark.parametrize("name", [name for name in model_calls.CALLS if name.startswith("viz.")])
def test_figures_do_not_follow_the_default_device(case: Case, name: str) -> None:
    with default_device("meta"):
        found = drawn(model_calls.CALLS[name](case))
    if name != "viz.explore":  # a new comparison each time, of other random runs
        assert found == drawn(model_calls.CALLS[name](case))
