"""Parity with the original MDLM, and what a DiT's layers have that no other family's have."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import dlm_lens as dl
from dlm_lens.attention import adding_module, check_hook_points
from dlm_lens.sampling.samplers.mdlm import log_probabilities
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, collect_dit

MDLM = GOLDEN / "mdlm"


@pytest.mark.parametrize(("path", "case"), cases(MDLM))
@torch.no_grad()
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    model: Any = dl.load(path)
    model.config.time_conditioning = case == "sigma_t"
    golden = load_file(path / "forward.safetensors")
    stored = {key.removeprefix(f"{case}."): value for key, value in golden.items() if key.startswith(f"{case}.")}
    ids, sigma = stored.pop("input_ids"), stored.pop("sigma")
    seen = collect_dit(model, ids, sigma)
    masked = ids == model.config.mask_token_id
    certain = torch.full(seen["logits"].shape, -torch.inf).scatter(-1, ids[..., None], 0.0)
    seen["log_probs"] = torch.where(
        masked[..., None], log_probabilities(seen["logits"], model.config.mask_token_id), certain
    )
    for key, expected in stored.items():
        # Without time conditioning every row has the same condition, of which there is one.
        got = seen[key].expand_as(expected)
        torch.testing.assert_close(got, expected, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
    # cond, embedding, final norm, logits, log_probs; per layer block, q, k, v, pattern, z, two outputs, modulation.
    assert len(stored) == 5 + 9 * model.config.num_hidden_layers


@torch.no_grad()
def test_without_time_conditioning_sigma_has_no_effect() -> None:
    model, ids = tiny("mdlm"), torch.arange(12).view(2, 6)
    plain = model(input_ids=ids).logits
    assert model(input_ids=ids, sigma=torch.tensor([0.3, 2.0])).logits.equal(plain)
    conditioned = tiny("mdlm", time_conditioning=True)
    conditioned.load_state_dict(model.state_dict())
    torch.testing.assert_close(conditioned(input_ids=ids, sigma=torch.zeros(2)).logits, plain, atol=1e-5, rtol=1e-5)
    assert (conditioned(input_ids=ids, sigma=torch.tensor([0.3, 2.0])).logits - plain).abs().amax(
        (1, 2)
    ).min() > 0.05


@torch.no_grad()
def test_a_conditioned_network_takes_the_noise_level_from_the_masks() -> None:
    model: Any = tiny("mdlm", time_conditioning=True)
    ids = torch.tensor([[1, 2, 63, 63, 5, 63], [61, 61, 7, 63, 8, 9]])
    content = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    share = torch.tensor([3 / 6, 1 / 4]) * 0.999
    expected = model(input_ids=ids, attention_mask=content, sigma=-torch.log(1 - share)).logits
    torch.testing.assert_close(model(input_ids=ids, attention_mask=content).logits, expected)
    with pytest.raises(ValueError, match="pass sigma"):
        model(inputs_embeds=model.model.embed_tokens(ids))
    with pytest.raises(ValueError, match="a lens has none to give"):
        model.model.norm(torch.zeros(3, 32))


@pytest.mark.parametrize("adaln", [True, False])
@torch.no_grad()
def test_gates_are_what_layers_add(adaln: bool) -> None:
    model: Any = tiny("mdlm", adaln=adaln)
    seen: dict[str, Any] = {}
    (first, _), layer = model.model.layers, model.model.layers[0]
    for site in ("attn_out", "mlp_out"):
        adding_module(layer, site).register_forward_hook(lambda _m, _a, out, site=site: seen.__setitem__(site, out))
    first.self_attn.o_proj.register_forward_hook(lambda _m, _a, out: seen.__setitem__("before", out))
    first.register_forward_hook(lambda _m, args, out: seen.__setitem__("layer", out - args[0]))
    model(input_ids=torch.arange(8)[None])
    torch.testing.assert_close(seen["attn_out"] + seen["mlp_out"], seen["layer"], atol=1e-6, rtol=1e-5)
    assert adaln is not seen["before"].equal(seen["attn_out"])


def test_saving_and_buffers_of_the_originals(tmp_path: Path) -> None:
    model = dl.load(MDLM)
    check_hook_points(model)
    model.save_pretrained(tmp_path)
    original, written = load_file(MDLM / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    buffers = {"backbone.rotary_emb.inv_freq": torch.ones(6), "sampling_eps_min": torch.tensor(1e-3)}
    save_file({**written, **buffers}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = dl.load(tmp_path)
    assert again.config.mask_token_id == 120
    values = json.loads((tmp_path / "config.json").read_text())
    given = json.loads((MDLM / "config.json").read_text())
    assert {name: values.get(name) for name in given} == given | {
        "torch_dtype": None,
    }  # fmt: skip
    assert again.sampler_defaults["predictor"] == "ddpm_cache"
    (family,) = [family for family in dl.families() if family.name == "mdlm"]
    assert family.special_ids[50258] == {"mask": 50257, "bos": 50256, "eos": 50256}


def test_released_checkpoints_take_gpt2s_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of the hub's name is found before the hub; its vocabulary has GPT-2's size."""
    place = tmp_path / "openai-community" / "gpt2"
    place.mkdir(parents=True)
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u0120a"]
    words = [*letters, *(f"word{i}" for i in range(50256 - len(letters))), "<|endoftext|>"]
    (place / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (place / "merges.txt").write_text("#version: 0.2\n\u0120 a\n")
    monkeypatch.chdir(tmp_path)
    tiny("mdlm", vocab_size=50258, hidden_size=8, num_attention_heads=2, eos_token_id=None, mask_token_id=None,
         pad_token_id=None).save_pretrained("checkpoint")  # fmt: skip
    model: Any = dl.load("checkpoint")
    config = model.config
    assert (config.mask_token_id, config.bos_token_id, config.eos_token_id) == (50257, 50256, 50256)
    assert model.tokenizer("b a[MASK]")["input_ids"] == [words.index("b"), words.index("\u0120a"), 50257]
    run = dl.denoise(model, "b a[MASK]", gen_length=2, steps=3)
    assert run.masked[0, 0].tolist() == [False, False, True, True, True]
    assert run.texts[0].startswith("b a")


def test_a_directory_without_a_tokenizer_asks_nobody_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a network is allowed: without one, nine files of GPT-2's were sought for 24 seconds each."""
    asked: list[Any] = []

    def no_network(*place: Any, **_: Any) -> Any:
        asked.append(place)
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    tiny("mdlm", vocab_size=50258).save_pretrained(tmp_path / "checkpoint")
    model: Any = dl.load(tmp_path / "checkpoint")
    assert model.tokenizer is None
    assert asked == []
    assert (
        "openai-community/gpt2 has no tokenizer in the cache, and for a local checkpoint nothing is" in caplog.text
    )


@torch.no_grad()
def test_bfloat16_is_near_float32() -> None:
    """Norms are computed in float32; the rest rounds."""
    golden = load_file(MDLM / "forward.safetensors")
    logits = dl.load(MDLM, dtype="bfloat16")(input_ids=golden["sigma_0.input_ids"]).logits
    difference = (logits.float() - golden["sigma_0.logits"]).abs()
    # Logits of up to 5.8 have an ulp of 2^-5 in bfloat16; rounding in three layers adds up to a few of them.
    assert difference.max() <= 0.25
    assert difference.mean() < 0.03


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a model of type 'mdlm'"):
        dl.bridge(tiny("mdlm"))
    (tmp_path / "config.json").write_text('{"model_type": "mdlm", "hidden_dim": 50, "n_heads": 4}')
    save_file(load_file(MDLM / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="hidden_dim = 50 and n_heads = 4"):
        dl.load(tmp_path)
