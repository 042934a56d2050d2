"""Reducers of a user's own: values from step to step in interrupted runs and reruns, and what tells two apart."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.recording import LayerStep, Reducer, RegionMass, rerun
from dlm_lens.testing import tiny

SETTINGS: dict[str, Any] = {"gen_length": 8, "steps": 8}
PROMPTS = [[3, 4, 5, 6]]


@dataclass(frozen=True)
class KeyDrift(Reducer):
    """How far keys are from those of the step before."""

    def reduce(self, layer: LayerStep) -> Tensor:
        k = layer.inputs.k.float()
        k = k.repeat_interleave(layer.inputs.q.shape[1] // k.shape[1], 1)
        before = layer.memory.get("k", k)
        layer.memory["k"] = k
        return layer.only_keys((k - before).norm(dim=-1))


@dataclass(frozen=True)
class Along(Reducer):
    """The residual stream along a direction."""

    direction: Tensor
    dims = ("step", "batch", "layer", "key")
    reads = ("resid_in",)

    def reduce(self, layer: LayerStep) -> Tensor:
        assert layer.resid is not None
        return layer.only_keys(layer.resid @ self.direction)


@dataclass(frozen=True)
class Stream(Reducer):
    """The residual stream itself, at every key or query."""

    axis: str
    dim: int = -2

    reads = ("resid_out",)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("step", "batch", "layer", self.axis, "channel")

    def reduce(self, layer: LayerStep) -> Tensor:
        assert layer.resid_out is not None
        only = layer.only_keys if self.axis == "key" else layer.only_queries
        return only(layer.resid_out, dim=self.dim)


@dataclass(frozen=True)
class Zeros(Reducer):
    """Zeros of sizes that the dims do not say."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def dims(self) -> tuple[str, ...]:
        return ("step", "batch", "layer", *self.axes)

    def reduce(self, layer: LayerStep) -> Tensor:
        return torch.zeros(self.sizes)


class Above:
    """A detector without a repr of its own."""

    def __init__(self, level: float) -> None:
        self.level = level

    def detect(self, scores: Tensor) -> Tensor:
        return scores > self.level


