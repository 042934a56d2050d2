"""Runs of the authors' generate_with_prefix_cache_block_diff, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "efficient_dlm"
RUNS = json.loads((GOLDEN / "sampling.json").read_text())["runs"]
MASK = 90


def here(case: dict[str, Any]) -> bool:
    """Whether the run has settings of this sampler alone."""
    given = case["arguments"]
    absent = ("neg_entropy", "shift_logits", "max_thinking_tokens")
    return given["remasking"] != "top_p_margin" and not any(given.get(name) for name in absent)


CASES = [case for case in RUNS if here(case) and case["label"] != "random order, threshold 0.5"]


def run_of(case: dict[str, Any], **options: Any) -> dl.DenoisingRun:
    given = case["arguments"]
    settings = {name: given[name] for name in ("gen_length", "block_length", "steps", "remasking")}
    threshold = given.get("threshold")
    settings |= {"parallel": threshold is not None} | ({} if threshold is None else {"threshold": threshold})
    settings |= {"temperature": given.get("temperature") or 0.0}
    end = given.get("eos_token_id")
    settings["stop_tokens"] = () if end is None else (end,)
    model, prompts = loaded(GOLDEN, family="efficient_dlm"), torch.tensor(case["prompt"])
    return dl.denoise(model, prompts, seed=case["seed"] or 0, **settings | options)


def drawn(case: dict[str, Any]) -> bool:
    return bool(case["arguments"].get("temperature")) or case["arguments"]["remasking"] == "random"


def test_the_cases_cover_what_they_should() -> None:
    assert len(CASES) == 42
    assert sum(map(drawn, CASES)) == 7
    assert sum(any(MASK in row for row in case["output"]) for case in CASES) == 6  # masks that are left


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["label"])
def test_reference_quirks_are_the_function_token_for_token(case: dict[str, Any]) -> None:
    run, positions = run_of(case, reference_quirks=True), len(case["output"][0])
    assert run.tokens[:, :positions].tolist() == case["output"]
    assert positions > run.tokens.shape[1] - case["arguments"]["block_length"]
    # The authors count the denoising passes, and for each block the one that stores its keys and values. Passes
    # that transfer nothing are left out here.
    passes = run.steps + len(set(run.blocks))
    assert passes <= case["nfe"]
    assert passes == case["nfe"] or any(MASK in row for row in case["output"])
    assert run_of(case, reference_quirks=True, use_cache=False).tokens.equal(run.tokens)


@pytest.mark.parametrize(
    "case", [case for case in CASES if "passes" in case and not drawn(case)], ids=lambda case: case["label"]
)
def test_every_pass_predicts_what_the_authors_do(case: dict[str, Any]) -> None:
    seen: list[torch.Tensor] = []

    def keep(step: int, canvas: torch.Tensor, logits: torch.Tensor) -> None:
        seen.append(logits.clone())

    run = run_of(case, reference_quirks=True, on_logits=keep)
    assert run.steps >= len(case["passes"]) - 4
    for step, theirs in zip(range(run.steps), case["passes"], strict=False):
        inside = slice(*run.spans[step])
        assert run.canvases[step, :, inside].tolist() == theirs["ids"]
        likely = seen[step][:, inside].softmax(-1)
        assert likely.argmax(-1).tolist() == theirs["argmax"]
        # Logits differ from float64 by 1e-5.
        torch.testing.assert_close(likely.amax(-1), torch.tensor(theirs["confidence"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if not drawn(case)], ids=lambda case: case["label"])
def test_without_quirks_rows_end_by_themselves_and_no_mask_is_left(case: dict[str, Any]) -> None:
    run, length = run_of(case), len(case["prompt"][0])
    for row, tokens in enumerate(case["output"]):
        alone = run_of(case | {"prompt": [case["prompt"][row]]})
        assert run.tokens[row].equal(alone.tokens[0])
        if len(case["prompt"]) == 1 and MASK not in tokens and "predicted" not in case["label"]:
            assert run.tokens[row, : len(tokens)].tolist() == tokens
    ends = torch.tensor(run.settings["stop_tokens"], dtype=torch.long)
    before = torch.isin(run.tokens[:, length:], ends).cumsum(-1) == 0
    assert not ((run.tokens[:, length:] == MASK) & before).any()
