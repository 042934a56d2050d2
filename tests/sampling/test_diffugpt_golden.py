"""Every stored trajectory of `generate_samples`, token for token, with both networks; the default."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.sampling.noise import SharedNoise
from dlm_lens.sampling.samplers.diffugpt import DiffuGPTPropose, DiffuGPTSettings
from dlm_lens.sampling.settings import SpecialIds
from dlm_lens.testing import tiny

GOLDEN = Path(__file__).parent.parent / "golden"
SAMPLING = {name: json.loads((GOLDEN / name / "sampling.json").read_text()) for name in ("diffugpt", "diffullama")}
SETTINGS = [(name, setting) for name, facts in SAMPLING.items() for setting in facts["settings"]]
MASK = SAMPLING["diffugpt"]["mask_token_id"]
MODELS: dict[str, Any] = {}


def model_of(name: str) -> Any:
    if name not in MODELS:
        MODELS[name] = dlm_lens.load(GOLDEN / name, family="diffugpt", mask_token_id=MASK)
    return MODELS[name]


def golden_of(name: str, setting: dict[str, Any]) -> dict[str, Tensor]:
    stored, prefix = load_file(GOLDEN / name / "sampling.safetensors"), setting["name"] + "."
    return {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}


def run(name: str, setting: dict[str, Any], **options: Any) -> tuple[dlm_lens.DenoisingRun, dict[str, Tensor]]:
    """The run of a stored setting. What is to be written, a suffix included, is in the prompt as mask tokens."""
    golden, given = golden_of(name, setting), setting["args"]
    greedy = setting["kind"] == "argmax"  # the original divides by the temperature, which was 1 there
    arguments = {
        "steps": given["diffusion_steps"],
        "temperature": 0.0 if greedy else given["logits_temp"],
        "top_p": given["topp_temp"],
    }
    prompt = golden["input_ids"].masked_fill(golden["src_mask"] == 0, MASK)
    found = dlm_lens.denoise(model_of(name), prompt, gen_length=0, seed=setting["seed"], **arguments, **options)
    return found, golden


def drawn_as(stored: Tensor) -> Callable[..., Tensor]:
    """`tokens_among` of the noise, as the original drew them: `stored` has the token of output i - 1 at i."""
    steps = iter(stored)

    def tokens_among(self: Any, probabilities: Tensor, evaluated: Tensor, drawn: Tensor) -> Tensor:
        assert drawn.all()
        return torch.nn.functional.pad(next(steps)[:, 1:], (0, 1))[evaluated]

    return tokens_among


def compare(found: dlm_lens.DenoisingRun, golden: dict[str, Tensor], setting: dict[str, Any]) -> None:
    assert found.canvases.equal(golden["trajectory"])
    assert found.counts.tolist() == setting["transferred_per_step"]
    assert found.tokens[:, 1:].tolist() == setting["result"]
    for step, (ours, theirs) in enumerate(zip(found.proposals, golden["x0"], strict=True)):
        opened = found.masked[step]
        assert ours[opened].equal(theirs[opened])


@pytest.mark.parametrize(
    ("name", "setting"), SETTINGS, ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_reference_quirks_reproduce_the_original(name: str, setting: dict[str, Any]) -> None:
    if setting["kind"] == "stochastic" and not torch.__version__.startswith("2.13"):
        pytest.skip("torch.multinomial's stream belongs to a torch build; the golden's is 2.13")
    found, golden = run(name, setting, reference_quirks=True)
    compare(found, golden, setting)


@pytest.mark.parametrize("name", SAMPLING)
def test_injected_draws_reproduce_the_original(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the random stream: with the stored tokens and numbers, which another torch would not draw."""
    for setting in SAMPLING[name]["settings"]:
        if setting["kind"] == "stochastic":
            golden = golden_of(name, setting)
            rand = iter(golden.get("rand", []))
            with monkeypatch.context() as patch:
                patch.setattr(SharedNoise, "tokens_among", drawn_as(golden["x0"]))
                patch.setattr(SharedNoise, "positions", lambda *_, rand=rand: next(rand))
                compare(run(name, setting, reference_quirks=True)[0], golden, setting)


