"""How often a step waits for the GPU: a handful of times, however many layers the model has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.testing import tiny
from tests.pretend_gpu.comparison import reducers_of
from tests.pretend_gpu.plugin import GPU
from tests.pretend_gpu.scenes import ALONE, HOOKS, PROMPTS

ROOT = str(Path(__file__).parents[3]) + "/"
STEPS = 4
MOST = {"llada": 8, "causal": 14}
"""Waits per step, with one hook or reducer; transformers waits more often in an AR step."""

WAITING = {"random of the mass"}
"""Its rounds depend on the numbers; nothing is matched to a mass without looking at it."""


def waits(call: Callable[[Any], Any], family: str, layers: int) -> tuple[int, dict[str, int]]:
    """Waits of a run of `STEPS` steps, and the lines that cause them."""
    model = tiny(family, num_hidden_layers=layers).to("cuda")
    before = GPU.counts()
    with GPU.waits(ROOT) as lines:
        call(model)
    return (GPU.counts() - before).waits, dict(lines)


def check(call: Callable[[Any], Any], family: str) -> None:
    (_, lines), (many, more) = (waits(call, family, layers) for layers in (1, 2))
    grown = {line: count - lines.get(line, 0) for line, count in more.items()}
    # Once a run, a layer may wait: transformers makes the tensors of its cache.
    by_layer = {line: count for line, count in grown.items() if count >= STEPS - 1}
    assert not by_layer, f"waits that grow with the layers: {by_layer}"
    # What happens once in a run (reading the prompt, the result) is less than 30 waits.
    assert many - 30 <= MOST[family] * STEPS, more


def settings_of(family: str) -> dict[str, Any]:
    return {"gen_length": STEPS} if family == "causal" else {"gen_length": 8, "steps": STEPS}


@pytest.mark.parametrize("prompts", [PROMPTS, ALONE], ids=["padded", "alone"])
@pytest.mark.parametrize("family", list(MOST))
def test_waits_of_runs_with_hooks(family: str, prompts: list[list[int]]) -> None:
    check(lambda model: dl.denoise(model, prompts, **settings_of(family)), family)
    failed = []
    for name, make in HOOKS.items():
        if name in WAITING:
            continue

        def call(model: Any, make: Callable[[], Any] = make) -> Any:
            hook = make()
            hooks = hook if isinstance(hook, tuple) else (hook,)
            return dl.denoise(model, prompts, **settings_of(family), hooks=hooks)

        try:
            check(call, family)
        except AssertionError as error:
            failed.append(f"{name}: {str(error)[:400]}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("family", list(MOST))
def test_waits_of_recordings(family: str) -> None:
    failed = []
    for name, make in reducers_of(family).items():
        try:
            check(lambda model, make=make: dl.record(model, PROMPTS, [make()], **settings_of(family)), family)
        except AssertionError as error:
            failed.append(f"{name}: {str(error)[:400]}")
    assert not failed, "\n".join(failed)