def interrupted(model: Any, reducers: list[Any], path: Path, passes: int) -> None:
    """Begin a recording, and press Ctrl-C in one of its passes."""
    left = [passes]

    def stop(module: Any, inputs: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    handle = model.get_decoder().register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        dl.record(model, PROMPTS, reducers, to=path, **SETTINGS)
    handle.remove()


def test_values_from_step_to_step_are_those_of_an_unbroken_run(tmp_path: Path) -> None:
    model = tiny("llada")
    whole = dl.record(model, PROMPTS, [KeyDrift()], **SETTINGS)
    assert float(whole.key_drift[4].nan_to_num().sum()) > 0
    interrupted(model, [KeyDrift()], tmp_path / "rec", 5)
    again = dl.record(model, PROMPTS, [KeyDrift()], to=tmp_path / "rec", **SETTINGS)
    torch.testing.assert_close(again.key_drift, whole.key_drift, rtol=0, atol=0, equal_nan=True)
    first = rerun(model, whole.run, [KeyDrift()], steps=[0, 1, 2])
    torch.testing.assert_close(first.key_drift, whole.key_drift[:3], rtol=1e-5, atol=1e-5, equal_nan=True)
    with pytest.raises(ValueError, match=r"keeps values from step to step .* leave out earlier ones"):
        rerun(model, whole.run, [KeyDrift()], steps=[4])


def test_a_constant_does_not_begin_a_run_again(tmp_path: Path) -> None:
    model = tiny("llada")
    interrupted(model, [dl.recording.WeightedValue()], tmp_path / "rec", 5)
    passes: list[int] = []
    handle = model.get_decoder().register_forward_pre_hook(lambda m, i: passes.append(1))
    dl.record(model, PROMPTS, [dl.recording.WeightedValue()], to=tmp_path / "rec", **SETTINGS)
    handle.remove()
    assert len(passes) == 4
    rerun(model, dl.denoise(model, PROMPTS, **SETTINGS), [dl.recording.WeightedValue()], steps=[4])


def test_reducers_with_the_same_repr_are_told_apart(tmp_path: Path) -> None:
    model = tiny("llada", hidden_size=1024, num_attention_heads=4, num_key_value_heads=4)
    one = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    two = one.clone()
    two[3:-3] *= -1
    assert repr(Along(one)) == repr(Along(two))
    settings = {"gen_length": 2, "steps": 2}
    dl.record(model, PROMPTS, [Along(one)], to=tmp_path / "rec", **settings)
    dl.record(model, PROMPTS, [Along(one.clone())], to=tmp_path / "rec", **settings)
    with pytest.raises(ValueError, match="identities"):
        dl.record(model, PROMPTS, [Along(two)], to=tmp_path / "rec", **settings)


def test_an_equal_detector_without_a_repr_continues(tmp_path: Path) -> None:
    model = tiny("llada")
    interrupted(model, [RegionMass(sinks=Above(1.0))], tmp_path / "rec", 5)
    with pytest.raises(ValueError, match="identities"):
        dl.record(model, PROMPTS, [RegionMass(sinks=Above(2.0))], to=tmp_path / "rec", **SETTINGS)
    again = dl.record(model, PROMPTS, [RegionMass(sinks=Above(1.0))], to=tmp_path / "rec", **SETTINGS)
    whole = dl.record(model, PROMPTS, [RegionMass(sinks=Above(1.0))], **SETTINGS)
    torch.testing.assert_close(again.region_mass, whole.region_mass, rtol=0, atol=0, equal_nan=True)
    assert "0x" not in again.specs["region_mass"].reducer


@pytest.mark.parametrize("axis", ["key", "query"])
def test_padding_is_nan_on_the_axis_that_dim_names(axis: str) -> None:
    # Prompts of 24 and 21 tokens: 32 positions, as many as channels.
    prompts = [list(range(3, 27)), list(range(3, 24))]
    stream = dl.record(tiny("llada"), prompts, [Stream(axis)], batch_size=2, gen_length=8, steps=2).stream
    assert stream.shape[-2:] == (32, 32)
    assert not stream[:, 0].isnan().any()
    assert stream[:, 1, :, :3].isnan().all()
    assert not stream[:, 1, :, 3:].isnan().any()


@pytest.mark.parametrize(("axis", "dim"), [("key", -1), ("query", -1), ("key", 0), ("query", 3), ("key", -3)])
def test_an_axis_that_has_no_keys_is_refused(axis: str, dim: int) -> None:
    wanted = {"key": "keys", "query": "queries"}[axis]
    message = rf"only_{wanted} got shape \[1, 12, 32\] and dim={dim}, where it needs the 12 {wanted}"
    with pytest.raises(ValueError, match=message):
        dl.record(tiny("llada"), PROMPTS, [Stream(axis, dim)], **SETTINGS)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("axes", "sizes", "wrong", "right"),
    [
        (("head", "key"), (1, 2, 14), "2 entries along its axis 'head'", 4),
        (("kv_head", "key"), (1, 4, 14), "4 entries along its axis 'kv_head'", 2),
        (("query",), (1, 14), "14 entries along its axis 'query'", 12),
        (("key", "channel"), (1, 12, 32), "12 entries along its axis 'key'", 14),
        ((), (2,), "2 entries along its axis 'batch'", 1),
    ],
)
def test_sizes_that_the_layer_lacks_are_refused_at_the_first_layer(
    tmp_path: Path, axes: tuple[str, ...], sizes: tuple[int, ...], wrong: str, right: int, stored: bool
) -> None:
    model = tiny("sink_qwen", num_sinks=2)
    reducer = Zeros(axes, sizes)
    layers: list[int] = []
    handle = model.model.layers[1].register_forward_hook(lambda module, args, out: layers.append(1))
    has = "layer 0 has batch 1, head 4, kv_head 2, query 12, key 14"
    with pytest.raises(ValueError, match=rf"returned {wrong}, and {has}; return {right}, or name the axis in dims"):
        dl.record(model, PROMPTS, [reducer], to=tmp_path / "rec" if stored else None, **SETTINGS)
    handle.remove()
    assert not layers
