"""TransformerLens's hook points on a DLM: names, layout, values, edits, against an independent float64 network."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import NAMES, SinkLayout
from dlm_lens.hooks import mask_positions, sink
from dlm_lens.testing import tiny
from tests.bridging.cases import CASES, CAUSAL, model_of, padded, some_ids
from tests.reference import forward64

POINTS = ("q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z", "resid")


def causal(case: str) -> bool:
    return case in CAUSAL


def place(name: str, layer: int, case: str) -> str:
    # Behind a gate hook_z is what the output projection reads; the float64 network's z is before it.
    ungated = name == "z" and case.startswith("gated")
    return f"blocks.{layer}.attn.hook_z_ungated" if ungated else f"blocks.{layer}.{NAMES[name]}"


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_hook_point_holds_the_value_and_the_layout(case: str) -> None:
    model, ids = model_of(case), some_ids()
    mask, _ = padded(ids)
    want = forward64(model, ids, mask, causal=causal(case), positions=None if "sink" in case else padded(ids)[1])
    _, cache = dl.bridge(model).run_with_cache(ids, attention_mask=mask)
    content = SinkLayout.of(model).widen(mask).bool()
    for layer in range(2):
        for name in POINTS:
            got, expected = cache[place(name, layer, case)].double(), want[f"{name}{layer}"]
            assert got.shape == expected.shape, name
            if name == "scores" and case.startswith(
                ("wedlm", "sdlm", "i-dlm")
            ):  # whose padding's queries see the content
                got, expected = got.transpose(1, 2)[content], expected.transpose(1, 2)[content]
            if name == "scores":
                seen = expected > torch.finfo(torch.float32).min / 2
                assert torch.equal(got > torch.finfo(torch.float32).min / 2, seen)
                got, expected = got[seen], expected[seen]
            elif name == "pattern":
                got, expected = got.transpose(1, 2)[content], expected.transpose(1, 2)[content]
            else:
                got, expected = got[content], expected[content]
            # float32 against float64; activations of these models go up to about 50
            torch.testing.assert_close(got, expected, atol=5e-4, rtol=5e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", POINTS[:-1])
@pytest.mark.parametrize("case", ["llada", "sinks-end", "zero-sinks", "gated-sink", "llama"])
@torch.no_grad()
def test_an_edit_at_every_hook_point_is_the_same_edit(case: str, name: str) -> None:
    model, ids = model_of(case), some_ids(rows=1)

    def edit(value: Tensor, hook: Any = None) -> Tensor:
        """Something that no symmetry hides: one head (or width), a third of the positions."""
        weights = torch.ones(value.shape[-1], dtype=value.dtype)
        weights[::3] = 0.3
        return value * weights if name != "scores" else torch.where(value > -1e30, value * weights, value)

    want = forward64(model, ids, causal=causal(case), edits={(0, name): edit})["logits"]
    tl = dl.bridge(model)
    got = tl.run_with_hooks(ids, fwd_hooks=[(place(name, 0, case), edit)])
    torch.testing.assert_close(got.double(), want, atol=5e-4, rtol=5e-4)
    assert (got - tl(ids)).abs().max() > 1e-3  # the edit did something, and is gone


@pytest.mark.parametrize("site", ["attn_out", "mlp_out", "resid"])
@torch.no_grad()
def test_an_edit_of_the_residual_stream_is_the_native_one(site: str) -> None:
    model, ids = model_of("sink"), some_ids()
    model.set_attn_implementation("hooked")
    got = dl.bridge(model).run_with_hooks(ids, fwd_hooks=[(place(site, 0, "sink"), lambda t, hook: t * 0.5)])
    block = model.model.layers[0]
    module = {"attn_out": block.self_attn, "mlp_out": block.mlp, "resid": block}[site]
    module.register_forward_hook(
        lambda m, i, out: (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5
    )
    assert torch.equal(got, model(input_ids=ids).logits)


@torch.no_grad()
def test_q_k_v_have_the_layout_of_the_native_hook_points() -> None:
    """[batch, position, head, d_head] on both sides, the very same numbers."""
    model, ids = model_of("dream"), some_ids()
    _, cache = dl.bridge(model).run_with_cache(ids)
    kept: dict[str, Tensor] = {}
    model.set_attn_implementation("hooked")
    attention = model.model.layers[1].self_attn
    for name in ("q", "k", "v", "rot_q", "rot_k", "pattern", "z"):
        point = attention.get_submodule(f"hook_{name}")
        point.register_forward_hook(lambda m, i, value, name=name: kept.__setitem__(name, value))
    model(input_ids=ids)
    assert cache["blocks.1.attn.hook_q"].shape == (2, 11, 4, 8)
    assert cache["blocks.1.attn.hook_k"].shape == (2, 11, 2, 8)
    for name, value in kept.items():
        assert torch.equal(cache[f"blocks.1.attn.hook_{name}"], value), name


@torch.no_grad()
def test_hook_z_times_w_o_is_what_attention_writes() -> None:
    """Also with a gate: hook_z is the input of the output projection."""
    for case in ("llada", "gated-sink"):
        tl = dl.bridge(model_of(case))
        _, cache = tl.run_with_cache(some_ids())
        written = torch.einsum("bphd,hdm->bpm", cache["blocks.1.attn.hook_z"], tl.blocks[1].attn.W_O)
        torch.testing.assert_close(written, cache["blocks.1.hook_attn_out"], atol=1e-5, rtol=1e-5)
    gate = cache["blocks.1.attn.hook_gate"].sigmoid().unflatten(-1, (4, 8))
    torch.testing.assert_close(
        cache["blocks.1.attn.hook_z"], cache["blocks.1.attn.hook_z_ungated"] * gate, atol=1e-6, rtol=1e-6
    )


@torch.no_grad()
def test_per_head_results_and_per_head_inputs() -> None:
    for case in ("llada", "gated-sink"):
        model, ids = model_of(case), some_ids()
        tl = dl.bridge(model)
        plain = tl(ids)
        tl.set_use_attn_result(True)
        _, cache = tl.run_with_cache(ids)
        result = cache["blocks.0.attn.hook_result"]
        assert result.shape == (2, 11 + SinkLayout.of(model).count, 4, 32)
        torch.testing.assert_close(result.sum(2), cache["blocks.0.hook_attn_out"], atol=1e-5, rtol=1e-5)
        tl.set_use_attn_result(False)
        tl.set_use_split_qkv_input(True)
        torch.testing.assert_close(tl(ids), plain, atol=1e-4, rtol=1e-4)
        _, forked = tl.run_with_cache(ids)
        assert forked["blocks.1.hook_q_input"].shape == (2, 11 + SinkLayout.of(model).count, 4, 32)


@pytest.mark.parametrize("setting", ["split_qkv_input", "attn_in"])
@torch.no_grad()
def test_per_head_inputs_of_zero_valued_sinks(setting: str) -> None:
    """hook_v sees the zeros, and an edit there is the same edit, as where one input serves all heads."""
    model, ids = model_of("zero-sinks"), some_ids()
    tl = dl.bridge(model)
    getattr(tl, f"set_use_{setting}")(True)
    logits, cache = tl.run_with_cache(ids)
    want = forward64(model, ids)
    torch.testing.assert_close(cache["blocks.1.attn.hook_v"].double(), want["v1"], atol=1e-4, rtol=1e-4)
    assert (cache["blocks.1.attn.hook_v"][:, :2] == 0).all()
    torch.testing.assert_close(logits.double(), want["logits"], atol=2e-4, rtol=2e-4)

    def shift(value: Tensor, hook: Any = None) -> Tensor:
        return value + 0.5

    got = tl.run_with_hooks(ids, fwd_hooks=[("blocks.0.attn.hook_v", shift)])
    edited = forward64(model, ids, edits={(0, "v"): shift})["logits"]
    torch.testing.assert_close(got.double(), edited, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_a_hook_of_ours_knows_the_sinks_in_a_bare_run() -> None:
    for case in ("sink", "sinks-end"):
        model, ids = model_of(case), some_ids(rows=1)
        tl, hook = dl.bridge(model), mask_positions(sink(0), 3)
        assert all(point.sinks == SinkLayout.of(model) for point in tl.hook_points())
        got = tl.run_with_hooks(ids, fwd_hooks=[(lambda n: n.endswith("hook_attn_scores"), hook)])
        layout = SinkLayout.of(model)
        length = 11 + layout.count
        columns, rows = [layout.locate(position, length) for position in (sink(0), 3)], layout.sinks(length)

        def hide(scores: Tensor, columns: list[int] = columns, rows: slice = rows) -> Tensor:
            hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
            hidden[:, columns] = True
            hidden[rows] = False  # a sink sees itself alone, and no row becomes empty
            return scores.masked_fill(hidden, torch.finfo(torch.float32).min)

        want = forward64(model, ids, edits={(layer, "scores"): hide for layer in range(2)})["logits"]
        torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=2e-4)
        tl.enable_compatibility_mode(disable_warnings=True)
        names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(2)]
        folded = tl.run_with_hooks(ids, fwd_hooks=[(name, hook) for name in names])
        torch.testing.assert_close(folded.double().log_softmax(-1), want.log_softmax(-1), atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_norm_hooks_hear_and_edit() -> None:
    tl, ids = dl.bridge(model_of("llada")), some_ids()
    _, cache = tl.run_with_cache(ids)
    resid = cache["blocks.0.hook_resid_pre"]
    scale = (resid.pow(2).mean(-1, keepdim=True) + tl.cfg.eps).sqrt()
    torch.testing.assert_close(cache["blocks.0.ln1.hook_scale"], scale)
    torch.testing.assert_close(cache["blocks.0.ln1.hook_normalized"], resid / scale, atol=1e-5, rtol=1e-5)
    with pytest.warns(UserWarning, match="hook_scale"):
        edited = tl.run_with_hooks(ids, fwd_hooks=[("blocks.0.ln1.hook_scale", lambda t, hook: 2 * t)])
    assert (edited - tl(ids)).abs().max() > 1e-2


@torch.no_grad()
def test_pos_slice_takes_the_canvas_out_of_a_sink_model() -> None:
    for case in ("sink", "sinks-end"):
        tl, ids = dl.bridge(model_of(case)), some_ids()
        _, whole = tl.run_with_cache(ids)
        length = whole["blocks.0.hook_resid_post"].shape[1]
        canvas = tl.sinks.canvas(length)
        logits, cut = tl.run_with_cache(ids, pos_slice=canvas)
        assert cut["blocks.0.hook_resid_post"].shape[1] == logits.shape[1] == 11
        assert torch.equal(cut["blocks.0.hook_resid_post"], whole["blocks.0.hook_resid_post"][:, canvas])
        assert torch.equal(cut["blocks.0.attn.hook_pattern"], whole["blocks.0.attn.hook_pattern"][:, :, canvas])
        embedded = tl.original_model.model.embed_tokens.original_component.weight[ids]
        assert torch.equal(cut["hook_embed"], embedded)


def test_float32_rotation_leaves_bfloat16_attention() -> None:
    """The tables are float32, and what leaves the rotation is in the model's dtype, as in the native model."""
    tl = dl.bridge(model_of("llada", torch.bfloat16))
    _, cache = tl.run_with_cache(some_ids())
    assert cache["blocks.0.attn.hook_cos"].dtype == torch.float32
    assert cache["blocks.0.attn.hook_rot_q"].dtype == cache["blocks.0.attn.hook_pattern"].dtype == torch.bfloat16


