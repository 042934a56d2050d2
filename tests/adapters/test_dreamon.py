"""DreamOn: Dream's files, known by a field, by name or by the caller; its layers, its ids and its sampler."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl
from dlm_lens.adapters.registry import model_type_of
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN

FOLDER = GOLDEN / "dream"
CONFIG = json.loads((FOLDER / "config.json").read_text())


def checkpoint(folder: Path, **fields: Any) -> Path:
    """Dream's tiny checkpoint with other fields in its config.json."""
    shutil.copy(FOLDER / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    return folder


@torch.no_grad()
def test_the_field_of_config_json_tells_it_from_dream(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, expand_token_id=36)
    model = dl.load(path)
    assert (model.config.model_type, model.config.expand_token_id) == ("DreamOn", 36)
    golden = load_file(FOLDER / "forward.safetensors")
    logits = model(input_ids=golden["plain.input_ids"]).logits
    torch.testing.assert_close(logits, golden["plain.logits"], **CLOSE)
    assert dl.denoise(model, [[5, 250, 7]], gen_length=2).settings["sampler"] == "dreamon"
    assert dl.load(FOLDER).config.model_type == "Dream"


def test_a_copy_without_the_field_is_what_the_caller_says(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    with pytest.raises(ValueError, match="expand_token_id is 151667, and the vocabulary has 256 tokens"):
        dl.load(path, family="dreamon")
    released = CONFIG | {"vocab_size": 152064}
    assert model_type_of(released, "Dream-org/DreamOn-v0-7B") == "DreamOn"
    assert model_type_of(released, "Dream-org/Dream-v0-Instruct-7B") == "Dream"


def test_saving_keeps_the_field(tmp_path: Path) -> None:
    model = tiny("dreamon", expand_token_id=17)
    model.save_pretrained(tmp_path)
    again = dl.load(tmp_path)
    assert type(again) is type(model)
    assert (again.config.expand_token_id, again.config.logit_shift) == (17, True)
    assert again.sampler_defaults["top_p"] == 0.9


def test_the_bridge_runs_it() -> None:
    model = tiny("dreamon")
    plain = dl.denoise(model, [[5, 63, 63, 7]], gen_length=4, seed=1)
    bridged = dl.bridge(model).denoise([[5, 63, 63, 7]], gen_length=4, seed=1)
    assert bridged.canvases.equal(plain.canvases)
