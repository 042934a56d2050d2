"""P2: every stored trajectory of Open-dLLM's code, single steps by hand, rows, resumed and repeated runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.sampling.noise import SharedNoise
from dlm_lens.sampling.samplers.p2 import P2Sampler, P2Settings
from dlm_lens.sampling.settings import SpecialIds
from dlm_lens.testing import tiny
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "open_dcoder"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
STORED = load_file(GOLDEN / "sampling.safetensors")
MASK = SAMPLING["mask_token_id"]
FAMILIES = ["open_dcoder", "dream", "coda", "llada"]


def run_of(setting: dict[str, Any], **options: Any) -> dl.DenoisingRun:
    """With Dream's tiny network, whose layers and shift are Open-dCoder's."""
    given = {name: value for name, value in setting["args"].items() if name != "alg"}
    given["gen_length"] = given.pop("max_new_tokens")
    model, prompt = loaded(GOLDEN.parent / "dream", sampler="p2"), STORED[f"{setting['name']}.prompt"]
    return dl.denoise(model, prompt, seed=setting["seed"] or 0, **given, **options)


@pytest.mark.parametrize("setting", SAMPLING["settings"], ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any]) -> None:
    if setting["seed"] is not None and not torch.__version__.startswith("2.13"):
        pytest.skip("torch.multinomial's stream belongs to a torch build; the golden's is 2.13")
    run = run_of(setting, reference_quirks=True)
    assert run.canvases.equal(STORED[f"{setting['name']}.trajectory"])
    assert run.steps == setting["passes"]
    again = (run.canvases[1:] == MASK) & (run.canvases[:-1] != MASK)
    assert int(again.sum()) == setting["masked_again"]
    assert run.revised is not None
    assert run.revised.equal(again)


def plain(setting: dict[str, Any]) -> bool:
    """Whether nothing is drawn and the original never proposes [MASK]."""
    return setting["seed"] is None and setting["name"] != "more_steps_than_tokens"


@pytest.mark.parametrize("setting", [s for s in SAMPLING["settings"] if plain(s)], ids=lambda s: s["name"])
def test_without_noise_the_default_is_the_original(setting: dict[str, Any]) -> None:
    assert run_of(setting).canvases.equal(STORED[f"{setting['name']}.trajectory"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_by_hand(family: str) -> None:
    """A network of its own in every family: LLaDA's outputs are not shifted."""
    model, steps, length, start = tiny(family, sampler="p2"), 7, 10, 3
    mask, before = model.config.mask_token_id, int(getattr(model.config, "logit_shift", False))
    run = dl.denoise(model, [[1, 2, 3]], gen_length=length, steps=steps)
    answer, seen_again = torch.arange(start, start + length), 0
    for step in range(run.steps):
        canvas, after = run.canvases[step], run.canvases[step + 1]
        with torch.no_grad():
            probabilities = model(input_ids=canvas).logits[0].double().softmax(-1)[answer - before]
        confidence, token = probabilities.index_fill(-1, torch.tensor([mask]), -1.0).max(-1)
        torch.testing.assert_close(run.confidence[step, 0, start:].double(), confidence, atol=2e-6, rtol=2e-5)
        left = math.floor(length * (1 - (step + 1) / steps))
        lowest = set(confidence.argsort()[:left].tolist())
        expected = canvas[0].clone()
        for place in range(length):
            at = start + place
            if place in lowest:
                seen_again += int(canvas[0, at] != mask)
                expected[at] = mask
            elif canvas[0, at] == mask:
                expected[at] = token[place]
        assert after[0].equal(expected), step
    assert seen_again > 0  # something was masked again, so that the rule was exercised
    assert run.masks_left.tolist() == [0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_is_what_it_is_alone(family: str, temperature: float) -> None:
    model = tiny(family, sampler="p2")
    mask = model.config.mask_token_id
    options: dict[str, Any] = {"gen_length": 9, "steps": 5, "temperature": temperature, "top_p": 0.9, "seed": 5}
    prompts = [[1, 2, 3, 4], [5, 9, 7], [8, mask, mask, 3]]
    together = dl.denoise(model, prompts, **options)
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(prompts):
        alone = dl.denoise(model, [prompt], **options)
        kept = together.attention_mask[row]
        assert together.canvases[: alone.steps + 1, row, kept].equal(alone.canvases[:, 0])


@pytest.mark.parametrize("quirks", [True, False])
def test_the_filters_have_the_dtype_of_the_logits_with_quirks_alone(quirks: bool) -> None:
    logits = 3 * torch.randn(1, 400, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def confidence(given: Tensor) -> Tensor:
        """Of the most likely token, among those with more before them than 0.9."""
        values = given.sort(descending=True).values
        before = torch.cat([torch.zeros_like(values[..., :1]), values.softmax(-1).cumsum(-1)[..., :-1]], -1)
        return values.masked_fill(before > 0.9, -torch.inf).float().softmax(-1)[..., 0]

    settings, every = P2Settings(4, 400, top_p=0.9), torch.ones(1, 400, dtype=torch.bool)
    sampler = P2Sampler(settings, SharedNoise(0), SpecialIds(mask=63), reference_quirks=quirks)
    found = sampler.propose(torch.full((1, 400), 63), logits[0], every, every).confidence
    theirs, exact = confidence(logits), confidence(logits.float())
    assert int((theirs != exact).sum()) > 10
    if quirks:
        torch.testing.assert_close(found, theirs, atol=1e-6, rtol=0)
    else:  # [MASK], which is no x0 here, leaves before the filter
        rest = confidence(logits[..., :63].float())
        torch.testing.assert_close(found, rest, atol=1e-6, rtol=0)


def test_the_prompt_is_never_masked() -> None:
    """Masks in the prompt are filled in, and may be masked again; its other tokens stay."""
    model = tiny("dream", sampler="p2")
    mask = model.config.mask_token_id
    prompt = torch.tensor([[1, mask, 3, mask, 5]])
    run = dl.denoise(model, prompt, gen_length=6, steps=6)
    fixed = prompt[0] != mask
    assert (run.canvases[:, 0, :5][:, fixed] == prompt[0, fixed]).all()
    assert (run.tokens != mask).all()


def test_a_planted_suffix_stays() -> None:
    """What `on_canvas` writes at every step is there at the end, also where the planner would mask it."""
    suffix = torch.tensor([7, 8])

    def plant(step: int, canvas: Tensor) -> Tensor:
        canvas[:, -2:] = suffix
        return canvas

    run = dl.denoise(tiny("dream", sampler="p2"), [[1, 2, 3]], gen_length=8, steps=6, on_canvas=plant)
    assert run.tokens[0, -2:].equal(suffix)
    assert run.masks_left.tolist() == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"remasking": "entropy"}, "the p2 sampler has no setting 'remasking'"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dl.denoise(tiny("dream", sampler="p2"), [[1, 2]], gen_length=4, **options)
