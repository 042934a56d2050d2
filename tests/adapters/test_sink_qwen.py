"""The sink-token family: every option and combination against the independent float64 network."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.adapters.families.sink_qwen import SinkQwenConfig
from dlm_lens.attention import HOOK_POINTS, SinkLayout
from dlm_lens.testing import tiny
from tests.reference import forward64

CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # as in tests/attention/test_functions.py
OPTIONS = [
    {"num_sinks": count, "sink_placement": place, "zero_sink_value": zero, "gated_attention": gated}
    for count, place, zero, gated in product((0, 1, 2, 4), ("front", "end"), (False, True), (False, True))
    if count or (place == "front" and not zero)
]


def canvas(seed: int = 3) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids, mask


def named(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


@pytest.mark.parametrize("options", OPTIONS, ids=named)
@torch.no_grad()
def test_every_combination_equals_float64(options: dict[str, Any]) -> None:
    model = tiny("sink_qwen", **options)
    ids, padding = canvas()
    for mask, implementation in product((None, padding), ("sdpa", "hooked")):
        model.set_attn_implementation(implementation)
        expected = forward64(model, ids, mask)["logits"]
        got = model(input_ids=ids, attention_mask=mask).logits.double()
        content = torch.ones_like(ids).bool() if mask is None else mask.bool()
        assert got.shape == (2, 9, 64)
        torch.testing.assert_close(got[content], expected[content], **CLOSE)


@pytest.mark.long
@given(
    count=st.integers(0, 5), place=st.sampled_from(["front", "end"]), zero=st.booleans(), gated=st.booleans(),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (4, 1)]), layers=st.integers(1, 3), length=st.integers(1, 12),
    pad=st.integers(0, 11), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_random_shapes_equal_float64(
    count: int, place: str, zero: bool, gated: bool, heads: tuple[int, int], layers: int, length: int, pad: int,
    seed: int,
) -> None:  # fmt: skip
    model = tiny(
        "sink_qwen", seed=seed, num_sinks=count, sink_placement=place, zero_sink_value=zero, gated_attention=gated,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], hidden_size=8 * heads[0],
        num_hidden_layers=layers,
    )  # fmt: skip
    ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, : min(pad, length - 1)] = 0
    with torch.no_grad():
        expected = forward64(model, ids, mask)["logits"][mask.bool()]
        for implementation in ("sdpa", "hooked"):
            model.set_attn_implementation(implementation)
            got = model(input_ids=ids, attention_mask=mask).logits.double()[mask.bool()]
            torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("options", OPTIONS[::3], ids=named)
@torch.no_grad()
def test_every_hook_point_sees_the_sinks_and_equals_float64(options: dict[str, Any]) -> None:
    model = tiny("sink_qwen", **options)
    ids, mask = canvas()
    seen: dict[str, Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        for name in HOOK_POINTS:
            point = getattr(block.self_attn, f"hook_{name}")
            point.register_forward_hook(lambda _m, _a, out, key=f"{name}{layer}": seen.__setitem__(key, out))
    model(input_ids=ids, attention_mask=mask)
    expected = forward64(model, ids, mask)
    layout = SinkLayout.of(model)
    content = layout.widen(mask).bool()
    for key, value in seen.items():
        want, got = expected[key], value.double()
        if key.startswith(("scores", "pattern")):
            want, got = want.transpose(1, 2), got.transpose(1, 2)
        assert got.shape[1] == 9 + layout.count
        torch.testing.assert_close(got[content], want[content], **CLOSE, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("place", ["front", "end"])
@torch.no_grad()
def test_a_sink_sees_only_itself_whatever_the_canvas_says(place: str) -> None:
    model = tiny("sink_qwen", num_sinks=2, sink_placement=place)
    ids, _ = canvas()
    states = model.model(input_ids=ids, output_hidden_states=True).hidden_states
    other = model.model(input_ids=ids + 1, output_hidden_states=True).hidden_states
    where = SinkLayout.of(model).sinks(11)
    for a, b in zip(states, other, strict=True):
        torch.testing.assert_close(a[:, where], b[:, where], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(a[0, where], a[1, where], atol=1e-6, rtol=1e-6)
    assert (states[-1] - other[-1]).abs().max() > 0.1


@torch.no_grad()
def test_zeroed_sinks_write_nothing_but_take_attention() -> None:
    model = tiny("sink_qwen", num_sinks=1, zero_sink_value=True)
    seen: dict[str, Tensor] = {}
    for name in ("v", "pattern"):
        point = getattr(model.model.layers[1].self_attn, f"hook_{name}")
        point.register_forward_hook(lambda _m, _a, out, name=name: seen.__setitem__(name, out))
    model(input_ids=canvas()[0])
    assert (seen["v"][:, 0] == 0).all()
    assert seen["v"][:, 1:].abs().min() > 0
    assert (seen["pattern"][:, :, 1:, 0] > 0).all()


@pytest.mark.parametrize("place", ["front", "end"])
def test_denoising_never_sees_the_sinks_and_a_row_is_what_it_is_alone(place: str) -> None:
    model = tiny("sink_qwen", num_sinks=2, sink_placement=place)
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    options: dict[str, Any] = {"gen_length": 8, "steps": 8, "cfg_scale": 0.5, "temperature": 0.7}
    run = dlm_lens.denoise(model, prompts, **options)
    everywhere = dlm_lens.denoise(model, prompts, logits="all", **options)
    assert run.canvases.equal(everywhere.canvases)
    assert run.canvases.shape == (9, 2, 13)
    alone = dlm_lens.denoise(model, [prompts[1]], **options)
    assert run.tokens[1, 3:].equal(alone.tokens[0])
    logits = forward64(model, run.canvases[7], run.attention_mask)["logits"]
    blank = run.canvases[7].masked_fill(~run.masked[0], 63)
    guide = forward64(model, blank, run.attention_mask)["logits"]
    probabilities = (guide + 1.5 * (logits - guide)).softmax(-1)
    eligible = run.confidence[7] > -torch.inf
    chosen = probabilities.gather(-1, run.proposals[7][..., None])[..., 0]
    torch.testing.assert_close(run.confidence[7][eligible].double(), chosen[eligible], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sinks", [0, 1])
def test_with_a_logit_shift_the_output_before_predicts_a_position(sinks: int) -> None:
    model = tiny("sink_qwen", num_sinks=sinks, logit_shift=True)
    prompts = [[1, 2, 3, 4], [5, 63]]
    for logits in ("needed", "all"):
        run = dlm_lens.denoise(model, prompts, gen_length=4, logits=logits)
        raw = forward64(model, run.canvases[0], run.attention_mask)["logits"]
        for row, first in enumerate((0, 2)):
            for position in range(first, 8):
                if run.confidence[0, row, position] > -torch.inf:
                    own = raw[row, max(position - 1, first)]
                    own_without_mask = own.index_fill(0, torch.tensor([63]), -torch.inf)
                    assert run.proposals[0, row, position] == own_without_mask.argmax()
                    likely = own.softmax(-1)[run.proposals[0, row, position]]
                    assert run.confidence[0, row, position].item() == pytest.approx(likely.item(), abs=1e-5)
        alone = dlm_lens.denoise(model, [prompts[1]], gen_length=4, logits=logits)
        assert run.tokens[1, 2:].equal(alone.tokens[0])


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[4], OPTIONS[-1]], ids=named)
def test_checkpoints_round_trip(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny("sink_qwen", **options, logit_shift=True)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert ("model.embed_tokens.sinks" in names) == bool(options["num_sinks"])
    assert ("model.layers.0.self_attn.gate_proj.weight" in names) == options["gated_attention"]
    again = dlm_lens.load(tmp_path)
    assert {name: getattr(again.config, name) for name in options} == options
    assert again.config.logit_shift
    ids, mask = canvas()
    with torch.no_grad():
        assert again(input_ids=ids, attention_mask=mask).logits.equal(
            model(input_ids=ids, attention_mask=mask).logits
        )


def test_embeddings_in_place_of_ids_hold_the_sinks() -> None:
    model = tiny("sink_qwen", num_sinks=1)
    ids, mask = canvas()
    with torch.no_grad():
        embeds = model.model.embed_tokens(ids)
        assert embeds.shape == (2, 10, 32)
        assert embeds[:, 0].equal(model.model.embed_tokens.sinks.expand(2, -1))
        got = model(inputs_embeds=embeds, attention_mask=mask).logits
        assert got.equal(model(input_ids=ids, attention_mask=mask).logits)
    with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
        model.model(input_ids=ids, inputs_embeds=embeds)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 10\]; the canvas is \[2, 9\]"):
        model(input_ids=ids, attention_mask=torch.ones(2, 10))


@pytest.mark.parametrize("place", ["front", "end"])
@torch.no_grad()
def test_four_dimensional_masks_are_the_canvas_s_boolean_or_additive(place: str) -> None:
    model = tiny("sink_qwen", num_sinks=2, sink_placement=place)
    ids, padding = canvas()
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    boolean = padding.bool()[:, None, None, :].expand(2, 1, 9, 9)
    additive = torch.zeros(2, 1, 9, 9).masked_fill(~boolean, -1e9)
    expected = forward64(model, ids, padding)["logits"][padding.bool()]
    for implementation, mask in product(("sdpa", "hooked"), (boolean, additive)):
        model.set_attn_implementation(implementation)
        got = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.double()
        torch.testing.assert_close(got[padding.bool()], expected, **CLOSE)


def test_positions_that_are_given_beside_a_padding_mask_are_used() -> None:
    model = tiny("sink_qwen", num_sinks=2)
    ids, padding = canvas()
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    boolean = padding.bool()[:, None, None, :].expand(2, 1, 9, 9)
    with torch.no_grad():
        found, wanted = (
            model(input_ids=ids, attention_mask=mask, position_ids=2 * positions).logits
            for mask in (padding, boolean)
        )
        usual = model(input_ids=ids, attention_mask=padding).logits
    torch.testing.assert_close(found[padding.bool()], wanted[padding.bool()], **CLOSE)
    assert float((found - usual)[padding.bool()].abs().max()) > 1e-2


def test_labels_and_logits_to_keep_mean_the_canvas() -> None:
    model = tiny("sink_qwen", num_sinks=2, sink_placement="end")
    ids, _ = canvas()
    labels = torch.full_like(ids, -100)
    labels[0, 3], labels[1, 8] = 5, 6
    with torch.no_grad():
        whole = model(input_ids=ids, labels=labels)
        by_hand = -whole.logits.double().log_softmax(-1)[[0, 1], [3, 8], [5, 6]].mean()
        assert whole.loss.item() == pytest.approx(by_hand.item(), abs=1e-5)
        assert model(input_ids=ids, logits_to_keep=2).logits.equal(whole.logits[:, -2:])
        kept = torch.tensor([0, 4])
        assert model(input_ids=ids, logits_to_keep=kept).logits.equal(whole.logits[:, kept])
        model.config.logit_shift = True
        shifted = -whole.logits.double().log_softmax(-1)[[0, 1], [2, 7], [5, 6]].mean()
        assert model(input_ids=ids, labels=labels).loss.item() == pytest.approx(shifted.item(), abs=1e-5)


def test_sinks_and_gates_learn() -> None:
    model = tiny("sink_qwen", num_sinks=1, gated_attention=True)
    ids, mask = canvas()
    for implementation in ("sdpa", "hooked"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask).logits.square().mean().backward()
        assert model.model.embed_tokens.sinks.grad.abs().max() > 1e-4
        assert model.model.layers[0].self_attn.gate_proj.weight.grad.abs().max() > 1e-5
        assert model.model.layers[0].self_attn.gate_proj.weight.grad.isfinite().all()


def test_a_copy_is_independent() -> None:
    model = tiny("sink_qwen", num_sinks=1, gated_attention=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.embed_tokens.sinks.add_(1.0)
        ids, _ = canvas()
        assert not twin(input_ids=ids).logits.equal(model(input_ids=ids).logits)


def test_a_layout_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 sink tokens at 'front'"):
        SinkQwenConfig(num_sinks=-1)
    with pytest.raises(ValueError, match=r"middle"):
        SinkQwenConfig(num_sinks=1, sink_placement="middle")


def test_sinks_beside_sliding_windows_are_refused() -> None:
    """A query outside the window would not see the sink: in a window of 4, the last 8 of 13 positions did not."""
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    with pytest.raises(ValueError, match=r"num_sinks is 1, and layers have a sliding window"):
        SinkQwenConfig(num_sinks=1, num_hidden_layers=2, **windows)
    SinkQwenConfig(num_sinks=0, num_hidden_layers=2, **windows)
    SinkQwenConfig(num_sinks=1, num_hidden_layers=2, **windows | {"use_sliding_window": False})
