"""Every hook of activations through three hosts, against a float64 run with edits written by hand."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import Hook
from dlm_lens.hooks import (
    MeanActivations,
    ablate,
    at_heads,
    capture,
    patch_from,
    scale_attention,
    sink,
    splice,
    steer,
    steer_along,
    zero_value,
)
from dlm_lens.testing import tiny
from tests.reference import Edit
from tests.tracing.reference import run64

IDS = [5, 9, 14, 3]
OTHER = [7, 9, 2, 3]
RUN: dict[str, Any] = {"steps": 4, "gen_length": 8, "block_length": 4}
CLOSE = {"atol": 5e-5, "rtol": 2e-4}  # float32 through two layers against float64


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("sink_qwen", num_sinks=1)


@pytest.fixture(scope="module")
def hosts(model: Any) -> dict[str, Any]:
    return {"nnsight": dl.DiffusionLM(model), "transformerlens": dl.bridge(model)}


@dataclass
class Now:
    """State of the float64 loop; a network position is the canvas position plus 1, after the sink token."""

    mask_id: int
    step: int = 0
    canvas: Tensor = field(default_factory=lambda: torch.empty(0))

    def of(self, name: str) -> list[int]:
        length = self.canvas.shape[1]
        masked = {p for p in range(length) if int(self.canvas[0, p]) == self.mask_id}
        chosen = {
            "masked": masked,
            "visible": set(range(length)) - masked,
            "prompt": set(range(4)),
            "answer": set(range(4, length)),
        }[name]
        return sorted(p + 1 for p in chosen)

    @property
    def progress(self) -> float:
        return 1 - (len(self.of("masked")) / 8)


def at(positions: Callable[[Now], list[int]] | list[int], change: Callable[[Tensor, Now, int], Tensor]) -> Any:
    """An edit of [batch, position, ...] at network positions, one by one."""

    def make(now: Now) -> Edit:
        def edit(value: Tensor) -> Tensor:
            value = value.clone()
            for p in positions(now) if callable(positions) else positions:
                value[:, p] = change(value[:, p], now, p)
            return value

        return edit

    return make


def columns(
    positions: Callable[[Now], list[int]], change: Callable[[Tensor], Tensor], renormalise: bool = False
) -> Any:
    def make(now: Now) -> Edit:
        def edit(value: Tensor) -> Tensor:
            value = value.clone()
            for key in positions(now):
                value[..., key] = change(value[..., key])
            return value / value.sum(-1, keepdim=True) if renormalise else value

        return edit

    return make


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


EVERY = list(range(13))
MEANS = MeanActivations("z", random(2, 3, 2, 4, 8), torch.tensor([[3, 4], [1, 0], [1, 1]]))
DIRECTION, HEADS = random(32, seed=1), random(4, 8, seed=2)
ONE_HEAD = torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None]
MATRIX = random(32, 32, seed=3, scale=0.2)
CURVE, KNOTS = random(4, 32, seed=4), (0.1, 0.3, 0.35, 0.8)


def mean_of(now: Now, p: int, layer: int) -> Tensor:
    means = MEANS.means.double()[layer]
    half = 0 if now.progress < 0.5 else 1
    if p == 0:
        return means[2, half]
    # Visible positions were never seen in the second half: there the class's mean, which is the first half's.
    return means[0, half] if p in now.of("masked") else means[1, 0]


def module(x: Tensor) -> Tensor:
    return torch.tanh(x @ MATRIX.to(x.dtype))


def moved(place: float, by: float) -> Tensor:
    """From a place on the curve to another one, by numpy and one feature after the other."""
    lines = CURVE.T.double().numpy()
    return torch.tensor([np.interp(place + by, KNOTS, line) - np.interp(place, KNOTS, line) for line in lines])


CASES: dict[str, tuple[Hook, Any]] = {
    "scale before": (scale_attention((1, sink(0)), 0.3), columns(lambda _: [2, 0], lambda c: c + math.log(0.3))),
    "scale masked": (
        scale_attention("masked", 4.0),
        columns(lambda now: now.of("masked"), lambda c: c + math.log(4)),
    ),
    "scale after": (
        scale_attention("prompt", 0.5, stage="after"),
        columns(lambda now: now.of("prompt"), lambda c: c / 2),
    ),
    "scale after, rows of 1": (
        scale_attention((-1, 0), 5.0, stage="after", renormalise=True),
        columns(lambda _: [12, 1], lambda c: 5 * c, renormalise=True),
    ),
    "zero value": (zero_value(sink(0), -1), at([0, 12], lambda x, *_: 0 * x)),
    "zero value of a class": (zero_value("visible"), at(lambda now: now.of("visible"), lambda x, *_: 0 * x)),
    # One head stays: without attention all masks are alike, and rounding decides which is written.
    "ablate z": (at_heads(ablate("z"), [0, 1, 3]), at(EVERY, lambda x, *_: x * ONE_HEAD)),
    "ablate attn_out": (ablate("attn_out", "visible"), at(lambda now: now.of("visible"), lambda x, *_: 0 * x)),
    "ablate mlp_out": (ablate("mlp_out", [2, sink(0)]), at([3, 0], lambda x, *_: 0 * x)),
    "ablate to a tensor": (ablate("resid", (1, 5), DIRECTION), at([2, 6], lambda *_: DIRECTION.double())),
    "ablate dimensions": (
        ablate("resid", sink(0), dims=[3, -1]),
        at([0], lambda x, *_: torch.where((torch.arange(32) == 3) | (torch.arange(32) == 31), 0.0, x)),
    ),
    "steer": (
        steer(DIRECTION, 2.0, positions="masked"),
        at(lambda now: now.of("masked"), lambda x, *_: x + 2 * DIRECTION),
    ),
    "steer heads": (steer(HEADS, -3.0, site="z", positions=0), at([1], lambda x, *_: x - 3 * HEADS)),
    "steer by a schedule": (
        steer(DIRECTION, 2.0, positions="masked", schedule=(1.0, -0.5)),
        at(lambda now: now.of("masked"), lambda x, now, _: x + 2 * (1 - 1.5 * now.progress) * DIRECTION),
    ),
    "steer along a curve": (
        steer_along(CURVE, KNOTS, 0.4),
        at(lambda now: now.of("masked"), lambda x, now, _: x + moved(now.step / 4, 0.4)),
    ),
    "steer back over progress": (
        steer_along(CURVE, KNOTS, -0.3, over="progress", site="attn_out", positions="prompt"),
        at(lambda now: now.of("prompt"), lambda x, now, _: x + moved(now.progress, -0.3)),
    ),
    "splice": (
        splice(module, schedule=(0.2, 1.0)),
        at(EVERY, lambda x, now, _: (1 - (w := 0.2 + 0.8 * now.progress)) * x + w * module(x)),
    ),
    "splice by a function": (
        splice(module, site="mlp_out", schedule=lambda progress: float(progress < 0.5), positions="visible"),
        at(lambda now: now.of("visible"), lambda x, now, _: module(x) if now.progress < 0.5 else x),
    ),
}


def reference(model: Any, ids: list[int], edits: Any = None) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """The float64 run; `edits(now, layer)` are the edits of a layer by site."""
    now = Now(model.config.mask_token_id)

    def follow(step: int, canvas: Tensor) -> Tensor:
        now.step, now.canvas = step, canvas
        return canvas

    def by_step(step: int) -> dict[tuple[int, str], Edit]:
        here = Now(now.mask_id, step, now.canvas)
        return {(layer, site): edit for layer in (0, 1) for site, edit in edits(here, layer).items()}

    return run64(model, ids, **RUN, canvas=follow, edits=None if edits is None else by_step)


def hosted(host: str, model: Any, hosts: dict[str, Any], hook: Hook, ids: list[int] = IDS) -> Iterator[Tensor]:
    """The canvases and, per step, the logits of a run under a hook."""
    logits: list[Tensor] = []

    def keep(step: int, canvas: Tensor, value: Tensor) -> None:
        logits.append(value.clone())

    if host == "denoise":
        run = dl.denoise(model, ids, **RUN, hooks=[hook], on_logits=keep)
    elif host == "transformerlens":
        run = hosts[host].denoise(ids, **RUN, hooks=[hook], on_logits=keep)
    else:
        run, logits = traced(hosts[host], hook, ids)
    return run, logits


def traced(lm: Any, hook: Hook, ids: list[int]) -> tuple[Any, list[Tensor]]:
    layers = getattr(hook, "layers", None) or (0, 1)
    with lm.generate(ids, **RUN) as tracer:
        kept = [].save()
        for step in tracer.steps:
            for layer in layers:
                lm.layers[layer].attn.apply(hook, step)
            kept.append(lm.lm_head.output.clone())
        run = tracer.result.save()
    # The head's own output still holds the sink.
    return run, [value[:, 1:] for value in kept]


def same(found: Any, expected: tuple[list[Tensor], list[dict[str, Tensor]]]) -> None:
    (run, logits), (canvases, kept) = found, expected
    assert run.canvases[:, 0].tolist() == [canvas[0].tolist() for canvas in canvases]
    assert len(logits) == len(kept) == 4
    for got, want in zip(logits, kept, strict=True):
        torch.testing.assert_close(got.double(), want["logits"], **CLOSE)


@pytest.mark.parametrize("host", ["denoise", "nnsight", "transformerlens"])
@pytest.mark.parametrize("case", CASES)
def test_a_hook_equals_float64_in_every_host(case: str, host: str, model: Any, hosts: dict[str, Any]) -> None:
    hook, make = CASES[case]
    expected = reference(model, IDS, lambda now, layer: {hook.site: make(now)})
    same(hosted(host, model, hosts, hook), expected)
    plain = reference(model, IDS)[1]
    # A splice whose weight is 0 in the first steps acts later; nothing acts nowhere.
    assert max((a["logits"] - b["logits"]).abs().max() for a, b in zip(plain, expected[1], strict=True)) > 1e-2


@pytest.mark.parametrize("host", ["denoise", "nnsight", "transformerlens"])
def test_the_mean_of_layer_class_and_bin(host: str, model: Any, hosts: dict[str, Any]) -> None:
    def edits(now: Now, layer: int) -> dict[str, Edit]:
        return {"z": at(EVERY, lambda x, now, p: mean_of(now, p, layer))(now)}

    same(hosted(host, model, hosts, ablate("z", value=MEANS)), reference(model, IDS, edits))


@pytest.mark.parametrize("host", ["denoise", "nnsight", "transformerlens"])
@pytest.mark.parametrize(("step", "from_step"), [(1, 2), (-3, -1)])  # the patched run has 4 steps, 1 and 2 are kept
def test_patching_from_another_run(host: str, step: int, from_step: int, model: Any, hosts: dict[str, Any]) -> None:
    other = reference(model, OTHER)[1]
    activations = capture(model, OTHER, ["resid", "z"], cache_steps=[1, 2], layers=[-1], **RUN)
    hook = patch_from(activations, step, "z", positions=(3, 5), from_step=from_step)
    assert hook.first_step(4) == 1

    def edits(now: Now, layer: int) -> dict[str, Edit]:
        if now.step != 1 or layer != 1:
            return {}
        return {"z": at([4, 6], lambda x, now, p: other[2]["z1"][:, p])(now)}

    expected = reference(model, IDS, edits)
    same(hosted(host, model, hosts, hook), expected)
    assert (expected[1][1]["logits"] - reference(model, IDS)[1][1]["logits"]).abs().max() > 1e-3


def test_patching_everything_at_the_last_layer_gives_the_other_run_s_logits(model: Any) -> None:
    activations = capture(model, OTHER, cache_steps=0, **RUN)
    seen: list[Tensor] = []
    settings = {**RUN, "hooks": [patch_from(activations, 0)], "on_logits": lambda s, c, x: seen.append(x.clone())}
    dl.denoise(model, IDS, **settings)
    expected = reference(model, OTHER)[1][0]["logits"]
    torch.testing.assert_close(seen[0].double(), expected, **CLOSE)
