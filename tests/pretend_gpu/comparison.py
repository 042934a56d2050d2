"""The CPU's result of every scene, and what a device must return to equal it."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.testing import tiny
from tests.hosts import left_out
from tests.pretend_gpu import probe_scenes
from tests.pretend_gpu.probe_scenes import PRECISE, PROBES
from tests.pretend_gpu.scenes import MASKED_ONLY, REDUCERS, SCENES, Scene, recorded

FAMILIES = tuple(family.name for family in dl.families())
NO_FLOAT64 = os.environ.get("PRETEND_GPU_NO_FLOAT64") == "1"
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""Float32 on another attention kernel: measured gaps are below 1e-5; float16 storage rounds at 2^-11."""


REFUSED_BY_SOME = (
    "TransformerLens",
    "guidance",
    "record: pattern similarity",
    "reference quirks",
    "reference quirks of a cache",
    "likelihood",
    "greedy completion",
    "Monte Carlo likelihood",
    *PROBES,
)
"""Calls that some families refuse in a sentence, which is then the same everywhere: no layout of the bridge, a
sampler without guidance or without an approximate cache, a canvas that grows, an original that takes one prompt, a
model without a mask token, a question that has no meaning for a family."""


CONFIGS: dict[str, dict[str, Any]] = {
    "uniform_qwen": {"sampler_defaults": {"steps": 6}},
    "diffusion_gemma": {
        "sampler_defaults": {"steps_per_block": 4},
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Settings of families that make 48 steps by default, whatever the length of the answer."""


def model_of(family: str) -> Any:
    model = tiny(family, **CONFIGS.get(family, {"num_sinks": 1} if family.startswith("sink") else {}))
    # Grouped products of experts count in int32 on CUDA, for which the CPU behind the pretended GPU has no kernel.
    model.config._experts_implementation = "eager"
    return model


OF_ONE_LENGTH = ("pattern similarity",)
"""Reducers that compare a step with the one before, which an AR run's growing canvas does not let them."""


def reducers_of(family: str) -> dict[str, Callable[[], Any]]:
    return {name: make for name, make in REDUCERS.items() if family != "causal" or name not in OF_ONE_LENGTH}


HOSTS = {"nnsight": "nnsight", "TransformerLens": "transformer_lens"}
"""Scenes that need a package which may be missing where a GPU is."""


@cache
def scenes_of(family: str) -> dict[str, Scene]:
    records = {f"record: {name}": recorded(name) for name in reducers_of(family)}
    masked = {} if family == "causal" else dict(MASKED_ONLY)
    if family in ("dream", "mdlm", "bd3lm", "sedd", "gidd_dit"):
        del masked["guidance"]  # their samplers have none
    asked = dict(PROBES) if family in probe_scenes.FAMILIES else {}
    if family == "diffusion_gemma" and NO_FLOAT64:
        asked = {name: scene for name, scene in asked.items() if name not in PRECISE}
    found = {**SCENES, **records, **masked, **asked}
    return {name: scene for name, scene in found.items() if name not in HOSTS or not left_out(HOSTS[name])}


@dataclass(frozen=True)
class Refused:
    """A call that a family does not take, with its sentence."""

    why: str


def outcome(scene: Scene, model: Any, family: str) -> Any:
    """What a call returns; what it says if it refuses the family."""
    try:
        return scene(model, family)
    except ValueError as error:
        return Refused(str(error))


@cache
def on_the_cpu(family: str, name: str) -> Any:
    found = outcome(scenes_of(family)[name], model_of(family), family)
    assert not isinstance(found, Refused) or name in REFUSED_BY_SOME, found
    if isinstance(found, torch.Tensor) and found.is_floating_point():
        assert not found.isnan().all(), f"{name} of {family} has no number that a device could return"
    return found


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, Refused):
        assert found == expected, where
    elif isinstance(expected, torch.Tensor):
        found, expected = found.detach().cpu(), expected.detach().cpu()
        torch.testing.assert_close(found, expected, **CLOSE, equal_nan=True, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, Mapping):
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif expected is None or isinstance(expected, str):
        assert found == expected, where
    else:
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4, nan_ok=True), where
