"""Attribution patching against exact patching where both must agree, and where its mends are needed."""

import pytest
import torch

from dlm_lens.probes import LogitDifference, activation_patching, attribution_patching
from dlm_lens.testing import tiny
from tests.probes.attribution.planted import AGAINST, CIRCUIT, OTHER, linear, planted, run_of

TARGET = LogitDifference(AGAINST)


@pytest.mark.parametrize("site", ["z", "v", "resid"])
def test_equals_exact_patching_in_a_linear_network(site: str) -> None:
    model = linear()
    run = run_of(model)
    for positions in (None, [0, 2, 5]):
        exact = activation_patching(model, run, OTHER, site, target=TARGET, positions=positions)
        found = attribution_patching(model, run, OTHER, site, target=TARGET, positions=positions)
        torch.testing.assert_close(found.effects, exact.effects, atol=1e-10, rtol=1e-8)
        torch.testing.assert_close(found.base, exact.base)
        assert float(exact.effects.abs().max()) > 1e-3
    assert found.contract.differences(exact.contract) == ("method",)


@pytest.mark.parametrize("positions", [None, [0, 1, 3, 6]])
@pytest.mark.parametrize("site", ["q", "k"])
def test_the_qk_fix_is_exact_where_only_the_softmax_is_not_linear(site: str, positions: list[int] | None) -> None:
    model = linear(layers=1, fixed_attention=False)
    run = run_of(model)
    # In one layer the queries of open positions do not depend on the prompt: another one would change nothing.
    other = "zero" if site == "q" else OTHER
    exact = activation_patching(model, run, other, site, target=TARGET, positions=positions)
    fixed = attribution_patching(model, run, other, site, target=TARGET, positions=positions)
    plain = attribution_patching(model, run, other, site, target=TARGET, positions=positions, qk_fix=False)
    torch.testing.assert_close(fixed.effects, exact.effects, atol=1e-10, rtol=1e-8)
    assert float((plain.effects - exact.effects).abs().max()) > 1e-3 * float(exact.effects.abs().max()) > 1e-8


@pytest.mark.long
def test_the_gradient_is_that_of_finite_differences() -> None:
    model = tiny("dream").double()
    run = run_of(model, [[5, 6, 9, 10], [11, 12]])
    found = attribution_patching(model, run, "zero", target=TARGET, steps=[1])
    small = 3e-3  # norms compute in float32
    for layer in range(2):
        weight = model.model.layers[layer].self_attn.o_proj.weight
        for head in range(4):
            columns = weight.data[:, head * 8 : head * 8 + 8].clone()
            values = []
            for factor in (1 + small, 1 - small):
                weight.data[:, head * 8 : head * 8 + 8] = columns * factor
                values.append(activation_patching(model, run, "zero", "attn_out", target=TARGET, steps=[1]).base)
            weight.data[:, head * 8 : head * 8 + 8] = columns
            slope = (values[0] - values[1])[0].double() / (2 * small)  # zeroing is a factor of 1 - 1
            torch.testing.assert_close(found.effects[0, :, layer, head, 0], -slope, atol=5e-4, rtol=2e-3)


def test_grad_drop_leaves_a_cancellation_inside_one_layer() -> None:
    model = planted({**CIRCUIT, (1, 3): (1, 2, -1.0)})  # head 1.3 takes away what 1.2 adds
    run = run_of(planted(CIRCUIT))
    for drops in (False, True):
        found = attribution_patching(model, run, OTHER, target=TARGET, grad_drop=drops)
        assert float(found.effects[:, :, 0, 1].abs().max()) < 1e-12
        assert float(found.effects[:, :, 1, 3].abs().max()) > 1


def test_grad_drop_undoes_a_cancellation_between_layers() -> None:
    model = planted({(0, 1): (0, 2, 1.0), (1, 2): (2, 2, -1.0)})  # 0.1 writes to the logit; 1.2 takes the mean away
    single = planted({(0, 1): (0, 2, 1.0)})
    run = run_of(single)
    plain = attribution_patching(model, run, OTHER, target=TARGET)
    dropped = attribution_patching(model, run, OTHER, target=TARGET, grad_drop=True)
    alone = attribution_patching(single, run, OTHER, target=TARGET)
    assert bool((alone.effects[:, :, 0, 1].abs() > 1).all())
    assert float(plain.effects[:, :, 0, 1].abs().max()) < 1e-12
    torch.testing.assert_close(dropped.effects[:, :, 0, 1], alone.effects[:, :, 0, 1].abs())


@pytest.mark.parametrize("site", ["z", "v", "attn_out", "mlp_out", "resid"])
def test_grad_drop_is_the_absolute_effect_where_no_layer_follows(site: str) -> None:
    model = tiny("llada", num_hidden_layers=3).double()
    run = run_of(model, steps=1, gen_length=3)
    plain, dropped = (
        attribution_patching(model, run, OTHER, site, target=TARGET, layers=[-1], grad_drop=drops)
        for drops in (False, True)
    )
    assert bool((plain.effects.abs() > 1e-6).any())
    torch.testing.assert_close(dropped.effects, plain.effects.abs())


def test_models_with_unequal_key_heads_and_padded_blocks_have_nodes() -> None:
    for family, settings in (
        ("diffusion_gemma", {"steps": 1, "gen_length": 4}),
        ("sdar", {"steps": 2, "gen_length": 4, "block_length": 2}),
    ):
        model = tiny(family)
        run = run_of(model, [[1, 2, 3], [4, 5]], **settings)
        given = {"corrupted": [[1, 2, 9], [4, 8]], "site": "k", "steps": [0]}
        exact, found = activation_patching(model, run, **given), attribution_patching(model, run, **given)
        assert exact.effects.isfinite().equal(found.effects.isfinite())
        assert bool(exact.effects.isfinite().any())
