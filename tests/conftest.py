import os

# The models are tiny, and tests run side by side: more than one thread in a process, or in one that a test starts,
# costs time. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test downloads anything. Without this, each unknown name waits 23 seconds for a hub that cannot be reached.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import random
import sys
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from tests.hosts import missing_host
from tests.turns import TAKEN, left_to_others, said, take_turn

torch.set_num_threads(1)
# A full collection of garbage walks through all objects of the imported modules, and with Python's settings one may
# start after seventy thousand new objects: several tiny models.
gc.set_threshold(5000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed every test, before its fixtures of any scope: no result depends on the tests that ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Skip a file that imports a host which is not installed."""
    return skipped_without_host((yield), collector)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Skip a test that does."""
    return skipped_without_host((yield), item, call)


def skipped_without_host(report: Any, node: pytest.Item | pytest.Collector, call: Any = None) -> Any:
    """The report, as skipped where a host that is not installed is why it failed."""
    error = (report.call if call is None else call).excinfo
    reason = missing_host(error.value) if report.failed and error is not None else None
    if reason is not None:
        report.outcome, report.longrepr = "skipped", (str(node.path), 0, f"Skipped: {reason}")
    return report


def pytest_collection_finish() -> None:
    """Leave the imported modules out of all later collections of garbage, and let accelerate start none.

    A full collection walks through every object of every module, and accelerate starts one in every `train()` of
    transformers' Trainer, to give back memory of a GPU: a fifth of a second, as long as a training of eight steps.
    What tests make is collected as before.
    """
    gc.collect()
    gc.freeze()
    memory: Any = sys.modules.get("accelerate.utils.memory")
    if memory is not None:
        memory.gc = SimpleNamespace(collect=lambda: 0)


def pytest_configure(config: pytest.Config) -> None:
    take_turn(config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    asked = config.option.markexpr != "not long"
    if asked and (line := said(os.environ.get(TAKEN))):
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if others := left_to_others(items):
        config.hook.pytest_deselected(items=others)
        left = set(others)
        items[:] = [item for item in items if item not in left]
    # Files with long tests first: with short ones at the end, no process waits long for the last of another.
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)
    if torch.cuda.is_available() or os.environ.get("DLM_LENS_TEST_DEVICE") == "cpu":  # as benchmarks.device --small
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
