"""Random mutations of checkpoints: a model, or one sentence, in bounded memory and time."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def outcomes(place: Path, families: Sequence[str], seed: int, count: int) -> dict[str, list[dict[str, Any]]]:
    """The lines that `mutated_loads.py` writes, by family."""
    command = [sys.executable, Path(__file__).parent / "mutated_loads.py", place, str(seed), str(count), *families]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False, env=environment)
    assert out.returncode == 0, out.stderr[-2000:]
    lines = [json.loads(line) for line in out.stdout.splitlines()]
    return {family: [line for line in lines if line["family"] == family] for family in families}


def check(lines: list[dict[str, Any]], refusals: int, unchanged: int) -> None:
    wrong = [line["wrong"] for line in lines if "wrong" in line]
    assert not wrong, "\n".join([*wrong, *map(str, lines[-2:])])  # where its process ended, if it did
    assert lines[-1]["counted"]["refusal"] >= refusals
    assert lines[-1]["counted"]["the same model"] >= unchanged


MUTATED = ("llada", "mmada", "dream", "smdm", "sink_qwen", "sink_llama", "diffugpt", "sedd", "wedlm")
MUTATED += ("nemotron_labs_diffusion", "efficient_dlm", "stable_diffcoder", "sdlm", "i_dlm", "causal", "gidd_dit")


@pytest.fixture(scope="module")
def many(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Of the families that this run has, in one process: to import torch takes longer than 120 mutations."""
    here = f"{request.node.nodeid}::test_many_"
    asked = " ".join(item.nodeid for item in request.session.items if item.nodeid.startswith(here))
    families = [family for family in MUTATED if f"[{family}]" in asked]
    return outcomes(tmp_path_factory.mktemp("mutated"), families, 1000, 120)


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", MUTATED)
def test_many_mutations_of_every_family_load_or_are_refused(
    family: str, many: dict[str, list[dict[str, Any]]]
) -> None:
    check(many[family], refusals=30, unchanged=15)
