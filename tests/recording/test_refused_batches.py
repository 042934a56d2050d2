"""A prompt or a hook that cannot run is refused before the first batch is recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli import app as cli
from dlm_lens.hooks import mask_positions
from dlm_lens.testing import tiny


@pytest.mark.parametrize("family", ["llada", "sdar", "causal", "diffusion_gemma"])
def test_no_batch_begins(family: str, tmp_path: Path) -> None:
    model, seen = tiny(family), list[int]()
    model.get_decoder().register_forward_pre_hook(lambda *_: seen.append(1))
    given: dict[str, Any] = {"batch_size": 1, "to": tmp_path / "run"}
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [5, 6]]
    with pytest.raises(ValueError, match=r"^position 13 is not there; .* has 10 canvas positions \(prompt 1\)$"):
        dl.record(model, prompts, hooks=[mask_positions(13)], gen_length=8, **given)
    longest = 64 * model.config.get_text_config().max_position_embeddings
    with pytest.raises(ValueError, match=rf"^the canvas has {longest + 9} positions, .* \(prompt 1\)$"):
        dl.record(model, [[5, 6], [5] * (longest + 1)], gen_length=8, **given)
    assert seen == []
    assert not (tmp_path / "run").exists()


def test_the_command_names_the_prompt(tmp_path: Path) -> None:
    texts = ["leo has 26 stones . leo breaks 6 .", "leo has 2 ."]
    (tmp_path / "p.jsonl").write_text("\n\n".join(json.dumps({"prompt": text}) for text in texts))
    given = ["record", "toy", "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "run")]
    given += ["--gen-length", "4", "--batch-size", "1", "--hooks", "mask_positions(10)"]
    error = CliRunner().invoke(cli.app, given).exception
    assert str(error).startswith("position 10 is not there")
    assert str(error).endswith(f"({tmp_path / 'p.jsonl'} line 3)")
    assert not (tmp_path / "run").exists()
