"""Which code computes a statistic: kernels, or tiles where the kernels are off or cannot be launched."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_lens.attention import QUERY_STATS, AttentionInputs, kernel_selection, pattern_stats, received_sums
from dlm_lens.attention.kernel_selection import run_kernels

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba: pip install 'dlm-lens[numba]'")


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_selection, "_failed", set())
    monkeypatch.setattr(kernel_selection, "_triton_found", lambda: True)


def on_cuda(width: int = 128, dtype: torch.dtype = torch.float16, index: int = 0) -> Any:
    """What is asked of queries and keys before they are computed with."""
    shape, device = (1, 2, 8, width), torch.device("cuda", index)
    return SimpleNamespace(is_cuda=True, shape=shape, dtype=dtype, device=device, requires_grad=False)


class Kernels:
    """Kernels that cannot be launched, or can; they count how often they are tried."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.tried = error, 0

    def __call__(self) -> str:
        self.tried += 1
        if self.error is not None:
            raise self.error
        return "kernels"


def chosen(kernels: Kernels, q: Any) -> str:
    return run_kernels(kernels, lambda: "tiles", q, q)


def test_kernels_run_where_they_can() -> None:
    kernels = Kernels()
    assert chosen(kernels, on_cuda()) == "kernels"
    assert chosen(kernels, torch.zeros(1, 2, 8, 128)) == "tiles"
    assert chosen(kernels, on_cuda(width=257)) == chosen(kernels, on_cuda(dtype=torch.float64)) == "tiles"
    assert kernels.tried == 1


def test_a_kernel_that_cannot_be_launched_is_tried_once_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    kernels = Kernels(RuntimeError("out of resource: shared memory, Required: 98304, Hardware limit: 65536"))
    assert [chosen(kernels, on_cuda()) for _ in range(5)] == ["tiles"] * 5
    assert kernels.tried == len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert "float16 heads of width 128" in said
    assert "Required: 98304" in said
    assert "DLM_LENS_KERNELS=off" in said
    kernels.error = None
    # Another width, dtype or device is another kernel.
    assert [chosen(kernels, q) for q in (on_cuda(64), on_cuda(dtype=torch.float32), on_cuda(index=1))] == [
        "kernels"
    ] * 3
    assert chosen(kernels, on_cuda()) == "tiles"


def test_a_full_device_is_not_taken_for_a_kernel_that_cannot_run() -> None:
    kernels = Kernels(torch.OutOfMemoryError("CUDA out of memory"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            chosen(kernels, on_cuda())
    assert kernels.tried == 2


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    for setting, result in (("off", "tiles"), (" OFF ", "tiles"), ("on", "kernels")):
        monkeypatch.setenv("DLM_LENS_KERNELS", setting)
        assert chosen(kernels, on_cuda()) == result
    monkeypatch.setenv("DLM_LENS_KERNELS", "perhaps")
    with pytest.raises(ValueError, match='DLM_LENS_KERNELS is \'perhaps\'; it must be "on" or "off"'):
        chosen(kernels, on_cuda())
    # Where no kernel could run the switch is not read.
    assert chosen(kernels, torch.zeros(1, 2, 8, 128)) == "tiles"


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the tiles that numba's code reduces."""
    from dlm_lens.attention import numba_kernels

    calls: list[int] = []
    reduce = numba_kernels.reduce_tile
    monkeypatch.setattr(kernel_selection, "_compiled", lambda: lambda *a: calls.append(1) or reduce(*a))
    return calls


@needs_numba
def test_numba_reduces_long_heads_where_torch_has_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watched(monkeypatch)
    q = torch.randn(1, 2, 128, 16)

    def results(positions: int, threads: int) -> tuple[bool, bool, Tensor]:
        """Whether numba took the sums, and the statistics; the sums."""
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        part = q[:, :, :positions]
        sums = received_sums(part, part, scale=0.25)
        took_sums = bool(calls)
        del calls[:]
        pattern_stats(AttentionInputs(0, part, part, part, 0.25), None, ["entropy"])
        took = took_sums, bool(calls), sums
        del calls[:]
        return took

    assert results(127, 1)[:2] == (False, False)
    assert results(128, 1)[:2] == (True, True)
    assert results(128, 2)[:2] == results(128, 4)[:2] == (False, True)
    assert results(128, 5)[:2] == (False, False)
    monkeypatch.setenv("DLM_LENS_KERNELS", "off")
    assert results(128, 1)[:2] == (False, False)
    monkeypatch.delenv("DLM_LENS_KERNELS")
    torch.testing.assert_close(
        results(128, 1)[2], results(128, 2)[2], rtol=1e-5, atol=1e-6
    )  # another order of sums


@needs_numba
def test_what_reaches_numba_is_what_torch_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of some rows and columns of long heads, grouped keys, a mask per query, a known log-sum-exp."""
    calls = watched(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 600, 24, generator=generator) * 2, torch.randn(2, 2, 603, 24, generator=generator)
    visible = torch.rand(2, 1, 600, 603, generator=generator) > 0.3
    visible[0, :, :, :50] = False
    weights = torch.rand(2, 3, 600, generator=generator)
    scores = (q @ k.repeat_interleave(2, 1).mT) * 0.2
    for seen in (None, visible):
        hidden = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
        for lse in (None, hidden.logsumexp(-1)):
            inputs = AttentionInputs(0, q, k, k, 0.2, seen, own_start=0, lse=lse)
            found = {}
            for setting in ("on", "off"):
                monkeypatch.setenv("DLM_LENS_KERNELS", setting)
                found[setting] = pattern_stats(inputs, weights, QUERY_STATS, canvas=600)
            assert calls
            del calls[:]
            # Sums of 600 in another order; the log-sum-exp given is of other products, rounded otherwise.
            torch.testing.assert_close(found["on"].sums, found["off"].sums, rtol=2e-5, atol=1e-6)
            for name in QUERY_STATS:
                got, expected = (found[setting].per_query[name] for setting in ("on", "off"))
                torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


def test_numba_that_cannot_compile_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_selection, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "dlm_lens.attention.numba_kernels", None)  # its import fails
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    kernel_selection._compiled.cache_clear()
    q = torch.randn(1, 2, 128, 16)
    try:
        found = [received_sums(q, q, scale=0.25) for _ in range(3)]
    finally:
        kernel_selection._compiled.cache_clear()
    assert torch.equal(found[0], found[2])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "calls of torch take its place" in said[0]
    assert "NUMBA_CACHE_DIR" in said[0]
    assert "DLM_LENS_KERNELS=off" in said[0]
