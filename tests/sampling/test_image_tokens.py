"""MMaDA's text-to-image sampling: every stored run step by step, a step in float64, and what holds of any run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.adapters import ImageLayout
from dlm_lens.sampling import ImageTokens, NonFiniteLogitsError, generate_image_tokens
from dlm_lens.sampling.noise import SharedNoise
from dlm_lens.testing import tiny
from tests.reference import forward64

GOLDEN = Path(__file__).parent.parent / "golden" / "mmada"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
SETTINGS = [setting for setting in SAMPLING["settings"] if setting["name"].startswith("t2i")]
MASK = SAMPLING["mask_token_id"]
LAYOUT = ImageLayout(text_tokens=122, codebook_size=64, mask=MASK, **SAMPLING["special_tokens"])
every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])

CODES, FIRST = 24, 64
TINY = ImageLayout(
    text_tokens=FIRST, codebook_size=CODES, mmu=50, soi=51, eoi=52, t2i=53, ipad=54, bos=55, eos=56, mask=63
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("mmada", vocab_size=96, mask_token_id=63, codebook_size=CODES)


class Replayed(SharedNoise):
    """The stored draws in place of a generator's: multinomial's belong to a build of torch."""

    def __init__(self, codes: Tensor, uniform: Tensor, start: int) -> None:
        self.codes, self.uniform, self.start, self.step = codes, uniform, start, -1

    def placed(self, values: Tensor, like: Tensor) -> Tensor:
        canvas = torch.zeros(like.shape, dtype=values.dtype)
        canvas[:, self.start : self.start + values.shape[1]] = values
        return canvas

    def tokens(self, probabilities: Tensor, evaluated: Tensor, eligible: Tensor) -> Tensor:
        self.step += 1
        return self.placed(self.codes[self.step], evaluated)[evaluated]

    def masked_positions(self, eligible: Tensor) -> Tensor:
        return self.placed(self.uniform[self.step], eligible)


def stored(setting: dict[str, Any]) -> dict[str, Tensor]:
    prefix = setting["name"] + "."
    tensors = load_file(GOLDEN / "sampling.safetensors")
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def run(setting: dict[str, Any], golden: dict[str, Tensor], **options: Any) -> ImageTokens:
    args = setting["args"]
    return generate_image_tokens(
        dlm_lens.load(GOLDEN), golden["input_ids"], layout=LAYOUT, steps=args["timesteps"], seed=setting["seed"],
        cfg_scale=args["guidance_scale"], temperature=args["temperature"], **options,
    )  # fmt: skip


def replayed(golden: dict[str, Tensor]) -> Replayed:
    return Replayed(golden["sampled_ids"], golden["uniform"], LAYOUT.image(golden["input_ids"])[0])


@every_setting
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any]) -> None:
    golden = stored(setting)
    got = run(setting, golden, noise=replayed(golden), reference_quirks=True)
    assert got.run.canvases.equal(golden["trajectory"])
    assert LAYOUT.codes(got.run.proposals[:, :, 12:28]).equal(golden["sampled_ids"])
    assert got.codes.equal(golden["result"])
    assert got.codes.tolist() == setting["result"]
    assert got.run.masked[1:].sum(-1).tolist() == setting["mask_len_per_step"]
    assert got.run.attention_mask.equal(golden["attention_mask"].bool())
    assert got.run.prompt_length == 12
    assert got.run.spans == ((12, 28),) * setting["args"]["timesteps"]


@every_setting
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="multinomial's stream belongs to a torch build"
)
def test_the_generator_is_drawn_from_in_the_original_s_order(setting: dict[str, Any]) -> None:
    golden = stored(setting)
    got = run(setting, golden, reference_quirks=True)
    assert got.run.canvases.equal(golden["trajectory"])
    assert got.codes.equal(golden["result"])


@every_setting
def test_with_the_same_draws_the_default_is_the_original_but_for_the_last_mask(setting: dict[str, Any]) -> None:
    golden = stored(setting)
    got = run(setting, golden, noise=replayed(golden))
    assert got.run.canvases[:-1].equal(golden["trajectory"][:-1])
    assert got.codes.equal(golden["result"])
    assert got.run.masks_left.sum() == 0
    assert LAYOUT.codes(got.run.tokens[:, 12:28]).equal(golden["result"])


@every_setting
def test_the_stored_prompts_are_the_layout_s(setting: dict[str, Any]) -> None:
    golden = stored(setting)
    prompt, mask = golden["input_ids"], golden["attention_mask"].bool()
    text = [row[keep][2 : -16 - 3].tolist() for row, keep in zip(prompt, mask, strict=True)]
    assert LAYOUT.generation(text, image_tokens=16, length=11).equal(prompt)
    assert LAYOUT.padding(prompt).equal(~mask)
    if "uncond_input_ids" in golden:
        other = LAYOUT.unconditional(prompt)
        assert other.equal(golden["uncond_input_ids"])
        assert LAYOUT.padding(other).equal(~golden["uncond_attention_mask"].bool())


def step64(setting: dict[str, Any], golden: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
    """Canvas behind a step and the probabilities of its codes, from the facts in the golden README alone."""
    args, network = setting["args"], dlm_lens.load(GOLDEN)
    canvas, scale = golden["trajectory"][step], args["guidance_scale"]
    logits = forward64(network, canvas, golden["attention_mask"])["logits"]
    if scale:
        other = torch.cat([golden["uncond_input_ids"][:, :11], canvas[:, 11:]], 1)
        without = forward64(network, other, golden["uncond_attention_mask"])["logits"]
        logits = (1 + scale) * logits - scale * without
    logits = logits[:, 12:28, 122 : 122 + 64]
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    weights = weights / weights.sum(-1, keepdim=True)
    temperature = args["temperature"]
    for index in range(step + 1):
        temperature *= 1 - (index + 1) / args["timesteps"]
    after, likely = canvas.clone(), torch.zeros(len(canvas), 16, dtype=torch.float64)
    for row in range(len(canvas)):
        open_ = [i for i in range(16) if canvas[row, 12 + i] == MASK]
        codes, uniform = golden["sampled_ids"][step, row].tolist(), golden["uniform"][step, row].tolist()
        scores = {}
        for i in open_:
            likely[row, i] = weights[row, i, codes[i]]
            noise = -math.log(max(-math.log(max(uniform[i], 1e-20)), 1e-20))
            scores[i] = math.log(max(float(likely[row, i]), 1e-20)) + temperature * noise
        kept = setting["mask_len_per_step"][step][row]
        for i in sorted(open_, key=lambda i: scores[i])[kept:]:
            after[row, 12 + i] = 122 + codes[i]
    return after, likely


@every_setting
def test_a_step_restated_in_float64(setting: dict[str, Any]) -> None:
    golden = stored(setting)
    got = run(setting, golden, noise=replayed(golden), reference_quirks=True).run
    for step in range(setting["args"]["timesteps"]):
        canvas, likely = step64(setting, golden, step)
        assert got.canvases[step + 1].equal(canvas)
        here, confidence = got.masked[step, :, 12:28], got.confidence[step, :, 12:28]
        torch.testing.assert_close(confidence[here].double(), likely[here], atol=1e-5, rtol=1e-4)
        # Unmasked positions outrank everything, and nothing outside the image is ranked.
        assert (confidence[~here] == torch.finfo(torch.float32).max).all()
        assert (got.confidence[step, :, :12] == -torch.inf).all()


def masks_expected(steps: int, image: int, masks: int) -> list[int]:
    found = []
    for step in range(steps):
        angle = np.float32(np.float32((step + 1) / steps) * np.float32(math.pi / 2))
        keep = int(torch.floor(image * torch.cos(torch.tensor(angle))))
        masks = 0 if step == steps - 1 else max(1, min(keep, masks - 1))
        found.append(masks)
    return found


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(1, 7),
    image=st.integers(1, 9),
    given_codes=st.integers(0, 8),
    temperature=st.sampled_from([0.0, 0.7, 8.0]),
    cfg_scale=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 99),
    texts=st.lists(st.lists(st.integers(0, 49), max_size=5), min_size=1, max_size=3),
)
def test_any_run_draws_codes_and_nothing_else(
    model: Any, steps: int, image: int, given_codes: int, temperature: float, cfg_scale: float, seed: int,
    texts: list[list[int]],
) -> None:  # fmt: skip
    prompt = TINY.generation(texts, image)
    start, stop = TINY.image(prompt)
    held = min(given_codes, image - 1)
    prompt[:, start : start + held] = TINY.tokens(list(range(held)))
    options: dict[str, Any] = {"steps": steps, "cfg_scale": cfg_scale, "temperature": temperature, "layout": TINY}
    got = generate_image_tokens(model, prompt, seed=seed, **options)
    assert got.codes.shape == (len(texts), image)
    assert ((got.codes >= 0) & (got.codes < CODES)).all()
    assert got.codes[:, :held].tolist() == [list(range(held))] * len(texts)
    assert TINY.codes(got.run.tokens[:, start:stop]).equal(got.codes)
    assert got.run.tokens[:, :start].equal(prompt[:, :start])
    assert (got.run.tokens[:, stop:] == TINY.eoi).all()
    expected = masks_expected(steps, image, image - held)
    assert got.run.masked[1:].sum(-1).tolist() == [[masks] * len(texts) for masks in expected]
    # What is written stays.
    assert (got.run.masked[1:] & ~got.run.masked[:-1]).sum() == 0
    assert got.run.counts.sum(0).tolist() == [image - held] * len(texts)
    for row, text in enumerate(texts):
        alone = prompt[row : row + 1, got.run.attention_mask[row]]
        assert alone[0, : len(text) + 4].tolist() == [TINY.t2i, TINY.bos, *text, TINY.eos, TINY.soi]
        again = generate_image_tokens(model, alone, seed=seed, **options)
        assert again.codes[0].equal(got.codes[row])
        assert again.run.canvases[:, 0].equal(got.run.canvases[:, row, got.run.attention_mask[row]])


def test_rows_have_seeds_of_their_own_and_padding_is_nothing(model: Any) -> None:
    def codes(prompt: Tensor, seed: Any) -> Tensor:
        return generate_image_tokens(model, prompt, layout=TINY, steps=4, cfg_scale=1.0, seed=seed).codes

    twice = codes(TINY.generation([[1, 2, 3]] * 2, 12), 5)
    assert twice[0].equal(twice[1])
    apart = codes(TINY.generation([[1, 2, 3]] * 2, 12, length=10), [5, 6])
    assert apart[0].equal(twice[0])
    assert not apart[1].equal(twice[0])


def forced(codes: list[int]) -> Any:
    """Logits that leave one code to every image position, and prefer text to all of them."""

    def force(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        logits = torch.full_like(logits, 50.0)
        logits[..., FIRST : FIRST + CODES] = -50.0
        for place, code in enumerate(codes):
            logits[:, -1 - len(codes) + place, FIRST + code] = 0.0
        return logits

    return force


@pytest.mark.parametrize("reference_quirks", [False, True])
def test_only_codes_are_drawn_however_likely_text_is(model: Any, reference_quirks: bool) -> None:
    wanted = [0, CODES - 1, 7, 3, 3]
    options: dict[str, Any] = {"layout": TINY, "steps": 3, "reference_quirks": reference_quirks}
    got = generate_image_tokens(model, TINY.generation([[1], [2, 3]], 5), on_logits=forced(wanted), **options)
    assert got.codes.tolist() == [wanted, wanted]


@pytest.mark.parametrize("reference_quirks", [False, True])
def test_codes_are_drawn_by_their_probability(model: Any, reference_quirks: bool) -> None:
    def weigh(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        logits = torch.full_like(logits, -torch.inf)
        logits[..., FIRST + 4], logits[..., FIRST + 9] = math.log(0.7), math.log(0.3)
        return logits

    with pytest.warns(UserWarning, match="the canvas has 2006 positions"):
        got = generate_image_tokens(
            model, TINY.generation([[1]], 2000), layout=TINY, steps=1, on_logits=weigh,
            reference_quirks=reference_quirks,
        )  # fmt: skip
    assert set(got.codes.unique().tolist()) == {4, 9}
    # Five standard deviations of a binomial of 2000.
    assert abs((got.codes == 4).double().mean() - 0.7) < 5 * math.sqrt(0.7 * 0.3 / 2000)


def test_guidance_pushes_away_from_the_other_text(model: Any) -> None:
    prompt = TINY.generation([[1, 2, 3]], 6)

    def confidence(**options: Any) -> Tensor:
        return generate_image_tokens(model, prompt, layout=TINY, steps=1, **options).run.confidence

    # Pushed away from itself, a prompt stays where it is: c + s (c - c).
    torch.testing.assert_close(confidence(cfg_scale=2.0, unconditional=prompt), confidence(), atol=1e-5, rtol=1e-4)
    empty = confidence(cfg_scale=2.0)
    assert empty.equal(confidence(cfg_scale=2.0, unconditional=TINY.unconditional(prompt)))
    other = confidence(cfg_scale=2.0, unconditional=TINY.generation([[9]], 6, length=6))
    assert (empty - other)[empty.isfinite()].abs().max() > 1e-3


def test_equal_scores_are_written_from_the_left_or_with_quirks_all_at_once(model: Any) -> None:
    def even(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        return torch.zeros_like(logits)

    prompt = TINY.generation([[1]], 6)
    options: dict[str, Any] = {"layout": TINY, "steps": 3, "temperature": 0.0, "on_logits": even}
    got = generate_image_tokens(model, prompt, **options).run
    # Behind the second step 6 cos(pi/3) is just below 3 in float32, as in the original: 2 are left.
    assert got.step_of[0, 5:11].tolist() == [0, 1, 1, 1, 2, 2]
    theirs = generate_image_tokens(model, prompt, reference_quirks=True, **options).run
    assert theirs.step_of[0, 5:11].tolist() == [0] * 6


def test_a_high_temperature_masks_what_was_written_only_with_quirks(model: Any) -> None:
    prompt = TINY.generation([[1]], 40)
    options: dict[str, Any] = {"layout": TINY, "steps": 5, "temperature": 1000.0}
    for quirks in (False, True):
        masked = generate_image_tokens(model, prompt, reference_quirks=quirks, **options).run.masked
        assert bool((masked[1:] & ~masked[:-1]).any()) == quirks
        assert masked[1:-1].sum(-1).tolist() == [[m] for m in masks_expected(5, 40, 40)[:-1]]


def test_masks_in_the_text_stay_and_edits_are_caught_up_with(model: Any) -> None:
    prompt = TINY.generation([[1, 63, 2]], 6)
    start, stop = TINY.image(prompt)

    def mask_again(step: int, canvas: Tensor) -> Tensor:
        if step == 2:
            canvas[:, start:stop] = 63
        return canvas

    got = generate_image_tokens(model, prompt, layout=TINY, steps=4, on_canvas=mask_again)
    assert got.run.tokens[0, :start].equal(prompt[0, :start])
    assert got.run.masked[2].sum() == 6
    assert got.run.masks_left.tolist() == [0]
    assert (got.codes >= 0).all()

    def spoil(step: int, canvas: Tensor) -> Tensor:
        canvas[:, start + 1] = 8
        return canvas

    got = generate_image_tokens(model, prompt, layout=TINY, steps=4, on_canvas=spoil)
    assert (got.codes[0] < 0).tolist() == [False, True, False, False, False, False]


def test_codes_that_are_all_forbidden_name_the_step(model: Any) -> None:
    def forbid(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        if step == 2:
            logits[..., FIRST : FIRST + CODES] = -torch.inf
        return logits

    with pytest.raises(NonFiniteLogitsError, match=r"step 2: the logits of row 0, position \d+") as caught:
        generate_image_tokens(model, TINY.generation([[1]], 6), layout=TINY, steps=4, on_logits=forbid)
    assert caught.value.partial.steps == 2


def test_the_record_says_how_it_was_drawn(model: Any) -> None:
    got = generate_image_tokens(model, TINY.generation([[1], [2]], 4), layout=TINY, steps=2, seed=[3, 4])
    assert got.run.settings == {
        "sampler": "text_to_image", "steps": 2, "cfg_scale": 0.0, "temperature": 1.0, "seeds": (3, 4),
        "reference_quirks": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"ImageTokens.codes has shape \(2, 3\), but the run has \(2, 4\)"):
        ImageTokens(got.codes[:, :3], got.run)


def test_the_layout_is_the_model_s_own_by_default() -> None:
    model = tiny("mmada", vocab_size=90, mask_token_id=63, codebook_size=8)
    model.tokenizer = tiny("mmada").tokenizer  # 64 words
    layout = ImageLayout.of(model)
    assert (layout.text_tokens, layout.codebook_size, layout.eos, layout.mask) == (64, 8, 62, 63)
    small = {name: getattr(TINY, name) for name in ("mmu", "soi", "eoi", "t2i", "ipad", "bos", "eos")}
    prompt = ImageLayout(64, 8, mask=63, **small).generation([[1]], 4)
    with pytest.raises(ValueError, match=r"prompt 0 does not end with \[soi\] image \[eoi\] \(126084"):
        generate_image_tokens(model, prompt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be 0"),
        ({"cfg_scale": -0.5}, "cfg_scale is -0.5; it must be 0"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ({"prompt": [1, 2, 3]}, r"prompt 0 does not end with \[soi\] image \[eoi\] \(51, image tokens, 52\)"),
        ({"prompt": "w1 w2"}, r"prompt 0 does not end with \[soi\]"),
        ({"prompt": [[53, 55, 56, 51, 70, 71, 52]]}, "holds the model's mask token 63: nothing to draw"),
        ({"prompt": [[56, 51, 63, 52]], "cfg_scale": 1.0}, r"1 positions before \[soi\] \(51\) have no room"),
        (
            {"unconditional": [[53, 55, 56, 51, 63, 52]], "cfg_scale": 1.0},
            r"the unconditional prompts have shape \[1, 6\], the prompts \[1, 11\]",
        ),
        (
            {"layout": ImageLayout(64, 64, soi=51, eoi=52)},
            "image tokens reach up to 127, but the model has 96 tokens; give a layout",
        ),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(model: Any, change: dict[str, Any], message: str) -> None:
    options = {"prompt": TINY.generation([[1]], 5), "layout": TINY, "steps": 2, **change}
    with pytest.raises(ValueError, match=message):
        generate_image_tokens(model, options.pop("prompt"), **options)


def test_other_families_and_several_reference_streams_are_refused(model: Any) -> None:
    prompt = TINY.generation([[1], [2]], 4)
    with pytest.raises(ValueError, match="LLaDAModelLM draws no images; load an MMaDA"):
        generate_image_tokens(tiny("llada"), prompt, layout=TINY)
    with pytest.raises(ValueError, match="one random stream for the batch; give a single seed"):
        generate_image_tokens(model, prompt, layout=TINY, seed=[1, 2], reference_quirks=True)
