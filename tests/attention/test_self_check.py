"""`check_hook_points`: rounding that chooses other experts, other inputs than ids, damaged weights.

Its other cases are in test_hook_points.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel

import dlm_lens as dl
from dlm_lens.attention import (
    attach_hooks,
    attention_blocks,
    attention_stacks,
    check_hook_points,
    find_sites,
    hooked_attentions,
)
from dlm_lens.attention.hook_points import HookPoint
from dlm_lens.attention.layers import SITES_OF_LAYERS
from dlm_lens.hooks import steer
from dlm_lens.testing import tiny


def mixture(seed: int) -> Any:
    """A mixture of experts with weights that are large enough for close choices to matter."""
    model = tiny("rnd1")
    draws = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.3, generator=draws)
    return model


def test_rounding_that_chooses_other_experts_is_no_difference_of_attention() -> None:
    """Between the fused kernel and a formed pattern; logits of some of these differ by more than a tenth."""
    for seed in range(10):
        check_hook_points(mixture(seed).bfloat16())


class Reversed(HookPoint):
    """A pattern that is not that of the fused kernel."""

    def forward(self, value: Tensor) -> Tensor:
        return value.flip(-1)


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_pattern_is_refused_in_a_mixture_too(dtype: torch.dtype, layer: int) -> None:
    model = mixture(0).to(dtype)
    hooked_attentions(model)[layer].hook_pattern = Reversed()
    with pytest.raises(ValueError, match=r"logits of RND1Model differ by .* with materialised patterns"):
        check_hook_points(model)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PICTURES = {**SIZES, "image_size": 16, "patch_size": 4}


@pytest.mark.parametrize("kind", ["vit", "clip_vision_model", "siglip_vision_model"])
def test_a_network_of_pictures_is_checked_with_pictures(kind: str) -> None:
    torch.manual_seed(0)
    model = dl.add_hook_points(AutoModel.from_config(AutoConfig.for_model(kind, **PICTURES)).eval())
    assert check_hook_points(model).shape[0] == 2
    assert all(block.hook_sites == {"attn_out", "mlp_out", "resid"} for block in attention_blocks(model))
    hooked_attentions(model)[1].hook_pattern = Reversed()
    with pytest.raises(ValueError, match="with materialised patterns"):
        check_hook_points(model)


AUDIO = {"conv_dim": (32,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1,
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}  # fmt: skip
WHISPER = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0,
           "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes", "takes"),
    [
        ("wav2vec2", {**SIZES, **AUDIO}, "input_values"),
        ("whisper", WHISPER, "input_features"),
        ("clip", {"text_config": {**SIZES, "vocab_size": 64}, "vision_config": PICTURES}, "more than ids"),
    ],
)
def test_a_model_of_other_inputs_is_refused_in_a_sentence(kind: str, sizes: dict[str, Any], takes: str) -> None:
    model = dl.add_hook_points(AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).eval())
    with pytest.raises(ValueError, match=f"or pictures of one size, through a model, and .*Model takes {takes}: "):
        check_hook_points(model)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_is_named(value: float, tmp_path: Any) -> None:
    model: Any = tiny("causal")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] = value
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^model.norm.weight of LlamaForCausalLM holds NaN or infinity: "):
        dl.load(tmp_path)


def test_weights_of_zeros_alone_are_named(tmp_path: Any) -> None:
    model: Any = tiny("causal")
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds zeros alone, and so do \d+ other weights: .* fetch it again"):
        dl.load(tmp_path)


@pytest.mark.parametrize("family", [family.name for family in dl.families()])
def test_the_layers_of_every_family_have_the_sites_that_are_declared_unchecked(family: str) -> None:
    model = tiny(family)
    find_sites(model)
    layers = [layer for stack in attention_stacks(model) for layer in attention_blocks(model, stack)]
    assert all(layer.hook_sites == frozenset(SITES_OF_LAYERS) for layer in layers)


def test_an_unchecked_diffusion_model_has_its_sites_and_an_ar_model_is_to_be_checked(
    tmp_path: Path,
) -> None:
    tiny("llada").save_pretrained(tmp_path / "llada")
    tiny("causal").save_pretrained(tmp_path / "causal")
    hook, ids = steer(torch.ones(32)), torch.arange(3, 9)[None]
    model = dl.load(tmp_path / "llada", check=False)
    plain = model(ids).logits
    with attach_hooks(model, hook, layers=[0]):
        assert not torch.allclose(model(ids).logits, plain, atol=1e-2)
    model = dl.load(tmp_path / "causal", check=False)
    with pytest.raises(ValueError, match=r"call dlm_lens\.attention\.check_hook_points\(model\) first"):
        attach_hooks(model, hook, layers=[0]).__enter__()
    check_hook_points(model)
    with attach_hooks(model, hook, layers=[0]):
        model(ids)
