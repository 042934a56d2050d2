"""Attention in half precision runs in fused kernels, of those that CUDA has."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.testing import tiny
from tests.pretend_gpu.plugin import GPU
from tests.pretend_gpu.scenes import ALONE, PROMPTS


@pytest.fixture(autouse=True)
def formed() -> Iterator[list[str]]:
    GPU.patterns_formed.clear()
    yield GPU.patterns_formed
    GPU.patterns_formed.clear()


def half(family: str, **settings: Any) -> Any:
    return tiny(family, **settings).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("prompts", [PROMPTS, ALONE], ids=["padded", "alone"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("dream", {}),
        ("llada", {}),
        ("causal", {}),
        ("sink_llama", {"num_sinks": 1}),
        ("sink_llama", {"softmax": "sink_logits"}),
        ("sink_qwen", {"softmax": "off_by_one"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_hidden_columns_and_statistics_form_no_pattern(
    family: str, settings: dict[str, Any], prompts: list[list[int]], formed: list[str]
) -> None:
    model = half(family, **settings)
    run = dl.denoise(model, prompts, gen_length=4, hooks=[mask_top_sinks(1)])
    recording = dl.record(model, prompts, gen_length=4)
    assert run.tokens.shape == recording.run.tokens.shape
    assert not formed


def test_what_no_kernel_takes_is_noted(formed: list[str]) -> None:
    q, k = (torch.zeros(1, heads, 5, 12, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
    mask = torch.ones(1, 1, 1, 5, dtype=torch.bool, device="cuda")
    attention = torch.nn.functional.scaled_dot_product_attention
    attention(q, k, k, enable_gqa=True)
    assert not formed
    attention(q, k, k, attn_mask=mask, enable_gqa=True)
    attention(q, q, q, attn_mask=mask)
    assert [reason.split()[0] for reason in formed] == ["2", "heads"]
