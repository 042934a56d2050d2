"""Parity with the original UDLM's network, its checkpoints' format, and BERT's tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertTokenizer

import dlm_lens as dl
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, compare_dit_with_the_original

UDLM = GOLDEN / "udlm"


@pytest.mark.parametrize(("path", "case"), cases(UDLM))
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    stored = compare_dit_with_the_original(path, case, log_probs=lambda logits, ids, sigma: logits.log_softmax(-1))
    assert float(stored["logits"].std()) > 1


@torch.no_grad()
def test_the_noise_level_is_an_argument_and_0_without_it() -> None:
    model: Any = dl.load(UDLM)
    golden = load_file(UDLM / "forward.safetensors")
    ids = golden["clean.input_ids"]
    torch.testing.assert_close(model(input_ids=ids).logits, golden["clean.logits"], **CLOSE)
    assert (golden["clean.logits"] - golden["noisy.logits"]).abs().amax((1, 2)).min() > 1


def test_the_original_format_is_loaded_and_saved(tmp_path: Path) -> None:
    model: Any = dl.load(UDLM)
    check_hook_points(model)
    model.save_pretrained(tmp_path)
    original, written = load_file(UDLM / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    original.pop("backbone.rotary_emb.inv_freq")  # a buffer, which is computed here
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    again: Any = dl.load(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    given = json.loads((UDLM / "config.json").read_text())
    assert "auto_map" not in values
    for name in ("architectures", "model_type", "model_length", "hidden_dim", "n_blocks", "n_heads", "cond_dim"):
        assert values[name] == given[name], name
    assert (values["vocab_size"], values["cfg"], values["cfg_num_classes"]) == (71, False, -1)
    ids = torch.arange(6)[None]
    assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)
    assert again.config.time_conditioning
    assert again.config.mask_token_id is None
    assert again.sampler_defaults["noise_removal"] == "none"


def test_what_is_not_implemented_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cfg=True, a network that is also given one of 2 classes; only networks"):
        tiny("udlm", cfg=True, cfg_num_classes=2)
    tiny("udlm").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="udlm has no mask token: its positions hold random tokens"):
        dl.load(tmp_path, mask_token_id=3)


def test_released_checkpoints_take_berts_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its [MASK] is a token like the others; a prompt has no special tokens but those that it names."""
    place = tmp_path / "google-bert" / "bert-base-uncased"
    place.mkdir(parents=True)
    words = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"word{i}" for i in range(30522 - len(words))]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(place)
    # The settings that the released tokenizer has.
    (place / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 512}')
    monkeypatch.chdir(tmp_path)
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    tiny("udlm", vocab_size=30522, hidden_size=8, num_attention_heads=2, **none).save_pretrained("checkpoint")
    model: Any = dl.load("checkpoint")
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (101, 102, 0)
    assert model.config.mask_token_id is None
    run = dl.denoise(model, "[CLS] word1 WORD7", gen_length=3, steps=2)
    assert run.tokens[0, :3].tolist() == [101, words.index("word1"), words.index("word7")]
    assert run.tokens.shape == (1, 6)
    assert model.tokenizer.decode([101, 104, 102]) == "[CLS] word0 [SEP]"
