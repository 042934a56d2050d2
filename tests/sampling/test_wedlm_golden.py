"""Runs of WeDLM's engine, with its cache of keys and values, token for token and logit for logit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "wedlm"
CASES = json.loads((GOLDEN / "sampling.json").read_text())["cases"]
NAMES = {
    "max_tokens": "gen_length", "wedlm_entropy_threshold": "entropy_threshold",
    "wedlm_pos_penalty_factor": "position_penalty", "stop": "stop_tokens",
}  # fmt: skip
EOS = 58
"""The engine adds it to the stop tokens."""


def run(case: dict[str, Any], **options: Any) -> dlm_lens.DenoisingRun:
    given = {NAMES.get(name, name): value for name, value in case["params"].items()}
    if given.get("entropy_threshold", 1) is None:
        given["entropy_threshold"] = 0.0
    given["stop_tokens"] = (*given.get("stop_tokens", ()), EOS)
    model, prompts = loaded(GOLDEN / case["kind"]), [torch.tensor(prompt) for prompt in case["prompts"]]
    longest = max(len(prompt) for prompt in prompts)
    ids, content = torch.full((len(prompts), longest), EOS), torch.zeros(len(prompts), longest)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], content[row, longest - len(prompt) :] = prompt, 1
    given |= {"attention_mask": content, "seed": case["seed"], "window_length": case["window"]}
    return dlm_lens.denoise(model, ids, **given | options)


def steps_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The engine's steps without the last ones, which only commit what is decided."""
    return [step for step in case["steps"] if step]


def drawn(case: dict[str, Any]) -> bool:
    return bool(case["params"].get("temperature", 0.2) > 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reference_quirks_reproduce_the_engine(case: dict[str, Any]) -> None:
    if drawn(case) and not torch.__version__.startswith("2.13"):
        pytest.skip("torch.multinomial's stream belongs to a torch build; the golden's is 2.13")
    assert case["min_distance_to_threshold"] > 1e-5
    found, steps = run(case, reference_quirks=True), steps_of(case)
    assert found.steps == len(steps)
    for number, step in enumerate(steps):
        for row, padding in enumerate(found.padding.tolist()):
            where = found.unmasked[number, row].nonzero().flatten()
            entry = step.get(str(row))
            if entry is None:
                assert not len(where)
                continue
            first = entry["first"] + padding
            assert where.tolist() == [first + entry["remaining"][index] for index in entry["fill"]]
            assert found.canvases[number + 1, row, where].tolist() == entry["ids"]
    for row, final in enumerate(case["final"]):
        assert found.tokens[row, found.prompt_length :][: len(final)].tolist() == final


@pytest.mark.parametrize("name", ["greedy", "sampled_7b"])
def test_logits_without_a_cache_equal_those_of_the_cached_engine(name: str) -> None:
    (case,) = [case for case in CASES if case["name"] == name]
    if drawn(case) and not torch.__version__.startswith("2.13"):
        pytest.skip("torch.multinomial's stream belongs to a torch build; the golden's is 2.13")
    stored, seen = load_file(GOLDEN / "tensors.safetensors")[f"sampling.{name}.logits"], list[Tensor]()
    seen_logits: list[Tensor] = []
    run(case, reference_quirks=True, on_logits=lambda step, canvas, logits: seen_logits.append(logits.clone()))
    found = run(case, reference_quirks=True)
    for number, step in enumerate(steps_of(case)):
        for row, entry in step.items():
            first = entry["first"] + int(found.padding[int(row)])
            seen.append(seen_logits[number][int(row), [first + index for index in entry["remaining"]]])
    assert len(torch.cat(seen)) == len(stored) > 60
    # Sums in another order: keys of the prefix from the cache, and a canvas instead of a window.
    torch.testing.assert_close(torch.cat(seen), stored, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("case", [case for case in CASES if not drawn(case)], ids=lambda case: case["name"])
def test_without_noise_the_default_is_the_engine_as_long_as_its_window_is_in_the_answer(
    case: dict[str, Any],
) -> None:
    found = run(case)
    for number, step in enumerate(steps_of(case)):
        length = len(case["prompts"][0])
        if any(entry["first"] + case["window"] > length + case["params"]["max_tokens"] for entry in step.values()):
            break
        for row, entry in step.items():
            where = found.unmasked[number, int(row)].nonzero().flatten() - int(found.padding[int(row)])
            assert where.tolist() == [entry["first"] + entry["remaining"][index] for index in entry["fill"]]
    assert number > 3 or case["name"] == "wide_window"
