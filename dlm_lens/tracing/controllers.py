"""Controllers of a traced model's modules: one question where nothing waits, and values for `hook_q` and `hook_k`.

nnsight's controller of a module hands three locations (input, skip, output) to the interleaver in every call, which
counts each. A step of a small model has some 150 calls. `ModuleController` counts by itself and hands over only
what a worker waits for or a cache keeps (`benchmarks/tracing.py --calls`).

Outside traces a PyTorch hook on the projection passes queries and keys to `hook_q` and `hook_k`
(`attention.hook_points.ProjectionPoint`). In a trace the controller of the projection does, where they are read,
without PyTorch's slower call of modules that have hooks.
"""

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from nnsight.intervention.source import STATE, Controller, run_body
from torch import nn

from dlm_lens.attention.hook_points import ProjectionPoint

Visits = list[int]
"""How often a module's input, skip and output were passed."""


class VisitCounts(MutableMapping[str, int]):
    """nnsight's number of visits of every location; a module's controller increments those of the module."""

    def __init__(self) -> None:
        self._modules: dict[str, Visits] = {}
        self._locations: dict[str, tuple[Visits, int]] = {}
        self._others: dict[str, int] = {}

    def of_module(self, path: str) -> Visits:
        """The counters of a module, made on first use."""
        if path not in self._modules:
            visits = self._modules[path] = [0, 0, 0]
            for index, name in enumerate(("input", "skip", "output")):
                self._locations[f"{path}.{name}"] = visits, index
        return self._modules[path]

    def get(self, location: str, default: Any = None) -> Any:
        """The number of visits; `default` where there was none."""
        found = self._locations.get(location)
        return self._others.get(location, default) if found is None else found[0][found[1]] or default

    def __getitem__(self, location: str) -> int:
        return int(self.get(location) or self._others[location])

    def __setitem__(self, location: str, count: int) -> None:
        found = self._locations.get(location)
        if found is None:
            self._others[location] = count
        else:
            found[0][found[1]] = count

    def clear(self) -> None:
        """Count from 0 again."""
        for visits in self._modules.values():
            visits[:] = 0, 0, 0
        self._others.clear()

    def __delitem__(self, location: str) -> None:
        self[location] = 0

    def __iter__(self) -> Iterator[str]:
        yield from (location for location, (visits, index) in self._locations.items() if visits[index])
        yield from self._others

    def __len__(self) -> int:
        return sum(1 for _ in self)


class TracedAs(NamedTuple):
    """A module as one interleaver traces it.

    Attributes:
        interleaver: a weak reference to a `RunInterleaver`.
        path: of the module.
        visits: of the module.
        points: the `hook_q` and `hook_k` that its output belongs to, with their paths and visits.
    """

    interleaver: Callable[[], Any]
    path: str
    visits: Visits
    points: list[tuple[ProjectionPoint, str, Visits]]


class ModuleController(Controller):
    """nnsight's controller of a module, which hands nothing over while nobody waits for the module.

    Attributes:
        runs: the interleavers that trace the module.
    """

    def __init__(self, module: Any, state: Any) -> None:
        super().__init__(module, state)
        self.runs: list[TracedAs] = []

    @classmethod
    def install(cls, module: nn.Module, interleaver: Any, path: str) -> None:
        """Take the place of the controller that nnsight gave the module for this interleaver."""
        own = vars(module)
        if type(own.get("forward")) is Controller:
            own["forward"] = cls(module, own[STATE])
        controller = own.get("forward")
        if isinstance(controller, cls):
            kept = [run for run in controller.runs if run.interleaver() not in (None, interleaver)]
            own_run = TracedAs(weakref.ref(interleaver), path, interleaver.counts.of_module(path), [])
            controller.runs = [*kept, own_run]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as nnsight's controller returns it."""
        state, module = self.state, self.module_ref()
        alone = "_hf_hook" not in module.__dict__  # without accelerate's hook, one call of Python less
        for run in self.runs:
            interleaver = run.interleaver()
            if interleaver is not None and interleaver.interleaving and interleaver.busy:
                break
        else:
            if len(state.routes) > len(self.runs):  # another wrapper's trace, maybe
                return super().__call__(*args, **kwargs)
            return state.body(module, *args, **kwargs) if alone else run_body(state, module, args, kwargs)
        _, path, visits, points = run
        if path in interleaver.awaited:
            output = super().__call__(*args, **kwargs)
        else:
            visits[0] += 1
            visits[1] += 1
            output = state.body(module, *args, **kwargs) if alone else run_body(state, module, args, kwargs)
            if path in interleaver.awaited:  # by a worker that was served inside the module's call
                output = interleaver.handle(f"{path}.output", output)
            else:
                visits[2] += 1
        for point, where, passed in points:
            if point.connections:
                continue  # a PyTorch hook passes the output on
            if where in interleaver.awaited:
                edited = point.pass_through(module, args, output)
                output = output if edited is None else edited
            else:
                passed[:] = passed[0] + 1, passed[1] + 1, passed[2] + 1
        return output


def module_of(location: str) -> str:
    """The path of the module that an nnsight location belongs to."""
    return location.rpartition(".")[0]


def add_projection_point(point: ProjectionPoint, interleaver: Any, path: str) -> None:
    """Let the controller of a projection pass its output to `hook_q` or `hook_k` in traces of `interleaver`."""
    controller = vars(point.find_source()).get("forward")
    if isinstance(controller, ModuleController):
        for run in controller.runs:
            if run.interleaver() is interleaver:
                run.points.append((point, path, interleaver.counts.of_module(path)))
    interleaver.projection_points.append(point)


@contextmanager
def connected_projections(interleaver: Any) -> Iterator[None]:
    """A block in which every `hook_q` and `hook_k` of a model that `interleaver` traces receives its values.

    A projection that was replaced since the model was wrapped (LoRA), or that has PyTorch hooks of the user, whose
    edits belong to the value, is connected by a PyTorch hook.
    """
    by_hook = [point for point in interleaver.projection_points if not _served(point, interleaver)]
    for point in by_hook:
        point.connect()
    try:
        yield
    finally:
        for point in by_hook:
            point.disconnect()


def _served(point: ProjectionPoint, interleaver: Any) -> bool:
    """Whether the controller of the point's projection passes its output on in a trace of `interleaver`."""
    module = point.find_source()
    controller = vars(module).get("forward")
    if module._forward_hooks or not isinstance(controller, ModuleController):
        return False
    here = [run for run in controller.runs if run.interleaver() is interleaver]
    return any(each is point for run in here for each, *_ in run.points)
