"""Every stored trajectory of Dream's sampler, token for token, also of CoDA, whose code has it too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.sampling.noise import SharedNoise
from dlm_lens.sampling.samplers.dream import DreamPropose, DreamSampler, DreamSettings
from dlm_lens.sampling.settings import SpecialIds
from dlm_lens.testing import tiny
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden"
SAMPLING = {family: json.loads((GOLDEN / family / "sampling.json").read_text()) for family in ("dream", "coda")}
SETTINGS = [setting | {"family": family} for family, stored in SAMPLING.items() for setting in stored["settings"]]
MASK = SAMPLING["dream"]["mask_token_id"]
assert SAMPLING["coda"]["mask_token_id"] == MASK


def name_of(setting: dict[str, Any]) -> str:
    return f"{setting['family']}-{setting['name']}"


def run(setting: dict[str, Any], **options: Any) -> tuple[dlm_lens.DenoisingRun, dict[str, Tensor]]:
    path = GOLDEN / setting["family"]
    model = loaded(path)
    prefix = setting["name"] + "."
    stored = load_file(path / "sampling.safetensors")
    golden = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    arguments = dict(setting["args"])
    arguments |= {"remasking": arguments.pop("alg"), "gen_length": arguments.pop("max_new_tokens")}
    if suffix := setting.get("tokens_hook_fixed_suffix_row0"):

        def plant(step: int, canvas: Tensor) -> Tensor:
            canvas[0, -len(suffix) :] = torch.tensor(suffix)
            return canvas

        options["on_canvas"] = plant
    if banned := setting.get("logits_hook_banned_token"):
        options["on_logits"] = lambda _s, _c, logits: logits.index_fill(-1, torch.tensor([banned]), -1e4)
    seed, mask = setting["seed"] or 0, golden.get("attention_mask")
    return dlm_lens.denoise(model, golden["prompt"], mask, seed=seed, **arguments, **options), golden


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any]) -> None:
    if setting["kind"] == "stochastic_inject" and not torch.__version__.startswith("2.13"):
        pytest.skip("torch.multinomial's stream belongs to a torch build; the golden's is 2.13")
    got, golden = run(setting, reference_quirks=True)
    assert got.canvases.equal(golden["trajectory"])
    assert got.counts.tolist() == setting["transferred_per_step"]
    finite = golden["confidence"].isfinite()
    assert got.confidence.isfinite().equal(finite)
    torch.testing.assert_close(got.confidence[finite], golden["confidence"][finite], atol=1e-5, rtol=1e-5)
    proposed = golden["x0"] >= 0
    assert got.proposals[proposed].equal(golden["x0"][proposed])


PLAIN = [
    s for s in SETTINGS if s["kind"] == "deterministic" and s["name"] != "maskgit_more_steps"
]  # there the original writes [MASK] itself


@pytest.mark.parametrize("setting", PLAIN, ids=name_of)
def test_without_noise_the_default_is_the_original(setting: dict[str, Any]) -> None:
    got, golden = run(setting)
    assert got.canvases.equal(golden["trajectory"])


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_the_default_leaves_no_mask_and_touches_nothing_else(setting: dict[str, Any]) -> None:
    got, golden = run(setting)
    assert not (got.tokens == MASK).any()
    if "tokens_hook_fixed_suffix_row0" not in setting:
        assert (got.unmasked.sum(0) == got.masked[0]).all()
    kept = golden["prompt"] != MASK
    assert got.tokens[:, : kept.shape[1]][kept].equal(golden["prompt"][kept])


@pytest.mark.parametrize("remasking", ["origin", "maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("alg_temp", [None, 0.3])
def test_a_row_is_what_it_is_alone(remasking: str, temperature: float, alg_temp: float | None) -> None:
    model = tiny("sink_qwen", sampler="dream", num_sinks=1)
    options: dict[str, Any] = {
        "gen_length": 9, "steps": 5, "remasking": remasking, "temperature": temperature, "alg_temp": alg_temp,
        "top_p": 0.9, "seed": 5,
    }  # fmt: skip
    prompts = [[1, 2, 3, 4], [5, 63, 7], [8]]
    together = dlm_lens.denoise(model, prompts, **options)
    assert together.settings["sampler"] == "dream"
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(prompts):
        alone = dlm_lens.denoise(model, [prompt], **options)
        kept = together.attention_mask[row]
        assert together.canvases[:, row, kept].equal(alone.canvases[:, 0])


def test_drawing_positions_follows_the_confidence() -> None:
    """With one position a step, the first draw has probability softmax(confidence / alg_temp)."""
    model, rows = tiny("dream"), 1200
    options: dict[str, Any] = {"gen_length": 4, "steps": 4, "remasking": "maskgit_plus", "eps": 1e-3}
    greedy = dlm_lens.denoise(model, [[1, 2]], **options | {"steps": 1})
    expected = (greedy.confidence[0, 0, 2:] / 0.05).softmax(-1)
    run = dlm_lens.denoise(
        model, [[1, 2]] * rows, alg_temp=0.05, seed=list(range(rows)), **options | {"steps": 2, "eps": 0.4}
    )
    assert run.counts[0].unique().tolist() == [1]
    observed = run.unmasked[0, :, 2:].float().mean(0)
    # Standard error of a share of 1,200 draws: at most 0.015.
    torch.testing.assert_close(observed, expected, atol=0.05, rtol=0)
    assert expected.max() - expected.min() > 0.15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remasking": "low_confidence"}, "none of Dream's: origin, maskgit_plus, topk_margin, entropy"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"eps": 1.0}, "eps is 1.0"),
        ({"alg_temp": -1.0}, "alg_temp is -1.0"),
        ({"steps": 0}, "steps is 0"),
        ({"block_length": 5}, "does not divide into blocks of block_length 5"),
        ({"cfg_scale": 1.0}, "the dream sampler has no setting .cfg_scale."),
        ({"threshold": 0.5, "remasking": "entropy"}, "they belong to .confidence_threshold."),
        ({"cache": "suffix"}, "cache is .suffix."),
        ({"gen_length": 0}, "gen_length is 0 and the prompt holds no mask token"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dlm_lens.denoise(tiny("dream"), [[1, 2]], **{"gen_length": 4, **options})


def planted_logits(rows: int) -> Tensor:
    """[position, d_vocab]: [MASK] is by far the likeliest everywhere, then w7, w20, w3."""
    logits = torch.linspace(-1, 0, 64).repeat(rows, 1)
    logits[:, MASK_OF_TINY], logits[:, 7], logits[:, 20], logits[:, 3] = 12.0, 4.0, 3.5, 3.0
    return logits


MASK_OF_TINY = 63


@pytest.mark.parametrize("remasking", ["origin", "maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_k": 1}, [7]), ({"top_k": 2}, [7, 20]), ({"top_p": 0.2}, [7]), ({"top_p": 0.6, "top_k": 2}, [7, 20])],
)
def test_a_filter_that_would_keep_the_mask_alone_keeps_other_tokens(
    remasking: str, temperature: float, filters: dict[str, Any], kept: list[int]
) -> None:
    """The reference writes [MASK]; a filter before the exclusion left probability nowhere, and wrote token 0."""
    model = tiny("dream")
    options: dict[str, Any] = {
        "gen_length": 6, "steps": 3, "remasking": remasking, "temperature": temperature, "seed": 4, **filters,
        "on_logits": lambda _step, _canvas, logits: planted_logits(logits.shape[1])[None].expand_as(logits),
    }  # fmt: skip
    run = dlm_lens.denoise(model, [[1, 2]] * 20, **options | {"seed": list(range(20))})
    assert {*run.tokens[:, 2:].flatten().tolist()} <= {*kept}
    assert temperature == 0 or {*run.tokens[:, 2:].flatten().tolist()} == {*kept}
    if remasking == "maskgit_plus" and temperature == 0:
        # By hand: the share of the likeliest among those that the filter keeps.
        values = torch.tensor([4.0, 3.5, 3.0, *torch.linspace(-1, 0, 64).tolist()][: len(kept)]).double()
        expected = float(values.softmax(-1)[0])
        assert run.confidence[run.unmasked].tolist() == pytest.approx(
            [expected] * int(run.unmasked.sum()), rel=1e-6
        )
    theirs = dlm_lens.denoise(model, [[1, 2]], reference_quirks=True, **options)
    assert (theirs.tokens[:, 2:] == MASK_OF_TINY).any()


def test_reference_quirks_take_the_likeliest_tokens_where_torch_refuses_the_probabilities() -> None:
    """As the authors' `sample_tokens`, which catches the exception of Categorical and goes on with the maximum."""
    settings = DreamSettings(steps=1, gen_length=12, temperature=0.5, remasking="maskgit_plus")
    canvas, everywhere = torch.zeros(1, 12, dtype=torch.long), torch.ones(1, 12, dtype=torch.bool)
    refused = 0
    for seed in range(400):
        logits = 3 * torch.randn(12, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        likely = (logits / 0.5).softmax(-1)
        torch.manual_seed(seed)
        try:
            expected = torch.distributions.Categorical(probs=likely, validate_args=True).sample()
        except ValueError:
            refused, expected = refused + 1, likely.argmax(-1)
        propose = DreamPropose(settings, SharedNoise(seed), SpecialIds(63), reference_quirks=True)
        assert propose(canvas, logits, everywhere, everywhere).tokens[0].equal(expected)
    assert 10 < refused < 390


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.6}, {"top_k": 2}], ids=str)
def test_the_entropy_of_half_precision_is_a_number(filters: dict[str, Any], dtype: torch.dtype) -> None:
    """In float16 1e-10 is 0, and tokens without probability made every confidence NaN."""
    settings = DreamSettings(steps=1, gen_length=12, remasking="entropy", **filters)
    canvas, everywhere = torch.zeros(1, 12, dtype=torch.long), torch.ones(1, 12, dtype=torch.bool)
    logits = (12 * torch.randn(12, 64, generator=torch.Generator().manual_seed(1))).to(dtype)
    propose = DreamPropose(settings, SharedNoise(0), SpecialIds(63), reference_quirks=False)
    found, wanted = (propose(canvas, one, everywhere, everywhere) for one in (logits, logits.double()))
    assert found.tokens.equal(wanted.tokens)
    # The probabilities are of half precision: 2^-9 of each, times logarithms of up to 20.
    torch.testing.assert_close(found.confidence.double(), wanted.confidence.double(), atol=0.02, rtol=0.02)


