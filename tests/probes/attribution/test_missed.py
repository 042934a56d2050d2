"""`missed_effects` against all subsets of nodes, scipy's t-test, and effects that an estimate misses."""

from itertools import product

import pytest
import torch
from scipy import stats

from dlm_lens.hooks import at_heads, at_layers, capture, patch_from
from dlm_lens.probes import (
    LogitDifference,
    LogProbability,
    activation_patching,
    attribution_patching,
    missed_effects,
)
from dlm_lens.probes.attribution.missed import Groups, _drawn
from dlm_lens.probes.attribution.passes import with_prompt
from dlm_lens.testing import tiny
from tests.probes.attribution.planted import AGAINST, OTHER, linear, run_of
from tests.probes.attribution.test_patching import by_hand

TARGET = LogitDifference(AGAINST)


@pytest.mark.long
def test_means_are_those_over_all_subsets() -> None:
    model = tiny("llada").double()
    run = run_of(model)
    settings = {"target": LogProbability(), "steps": [0]}
    estimate = attribution_patching(model, run, OTHER, **settings)
    share, top = 0.3, 2
    found = missed_effects(
        model, run, OTHER, estimate, top=top, target=LogProbability(), subsets=2000, share=share, batch=100
    )
    rest = [tuple(one) for one in found.effects[0, 0, :, :, 0].isfinite().nonzero().tolist()]
    kept = estimate.effects[0, 0, :, :, 0].abs().flatten().sort(descending=True).values[:top]
    assert len(rest) == 6
    assert float(found.weakest) == float(kept[-1])
    other = capture(model, with_prompt(model, run, OTHER), "z")
    values = {}
    for chosen in product((False, True), repeat=6):
        pairs = [pair for pair, inside in zip(rest, chosen, strict=True) if inside]
        hooks = [at_heads(at_layers(patch_from(other, 0, "z"), [layer]), [head]) for layer, head in pairs]
        values[chosen] = float(by_hand(model, run, 0, hooks)[0])
    for node, (layer, head) in enumerate(rest):
        means = []
        for inside in (True, False):
            weights = {
                one: torch.tensor([share if each else 1 - share for each in one]).double().prod()
                for one in values if one[node] == inside
            }  # fmt: skip
            means.append(sum(float(w) * values[one] for one, w in weights.items()) / float(sum(weights.values())))
        effect, bound = (float(each[0, 0, layer, head, 0]) for each in (found.effects, found.bounds))
        error = (bound - abs(effect)) / 1.645  # the t of many degrees of freedom
        assert abs(effect - (means[0] - means[1])) < 4 * error
        assert error < 0.2 * max(abs(value - values[(False,) * 6]) for value in values.values())


def test_subsets_are_patched_as_a_whole_and_bounds_hold_where_effects_add_up() -> None:
    model = linear()
    run = run_of(model)
    settings = {"target": TARGET, "steps": [0], "layers": [1]}  # heads of two layers would overwrite each other
    exact = activation_patching(model, run, OTHER, **settings)
    estimate = attribution_patching(model, run, OTHER, **settings)
    found = missed_effects(model, run, OTHER, estimate, top=1, target=TARGET, subsets=48, share=0.4, batch=20)
    outside = found.effects[0, 0].isfinite()
    alone = exact.effects[0, 0][outside]
    assert len(alone) == 3
    assert float(exact.effects[0, 0][~outside].abs().min()) >= float(alone.abs().max())
    made, groups = torch.Generator().manual_seed(0), Groups(3, 1)
    for member in _drawn(48, 3, 0.4, 20, made):
        groups.add(member, (member.double() @ alone)[:, None])
    torch.testing.assert_close(found.effects[0, 0][outside], groups.difference[:, 0], atol=1e-9, rtol=1e-8)
    torch.testing.assert_close(found.bounds[0, 0][outside], groups.bound(0.95)[:, 0], atol=1e-9, rtol=1e-8)
    torch.testing.assert_close(found.bound[0, 0], groups.bound(0.95).max())
    held = 0
    for _ in range(300):
        groups = Groups(3, 1)
        member = torch.rand(48, 3, generator=made) < 0.4
        groups.add(member, (member.double() @ alone)[:, None])
        held += int(groups.bound(0.9).max() >= alone.abs().max())
    assert held >= 255  # 270 are expected at 90%; below 255 by chance once in 400


