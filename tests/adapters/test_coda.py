"""Parity with the original CoDA: every intermediate, bfloat16, the head, saving, the hub's ids."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import dlm_lens
from tests.adapters.golden import GOLDEN, cases, check_saved_names, compare_with_the_original

CODA = GOLDEN / "coda"


@pytest.mark.parametrize(("path", "case"), cases(CODA))
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    compare_with_the_original(path, case)


def test_saving_writes_the_original_names_back(tmp_path: Path) -> None:
    again = check_saved_names(CODA, tmp_path)
    assert again.config.model_type == "CoDA"
    assert again.config.logit_shift
    assert again.sampler_defaults["remasking"] == "origin"


def test_a_checkpoint_without_a_head_is_tied(tmp_path: Path) -> None:
    """The authors' config says that the head is tied, their code has one of its own: what is stored decides."""
    own = dlm_lens.load(CODA)
    assert not own.lm_head.weight.equal(own.model.embed_tokens.weight)
    weights = load_file(CODA / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((CODA / "config.json").read_text())
    tied = dlm_lens.load(tmp_path)
    assert tied.lm_head.weight.equal(weights["model.embed_tokens.weight"])


def test_ids_of_the_released_models(tmp_path: Path) -> None:
    config = json.loads((CODA / "config.json").read_text())
    released = {name: config[name] for name in ("head_dim", "rope_theta", "model_type", "architectures")}
    (family,) = [family for family in dlm_lens.families() if family.name == "coda"]
    assert family.special_ids[151936] == {"mask": 151669, "eos": 151645}
    assert family.layouts["CoDA"][0](**released).vocab_size == 151936
