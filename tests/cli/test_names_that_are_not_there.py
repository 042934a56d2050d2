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
