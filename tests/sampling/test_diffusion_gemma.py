"""DiffusionGemma's sampler against transformers' own `generate`, in one process; rows, several canvases."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

import dlm_lens as dl
from dlm_lens.testing import tiny

CALM = {"t_min": 0.4, "t_max": 0.8, "entropy_bound": 2.0, "stability_threshold": 2, "confidence_threshold": 0.5}
SETTINGS: list[dict[str, Any]] = [
    CALM,
    {**CALM, "entropy_bound": 0.1, "stability_threshold": 1, "confidence_threshold": 0.005},
    {**CALM, "entropy_bound": 30.0, "stability_threshold": 0, "confidence_threshold": 3.2},
    {**CALM, "t_max": 2.0, "stability_threshold": 1, "confidence_threshold": 3.0},
]


def exact(**config: Any) -> Any:
    """A tiny model in float64, where rounding decides no token; the fused experts have no float64."""
    model = tiny("diffusion_gemma", **config).double()
    model.config._experts_implementation = model.config.text_config._experts_implementation = "eager"
    return model


def prompts(rows: int = 2, positions: int = 9) -> Tensor:
    return torch.randint(0, 60, (rows, positions), generator=torch.Generator().manual_seed(5))


def theirs(model: Any, ids: Tensor, mask: Tensor, seed: int, eos: Any = None, **given: Any) -> Tensor:
    """What transformers' own `generate` writes, from the global generator."""
    settings = {**given, "sampler_config": EntropyBoundSamplerConfig(entropy_bound=given.pop("entropy_bound"))}
    settings.pop("entropy_bound")
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Tensor = model.generate(
            input_ids=ids,
            attention_mask=mask,
            eos_token_id=model.config.eos_token_id if eos is None else eos,
            pad_token_id=model.config.pad_token_id,
            disable_compile=True,
            **settings,
        ).sequences
    return found


def ours(model: Any, ids: Tensor, mask: Tensor, seed: int, **given: Any) -> Any:
    names = {"max_new_tokens": "gen_length", "max_denoising_steps": "steps_per_block"}
    renamed = {names.get(name, name): value for name, value in given.items()}
    return dl.denoise(model, ids, mask, seed=seed, reference_quirks=True, **renamed)


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_token_for_token_with_generate(settings: dict[str, Any]) -> None:
    """Batches with padding, several canvases, beyond the window of the sliding layers, ends of the text."""
    # As in the config of transformers' own tests: images would see both ways, text does not.
    model, ids = exact(use_bidirectional_attention="vision"), prompts()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    early = 0
    for seed in range(3):
        given = {**settings, "max_new_tokens": 24, "max_denoising_steps": 5}
        expected, run = theirs(model, ids, mask, seed, **given), ours(model, ids, mask, seed, **given)
        assert torch.equal(run.tokens, expected)
        early += run.steps < 15
    if settings["stability_threshold"] == 0:
        assert early  # this case has canvases that end before their last step


@pytest.mark.long
def test_rows_that_end_are_padded_and_the_run_ends_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = exact(), prompts()
    mask = torch.ones_like(ids)
    seen = set()
    for seed in range(6):
        # Many ids that end the text: rows end in the first canvas, or in a later one.
        ends = list(range(0, 60, 6))
        monkeypatch.setattr(model.config, "eos_token_id", ends)
        given = {**CALM, "max_new_tokens": 24, "max_denoising_steps": 4}
        expected = theirs(model, ids, mask, seed, eos=ends, **given)
        run = ours(model, ids, mask, seed, **given)
        assert torch.equal(run.tokens, expected)
        answer = run.tokens[:, 9:]
        for row in answer:
            at = torch.isin(row, torch.tensor(ends)).nonzero()
            if len(at):
                assert bool((row[int(at[0]) + 1 :] == model.config.pad_token_id).all())
        seen.add(tuple(answer.shape))
    assert len(seen) > 1  # runs of one, two or three canvases


@pytest.mark.long
def test_a_static_cache_inside_the_window_changes_nothing() -> None:
    model, ids = exact(sliding_window=64), prompts()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for seed in range(3):
        given = {**CALM, "max_new_tokens": 16, "max_denoising_steps": 3}
        expected = theirs(model, ids, mask, seed, cache_implementation="static", **given)
        assert torch.equal(ours(model, ids, mask, seed, **given).tokens, expected)


