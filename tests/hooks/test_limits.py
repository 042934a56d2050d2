from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import ColumnHook, Hook, PointContext
from dlm_lens.hooks import (
    ablate,
    at_heads,
    at_layers,
    at_progress,
    at_steps,
    attach_hooks,
    freeze_sinks,
    keep_only,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_tokens,
    mask_top_sinks,
    sink,
)
from dlm_lens.hooks.expressions import parse_hooks
from dlm_lens.testing import tiny
from tests.hooks.by_hand import PROMPTS, model_of, settings_of


class Add:
    """Adds 1; notes where it ran."""

    def __init__(self, site: str = "z") -> None:
        self.site, self.ran = site, []

    def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
        self.ran.append((hook.step, hook.layer()))
        return tensor + 1


def ran(wrap: Any, name: str = "llada") -> list[tuple[int, int]]:
    add = Add()
    dl.denoise(model_of(name), PROMPTS, hooks=[wrap(add)], **settings_of(name))
    return sorted(add.ran)


@pytest.mark.long
def test_steps_and_layers_are_those_asked_for_in_any_order_of_wrappers() -> None:
    every = [(step, layer) for step in range(4) for layer in range(2)]
    for steps, wanted in (
        (1, {1}), (range(1, 3), {1, 2}), ([0, -1], {0, 3}), (slice(2, None), {2, 3}), (slice(-9, 99, 2), {0, 2}),
        (range(-2, 0), {2, 3}),
    ):  # fmt: skip
        assert ran(lambda hook, steps=steps: at_steps(hook, steps)) == [p for p in every if p[0] in wanted]
        for both in (
            lambda hook, steps=steps: at_layers(at_steps(hook, steps), [-1]),
            lambda hook, steps=steps: at_steps(at_layers(hook, -1), steps),
        ):
            assert ran(both) == [(step, 1) for step in sorted(wanted)]
    assert ran(lambda hook: at_layers(at_layers(hook, [0, 1]), [0])) == [(step, 0) for step in range(4)]
    assert ran(lambda hook: at_layers(at_layers(hook, [0]), [-1])) == []
    assert ran(lambda hook: at_steps(hook, [-1]), "llama") == [(4, 0), (4, 1)]


def test_progress_is_the_rows_own() -> None:
    model = model_of("llada")
    seen = []

    class Look:
        site = "z"

        def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
            if hook.layer() == 0:
                seen.append((hook.run.progress.tolist(), [bool((row == 5).all()) for row in tensor]))
            return tensor

    class Five:
        site = "z"

        def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
            return torch.full_like(tensor, 5)

    # The second prompt has masks of its own, so that its rows' progress differs.
    prompts = [PROMPTS[0], [*PROMPTS[1], 63, 63, 63]]
    for hook in (at_progress(Five(), (0.25, 0.5)), at_progress(Five(), lambda p: (p >= 0.25) & (p < 0.5))):
        seen.clear()
        dl.denoise(model, prompts, hooks=[hook, Look()], gen_length=8, steps=4)
        assert [acted for _, acted in seen] == [[0.25 <= p < 0.5 for p in progress] for progress, _ in seen]
        assert {p[0] != p[1] for p, _ in seen} == {False, True}
    seen.clear()
    dl.denoise(model, prompts, hooks=[at_progress(Five(), (0.5, 1)), Look()], gen_length=8, steps=4, cfg_scale=0.5)
    assert all(acted == [p >= 0.5 for p in progress] for progress, acted in seen)
    assert len(seen[0][1]) == 4  # both halves of guidance
    with pytest.raises(ValueError, match=r"returned shape \[3\] for the progress of 2 rows"):
        dl.denoise(model, prompts, hooks=[at_progress(Five(), lambda p: torch.ones(3) > 0)], gen_length=8, steps=4)


@pytest.mark.parametrize(("site", "heads"), [("z", 4), ("k", 2), ("rot_q", 4)])
@torch.no_grad()
def test_heads_are_those_of_the_activation(site: str, heads: int) -> None:
    value = torch.zeros(2, 5, heads, 3)
    hook = at_heads(type("One", (), {"site": site, "__call__": lambda self, x, hook=None: x + 1})(), [0, -1])
    assert hook(value)[0, 0, :, 0].tolist() == [1, *[0] * (heads - 2), 1]
    assert value.abs().max() == 0


