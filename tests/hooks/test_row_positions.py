"""`by_row`: each row of a batch gets what it gets alone under the plain positions, wherever its padding ends."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.evaluation import HarnessLM
from dlm_lens.hooks import (
    ablate,
    ablate_features,
    at_layers,
    at_steps,
    attach_hooks,
    by_row,
    freeze_sinks,
    keep_only,
    mask_positions,
    mask_random,
    parse_hooks,
    patch_from,
    reconstruct,
    scale_attention,
    scale_features,
    sink,
    splice,
    steer,
    steer_along,
    zero_value,
)
from dlm_lens.testing import tiny
from tests.hooks.test_feature_edits import autoencoder
from tests.recording.reference import build

PROMPTS = [[5, 9, 11, 3, 17, 20, 8], [6, 2, 40], [9, 9, 2, 5]]
OWN = ([0, 5], [2], [1, -3])
STEERED = torch.linspace(-1, 1, 32)
CURVE = torch.stack([-STEERED, 2 * STEERED])
SAE = autoencoder(tiny("llada"))
HOOKS: dict[str, Callable[..., Any]] = {
    "mask_positions": lambda *at: mask_positions(*at),
    "after the softmax": lambda *at: mask_positions(*at, stage="after", renormalise=True),
    "freeze_sinks": lambda *at: freeze_sinks(list(at), step=2),
    "keep_only": lambda *at: keep_only(list(at), window=3),
    "ablate": lambda *at: at_layers(ablate("mlp_out", list(at), "zero"), [0]),
    "scale_attention": lambda *at: scale_attention(at, 0.25),
    "steer": lambda *at: steer(STEERED, 2.0, positions=list(at)),
    "splice": lambda *at: splice(lambda x: 0.5 * x, positions=list(at)),
    "zero_value": lambda *at: zero_value(*at),
    "steer_along": lambda *at: steer_along(CURVE, [0.0, 1.0], 0.5, positions=list(at)),
    "ablate_features": lambda *at: ablate_features(SAE, [0, 3, 5], positions=list(at)),
    "scale_features": lambda *at: scale_features(SAE, [1, 2], 3.0, positions=list(at)),
    "reconstruct": lambda *at: reconstruct(SAE, positions=list(at)),
}
SETTINGS: dict[str, Any] = {"steps": 4, "gen_length": 8}


def alone(model: Any, hook: Callable[..., Any], row: int, at: Any, **settings: Any) -> Any:
    return dl.denoise(model, [PROMPTS[row]], hooks=[hook(*at)], seed=[row], **settings)


def same_rows(run: Any, model: Any, hook: Callable[..., Any], own: Any, **settings: Any) -> None:
    for row, at in enumerate(own):
        one = alone(model, hook, row, at, **settings)
        here = slice(int(run.padding[row]), int(run.padding[row]) + one.tokens.shape[1])
        assert run.tokens[row, here].equal(one.tokens[0]), row
        # With blocks of its own a row waits for the others, so that its steps have other numbers.
        found, wanted = (values.amax(0) for values in (run.confidence[:, row, here], one.confidence[:, 0]))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=str(row))


@pytest.mark.parametrize("name", HOOKS)
def test_every_row_is_as_alone(name: str) -> None:
    model, hook = tiny("llada"), HOOKS[name]
    run = dl.denoise(model, PROMPTS, hooks=[hook(by_row(*OWN))], seed=[0, 1, 2], **SETTINGS)
    same_rows(run, model, hook, OWN, **SETTINGS)
    plain = dl.denoise(model, PROMPTS, seed=[0, 1, 2], **SETTINGS)
    assert not plain.confidence.equal(run.confidence)


@pytest.mark.parametrize("family", ["mmada", "dream", "diffugpt", "smdm", "sink front", "sink end", "llama"])
@pytest.mark.parametrize("name", ["mask_positions", "ablate"])
def test_in_other_families(family: str, name: str) -> None:
    model, hook = build(tiny, family), HOOKS[name]
    settings: dict[str, Any] = SETTINGS if family != "llama" else {"gen_length": 8}
    run = dl.denoise(model, PROMPTS, hooks=[hook(by_row(*OWN))], seed=[0, 1, 2], **settings)
    same_rows(run, model, hook, OWN, **settings)


@pytest.mark.parametrize("family", ["sdar", "llada2", "stable_diffcoder", "bd3lm"])
@pytest.mark.parametrize("name", ["mask_positions", "ablate"])
def test_where_blocks_are_counted_from_the_text_rows_end_with_their_own_block(family: str, name: str) -> None:
    model, hook = tiny(family), HOOKS[name]
    own, settings = ([-1], [2, -1], [1, -3]), {"gen_length": 8}
    hooks = [hook(by_row(*own))]
    run = dl.denoise(model, PROMPTS, hooks=hooks, seed=[0, 1, 2], **settings)
    same_rows(run, model, hook, own, **settings)
    traced = dl.DiffusionLM(model).generate(PROMPTS, hooks=hooks, seed=[0, 1, 2], **settings)
    assert traced.tokens.equal(run.tokens)


@pytest.mark.parametrize("settings", [{"cfg_scale": 1.5}, {"cache": "prefix", "block_length": 4}], ids=str)
def test_with_guidance_and_with_a_cache(settings: dict[str, Any]) -> None:
    model, given = tiny("llada"), {**SETTINGS, **settings}
    for name in ("mask_positions", "ablate"):
        run = dl.denoise(model, PROMPTS, hooks=[HOOKS[name](by_row(*OWN))], seed=[0, 1, 2], **given)
        same_rows(run, model, HOOKS[name], OWN, **given)


@pytest.mark.parametrize("name", ["mask_positions", "ablate"])
def test_prompts_that_repeat_are_not_taken_for_guidance(name: str) -> None:
    model, hook = tiny("llada"), HOOKS[name](by_row([1], [2]))
    given: dict[str, Any] = {**SETTINGS, "cfg_scale": 1.5, "seed": 0}
    bridged, (one, two) = dl.bridge(model), ([5, 9, 11, 3], [6, 2, 40, 7])
    pair = bridged.denoise([one, two], hooks=[hook], **given)
    assert torch.equal(pair.tokens, dl.denoise(model, [one, two], hooks=[hook], **given).tokens)
    for denoise in (dl.denoise, lambda _, *args, **more: bridged.denoise(*args, **more)):
        with pytest.raises(ValueError, match="positions for 2 rows, and the run has 4"):
            denoise(model, [one, two, one, two], hooks=[hook], **given)


def test_one_list_is_for_all_rows_and_recordings_need_no_batches_of_one_length() -> None:
    model, hook = tiny("llada"), mask_positions(by_row([2]), stage="after")
    assert hook.padding_safe
    assert not hook.shifts_with_padding
    assert not mask_positions(by_row([2], [3])).padding_safe
    together = dl.record(model, PROMPTS, hooks=[hook], seed=[0, 1, 2], **SETTINGS)
    same_rows(together.run, model, lambda *at: mask_positions(*at, stage="after"), [[2]] * 3, **SETTINGS)
    apart = dl.record(model, PROMPTS, hooks=[hook], batch_size=2, seed=[0, 1, 2], **SETTINGS)
    content = together.run.attention_mask
    assert apart.run.tokens[content].equal(together.run.tokens[content])
    again = dl.recording.rerun(model, together.run, [dl.ReceivedAttention()], hooks=[hook])
    torch.testing.assert_close(again.received, together.received, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_beside_other_positions_and_in_rows_without_any() -> None:
    model = build(tiny, "sink front")
    run = dl.denoise(
        model, PROMPTS, hooks=[mask_positions(by_row([1], [], [0]), -1, sink(0))], seed=[0, 1, 2], **SETTINGS
    )
    same_rows(run, model, mask_positions, [[1, -1, sink(0)], [-1, sink(0)], [0, -1, sink(0)]], **SETTINGS)


def test_values_of_another_run_at_own_positions() -> None:
    model = tiny("llada")
    prompts = [[5, 9, 11, 3], [6, 2, 40, 7]]
    kept = dl.hooks.capture(model, [[1, 2, 3, 4], [5, 6, 7, 8]], "resid", cache_steps=1, **SETTINGS)
    own = dl.hooks.capture(
        model, prompts, "resid", hooks=[patch_from(kept, 1, positions=by_row([0], [1, 3]))], **SETTINGS
    )
    changed = own["resid", 0, 1].eq(kept["resid", 0, 1]).all(-1)[:, :4]
    assert changed.tolist() == [[True, False, False, False], [False, True, False, True]]


def test_the_text_of_a_hook_makes_it_again() -> None:
    for hook in (mask_positions(by_row([3, 4], [7]), -1), ablate("resid", by_row([3])), zero_value(by_row(3, 4))):
        assert repr(parse_hooks(repr(hook))[0]) == repr(hook)
    assert repr(zero_value(by_row(3, 4))) == "zero_value(by_row([3], [4]))"


def test_outside_a_run_padding_is_not_known() -> None:
    model, ids = tiny("llada"), torch.tensor([[5, 9, 11, 3], [6, 2, 40, 7]])
    for name in ("mask_positions", "ablate", "scale_attention"):
        for own in ([[1]], [[1], [2]]):
            with (
                pytest.raises(ValueError, match="needs to know the run's step"),
                torch.no_grad(),
                attach_hooks(model, HOOKS[name](by_row(*own))),
            ):
                model(input_ids=ids, use_cache=False)


def test_lists_for_several_rows_are_for_one_batch() -> None:
    model, hook = tiny("llada"), mask_positions(by_row([0], [1]))
    prompts = [[5, 9, 11, 3], [7, 7, 2, 1], [6, 2], [9, 8]]
    for given in ({"batch_size": 2}, {"batch_size": 3}):
        with pytest.raises(ValueError, match=r"positions for 2 rows, and the prompts run in 2 batches"):
            dl.record(model, prompts, hooks=[hook], **given, **SETTINGS)
    with pytest.raises(ValueError, match=r"the prompts run in 2 batches \(by batch_size, or as another hook names"):
        dl.record(model, prompts, hooks=[mask_positions(by_row([0], [1]), 3)], **SETTINGS)
    run = dl.denoise(model, prompts, **SETTINGS)
    four = mask_positions(by_row([0], [1], [0], [0]))
    with pytest.raises(ValueError, match="positions for 4 rows, and rows_per_pass makes 2 passes"):
        dl.recording.rerun(model, run, [dl.ReceivedAttention()], hooks=[four], rows_per_pass=2)
    for wrapped in (hook, at_steps(hook, [-1]), keep_only([by_row([0], [1])], window=3), mask_random(like=hook)):
        assert wrapped.row_count == 2
        with pytest.raises(ValueError, match="positions for 2 rows, and an evaluation makes its own batches"):
            HarnessLM(model, hooks=[wrapped])
        calls: list[int] = []
        handle = model.get_decoder().register_forward_hook(lambda *given, calls=calls: calls.append(1))
        with pytest.raises(ValueError, match="positions for 2 rows, and the run has 4; give a list for each row"):
            dl.denoise(model, [*prompts[:2], *prompts[:2]], hooks=[wrapped], **SETTINGS)
        handle.remove()
        assert not calls
    assert mask_positions(by_row([3]), 2).row_count is None


def test_errors_of_keep_only_name_it() -> None:
    """The caller of keep_only has written no mask_positions."""
    run = [[5, 9, 11, 3], [6, 2]]
    sentence = "keep_only([by_row([0], [1], [0])], window=3): positions for 3 rows, and the run has 2"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        dl.denoise(tiny("llada"), run, hooks=[keep_only([by_row([0], [1], [0])], window=3)], **SETTINGS)
    with pytest.raises(ValueError, match=re.escape("keep_only([by_row([40])]): position 40 is not there")):
        dl.denoise(tiny("llada"), run, hooks=[keep_only([by_row([40])], window=3)], **SETTINGS)
    sentence = "keep_only([[1, 2]]) takes positions one by one: keep_only([1, 2])"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        keep_only([[1, 2]], window=3)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=re.escape("keep_only(['a']): a position is a whole number")):
        keep_only(["a"], window=3)  # type: ignore[list-item]
    assert repr(keep_only([by_row([0], [1]), 2], window=3)) == "keep_only([by_row([0], [1]), 2], window=3)"


def test_hooks_around_positions_shift_with_padding_as_these() -> None:
    model = tiny("llada")
    for hook in (keep_only([0], window=3), mask_random(like=mask_positions(0))):
        assert hook.shifts_with_padding
        recorded = dl.record(model, PROMPTS, hooks=[hook], seed=[0, 1, 2], **SETTINGS)
        one = dl.denoise(model, [PROMPTS[1]], hooks=[hook], seed=[1], **SETTINGS)
        start = int(recorded.run.padding[1])
        assert recorded.run.tokens[1, start:].equal(one.tokens[0])
    assert not keep_only([-1], window=3).shifts_with_padding
    assert not keep_only(2, window=3).shifts_with_padding


def test_likelihoods_refuse_it() -> None:
    evaluated = HarnessLM(tiny("llada"), hooks=[mask_positions(by_row([1]))])
    with pytest.raises(ValueError, match="needs the steps of a run, and a likelihood is a forward pass"):
        evaluated.check_likelihoods()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by_row(), "give a list of positions for each row"),
        (lambda: by_row("34"), "give a list of positions for each row"),
        (lambda: by_row([1.0]), r"1.0 is no position; give whole numbers"),
        (lambda: by_row([True]), r"True is no position"),
        (lambda: by_row([sink(0)]), r"sink\(0\) is no position"),
    ],
)
def test_what_is_no_position_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["mask_positions", "ablate"])
def test_rows_and_positions_that_are_not_there_are_refused(name: str) -> None:
    model = tiny("llada")
    for own, message in (
        (([1], [2]), "positions for 2 rows, and the run has 3; give a list for each row"),
        (([1], [11], [0]), "position 11 is not there; row 1 has 11 positions after its padding"),
        (([1], [-12], [0]), "position -12 is not there; row 1 has 11 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            dl.denoise(model, PROMPTS, hooks=[HOOKS[name](by_row(*own))], **SETTINGS)
    with pytest.raises(ValueError, match="positions for 2 rows, and the run has 4"):
        dl.denoise(model, [*PROMPTS, [1, 2]], hooks=[HOOKS[name](by_row([0], [1]))], **SETTINGS)
