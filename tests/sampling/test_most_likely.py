"""The most likely token of every row, and functions of some rows at a time."""

import pytest
import torch
from torch import Tensor

from dlm_lens.sampling.network import ENTRIES, by_rows, most_likely


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


@pytest.mark.parametrize("rows", [0, 1, 8, 21])
def test_rows_are_those_of_one_call(rows: int) -> None:
    made = torch.Generator().manual_seed(1)
    logits, noise = torch.randn(rows, 50, generator=made), torch.rand(rows, 50, generator=made)
    seen: list[int] = []

    def function(some: Tensor, others: Tensor | None) -> tuple[Tensor, Tensor]:
        seen.append(len(some))
        scores = some if others is None else some + others
        return scores.argmax(-1), scores.softmax(-1).amax(-1)

    for others in (None, noise):
        seen.clear()
        found = by_rows(function, logits, others)
        assert seen == [min(8, rows - first) for first in range(0, max(1, rows), 8)]
        for one, whole in zip(found, function(logits, others), strict=True):
            assert one.equal(whole)


def test_memory_on_a_gpu_does_not_grow_with_the_rows() -> None:
    """1,024 open positions of LLaDA's vocabulary take 1 GiB for each tensor in float64, and there are several."""
    seen: list[int] = []

    def function(some: Tensor) -> tuple[Tensor]:
        seen.append(some.numel())
        return (some.argmax(-1),)

    (found,) = by_rows(function, torch.empty(1024, 126_464, device="meta"))
    assert found.shape == (1024,)
    assert sum(seen) == 1024 * 126_464
    assert max(seen) <= ENTRIES
