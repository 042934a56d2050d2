"""Where and how `dlm-lens demo` loads its model, and its seed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dlm_lens.cli import app as cli
from dlm_lens.cli import demo_run

SHORT = ["--gen-length", "4", "--steps", "2"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that the demo loads, with the arguments of `load`."""
    found: list[Any] = []
    load = demo_run.load

    def noted(name: str, **arguments: Any) -> Any:
        found.append((load(name, **arguments), arguments))
        return found[-1][0]

    monkeypatch.setattr(demo_run, "load", noted)
    return found


def test_the_demo_takes_a_device_a_dtype_arguments_of_load_and_a_seed(loads: list[Any], tmp_path: Path) -> None:
    options = ["--device", "cpu", "--dtype", "float64", "--load", "mask_token_id=4", "--seed", "3", *SHORT]
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), *options], catch_exceptions=False)
    ((model, arguments),) = loads
    assert arguments == {"device_map": "cpu", "dtype": "float64", "mask_token_id": 4}
    assert (model.dtype, model.config.mask_token_id) == (torch.float64, 4)
    assert json.loads((tmp_path / "sinks.json").read_text())["settings"]["seeds"] == [3]
    assert result.exit_code == 0


def test_the_demo_runs_on_a_gpu_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As every other command that loads a model: LLaDA on a CPU takes hours.
    def stop(name: str, **arguments: Any) -> Any:
        raise ValueError(f"{name} on {arguments['device_map']}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(demo_run, "load", stop)
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "out"), *SHORT])
    assert str(result.exception) == "toy on cuda:0"