@torch.no_grad()
def test_columns_in_some_heads_layers_and_rows() -> None:
    model = model_of("llada")
    ids = torch.tensor([PROMPTS[0]])
    patterns: dict[int, torch.Tensor] = {}

    class Keep:
        site = "pattern"

        def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
            patterns[hook.layer()] = tensor.clone()
            return tensor

    hook = at_layers(at_heads(at_heads(mask_positions(3), [1, 2, -1]), [-1, 1, 0]), [1])
    assert isinstance(hook, ColumnHook)
    with attach_hooks(model, hook, Keep()):
        model(input_ids=ids)
    assert (patterns[0][..., 3] > 0).all()
    gone = (patterns[1][0, :, :, 3] == 0).all(-1)
    assert gone.tolist() == [False, True, False, True]


def test_a_wrapped_previous_still_sees_the_steps_at_which_it_rests() -> None:
    model, options = model_of("llada"), settings_of("llada")
    # Resting at step 0 and acting at step 1 on what step 0 received is what the plain run's step 0 received.
    plain = dl.denoise(model, PROMPTS, **options)
    received = dl.received_over_steps(model, plain)
    shifted = dl.find_sinks(received, dl.TopK(2))
    known = type(shifted)(
        **{**vars(shifted), "is_sink": shifted.is_sink.roll(1, 0), "scores": shifted.scores.roll(1, 0)}
    )
    one = dl.denoise(model, PROMPTS, hooks=[at_steps(mask_top_sinks(2, source="previous"), [1])], **options)
    two = dl.denoise(model, PROMPTS, hooks=[at_steps(mask_sinks(source=known), [1])], **options)
    assert one.canvases.equal(two.canvases)
    torch.testing.assert_close(one.confidence, two.confidence, atol=1e-5, rtol=1e-5)
    assert not one.confidence[1].equal(plain.confidence[1])
    mean = at_layers(mask_top_sinks(2, source="previous", per="model"), [1])
    assert mean.layers is None
    assert at_layers(mask_top_sinks(2, source="previous"), [1]).layers == (1,)
    late = at_steps(freeze_sinks(dl.TopK(2), step=0), [2])
    frozen = dl.denoise(model, PROMPTS, hooks=[late], **options)
    assert frozen.settings["columns_hidden"] == (2.0,)
    # Those of step 0, where another step rests in between.
    assert not shifted.is_sink[0].equal(shifted.is_sink[1])
    of_start = {
        name: vars(shifted)[name][:1].expand(len(shifted.scores), -1, -1, -1, -1) for name in ("is_sink", "scores")
    }
    hook = at_steps(mask_sinks(source=type(shifted)(**{**vars(shifted), **of_start})), [2])
    by_hand = dl.denoise(model, PROMPTS, hooks=[hook], **options)
    torch.testing.assert_close(frozen.confidence, by_hand.confidence, atol=1e-5, rtol=1e-5)
    assert not frozen.confidence[2].equal(plain.confidence[2])


def test_they_read_as_written_and_are_equal_by_their_settings() -> None:
    hook = at_steps(at_heads(mask_top_sinks(5), [0, -1]), range(16, 64))
    assert repr(hook) == "at_steps(at_heads(mask_sinks(TopK(k=5)), [0, -1]), range(16, 64))"
    assert hook == at_steps(at_heads(mask_top_sinks(5), (0, -1)), range(16, 64))
    assert hash(hook) == hash(at_steps(at_heads(mask_top_sinks(5), (0, -1)), range(16, 64)))
    assert repr(at_steps(mask_positions(1), slice(8, None))) == "at_steps(mask_positions(1), slice(8, None))"
    assert (
        repr(at_progress(at_layers(mask_positions(1), 3), (0.5, 1)))
        == "at_progress(at_layers(mask_positions(1), [3]), (0.5, 1))"
    )
    assert isinstance(at_steps(Add(), 1), Hook)
    assert not isinstance(at_steps(Add(), 1), ColumnHook)
    assert hook.site == "scores"
    assert at_steps(mask_top_sinks(1, source="clean"), 1).needs_clean_pass


