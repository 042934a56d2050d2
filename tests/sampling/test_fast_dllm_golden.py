"""Every stored trajectory of Fast-dLLM v1's caches and parallel decoding, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.testing import tiny
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = [
    pytest.param(family, setting, id=f"{family}-{setting['name']}")
    for family in ("llada", "dream")
    for setting in json.loads((GOLDEN / "fast_dllm_v1" / family / "sampling.json").read_text())["settings"]
]


def run(family: str, setting: dict[str, Any], **options: Any) -> tuple[dlm_lens.DenoisingRun, dict[str, Tensor]]:
    stored = load_file(GOLDEN / "fast_dllm_v1" / family / "sampling.safetensors")
    prefix = setting["name"] + "."
    golden = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    given = dict(setting["args"])
    for theirs, ours in {"alg": "remasking", "max_new_tokens": "gen_length"}.items():
        if theirs in given:
            given[ours] = given.pop(theirs)
    if family == "dream" and given["remasking"] != "confidence_threshold":
        given.pop("threshold", None)
    cache = None if setting["cache"] == "none" else setting["cache"]
    model = loaded(GOLDEN / family)
    return dlm_lens.denoise(
        model, golden["prompt"], seed=setting["seed"] or 0, cache=cache, **given, **options
    ), golden


@pytest.mark.parametrize(("family", "setting"), CASES)
@pytest.mark.parametrize("logits", ["needed", "all"])
def test_reference_quirks_reproduce_the_original(family: str, setting: dict[str, Any], logits: str) -> None:
    got, golden = run(family, setting, reference_quirks=True, logits=logits)
    assert got.canvases.equal(golden["trajectory"])
    assert got.counts.tolist() == setting["transferred_per_step"]
    assert got.tokens.tolist() == setting["final"]
    finite = golden["confidence"].isfinite()
    assert got.confidence.isfinite().equal(finite)
    # Probabilities of a float32 model; the smallest stored selection margin is 1.1e-3.
    torch.testing.assert_close(got.confidence[finite], golden["confidence"][finite].float(), atol=1e-5, rtol=1e-5)
    assert got.proposals[finite].equal(golden["x0"][finite])


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_every_other_rule_of_dream_is_entropy_with_reference_quirks(cache: Any) -> None:
    given: dict[str, Any] = {"gen_length": 8, "block_length": 4, "steps": 6, "temperature": 0.7, "seed": 3}
    one, other = (
        dlm_lens.denoise(
            tiny("dream"), [[5, 9, 14]], cache=cache, reference_quirks=True, remasking=remasking, **given
        )
        for remasking in ("origin", "entropy")
    )
    assert one.canvases.equal(other.canvases)
    assert one.confidence.equal(other.confidence)


@pytest.mark.parametrize("remasking", ["entropy", "confidence_threshold"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_reference_quirks_draw_for_as_many_positions_as_the_original(
    remasking: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream: a whole pass draws for every position; others for the masks of the block, or with a threshold and
    the prefix cache for all masks from the block on (NVlabs/Fast-dLLM, dream/model/generation_utils_block.py)."""
    drawn, multinomial = list[int](), torch.multinomial

    def counting(weights: Tensor, *given: Any, **named: Any) -> Tensor:
        drawn.append(len(weights))
        return multinomial(weights, *given, **named)

    monkeypatch.setattr(torch, "multinomial", counting)
    run = dlm_lens.denoise(
        tiny("dream"), [[5, 9, 14]], gen_length=8, block_length=4, steps=8, remasking=remasking, cache=cache,
        temperature=1.0, reference_quirks=True, **({"threshold": 0.1} if remasking != "entropy" else {}),
    )  # fmt: skip
    expected = []
    for step, ((start, stop), computed) in enumerate(zip(run.spans, run.computed, strict=True)):
        further = remasking == "confidence_threshold" and cache == "prefix"
        masks = run.masked[step, 0, start : None if further else stop]
        expected.append(run.tokens.shape[1] if computed is None else int(masks.sum()))
    assert drawn == expected
    assert any(computed is not None for computed in run.computed[: run.steps // 2])


# Of NVlabs/Fast-dLLM at cb3a757, llada/generate.py, the first version with a factor, on golden/llada.
FACTORS = [
    (None, 1.8, 0.0, 0, [50, 97, 97, 97, 158, 155, 226, 71, 42, 71, 71, 226], [1, 1, 1, 1, 2, 2, 1, 1, 2]),
    (None, 1.3, 0.5, 3, [50, 158, 97, 42, 174, 155, 9, 196, 196, 196, 71, 223], [1, 1, 1, 1, 2, 1, 1, 1, 1, 2]),
    ("prefix", 1.9, 0.0, 0, [50, 97, 97, 79, 97, 155, 79, 79, 79, 71, 32, 13], [1, 1, 1, 1, 2, 2, 1, 1, 2]),
    ("prefix", 1.3, 0.5, 3, [97, 97, 97, 196, 79, 155, 50, 71, 79, 47, 196, 124], [1, 1, 1, 1, 2, 1, 1, 1, 1, 2]),
    ("dual", 1.8, 0.0, 0, [50, 97, 97, 79, 97, 155, 79, 79, 71, 71, 32, 158], [1, 1, 1, 1, 2, 1, 1, 1, 1, 2]),
    ("dual", 1.3, 0.5, 3, [50, 97, 97, 79, 158, 155, 226, 79, 215, 71, 187, 158], [1, 1, 1, 1, 2, 1, 1, 1, 1, 2]),
]


@pytest.mark.parametrize(("cache", "factor", "temperature", "seed", "tokens", "counts"), FACTORS)
def test_a_factor_with_reference_quirks_is_the_original(
    cache: str | None, factor: float, temperature: float, seed: int, tokens: list[int], counts: list[int]
) -> None:
    """The original writes the last of several masks with the others, and computes no step after the last mask."""
    prompt = [[44, 39, 133, 160, 163, 179, 27]]
    given: dict[str, Any] = {"gen_length": 12, "block_length": 6, "factor": factor, "cache": cache}
    given |= {"temperature": temperature, "seed": seed}
    run = dlm_lens.denoise(loaded(GOLDEN / "llada"), prompt, reference_quirks=True, **given)
    assert run.tokens[0, 7:].tolist() == tokens
    assert run.counts.flatten().tolist() == counts
    default = dlm_lens.denoise(loaded(GOLDEN / "llada"), prompt, **given)
    assert default.steps > run.steps
