"""Runs `checks/` in processes that have the pretended GPU from their start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretend_gpu.build import missing

HERE = Path(__file__).parent
CHECKS = {
    "with float64": ["."],
    "without float64": ["test_device.py", "test_models.py", "test_calls.py"],
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
    if name == "without float64":
        environment["PRETEND_GPU_NO_FLOAT64"] = "1"
    done = subprocess.run(
        [*command, *CHECKS[name]], capture_output=True, text=True, env=environment, cwd=HERE / "checks"
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