@pytest.mark.parametrize(
    ("name", "setting"), SETTINGS, ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_the_default_leaves_no_mask_and_touches_nothing_else(name: str, setting: dict[str, Any]) -> None:
    found, golden = run(name, setting)
    assert not (found.tokens == MASK).any()
    assert (found.unmasked.sum(0) == found.masked[0]).all()
    given = golden["src_mask"] == 1
    assert found.tokens[given].equal(golden["input_ids"][given])


@pytest.mark.parametrize("name", SAMPLING)
def test_a_greedy_step_alone_is_the_original_without_quirks(name: str) -> None:
    """One step at temperature 0 draws nothing and writes the argmax of one pass."""
    prompt = [[150, 4, 9, *[MASK] * 6]]
    found = dlm_lens.denoise(model_of(name), prompt, gen_length=0, steps=1, temperature=0.0, top_p=None)
    logits = model_of(name)(input_ids=torch.tensor(prompt)).logits
    logits[..., MASK] = -torch.inf
    assert found.tokens[0, 3:].equal(logits[0, 2:-1].argmax(-1))


@pytest.mark.parametrize("model_type", SAMPLING)
@pytest.mark.parametrize("temperature", [0.0, 0.95])
def test_a_row_is_what_it_is_alone(model_type: str, temperature: float) -> None:
    model = tiny("diffugpt", model_type=model_type)
    options: dict[str, Any] = {"gen_length": 9, "steps": 5, "temperature": temperature, "seed": 5}
    prompts = [[1, 2, 3, 4], [5, 63, 7], [8]]
    together = dlm_lens.denoise(model, prompts, **options)
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(prompts):
        alone = dlm_lens.denoise(model, [prompt], **options)
        kept = together.attention_mask[row]
        assert together.canvases[:, row, kept].equal(alone.canvases[:, 0])


def test_every_position_is_decided_at_every_step_with_the_same_probability() -> None:
    """P(decided at step k) = 1 / T for each of T steps."""
    model, rows = tiny("diffugpt"), 1500
    run = dlm_lens.denoise(model, [[1, 2]] * rows, gen_length=2, steps=4, seed=list(range(rows)))
    share = run.unmasked[:, :, 2:].float().mean((1, 2))
    # Standard error of a share of 3,000 draws of which two are of one row: at most 0.011.
    torch.testing.assert_close(share, torch.full((4,), 0.25), atol=0.04, rtol=0)


def test_tokens_are_drawn_from_the_nucleus() -> None:
    model, rows = tiny("diffugpt"), 1500
    options: dict[str, Any] = {"gen_length": 1, "steps": 1, "temperature": 0.7, "top_p": 0.6}
    run = dlm_lens.denoise(model, [[1, 2]] * rows, seed=list(range(rows)), **options)
    logits = model(input_ids=torch.tensor([[1, 2, 63]])).logits[0, 1].detach().double() / 0.7
    logits[63] = -torch.inf
    order = sorted(range(64), key=lambda token: -float(logits[token]))
    wanted, total = torch.zeros(64, dtype=torch.float64), 0.0
    for token in order:
        if total > 0.6:
            break
        wanted[token] = logits.softmax(-1)[token]
        total += float(wanted[token])
    observed = torch.bincount(run.tokens[:, 2], minlength=64).double() / rows
    assert (observed[wanted == 0] == 0).all()
    # Standard error of a share of 1,500 draws: at most 0.013.
    torch.testing.assert_close(observed, wanted / wanted.sum(), atol=0.05, rtol=0)


def test_an_empty_prompt_is_the_start_of_a_text() -> None:
    model = model_of("diffugpt")
    assert model.config.bos_token_id == 150
    found = dlm_lens.denoise(model, [[]], gen_length=6, steps=3, seed=0)
    assert found.tokens.equal(dlm_lens.denoise(model, [[150]], gen_length=6, steps=3, seed=0).tokens)


def test_names_of_the_authors_settings_are_told() -> None:
    for name, ours in (("diffusion_steps", "steps"), ("logits_temp", "temperature"), ("topp_temp", "top_p")):
        with pytest.raises(ValueError, match=f"has no setting {name!r}.*{ours}"):
            dlm_lens.denoise(tiny("diffugpt"), [[1, 2]], **{name: 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"steps": 0}, "steps is 0"),
        ({"remasking": "entropy"}, "the diffugpt sampler has no setting .remasking."),
        ({"gen_length": 0}, "gen_length is 0 and the prompt holds no mask token"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dlm_lens.denoise(tiny("diffugpt"), [[1, 2]], **{"gen_length": 4, **options})


def test_with_quirks_the_draws_in_bfloat16_are_those_of_torch_distributions() -> None:
    """The authors' code gives Categorical the log-softmax of the logits; output i - 1 predicts position i."""
    logits = 3 * torch.randn(2000, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    outputs = torch.cat([logits[1:], logits[:1]])
    torch.manual_seed(3)
    theirs = torch.distributions.Categorical(logits=outputs.log_softmax(-1)).sample()
    torch.manual_seed(3)
    once = torch.multinomial(outputs.softmax(-1), 1).squeeze(-1)
    settings, every = DiffuGPTSettings(4, 2000, temperature=1.0, top_p=None), torch.ones(1, 2000, dtype=torch.bool)
    propose = DiffuGPTPropose(settings, SharedNoise(3), SpecialIds(mask=63), True)
    found = propose(torch.full((1, 2000), 63), logits, every, every).tokens[0]
    assert found[1:].equal(theirs[:-1])
    assert not once.equal(theirs)
