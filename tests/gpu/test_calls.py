"""Every public call of every family on the GPU equals the CPU's, and runs in half precision.

The scenes are those of the pretended GPU. DLM_LENS_TEST_DEVICE=cpu runs the same code where there is no GPU.
"""

import os
from typing import Any

import pytest
import torch

from dlm_lens.testing import tiny
from dlm_lens.training import masked_loss
from tests.pretend_gpu.comparison import FAMILIES, Refused, assert_same, model_of, on_the_cpu, outcome, scenes_of
from tests.pretend_gpu.scenes import PROMPTS, forward

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("DLM_LENS_TEST_DEVICE") == "cpu" else "cuda"
SHARES = 4
"""`-k share0` to `-k share3` divide the families for benchmarks.device, whose parts have a time budget."""
SHARED = [pytest.param(name, id=f"share{place % SHARES}-{name}") for place, name in enumerate(FAMILIES)]
HALVES = (torch.float16, torch.bfloat16)
HALF_TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.15}
"""Of the largest value. Each layer rounds a few times, by 2^-11 and 2^-8, to other sums than the CPU's, and tiny
models have weights of 0.2, which amplify; a wrong mask or rotation gives gaps of the size of the logits."""


@pytest.mark.parametrize("family", SHARED)
def test_calls_equal_those_on_the_cpu(family: str) -> None:
    failed = []
    for name, scene in scenes_of(family).items():
        try:
            assert_same(outcome(scene, model_of(family).to(DEVICE), family), on_the_cpu(family, name))
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", SHARED)
def test_a_forward_pass_in_half_precision_equals_the_cpus(family: str, dtype: torch.dtype) -> None:
    if family == "diffusion_gemma":
        pytest.skip("its router chooses experts, and rounding chooses others")
    found = forward(model_of(family).to(DEVICE, dtype), family)
    expected = forward(model_of(family).to(dtype).float(), family)  # the rounded weights in float32
    for one, other in zip(found, expected, strict=True):
        one, other = torch.as_tensor(one).cpu().float(), torch.as_tensor(other).float()
        limit = HALF_TOLERANCE[dtype] * float(other[other.isfinite()].abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=limit, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", SHARED)
def test_calls_run_in_half_precision(family: str, dtype: torch.dtype) -> None:
    """Numbers are not compared: rounding decides between near-equal tokens, and runs then differ."""
    failed = []
    for name, scene in scenes_of(family).items():
        if isinstance(on_the_cpu(family, name), Refused):
            continue
        try:
            found = outcome(scene, model_of(family).to(DEVICE, dtype), family)
            assert not isinstance(found, Refused), found
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("family", ["llada", "sink_llama", "causal"])
def test_a_training_step_equals_the_cpus(family: str) -> None:
    losses, gradients = [], []
    for device in ("cpu", DEVICE):
        model: Any = tiny(family).to(device)
        ids, outputs = torch.tensor([PROMPTS[1]], device=device), torch.tensor([1, 3], device=device)
        loss = masked_loss(model, ids, outputs, ids[0, outputs], torch.tensor([0.5, 2.0], device=device))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: weight.grad.cpu() for name, weight in model.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # float32, other kernels
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-5, msg=name)
