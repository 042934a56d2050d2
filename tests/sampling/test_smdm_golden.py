"""Every stored trajectory of SMDM's sampler, for the plain, the sink-token and the gated network."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden"
SETTINGS = [
    pytest.param(GOLDEN / family, setting, id=f"{family}-{setting['name']}")
    for family in ("smdm", "smdm_sink", "smdm_gate")
    for setting in json.loads((GOLDEN / family / "sampling.json").read_text())["settings"]
]
MASK = 64  # of tiny("smdm")


def run(path: Path, setting: dict[str, Any], **options: Any) -> tuple[dlm_lens.DenoisingRun, dict[str, Tensor]]:
    prefix = setting["name"] + "."
    stored = load_file(path / "sampling.safetensors")
    golden = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    arguments = {key: setting["args"][key] for key in ("steps", "temperature", "cfg_scale", "eps")}
    arguments |= {
        "remasking": setting["args"]["alg"],
        "gen_length": setting["args"]["context_length"] - golden["prompt"].shape[1],
    }
    seed = setting["seed"] or 0
    return dlm_lens.denoise(loaded(path), golden["prompt"], seed=seed, **arguments, **options), golden


@pytest.mark.parametrize(("path", "setting"), SETTINGS)
@pytest.mark.parametrize("logits", ["needed", "all"])
def test_reference_quirks_reproduce_the_original(path: Path, setting: dict[str, Any], logits: str) -> None:
    got, golden = run(path, setting, reference_quirks=True, logits=logits)
    assert got.canvases.equal(golden["trajectory"])
    assert got.counts.tolist() == setting["transferred_per_step"]
    assert got.tokens.tolist() == setting["final"]
    finite = golden["confidence"].isfinite()
    assert got.confidence.isfinite().equal(finite)
    torch.testing.assert_close(got.confidence[finite], golden["confidence"][finite].float(), atol=1e-5, rtol=1e-5)
    mask = loaded(path).config.mask_token_id
    proposed = (golden["x0"] >= 0) & (golden["x0"] != mask)
    assert proposed.any()
    assert got.proposals[proposed].equal(golden["x0"][proposed])


ALONE = [p for p in SETTINGS if not p.values[1]["rows_coupled"] and p.values[1]["kind"] == "deterministic"]


@pytest.mark.parametrize(("path", "setting"), ALONE)
def test_without_noise_and_neighbours_the_default_is_the_original(path: Path, setting: dict[str, Any]) -> None:
    got, golden = run(path, setting)
    assert got.canvases.equal(golden["trajectory"])
    correct = run(path, setting | {"args": setting["args"] | {"alg": "greedy"}})[0]
    assert correct.canvases.equal(golden["trajectory"])


@pytest.mark.long
@pytest.mark.parametrize(("path", "setting"), SETTINGS)
def test_the_default_leaves_no_mask_and_touches_nothing_else(path: Path, setting: dict[str, Any]) -> None:
    got, golden = run(path, setting)
    assert got.masks_left.sum() == 0
    assert (got.unmasked.sum(0) == got.masked[0]).all()
    assert got.tokens[:, : golden["prompt"].shape[1]].equal(golden["prompt"])
    assert got.tokens.max() < loaded(path).config.vocab_size


@pytest.mark.parametrize(
    "path", [GOLDEN / "smdm", GOLDEN / "smdm_sink", GOLDEN / "smdm_gate"], ids=lambda p: p.name
)
def test_rows_that_the_original_couples_are_here_what_they_are_alone(path: Path) -> None:
    setting = next(p.values[1] for p in SETTINGS if p.values[0] == path and p.values[1]["name"] == "greedy_b2")
    got, golden = run(path, setting)
    assert not got.canvases.equal(golden["trajectory"])
    assert got.counts.tolist() == [[1, 1], [1, 1], [1, 1], [2, 2], [3, 3]]
    arguments = setting["args"]
    for row in range(2):
        alone = dlm_lens.denoise(
            loaded(path), golden["prompt"][row : row + 1], gen_length=8, steps=5, temperature=0.0,
            cfg_scale=0.0, remasking="greedy", eps=arguments["eps"], reference_quirks=True,
        )  # fmt: skip
        assert alone.canvases[:, 0].equal(got.canvases[:, row])


@pytest.mark.parametrize("remasking", ["origin", "greedy"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("cfg_scale", [0.0, 1.1])
def test_a_row_is_what_it_is_alone(remasking: str, temperature: float, cfg_scale: float) -> None:
    model, prompts = tiny("smdm", num_sinks=1, gated_attention=True), [[1, 2, 3, 4], [5, MASK, 7], [8]]
    options: dict[str, Any] = {
        "gen_length": 9, "steps": 5, "remasking": remasking, "temperature": temperature, "cfg_scale": cfg_scale,
        "seed": 5,
    }  # fmt: skip
    together = dlm_lens.denoise(model, prompts, **options)
    assert together.settings["sampler"] == "smdm"
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(prompts):
        alone = dlm_lens.denoise(model, [prompt], **options)
        assert together.canvases[:, row, together.attention_mask[row]].equal(alone.canvases[:, 0])


def test_the_first_step_is_what_the_formulas_say() -> None:
    model = tiny("smdm", num_sinks=1)
    options: dict[str, Any] = {"remasking": "greedy", "temperature": 0.0, "cfg_scale": 1.5}
    run = dlm_lens.denoise(model, [[5, 6, 7]], gen_length=8, steps=2, **options)
    canvas = torch.tensor([[5, 6, 7] + [MASK] * 8])
    conditional = forward64(model, canvas)["logits"][0]
    unconditional = forward64(model, torch.full_like(canvas, MASK))["logits"][0]
    likely, proposed = (unconditional + 2.5 * (conditional - unconditional)).softmax(-1).max(-1)
    assert run.proposals[0, 0, 3:].equal(proposed[3:])
    torch.testing.assert_close(run.confidence[0, 0, 3:].double(), likely[3:], atol=1e-5, rtol=1e-4)
    # Half of the times from 1 to 1e-5 is a hair less than half of the masks: 3 of 8.
    assert run.counts.tolist() == [[3], [5]]
    assert run.unmasked[0, 0].nonzero().flatten().tolist() == sorted((likely[3:].topk(3).indices + 3).tolist())


@pytest.mark.parametrize("quirks", [False, True])
def test_guidance_masks_the_prompt_and_what_was_written_into_it(quirks: bool) -> None:
    model, prompt = tiny("smdm"), [[5, MASK, 6, MASK]]
    options: dict[str, Any] = {"remasking": "greedy", "temperature": 0.0, "cfg_scale": 1.5, "eps": 0.1}
    run = dlm_lens.denoise(model, prompt, gen_length=4, steps=4, reference_quirks=quirks, **options)
    assert run.masked[3, 0, :4].sum() < 2  # a hole of the prompt was filled
    for step in range(4):
        blank = run.canvases[step].clone()
        blank[:, :4] = MASK
        conditional, unconditional = (forward64(model, ids)["logits"][0] for ids in (run.canvases[step], blank))
        likely, proposed = (unconditional + 2.5 * (conditional - unconditional)).softmax(-1).max(-1)
        masked = run.masked[step, 0]
        assert run.proposals[step, 0, masked].equal(proposed[masked])
        torch.testing.assert_close(run.confidence[step, 0, masked].double(), likely[masked], atol=1e-5, rtol=1e-4)


def test_origin_writes_each_mask_with_the_probability_of_the_schedule() -> None:
    rows = 600
    run = dlm_lens.denoise(
        tiny("smdm"), [[1, 2]] * rows, gen_length=6, steps=3, cfg_scale=0.0, seed=list(range(rows))
    )
    shares = run.unmasked[:2, :, 2:].float().mean((1, 2))
    # 1/3 of all, then half of two thirds; the standard error of 3,600 draws is below 0.009.
    torch.testing.assert_close(shares, torch.tensor([1 / 3, 1 / 3]), atol=0.035, rtol=0)
    assert run.masks_left.sum() == 0


def test_sampling_follows_the_softmax_at_its_temperature() -> None:
    model, temperature, rows = tiny("smdm"), 0.8, 1500
    run = dlm_lens.denoise(
        model, [[1, 2, 3]] * rows, gen_length=1, steps=1, temperature=temperature, cfg_scale=0.0,
        seed=list(range(rows)),
    )  # fmt: skip
    expected = (forward64(model, torch.tensor([[1, 2, 3, MASK]]))["logits"][0, 3] / temperature).softmax(-1)
    observed = run.tokens[:, 3].bincount(minlength=64) / rows
    # As in test_denoising.py: total variation of 1,500 draws from 64 classes is about 0.08.
    assert (observed - expected).abs().sum() / 2 < 0.12
    assert (observed - (expected**2 / (expected**2).sum())).abs().sum() / 2 > 0.15


@pytest.mark.parametrize("quirks", [False, True])
def test_at_temperature_0_only_the_original_draws_numbers_that_it_does_not_use(quirks: bool) -> None:
    run = dlm_lens.denoise(
        tiny("smdm"),
        [[1, 2]],
        gen_length=9,
        steps=4,
        temperature=0.0,
        cfg_scale=0.0,
        seed=3,
        reference_quirks=quirks,
    )
    stream, times = torch.Generator().manual_seed(3), torch.linspace(1, 1e-5, 5)
    for step in range(4):
        masked = run.masked[step, 0]
        fraction = 1.0 if step == 3 else 1 - times[step + 1] / times[step]
        expected = torch.rand(int(masked.sum()), generator=stream) < fraction
        assert run.unmasked[step, 0, masked].equal(expected)
        if quirks:
            torch.rand(int(expected.sum()), 64, generator=stream, dtype=torch.float64)


def test_mask_tokens_behind_the_prompt_are_written_over() -> None:
    """The authors' GSM8K script pads prompts on the right with the mask id."""
    padded = dlm_lens.denoise(tiny("smdm"), [[1, 2, MASK, MASK], [3, 4, 5, 6]], gen_length=4, steps=4)
    assert padded.masks_left.tolist() == [0, 0]
    assert padded.masked[0].sum(-1).tolist() == [6, 4]


def test_defaults_are_those_of_the_original() -> None:
    model = tiny("smdm")
    assert model.sampler_defaults == {
        "steps": 512, "gen_length": 128, "temperature": 1.0, "cfg_scale": 2.0, "remasking": "origin", "eps": 1e-5,
    }  # fmt: skip
    with pytest.warns(UserWarning, match="the canvas has 130 positions, but the model was trained on 128"):
        dlm_lens.denoise(model, [[1] * 126], gen_length=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remasking": "low_confidence"}, "'low_confidence' is none of SMDM's: origin, greedy"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"cfg_scale": -1.0}, "cfg_scale is -1.0"),
        ({"steps": 0}, "steps is 0"),
        ({"block_length": 4}, "the smdm sampler has no setting 'block_length'"),
        ({"gen_length": 0}, "gen_length is 0 and the prompt holds no mask token"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dlm_lens.denoise(tiny("smdm"), [[1, 2]], **{"gen_length": 4, **options})


def test_ids_without_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token id 65 .* has no row in the model's embedding of 65"):
        dlm_lens.denoise(tiny("smdm", num_sinks=1), [[1, 65]], gen_length=2)
