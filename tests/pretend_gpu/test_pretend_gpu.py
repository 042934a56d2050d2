"""Runs `checks/` in processes that have the pretended GPU from their start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretend_gpu.build import missing
from tests.pretend_gpu.placing import EVERYWHERE

HERE = Path(__file__).parent
CHECKS = {path.name: path.name for path in sorted((HERE / "checks").glob("test_*.py"))}
# The longest file in two processes, divided by families: each computes what its families return on the CPU.
MANY = "or".join(f"({family})" for family in EVERYWHERE)  # without spaces, at which the command is split
CHECKS |= {"test_calls.py": f"test_calls.py -k not({MANY})", "test_calls.py everywhere": f"test_calls.py -k {MANY}"}
# Samplers in float32 and in float64, an AR model, an encoder, and layers on two devices.
SOME = "or".join(f"({case})" for case in ("llada-one", "duo-one", "causal-one", "gemma-one", "sink_llama-split"))
CHECKS |= {
    "test_calls.py without float64": f"test_calls.py -k {SOME}",
    "test_device.py without float64": "test_device.py",
    "test_models.py without float64": "test_models.py",
}


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_on_the_pretended_gpu(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.pretend_gpu.plugin", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # A worker of pytest-xdist tells its children so.
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    if name.endswith("without float64"):
        environment["PRETEND_GPU_NO_FLOAT64"] = "1"
    command += f"tests/pretend_gpu/checks/{CHECKS[name]}".split()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
