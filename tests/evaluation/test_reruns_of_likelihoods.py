"""A rerun of recorded likelihoods has the attention of the passes that were recorded, in every kind of blocks."""

from pathlib import Path

import pytest
import torch

import dlm_lens as dl
from dlm_lens.evaluation import HarnessLM
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.recording import AttentionPattern, Recording, RegionMass, rerun
from dlm_lens.testing import tiny
from tests.evaluation.conftest import ask, words

FAMILIES = ["llada", "sdar", "stable_diffcoder", "nemotron_labs_diffusion", "efficient_dlm", "sdlm", "bd3lm"]
FAMILIES += ["fast_dllm_v2", "llada2", "wedlm", "i_dlm"]
OTHER_SAMPLERS = {"nemotron_labs_diffusion": "efficient_dlm", "llada2": "llada2_editing"}
# SDLM and I-DLM have no Monte Carlo likelihood.
EXACT = ("sdlm", "i_dlm")
CASES = [(one, method) for one in FAMILIES for method in ("chain_rule", "mc") if method != "mc" or one not in EXACT]
CASES += [(f"{one} {sampler}", "chain_rule") for one, sampler in OTHER_SAMPLERS.items()]
CASES += [("llada2 dmax", method) for method in ("chain_rule", "mc")]
METHODS = {one: [method for name, method in CASES if name == one] for one, _ in CASES}
# Plain and with a hook: of a family of two methods one is plain, in turn; one of a single method has both.
IN_TURN = [
    ((one, method), hooked)
    for place, (one, methods) in enumerate(METHODS.items())
    for method in methods
    for hooked in ([False, True] if len(methods) == 1 else [(place + methods.index(method)) % 2 == 1])
]
REDUCERS = [dl.ReceivedAttention(("all", "masked")), AttentionPattern(), RegionMass()]


@pytest.mark.parametrize(
    ("family", "method", "hooks"), [(*case, (mask_top_sinks(2),) if hooked else ()) for case, hooked in IN_TURN]
)
def test_a_rerun_equals_the_recording(family: str, method: str, hooks: tuple, tmp_path: Path) -> None:
    family, *sampler = family.split()
    model = tiny(family, **({"sampler": sampler[0]} if sampler else {}))
    likelihood = {"method": method, "samples": 3}
    # A continuation longer than a block of most families, which ends inside one.
    text = (words(3, 41, 7, 7, 19, 28, 55, 2, 33, 14, 9, 50, 6), " " + words(*range(20, 30)))
    requests = ask("loglikelihood", text)
    lm = HarnessLM(model, likelihood=likelihood, record=REDUCERS, record_to=tmp_path, hooks=hooks)
    lm.loglikelihood(requests)
    recorded = Recording.load(tmp_path / "task" / "00000-0")
    again = rerun(model, recorded.run, REDUCERS, hooks=hooks)
    for name in ("pattern", "received", "received_masked", "region_mass"):
        # The same passes, of the same shapes.
        torch.testing.assert_close(again.arrays[name], recorded.arrays[name], equal_nan=True, rtol=1e-5, atol=1e-6)
    if not hooks:
        received = dl.received_over_steps(model, recorded.run)
        torch.testing.assert_close(received.values, recorded.received, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["chain_rule", "mc"])
def test_a_rerun_of_several_blocks_sees_nothing_after_a_passes_block(method: str, tmp_path: Path) -> None:
    """WeDLM's blocks of 32 are no blocks of attention: what a pass saw ends with the step's span."""
    model = tiny("wedlm")
    text = (words(3, 41, 7, 7, 19, 28), " " + words(*range(2, 36)))
    lm = HarnessLM(model, likelihood={"method": method, "samples": 2}, record=REDUCERS, record_to=tmp_path)
    lm.loglikelihood(ask("loglikelihood", text))
    recorded = Recording.load(tmp_path / "task" / "00000-0")
    assert len(set(recorded.run.spans)) == 2
    again = rerun(model, recorded.run, REDUCERS)
    for name in ("received", "received_masked", "region_mass"):
        torch.testing.assert_close(again.arrays[name], recorded.arrays[name], equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "options"), [("sedd", {}), ("duo", {}), ("mdlm", {"time_conditioning": True})])
def test_passes_at_a_noise_level_that_is_not_stored_are_refused(
    family: str, options: dict[str, bool], tmp_path: Path
) -> None:
    model = tiny(family, **options)
    for method in ("mc", "chain_rule") if family != "duo" else ("mc",):
        likelihood = {"method": method, "samples": 3, "is_greedy": False}
        lm = HarnessLM(model, likelihood=likelihood, record=REDUCERS, record_to=tmp_path / method)
        lm.loglikelihood(ask("loglikelihood", (words(3, 41, 7, 7), " " + words(20, 21, 22))))
        recorded = Recording.load(tmp_path / method / "task" / "00000-0")
        if method == "mc":
            with pytest.raises(
                ValueError, match=r"does not hold the noise level that \w+ was given: record it again"
            ):
                rerun(model, recorded.run, REDUCERS)
        else:
            again = rerun(model, recorded.run, REDUCERS)
            torch.testing.assert_close(again.pattern, recorded.pattern, equal_nan=True, rtol=1e-5, atol=1e-6)
