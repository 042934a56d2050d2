"""Parity with the original WeDLM network in both of its forms, its config, and the order in which it attends."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import dlm_lens
from dlm_lens.adapters.families.wedlm import FAMILY, WeDLMConfig
from dlm_lens.attention import check_hook_points, observed_first, without_later_masks
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, collect
from tests.reference import forward64

WEDLM = GOLDEN / "wedlm"
MASK = 60


def seen_by_hand(masked: list[bool]) -> Tensor:
    """Causal visibility in the authors' physical order, entry by entry."""
    order = [i for i, flag in enumerate(masked) if not flag] + [i for i, flag in enumerate(masked) if flag]
    found = torch.zeros(len(masked), len(masked), dtype=torch.bool)
    for rank, query in enumerate(order):
        found[query, order[: rank + 1]] = True
    return found


@pytest.mark.parametrize("case", ["text", "masks"])
@pytest.mark.parametrize("kind", ["8b", "7b"])
@torch.no_grad()
def test_every_state_and_pattern_equals_the_original_in_its_order(kind: str, case: str) -> None:
    stored = {
        key.removeprefix(f"{kind}.{case}."): value
        for key, value in load_file(WEDLM / "tensors.safetensors").items()
        if key.startswith(f"{kind}.{case}.")
    }
    model, ids, order = dlm_lens.load(WEDLM / kind), stored["ids"], stored["order"]
    assert (ids == MASK).any() == (case == "masks")
    seen, row = collect(model, ids), torch.arange(2)[:, None]
    names = {
        "logits": "logits",
        "hidden.0": "hidden.embed",
        "hidden.1": "hidden.block0",
        "hidden.2": "hidden.final_norm",
    }
    for theirs, ours in names.items():
        torch.testing.assert_close(
            seen[ours][row, order], stored[theirs], **CLOSE, msg=lambda m, key=ours: f"{key}: {m}"
        )
    for layer in range(2):
        pattern = seen[f"probs{layer}"][row[..., None], :, order[:, :, None], order[:, None]].permute(0, 3, 1, 2)
        torch.testing.assert_close(pattern, stored[f"attn.{layer}"], **CLOSE)


@pytest.mark.parametrize("kind", ["8b", "7b"])
@torch.no_grad()
def test_the_network_is_an_independent_one_in_float64(kind: str) -> None:
    model = dlm_lens.load(WEDLM / kind)
    ids = torch.randint(0, 57, (1, 12))
    ids[0, [3, 4, 8, 11]] = MASK
    visible = seen_by_hand((ids[0] == MASK).tolist())[None, None]
    expected = forward64(model, ids, visible=visible)["logits"]
    torch.testing.assert_close(model(input_ids=ids).logits.double(), expected, **CLOSE)
    plain = forward64(model, ids, causal=True)["logits"]
    assert (plain - expected).abs().max() > 0.5  # the order matters


@torch.no_grad()
def test_without_masks_it_is_qwens_causal_network() -> None:
    model, ids = dlm_lens.load(WEDLM / "8b"), torch.randint(0, 57, (2, 9))
    expected = forward64(model, ids, causal=True)["logits"]
    torch.testing.assert_close(model(input_ids=ids).logits.double(), expected, **CLOSE)


@pytest.mark.parametrize("masked", ["0110100", "0000", "111", "1000", "0111"])
def test_observed_first_is_causal_in_the_physical_order(masked: str) -> None:
    flags = [flag == "1" for flag in masked]
    found = observed_first(torch.ones(1, len(flags), dtype=torch.bool), torch.tensor([flags]))
    assert found[0, 0].equal(seen_by_hand(flags))


def test_padding_is_no_key_and_its_queries_see_the_content() -> None:
    content = torch.tensor([[False, False, True, True, True]])
    masked = torch.tensor([[True, False, False, True, False]])
    found = observed_first(content, masked)[0, 0]
    assert not found[:, :2].any()
    assert found[:2, 2:].all()
    assert found[2:, 2:].equal(seen_by_hand([False, True, False]))


def test_the_window_ends_after_so_many_positions_from_each_rows_first_mask() -> None:
    masked = torch.tensor([[0, 1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0, 1], [0] * 7]).bool()
    assert without_later_masks(masked, 3).int().tolist() == [[1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 1, 0], [1] * 7]


