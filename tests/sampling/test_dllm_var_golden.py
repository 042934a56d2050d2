"""Runs of dLLM-Var's `generate`, token for token: what each step computes, its confidences, and the text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl

GOLDEN = Path(__file__).parent.parent / "golden"
STORED = json.loads((GOLDEN / "dllm_var" / "sampling.json").read_text())
CONFIDENCE = load_file(GOLDEN / "dllm_var" / "confidence.safetensors")
MASK = 247


@pytest.fixture(scope="module")
def loaded() -> Any:
    return dl.load(GOLDEN / "llada", sampler="dllm_var")


@pytest.fixture
def model(loaded: Any, case: dict[str, Any]) -> Iterator[Any]:
    """LLaDA's golden network, whose head proposes some tokens more often."""
    head = loaded.lm_head.weight
    before = head.detach().clone()
    with torch.no_grad():
        for token, scale in case["head_scale"].items():
            head[int(token)] *= scale
        yield loaded
        head.copy_(before)


def name_of(case: dict[str, Any]) -> str:
    return str(case["name"])


def check(model: Any, case: dict[str, Any], **options: Any) -> None:
    """Compare every step of a run with the stored one."""
    run = dl.denoise(model, [case["prompt"]], reference_quirks=True, **case["args"], **options)
    assert run.steps == len(case["steps"])
    confidences = CONFIDENCE[case["name"]].split([len(step["x0"]) for step in case["steps"]])
    computed = run.computed or (None,)
    for step, (stored, confidence) in enumerate(zip(case["steps"], confidences, strict=True)):
        stop = run.spans[step][1]
        start = stop - len(stored["window"])
        # The authors' first step computes the prompt too, and reads the block.
        assert computed[step] == (None if step == 0 else (start, stop))
        assert run.canvases[step, 0, start:stop].tolist() == stored["window"]
        masks = run.masked[step, 0, start:stop]
        assert run.proposals[step, 0, start:stop][masks].tolist() == stored["x0"]
        # float32 sums of a few hundred terms in another order
        found = run.confidence[step, 0, start:stop][masks]
        torch.testing.assert_close(found, confidence, atol=1e-5, rtol=1e-4)
        assert run.counts[step, 0] == stored["count"]
    assert run.tokens[0, len(case["prompt"]) :].tolist() == case["final"]


@pytest.mark.parametrize("case", STORED["cases"], ids=name_of)
def test_reference_quirks_reproduce_the_authors_runs(model: Any, case: dict[str, Any]) -> None:
    check(model, case)


PROPOSED = [case for case in STORED["cases"] if any(MASK in step["x0"] for step in case["steps"])]


@pytest.mark.parametrize("case", [*STORED["cases"][:9:4], *PROPOSED], ids=name_of)
def test_logits_everywhere_are_those_of_the_same_runs(model: Any, case: dict[str, Any]) -> None:
    check(model, case, logits="all")


PLAIN = [case for case in STORED["cases"] if case not in PROPOSED]


@pytest.mark.parametrize("case", PLAIN[::3], ids=name_of)
def test_by_default_the_tokens_are_the_same_where_no_mask_is_proposed(model: Any, case: dict[str, Any]) -> None:
    run = dl.denoise(model, [case["prompt"]], **case["args"])
    assert run.tokens[0, len(case["prompt"]) :].tolist() == case["final"]


def test_the_stored_runs_have_blocks_ends_and_proposed_masks() -> None:
    cases = STORED["cases"]
    assert any(len(case["final"]) < case["args"]["gen_length"] for case in cases)
    assert any(MASK in case["final"] for case in cases)
    assert any(len({len(step["window"]) for step in case["steps"]}) > 1 for case in cases)
    assert any(1 < step["count"] < len(step["x0"]) for case in cases for step in case["steps"])
