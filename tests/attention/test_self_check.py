"""`check_hook_points` where rounding chooses other experts; its other cases are in test_hook_points.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_lens.attention import check_hook_points, hooked_attentions
from dlm_lens.attention.hook_points import HookPoint
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
