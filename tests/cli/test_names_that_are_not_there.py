"""Embedded names where a checkpoint is wanted, and rows and tokens that are not there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli import app as cli
from dlm_lens.hooks import mask_positions
from dlm_lens.sampling.run_plan import plan_run
from dlm_lens.testing import tiny
from dlm_lens.viz.exploring.exploration import _single_token
from dlm_lens.viz.sink_tracks import row_blocks


def test_plan_takes_an_embedded_name_and_prints_it() -> None:
    assert str(plan_run("toy", prompt_length=8)).startswith("toy: ")


def test_a_row_that_is_not_there_is_named() -> None:
    run = dl.denoise(tiny("llada"), [[1, 2, 3]], steps=2, gen_length=4, hooks=[mask_positions(0)])
    assert len(row_blocks(run, 0)) == 2
    with pytest.raises(ValueError, match="row 9 of 1"):
        row_blocks(run, 9)


def test_an_unknown_token_is_not_planted_as_another() -> None:
    tokenizer: Any = dl.load("toy").tokenizer
    assert _single_token(tokenizer, "leo") == tokenizer("leo")["input_ids"][-1]
    assert _single_token(tokenizer, tokenizer.unk_token) == tokenizer.unk_token_id
    with pytest.raises(ValueError, match="'zzz' is not in the model's vocabulary"):
        _single_token(tokenizer, "zzz")


@pytest.mark.skipif(torch.cuda.device_count() > 9, reason="has a tenth CUDA device")
def test_a_device_that_the_machine_lacks(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "tom has 5 apples ."}\n')
    given = ["record", "toy", "--prompts", str(prompts), "--out", str(tmp_path / "out"), "--device", "cuda:9"]
    refused = CliRunner().invoke(cli.app, given)
    count = torch.cuda.device_count()
    wanted = f"--device is cuda:9, and this machine has {count} CUDA devices; leave --device out for "
    assert str(refused.exception).startswith(wanted)
    assert not (tmp_path / "out").exists()


COMMANDS_WITH_A_MODEL = (
    ("record", ["toy", "--prompts", "{prompts}"], "dlm_lens.adapters.load"),
    ("eval", ["toy", "--tasks", "toy_problems"], "dlm_lens.evaluation.evaluate"),
    ("experiment", ["fig7-paths"], "dlm_lens.experiments.run_experiment"),
)


@pytest.mark.parametrize(("command", "arguments", "called"), COMMANDS_WITH_A_MODEL)
def test_under_torchrun_every_process_has_its_own_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str], called: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "tom has 5 apples ."}\n')
    command_line = [command, *(one.format(prompts=prompts) for one in arguments), "--out", str(tmp_path / "out")]
    given: dict[str, Any] = {}

    def stop(*_: Any, **settings: Any) -> None:
        given.update(settings.get("loading", settings))
        raise ValueError("stopped")

    monkeypatch.setattr(called, stop)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    for option, wanted in ((), "cuda:2"), (("--device", "cuda:3"), "cuda:3"), (("--device", "cpu"), "cpu"):
        given.clear()
        assert str(CliRunner().invoke(cli.app, [*command_line, *option]).exception) == "stopped"
        assert given["device" if command == "eval" else "device_map"] == wanted
    given.clear()
    CliRunner().invoke(cli.app, [*command_line, "--load", "mask_token_id=7", "--load", "sampler=p2"])
    assert (given["mask_token_id"], given["sampler"]) == (7, "p2")
    refused = CliRunner().invoke(cli.app, [*command_line, "--device", "cuda:4"]).exception
    assert str(refused) == "--device is cuda:4, and this machine has 4 CUDA devices; leave --device out for a GPU"
