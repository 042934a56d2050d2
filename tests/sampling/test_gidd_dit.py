"""GIDD's sampler by default: times, draws in float64, correction of each row by itself, resuming, hosts."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions
from dlm_lens.testing import tiny
from tests.dit64 import dit64

SIZE, MASK = 64, 63
PROMPTS: list[list[int]] = [[5, 6], [1, 2, 3], [9]]
RUN: dict[str, Any] = {"gen_length": 10, "steps": 6, "seed": 4}
CORRECTED = RUN | {"correction_steps": 8, "correction_temperature": 0.8}


def wide(p_uniform: float = 0.2) -> Any:
    """A model in float64, whose tokens no rounding decides."""
    return tiny("gidd_dit", p_uniform=p_uniform).double()


def shares(t: float, p: float) -> tuple[float, float, float]:
    """Alpha, masks and random tokens at a time: the ratio of text to masks is (1 - t) to t."""
    c = 2 * p / (1 - p) * math.sqrt(t * (1 - t))
    return (1 - t) / (1 + c), t / (1 + c), c / (1 + c)


def noise_row(t: float, p: float) -> Tensor:
    """What the noise writes."""
    _, masked, random = shares(t, p)
    row = torch.full((SIZE,), random / (SIZE - 1), dtype=torch.float64)
    row[MASK] = masked
    return row


def bayes(likely: Tensor, seen: int, t: float, s: float, p: float) -> Tensor:
    """Q(x_s | x_t, x_theta) of one position, by transition matrices [from, to]."""
    eye = torch.eye(SIZE, dtype=torch.float64)
    to_t, to_s = (shares(time, p)[0] * eye + noise_row(time, p)[None] for time in (t, s))
    joint = (likely @ to_s) * torch.linalg.solve(to_s, to_t)[:, seen]
    return joint / joint.sum()


def quantile(weights: Tensor, number: float) -> int:
    """The token whose interval of the cumulated weights holds a number."""
    left, token = number * float(weights.sum()), 0
    while left >= float(weights[token]):
        left, token = left - float(weights[token]), token + 1
    return token


def text_probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Without [MASK]."""
    wide = logits.clone()
    wide[..., MASK] = -torch.inf
    return (wide / temperature).softmax(-1)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "eps": 0.01}, {"min_p": 0.1}])
@pytest.mark.parametrize("p_uniform", [0.0, 0.2])
def test_every_draw_and_confidence_is_that_of_a_float64_network(settings: dict[str, Any], p_uniform: float) -> None:
    """One number of the row's generator for each position of the answer; times from 1 - eps to eps."""
    model, p = wide(p_uniform), p_uniform
    run = dl.denoise(model, PROMPTS[1], **RUN, **settings)
    eps = settings.get("eps", 1e-4)
    times = [1 - eps + (2 * eps - 1) * step / 6 for step in range(7)]
    generator = torch.Generator().manual_seed(4)
    canvas = torch.tensor(PROMPTS[1] + [MASK] * 10)
    opened = canvas == MASK
    assert run.steps == 6
    for step, (t, s) in enumerate(pairwise(times)):
        assert run.canvases[step, 0].equal(canvas)
        assert run.open[step, 0].equal(opened)
        # Their sinusoids of the time are float32, those of dit64 are not: 1e-7 of a logit.
        likely = text_probabilities(
            dit64(model, canvas[None], sigma=t)["logits"][0], settings.get("temperature", 1.0)
        )
        before, canvas, open_before = canvas, canvas.clone(), opened
        opened = torch.zeros(13, dtype=torch.bool)
        for place, number in enumerate(torch.rand(10, generator=generator, dtype=torch.float64).tolist(), 3):
            weights = bayes(likely[place], int(before[place]), t, s, p)
            weights = weights.where(weights >= settings.get("min_p", 0.0), 0.0)
            token = canvas[place] = quantile(weights, number)
            text = shares(s, p)[0] * float(likely[place, token])
            certain = text / (text + float(noise_row(s, p)[token]))
            assert float(run.confidence[step, 0, place]) == pytest.approx(certain, rel=1e-4, abs=1e-6)
            opened[place] = certain < 0.5
        assert run.unmasked[step, 0].equal(open_before & ~opened)
        assert run.revised[step, 0].equal(~open_before & (opened | (canvas != before)))
    assert run.tokens[0].equal(canvas)
    assert bool((run.canvases[1:] != MASK).any())
    if p_uniform and not settings:
        assert bool(run.revised.any())