@torch.no_grad()
def test_a_pattern_whose_rows_do_not_sum_to_one_in_compatibility_mode() -> None:
    """A folded value bias does not pass through the pattern; without folding the edit is that of the raw mode."""
    model, ids = model_of("dream"), some_ids(rows=1)

    def hide(pattern: Tensor, hook: Any = None) -> Tensor:
        return pattern * (torch.arange(pattern.shape[-1]) > 2)

    want = forward64(model, ids, edits={(0, "pattern"): hide})["logits"].log_softmax(-1)
    off = {}
    for folded in (True, False):
        tl = dl.bridge(model)
        tl.enable_compatibility_mode(disable_warnings=True, fold_value_biases=folded)
        got = tl.run_with_hooks(ids, fwd_hooks=[("blocks.0.attn.hook_pattern", hide)])
        off[folded] = (got.double().log_softmax(-1) - want).abs().max()
    assert off[False] < 2e-4
    assert off[True] > 1e-2  # as docs/transformerlens.md warns


@pytest.mark.parametrize("name", ["a2d_qwen3", "sdar"])
def test_pos_slice_cuts_positions_of_normed_heads(name: str) -> None:
    tl = dl.bridge(tiny(name))
    ids = torch.arange(5, 14)[None]
    with torch.no_grad():
        full, cut = tl.run_with_cache(ids)[1], tl.run_with_cache(ids, pos_slice=slice(0, 3))[1]
        one = tl.run_with_cache(ids, pos_slice=5)[1]
    points = [point for point in full if "_norm" in point and ".attn." in point and "hook_scale" not in point]
    assert "blocks.0.attn.hook_q_normed" in points
    for point in points:
        assert torch.equal(cut[point], full[point][:, :3]), point
        assert torch.equal(one[point], full[point][:, 5:6]), point
