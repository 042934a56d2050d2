"""Runs and recordings name their model as it was loaded, wherever the package lies; another model warns."""

from pathlib import Path

import pytest
import torch

import dlm_lens as dl
from dlm_lens.adapters import smollm2
from dlm_lens.adapters.model_names import name_of
from dlm_lens.hooks import mask_positions
from dlm_lens.probes import commitment
from dlm_lens.testing import tiny


def test_an_embedded_model_has_its_own_name(tmp_path: Path) -> None:
    model = dl.load("toy")
    assert name_of(model) == "toy"
    recording = dl.record(
        model, ["leo has 26 stones ."], to=tmp_path / "run", gen_length=7, steps=1, block_length=7
    )
    assert recording.model == "toy"
    assert b"checkpoints" not in b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*.json"))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (str(smollm2.cache_directory() / "smollm2-0123456789ab"), "smollm2"),
        ("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Base"),
        ("/data/checkpoints/toy", "/data/checkpoints/toy"),
    ],
)
def test_other_names(path: str, name: str) -> None:
    model = tiny("llada")
    model.config._name_or_path = path
    assert name_of(model) == name


def test_runs_name_their_model_and_another_one_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = dl.load("toy"), "leo has 26 stones ."
    given = {"gen_length": 4, "steps": 2}
    run = dl.denoise(model, prompt, **given)
    recording = dl.record(model, prompt, to=tmp_path / "run", **given)
    lm = dl.DiffusionLM(model)
    with lm.generate(prompt, **given) as tracer:
        traced = tracer.result.save()
    with dl.record_forward(model, [dl.ReceivedAttention()]) as passes, torch.no_grad():
        model(input_ids=run.canvases[0], use_cache=False)
    runs = [run, recording.run, dl.Recording.load(tmp_path / "run").run, recording.select(step=1).run, traced]
    runs += [dl.bridge(model).denoise(prompt, **given), passes.recording.run]
    assert [one.model for one in runs] == ["toy"] * len(runs)
    commitment(model, run)
    assert not caplog.messages
    other = dl.load("toy-gated")
    warning = "the run is of the model toy, and toy-gated reads its canvases"
    commitment(other, run)
    dl.received_over_steps(other, dl.Recording.load(tmp_path / "run").run)
    dl.logit_lens(other, run, [3], hooks=[mask_positions(1)])
    assert caplog.messages == [warning] * 3
