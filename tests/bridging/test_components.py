"""`hook_resid_mid` as the residual stream, norms' hook points, and patching helpers beside sink tokens."""

import warnings
from typing import Any

import pytest
import torch
from transformer_lens import patching

import dlm_lens as dl
from dlm_lens.testing import tiny

IDS = torch.tensor([[5, 9, 14, 3]])


def bridge_of(family: str, **options: Any) -> Any:
    return dl.bridge(tiny(family, **options))


@pytest.fixture(scope="module", params=["llada", "sink_qwen", "folded"])
def tl(request: Any) -> Any:
    bridge = bridge_of("llada" if request.param == "folded" else request.param)
    if request.param == "folded":
        bridge.enable_compatibility_mode(disable_warnings=True)
    return bridge


def edit(tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
    return tensor * 1.25 + 0.1


def test_an_edit_of_resid_mid_is_an_edit_of_the_stream(tl: Any) -> None:
    """resid_post = edited + MLP(norm(edited)), the MLP's part taken from the module itself."""
    plain = tl.run_with_cache(IDS)[1]
    with tl.hooks(fwd_hooks=[("blocks.0.hook_resid_mid", edit)]):
        logits, cache = tl.run_with_cache(IDS)
    mid = edit(plain["blocks.0.hook_resid_mid"])
    torch.testing.assert_close(cache["blocks.0.hook_resid_mid"], mid)
    block = tl.blocks[0]
    with torch.no_grad():
        added = block.mlp(block.ln2(mid))
    torch.testing.assert_close(cache["blocks.0.hook_mlp_out"], added)
    torch.testing.assert_close(cache["blocks.0.hook_resid_post"], mid + added)
    torch.testing.assert_close(cache["blocks.1.hook_resid_pre"], mid + added)
    # What is set at the end of the layer by hand gives the same logits.
    by_hand = tl.run_with_hooks(IDS, fwd_hooks=[("blocks.0.hook_resid_post", lambda t, hook: mid + added)])
    torch.testing.assert_close(logits, by_hand)
    # No hook remains, and a hook that returns None changes nothing.
    assert torch.equal(
        tl(IDS), tl.run_with_hooks(IDS, fwd_hooks=[("blocks.0.hook_resid_mid", lambda t, hook: None)])
    )
    assert not tl.blocks[0].mlp._forward_hooks
    assert tl.blocks[0].ln2.on_input is None


@pytest.mark.filterwarnings("ignore:the model is in training mode with dropout")
@pytest.mark.parametrize(
    ("family", "rate"),
    [("llada", "attention_dropout"), ("causal", "attention_dropout"), ("diffugpt", "attn_pdrop")],
)
def test_attention_drops_out_in_training_mode_alone(family: str, rate: str) -> None:
    model = tiny(family, **{rate: 0.5})
    tl = dl.bridge(model)
    with torch.no_grad():
        expected = model(IDS).logits
        torch.testing.assert_close(tl(IDS), expected)
        tl.train()
        assert float((tl(IDS) - expected).abs().max()) > 1e-2
        tl.eval()
        torch.testing.assert_close(tl(IDS), expected)


def test_the_gradient_at_resid_mid_is_that_of_the_stream(tl: Any) -> None:
    seen: dict[str, torch.Tensor] = {}
    name = "blocks.0.hook_resid_mid"

    def keep(grad: Any, hook: Any) -> None:
        seen["mid"] = (grad[0] if isinstance(grad, tuple) else grad).clone()

    with tl.hooks(bwd_hooks=[(name, keep)]):
        tl(IDS).square().sum().backward()
    mid = tl.run_with_cache(IDS)[1]["blocks.0.hook_resid_mid"].detach().requires_grad_()
    tl.run_with_hooks(IDS, fwd_hooks=[(name, lambda t, hook: mid)]).square().sum().backward()
    scale = float(mid.grad.abs().max())
    torch.testing.assert_close(seen["mid"], mid.grad, atol=1e-4 * scale, rtol=1e-4)
    tl.zero_grad()


def test_an_error_in_a_layer_leaves_nothing(tl: Any) -> None:
    def fail(tensor: torch.Tensor, hook: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tl.run_with_hooks(IDS, fwd_hooks=[("blocks.0.hook_resid_mid", edit), ("blocks.0.mlp.hook_in", fail)])
    assert not tl.blocks[0].mlp._forward_hooks
    assert tl.blocks[0].ln2.on_input is None
    assert not tl.blocks[0]._kept


@pytest.mark.parametrize("where", ["blocks.0.ln2.hook_in", "blocks.0.mlp.hook_in", "blocks.0.hook_mlp_out"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_hook_may_run_the_bridge_itself(tl: Any, where: str, cached: bool) -> None:
    mid = ("blocks.0.hook_resid_mid", edit)
    wanted, inner = tl.run_with_hooks(IDS, fwd_hooks=[mid]), []

    def run_again(tensor: torch.Tensor, hook: Any) -> None:
        if not inner:
            inner.append(None)
            inner[0] = tl.run_with_cache(IDS.flip(1))[0] if cached else tl(IDS.flip(1))

    found = tl.run_with_hooks(IDS, fwd_hooks=[mid, (where, run_again)])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(inner[0], tl.run_with_hooks(IDS.flip(1), fwd_hooks=[mid]))
    assert not tl.blocks[0].mlp._forward_hooks
    assert tl.blocks[0].ln2.on_input is None
    assert not tl.blocks[0]._kept


@pytest.mark.parametrize("point", ["hook_scale", "hook_normalized"])
@pytest.mark.parametrize("norm", ["blocks.0.ln1", "blocks.1.ln2", "ln_final"])
def test_the_norms_points_fire_for_every_way_of_hooking(tl: Any, norm: str, point: str) -> None:
    name, seen = f"{norm}.{point}", {}

    def keep(way: str) -> Any:
        return lambda tensor, hook=None: seen.update({way: tensor.detach().clone()})

    tl.run_with_hooks(IDS, fwd_hooks=[(name, keep("run_with_hooks"))])
    with tl.hooks(fwd_hooks=[(name, keep("hooks"))]):
        tl(IDS)
    tl.add_hook(name, keep("add_hook"))
    tl(IDS)
    tl.reset_hooks()
    handle = tl.hook_dict[name].register_forward_hook(lambda module, args, value: keep("by hand")(value))
    tl(IDS)
    handle.remove()
    handle = tl.hook_dict[name].register_forward_pre_hook(lambda module, args: keep("before, by hand")(args[0]))
    tl(IDS)
    handle.remove()
    expected = tl.run_with_cache(IDS)[1][name]
    assert len(seen) == 5
    for way, value in seen.items():
        assert torch.equal(value, expected), way
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TransformerLens says that the numbers then differ by rounding
        handle = tl.hook_dict[name].register_forward_hook(lambda module, args, value: value * 2)
        by_hand = tl(IDS)
        handle.remove()
        torch.testing.assert_close(by_hand, tl.run_with_hooks(IDS, fwd_hooks=[(name, lambda t, hook: t * 2)]))
    run = {"steps": 2, "gen_length": 4}
    counted: list[int] = []
    tl.denoise([5, 9], fwd_hooks=[(name, lambda tensor, hook: counted.append(hook.step))], **run)
    assert counted == [0, 1]
    assert tl.denoise_with_cache([5, 9], names_filter=name, **run)[1][name].shape[0] == 2


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"num_sinks": 2}, {"num_sinks": 3, "sink_placement": "end"}], ids=str)
def test_the_patching_helpers_patch_the_token_s_own_position(options: dict[str, Any]) -> None:
    tl = bridge_of("sink_qwen", **options)
    other = torch.tensor([[5, 9, 21, 3]])
    cache = tl.run_with_cache(IDS)[1]
    start = tl.sinks.canvas(tl.sinks.count + IDS.shape[1]).start

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, 1, 4] - logits[0, 3, 8]

    def by_hand(name: str, *index: Any) -> float:
        def patch(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
            tensor = tensor.clone()
            tensor[(slice(None), *index)] = cache[name][(slice(None), *index)]
            return tensor

        return float(metric(tl.run_with_hooks(other, fwd_hooks=[(name, patch)])))

    with torch.no_grad():
        stream = patching.get_act_patch_resid_pre(tl, other, cache, metric)
        heads = patching.get_act_patch_attn_head_out_by_pos(tl, other, cache, metric)
        rows = patching.get_act_patch_attn_head_pattern_dest_src_pos(tl, other, cache, metric)
        whole = patching.get_act_patch_attn_head_out_all_pos(tl, other, cache, metric)
        for layer in range(2):
            for place in range(4):
                at = start + place
                name = f"blocks.{layer}.hook_resid_pre"
                assert float(stream[layer, place]) == pytest.approx(by_hand(name, at), abs=1e-5)
                name = f"blocks.{layer}.attn.hook_z"
                assert float(heads[layer, place, 1]) == pytest.approx(by_hand(name, at, 1), abs=1e-5)
                name = f"blocks.{layer}.attn.hook_pattern"
                found = float(rows[layer, 1, place, 2])
                assert found == pytest.approx(by_hand(name, 1, at, start + 2), abs=1e-5)
            name = f"blocks.{layer}.attn.hook_z"
            assert float(whole[layer, 1]) == pytest.approx(by_hand(name, slice(None), 1), abs=1e-5)