@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0])
def test_without_random_tokens_a_written_token_stays(temperature: float) -> None:
    """Whatever a network thinks of it that was not trained to correct: at temperature 0 it excludes many."""
    model = wide(0.0)
    run = dl.denoise(model, PROMPTS, **RUN | {"steps": 20, "temperature": temperature})
    assert not bool(run.revised.any())
    written = run.canvases[:-1] != MASK
    assert run.canvases[1:][written].equal(run.canvases[:-1][written])
    assert run.open.equal((run.canvases == MASK) & run.attention_mask)
    assert int(run.masks_left.sum()) == 0
    again = dl.denoise(wide(0.2), PROMPTS, **RUN | {"steps": 20, "temperature": temperature})
    assert bool(again.revised.any())


def corrected(model: Any, canvas: Tensor, generator: torch.Generator, settings: dict[str, Any]) -> list[Tensor]:
    """Canvases of the correction of one row, whose answer begins at 3: an independent loop in float64."""
    best = waited = 0
    found = []
    for _ in range(settings["correction_steps"]):
        found.append(canvas)
        logits = dit64(model, canvas[None], sigma=settings.get("correction_time", 0.01))["logits"][0]
        likely = text_probabilities(logits, settings["correction_temperature"])
        scores = torch.zeros(len(canvas), dtype=torch.float64)
        drawn = canvas.clone()
        numbers = torch.rand(len(canvas) - 3, generator=generator, dtype=torch.float64)
        for place, number in enumerate(numbers.tolist(), 3):
            drawn[place] = quantile(likely[place], number)
            scores[place] = float(likely[place, drawn[place]]) * float(drawn[place] != canvas[place])
        place, following = int(scores.argmax()), canvas.clone()
        following[place] = drawn[place]
        right = int((following == text_probabilities(logits).argmax(-1))[3:].sum())
        best, waited = (right, 0) if right > best else (best, waited + 1)
        ended = waited > settings.get("correction_patience", 32) or following.equal(canvas)
        if ended and settings.get("correction_stops", True):
            break
        canvas = following
    return [*found, canvas]


@pytest.mark.parametrize(
    "settings",
    [
        {"correction_steps": 9, "correction_temperature": 0.7},
        {"correction_steps": 30, "correction_temperature": 1.0, "correction_patience": 1, "correction_time": 0.2},
        {"correction_steps": 12, "correction_temperature": 0.2, "correction_stops": False},
    ],
)
def test_correction_writes_the_most_probable_change_until_nothing_improves(settings: dict[str, Any]) -> None:
    model = wide()
    plain = dl.denoise(model, PROMPTS[1], **RUN)
    run = dl.denoise(model, PROMPTS[1], **RUN, **settings)
    assert run.canvases[:7].equal(plain.canvases)
    generator = torch.Generator().manual_seed(4)
    torch.rand(60, generator=generator, dtype=torch.float64)
    expected = corrected(model, plain.tokens[0], generator, settings)
    assert run.steps == 6 + len(expected) - 1
    assert run.canvases[6:, 0].equal(torch.stack(expected))
    assert run.row_steps.tolist() == [run.steps]
    changed = run.canvases[7:, 0] != run.canvases[6:-1, 0]
    assert int(changed.sum(-1).max()) == 1
    assert run.revised[6:, 0].equal(changed & ~run.open[6:-1, 0])
    assert run.unmasked[6:, 0].equal(changed & run.open[6:-1, 0])
    assert int(changed.sum()) >= 2


def test_a_row_is_what_it_is_alone() -> None:
    """Its correction ends for itself, and its steps with it."""
    model = wide()
    options = RUN | {"correction_steps": 40, "correction_temperature": 0.5, "correction_patience": 3}
    together = dl.denoise(model, PROMPTS, **options | {"seed": [4, 5, 6]})
    ends = []
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **options | {"seed": 4 + row})
        kept, ran = together.attention_mask[row], alone.steps
        ends.append(ran)
        assert together.canvases[: ran + 1, row, kept].equal(alone.canvases[:, 0])
        assert together.open[: ran + 1, row, kept].equal(alone.open[:, 0])
        assert together.tokens[row, kept].equal(alone.tokens[0])
    assert together.row_steps.tolist() == ends
    assert together.steps == max(ends) < 46
    assert len(set(ends)) > 1


def test_a_given_text_is_corrected_without_steps_before() -> None:
    model = wide()
    text = torch.randint(60, (1, 12), generator=torch.Generator().manual_seed(1))
    text[0, :2] = torch.tensor(PROMPTS[0])

    def plant(step: int, canvas: Tensor) -> Tensor | None:
        return text if step == 0 else None

    run = dl.denoise(model, PROMPTS[:1], gen_length=10, steps=0, correction_steps=5, on_canvas=plant, seed=1)
    assert run.canvases[0].equal(text)
    assert run.steps == 5
    assert int((run.tokens != text).sum()) in range(1, 6)
    assert run.tokens[0, :2].tolist() == PROMPTS[0]


