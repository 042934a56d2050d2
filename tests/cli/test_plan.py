"""`dlm-lens plan`."""

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlm_lens.cli.app import app
from dlm_lens.sampling.run_plan import plan_run
from dlm_lens.testing import tiny
from tests.preloaded import python


def test_the_plan_of_a_config(tmp_path: Path) -> None:
    tiny("diffusion_gemma").config.save_pretrained(tmp_path)
    given = [str(tmp_path), "--device", "rtx4090", "--gen-length", "16", "--bits", "4", "--prompt-length", "5"]
    result = CliRunner().invoke(app, ["plan", *given])
    assert result.exit_code == 0, result.output
    plan = plan_run(str(tmp_path), gen_length=16, bits=4, prompt_length=5)
    assert str(plan) in result.output.replace("\n", " ") or str(plan) in result.output
    assert "rtx4090 (24 GB): fits" in result.output


def test_the_plan_of_a_run_with_guidance(tmp_path: Path) -> None:
    tiny("llada").config.save_pretrained(tmp_path)
    given = ["plan", str(tmp_path), "--gen-length", "16", "--set", "cfg_scale=1.5", "--set", "block_length=8"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    plan, plain = (plan_run(str(tmp_path), gen_length=16, block_length=8, cfg_scale=scale) for scale in (1.5, 0.0))
    assert " ".join(str(plan).split()) in " ".join(result.output.split())
    assert plan.flops == 2 * plain.flops


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "tpu"], "tpu"),
        (["--bits", "3"], "3"),
        (["--rows", "0"], "rows"),
        (["--rows", "9" * 20], "rows is 9999"),
    ],
)
def test_options_that_cannot_be(options: list[str], words: str, tmp_path: Path) -> None:
    tiny("llada").config.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(tmp_path), *options])
    assert result.exit_code != 0
    assert words in result.output + str(result.exception)


def test_rows_are_counted_and_not_allocated(tmp_path: Path) -> None:
    tiny("llada").config.save_pretrained(tmp_path)
    one, many = (plan_run(str(tmp_path), rows=rows, gen_length=8, prompt_length=8) for rows in (1, 10**9))
    assert (many.positions, many.flops, many.cache_bytes) == (
        one.positions * 10**9, one.flops * 10**9, one.cache_bytes * 10**9,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"rows is 10000000000; a plan is for at most 2147483647 prompts"):
        plan_run(str(tmp_path), rows=10**10)
    with pytest.raises(ValueError, match=r"prompt_length is 10+, more than 64 times the \d+ positions"):
        plan_run(str(tmp_path), prompt_length=10**15)


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert str(result.exception) == f"{tmp_path} holds no config.json; give the directory that does, or a hub name"


@pytest.mark.long
def test_a_warning_is_a_sentence_without_the_code_that_raised_it() -> None:
    done = subprocess.run([python(), "-m", "dlm_lens.cli", "plan", "toy"], capture_output=True, text=True)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlm-lens: the canvas has 160 positions, but the model was trained on 64 at most;")
