"""The name of a model in a recording is that with which it is loaded, wherever the package lies."""

from pathlib import Path

import pytest

import dlm_lens as dl
from dlm_lens.adapters import smollm2
from dlm_lens.recording.model_identity import name_of
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
