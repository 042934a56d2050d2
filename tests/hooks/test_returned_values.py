"""What a hook returns: in every host an activation of the same shape, None for no edit, or a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import at_progress
from dlm_lens.testing import tiny

PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8]]
SETTINGS: dict[str, Any] = {"steps": 2, "gen_length": 4}


class Returning:
    """Returns what a function makes of the activation of the first layer."""

    layers = (0,)

    def __init__(self, site: str, function: Callable[[Tensor], Any]) -> None:
        self.site, self.function = site, function

    def __repr__(self) -> str:
        return f"Returning({self.site})"

    def __call__(self, tensor: Tensor, hook: Any = None) -> Any:
        return self.function(tensor)


def traced(hook: Any) -> Any:
    lm = dl.DiffusionLM(tiny("llada"), check=False)
    with lm.generate(PROMPTS, **SETTINGS) as tracer:
        for step in tracer.steps:
            for layer in lm.layers:
                layer.attn.apply(hook, step)
        run = tracer.result.save()
    return run


HOSTS: dict[str, Callable[[Any], Any]] = {
    "denoise": lambda hook: dl.denoise(tiny("llada"), PROMPTS, hooks=[hook], **SETTINGS),
    "limited": lambda hook: dl.denoise(tiny("llada"), PROMPTS, hooks=[at_progress(hook, (0, 1))], **SETTINGS),
    "trace": traced,
    "bridge": lambda hook: dl.bridge(tiny("llada")).denoise(PROMPTS, hooks=[hook], **SETTINGS),
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("site", "function", "sentence"),
    [
        ("resid", lambda t: t.repeat(2, 1, 1), r"a tensor of shape \[4, 8, 32\]; it must .* of shape \[2, 8, 32\]"),
        ("pattern", lambda t: t[:, :1], r"a tensor of shape \[2, 1, 8, 8\]; it must .* of shape \[2, 4, 8, 8\]"),
        ("v", lambda t: t[:1], r"a tensor of shape \[1, 8, 2, 8\]; it must return None or a tensor"),
        ("mlp_out", lambda t: t.mean(1, keepdim=True), r"a tensor of shape \[2, 1, 32\]; it must"),
        ("attn_out", lambda t: t.long(), "a tensor of torch.int64; it must hold floating-point numbers"),
        ("z", lambda t: 3, "3; it must return None or a tensor"),
    ],
)
def test_values_that_cannot_replace_an_activation_are_refused(
    host: str, site: str, function: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=rf"Returning\({site}\) returned {sentence}"):
        HOSTS[host](Returning(site, function))


@pytest.mark.parametrize("host", HOSTS)
def test_none_leaves_the_activation_and_another_precision_is_rounded(host: str) -> None:
    plain = HOSTS[host](Returning("z", lambda t: t))
    for function in (lambda t: None, lambda t: t.double()):
        assert torch.equal(HOSTS[host](Returning("z", function)).confidence, plain.confidence)
    doubled = HOSTS[host](Returning("z", lambda t: t.double() * 2))
    assert torch.equal(doubled.confidence, HOSTS[host](Returning("z", lambda t: t * 2)).confidence)
    assert not torch.equal(doubled.confidence, plain.confidence)
