"""Effects through a softmax that one key has nearly for itself, against softmaxes of whole rows in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dlm_lens.attention import AttentionInputs
from dlm_lens.probes import activation_patching, attribution_patching
from dlm_lens.probes.attribution.softmax import SoftmaxEffects
from dlm_lens.sampling import denoise
from dlm_lens.testing import tiny

HEADS, KV, LENGTH, WIDTH = 4, 2, 9, 8


def inputs_of(strength: float, causal: bool, spare: Tensor | None = None) -> tuple[AttentionInputs, Tensor, Tensor]:
    """Attention whose scores spread by about `strength`, a gradient of z, and other keys."""
    dice = torch.Generator().manual_seed(3)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, heads, LENGTH, WIDTH, generator=dice)

    q, k, v, other = draw(HEADS) * strength, draw(KV), draw(KV), draw(KV)
    visible = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    visible[1, :, :, :2] = False  # padding, which sees nothing either
    visible[1, :, :2] = False
    if causal:
        visible = visible.tril()
    inputs = AttentionInputs(0, q, k, v, WIDTH**-0.5, visible, spare=spare)
    return inputs, draw(HEADS).transpose(1, 2), other.transpose(1, 2)


def shares(scores: Tensor, b: float | None) -> Tensor:
    """A softmax, with a spare entry of the score b beside the others."""
    return scores.softmax(-1) if b is None else torch.cat([scores, scores.new_tensor([b])]).softmax(-1)[:-1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strength", [1.0, 20.0, 400.0])
@pytest.mark.parametrize("spare", [None, [0.0, -4.0, 3.0, 90.0]])
def test_effects_of_single_keys_are_those_of_two_softmaxes(
    strength: float, causal: bool, spare: list[float] | None
) -> None:
    inputs, gradient, other = inputs_of(strength, causal, None if spare is None else torch.tensor(spare))
    effects = SoftmaxEffects(inputs, gradient, "")
    hidden, changed = effects.of_hiding().double(), effects.of_each_key(other).double()
    wanted_hidden = torch.zeros(2, HEADS, LENGTH, dtype=torch.float64)
    wanted_changed = torch.zeros(2, HEADS, LENGTH, dtype=torch.float64)
    size = torch.zeros(2, HEADS, LENGTH, dtype=torch.float64)
    for row in range(2):
        for head in range(HEADS):
            q, k = inputs.q[row, head], inputs.k[row, head // 2]
            scores, others = ((q @ each.mT * inputs.scale).double() for each in (k, other[row, :, head // 2]))
            value = (gradient[row, :, head] @ inputs.v[row, head // 2].mT).double()
            b = None if spare is None else spare[head]
            for i in range(LENGTH):
                seen = inputs.visible[row, 0, i].nonzero().flatten().tolist()
                plain = dict(zip(seen, shares(scores[i, seen], b), strict=True))
                for j in seen:
                    rest = [key for key in seen if key != j]
                    if not rest and spare is None:
                        continue  # it keeps its only key
                    without = dict(zip(rest, shares(scores[i, rest], b), strict=True))
                    line = scores[i].clone()
                    line[j] = others[i, j]
                    instead = dict(zip(seen, shares(line[seen], b), strict=True))
                    for key in seen:
                        wanted_hidden[row, head, j] += (without.get(key, 0) - plain[key]) * value[i, key]
                        wanted_changed[row, head, j] += (instead[key] - plain[key]) * value[i, key]
                    size[row, head, j] += value[i, seen].abs().max()
    # Scores are float32 products, whose rounding moves the weights by as much times their spread.
    tolerance = 1e-6 * max(1.0, strength) * size
    assert bool(((hidden - wanted_hidden).abs() <= tolerance).all())
    grouped = wanted_changed.unflatten(1, (KV, 2)).sum(2)
    assert bool(((changed - grouped).abs() <= tolerance.unflatten(1, (KV, 2)).sum(2)).all())


def test_effects_are_finite_where_the_exact_ones_are() -> None:
    for family in ("llada", "causal"):
        model = tiny(family)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name.endswith("k_proj.weight"):
                    value.mul_(16)
        steps = {} if family == "causal" else {"steps": 2}
        run = denoise(model, [[1, 2, 3, 4, 5, 6]], gen_length=4, **steps)
        other = [[1, 2, 30, 4, 5, 6]]
        estimate = attribution_patching(model, run, other, "k", positions=range(6))
        exact = activation_patching(model, run, other, "k", positions=range(6))
        assert torch.equal(estimate.effects.isfinite(), exact.effects.isfinite())
        again = attribution_patching(model.double(), replace(run), other, "k", positions=range(6))
        there = exact.effects.isfinite()
        # The gradients are float32 sums through two layers with scores of some 100.
        torch.testing.assert_close(estimate.effects[there], again.effects[there], rtol=2e-2, atol=5e-3)
