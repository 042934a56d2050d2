"""Tuned lenses, clocks and mean activations: damaged files are told, whole ones come back."""

import hashlib
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dlm_lens as dl
from dlm_lens.files.tensor_files import read_with_metadata, write_tensors
from dlm_lens.hooks import MeanActivations
from dlm_lens.probes import DenoisingClock, TunedLens, denoising_clock
from dlm_lens.recording.model_identity import weights_digest
from dlm_lens.testing import tiny
from tests.files.damage import damage

MODEL = tiny("llada")


def lens() -> TunedLens:
    weight = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(0))
    return TunedLens(weight, weight[:, 0], (0,), "tiny", weights_digest(MODEL), {"steps": 3, "last_loss": 0.5})


@cache
def clock() -> DenoisingClock:
    run = dl.denoise(MODEL, [[1, 2, 3], [4, 5, 6]], steps=3, gen_length=4)
    return denoising_clock(MODEL, run, shuffles=1, bins=3)


def means() -> MeanActivations:
    counts = torch.tensor([[3, 4], [5, 0], [1, 1]])
    return MeanActivations("z", torch.arange(2 * 3 * 2 * 3.0).reshape(2, 3, 2, 3), counts)


KINDS = {
    "lens": (lens, lambda path: TunedLens.load(path, MODEL), ("weight", "bias", "layers", "model", "training")),
    "clock": (
        clock,
        lambda path: DenoisingClock.load(path, MODEL),
        ("weight", "curve", "target", "model"),
    ),
    "means": (means, MeanActivations.load, ("means", "counts", "site")),
}


def same(found: Any, wanted: Any) -> bool:
    return torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted


@pytest.mark.in_turn
@pytest.mark.parametrize("cases", [60, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_or_without_effect(kind: str, cases: int, tmp_path: Path) -> None:
    make, load, names = KINDS[kind]
    path, draw, told = tmp_path / "it" / "file.safetensors", random.Random(5), 0
    path.parent.mkdir()
    for _ in range(cases):
        if path.is_dir():
            path.rmdir()
        make().save(path)
        how = damage(path.parent, draw)
        try:
            found = load(path)
            right = all(same(getattr(found, name), getattr(make(), name)) for name in names)
        except (ValueError, FileNotFoundError) as error:
            told, how = told + 1, f"{how}: {error}"
            right = str(path) in str(error) and "\n" not in str(error)
        assert right, how
    assert told > 0.9 * cases


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_program_changed_is_refused(kind: str, tmp_path: Path) -> None:
    make, load, _ = KINDS[kind]
    path = tmp_path / "file.safetensors"
    make().save(path)
    save_file({name: value + 1 for name, value in load_file(path).items()}, path)
    with pytest.raises(ValueError, match=r"is no (tuned lens|clock) of this version|holds no MeanActivations"):
        load(path)
    make().save(path)
    assert path.stat().st_mode & 0o077  # not the 0600 of safetensors' own files, for the usual umask
    assert [one.name for one in tmp_path.iterdir()] == ["file.safetensors"]


def test_equal_tensors_and_metadata_are_equal_files(tmp_path: Path) -> None:
    """safetensors alone writes two entries of metadata in either order."""
    tensors = {"b": torch.arange(3.0), "é\n": torch.ones(2, dtype=torch.int64)}
    facts = {"step": '{"a": "\\u001f é"}', "facts": "x"}
    written = [write_tensors(tmp_path / f"{number}.safetensors", tensors, facts) for number in range(20)]
    assert len({one.digest for one in written}) == 1
    content = (tmp_path / "0.safetensors").read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (written[0].size, written[0].digest)
    found, metadata = read_with_metadata(tmp_path / "0.safetensors", "write it again")
    assert metadata == facts
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in tensors.items()
    }
    write_tensors(tmp_path / "plain.safetensors", tensors)
    save_file(tensors, tmp_path / "library.safetensors")
    assert (tmp_path / "plain.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()