def test_the_last_step_of_the_reference_writes_the_average_of_the_rows_masks() -> None:
    """`int(num_mask_token)` of generation_utils.py: 4 masks in 2 rows are 2 each, and the first row keeps one."""
    model = tiny("dream")
    mask = model.config.mask_token_id
    prompts = [[5, mask, mask, mask, 9], [6, 7, 8, mask, 3]]
    settings: dict[str, Any] = {"gen_length": 0, "steps": 1, "remasking": "maskgit_plus"}
    theirs = dlm_lens.denoise(model, prompts, reference_quirks=True, **settings)
    assert theirs.counts.tolist() == [[2, 1]]
    assert theirs.masks_left.tolist() == [1, 0]
    assert dlm_lens.denoise(model, prompts, **settings).masks_left.tolist() == [0, 0]


def test_alg_temp_draws_from_the_softmax_in_the_dtype_of_the_logits() -> None:
    """As in the authors' code, whose `full_confidence` has that dtype; float32 gives other positions at times."""
    settings = DreamSettings(steps=1, gen_length=64, remasking="maskgit_plus", alg_temp=0.5)
    ids, other = SpecialIds(mask=15, eos=None, eot=None), 0
    where = torch.ones(1, 64, dtype=torch.bool)
    for seed in range(100):
        logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        sampler = DreamSampler(settings, SharedNoise(seed), ids, reference_quirks=True)
        confidence = sampler.propose(torch.full((1, 64), 15), logits, where, where).confidence
        chosen = sampler.select(confidence, where, torch.tensor([32]))
        drawn = []
        for dtype in (torch.bfloat16, torch.float32):
            sure = logits.softmax(-1).amax(-1).to(dtype)[None]
            weights = torch.softmax(sure / 0.5, -1)
            drawn.append(torch.multinomial(weights, 32, generator=torch.Generator().manual_seed(seed)))
        assert chosen.nonzero()[:, 1].tolist() == sorted(drawn[0][0].tolist())
        other += sorted(drawn[0][0].tolist()) != sorted(drawn[1][0].tolist())
    assert other > 0