@torch.no_grad()
def test_a_left_padded_row_is_what_it_is_alone() -> None:
    model = tiny("wedlm")
    mask, ids = model.config.mask_token_id, torch.randint(5, 40, (1, 7))
    ids[0, [2, 5]] = mask
    alone = model(input_ids=ids).logits
    for padding in (3, mask):
        padded = torch.cat([torch.full((1, 4), padding), ids], 1)
        content = torch.tensor([[0] * 4 + [1] * 7])
        position = (content.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=padded, attention_mask=content, position_ids=position).logits
        torch.testing.assert_close(logits[:, 4:], alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_cache_holds_observed_tokens() -> None:
    model = tiny("wedlm")
    ids = torch.randint(5, 40, (1, 9))
    ids[0, [5, 6, 8]] = model.config.mask_token_id
    whole = model(input_ids=ids).logits
    first = model.model(input_ids=ids[:, :4], use_cache=True)
    rest = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values, use_cache=True).logits
    torch.testing.assert_close(rest, whole[:, 4:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_embeddings_need_a_mask_that_says_the_order() -> None:
    model = tiny("wedlm")
    ids = torch.tensor([[5, model.config.mask_token_id, 7]])
    embeddings = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="which ids are \\[MASK\\]: give input_ids"):
        model(inputs_embeds=embeddings)
    visible = observed_first(torch.ones_like(ids).bool(), ids == model.config.mask_token_id)
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    found = model(inputs_embeds=embeddings, attention_mask=mask).logits
    torch.testing.assert_close(found, model(input_ids=ids).logits)


RELEASED = {
    "7b": {"attention_bias": True, "qk_norm": False, "vocab_size": 152064},
    "8b": {"attention_bias": False, "qk_norm": True, "vocab_size": 151936},
}


@pytest.mark.parametrize("kind", ["8b", "7b"])
def test_a_checkpoint_in_the_released_format_loads_and_is_written_back(kind: str, tmp_path: Path) -> None:
    """config.json as on the hub, where mask_token_id is null; of the vocabulary's real size few rows are used."""
    values = json.loads((WEDLM / kind / "config.json").read_text())
    values |= {**RELEASED[kind], "mask_token_id": None, "eos_token_id": 151643, "pad_token_id": 151643}
    weights = load_file(WEDLM / kind / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.zeros(values["vocab_size"], weights[name].shape[1])
        rows[:64] = weights[name]
        weights[name] = rows
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "modeling_wedlm.py").write_text("raise RuntimeError('executed')")
    model = dlm_lens.load(tmp_path)
    config = model.config
    assert (config.mask_token_id, config.eos_token_id, config.eot_token_id) == (151665, 151643, 151645)
    assert config.head_dim == (16 if kind == "8b" else 8)
    assert config.original_architecture == {"8b": "DlmLensQwen3", "7b": "DlmLensQwen2"}[kind]
    assert {name for name in model.state_dict() if "norm" in name and "self_attn" in name} == {
        f"model.layers.{layer}.self_attn.{part}_norm.weight" for layer in range(2) for part in "qk" if kind == "8b"
    }
    ids = torch.tensor([[3, 5, 151665, 9]])
    plain = dlm_lens.load(WEDLM / kind)
    plain.model.embed_tokens.weight.data[MASK] = 0
    expected = plain(input_ids=ids.masked_fill(ids > 64, MASK)).logits
    torch.testing.assert_close(model(input_ids=ids).logits[..., :64], expected, **CLOSE)
    model.save_pretrained(tmp_path / "again")
    with safe_open(tmp_path / "again" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(weights)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["qk_norm"] is RELEASED[kind]["qk_norm"]


@pytest.mark.parametrize("fields", [{"qk_norm": True}, {"attention_bias": False}])
def test_layers_of_neither_network_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="WeDLM has the layers of"):
        WeDLMConfig(**fields)


def test_defaults_are_those_of_the_authors_config_class() -> None:
    config = WeDLMConfig()
    assert config.attention_bias
    assert not config.qk_norm
    assert config.head_dim == config.hidden_size // config.num_attention_heads
    assert config.rope_parameters["rope_theta"] == 10_000
    assert not config.is_causal


def test_both_forms_have_hook_points() -> None:
    for fields in ({}, {"qk_norm": False, "attention_bias": True}):
        model = tiny("wedlm", **fields)
        check_hook_points(model)
        assert all(hasattr(layer.self_attn, "hook_q") for layer in model.model.layers)
    assert FAMILY.hub_names[0] == "tencent/WeDLM-8B-Instruct"