def test_columns_hidden_counts_only_where_the_hook_looked() -> None:
    model, options = model_of("llada"), settings_of("llada")

    def counts(*hooks: Any) -> Any:
        return dl.denoise(model, PROMPTS, hooks=hooks, **options).settings["columns_hidden"]

    two = mask_top_sinks(2)
    assert counts(two, Add("q")) == (2.0, None)
    assert counts(at_heads(at_steps(two, 1), [0])) == (2.0,)
    assert counts(at_heads(at_heads(two, [0]), [1])) == (None,)
    assert counts(at_progress(two, (0.25, 0.5))) == (2.0,)
    # Position 0 is padding in the second of two rows.
    assert counts(mask_positions(0, 5)) == (1.5,)
    assert counts(mask_random(3)) == (3.0,)
    assert counts(mask_sinks(dl.AboveMean(1e6))) == (0.0,)
    assert "columns_hidden" not in dl.denoise(model, PROMPTS, hooks=[Add()], **options).settings


def test_what_is_not_there_is_refused_before_anything_is_computed() -> None:
    model, options = model_of("llada"), settings_of("llada")
    steps: list[int] = []
    for hook, sentence in (
        (at_steps(mask_top_sinks(1), range(2, 5)), "step 4 is not there; the run has steps 0 to 3"),
        (at_steps(mask_top_sinks(1), [-5]), "step -5 is not there"),
        (at_progress(at_steps(mask_top_sinks(1), 7), (0.9, 1)), "step 7 is not there"),
        (at_heads(mask_top_sinks(1), [4]), "head 4 of 4: heads go from 0 to 3, or from -4 to -1"),
        (at_heads(type("One", (), {"site": "k", "__call__": lambda s, x, hook=None: x})(), [2]), "head 2 of 2"),
        (at_layers(mask_top_sinks(1), [2]), "layer 2 of 2"),
        (at_steps(at_layers(mask_top_sinks(1, per="model", source="previous"), [-3]), 1), "layer -3 of 2"),
        (mask_random(like=at_steps(mask_top_sinks(1), 9)), "step 9 is not there"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dl.denoise(model, PROMPTS, hooks=[hook], on_logits=lambda step, *_: steps.append(step), **options)
    assert steps == []
    for call, sentence in (
        (lambda: at_steps(3, 1), "3 is no hook"),  # type: ignore[arg-type]
        (lambda: at_steps(mask_top_sinks(1), []), "give at least one step as a whole number"),
        (lambda: at_steps(mask_top_sinks(1), range(3, 3)), "there is no step in it"),
        (lambda: at_steps(mask_top_sinks(1), slice(5, 2)), r"slice\(5, 2, None\)\): there is no step in it"),
        (lambda: at_steps(mask_top_sinks(1), slice(-2, -5)), "there is no step in it"),
        (lambda: at_steps(mask_top_sinks(1), slice(2, 5, -1)), "there is no step in it"),
        (lambda: at_steps(mask_top_sinks(1), slice(None, 0)), "there is no step in it"),
        (lambda: at_steps(mask_top_sinks(1), slice(1, 2, 0)), "there is no step in it"),
        (lambda: at_layers(mask_top_sinks(1), ["0"]), "give at least one layer as a whole number"),  # type: ignore[list-item]
        (lambda: at_progress(mask_top_sinks(1), (0.5, 0.2)), r"progress is \(0.5, 0.2\); it must be an interval"),
        (lambda: at_heads(Add("resid"), 1), "belongs at 'resid', which has no heads"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    with pytest.raises(ValueError, match=r"needs to know the run's step: pass it to dlm_lens\.denoise"):
        at_steps(mask_top_sinks(1), 1)(torch.zeros(1, 1, 9, 9))
    with pytest.raises(ValueError, match="needs to know the layer"):
        at_layers(mask_top_sinks(1), 1)(torch.zeros(1, 1, 9, 9))
    with pytest.raises(ValueError, match="without a run the number of layers is unknown; count them from 0"):
        at_layers(mask_top_sinks(1), -1)(torch.zeros(1, 1, 9, 9), PointContext("here", 0))


def test_what_is_printed_can_be_read_again() -> None:
    for hook in (
        at_steps(at_heads(mask_top_sinks(5, stage="after"), [0, -1]), range(16, 64)),
        at_progress(mask_sinks(dl.AboveMean(3.0), top=5, per="layer", source="clean"), (0.25, 1)),
        freeze_sinks(dl.TopK(2), per="layer", step=3),
        mask_random(like=mask_positions(3, sink(0), keep_self=True), seed=4),
        at_layers(mask_tokens("mask", 7), [-1]),
        keep_only(dl.sinks.AttentionShare(0.2), 8, ahead=1),
        keep_only((0, 3), 8),
    ):
        assert parse_hooks(repr(hook)) == (hook,)


def test_columns_are_hidden_in_the_rows_whose_progress_fits() -> None:
    model = model_of("llada")
    prompts = [PROMPTS[0], [*PROMPTS[1], 63, 63, 63]]
    hook = at_progress(mask_positions(-1, -2, 3), (0.26, 0.52))  # one row at a time
    together = dl.denoise(model, prompts, hooks=[hook], gen_length=8, steps=4)
    assert len({tuple(row.tolist()) for row in together.masked.sum(-1).T}) == 2  # the rows go on at their own pace
    for row, prompt in enumerate(prompts):
        alone = dl.denoise(model, [prompt], hooks=[hook], gen_length=8, steps=4)
        torch.testing.assert_close(together.confidence[:, row], alone.confidence[:, 0], atol=2e-5, rtol=1e-5)


def test_a_run_that_ends_before_the_steps_of_a_hook_says_that_it_did_not_act(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny("llada")
    early: dict[str, Any] = {"gen_length": 8, "block_length": 8, "threshold": 0.01}
    for hook, first in (
        (at_steps(ablate("z"), -1), 7),
        (at_layers(at_steps(ablate("z"), [5, 2]), [0]), 2),
        (at_steps(ablate("z"), slice(3, None)), 3),
        (freeze_sinks(dl.TopK(1), step=4), 4),
        (mask_random(like=at_steps(mask_top_sinks(1), [6])), 6),
    ):
        for denoise in (dl.denoise, lambda _, *args, **more: dl.bridge(model).denoise(*args, **more)):
            caplog.clear()
            run = denoise(model, [[5, 6, 7]], hooks=[hook], **early)
            assert run.steps == 1
            (record,) = caplog.records
            assert f"{hook} did not act: it begins at step {first}, and the run ended after 1" in record.message
    caplog.clear()
    for acts in (at_steps(ablate("z"), 0), at_steps(ablate("z"), slice(0, 4)), ablate("z")):
        dl.denoise(model, [[5, 6, 7]], hooks=[acts], **early)
    assert not caplog.records


def test_every_slice_that_holds_a_step_of_some_run_is_a_limit() -> None:
    ends = (None, *range(-4, 5))
    for start in ends:
        for stop in ends:
            for step in (None, 1, 2, -1, -3):
                given = slice(start, stop, step)
                if any(range(total)[given] for total in range(1, 20)):
                    at_steps(mask_top_sinks(1), given)
                else:
                    with pytest.raises(ValueError, match="there is no step in it"):
                        at_steps(mask_top_sinks(1), given)


def test_a_slice_without_a_step_of_the_run_says_that_the_hook_did_not_act(caplog: pytest.LogCaptureFixture) -> None:
    model, options = tiny("llada"), {"gen_length": 4, "steps": 4}
    for hook in (at_steps(ablate("z"), slice(20, None)), at_layers(at_steps(ablate("z"), slice(3, -2)), [0])):
        for denoise in (dl.denoise, lambda _, *args, **more: dl.bridge(model).denoise(*args, **more)):
            caplog.clear()
            denoise(model, [[5, 6, 7]], hooks=[hook], **options)
            (record,) = caplog.records
            assert record.message == f"{hook} did not act: the run has steps 0 to 3, and none of the hook's"


@pytest.mark.parametrize("share", [lambda p: p, lambda p: 0.5, lambda p: [1] * len(p)])
def test_a_function_of_progress_returns_truth_values(share: Any) -> None:
    model = tiny("llada")
    with pytest.raises(ValueError, match=r"the function returned numbers of torch\.(float32|int64) for the"):
        dl.denoise(model, [[5, 6, 7]], hooks=[at_progress(ablate("z"), share)], gen_length=4, steps=2)
    for chosen in (lambda p: True, lambda p: p < 0.5, lambda p: [True] * len(p)):
        dl.denoise(model, [[5, 6, 7]], hooks=[at_progress(ablate("z"), chosen)], gen_length=4, steps=2)
