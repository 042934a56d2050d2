"""Runs of I-DLM's IDLMBlockN, token for token and draft for draft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "i_dlm"
CASES = json.loads((GOLDEN / "sampling.json").read_text())["runs"]
MASK = 90


def run_of(case: dict[str, Any], **options: Any) -> dl.DenoisingRun:
    given = dict(case["config"])
    settings = {"stride": given.pop("gen_block_size"), "gen_length": case["max_tokens"], **given}
    settings["stop_tokens"] = tuple(case["stops"])
    return dl.denoise(loaded(GOLDEN), torch.tensor([case["prompt"]]), seed=case["seed"], **settings | options)


def test_the_cases_cover_what_they_should() -> None:
    assert len(CASES) == 24
    passes = [each for case in CASES for each in case["passes"]]
    assert {name: sum(each["case"] == name for each in passes) for name in "CVR"} == {"C": 138, "V": 43, "R": 129}
    assert {case["config"]["temperature"] for case in CASES} == {0.0, 0.2, 0.7, 1.0, 1.5}
    assert {case["config"]["gen_block_size"] for case in CASES} == {2, 3, 4, 8}
    assert sum(bool(case["stops"]) for case in CASES) == 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["label"])
def test_reference_quirks_are_the_authors_loop(case: dict[str, Any]) -> None:
    """Every pass has their block: the last decided token, the drafts, and masks up to 2 N - 1 positions."""
    run, output = run_of(case, reference_quirks=True), case["output"]
    start, width = run.prompt_length, 2 * case["config"]["gen_block_size"] - 1
    assert run.tokens[0, start : start + len(output)].tolist() == output
    assert run.steps == len(case["passes"]) + 1  # the first is their pass over the prompt
    decided = 1
    for step, theirs in enumerate(case["passes"], 1):
        first = int(run.masked[step, 0].nonzero()[0])
        assert first == start + decided
        assert run.seen_content[step, 0].nonzero().max() == min(first + width - 2, run.tokens.shape[1] - 1)
        seen = run.canvases[step, 0, first - 1 : first - 1 + width].tolist()
        assert seen == theirs["block"][: len(seen)]
        assert set(theirs["block"][len(seen) :]) <= {MASK}
        decided += int(run.unmasked[step].sum())
        # A first pass after the prompt tells two tokens, of which the first was decided before it.
        told = theirs["output"][step == 1 :]
        ended = [place for place, token in enumerate(told) if token in case["stops"]]
        told = told[: ended[0] + 1] if ended else told
        assert run.proposals[step, 0][run.unmasked[step, 0]].tolist() == told


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["config"]["temperature"] == 0], ids=lambda case: case["label"]
)
def test_greedy_decoding_is_the_same_without_quirks(case: dict[str, Any]) -> None:
    run = run_of(case)
    length = run.prompt_length + len(case["output"])
    assert run.tokens[0, run.prompt_length : length].tolist() == case["output"]
    assert run.tokens.shape[1] == run.prompt_length + case["max_tokens"]
    assert bool((run.tokens[0, length:] == MASK).all())
    assert run.steps == len(case["passes"]) + 1


def test_more_than_one_prompt_is_refused_with_quirks() -> None:
    with pytest.raises(ValueError, match="the authors' code denoises one prompt at a time, and there are 2"):
        dl.denoise(loaded(GOLDEN), torch.tensor([[1, 2], [3, 4]]), gen_length=8, reference_quirks=True)
