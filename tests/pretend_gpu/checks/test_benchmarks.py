"""Benchmarks for a GPU see what a CPU cannot show them."""

from typing import Any

import pytest

from benchmarks.device import kernels
from dlm_lens.attention import kernel_selection, received


@pytest.mark.parametrize("launched", [True, False])
def test_kernels_that_cannot_be_launched_fail_their_benchmark(
    launched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_resources() -> None:
        raise RuntimeError("out of resource: shared memory")

    def refused(run: Any, tiles: Any, *tensors: Any) -> Any:
        return run_kernels(no_resources, tiles, *tensors)

    run_kernels = received.run_kernels
    monkeypatch.setenv("DLM_LENS_KERNELS", "on")
    monkeypatch.setattr(kernel_selection, "_failed", set())
    monkeypatch.setattr(kernels, "cases", lambda small: [kernels.Case(16, 16, "plain")])
    if launched:
        kernels.main("float32", small=True)
        assert "| 16 | 16 | plain | kernels |" in capsys.readouterr().out
        return
    monkeypatch.setattr(received, "run_kernels", refused)
    with pytest.raises(SystemExit):
        kernels.main("float32", small=True)
    said = capsys.readouterr().out
    assert "| 16 | 16 | plain | tiles |" in said
    assert "could not be launched" in said
