from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import Hook, PointContext
from dlm_lens.hooks import MaskPositions, at_steps, attach_hooks, mask_positions, mask_tokens, sink
from dlm_lens.testing import tiny
from tests.reference import forward64


@pytest.mark.parametrize("stage", ["before_softmax", "after"])
@torch.no_grad()
def test_hiding_positions_equals_float64(stage: str) -> None:
    model = tiny("llada")
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    hook = mask_positions(2, -1, stage=stage, keep_self=True)

    def by_hand(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        for query in range(9):
            for key in (2, 8):
                if query != key:
                    value[:, :, query, key] = torch.finfo(torch.float32).min if stage == "before_softmax" else 0
        return value

    expected = forward64(model, ids, edits={(layer, hook.site): by_hand for layer in range(2)})["logits"]
    for layer in model.model.layers:
        point = layer.self_attn.get_submodule(f"hook_{hook.site}")
        point.register_forward_hook(lambda _m, _a, out: hook(out))
    got = model(input_ids=ids).logits.double()
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    assert (got - forward64(model, ids)["logits"]).abs().max() > 1e-2


@pytest.mark.parametrize("place", ["front", "end"])
@pytest.mark.parametrize("stage", ["before_softmax", "after"])
@torch.no_grad()
def test_sinks_and_canvas_positions_are_addressed_in_a_sink_model(stage: str, place: str) -> None:
    model = tiny("sink_qwen", num_sinks=2, sink_placement=place)
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    hidden = (1, 2 + 3, 2 + 8) if place == "front" else (9 + 1, 3, 8)

    def by_hand(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        for query in range(11):
            for key in hidden:
                if query != key:
                    value[:, :, query, key] = torch.finfo(torch.float32).min if stage == "before_softmax" else 0
        return value

    hook = mask_positions(sink(1), 3, -1, stage=stage, keep_self=True)
    expected = forward64(model, ids, edits={(1, hook.site): by_hand})["logits"]
    plain = model(input_ids=ids).logits
    with attach_hooks(model, hook, layers=[-1]):
        got = model(input_ids=ids).logits.double()
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    assert (got - plain).abs().max() > 1e-2
    assert model(input_ids=ids).logits.equal(plain)


def test_attached_hooks_run_in_order_know_their_place_and_leave_on_errors() -> None:
    model = tiny("llada")
    seen = []

    class Watch:
        site = "pattern"

        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
            seen.append((self.name, hook.name, hook.layer(), hook.sinks.count))
            return tensor

    def interrupted() -> None:
        with attach_hooks(model, Watch("a"), Watch("b")):
            model(input_ids=torch.tensor([[1, 2]]))
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in (0, 1)]
    assert seen == [(who, names[layer], layer, 0) for layer in (0, 1) for who in ("a", "b")]
    model(input_ids=torch.tensor([[1, 2]]))
    assert len(seen) == 4


def test_attaching_what_does_not_fit_is_refused() -> None:
    model = tiny("llada")
    with pytest.raises(ValueError, match="layer 2 of 2: layers go from 0 to 1"), attach_hooks(model, layers=[2]):
        pass
    with pytest.raises(ValueError, match="Linear has no hook points"), attach_hooks(torch.nn.Linear(1, 1)):
        pass
    wrong = type("Wrong", (), {"site": "elsewhere", "__call__": lambda self, x, hook=None: x})()
    with (
        pytest.raises(ValueError, match="belongs at 'elsewhere', which is none of q, k"),
        attach_hooks(model, wrong),
    ):
        pass


def test_a_sink_needs_the_model_and_must_exist() -> None:
    assert repr(mask_positions(sink(0), 3)) == "mask_positions(sink(0), 3)"
    with pytest.raises(ValueError, match=r"the position of a sink depends on the model; use .*attach_hooks"):
        mask_positions(sink(0))(torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"sink\(-1\): sinks are counted from 0"):
        sink(-1)
    model = tiny("sink_qwen", num_sinks=1)
    with (
        pytest.raises(ValueError, match=r"position sink\(1\) is not there; the model has 1 sink tokens"),
        attach_hooks(model, mask_positions(sink(1))),
    ):
        model(input_ids=torch.tensor([[1, 2]]))


def test_with_a_cache_the_queries_are_the_last_ones() -> None:
    scores = torch.zeros(1, 1, 2, 6)
    hidden = mask_positions(5, 1, keep_self=True)(scores) < 0
    assert hidden[0, 0].tolist() == [[False, True, False, False, False, True], [False, True] + [False] * 4]


@pytest.mark.parametrize("stage", ["before_softmax", "after"])
def test_a_row_that_would_lose_every_key_keeps_itself_and_no_other_does(stage: str) -> None:
    floor = torch.finfo(torch.float32).min
    causal = torch.randn(1, 2, 4, 4).masked_fill(~torch.ones(4, 4).bool().tril(), floor)
    value = causal if stage == "before_softmax" else causal.softmax(-1)
    edited = mask_positions(0, 1, stage=stage)(value)
    hidden = edited != value
    # Row 0 sees itself alone and row 1 the two hidden keys: they keep themselves; rows 2 and 3 lose both.
    assert hidden[0, 0].nonzero().tolist() == [[1, 0], [2, 0], [2, 1], [3, 0], [3, 1]]
    everything = mask_positions(0, 1, 2, 3, stage=stage)(value)
    kept = everything > floor / 2 if stage == "before_softmax" else everything > 0
    assert kept[0, 1].equal(torch.eye(4).bool())
    rows = mask_positions(2, stage="after", renormalise=True)(causal.softmax(-1)).sum(-1)
    torch.testing.assert_close(rows, torch.ones(1, 2, 4))


def test_it_is_a_hook_with_a_readable_repr_and_leaves_its_argument_alone() -> None:
    hook = mask_positions(3)
    assert isinstance(hook, Hook)
    assert hook == MaskPositions((3,), "before_softmax")
    assert repr(hook) == "mask_positions(3)"
    assert repr(mask_positions(3, -1, stage="after", renormalise=True, keep_self=True)) == (
        "mask_positions(3, -1, stage='after', renormalise=True, keep_self=True)"
    )
    assert hash(hook) == hash(mask_positions(3))
    scores = torch.zeros(1, 1, 4, 4)
    assert hook(scores).min() < -1e30
    assert scores.abs().max() == 0


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one position"):
        mask_positions()
    with pytest.raises(ValueError, match="stage is 'during'"):
        mask_positions(1, stage="during")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask_positions\\('eos'\\): a position is a whole number, sink"):
        mask_positions("eos")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="position 7 is not there; the model has 4 canvas positions"):
        mask_positions(7)(torch.zeros(1, 1, 4, 4))


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    for one in (-1, True, 2.5):
        with pytest.raises(ValueError, match=r"it must be a token id, or one of mask, prompt"):
            mask_tokens(one)  # type: ignore[arg-type]
    model = tiny("llada")
    with pytest.raises(ValueError, match=r"mask_tokens\(3, 64\): token id 64 is not in the vocabulary; .* 0 to 63"):
        dl.denoise(model, [[5, 6]], hooks=[at_steps(mask_tokens(3, 64), 0)], gen_length=2, steps=1)
    dl.denoise(model, [[5, 6]], hooks=[mask_tokens(63)], gen_length=2, steps=1)


