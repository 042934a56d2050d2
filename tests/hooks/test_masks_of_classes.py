"""`classes=` of the sink hooks and of `mask_random`, against loops in float64 and planted statistics."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import PointContext, RunStep, SinkLayout
from dlm_lens.hooks import (
    attach_hooks,
    freeze_sinks,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_tokens,
    mask_top_sinks,
    parse_hooks,
)
from tests.hooks.by_hand import (
    PROMPTS,
    Network,
    above_mean,
    hide,
    logits_of_run,
    model_of,
    scores,
    settings_of,
    statistics,
    top,
)
from tests.hooks.test_other_columns import CLOSE, step_of
from tests.hooks.test_random_columns import chosen, drawn, nearest, planted, uneven

TEXTS = (".", "5", "apples")
FUNCTION = ("punctuation", "special", "mask", "end of text")


class Words:
    """Token i is TEXTS[i % 3]; 61 is special, 62 ends a text, 63 is the mask."""

    mask_token_id, eos_token_id, pad_token_id, all_special_ids = 63, 62, 61, (61, 62, 63)

    def decode(self, ids: Any, **_: Any) -> str:
        ids = [ids] if isinstance(ids, int) else [int(i) for i in ids]
        return " ".join("<>" if i > 60 else TEXTS[i % 3] for i in ids)


def class_of(token: int, masked: bool) -> str:
    named = {61: "special", 62: "end of text", 63: "mask"}
    return "mask" if masked else named.get(token) or ("punctuation", "digits", "words")[token % 3]


def worded(name: str) -> Any:
    model = model_of(name)
    model.tokenizer = Words()
    return model


CASES = [
    ("llada", mask_top_sinks(2, classes=FUNCTION), False),
    ("llada", mask_top_sinks(3, classes=("digits", "words"), stage="after"), False),
    ("llada", mask_top_sinks(3, classes=("digits", "mask")), True),
    ("llada", mask_top_sinks(3, classes=("words", "mask"), per="layer", source="previous"), False),
    ("llada", mask_sinks(dl.AboveMean(0.2), top=2, classes="mask"), False),
    ("front", mask_top_sinks(4, classes=("learned sink", "punctuation")), False),
    ("end", mask_top_sinks(4, classes=("words", "mask"), relative=False), False),
    ("llama", mask_top_sinks(2, classes=("punctuation", "digits")), False),
]


@pytest.mark.parametrize(("name", "hook", "guided"), CASES, ids=str)
@torch.no_grad()
def test_every_step_hides_the_sinks_of_the_classes(name: str, hook: Any, guided: bool) -> None:
    model = worded(name)
    run, logits = logits_of_run(model, [hook], name, guided=guided)
    network, before = Network(model, guided=0.7 if guided else 0.0), {}  # the statistics of the step before
    layout = SinkLayout.of(model)
    hid = kept = 0
    for step in range(run.steps):
        stop = run.prompt_length + step if network.causal else run.tokens.shape[1]
        canvas, content, masked = (t[:, :stop] for t in (run.canvases[step], run.attention_mask, run.masked[step]))
        now: dict[int, Any] = {}

        def edit(
            layer: int, value: Tensor, visible: Tensor, counted: Tensor,
            canvas: Tensor = canvas, masked: Tensor = masked, now: Any = now, before: Any = before,
        ) -> Tensor:  # fmt: skip
            nonlocal hid, kept
            now[layer] = statistics(
                value.softmax(-1) if hook.stage == "before_softmax" else value, visible, counted
            )
            given = before.get(layer, now[layer]) if hook.source == "previous" else now[layer]
            keys, gone = value.shape[-1], {}
            classes = [["learned sink"] * keys for _ in canvas]
            for row, line in enumerate(classes):
                line[layout.canvas(keys)] = [
                    class_of(*pair) for pair in zip(canvas[row].tolist(), masked[row].tolist(), strict=True)
                ]
            for b in range(len(value)):
                for h in range(value.shape[1]):
                    found = scores(given[b] if hook.per == "layer" else [given[b][h]], hook.relative)
                    if isinstance(hook.detector, dl.TopK):
                        best = top(found, hook.detector.k)
                    else:
                        sinks = above_mean(found, hook.detector.eps)
                        best = sorted(sinks, key=lambda j: -float(found[j]))[: hook.top]
                    gone[b, h] = {j for j in best if classes[b % len(canvas)][j] in hook.classes}
                    hid, kept = hid + len(gone[b, h]), kept + len(best) - len(gone[b, h])
            return hide(value, visible, lambda b, h, i: gone[b, h], hook.stage)

        got = network.logits(canvas, content, masked, edit, hook.stage)
        before = now
        expected = got[:, -1] if network.causal else got
        torch.testing.assert_close(
            logits[step][slice(None) if network.causal else content],
            expected[slice(None) if network.causal else content],
            **CLOSE,
        )
    # Both kinds of sinks were there, so that the condition mattered.
    assert hid > 10
    assert kept > 10


def planted_run() -> RunStep:
    """Rows of 24 with 12 masks; the second has three positions of padding."""
    ids = torch.tensor([PROMPTS[0] + [63] * 12, [61] * 3 + PROMPTS[1] + [63] * 12])
    return step_of(worded("llada"), ids, ids == 63, valid=ids != 61)


def classes_in(run: RunStep) -> list[list[str]]:
    pairs = zip(run.tokens.tolist(), run.masked.tolist(), strict=True)
    return [[class_of(*pair) for pair in zip(tokens, masked, strict=True)] for tokens, masked in pairs]


def test_where_the_strongest_is_of_another_class_nothing_takes_its_place() -> None:
    run = planted_run()
    sums = uneven(0)
    sums[0, 0, 1], sums[0, 1, 7], sums[0, 2, 20] = 30.0, 30.0, 30.0  # ids 41 (words), 2 (words), a mask
    sums[0, 3, 0] = 30.0  # id 3: punctuation
    found = chosen(mask_top_sinks(1, classes=("punctuation", "mask")), run, sums)[0]
    assert found.sum(-1).tolist() == [0, 0, 1, 1]
    assert found[2, 20]
    assert found[3, 0]
    words = chosen(mask_top_sinks(1, classes="words"), run, sums)[0]
    assert (found | words).equal(chosen(mask_top_sinks(1), run, sums)[0])
    assert not (found & words).any()


@pytest.mark.parametrize("match", ["columns", "mass"])
def test_a_control_matches_what_is_hidden_and_not_what_the_rule_chose(match: Any) -> None:
    run, sums = planted_run(), uneven(4)
    real = mask_top_sinks(3, classes=("digits", "words"))
    gone = chosen(real, run, sums)
    found = chosen(mask_random(like=real, match=match, seed=3), run, sums)
    order = drawn(run, 0)
    assert {*gone.sum(-1).flatten().tolist()} >= {0, 1, 2}
    for row in range(2):
        for head in range(4):
            away = set(gone[row, head].nonzero().flatten().tolist())
            free = [j for j in order[row][head] if j not in away]
            received = sums[row, head].double()
            wanted = set(free[: len(away)]) if match == "columns" else nearest(order[row][head], received, away)
            assert set(found[row, head].nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize("match", ["columns", "mass"])
def test_random_columns_of_classes_are_drawn_among_these(match: Any) -> None:
    run, sums = planted_run(), uneven(5)
    classes, order = classes_in(run), drawn(run, 0)
    real = mask_top_sinks(3)
    gone = chosen(real, run, sums)
    found = chosen(mask_random(like=real, match=match, seed=3, classes=("words", "digits")), run, sums)
    some = chosen(mask_random(4, seed=3, classes="words"), run, sums)
    for row in range(2):
        for head in range(4):
            away = set(gone[row, head].nonzero().flatten().tolist())
            may = [j for j in order[row][head] if classes[row][j] in ("words", "digits")]
            free = [j for j in may if j not in away]
            target = sums[row, head].double()
            wanted = set(free[:3]) if match == "columns" else nearest(free, target, away)
            assert set(found[row, head].nonzero().flatten().tolist()) == wanted
            words = [j for j in may if classes[row][j] == "words"]
            assert set(some[row, head].nonzero().flatten().tolist()) == set(words[:4])


@pytest.mark.long
def test_a_prompt_has_in_a_batch_what_it_has_alone() -> None:
    for name in ("llada", "llama"):
        model = worded(name)
        for hook in (
            mask_top_sinks(2, classes=FUNCTION),
            mask_random(like=mask_top_sinks(2, classes="words"), match="mass"),
            mask_random(3, classes=("digits", "mask")),
        ):
            together = dl.denoise(model, PROMPTS, hooks=[hook], **settings_of(name))
            hidden = 0.0
            for row, prompt in enumerate(PROMPTS):
                alone = dl.denoise(model, [prompt], hooks=[hook], **settings_of(name))
                assert alone.answers == [together.answers[row]], hook
                torch.testing.assert_close(
                    together.confidence[:, row, -alone.confidence.shape[-1] :], alone.confidence[:, 0],
                    atol=1e-5, rtol=1e-4, equal_nan=True,
                )  # fmt: skip
                hidden += alone.settings["columns_hidden"][0] / len(PROMPTS)
            assert together.settings["columns_hidden"][0] == pytest.approx(hidden)
            assert together.settings["hooks"] == (repr(hook),)


@pytest.mark.long
def test_the_hosts_and_a_frozen_set_know_the_classes() -> None:
    model = dl.load("toy")
    prompt = "tom has 5 apples . tom buys 4 more . how many apples ? :"
    hook = mask_top_sinks(2, classes=("punctuation", "special", "mask", "end of text"))
    run = dl.denoise(model, prompt, hooks=[hook])
    assert run.tokens.equal(dl.bridge(model).denoise(prompt, hooks=[hook]).tokens)
    words = dl.denoise(model, prompt, hooks=[mask_top_sinks(2, classes=("digits", "words", "other"))])
    assert 0.1 < run.settings["columns_hidden"][0] < 1.9
    assert 0.1 < words.settings["columns_hidden"][0] < 1.9
    frozen = dl.denoise(model, prompt, hooks=[freeze_sinks(dl.TopK(2), step=0, classes="digits")])
    everything = dl.denoise(model, prompt, hooks=[freeze_sinks(dl.TopK(2), step=0)])
    assert 0 < frozen.settings["columns_hidden"][0] < everything.settings["columns_hidden"][0]
    with pytest.raises(ValueError, match="needs to know the run's step"), attach_hooks(model, hook):
        model(input_ids=run.canvases[3])


def test_learned_sinks_are_a_class() -> None:
    model, options = worded("front"), settings_of("front")
    layout, step = SinkLayout.of(model), planted_run()
    sums = torch.ones(2, 4, 26)
    sums[..., 0], sums[..., 5] = 9.0, 8.0
    context = PointContext("here", 0, layout, run=step)
    (found,) = {
        tuple(one.nonzero().flatten().tolist())
        for one in mask_top_sinks(2, classes="learned sink")
        .hidden(26, planted(sums), context)
        .columns.flatten(0, 1)
    }
    assert found == (0,)
    run = dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(26, classes="learned sink")], **options)
    assert run.settings["columns_hidden"] == (2,)


def test_ids_are_enough_for_classes_without_text() -> None:
    run = planted_run()
    bare = RunStep(**{**vars(run), "tokenizer": None, "memory": {}})
    sums = uneven(6)
    for classes in (("mask",), ("end of text", "mask")):
        hook = mask_top_sinks(4, classes=classes)
        assert chosen(hook, bare, sums).equal(chosen(hook, run, sums))
    hook = mask_top_sinks(4, classes=("mask", "digits"))
    with pytest.raises(ValueError, match="there is no tokenizer to tell tokens of the classes digits"):
        chosen(hook, bare, sums)


def test_they_read_as_written() -> None:
    hook = mask_top_sinks(1, classes=("punctuation",))
    assert repr(hook) == "mask_sinks(TopK(k=1), classes=('punctuation',))"
    text = (
        "mask_random(like=mask_sinks(TopK(k=1), classes=('mask', 'end of text')), match='mass', classes=('words',))"
    )
    (control,) = parse_hooks(text)
    assert repr(control) == text
    assert parse_hooks('mask_top_sinks(1, classes="punctuation")') == (hook,)
    assert parse_hooks("mask_top_sinks(1, classes=['punctuation', 'punctuation'])") == (hook,)
    assert parse_hooks(repr(hook)) == (hook,)
    for call, sentence in (
        (
            lambda: mask_top_sinks(1, classes=("verbs",)),
            r"classes is \('verbs',\); it must be one or several of 'm",
        ),
        (
            lambda: mask_sinks(dl.TopK(1), classes=()),
            r"classes is \(\); it must be one or several of 'mask', 'end of",
        ),
        (
            lambda: mask_random(1, classes=3),
            "classes is 3; it must be one or several of 'mask', 'end of text', 'sp",
        ),
        (lambda: mask_random(1, classes=("words", "verbs")), r"classes is \('words', 'verbs'\); it must be one"),
        (lambda: mask_random(1, classes="learned sink"), "classes is 'learned sink'; it must be one or several of"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


def test_mask_tokens_and_classes_agree() -> None:
    run, everything = planted_run(), torch.full((2, 4, 24), 1.0)
    for name in ("mask", "digits", "words", "punctuation"):
        hidden = chosen(mask_tokens(name), run, everything)
        assert chosen(mask_top_sinks(24, classes=name), run, everything)[0].equal(hidden[0])
    assert not chosen(mask_positions(0), run, everything).equal(chosen(mask_tokens("mask"), run, everything))