def test_an_effect_that_a_saturated_softmax_hides_from_the_gradient_is_bounded() -> None:
    model = linear(layers=1, fixed_attention=False, num_key_value_heads=4)
    model.model.layers[0].self_attn.q_proj.weight.data *= 100
    run = run_of(model)
    settings = {"site": "k", "target": TARGET, "steps": [0]}
    exact = activation_patching(model, run, OTHER, **settings).effects[0, 0, 0, :, 0].abs()
    estimate = attribution_patching(model, run, OTHER, qk_fix=False, **settings)
    ranked = estimate.effects[0, 0, 0, :, 0].abs()
    assert int(exact.argmax()) == 1 != int(ranked.argmax())
    assert float(ranked[1]) < 0.02 * float(exact[1])
    found = missed_effects(model, run, OTHER, estimate, top=1, target=TARGET, subsets=64, share=0.4)
    assert float(exact[1]) <= float(found.bound) < 1.5 * float(exact[1])
    line = found.table().iloc[0]
    assert line["bound"] == float(found.bound)
    assert line["head"] == 1
    assert line["estimate"] == float(estimate.effects[0, 0, 0, 1, 0])
    assert line["weakest_of_top"] == float(ranked.max())


def test_an_infinite_bound_is_shown_as_infinite() -> None:
    model = linear()
    run = run_of(model)
    estimate = attribution_patching(model, run, OTHER, target=TARGET, steps=[0])
    # Of four subsets with a small share some node is in fewer than two.
    found = missed_effects(model, run, OTHER, estimate, top=1, target=TARGET, subsets=4, share=0.01)
    assert bool((found.bounds == torch.inf).any())
    assert bool(found.bounds.isnan().any())  # the top node
    assert found.bound.tolist() == [[torch.inf] * found.bound.shape[1]]
    assert found.table()["bound"].tolist() == [torch.inf] * len(found.table())
    assert "no effect is above inf" in repr(found)


def test_the_bound_inverts_the_t_test() -> None:
    made = torch.Generator().manual_seed(0)
    member, values = torch.rand(50, 4, generator=made) < 0.3, torch.randn(50, 3, generator=made).double()
    groups = Groups(4, 3)
    groups.add(member[:20], values[:20])
    groups.add(member[20:], values[20:])
    bound = groups.bound(0.95)
    for node, row in product(range(4), range(3)):
        one, other = values[member[:, node], row].numpy(), values[~member[:, node], row].numpy()
        sign = 1 if one.mean() > other.mean() else -1
        moved = sign * other + float(bound[node, row])
        p = stats.ttest_ind(sign * one, moved, equal_var=False, alternative="less").pvalue
        assert abs(p - 0.05) < 1e-9
    alone = Groups(1, 1)
    alone.add(torch.tensor([[True], [False], [False]]), torch.zeros(3, 1).double())
    assert float(alone.bound(0.95)) == torch.inf


def test_other_arguments_than_the_estimates_are_refused() -> None:
    model = linear()
    run = run_of(model)
    estimate = attribution_patching(model, run, OTHER, target=TARGET)
    with pytest.raises(ValueError, match=r"the estimate's score is .*; give the arguments"):
        missed_effects(model, run, OTHER, estimate, top=2)
    with pytest.raises(ValueError, match="top is 8 of a step's 8 nodes"):
        missed_effects(model, run, OTHER, estimate, top=8, target=TARGET)
    with pytest.raises(ValueError, match="share is 1"):
        missed_effects(model, run, OTHER, estimate, top=2, target=TARGET, share=1)
