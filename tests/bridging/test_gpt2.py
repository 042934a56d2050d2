"""GPT-2, the AR model of DiffuGPT, on the bridge: its logits, patterns, folded weights and runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dlm_lens as dl
from dlm_lens.recording import AttentionPattern
from tests.bridging.cases import some_ids

OPTIONS: dict[str, dict[str, Any]] = {
    "released": {},
    "scaled by the layer": {"scale_attn_by_inverse_layer_idx": True},
    "not scaled": {"scale_attn_weights": False},
    "another activation": {"activation_function": "relu", "n_inner": 24},
}


def gpt2(directory: Path, **options: Any) -> Any:
    """A small GPT-2, saved and loaded; biases and norms are not the zeros and ones that they start as."""
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    torch.manual_seed(0)
    made = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, **options))
    for name, parameter in made.named_parameters():
        if "ln_" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    made.save_pretrained(directory)
    return dl.load(directory, attn_implementation="hooked")


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIONS)
def test_numbers_are_those_of_the_native_model(name: str, tmp_path: Path) -> None:
    model, ids, patterns = gpt2(tmp_path, **OPTIONS[name]), some_ids(), {}
    for index, layer in enumerate(model.transformer.h):
        point = layer.attn.hook_pattern
        point.register_forward_hook(lambda _m, _a, out, index=index: patterns.__setitem__(index, out.clone()))
    native = model(input_ids=ids).logits
    tl = dl.bridge(model)
    logits, cache = tl.run_with_cache(ids)
    assert logits.equal(native)
    for index in range(3):
        assert cache[f"blocks.{index}.attn.hook_pattern"].equal(patterns[index])
    assert cache["blocks.0.attn.hook_pattern"].triu(1).sum() == 0  # causal
    # Folding moves products; logits of up to 8 in float32.
    tl.enable_compatibility_mode()
    torch.testing.assert_close(tl(ids).log_softmax(-1), native.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_runs_and_recordings_are_those_of_the_native_model(tmp_path: Path) -> None:
    model, prompts = gpt2(tmp_path), [[5, 6, 7], [3]]
    run = dl.denoise(model, prompts, gen_length=5)
    pattern = dl.record(model, prompts, [AttentionPattern()], gen_length=5).pattern[2, 0, 1]
    tl = dl.bridge(model)
    assert tl.denoise(prompts, gen_length=5).canvases.equal(run.canvases)
    _, cache = tl.denoise_with_cache(prompts[:1], gen_length=5, cache_steps=2)
    # Step 2 of row 0 sees its prompt and two written tokens, without the padding of the batch.
    bridged = cache["blocks.1.attn.hook_pattern"][0, 0]
    seen = bridged.shape[-1]
    assert seen == 5
    torch.testing.assert_close(bridged, pattern[:, :seen, :seen], atol=1e-6, rtol=1e-5)
