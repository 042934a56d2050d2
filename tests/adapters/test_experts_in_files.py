"""Experts that files hold one by one, which transformers joins: damaged ones are told by name."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.adapters import loading
from tests.adapters.golden import GOLDEN

GIVEN: dict[str, dict[str, Any]] = {"rnd1": {}, "llada2": {"mask_token_id": 155}, "llada_moe": {"mask_token_id": 1}}


def changed(family: str, path: Path, change: Callable[[Tensor], Tensor], expert: int = 1) -> tuple[Path, str]:
    """A copy of a checkpoint with one changed matrix of an expert, and the name of that matrix."""
    copytree(GOLDEN / family, path, ignore=lambda *_: ["variants"])
    weights = load_file(path / "model.safetensors")
    name = min(name for name in weights if f".experts.{expert}.gate_proj" in name)
    weights[name] = change(weights[name]).contiguous()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path, name


@pytest.mark.parametrize("family", GIVEN)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda weight: weight[:-1],
            r"has the shape \[\d+, \d+\], and that matrix of the other experts \[\d+, \d+\]",
        ),
        (lambda weight: weight.T, r"has the shape \[\d+, \d+\], and that matrix of the other experts \[\d+, \d+\]"),
        (lambda weight: weight.to(torch.int8), "has the dtype I8, and .* has no quantization_config that says how"),
        (
            lambda weight: weight.to(torch.complex64),
            "has the dtype C64, and .* has no quantization_config that s",
        ),
    ],
)
def test_experts_that_do_not_fit_are_told_before_weights_are_read(
    family: str,
    change: Callable[[Tensor], Tensor],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, name = changed(family, tmp_path / "it", change)
    monkeypatch.setattr(loading, "load_weights", None)
    with pytest.raises(ValueError, match=sentence) as told:
        dl.load(path, **GIVEN[family])
    assert str(told.value).startswith(f"{name} in {path} has ")


@pytest.mark.parametrize("family", GIVEN)
def test_an_expert_that_is_not_finite_is_named_and_not_attention(family: str, tmp_path: Path) -> None:
    path, _ = changed(family, tmp_path / "it", lambda weight: torch.full_like(weight, torch.nan), 0)
    with pytest.raises(
        ValueError, match=r"\d\.mlp\.experts\.gate_up_proj of \w+ holds NaN or infinity: the checkp"
    ):
        dl.load(path, **GIVEN[family])
