"""Runs `checks/` in processes that have the pretended GPU from their start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretend_gpu.build import missing

HERE = Path(__file__).parent
FLOAT64, WITHOUT = "with float64", "without float64"
ALL, HALF, OTHER = "all families", "half of the families", "the other families"
# In this order the long ones are in turns of their own (tests/turns.py).
CHECKS = [
    (FLOAT64, "test_calls.py", HALF),
    (WITHOUT, "test_calls.py", ALL),
    (FLOAT64, "test_calls.py", OTHER),
    (FLOAT64, "test_models.py", ALL),
    (FLOAT64, "test_device.py", ALL),
    (FLOAT64, "test_waits.py", ALL),
    (WITHOUT, "test_device.py", ALL),
    (WITHOUT, "test_models.py", ALL),
    (FLOAT64, "test_attention.py", ALL),
    (FLOAT64, "test_benchmarks.py", ALL),
]


def test_every_file_of_checks_is_run() -> None:
    files = {path.name for path in (HERE / "checks").glob("test_*.py")}
    assert {name for kind, name, _ in CHECKS if kind == FLOAT64} == files


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "name", "share"), CHECKS)
def test_checks_pass_on_the_pretended_gpu(kind: str, name: str, share: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.pretend_gpu.plugin", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # A worker of pytest-xdist tells its children so.
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    if kind == WITHOUT:
        environment["PRETEND_GPU_NO_FLOAT64"] = "1"
    if share != ALL:
        environment["PRETEND_GPU_SHARE"] = str((HALF, OTHER).index(share))
    done = subprocess.run([*command, name], capture_output=True, text=True, env=environment, cwd=HERE / "checks")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
