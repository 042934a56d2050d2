"""A recording stands for its run: in every public call that reads one."""

import inspect
from typing import Any, ClassVar

import matplotlib.pyplot as plt
import pytest

import dlm_lens as dl
from dlm_lens import hooks, probes, recording, sampling, sinks, viz
from dlm_lens.sampling.run_like import as_run
from tests.model_calls import CALLS, Case

OF_RUNS = [
    name
    for name, call in CALLS.items()
    if "run" in call.__code__.co_names and "encoder" not in name and not name.startswith("replay ")
]
"""Calls that read a run; those under each hook are all of `replay`."""


OTHERS = ("attach_hooks", "collecting_columns", "hooks_of_run", "part_of_run")
"""Whose `run` is a step of a run, any object with settings, or what `Recording.select` takes a part of."""


class Recorded(Case):
    """A case whose run is given as its recording."""

    settings: ClassVar[dict[str, Any]] = {"steps": 4, "gen_length": 16, "seed": 1}  # type: ignore[misc]

    @property
    def run(self) -> Any:
        return self.recording


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded("llada", tmp_path_factory.mktemp("case"))


@pytest.mark.parametrize("name", OF_RUNS)
def test_every_call_on_a_run_takes_a_recording(case: Recorded, name: str) -> None:
    CALLS[name](case)
    plt.close("all")


def test_every_public_function_of_a_run_says_that_it_takes_a_recording() -> None:
    found = {}
    for room in (dl, hooks, probes, recording, sampling, sinks, viz):
        for name in room.__all__:
            if inspect.isfunction(function := getattr(room, name)) and name not in OTHERS:
                for given in ("run", "runs"):
                    if (parameter := inspect.signature(function).parameters.get(given)) is not None:
                        found[f"{room.__name__}.{name}"] = str(parameter.annotation)
    assert len(found) > 30
    assert {name: text for name, text in found.items() if "HasRun" not in text} == {}


def test_the_run_is_the_recording_s_own(case: Recorded) -> None:
    assert as_run(case.recording) is case.recording.run
    assert as_run(case.recording.run) is case.recording.run
    part = case.recording.select(step=[1, 2])
    assert as_run(part).step_numbers == (1, 2)
    for given in (case.received, "run", None, [case.recording.run]):
        with pytest.raises(TypeError, match=f"the run is a {type(given).__name__}; give the DenoisingRun that"):
            as_run(given)  # type: ignore[arg-type]
