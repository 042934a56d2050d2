"""Columns as nodes: finite differences of their scale, and hiding them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import at_heads, at_layers, attach_hooks, mask_positions, scale_attention
from dlm_lens.probes import LogitDifference, activation_patching, column_attribution
from dlm_lens.testing import tiny
from tests.probes.attribution.planted import AGAINST, linear, run_of

TARGET = LogitDifference(AGAINST)


def under(model: Any, run: Any, step: int, hook: Any) -> Tensor:
    """The target of a step under a hook."""
    return activation_patching(model, run, [hook], "resid", target=TARGET, steps=[step], layers=[0]).source[0]


def test_log_scale_is_the_slope_of_scaled_attention() -> None:
    model = tiny("llada").double()
    run = dl.denoise(model, [[5, 6, 9, 10], [11, 12]], steps=2, gen_length=4)
    found = column_attribution(model, run, target=TARGET, steps=[1])
    small = 3e-3  # a scaled pattern is computed in float32, with errors of 1e-7
    for layer, head, key in ((0, 1, 2), (1, 3, 6)):
        scaled = [scale_attention(key, math.exp(each)) for each in (small, -small)]
        values = [under(model, run, 1, at_heads(at_layers(hook, [layer]), [head])) for hook in scaled]
        slope = (values[0] - values[1]).double() / (2 * small)
        torch.testing.assert_close(found.log_scale[0, :, layer, head, key].double(), slope, atol=2e-4, rtol=1e-3)


def test_hiding_is_exact_where_only_the_softmax_is_not_linear() -> None:
    model = linear(layers=1, fixed_attention=False)
    run = run_of(model)
    found = column_attribution(model, run, target=TARGET, steps=[0])
    for head, key in ((0, 0), (2, 3), (3, 7)):
        wanted = under(model, run, 0, at_heads(mask_positions(key), [head])) - found.base[0]
        torch.testing.assert_close(found.hidden[0, :, 0, head, key].double(), wanted.double(), atol=1e-9, rtol=1e-7)
    largest = found.hidden.abs().flatten().sort(descending=True).values[:5]
    table = found.table(5)
    torch.testing.assert_close(torch.tensor(table.hidden.tolist()).abs().double(), largest.double())
    for line in table.to_dict("records"):
        at = int(line["step"]), line["batch"], line["layer"], line["head"], line["position"]
        assert line["hidden"] == pytest.approx(float(found.hidden[at]))
        assert line["log_scale"] == pytest.approx(float(found.log_scale[at]))


def test_attention_with_more_than_a_softmax_is_refused_with_a_remedy_that_exists() -> None:
    model = tiny("llada")
    run = dl.denoise(model, [[5, 6, 9]], steps=2, gen_length=4)
    hook = scale_attention(1, 0.1, stage="after")
    with (
        attach_hooks(model, hook),
        pytest.raises(ValueError, match=r"computes more than softmax.*: leave the layer out of layers="),
    ):
        column_attribution(model, run, target=TARGET, steps=[1])
