"""Which code computes a statistic: kernels, or tiles where the kernels are off or cannot be launched."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_lens.attention import received
from dlm_lens.attention.received import run_kernels


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received, "_failed", set())
    monkeypatch.setattr(received, "_triton_found", lambda: True)


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
