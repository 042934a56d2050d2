"""TransformerLens's own front door, in a fresh process."""

import subprocess
from pathlib import Path

import pytest
import torch
from transformer_lens.factories import architecture_adapter_factory as factory
from transformer_lens.model_bridge import TransformerBridge

import dlm_lens as dl
from dlm_lens.bridging.architectures import ARCHITECTURES, register_architectures, register_embedded_models
from tests.bridging.cases import CASES, model_of, some_ids
from tests.preloaded import hosts_python


def python(code: str) -> str:
    """What a process prints that has imported the libraries, and not this package."""
    errors = "import warnings\nwarnings.simplefilter('error', UserWarning)\n"
    command = [hosts_python(), "-c", errors + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_boot_by_name_and_by_directory_in_a_fresh_process(tmp_path: Path) -> None:
    model = model_of("gated-sink")
    model.save_pretrained(tmp_path / "mine")
    model.tokenizer.save_pretrained(tmp_path / "mine")
    code = f"""
import dlm_lens.bridging
from transformer_lens.model_bridge import TransformerBridge
import torch
tl = TransformerBridge.boot_transformers("toy-sink", device="cpu")
print(type(tl).__name__, type(tl.adapter).__name__, tl.cfg.attention_dir, tl.sinks.count)
with torch.no_grad():
    print(tl.denoise("sort 4 2 9 1 :").texts[0])
mine = TransformerBridge.boot_transformers({str(tmp_path / "mine")!r}, device="cpu")
with torch.no_grad():
    torch.save(mine(torch.arange(9)[None]), {str(tmp_path / "logits.pt")!r})
"""
    kind, text = python(code).splitlines()[-2:]
    assert kind == "DiffusionBridge Qwen2Family bidirectional 1"
    assert text == "sort 4 2 9 1 : answer 1 2 4 9 ."
    model.set_attn_implementation("hooked")
    with torch.no_grad():
        want = model(input_ids=torch.arange(9)[None]).logits
    # Another process, another number of threads: sums in another order.
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt", weights_only=True), want, atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_the_entry_points_are_found_without_importing_us() -> None:
    code = """
import warnings
warnings.simplefilter("error")
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory as Factory
Factory.discover_entry_points()
print(sorted(name for name in Factory._adapters if name.startswith("DlmLens")))
"""
    assert python(code).splitlines()[-1] == "['DlmLensGPT2', 'DlmLensLlama', 'DlmLensQwen2', 'DlmLensQwen3']"


@pytest.mark.parametrize("case", ["llada", "mmada", "dream", "smdm-sink", "zero-sinks"])
@torch.no_grad()
def test_every_family_boots_from_its_directory(case: str, tmp_path: Path) -> None:
    model, ids = model_of(case), some_ids()
    model.save_pretrained(tmp_path)
    tl = TransformerBridge.boot_transformers(str(tmp_path), tokenizer=model.tokenizer, device="cpu")
    assert torch.equal(tl(ids), dl.bridge(model)(ids))
    assert tl.original_model.sampler_defaults == model.sampler_defaults


def test_a_directory_with_pickled_weights_is_not_booted(tmp_path: Path) -> None:
    model = model_of("llada")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        TransformerBridge.boot_transformers(str(tmp_path), tokenizer=model.tokenizer, device="cpu")


def test_configs_name_their_adapter_and_registering_again_changes_nothing() -> None:
    for case in CASES:
        config = model_of(case).config
        if case not in ("llama", "qwen2", "qwen3"):
            assert config.original_architecture in ARCHITECTURES
            assert "original_architecture" not in config.to_dict()
    before = TransformerBridge.boot_transformers
    register_architectures()
    register_embedded_models()
    assert TransformerBridge.boot_transformers is before
    assert factory.SUPPORTED_ARCHITECTURES["DlmLensLlama"] is ARCHITECTURES["DlmLensLlama"]
    assert factory.SUPPORTED_ARCHITECTURES["LlamaForCausalLM"] is not ARCHITECTURES["DlmLensLlama"]