@pytest.mark.long
@pytest.mark.parametrize("ends", [[62], list(range(0, 60, 8))])
def test_a_row_is_what_it_is_alone(ends: list[int]) -> None:
    """Also where rows end in different canvases: the rest of one that has ended is padding, and decided."""
    model, ids = tiny("diffusion_gemma", eos_token_id=ends), prompts(3, 11)
    given = {**CALM, "gen_length": 24, "steps_per_block": 5, "confidence_threshold": 3.0}
    skips = (0, 4, 9)
    alone = [dl.denoise(model, ids[i : i + 1, skip:], seed=7 + i, **given) for i, skip in enumerate(skips)]
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :9] = 0
    batch = dl.denoise(model, ids, mask, seed=[7, 8, 9], **given)
    for row, (one, skip) in enumerate(zip(alone, skips, strict=True)):
        length = one.tokens.shape[1]
        assert torch.equal(batch.tokens[row, skip : skip + length], one.tokens[0])
        assert bool((batch.tokens[row, skip + length :] == model.config.pad_token_id).all())
        assert not bool(batch.open[-1, row].any())
    lengths = {one.tokens.shape[1] - 11 + skip for one, skip in zip(alone, skips, strict=True)}
    assert (len(lengths) > 1) == (len(ends) > 1)


def test_open_positions_hold_random_tokens_and_accepted_ones_what_was_drawn() -> None:
    model = tiny("diffusion_gemma")
    given = {**CALM, "gen_length": 16, "steps_per_block": 6, "stability_threshold": None}
    run = dl.denoise(model, prompts(2), seed=[1, 2], **given)
    assert run.steps == 12
    assert run.spans == ((9, 17),) * 6 + ((17, 25),) * 6
    assert bool(run.masked[0, :, 9:].all())
    assert not bool(run.masked[-1].any())
    for step in range(run.steps):
        taken = run.unmasked[step]
        after = run.canvases[step + 1]
        assert torch.equal(after[taken], run.proposals[step][taken])
        assert not bool((run.masked[step + 1] & taken).any())
        # An accepted token stays; what is neither accepted nor open did not change.
        quiet = ~run.masked[step + 1] & ~taken & ~run.revised[step]
        assert torch.equal(after[quiet], run.canvases[step][quiet])
    # The second canvas is open, without tokens, while the first is denoised.
    assert bool((run.canvases[:6, :, 17:] == model.config.pad_token_id).all())
    assert bool(run.masked[:6, :, 17:].all())


def test_bad_input_is_refused_in_a_sentence() -> None:
    model = tiny("diffusion_gemma")
    for given, message in (
        ({"steps_per_block": 0}, "steps_per_block is 0"),
        ({"t_min": 0.9}, "t_min=0.9 and t_max=0.8"),
        ({"entropy_bound": -1.0}, "entropy_bound is -1.0"),
        ({"use_cache": False}, "no setting 'use_cache'"),
        ({"mask_token_id": 3}, "no setting 'mask_token_id'"),
    ):
        with pytest.raises(ValueError, match=message):
            dl.denoise(model, "w1 w2", gen_length=8, **given)
    with pytest.warns(UserWarning, match="trained with blocks of 8"):
        dl.denoise(model, "w1 w2", gen_length=4, block_length=4, steps_per_block=2)


def test_images_are_refused_in_a_sentence() -> None:
    model: Any = tiny("diffusion_gemma")
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{"role": "user", "content": [{"type": "image", "url": "cat.png"}, {"type": "text", "text": "w5"}]}]
    with pytest.raises(ValueError, match="prompt 0 holds a part of type 'image'; runs read text alone"):
        dl.denoise(model, chat, gen_length=8)
    with pytest.raises(ValueError, match="the prompt holds 'pixel_values'; runs read text alone"):
        dl.denoise(model, {"input_ids": [[1, 2]], "pixel_values": torch.rand(1, 9, 12)}, gen_length=8)


@pytest.mark.long
def test_a_static_cache_beyond_the_window_is_another_network_in_transformers_itself() -> None:
    """At the first step, on the same canvas, its logits are not those of its dynamic cache: it is no reference."""
    ids = prompts()
    for window, same in ((6, False), (64, True)):
        model, kept = tiny("diffusion_gemma", sliding_window=window), list[Tensor]()
        handle = model.lm_head.register_forward_hook(lambda _m, _i, out, kept=kept: kept.append(out))
        for cache in (None, "static"):
            given = {**CALM, "max_new_tokens": 8, "max_denoising_steps": 1}
            theirs(model, ids, torch.ones_like(ids), 0, cache_implementation=cache, **given)
        handle.remove()
        dynamic, static = kept
        assert (float((dynamic - static).abs().max()) < 1e-4) == same
        assert same or float((dynamic - static).abs().max()) > 0.1
