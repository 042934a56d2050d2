"""Thresholds in bfloat16 and float16: the authors' code compares a tensor with a number, which torch rounds."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.testing import tiny

PROMPT, TOKENS = [[5, 9, 12, 7]], (3, 4)
ABOVE, LEAST = 0.85, 0.9
"""Rounding to either dtype raises the first and lowers the second."""


CONFIG: dict[str, dict[str, Any]] = {"sdar": {"block_size": 4}, "fast_dllm_v2": {"bd_size": 8}}


class Equal:
    """`on_logits` that gives the first of two tokens one probability, as the softmax of a dtype has it."""

    def __init__(self, probability: float, dtype: torch.dtype) -> None:
        steps = torch.arange(0, 4, 2**-9, dtype=torch.float64).to(dtype)
        likely = torch.stack([steps, torch.zeros_like(steps)], -1).softmax(-1)[:, 0]
        self.values = steps[(likely == probability).nonzero()[0]].item(), 0.0

    def __call__(self, _step: int, _canvas: Tensor, logits: Tensor) -> Tensor:
        logits = torch.full_like(logits, -torch.inf)
        logits[..., list(TOKENS)] = torch.tensor(self.values, dtype=logits.dtype)
        return logits


def counts(family: str, threshold: float, dtype: torch.dtype, given: dict[str, Any], quirks: bool) -> list[int]:
    """How many positions each step unmasks, of 4 masks whose confidences equal the rounded threshold."""
    rounded = torch.tensor(threshold, dtype=dtype).item()
    run = dl.denoise(
        tiny(family, **CONFIG.get(family, {})).to(dtype), PROMPT, threshold=threshold, temperature=0.0,
        on_logits=Equal(rounded, dtype), reference_quirks=quirks, **{"gen_length": 4} | given,
    )  # fmt: skip
    assert run.confidence.dtype == torch.float32
    assert run.confidence[run.unmasked].eq(rounded).all()
    return run.counts[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("nemotron_labs_diffusion", {"block_length": 4, "stop_tokens": ()}),
        ("efficient_dlm", {"block_length": 4, "stop_tokens": ()}),
        ("dream", {"steps": 4}),
    ],
)
def test_at_least_the_rounded_threshold(family: str, given: dict[str, Any], dtype: torch.dtype) -> None:
    """0.9 is 0.8984375 in bfloat16; the first token of a block of Nemotron has a step of its own."""
    alone = [1] if family == "nemotron_labs_diffusion" else []
    assert counts(family, LEAST, dtype, given, True) == [*alone, 4 - len(alone)]
    assert counts(family, LEAST, dtype, given, False) == [1] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("sdar", {"steps_per_block": 4, "stop_tokens": ()}),
        ("fast_dllm_v2", {"gen_length": 8, "sub_block_length": 8}),
    ],
)
def test_above_the_rounded_threshold(family: str, given: dict[str, Any], dtype: torch.dtype) -> None:
    """0.85 is 0.8515625 in bfloat16; in Fast-dLLM v2 the first token of a block has a step of its own."""
    found = counts(family, ABOVE, dtype, given, True)
    assert found == [1] * len(found)
    assert max(counts(family, ABOVE, dtype, given, False)) >= 3


@pytest.mark.parametrize("quirks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llada2", {"block_length": 4, "steps_per_block": 4}),
        ("sdlm", {"window_length": 4, "stop_tokens": ()}),
    ],
)
def test_code_that_casts_the_logits_to_float32_does_not_round(
    family: str, given: dict[str, Any], dtype: torch.dtype, quirks: bool
) -> None:
    """LLaDA2's and SDLM's authors: the softmax is one of float32 numbers, and so is the comparison."""
    equal = Equal(torch.tensor(ABOVE, dtype=dtype).item(), dtype)
    run = dl.denoise(
        tiny(family).to(dtype), PROMPT, threshold=ABOVE, temperature=0.0, on_logits=equal, reference_quirks=quirks,
        gen_length=4, **given,
    )  # fmt: skip
    likely = 1 / (1 + math.exp(-equal.values[0]))
    assert abs(likely - torch.tensor(likely, dtype=dtype).item()) > 1e-5  # not a number of the dtype
    found = run.confidence[run.unmasked].double() - likely
    assert found.abs().max() < 1e-6  # float32 has 24 bits
    assert run.counts[0, 0] == (4 if likely > ABOVE else 1)
