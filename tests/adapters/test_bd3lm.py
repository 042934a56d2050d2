"""Parity with the original BD3-LM: block causal attention, and the two copies of its training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl
from dlm_lens.attention import check_hook_points
from dlm_lens.sampling.two_copies import Blocks, two_copies
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, collect
from tests.dit64 import dit64

BD3LM = GOLDEN / "bd3lm"


@pytest.mark.parametrize(("path", "case"), cases(BD3LM))
@torch.no_grad()
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    model: Any = dl.load(path)
    golden = load_file(path / "forward.safetensors")
    stored = {key.removeprefix(f"{case}."): value for key, value in golden.items() if key.startswith(f"{case}.")}
    ids, visible = stored.pop("input_ids"), stored.pop("attention_bias").bool()
    positions = stored.pop("position_ids")
    inputs: dict[str, Any] = {}
    if case == "two_copies":  # the training's mask; the other case is the model's own forward
        noisy, clean = ids.chunk(2, 1)
        inputs = two_copies(noisy, clean, torch.arange(12).expand(2, -1) // 4, positions[:, :12], dtype=model.dtype)
        assert inputs.pop("input_ids").equal(ids)
        assert (inputs["attention_mask"] == 0).equal(visible.expand(2, -1, -1, -1))
        assert inputs["position_ids"].equal(positions)
    norm: list[Any] = []
    model.model.norm.norm_final.register_forward_hook(lambda _m, _a, out: norm.append(out))
    seen = collect(model, ids, **inputs) | {"hidden.final_norm": norm[0]}
    for key, expected in stored.items():
        got = seen[key][:, : expected.shape[1]] if key == "logits" else seen[key]
        torch.testing.assert_close(got, expected, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
    # Embedding, final norm, logits; per layer block, q, k, v, pattern, z, attention and MLP outputs.
    assert len(stored) == 3 + 8 * model.config.num_hidden_layers


@pytest.mark.parametrize("adaln", [True, False])
@torch.no_grad()
def test_blocks_of_the_models_own_forward_begin_with_each_rows_text(adaln: bool) -> None:
    model = tiny("bd3lm", block_size=3, adaln=adaln)
    assert any("modulation" in name for name, _ in model.named_parameters()) is adaln
    ids = torch.arange(16).view(2, 8)
    content = torch.tensor([[1] * 8, [0, 0] + [1] * 6])
    positions = (content.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=content, position_ids=positions).logits
    for row, start in ((0, 0), (1, 2)):
        block = torch.arange(8 - start) // 3
        visible = (block[None] <= block[:, None])[None, None]
        expected = dit64(model, ids[row : row + 1, start:], visible)["logits"][0]
        torch.testing.assert_close(logits[row, start:].double(), expected, atol=2e-5, rtol=2e-4)


def test_options_of_the_config(tmp_path: Path) -> None:
    model: Any = tiny("bd3lm", block_size=5)
    check_hook_points(model)
    assert model.sampler_defaults["block_length"] == 5
    assert Blocks.of(model.config) == Blocks(5, from_text=True)
    whole: Any = tiny("bd3lm", cross_attn=False)
    plain: Any = tiny("mdlm")
    plain.load_state_dict(whole.state_dict())
    ids = torch.arange(12).view(2, 6)
    assert whole(input_ids=ids).logits.equal(plain(input_ids=ids).logits)
    assert dl.denoise(whole, "", gen_length=5).canvases.equal(dl.denoise(plain, "", gen_length=5).canvases)
    with pytest.raises(ValueError, match="causal=True"):
        tiny("bd3lm", causal=True)
    with pytest.raises(ValueError, match="sees blocks of 4; leave sampler out"):
        tiny("bd3lm", block_size=4, sampler="mdlm")
    pretrained = tiny("bd3lm", block_size=128, sampler="mdlm")  # one block: MDLM under another name
    assert dl.denoise(pretrained, "", gen_length=5).settings["sampler"] == "mdlm"
    with pytest.raises(ValueError, match="not a model of type 'bd3lm'"):
        dl.bridge(tiny("bd3lm"))
    (tmp_path / "save").mkdir()
    loaded = dl.load(BD3LM)
    loaded.save_pretrained(tmp_path / "save")
    original, written = load_file(BD3LM / "model.safetensors"), load_file(tmp_path / "save" / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    again = dl.load(tmp_path / "save")
    assert (again.config.block_size, again.config.var_min) == (4, True)
    (family,) = [family for family in dl.families() if family.name == "bd3lm"]
    assert family.special_ids[50258]["bos"] == 50256
