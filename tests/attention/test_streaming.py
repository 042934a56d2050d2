"""What is given to torch's fused attention, on devices whose kernels take less than a CPU's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_lens.attention import AttentionInputs
from dlm_lens.attention.softmax_variants import with_spare_key
from dlm_lens.attention.streaming import stream_mix

VISIBLE = torch.ones(2, 1, 1, 40, dtype=torch.bool)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The heads, widths and options of every call of the fused attention."""
    calls: list[dict[str, Any]] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append({"heads": k.shape[1], "widths": {x.shape[-1] for x in (q, k, v)}, **options})
        return fused(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return calls


@pytest.mark.parametrize(
    ("device", "dtype", "visible", "width", "grouped"),
    [
        ("cpu", torch.float32, VISIBLE, 16, True),
        ("meta", torch.bfloat16, None, 16, True),
        ("meta", torch.bfloat16, VISIBLE, 16, False),
        ("meta", torch.float32, None, 16, False),
        ("meta", torch.bfloat16, None, 512, False),
    ],
)
def test_grouped_keys_are_repeated_where_no_kernel_takes_them(
    device: str,
    dtype: torch.dtype,
    visible: Tensor | None,
    width: int,
    grouped: bool,
    given: list[dict[str, Any]],
) -> None:
    """With `enable_gqa` and a mask torch has no kernel on CUDA but the one that forms [head, query, key]."""
    q, k = (torch.zeros(2, heads, 40, width, dtype=dtype, device=device) for heads in (4, 2))
    visible = visible if visible is None else visible.to(device)
    z = stream_mix(AttentionInputs(0, q, k, k, 0.25, visible))
    assert z.shape == (2, 40, 4, width)
    assert (given[0]["enable_gqa"], given[0]["heads"]) == (grouped, 2 if grouped else 4)


def test_repeated_keys_mix_as_grouped_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 16, generator=generator) for heads in (4, 2, 2))
    visible = torch.rand(1, 1, 9, 9, generator=generator) > 0.3
    one = AttentionInputs(0, q, k, v, 0.25, visible)
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT * 0.25).masked_fill(~visible, -torch.inf)
    expected = (scores.softmax(-1).nan_to_num() @ v.double().repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(stream_mix(one).double(), expected, rtol=1e-5, atol=1e-6)  # float32


@pytest.mark.parametrize("masked", [False, True])
def test_a_spare_key_leaves_widths_that_cudas_kernels_take(masked: bool, given: list[dict[str, Any]]) -> None:
    """In half precision a width must be a multiple of 8; the values are those of the formula."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 64, generator=generator) for _ in range(3))
    b, visible = torch.tensor([0.7, -2.0]), torch.ones(1, 1, 1, 9, dtype=torch.bool) if masked else None
    wide = with_spare_key(q, k, v, visible, b, 0.125)
    z = torch.nn.functional.scaled_dot_product_attention(*wide[:3], attn_mask=wide[3], scale=0.125)
    assert all(width % 8 == 0 for width in given[0]["widths"])
    scores = torch.cat([q @ k.mT * 0.125, b.view(1, 2, 1, 1).expand(1, 2, 9, 1)], -1).double()
    expected = scores.softmax(-1)[..., :-1] @ v.double()
    torch.testing.assert_close(z[..., :64].double(), expected, rtol=1e-5, atol=1e-6)  # float32
