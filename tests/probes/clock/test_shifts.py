"""Clocks that are shifted: what the hooks add, what changes, the controls, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import Hook
from dlm_lens.hooks import capture
from dlm_lens.probes import (
    ClockSteering,
    DenoisingClock,
    clock_steering,
    denoising_clock,
    read_clock,
    replay,
    shift_clock,
)
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.testing import tiny
from tests.probes.clock.test_clocks import MANY


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, DenoisingClock, DenoisingRun]:
    model = tiny("llada")
    run = dl.denoise(model, MANY[:12], steps=6, gen_length=12)
    return model, denoising_clock(model, run), dl.denoise(model, MANY[12:16], steps=6, gen_length=12)


def moved(model: Any, run: DenoisingRun, hook: Hook, step: int, layer: int = 0) -> Tensor:
    """What a hook adds to the output of a layer at a step."""
    with_hook = capture(model, run, "resid", layers=[layer], cache_steps=step, hooks=[hook])
    return (
        with_hook["resid", layer, step]
        - capture(model, run, "resid", layers=[layer], cache_steps=step)["resid", layer, step]
    )


def test_a_shift_adds_the_difference_of_mean_states(fitted: tuple[Any, DenoisingClock, DenoisingRun]) -> None:
    model, clock, run = fitted
    hook = shift_clock(clock, 0.3, layer=0)
    known = clock.curve_counts[0] > 0
    curve, knots = clock.curve[0, 1, known].numpy(), clock.knots[0, known].numpy()
    for step in (0, 2, 5):
        added = moved(model, run, hook, step)
        places = (step / 6 + 0.3, step / 6)
        one, two = ([np.interp(place, knots, feature) for feature in curve.T] for place in places)
        wanted = torch.tensor(np.subtract(one, two), dtype=torch.float32)
        torch.testing.assert_close(
            added[run.open[step]], wanted.expand(int(run.open[step].sum()), -1), atol=1e-5, rtol=1e-4
        )
        assert not added[~run.open[step]].any()
    # The mean reading moves by what the hook adds, and a shift of the readout by exactly its amount.
    plain = read_clock(model, run, clock)
    for amount in (-0.4, 0.25):
        steered = read_clock(model, run, clock, hooks=[shift_clock(clock, amount, layer=0, along="readout")])
        change = (steered.read[0, 1] - plain.read[0, 1]) / plain.count[0].clamp(min=1)
        torch.testing.assert_close(change, torch.full_like(change, amount), atol=1e-4, rtol=1e-4)
    along = moved(model, run, shift_clock(clock, -0.5, layer=0, along="slope"), 2)[run.open[2]][0]
    torch.testing.assert_close(along.double(), -0.5 * clock.slope[0, 1], atol=1e-5, rtol=1e-4)


def likelihoods(stored: StoredRun, states: Tensor, mask: int) -> Any:
    logits = stored.logits(states).detach().double().numpy()
    logits[:, mask] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def test_steering_measures_the_changes_of_the_predictions(fitted: tuple[Any, DenoisingClock, DenoisingRun]) -> None:
    model, clock, run = fitted
    found = clock_steering(model, run, clock, by=(-0.5, 0.5), layer=0, controls=2)
    shift = shift_clock(clock, 0.5, layer=0)
    wanted = replay(model, run, [shift], attention=False)
    assert found.change(0.5, "flipped").value == pytest.approx(float(wanted.flipped.sum() / wanted.predicted.sum()))
    stored, shifted, changes = StoredRun(model, run), StoredRun(model, run, hooks=[shift]), []
    for step in range(run.steps):
        plain = likelihoods(stored, stored.states(step), model.config.mask_token_id)
        steered = likelihoods(stored, shifted.states(step), model.config.mask_token_id)
        surprise = np.log(np.where(plain > 0, plain, 1)) - np.log(np.where(steered > 0, steered, 1))
        entropies = [-(p * np.log(np.where(p > 0, p, 1))).sum(-1) for p in (steered, plain)]
        kl = (plain * surprise).sum(-1)
        changes.append(np.stack([steered.max(-1) - plain.max(-1), np.subtract(*entropies), kl], -1))
    for name, value in zip(("confidence", "entropy", "kl"), np.concatenate(changes).mean(0), strict=True):
        assert found.change(0.5, name).value == pytest.approx(float(value), rel=1e-5)
    kept = [capture(model, run, "resid", layers=[1], hooks=hooks) for hooks in ([shift], [])]
    moved_by = [(a["resid", 1, step] - b["resid", 1, step])[run.open[step]] for step in range(6) for a, b in [kept]]
    read = torch.cat(moved_by).double() @ clock.weight[0, -1]  # the probe of the last layer
    assert found.change(0.5, "read").value == pytest.approx(float(read.mean()), rel=1e-4)
    assert len(found.table()) == 6
    assert found.rank(0.5, "kl", "random")[1] == 2
    beyond = found.beyond(0.5, "kl", "random").value
    assert beyond == pytest.approx(found.change(0.5, "kl").value - found.change(0.5, "kl", "random").value)


def test_a_rank_counts_controls_of_as_large_a_change_in_either_direction() -> None:
    sums = torch.zeros(5, 1, 5, dtype=torch.float64)
    sums[:, 0, 1] = torch.tensor([-2.0, -3.0, 2.5, 1.0, -0.5])
    directions = ("clock", "random", "random", "random", "random")
    count, prompt = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    found = ClockSteering(0, "means", (0.5,) * 5, directions, sums, count, prompt)
    assert found.rank(0.5, "entropy", "random") == (2, 4)


def test_rows_of_one_prompt_are_one_prompt_of_a_shift_s_intervals(
    fitted: tuple[Any, DenoisingClock, DenoisingRun],
) -> None:
    model, clock, _ = fitted
    runs = [dl.denoise(model, MANY[:3] * n, steps=4, gen_length=8) for n in (1, 8)]
    once, often = (clock_steering(model, run, clock, by=(0.5,), layer=0, controls=1) for run in runs)
    pairs = [[found.change(0.5, "entropy"), found.beyond(0.5, "kl", "random")] for found in (once, often)]
    for one, other in zip(*pairs, strict=True):
        assert one.prompts == other.prompts == 3
        assert (other.value, other.low, other.high) == pytest.approx((one.value, one.low, one.high), rel=1e-4)
    assert len(often.row_sums(0.5, "kl", "clock")[0]) == 24


def test_controls_have_the_length_of_the_shift(fitted: tuple[Any, DenoisingClock, DenoisingRun]) -> None:
    from dlm_lens.probes.clock.shifts import _controls, _redirected, _shift

    model, clock, run = fitted
    shift = _shift(clock, 0.5, 0, "means", "open")
    basis = clock.subspace("open", 0, 3)
    for name, vector in _controls(clock, 0, 2, 3, 0):
        for step in (0, 3):
            lengths = [
                moved(model, run, dl.hooks.at_layers(one, [0]), step)[run.open[step]].norm(dim=-1)
                for one in (shift, _redirected(shift, vector))
            ]
            torch.testing.assert_close(*lengths, rtol=1e-3, atol=1e-5)
        if name == "orthogonal":
            assert float((basis @ vector).abs().max()) < 1e-8 * float(vector.norm())
            assert abs(float(clock.weight[0, 1] @ vector)) < 1e-8 * float(vector.norm() * clock.weight[0, 1].norm())


def test_what_cannot_be_read_or_shifted_is_refused(fitted: tuple[Any, DenoisingClock, DenoisingRun]) -> None:
    model, clock, run = fitted
    causal = tiny("causal")
    cases: list[tuple[Any, str]] = [
        (lambda: denoising_clock(model, run, positions=["masked"]), "positions has 'masked'; the classes are open"),
        (lambda: denoising_clock(model, run, layers=[2]), "layer 2 of 2"),
        (lambda: denoising_clock(model, run, held_out=1.0), "held_out is 1.0; it must be a share"),
        (lambda: denoising_clock(model, run, target="when"), "target is 'when'"),  # type: ignore[arg-type]
        (lambda: denoising_clock(model, run.first_steps(1)), "every canvas has the same label"),
        (lambda: shift_clock(clock, 0.3, layer=-1), "layer -1 cannot be shifted; the clock has 0, 1"),
        (lambda: shift_clock(clock, 0.3, layer=0, along="mean"), "along is 'mean'"),  # type: ignore[arg-type]
        (lambda: shift_clock(clock, 0.3, layer=0, positions="written"), "a hook acts on 'open' or 'prompt'"),
        (lambda: clock_steering(model, run, clock, by=()), r"by is \(\); give a list of shifts, such as by=\("),
        (lambda: clock_steering(model, run, clock, by=0.25), "by is 0.25; give a list of shifts"),
        (lambda: clock_steering(model, run, clock, by="ab"), "by is 'ab'; give a list of shifts"),
        (lambda: read_clock(model, run, 3), "clock is 3; it must be a DenoisingClock of denoising_clock"),
        (lambda: clock_steering(model, run, clock, controls=17), "this clock holds 16 directions"),
        (
            lambda: clock_steering(causal, dl.denoise(causal, MANY[:2], gen_length=3), clock),
            "an AR run has no open",
        ),
        (lambda: clock.reading.r2("open", 5), "layer 5 was not read; there are -1, 0, 1"),
        (
            lambda: read_clock(tiny("llada", hidden_size=16), run, clock),
            "64 tokens, the model has 16 and",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(MemoryError, match=r"give fewer layers= or positions="):
        denoising_clock(model, run, max_bytes=1000)
