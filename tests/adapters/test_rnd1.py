"""Parity with the original RND1: every intermediate, its experts, saving, fields that are false, padding."""

import json
from pathlib import Path

import pytest
import torch

import dlm_lens
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import GOLDEN, cases, check_saved_names, compare_with_the_original

RND1 = GOLDEN / "rnd1"


@pytest.mark.parametrize(("path", "case"), cases(RND1))
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    compare_with_the_original(path, case)


def test_saving_writes_the_original_names_back(tmp_path: Path) -> None:
    again = check_saved_names(RND1, tmp_path)
    assert again.config.model_type == "rnd1"
    assert (again.config.logit_shift, again.config.is_causal, again.config.use_cache) == (True, False, False)
    assert again.config.norm_topk_prob
    assert again.sampler_defaults == {"steps": 256, "gen_length": 256, "temperature": 0.1, "greedy": False}


def test_false_means_none() -> None:
    """The authors' class writes `rope_scaling` and `sliding_window` as false."""
    values = json.loads((RND1 / "config.json").read_text())
    assert values["rope_scaling"] is values["sliding_window"] is False
    config = dlm_lens.load(RND1).config
    assert config.sliding_window is None
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    """The original reads no padding; a padded row is what it is alone."""
    model = tiny("rnd1")
    check_hook_points(model)
    ids = torch.arange(1, 23).view(2, 11)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    for row, padding in enumerate((0, 3)):
        alone = model(input_ids=ids[row : row + 1, padding:]).logits
        torch.testing.assert_close(logits[row : row + 1, padding:], alone, atol=2e-5, rtol=2e-4)


def test_ids_of_the_released_model() -> None:
    (family,) = [family for family in dlm_lens.families() if family.name == "rnd1"]
    assert family.special_ids == {151936: {"mask": 151669, "eos": 151645}}
