"""Runs of the authors' SDLM_generate, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "sdlm"
CASES = json.loads((GOLDEN / "sampling.json").read_text())["runs"]


def run_of(case: dict[str, Any], **options: Any) -> dl.DenoisingRun:
    given = case["arguments"]
    settings = {name: given[name] for name in ("temperature", "top_p", "top_k", "threshold")}
    settings |= {"gen_length": given["max_gen_len"], "window_length": given["n_future_tokens"]}
    settings["remasking"] = {"prob_conf": "probability", "entropy_conf": "entropy"}[given["alg"]]
    if given["only_first_token_keep"]:
        settings["threshold"] = 1.0
    settings["stop_tokens"] = tuple(given["eos_token_ids"] or ())
    model = loaded(GOLDEN, family="sdlm")
    return dl.denoise(model, torch.tensor([case["prompt"]]), seed=case["seed"] or 0, **settings | options)


def test_the_cases_cover_what_they_should() -> None:
    assert len(CASES) == 22
    assert sum(case["seed"] is not None for case in CASES) == 5
    assert sum(case["ended"] for case in CASES) == 3
    beyond = [len(case["output"]) - len(case["prompt"]) - case["arguments"]["max_gen_len"] for case in CASES]
    assert sum(more > 0 for more in beyond) >= 6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["label"])
def test_reference_quirks_are_the_function_token_for_token(case: dict[str, Any]) -> None:
    run, length = run_of(case, reference_quirks=True), len(case["output"])
    assert run.tokens[0, :length].tolist() == case["output"]
    assert run.steps == case["rounds"]
    following = run.tokens[0, length : length + 1].tolist()
    if case["ended"]:  # the end is written here
        assert following[0] in case["arguments"]["eos_token_ids"]
    else:
        assert following in ([], [90])


@pytest.mark.parametrize("case", [case for case in CASES if "passes" in case], ids=lambda case: case["label"])
def test_every_pass_predicts_what_the_authors_do(case: dict[str, Any]) -> None:
    seen: list[torch.Tensor] = []

    def keep(step: int, canvas: torch.Tensor, logits: torch.Tensor) -> None:
        seen.append(logits.clone())

    run = run_of(case, reference_quirks=True, on_logits=keep)
    assert run.steps == len(case["passes"])
    for step, theirs in enumerate(case["passes"]):
        first = int(run.masked[step, 0].nonzero()[0])
        window = slice(first, first + case["arguments"]["n_future_tokens"])
        likely = seen[step][0, window].softmax(-1)
        assert likely.argmax(-1).tolist() == theirs["argmax"]
        # Logits differ from float64 by 2e-5.
        torch.testing.assert_close(likely.amax(-1), torch.tensor(theirs["confidence"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case["seed"] is None], ids=lambda case: case["label"])
def test_without_quirks_the_answer_is_as_long_as_asked(case: dict[str, Any]) -> None:
    """Windows at the canvas's end are shorter, so that only tokens before them are the authors'."""
    run, prompt, given = run_of(case), len(case["prompt"]), case["arguments"]
    assert run.tokens.shape[1] == prompt + given["max_gen_len"]
    whole = max(0, given["max_gen_len"] - 2 * given["n_future_tokens"])
    same = min(len(case["output"]), prompt + whole)
    assert run.tokens[0, :same].tolist() == case["output"][:same]


def test_more_than_one_prompt_is_refused_as_the_authors_refuse_it() -> None:
    with pytest.raises(ValueError, match="the authors' code denoises one prompt at a time, and there are 2"):
        dl.denoise(
            loaded(GOLDEN, family="sdlm"), torch.tensor([[1, 2], [3, 4]]), gen_length=8, reference_quirks=True
        )
