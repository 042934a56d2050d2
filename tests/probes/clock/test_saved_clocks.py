"""Saved clocks: every part comes back bit for bit and reads the same; those of other models are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.files.tensor_files import read_with_metadata, write_tensors
from dlm_lens.probes import DenoisingClock, denoising_clock, read_clock, shift_clock, untrained_twin
from dlm_lens.shapes import tensor_axes
from dlm_lens.testing import tiny

PROMPTS = [[5 + i, 9, 14 + 2 * i, 3 + i] for i in range(6)]


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, dl.DenoisingRun, DenoisingClock]:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=4, gen_length=6)
    return model, run, denoising_clock(model, run, shuffles=2, bins=4, seed=3)


def test_every_part_of_a_clock_comes_back(fitted: Any, tmp_path: Path) -> None:
    model, run, clock = fitted
    assert clock.save(tmp_path / "clock.safetensors") == tmp_path / "clock.safetensors"
    assert clock.save(tmp_path / "clocks/a.safetensors").is_file()  # in a directory that was not there
    with pytest.raises(IsADirectoryError, match="is a directory; give the name of a file"):
        clock.save(tmp_path)
    found = DenoisingClock.load(tmp_path / "clock.safetensors", model)
    pairs = [(clock, found), (clock.reading, found.reading)]
    pairs += [(one, found.baselines[name]) for name, one in clock.baselines.items()]
    for one, other in pairs:
        for name, value in vars(one).items():
            if name in tensor_axes(type(one)):
                kept = getattr(other, name)
                assert kept.dtype == value.dtype
                assert torch.equal(kept.nan_to_num(), value.nan_to_num()), name
                assert torch.equal(kept.isnan(), value.isnan()), name
            elif name not in ("reading", "baselines"):
                assert getattr(other, name) == value, name
    assert [*found.baselines] == [*clock.baselines]
    assert found.table().equals(clock.table())
    assert repr(found) == repr(clock)
    one, other = (read_clock(model, run, each) for each in (clock, found))
    assert torch.equal(one.read, other.read)
    assert torch.equal(one.baseline, other.baseline)
    assert repr(shift_clock(found, 0.2, layer=0)) == repr(shift_clock(clock, 0.2, layer=0))


def test_a_clock_of_joined_runs_and_some_layers_comes_back(tmp_path: Path) -> None:
    """A label that is NaN after the end of a shorter run, one class, no null."""
    model = tiny("llada")
    runs = [dl.denoise(model, PROMPTS, steps=steps, gen_length=6) for steps in (3, 6)]
    clock = denoising_clock(model, runs, layers=[1], positions=["written"], target="progress", shuffles=0)
    assert bool(clock.reading.label.isnan().any())
    clock.save(tmp_path / "clock.safetensors")
    assert DenoisingClock.load(tmp_path / "clock.safetensors").table().equals(clock.table())


def test_a_clock_of_another_model_is_refused(fitted: Any, tmp_path: Path) -> None:
    model, _, clock = fitted
    path = tmp_path / "clock.safetensors"
    clock.save(path)
    for other in (tiny("llada", seed=5), untrained_twin(model)):
        with pytest.raises(ValueError, match=r"clock\.safetensors: this clock was fitted to .*; fit one with"):
            DenoisingClock.load(path, other)
    assert DenoisingClock.load(path).digest == clock.digest
    with pytest.raises(FileNotFoundError, match=r"DenoisingClock\.save writes one"):
        DenoisingClock.load(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="features and 64 tokens, the model has 32 and 80"):
        read_clock(
            bigger := tiny("llada", vocab_size=80), dl.denoise(bigger, PROMPTS, steps=2, gen_length=4), clock
        )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"classes": ["prompt", "open", "written"]}, "no clock has classes"),
        ({"layers": [0, 1]}, "no clock has layers"),
        ({"layers": [-1, 0, 0]}, "no clock has layers"),
        ({"layers": [-1, 0, 7]}, "this clock was fitted to"),
        ({"longest": 9}, "its baselines have the shapes"),
        ({"seed": 2**70}, "no clock has seed"),
    ],
)
def test_facts_that_no_clock_has_are_refused(
    changed: dict[str, Any], said: str, fitted: Any, tmp_path: Path
) -> None:
    model, _, clock = fitted
    path = clock.save(tmp_path / "clock.safetensors")
    tensors, metadata = read_with_metadata(path, "")
    write_tensors(path, tensors, {**metadata, "clock": json.dumps({**json.loads(metadata["clock"]), **changed})})
    with pytest.raises(ValueError, match=said) as caught:
        DenoisingClock.load(path, model)
    assert str(path) in str(caught.value)


def test_a_tensor_of_another_shape_is_refused(fitted: Any, tmp_path: Path) -> None:
    _, _, clock = fitted
    path = clock.save(tmp_path / "clock.safetensors")
    tensors, metadata = read_with_metadata(path, "")
    for name, value in tensors.items():
        for other in (value[..., None], value[:0]):
            write_tensors(path, {**tensors, name: other}, metadata)
            with pytest.raises(ValueError, match=r"clock\.safetensors"):
                DenoisingClock.load(path)
    write_tensors(path, {**tensors, "more": torch.ones(1)}, metadata)
    with pytest.raises(ValueError, match="it holds"):
        DenoisingClock.load(path)
