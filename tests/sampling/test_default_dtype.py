"""Under `torch.set_default_dtype(float64)` runs, recordings, likelihoods and probes are the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import mask_positions
from dlm_lens.probes import commitment, pattern_stability, sink_updates, sink_writes, token_smearing
from dlm_lens.testing import tiny

PROMPTS = [[1, 2, 3], [4, 5]]
MDLM: dict[str, Any] = {"steps": 4, "gen_length": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llada": MDLM | {"temperature": 0.7, "remasking": "random"},
    "llada d3llm": {"gen_length": 4, "temperature": 0.7},
    "mmada": MDLM | {"temperature": 0.7},
    "dream": MDLM | {"temperature": 0.7},
    "smdm": MDLM | {"temperature": 0.7},
    "sink_qwen": MDLM | {"temperature": 0.7},
    "a2d_qwen3": MDLM | {"temperature": 0.7},
    "causal": {"gen_length": 4, "temperature": 0.7},
    "sdar": MDLM | {"temperature": 0.7},
    "llada2": MDLM | {"temperature": 0.7},
    "llada2 dmax": MDLM,
    "mdlm": MDLM | {"temperature": 0.7},
    "bd3lm": MDLM | {"temperature": 0.7},
    "sedd": MDLM | {"temperature": 0.7},
    "fast_dllm_v2": {"gen_length": 8, "temperature": 0.7},
    "wedlm": {"gen_length": 4, "temperature": 0.7},
    "sdlm": {"gen_length": 4, "temperature": 0.7},
    "i_dlm": {"gen_length": 6, "temperature": 0.7},
    "nemotron_labs_diffusion": {"gen_length": 4, "temperature": 0.7},
    "efficient_dlm": {"gen_length": 4, "temperature": 0.7},
    "stable_diffcoder": {"gen_length": 4, "temperature": 0.7},
    "diffugpt": MDLM | {"temperature": 0.7},
    "rnd1": MDLM | {"temperature": 0.7},
    "open_dcoder": MDLM | {"temperature": 0.7},
    "modernbert": MDLM | {"temperature": 0.7},
    "diffusion_gemma": MDLM,
    "uniform_qwen": MDLM,
    "duo": MDLM | {"temperature": 0.7},
    "udlm": MDLM | {"temperature": 0.7},
    "gidd_dit": MDLM | {"temperature": 0.7, "correction_steps": 3},
}


@pytest.fixture
def float64() -> Iterator[Callable[[bool], None]]:
    """Sets the default dtype to float64 (True) or float32; float32 again after the test."""
    yield lambda wide: torch.set_default_dtype(torch.float64 if wide else torch.float32)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_and_recordings_are_the_same(family: str, float64: Callable[[bool], None]) -> None:
    name, *sampler = family.split()
    model = tiny(name, **({"sampler": sampler[0]} if sampler else {}))
    reducers, found = [dl.ReceivedAttention(), dl.ValueNorm()], []
    for wide in (False, True):
        float64(wide)
        found.append(dl.record(model, PROMPTS, reducers, seed=1, **FAMILIES[family]))
    one, two = found
    for name in ("canvases", "proposals", "unmasked", "confidence"):
        assert getattr(two.run, name).equal(getattr(one.run, name)), name
        assert getattr(two.run, name).dtype == getattr(one.run, name).dtype, name
    for name in ("received", "value_norm"):
        # Sums of attention in tiles may be kept wider, never narrower.
        torch.testing.assert_close(
            getattr(two, name), getattr(one, name), rtol=1e-5, atol=1e-6, equal_nan=True, check_dtype=False
        )


@pytest.mark.parametrize("family", ["llada", "dream", "mdlm", "bd3lm", "sedd", "gidd_dit", "causal", "sdar"])
def test_likelihoods_are_the_same(family: str, float64: Callable[[bool], None]) -> None:
    model, found = tiny(family), []
    for wide in (False, True):
        float64(wide)
        given = {} if family == "causal" else {"samples": 8, "seed": 3}
        found.append(dl.log_likelihood(model, [1, 2, 3], [4, 5, 6, 7], **given))
    assert float(found[1].value[0]) == pytest.approx(float(found[0].value[0]), rel=1e-6)


PROBES: dict[str, Callable[..., Any]] = {
    "commitment": lambda model, run, sinks: commitment(model, run).entropy,
    "smearing": lambda model, run, sinks: token_smearing(model, run).own,
    "replay": lambda model, run, sinks: dl.replay(model, run, [mask_positions(0)]).residual_change,
    "lens": lambda model, run, sinks: dl.logit_lens(model, run, [0, 4]).entropy,
    "writes": lambda model, run, sinks: sink_writes(model, run, sinks).norm,
    "updates": lambda model, run, sinks: sink_updates(model, run, sinks).update,
    "stability": lambda model, run, sinks: torch.as_tensor(
        pattern_stability(model, run, dl.TopK(1)).table().select_dtypes("number").to_numpy()
    ),
}


@pytest.mark.parametrize("name", PROBES)
def test_probes_are_the_same(name: str, float64: Callable[[bool], None]) -> None:
    model, found = tiny("llada"), []
    run = dl.denoise(model, [[1, 2, 3, 9, 8, 7, 6]], steps=4, gen_length=8, seed=1)
    for wide in (False, True):
        float64(wide)
        sinks = dl.find_sinks(dl.received_over_steps(model, run), dl.TopK(1))
        found.append(PROBES[name](model, run, sinks).double())
    assert found[0].isfinite().any()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6, equal_nan=True)
