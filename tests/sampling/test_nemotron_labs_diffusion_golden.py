"""Runs of the authors' `generate` and `ar_generate` of Nemotron-Labs-Diffusion, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "nemotron_labs_diffusion"
RUNS = json.loads((GOLDEN / "sampling.json").read_text())["runs"]
MASK = 90


def named(method: str, causal_context: bool = True) -> list[dict[str, Any]]:
    """The runs of a method, without those of settings that are not here."""
    found = [run for run in RUNS if run["method"] == method and "max_thinking_tokens" not in run["arguments"]]
    return [run for run in found if run["arguments"].get("causal_context", True) == causal_context]


GENERATED, DECODED = named("generate"), named("ar_generate")
WHOLE = named("generate", causal_context=False)
"""Runs whose prompt and finished blocks attend in both directions."""


def run_of(case: dict[str, Any], **options: Any) -> dl.DenoisingRun:
    given = dict(case["arguments"])
    settings: dict[str, Any] = {"gen_length": given["max_new_tokens"], "block_length": given["block_length"]}
    settings |= {"parallel": "threshold" in given, "temperature": given.get("temperature", 0.0)}
    settings |= {"threshold": given["threshold"]} if "threshold" in given else {}
    if "eos_token_id" in given:
        settings["stop_tokens"] = [end for end in [given["eos_token_id"]] if end >= 0]
    sampler = {} if given.get("causal_context", True) else {"sampler": "efficient_dlm"}
    model, prompts = loaded(GOLDEN / "8b", **sampler), torch.tensor(case["prompt"])
    return dl.denoise(model, prompts, seed=case["seed"] or 0, **settings | options)


def drawn(case: dict[str, Any]) -> bool:
    return bool(case["arguments"].get("temperature", 0.0) > 0)


def test_the_cases_cover_what_they_should() -> None:
    assert (len(GENERATED), len(WHOLE)) == (32, 5)
    assert sum(map(drawn, GENERATED)) == 5
    assert sum(MASK in row for case in GENERATED for row in case["output"]) > 4  # masks that are left
    assert sum(len(case["prompt"]) > 1 for case in GENERATED) > 6


@pytest.mark.parametrize("case", GENERATED + WHOLE, ids=lambda case: case["label"])
def test_reference_quirks_are_generate_token_for_token(case: dict[str, Any]) -> None:
    if drawn(case) and not torch.__version__.startswith("2.13"):
        pytest.skip("torch.multinomial's stream belongs to a torch build; the golden's is 2.13")
    run, positions = run_of(case, reference_quirks=True), len(case["output"][0])
    assert run.tokens[:, :positions].tolist() == case["output"]
    assert positions > run.tokens.shape[1] - case["arguments"]["block_length"]
    # The authors count the denoising passes, and for each block the one that stores its keys and values; here the
    # first step of a block is that pass over the one before, or there is none. Passes that transfer nothing are
    # left out here.
    passes = run.steps + (len(set(run.blocks)) if case in WHOLE else 0)
    assert passes <= case["nfe"]
    assert passes == case["nfe"] or any(MASK in row for row in case["output"])
    assert run_of(case, reference_quirks=True, use_cache=False).tokens.equal(run.tokens)


@pytest.mark.parametrize(
    "case", [case for case in GENERATED if "passes" in case and not drawn(case)], ids=lambda case: case["label"]
)
def test_every_denoising_pass_predicts_what_the_authors_do(case: dict[str, Any]) -> None:
    seen: list[torch.Tensor] = []

    def keep(step: int, canvas: torch.Tensor, logits: torch.Tensor) -> None:
        seen.append(logits.clone())

    run = run_of(case, reference_quirks=True, on_logits=keep)
    later = [step for step, (start, stop) in enumerate(run.spans) if stop - start > 1]
    passes = [one for one in case["passes"] if any(MASK in row for row in one["ids"])]
    assert len(later) >= len(passes)
    for step, theirs in zip(later, passes, strict=False):
        inside = slice(*run.spans[step])
        assert run.canvases[step, :, inside].tolist() == theirs["ids"]
        likely = seen[step][:, inside].softmax(-1)
        assert likely.argmax(-1).tolist() == theirs["argmax"]
        torch.testing.assert_close(likely.amax(-1), torch.tensor(theirs["confidence"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", DECODED, ids=lambda case: case["label"])
def test_the_causal_family_is_ar_generate(case: dict[str, Any]) -> None:
    if drawn(case):
        pytest.skip("ar_generate draws with torch.multinomial; AR runs here draw per row")
    model = dl.load(GOLDEN / "8b", family="causal")
    end = case["arguments"]["eos_token_id"]
    model.config.eos_token_id = end if end >= 0 else None
    run = dl.denoise(model, torch.tensor(case["prompt"]), gen_length=case["arguments"]["max_new_tokens"])
    assert run.tokens.tolist() == case["output"]


@pytest.mark.parametrize("case", [case for case in GENERATED if not drawn(case)], ids=lambda case: case["label"])
def test_without_quirks_rows_end_by_themselves_and_no_mask_is_proposed(case: dict[str, Any]) -> None:
    run, length = run_of(case), len(case["prompt"][0])
    for row, tokens in enumerate(case["output"]):
        if MASK in tokens or "mask token" in case["label"]:
            continue
        if len(case["prompt"]) == 1:
            assert run.tokens[row, : len(tokens)].tolist() == tokens
        alone = run_of(case | {"prompt": [case["prompt"][row]]})
        assert run.tokens[row].equal(alone.tokens[0])
    masks = run.tokens[:, length:] == MASK
    ends = torch.tensor(run.settings.get("stop_tokens") or [11])
    before = torch.isin(run.tokens[:, length:], ends).cumsum(-1) == 0
    assert not (masks & before).any()
