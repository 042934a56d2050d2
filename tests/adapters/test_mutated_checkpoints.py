"""Random mutations of checkpoints: a model, or one sentence, in bounded memory and time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def outcomes(place: Path, family: str, seed: int, count: int) -> dict[str, int]:
    out = subprocess.run(
        [sys.executable, Path(__file__).parent / "mutated_loads.py", place, family, str(seed), str(count)],
        capture_output=True, text=True, timeout=550, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = [json.loads(line) for line in out.stdout.splitlines()]
    wrong = [line["wrong"] for line in lines if "wrong" in line]
    assert not wrong, "\n".join(wrong)
    assert out.returncode == 0, f"{lines[-1:]} {out.stderr[-2000:]}"
    counted: dict[str, int] = lines[-1]["counted"]
    return counted


@pytest.mark.long
def test_some_mutations_of_a_checkpoint_load_or_are_refused(tmp_path: Path) -> None:
    counted = outcomes(tmp_path, "sink_qwen", 0, 40)
    assert counted["refusal"] >= 10
    assert counted["the same model"] >= 5


MUTATED = ("llada", "mmada", "dream", "smdm", "sink_qwen", "sink_llama", "diffugpt", "sedd", "wedlm")
MUTATED += ("nemotron_labs_diffusion", "efficient_dlm", "stable_diffcoder", "sdlm", "causal", "gidd_dit")


@pytest.mark.long
@pytest.mark.parametrize("family", MUTATED)
def test_many_mutations_of_every_family_load_or_are_refused(family: str, tmp_path: Path) -> None:
    counted = outcomes(tmp_path, family, 1000, 120)
    assert counted["refusal"] >= 30
    assert counted["the same model"] >= 15
