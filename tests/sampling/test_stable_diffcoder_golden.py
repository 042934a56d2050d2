"""Runs of the authors' generate_block, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "stable_diffcoder"
CASES = json.loads((GOLDEN / "sampling.json").read_text())["runs"]
MASK = 90


def run_of(case: dict[str, Any], **options: Any) -> dl.DenoisingRun:
    given = case["arguments"]
    settings = {name: given[name] for name in ("gen_length", "block_length", "steps", "remasking", "temperature")}
    threshold, end = given["threshold"], given["eos_id"]
    settings |= {"parallel": False} if threshold is None else {"threshold": threshold}
    settings["stop_tokens"] = () if end is None else (end,)
    model = loaded(GOLDEN, family="stable_diffcoder", mask_token_id=MASK)
    return dl.denoise(model, torch.tensor([case["prompt"]]), seed=case["seed"] or 0, **settings | options)


def written(run: dl.DenoisingRun, case: dict[str, Any]) -> list[int]:
    """The text; after the first stop token of the answer the authors have that token up to the block's end."""
    tokens, length = run.tokens[0, : len(case["output"])].tolist(), len(case["prompt"])
    end, answer = case["arguments"]["eos_id"], tokens[length:]
    if end in answer:
        tokens[length + answer.index(end) :] = [end] * (len(answer) - answer.index(end))
    return tokens


def drawn(case: dict[str, Any]) -> bool:
    return case["arguments"]["temperature"] > 0 or case["arguments"]["remasking"] == "random"


def test_the_cases_cover_what_they_should() -> None:
    assert len(CASES) == 27
    assert sum(map(drawn, CASES)) == 6
    ended = [case for case in CASES if case["arguments"]["eos_id"] in case["output"][len(case["prompt"]) :]]
    assert len(ended) == 4
    assert sum(len(case["output"]) < len(case["prompt"]) + case["arguments"]["gen_length"] for case in CASES) == 3
    assert {len(case["prompt"]) % case["arguments"]["block_length"] for case in CASES} == {0, 1, 2, 3, 5, 13}


@pytest.mark.parametrize("quirks", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["label"])
def test_runs_are_the_function_token_for_token(case: dict[str, Any], quirks: bool) -> None:
    if drawn(case) and not quirks:
        run = run_of(case)
        again = run_of(case)
        assert run.tokens.equal(again.tokens)  # its own generator for each row
        assert run.masks_left.tolist() == [0]
        return
    run = run_of(case, reference_quirks=quirks)
    assert written(run, case) == case["output"]
    # The authors count the denoising passes, and for each block but the ended one the pass that stores its keys.
    if case["arguments"]["eos_id"] not in case["output"][len(case["prompt"]) :]:
        assert run.steps + len(set(run.blocks)) == case["nfe"]
    assert run_of(case, reference_quirks=quirks, use_cache=False).tokens.equal(run.tokens)


@pytest.mark.parametrize(
    "case", [case for case in CASES if "passes" in case and not drawn(case)], ids=lambda case: case["label"]
)
def test_every_pass_predicts_what_the_authors_do(case: dict[str, Any]) -> None:
    seen: list[torch.Tensor] = []

    def keep(step: int, canvas: torch.Tensor, logits: torch.Tensor) -> None:
        seen.append(logits.clone())

    run = run_of(case, reference_quirks=True, on_logits=keep)
    assert run.steps == len(case["passes"]) or case["arguments"]["eos_id"] is not None
    for step in range(run.steps):
        theirs, inside = case["passes"][step], slice(*run.spans[step])
        assert run.canvases[step, :, inside].tolist() == theirs["ids"]
        likely = seen[step][:, inside].softmax(-1)
        assert likely.argmax(-1).tolist() == theirs["argmax"]
        # Logits differ from float64 by 6e-5.
        torch.testing.assert_close(likely.amax(-1), torch.tensor(theirs["confidence"]), atol=2e-4, rtol=2e-4)


def test_more_than_one_prompt_is_refused_as_the_authors_refuse_it() -> None:
    case = CASES[0]
    model = loaded(GOLDEN, family="stable_diffcoder", mask_token_id=MASK)
    with pytest.raises(ValueError, match="the authors' code denoises one prompt at a time, and there are 2"):
        dl.denoise(model, torch.tensor([case["prompt"]] * 2), gen_length=8, reference_quirks=True)
