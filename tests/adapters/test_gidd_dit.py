"""Parity with GIDD's original network, its checkpoints' format, and the time that it is given."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import dlm_lens as dl
from dlm_lens.adapters.families.gidd_dit import GiddDiTConfig, GiddDiTForMaskedLM, hybrid_shares, time_of
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import GOLDEN, cases, compare_dit_with_the_original
from tests.dit64 import dit64

GIDD = GOLDEN / "gidd_dit"
BUFFERS = {"rotary_emb.cos_cached", "rotary_emb.sin_cached"}


@pytest.mark.parametrize(("path", "case"), cases(GIDD))
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    stored = compare_dit_with_the_original(path, case)
    assert float(stored["logits"].std()) > 3


@pytest.mark.parametrize("p_uniform", [0.0, 0.1, 0.2, 0.9])
def test_the_shares_and_the_time_of_a_share_of_masks(p_uniform: float) -> None:
    times = torch.linspace(0, 1, 21, dtype=torch.float64)
    alpha, masked, random = hybrid_shares(times, p_uniform)
    torch.testing.assert_close(alpha + masked + random, torch.ones_like(times), atol=1e-15, rtol=0)
    assert float(random[10]) == pytest.approx(p_uniform, rel=1e-9)
    # Text and masks keep their ratio: what random tokens take is in proportion from both.
    torch.testing.assert_close(alpha * times, masked * (1 - times), atol=1e-15, rtol=0)
    torch.testing.assert_close(time_of(masked, p_uniform), times, atol=1e-9, rtol=0)


def test_the_shares_are_the_originals() -> None:
    """In float64, of a B that the original holds in float32, and which is at least 2 exp(-20) there."""
    for entry in json.loads((GIDD / "loss.json").read_text())["entries"]:
        shares = hybrid_shares(torch.tensor(entry["t"], dtype=torch.float64), entry["p_uniform"])
        for name, found in zip(("alpha", "masked", "random"), shares, strict=True):
            expected = torch.tensor(entry[name], dtype=torch.float64)
            torch.testing.assert_close(found, expected, atol=3e-9, rtol=2e-6)


@torch.no_grad()
def test_the_time_changes_the_logits_and_is_taken_from_the_masks() -> None:
    model: Any = tiny("gidd_dit", p_uniform=0.2)
    ids = torch.tensor([[1, 2, 63, 63, 5, 63], [61, 61, 7, 63, 8, 9]])
    content = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    times = torch.tensor([0.5528, 0.2963])
    strength = 2 * 0.2 / 0.8
    for _ in range(200):  # t = m (1 + B sqrt(t (1 - t))), by iteration
        times = torch.tensor([3 / 6, 1 / 4]) * (1 + strength * (times * (1 - times)).sqrt())
    expected = model(input_ids=ids, attention_mask=content, sigma=times).logits
    torch.testing.assert_close(model(input_ids=ids, attention_mask=content).logits, expected, atol=1e-5, rtol=1e-5)
    other = model(input_ids=ids, attention_mask=content, sigma=times / 2).logits
    assert (other - expected).abs().amax((1, 2)).min() > 0.02
    ends = model(input_ids=torch.tensor([[1, 2], [63, 63]])).logits
    given = model(input_ids=torch.tensor([[1, 2], [63, 63]]), sigma=torch.tensor([1e-4, 1 - 1e-4])).logits
    assert ends.equal(given)


@torch.no_grad()
def test_padded_rows_are_what_they_are_alone() -> None:
    model: Any = dl.load(GIDD)
    ids = torch.arange(10)[None]
    alone = dit64(model, ids, sigma=0.7)["logits"]
    content = torch.ones(1, 13, dtype=torch.long)
    content[0, :3] = 0
    padded = torch.cat([torch.full((1, 3), 7), ids], 1)
    positions = (content.cumsum(-1) - 1).clamp(min=0)
    time = torch.tensor([0.7])
    found = model(input_ids=padded, attention_mask=content, position_ids=positions, sigma=time).logits[:, 3:]
    # The sinusoids of the time are float32: some 1e-7 of a logit of up to 15.
    torch.testing.assert_close(found.double(), alone, atol=1e-4, rtol=1e-4)


def test_the_original_format_is_loaded_and_saved(tmp_path: Path) -> None:
    model: Any = dl.load(GIDD)
    check_hook_points(model)
    assert model.config.mask_token_id == 39
    assert (model.config.p_uniform, model.config.t_eps, model.config.dropout) == (0.1, 1e-4, 0.0)
    model.save_pretrained(tmp_path)
    original, written = load_file(GIDD / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() - written.keys() == BUFFERS  # computed here
    assert written.keys() <= original.keys()
    assert all(original[name].equal(written[name]) for name in written)
    values = json.loads((tmp_path / "config.json").read_text())
    given = json.loads((GIDD / "config.json").read_text())
    assert set(given.pop("auto_map")) == {"AutoConfig", "AutoModelForMaskedLM"}
    given.pop("torch_dtype")
    assert "auto_map" not in values
    assert {name: values.get(name) for name in given} == given
    again: Any = dl.load(tmp_path)
    ids = torch.tensor([[3, 39, 7, 39]])
    # In float64, rounded: where weights begin in memory changes the order of sums on some processors.
    found, wanted = (one.double()(input_ids=ids).logits.float() for one in (again, model))
    assert found.equal(wanted)


def test_fields_under_the_authors_names() -> None:
    config = GiddDiTConfig(timestep_cond_dim=24, max_seq_len=77, attention_dropout=0.25, t_eps=0.01)
    assert (config.cond_dim, config.max_position_embeddings) == (24, 77)
    assert (config.dropout, config.attention_dropout) == (0.25, 0.0)
    values = config.to_dict()
    assert {name: values[name] for name in ("timestep_cond_dim", "max_seq_len", "attention_dropout")} == {
        "timestep_cond_dim": 24, "max_seq_len": 77, "attention_dropout": 0.25,
    }  # fmt: skip
    again = GiddDiTConfig.from_dict(values)
    assert (again.dropout, again.attention_dropout, again.sampler_defaults) == (0.25, 0.0, {"eps": 0.01})
    assert tiny("gidd_dit", t_eps=0.01).sampler_defaults["eps"] == 0.01
    assert tiny("gidd_dit").sampler_defaults["eps"] == 1e-4


@pytest.mark.parametrize(("sizes", "millions"), [((768, 12, 12), 169.6), ((1024, 24, 16), 424.5)])
def test_the_networks_have_the_parameters_that_the_authors_name(
    sizes: tuple[int, int, int], millions: float
) -> None:
    """Of their README, small and base."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    with torch.device("meta"):
        model = GiddDiTForMaskedLM(GiddDiTConfig(**dict(zip(names, sizes, strict=True)), max_seq_len=512))
    assert round(sum(each.numel() for each in model.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize("tokens", [True, False])
def test_released_files_name_no_ids(tokens: bool, tmp_path: Path) -> None:
    """Config.json as convert_checkpoint.py writes it; its tokenizer is GPT-2's, to which two tokens were added."""
    (family,) = [family for family in dl.families() if family.name == "gidd_dit"]
    ids = {"mask": 50258, "pad": 50257, "bos": 50256, "eos": 50256}
    assert family.special_ids[GiddDiTConfig().vocab_size] == ids
    assert len(family.hub_names) == 6
    small: Any = tiny("gidd_dit", vocab_size=50259, hidden_size=8, num_attention_heads=2, mask_token_id=50258)
    small.save_pretrained(tmp_path)
    fields = (*json.loads((GIDD / "config.json").read_text()), "torch_dtype")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({name: values[name] for name in fields if name in values}))
    if tokens:
        words = {**{f"w{i}": i for i in range(50256)}, "<|endoftext|>": 50256}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
            bos_token="<|endoftext|>", eos_token="<|endoftext|>",
        )  # fmt: skip
        tokenizer.add_special_tokens({"pad_token": "[PAD]", "mask_token": "[MASK]"})
        tokenizer.save_pretrained(tmp_path)
    model: Any = dl.load(tmp_path)
    assert {name: getattr(model.config, f"{name}_token_id") for name in ids} == ids
    assert model.config.mask_token_id == model.config.vocab_size - 1
    run = dl.denoise(model, [[5, 9]], gen_length=3, steps=2)
    assert run.open[0, 0].tolist() == [False, False, True, True, True]
    if tokens:
        assert model.tokenizer.mask_token_id == 50258
        assert run.answers == [model.tokenizer.decode(run.tokens[0, 2:], skip_special_tokens=True)]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"p_uniform": 1.0}, "GIDD config has p_uniform=1.0; it must be a number from 0 and below 1"),
        ({"p_uniform": -0.1}, "p_uniform=-0.1"),
        ({"p_uniform": "0.1"}, "p_uniform='0.1'"),
        ({"t_eps": 0.5}, "t_eps=0.5; it must be a number between 0 and 0.5"),
        ({"time_conditioning": False}, "its network is given the time"),
        ({"adaln": False}, "its network is given the time"),
    ],
)
def test_what_is_no_gidd_is_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        GiddDiTConfig(**changed)
    values = json.loads((GIDD / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(GIDD / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        dl.load(tmp_path)
