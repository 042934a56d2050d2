"""Models of every family and variant, with weights in which every part shows."""

from typing import Any

import torch
from torch import Tensor

from dlm_lens.testing import tiny

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 3,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
"""Ministral 3's rotation, which scales queries from position 3 on."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {}),
    "mmada": ("mmada", {}),
    "dream": ("dream", {}),
    "smdm": ("smdm", {}),
    "smdm-sink": ("smdm", {"num_sinks": 1}),
    "qwen": ("sink_qwen", {}),
    "uniform": ("uniform_qwen", {}),
    "sumi": ("sumi", {}),
    "sink": ("sink_qwen", {"num_sinks": 1}),
    "sinks-end": ("sink_qwen", {"num_sinks": 2, "sink_placement": "end"}),
    "zero-sinks": ("sink_qwen", {"num_sinks": 2, "zero_sink_value": True}),
    "gated": ("sink_qwen", {"gated_attention": True}),
    "gated-sink": ("sink_qwen", {"gated_attention": True, "num_sinks": 1}),
    "gated-sink-llama": ("sink_llama", {"num_sinks": 1, "gated_attention": True}),
    "off-by-one": ("sink_qwen", {"softmax": "off_by_one"}),
    "spare-logits": ("sink_llama", {"softmax": "sink_logits"}),
    "llama": ("causal", {}),
    "a2d": ("a2d_qwen3", {"head_dim": 10}),
    "a2d, qwen2": ("a2d_qwen3", {"model_type": "a2d-qwen2"}),
    "a2d, llama": ("a2d_qwen3", {"model_type": "a2d-llama"}),
    "open-dcoder": ("open_dcoder", {}),
    "coda": ("coda", {"head_dim": 10}),
    "sdar": ("sdar", {"head_dim": 10}),
    "fast-dllm v2": ("fast_dllm_v2", {}),
    "wedlm": ("wedlm", {"head_dim": 10}),
    "wedlm, qwen2": ("wedlm", {"qk_norm": False, "attention_bias": True}),
    "efficient-dlm": ("efficient_dlm", {"head_dim": 10}),
    "stable-diffcoder": ("stable_diffcoder", {}),
    "sdlm": ("sdlm", {}),
    "i-dlm": ("i_dlm", {"head_dim": 10}),
    "dreamon": ("dreamon", {}),
    "nemotron": ("nemotron_labs_diffusion", {"head_dim": 8, "rope_parameters": YARN}),
    "nemotron, ar": (
        "causal",
        {"model_type": "nemotron_labs_diffusion_ar", "head_dim": 8, "rope_parameters": YARN},
    ),
    "diffugpt": ("diffugpt", {}),
    "diffullama": ("diffugpt", {"model_type": "diffullama"}),
    "qwen2": ("causal", {"model_type": "qwen2"}),
    "qwen3": ("causal", {"model_type": "qwen3", "head_dim": 10}),
}


CAUSAL = ("llama", "qwen2", "qwen3", "nemotron, ar", "wedlm", "wedlm, qwen2", "sdlm", "i-dlm")
"""Of these no query sees a later key; WeDLM's do where there are masks, which `some_ids` has not."""


def model_of(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model whose norms and biases are not the ones and zeros that they start as."""
    family, config = CASES[case]
    model = tiny(family, **config)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "sink_logits")):
            parameter.data.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model.to(dtype)


def some_ids(rows: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, 60, (rows, length), generator=torch.Generator().manual_seed(1))


def padded(ids: Tensor, by: int = 3) -> tuple[Tensor, Tensor]:
    """A mask that hides the first positions of row 0, and rotary positions that count from the content."""
    mask = torch.ones_like(ids)
    mask[0, :by] = 0
    return mask, (mask.cumsum(-1) - 1).clamp(min=0)
