"""The selection of the median of massive activations, against a full sort."""

import numpy as np
import pytest
import torch

from dlm_lens.recording.reducers import norms

LENGTH = 40_000
"""More than `LEAST_NARROWED` numbers, which are narrowed down by a sample."""


def numbers(kind: str) -> np.ndarray:
    draw = np.random.default_rng(0)
    values = draw.standard_normal(LENGTH).astype(np.float32)
    if kind == "channels":  # one channel of 768 a thousand times larger, as in a stream with massive activations
        values[::768] *= 1000
    elif kind == "equal":
        values[:] = 1.5
    elif kind == "two values":
        values = np.sign(values)
    elif kind == "rising":
        values.sort()
    elif kind == "infinite":
        values[: LENGTH // 3], values[LENGTH // 3 : LENGTH // 2] = np.inf, -np.inf
    elif kind == "a sample far below":
        values[:: norms.SAMPLE] -= 1000
    elif kind == "a sample far above":
        values[:: norms.SAMPLE] += 1000
    return values


KINDS = (
    "normal",
    "channels",
    "equal",
    "two values",
    "rising",
    "infinite",
    "a sample far below",
    "a sample far above",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 1, 700, (LENGTH - 1) // 2, LENGTH - 2, LENGTH - 1])
def test_the_selected_value_is_that_of_a_sort(kind: str, k: int) -> None:
    values = numbers(kind)
    wanted = np.sort(values)[k]
    assert norms._selected(values.copy(), k) == wanted


def test_only_what_lies_between_two_values_of_the_sample_is_partitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    nonzero = np.flatnonzero

    def counting(mask: np.ndarray) -> np.ndarray:
        found = nonzero(mask)
        taken.append(found.size)
        return found

    monkeypatch.setattr(np, "flatnonzero", counting)
    values = numbers("normal")
    median = np.sort(values)[(LENGTH - 1) // 2]
    assert norms._selected(values, (LENGTH - 1) // 2) == median
    assert 0 < taken[0] < LENGTH // 4


@pytest.mark.parametrize("size", [1, 2, 97, norms.LEAST_NARROWED, LENGTH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_median_of_magnitudes_is_torchs(size: int, dtype: torch.dtype) -> None:
    stream = torch.randn(1, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    assert torch.equal(norms._median(stream), stream.float().abs().flatten().median())


@pytest.mark.parametrize("size", [5, LENGTH])
def test_a_median_with_nan_is_nan_and_of_nothing_too(size: int) -> None:
    stream = torch.randn(1, size)
    stream[0, size // 2] = torch.nan
    assert bool(norms._median(stream).isnan())
    assert bool(norms._median(stream[:, :0]).isnan())
