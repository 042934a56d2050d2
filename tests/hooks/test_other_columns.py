"""`mask_tokens`, `mask_random`, `freeze_sinks` and `keep_only` against definitions written by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import ColumnStats, PointContext, RunStep, SinkLayout
from dlm_lens.hooks import (
    at_heads,
    at_steps,
    freeze_sinks,
    keep_only,
    mask_positions,
    mask_random,
    mask_tokens,
    mask_top_sinks,
    sink,
)
from tests.hooks.by_hand import (
    PROMPTS,
    Network,
    hide,
    logits_of_run,
    model_of,
    scores,
    settings_of,
    statistics,
    top,
)

# float32 through two layers against float64; logits are of the order of 3.
CLOSE = {"atol": 1e-4, "rtol": 1e-4}

Gone = Callable[[int, int, int, int], set[int]]


def check_run(
    name: str, hook: Any, gone_at: Callable[..., Gone], stage: str = "before_softmax", **keep: bool
) -> None:
    """Every step of a padded run against float64; `gone_at(step, run, ...)` names what goes, by layer and query."""
    model = model_of(name)
    run, logits = logits_of_run(model, [hook], name)
    network = Network(model)
    for step in range(run.steps):
        stop = run.prompt_length + step if network.causal else run.tokens.shape[1]
        state = [t[:, :stop] for t in (run.canvases[step], run.attention_mask, run.masked[step])]

        def edit(
            layer: int, value: Tensor, visible: Tensor, counted: Tensor, step: int = step, state: Any = state
        ) -> Tensor:
            pattern = value.softmax(-1) if stage == "before_softmax" else value
            gone = gone_at(step, run, state, pattern, visible, counted)
            return hide(value, visible, lambda b, h, i: gone(layer, b, h, i), stage, **keep)

        got = network.logits(*state, edit, stage)
        expected = got[:, -1] if network.causal else got
        rows = slice(None) if network.causal else state[1]
        torch.testing.assert_close(logits[step][rows], expected[rows], **CLOSE)


@pytest.mark.parametrize("name", ["llada", "llama"])
@torch.no_grad()
def test_tokens_are_hidden_by_what_they_are_at_the_step(name: str) -> None:
    def gone_at(step: int, run: Any, state: Any, *_: Any) -> Gone:
        canvas, content, masked = state
        given = content & ~run.masked[0][:, : canvas.shape[1]]

        def gone(layer: int, b: int, h: int, i: int) -> set[int]:
            found = set()
            for j in range(canvas.shape[1]):
                if (masked[b, j] or int(canvas[b, j]) in (7, 5)) and content[b, j]:
                    found.add(j)
                if step == 2 and given[b, j]:
                    found.add(j)
            return found

        return gone

    if name == "llama":
        check_run(name, mask_tokens(7, 5, "mask"), lambda step, *rest: gone_at(0, *rest))
        return
    check_run(name, mask_tokens("mask", 7, 5, stage="after"), lambda step, *rest: gone_at(0, *rest), "after")


def step_of(model: Any, tokens: Tensor, masked: Tensor, **more: Any) -> RunStep:
    valid = torch.ones_like(masked)
    given = {"valid": valid, "answer": masked, **more}
    return RunStep(1, 4, 0, (0, 4), tokens, masked, given["valid"], given["answer"], model.config, model.tokenizer)


def hidden_by(hook: Any, run: RunStep, layer: int = 0, sinks: SinkLayout | None = None) -> Tensor:
    """The columns that a hook hides, without asking what they receive."""

    def unused() -> ColumnStats:
        raise AssertionError("this hook needs no statistics")

    layout = sinks or SinkLayout()
    context = PointContext("here", layer, layout, run=run, depth=2)
    found = hook.hidden(run.tokens.shape[1] + layout.count, unused, context)
    assert found is not None
    return found.resolved(4, torch.device("cpu")).columns


def test_classes_of_text_are_those_of_the_tokenizer() -> None:
    model = dl.load("toy")
    text = "tom has 5 apples . how many ? :"
    ids = torch.tensor([model.tokenizer(text, add_special_tokens=False)["input_ids"]])
    texts = [model.tokenizer.decode(i).strip() for i in ids[0]]
    ids = torch.cat([ids, torch.tensor([[model.config.mask_token_id, model.config.eos_token_id]])], 1)
    masked = ids == model.config.mask_token_id
    run = step_of(model, ids, masked)
    expected = {
        "punctuation": [t in ".?:" for t in texts] + [False, False],
        "digits": [t == "5" for t in texts] + [False, False],
        "words": [t.isalpha() for t in texts] + [False, False],
        "whitespace": [False] * (len(texts) + 2),
        "mask": [False] * len(texts) + [True, False],
        "eos": [False] * (len(texts) + 1) + [True],
        "special": [False] * (len(texts) + 1) + [True],
        "prompt": [True] * len(texts) + [False, True],
    }
    for name, wanted in expected.items():
        assert hidden_by(mask_tokens(name), run)[0, 0].tolist() == wanted, name
    both = hidden_by(mask_tokens("digits", "punctuation"), run)[0, 0]
    assert both.tolist() == [a or b for a, b in zip(expected["digits"], expected["punctuation"], strict=True)]
    beside = hidden_by(mask_tokens("digits"), run, sinks=SinkLayout(2, "front"))[0, 0]
    assert beside.tolist() == [False, False, *expected["digits"]]
    assert repr(mask_tokens("digits", 7)) == "mask_tokens('digits', 7)"


def test_random_columns_are_content_follow_from_the_row_and_change_with_everything_else() -> None:
    model = model_of("llada")
    ids = torch.tensor([PROMPTS[0] + [63] * 4, [61] * 3 + PROMPTS[1] + [63] * 4])
    masked, valid = ids == 63, ids != 61
    run = step_of(model, ids, masked, valid=valid)
    hook = mask_random(3, seed=1)
    found = hidden_by(hook, run)
    assert found.shape == (2, 4, 16)
    assert (found.sum(-1) == 3).all()
    assert not (found & ~valid[:, None]).any()
    alone = step_of(model, ids[1:, 3:], masked[1:, 3:])
    assert hidden_by(hook, alone)[0].equal(found[1, :, 3:])
    others = [
        hidden_by(mask_random(3, seed=2), run),
        hidden_by(hook, run, layer=1),
        hidden_by(hook, RunStep(**{**vars(run), "step": 2})),
    ]
    assert all((found & other).sum() < found.sum() for other in others)
    assert not found[0, 0].equal(found[0, 1])
    assert hidden_by(mask_random(40), run).sum(-1).tolist() == [[16] * 4, [13] * 4]
    # Even: each of 16 positions is one of 3 with probability 3/16; 1,000 draws, five standard deviations.
    counts = sum(hidden_by(mask_random(3, seed=seed), run)[0].sum(0) for seed in range(250))
    assert (counts - 1000 * 3 / 16).abs().max() < 5 * (1000 * 3 / 16 * 13 / 16) ** 0.5


def test_the_control_hides_as_many_others_in_every_map() -> None:
    layout = SinkLayout(2, "front")
    model = model_of("front")
    ids = torch.tensor([PROMPTS[0] + [63] * 4, [61] * 3 + PROMPTS[1] + [63] * 4])
    run = step_of(model, ids, ids == 63, valid=ids != 61)
    real = mask_positions(sink(0), 4, -1, 0)
    control = mask_random(like=at_heads(real, [1, 2]))
    wanted, found = hidden_by(at_heads(real, [1, 2]), run, sinks=layout), hidden_by(control, run, sinks=layout)
    assert not (wanted & found).any()
    # Position 0 is padding in the second row: nothing to match there.
    assert found.sum(-1).tolist() == [[0, 4, 4, 0], [0, 3, 3, 0]]
    assert not found[..., :2].any()
    assert found[0, 1].equal(found[0, 2])  # as the hook, which hides the same columns in all its heads
    everything = mask_positions(*range(0, 14))
    assert hidden_by(mask_random(like=everything), run, sinks=layout)[0].sum() == 2  # all that is left of 16
    assert mask_random(like=mask_top_sinks(2, stage="after")).site == "pattern"
    assert repr(mask_random(like=mask_top_sinks(2), seed=3)) == "mask_random(like=mask_sinks(TopK(k=2)), seed=3)"


def test_a_control_in_a_run_counts_what_its_hook_counts() -> None:
    model, options = model_of("llada"), settings_of("llada")
    real = at_steps(dl.hooks.mask_sinks(dl.AboveMean(0.3)), [1, 2])
    control = mask_random(like=real)
    run = dl.denoise(model, PROMPTS, hooks=[control], **options)
    (count,) = run.settings["columns_hidden"]
    assert 0.5 < count < 8
    again = dl.denoise(model, PROMPTS, hooks=[control], **options)
    other = dl.denoise(model, PROMPTS, hooks=[mask_random(like=real, seed=1)], **options)
    assert run.confidence.equal(again.confidence)
    assert not run.confidence.equal(other.confidence)


@torch.no_grad()
def test_frozen_sinks_stay_where_they_were() -> None:
    held: dict[tuple[int, int, int], set[int]] = {}

    def gone_at(step: int, run: Any, state: Any, pattern: Tensor, visible: Tensor, counted: Tensor) -> Gone:
        def gone(layer: int, b: int, h: int, i: int) -> set[int]:
            if step == 1 and (layer, b, h) not in held:
                found = statistics(pattern[b : b + 1, h : h + 1], visible[b : b + 1, h : h + 1], counted[b : b + 1])
                held[layer, b, h] = set(top(scores([found[0][0]]), 2))
            return held.get((layer, b, h), set())

        return gone

    check_run("llada", freeze_sinks(dl.TopK(2), step=1), gone_at)
    held.clear()
    check_run(
        "llama", freeze_sinks(dl.TopK(2), step=-4, stage="after", keep_self=True), gone_at, "after", keep_self=True
    )
    assert held


def test_positions_can_be_frozen_and_a_step_must_be_seen() -> None:
    assert freeze_sinks([3, sink(0)], step=2) == at_steps(mask_positions(3, sink(0)), slice(2, None))
    hook = freeze_sinks(dl.TopK(2), step=1, stage="after")
    assert repr(hook) == "freeze_sinks(TopK(k=2), stage='after', step=1)"
    assert hash(hook) == hash(freeze_sinks(dl.TopK(2), step=1, stage="after"))
    with pytest.raises(ValueError, match=r"step 4 is not there; the run has steps 0 to 3"):
        dl.denoise(model_of("llada"), PROMPTS, hooks=[freeze_sinks(dl.TopK(1), step=4)], **settings_of("llada"))
    model = model_of("llada")
    ids = torch.tensor([PROMPTS[0]])
    late = RunStep(**{**vars(step_of(model, ids, ids == 63)), "step": 2})
    with pytest.raises(ValueError, match="has not seen step 1 in layer 0: apply it there too"):
        hidden_by(hook, late)


@pytest.mark.parametrize(
    ("name", "ahead", "stage"),
    [("llada", None, "before_softmax"), ("llada", 2, "after"), ("front", 0, "before_softmax"),
     ("end", 1, "before_softmax"), ("front", None, "after"), ("llama", None, "before_softmax"),
     ("llama", 3, "after")],
)  # fmt: skip
@torch.no_grad()
def test_keep_only_leaves_sinks_and_the_window(name: str, ahead: int | None, stage: str) -> None:
    model = model_of(name)
    count = getattr(model.config, "num_sinks", 0)
    front = getattr(model.config, "sink_placement", "front") == "front"
    kept = (sink(1), 4) if count else (4, 0)

    def gone_at(step: int, run: Any, state: Any, pattern: Tensor, *_: Any) -> Gone:
        keys = pattern.shape[-1]
        learned = set(range(count)) if front else set(range(keys - count, keys))
        shift = count if front else 0
        stay = {sorted(learned)[1], 4 + shift} if count else {4, 0}

        def gone(layer: int, b: int, h: int, i: int) -> set[int]:
            found = set()
            for j in range(keys):
                back = i - j
                inside = 0 <= back < 3 or (back < 0 and (ahead is None or -back <= ahead))
                near = inside and i not in learned and j not in learned
                if not (near or i == j or j in stay):
                    found.add(j)
            return found

        return gone

    check_run(name, keep_only(kept, 3, ahead=ahead, stage=stage), gone_at, stage)


@torch.no_grad()
def test_keep_only_finds_its_sinks() -> None:
    def gone_at(step: int, run: Any, state: Any, pattern: Tensor, visible: Tensor, counted: Tensor) -> Gone:
        maps = statistics(pattern, visible, counted)
        best = [[set(top(scores([one]), 2)) for one in row] for row in maps]

        def gone(layer: int, b: int, h: int, i: int) -> set[int]:
            return {j for j in range(pattern.shape[-1]) if not (-1 <= i - j < 2 or j in best[b][h])}

        return gone

    check_run("llada", keep_only(2, 2, ahead=1), gone_at)


def test_bad_settings_are_refused() -> None:
    for call, sentence in (
        (lambda: keep_only(1, 0), r"keep_only\(window=0\): it must be a whole number of at least 1"),
        (lambda: keep_only(1, 3, ahead=-1), r"keep_only\(ahead=-1\): it must be a whole number of at least 0"),
        (lambda: keep_only([1], 3, per="layer"), "per: only for a detector or a number; these sinks are positions"),
        (lambda: keep_only(3.5, 3), "3.5 is not a detector"),
        (lambda: mask_tokens(), "mask_tokens needs a class"),
        (
            lambda: mask_tokens("verbs"),
            r"mask_tokens\('verbs'\): it must be a token id, or one of mask, prompt, eos",
        ),
        (lambda: mask_random(), r"mask_random\(k=None, like=None\): give one of the two"),
        (lambda: mask_random(2, like=mask_top_sinks(1)), "give one of the two"),
        (lambda: mask_random(0), "k must be a whole number of at least 1"),
        (lambda: mask_random(like=3), "must be a hook that hides columns"),
        (lambda: mask_random(like=mask_top_sinks(1), stage="after"), "takes stage, renormalise and keep_self from"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    with pytest.raises(ValueError, match=r"needs to know the run's step: pass it to dlm_lens\.denoise"):
        mask_tokens("mask")(torch.zeros(1, 1, 9, 9))
    assert repr(keep_only(2, 8, ahead=0, per="layer")) == "keep_only(TopK(k=2), per='layer', window=8, ahead=0)"
    assert repr(keep_only((0, sink(1)), 8, stage="after")) == "keep_only([0, sink(1)], window=8, stage='after')"