@pytest.mark.parametrize(
    ("stage", "own", "others"),
    [
        (
            "before_softmax",
            "blocks.1.attn.hook_attn_scores",
            ["blocks.1.attn.hook_pattern", "blocks.1.attn.v.hook_out"],
        ),
        ("after", "blocks.1.attn.hook_pattern", ["blocks.1.attn.hook_attn_scores", "blocks.1.hook_resid_post"]),
    ],
)
def test_a_host_s_other_points_are_refused(stage: Any, own: str, others: list[str]) -> None:
    """On a pattern, what hides scores would leave minus infinity, and NaN after the softmax."""
    hook, pattern = mask_positions(0, stage=stage), torch.full((1, 2, 4, 4), 0.25)
    assert hook(pattern, PointContext(own, 1)).equal(hook(pattern))
    for name in others:
        with pytest.raises(ValueError, match=rf"belongs at {own.rpartition('.')[2]} and was put at {name}"):
            hook(pattern, PointContext(name, 1))


@pytest.mark.parametrize("family", ["causal", "bd3lm"])
def test_a_position_after_the_prefix_of_a_step_is_hidden_once_it_is_seen(family: str) -> None:
    """As if the hook were limited to the steps that see it; the prefix before is untouched."""
    model = tiny(family)
    place = 4
    settings: dict[str, Any] = {"gen_length": 8} | ({} if family == "causal" else {"block_length": 4})
    run = dl.denoise(model, [[5, 6, 7]], hooks=[mask_positions(place)], **settings)
    plain = dl.denoise(model, [[5, 6, 7]], **settings)
    if family == "causal":  # step t sees the 3 + t tokens that are written, and decides the next
        first, stop = place - 2, place + 1
    else:
        first = next(step for step, (_, end) in enumerate(plain.spans) if end > place)
        stop = plain.spans[first][0]
    limited = dl.denoise(
        model, [[5, 6, 7]], hooks=[at_steps(mask_positions(place), slice(first, None))], **settings
    )
    assert run.tokens.equal(limited.tokens)
    assert run.tokens[:, :stop].equal(plain.tokens[:, :stop])
    assert not run.tokens.equal(plain.tokens)
    with pytest.raises(ValueError, match="position 99 is not there"):
        dl.denoise(model, [[5, 6, 7]], hooks=[mask_positions(99)], **settings)