def test_masks_of_the_prompt_and_of_an_edit_are_filled_in() -> None:
    model = wide()
    run = dl.denoise(model, [[4, MASK, 7, MASK]], gen_length=0, steps=8, seed=1)
    assert run.answer[0].tolist() == [False, True, False, True]
    assert run.tokens[0, [0, 2]].tolist() == [4, 7]
    assert bool((run.tokens[0, [1, 3]] != MASK).all())

    def mask_again(step: int, canvas: Tensor) -> Tensor | None:
        if step == 3:
            canvas[:, 0] = MASK
            return canvas
        return None

    edited = dl.denoise(model, PROMPTS[1], on_canvas=mask_again, **RUN | {"steps": 30})
    assert bool(edited.open[3, 0, 0])
    assert int(edited.tokens[0, 0]) != MASK
    assert bool(edited.unmasked[3:, 0, 0].any())


def test_hidden_columns_traces_recordings_and_resuming(tmp_path: Path) -> None:
    model: Any = wide()
    seen: list[Tensor] = []
    run = dl.denoise(
        model, PROMPTS[1:2], hooks=[mask_positions(1)],
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **CORRECTED,
    )  # fmt: skip
    visible = torch.ones(1, 1, 13, 13, dtype=torch.bool)
    visible[..., 1] = False
    times = [1 - 1e-4 + (2e-4 - 1) * step / 6 for step in range(6)] + [0.01] * 8
    assert 6 < run.steps <= 14
    for step in range(run.steps):
        expected = dit64(model, run.canvases[step], visible=visible, sigma=times[step])["logits"]
        torch.testing.assert_close(seen[step], expected, atol=1e-5, rtol=1e-5)
    reducers = [dl.ReceivedAttention(min_viewers=1)]
    whole = dl.record(model, PROMPTS, reducers, **CORRECTED)
    assert whole.run.row_steps.max() > 8
    for step in (3, 7):
        sums = dl.received_of(whole).column_sums[step, 1, 1, :, :].double()
        pattern = dit64(model, whole.run.canvases[step, 1:2], sigma=times[step])["pattern1"][0]
        torch.testing.assert_close(sums, pattern.sum(-2), atol=2e-5, rtol=2e-4)
    again = dl.received_over_steps(model, whole.run)
    torch.testing.assert_close(again.values, dl.received_of(whole).values, equal_nan=True)
    for stop_at in (4, 9):
        passes: list[int] = []

        def stop(*_: Any, passes: list[int] = passes, stop_at: int = stop_at) -> None:
            passes.append(1)
            if len(passes) == stop_at:
                raise KeyboardInterrupt

        handle = model.model.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            dl.record(model, PROMPTS, reducers, to=tmp_path / f"rec{stop_at}", **CORRECTED)
        handle.remove()
        resumed = dl.record(model, PROMPTS, reducers, to=tmp_path / f"rec{stop_at}", **CORRECTED)
        for name in ("canvases", "open", "unmasked", "revised", "proposals", "row_steps"):
            assert getattr(resumed.run, name).equal(getattr(whole.run, name)), name
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **CORRECTED) as tracer:
        for _ in tracer.steps[7]:
            traced = lm.layers[0].attn.pattern.save()
        found = tracer.result.save()
    assert found.canvases.equal(whole.run.canvases)
    expected = dit64(model, whole.run.canvases[7, 1:2], sigma=0.01)["pattern0"]
    torch.testing.assert_close(traced[1:2].double(), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps and correction_steps are 0: nothing would run; give one of them at least 1"),
        ({"min_p": 1.0}, "min_p is 1.0; it must be at least 0 and below 1"),
        ({"eps": 0.5}, "eps is 0.5; it must be between 0 and 0.5"),
        ({"correction_time": 1.0}, "correction_time is 1.0; it must be between 0 and 1"),
        ({"correction_temperature": 0.0}, "correction_temperature is 0.0; it must be positive"),
        ({"correction_steps": -1}, r"correction_steps is -1; it must be 0 \(no correction\) or positive"),
        ({"correction_patience": -1}, "correction_patience is -1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"t0": 0.1}, "t0 is correction_time here"),
        ({"t_eps": 0.1}, "t_eps is eps here"),
        ({"num_inference_steps": 3}, "num_inference_steps is steps here"),
        ({"cfg_scale": 1.0}, "has no setting 'cfg_scale'"),
        ({"correction_steps": 2, "reference_quirks": True}, "and there are 2 rows; give one prompt"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dl.denoise(tiny("gidd_dit"), [[5, 6], [7, 8]], **{"gen_length": 4, "steps": 2} | settings)
