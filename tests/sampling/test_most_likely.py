"""The most likely token of every row, which is argmax's: the first of several."""

import pytest
import torch

from dlm_lens.sampling.network import most_likely


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_it_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    tied = torch.randint(0, 3, (64, 5_000), generator=made).to(dtype)
    first = [row.index(max(row)) for row in tied.tolist()]
    assert most_likely(tied).tolist() == first
    tied[:, ::7] = -torch.inf
    assert most_likely(tied).tolist() == [row.index(max(row)) for row in tied.tolist()]
    other = torch.randn(64, 5_000, generator=made).to(dtype).requires_grad_()
    found = most_likely(other)
    assert found.equal(other.argmax(-1))
    assert not found.requires_grad
    assert most_likely(torch.empty(0, 5)).tolist() == []
