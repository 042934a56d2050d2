"""Hooks written as text: what they may hold, and that nothing else runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlm_lens.hooks import (
    ablate,
    at_encoder,
    at_heads,
    at_layers,
    at_progress,
    at_steps,
    freeze_sinks,
    keep_only,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_tokens,
    mask_top_sinks,
    scale_attention,
    sink,
    zero_value,
)
from dlm_lens.hooks.expressions import detector_names, hook_names, parse_hooks
from dlm_lens.sinks import AboveMean, AboveStd, TopK


@pytest.mark.parametrize(
    ("text", "hooks"),
    [
        ("mask_positions(0)", [mask_positions(0)]),
        ("mask_positions(0, -1, stage='after')", [mask_positions(0, -1, stage="after")]),
        ("mask_positions(sink(0)), mask_positions(3)", [mask_positions(sink(0)), mask_positions(3)]),
        ("[mask_positions(2)]", [mask_positions(2)]),
        (" mask_positions( 1 )\n", [mask_positions(1)]),
    ],
)
def test_hooks_are_read(text: str, hooks: list[object]) -> None:
    assert list(parse_hooks(text)) == hooks


def test_detectors_and_their_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import dlm_lens.hooks as room
    from dlm_lens.hooks import expressions
    from dlm_lens.sinks import AttentionShare

    def keep(*values: object, top: object = None) -> object:
        mask = mask_positions(0)
        object.__setattr__(mask, "seen", (values, top))
        return mask

    monkeypatch.setattr(room, "keep", keep, raising=False)
    monkeypatch.setattr(room, "__dir__", lambda: [*room.__all__, "keep"])
    expressions._hook_makers.cache_clear()
    try:
        text = "keep(above_mean(0.5), attention_share(0.2), [top_k(2), None], (1, 'a'), range(2, 9, 3), -2, top=1)"
        (found,) = parse_hooks(text)
    finally:
        expressions._hook_makers.cache_clear()
    values = (AboveMean(eps=0.5), AttentionShare(0.2), [TopK(2), None], (1, "a"), range(2, 9, 3), -2)
    assert found.seen == (values, 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("__import__('os').system('x')", "no plain name"),
        ("open('x')", "'open' is no hook"),
        ("mask_sink(above_mean(3))", "'mask_sink' is no hook and no detector; perhaps mask_sinks, "),
        ("mask_sinks(abovemean(3))", "'abovemean' is no hook and no detector; perhaps above_mean, "),
        ("mask_positions([0, -1])", "takes positions one by one: mask_positions(0, -1)"),
        ("attach_hooks(1)", "'attach_hooks' is no hook"),
        ("eval('1')", "'eval' is no hook"),
        ("mask_positions", "alone is no value"),
        ("mask_positions(model)", "'model' alone is no value"),
        ("mask_positions(0).stage", "not allowed"),
        ("mask_positions(1 + 1)", "not allowed"),
        ("mask_positions(*[1])", "unpacks"),
        ("mask_positions(**{'a': 1})", "unpacks"),
        ("mask_positions(9 ** 9)", "not allowed"),
        ("[mask_positions(0) for _ in range(3)]", "not allowed"),
        ("(lambda: mask_positions(0))()", "no plain name"),
        ("mask_positions(f'{1}')", "not allowed"),
        ("mask_positions(b'1')", "not allowed"),
        ("mask_positions(wrong=3)", "unexpected keyword"),
        ("mask_positions(0, stage='never')", "stage is 'never'"),
        ("above_mean(3)", "which is no hook"),
        ("3", "which is no hook"),
        ("above_mean('a')", "must be a finite number"),
        ("mask_sinks(above_mean(-1))", "AboveMean(eps=-1): eps must be a finite number of at least 0"),
        ("mask_positions(range(1000000))", "more than"),
        ("mask_positions(range(above_mean(3)))", "range takes whole numbers, not 'above_mean(3)'"),
        ("mask_positions(range([3]))", "range takes whole numbers, not [3]"),
        ("mask_positions(0", "no hook expression"),
        ("mask_positions(0); mask_positions(1)", "no hook expression"),
        ("-" * 1500 + "1", "nested too deeply"),
        ("mask_positions(" + "1, " * 1000 + "1)", "characters"),
    ],
)
def test_anything_else_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_hooks(text)


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("open('made', 'w')", "mask_positions(open('made', 'w'))", "[open('made', 'w')]"):
        with pytest.raises(ValueError, match="is no hook"):
            parse_hooks(text)
    assert not (tmp_path / "made").exists()


CALLABLE = (
    "ablate", "ablate_features", "at_encoder", "at_heads", "at_layers", "at_progress", "at_steps", "by_row",
    "freeze_sinks", "keep_only", "mask_positions", "mask_random", "mask_sinks", "mask_tokens", "mask_top_sinks",
    "patch_from", "reconstruct", "scale_attention", "scale_features", "sink", "splice", "steer", "steer_along",
    "steer_feature", "until_committed", "zero_value",
)  # fmt: skip
"""All that --hooks and the settings of a recording, which may be another's, can call. An export of the room that is
no hook and no position belongs into `NOT_HOOKS`, not here."""


def test_an_expression_calls_these_hooks_and_no_other_export() -> None:
    assert hook_names() == CALLABLE


def test_the_detectors_known_beforehand_are_those_that_there_are() -> None:
    import inspect

    import dlm_lens.sinks as sinks

    kinds = [getattr(sinks, name) for name in sinks.__all__]
    detectors = {
        one.__name__
        for one in kinds
        if inspect.isclass(one) and issubclass(one, sinks.Detector) and one is not sinks.Detector
    }
    assert {name for name in detector_names() if not name.islower()} == detectors


@pytest.mark.parametrize(
    "hook",
    [
        mask_positions(3, sink(0)), mask_tokens("digits", 5), mask_random(3), mask_sinks(AboveStd(3.0), top=2),
        mask_random(like=mask_top_sinks(2), match="mass"), mask_sinks(TopK(2), per="model", source="previous"),
        freeze_sinks(TopK(1), step=2), freeze_sinks([3], step=1), keep_only(2, window=5), keep_only(window=3),
        keep_only(AboveMean(2.0), window=5, ahead=0), keep_only([0, sink(0)], window=4), scale_attention(3, 0.5),
        scale_attention((3, sink(0)), 0.5), scale_attention("masked", 0.5), zero_value(3), zero_value("masked"),
        zero_value(3, sink(1)), ablate("resid"), ablate("q", [1, 2], "zero", dims=[3]),
        at_heads(mask_positions(0), [1]), at_layers(mask_positions(0), [1, -1]),
        at_progress(mask_positions(0), (0.2, 0.5)), at_steps(mask_positions(0), 3),
        at_steps(mask_positions(0), range(2, 5)), at_steps(mask_positions(0), slice(None, -1)),
        at_encoder(ablate("resid", [0])),
    ],
    ids=str,
)  # fmt: skip
def test_a_hook_is_made_again_from_its_repr(hook: object) -> None:
    (made,) = parse_hooks(repr(hook))
    assert (type(made), repr(made)) == (type(hook), repr(hook))


def test_an_expression_with_ranges_is_checked_without_torch() -> None:
    """A command refuses a mistyped expression at once; torch takes seconds to import."""
    code = (
        "import sys; from dlm_lens.hooks.expressions import check_expression as c; "
        "c('at_steps(mask_positions(range(3)), slice(None, -1))'); print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
