"""`dlm_lens.testing`, as users' own tests see it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import dlm_lens
from dlm_lens.testing import tiny

FAMILIES = [family.name for family in dlm_lens.families()]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_tiny_model_that_denoises(family: str) -> None:
    model = tiny(family)
    assert sum(p.numel() for p in model.parameters()) < 60_000
    run = dlm_lens.denoise(model, "w1 w2 w3", gen_length=4)
    assert run.masks_left.tolist() == [0]
    assert run.texts[0].startswith("w1 w2 w3")


def test_options_are_config_fields_and_the_seed_is_the_weights_() -> None:
    assert tiny("llada", num_hidden_layers=3).config.num_hidden_layers == 3
    same, other = tiny("llada").state_dict(), tiny("llada", seed=1).state_dict()
    assert all(value.equal(same[name]) for name, value in tiny("llada").state_dict().items())
    assert not other["lm_head.weight"].equal(same["lm_head.weight"])
    state = torch.random.get_rng_state()
    tiny("llada")
    assert torch.random.get_rng_state().equal(state)


def test_a_tiny_model_leaves_the_generators_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    tiny("llada")
    assert seeds == []


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no family 'bert'; there are a2d_qwen3, bd3lm, causal, "):
        tiny("bert")
    with pytest.raises(ValueError, match="family 'causal' has no model type 'gpt2'; it has llama, qwen2, qwen3"):
        tiny("causal", model_type="gpt2")


def test_the_fixtures_are_there(
    tiny_llada: PreTrainedModel, tiny_sink_qwen: PreTrainedModel, tiny_causal: PreTrainedModel
) -> None:
    assert tiny_llada.config.model_type == "llada"
    assert tiny_sink_qwen.config.num_sinks == 1
    assert tiny_causal.config.model_type == "llama"


@pytest.mark.long
def test_a_stranger_s_tests_find_the_fixtures_and_do_not_pay_for_torch(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n"
        "def test_light(): assert 'torch' not in sys.modules\n"
        "def test_tiny(tiny_model): assert tiny_model('llada').config.mask_token_id == 63\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:jaxtyping"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout
