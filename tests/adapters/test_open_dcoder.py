"""Open-dCoder: Qwen2's files known by name or by the caller, its layers, its ids and its mask token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl
from dlm_lens.adapters import family_of
from dlm_lens.adapters.registry import model_type_of
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN
from tests.reference import forward64

FOLDER = GOLDEN / "open_dcoder"
MASK = json.loads((FOLDER / "sampling.json").read_text())["mask_token_id"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A config.json of Qwen2 and Qwen2's tensors, which are those of Dream's tiny checkpoint."""
    shutil.copy(FOLDER / "config.json", tmp_path)
    shutil.copy(GOLDEN / "dream" / "model.safetensors", tmp_path)
    return tmp_path


@torch.no_grad()
def test_the_caller_says_what_the_files_cannot(checkpoint: Path) -> None:
    """Without `family` the files are those of Qwen2, which is causal."""
    plain = dl.load(checkpoint)
    model = dl.load(checkpoint, family="open_dcoder", mask_token_id=MASK)
    assert (plain.config.model_type, model.config.model_type) == ("qwen2", "open-dcoder")
    golden = load_file(GOLDEN / "dream" / "forward.safetensors")
    ids, logits = golden["plain.input_ids"], golden["plain.logits"]
    torch.testing.assert_close(model(input_ids=ids).logits, logits, **CLOSE)
    assert (plain(input_ids=ids).logits - logits).abs().max() > 0.1
    with pytest.raises(ValueError, match="open_dcoder has open-dcoder, qwen2"):
        dl.load(GOLDEN / "llada", family="open_dcoder")


def test_the_released_name_is_enough() -> None:
    values = json.loads((FOLDER / "config.json").read_text())
    assert model_type_of(values, "fredzzp/open-dcoder-0.5B") == "open-dcoder"
    assert model_type_of(values, "Qwen/Qwen2.5-Coder-0.5B") == "qwen2"


def test_saving_keeps_the_names_and_says_the_type(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, saved = dl.load(checkpoint, family="open_dcoder", mask_token_id=MASK), tmp_path_factory.mktemp("saved")
    model.save_pretrained(saved)
    original, written = load_file(checkpoint / "model.safetensors"), load_file(saved / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    again = dl.load(saved)
    assert (again.config.model_type, again.config.mask_token_id, again.config.logit_shift) == (
        "open-dcoder", MASK, True,
    )  # fmt: skip
    assert list(again.sampler_defaults) == ["steps", "gen_length", "temperature"]
    assert dl.denoise(again, [[1, 2]], gen_length=4).settings["sampler"] == "p2"


@torch.no_grad()
@pytest.mark.parametrize("sampler", ["p2", "dream"])
def test_a_padded_batch(sampler: str) -> None:
    model = tiny("open_dcoder", sampler=sampler)
    ids = torch.arange(1, 23).view(2, 11)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    for row, padding in enumerate((0, 3)):
        alone = forward64(model, ids[row : row + 1, padding:])["logits"]
        torch.testing.assert_close(logits[row : row + 1, padding:].double(), alone, atol=2e-5, rtol=2e-4)
    settings: dict[str, Any] = {"gen_length": 6, "steps": 4}
    assert dl.denoise(model, [[1, 2, 3], [4]], **settings).masks_left.tolist() == [0, 0]


def test_ids_of_the_released_model() -> None:
    family = family_of("open-dcoder")
    assert family.special_ids == {151936: {"mask": 151665, "eos": 151643}}
    assert family.mask_token == "<M>"
