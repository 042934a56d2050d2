"""The notebooks run, and what they show is in the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tracing.notebook import NOTEBOOKS, executed


def printed(notebook: dict[str, Any]) -> list[str]:
    return [
        "".join(output["text"])
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
    ]


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_its_outputs_are_stored(path: Path) -> None:
    fresh, stored = executed(path), json.loads(path.read_text(encoding="utf-8"))
    for ours, theirs in zip(fresh["cells"], stored["cells"], strict=True):
        kinds = [[output["output_type"] for output in cell.get("outputs", [])] for cell in (ours, theirs)]
        assert kinds[0] == kinds[1], f"run `python -m tests.tracing.notebook` to renew {path.name}"


def test_the_tracing_notebook_changes_the_text() -> None:
    (path,) = [path for path in NOTEBOOKS if path.name == "tracing.ipynb"]
    plain, _, edited, late = printed(executed(path))
    rows = [line.split("hidden from step ")[1].split(": ") for line in late.splitlines()]
    answers = {int(step): answer for step, answer in rows}
    assert answers[8] == plain.strip()  # there is no step 8
    assert answers[0] != plain.strip()
    assert len({line.split("in the last layer: ")[1] for line in edited.splitlines()}) > 2


def test_circuitsvis_shows_the_upper_triangle() -> None:
    (path,) = [path for path in NOTEBOOKS if path.name == "tracing.ipynb"]
    sources = "".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    assert "mask_upper_tri=False" in sources


@pytest.mark.long
def test_the_diffusion_gemma_notebook_says_what_its_cells_show() -> None:
    (path,) = [path for path in NOTEBOOKS if path.name == "diffusion_gemma.ipynb"]
    lines = "\n".join(printed(executed(path))).splitlines()
    answers = {
        line.split()[0]: line.split()[1:] for line in lines if line.startswith(("own ", "other ", "patched "))
    }
    assert answers["patched"] == answers["other"] != answers["own"]
    kinds = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("logits ", "top ", "none "))}
    assert len({tuple(answer) for answer in kinds.values()}) == 3
    shares = [float(line.split("(uniform ")[1].rstrip(")")) for line in lines if line.startswith("layer ")]
    assert shares[0] == shares[1] < shares[2]  # a window of 6 sees 5 cached keys and the canvas of 8
    assert shares[0] == pytest.approx(5 / 13, abs=0.005)
