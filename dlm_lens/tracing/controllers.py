"""Controllers of a traced model's modules: little work where no worker waits, and values for `hook_q` and `hook_k`.

nnsight's controller of a module hands three locations (input, skip, output) to the interleaver in every call, which
counts each. A step of a small model has some 150 calls. `ModuleController` counts by itself and hands over only
what a worker waits for or a cache keeps (`benchmarks/tracing.py --calls`).

Outside traces a PyTorch hook on the projection passes queries and keys to `hook_q` and `hook_k`
(`attention.hook_points.ProjectionPoint`). In a trace the controller of the projection does, where they are read,
without PyTorch's slower call of modules that have hooks.
"""

from collections.abc import Iterator, MutableMapping
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


class TracedModule(NamedTuple):
    """What an interleaver knows of a module.

    Attributes:
        visits: of the module.
        points: the `hook_q` and `hook_k` that its output belongs to, with their paths and visits.
    """

    visits: Visits
    points: list[tuple[ProjectionPoint, str, Visits]]


class ModuleController(Controller):
    """nnsight's controller of a module, which hands nothing over while no worker waits for the module."""

    @classmethod
    def install(cls, module: nn.Module, interleaver: Any, path: str) -> None:
        """Take the place of the controller that nnsight gave the module for this interleaver."""
        own = vars(module)
        if type(own.get("forward")) is Controller:
            own["forward"] = cls(module, own[STATE])
        interleaver.modules[path] = TracedModule(interleaver.counts.of_module(path), [])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as nnsight's controller returns it."""
        state, module = self.state, self.module_ref()
        interleaver, path, locations = state.active()
        if interleaver is None:
            return run_body(state, module, args, kwargs)
        try:
            visits, points = interleaver.modules[path]
        except AttributeError:  # a trace of another wrapper of nnsight
            return super().__call__(*args, **kwargs)
        if path in interleaver.awaited:
            output = super().__call__(*args, **kwargs)
        else:
            visits[0] += 1
            visits[1] += 1
            output = run_body(state, module, args, kwargs)
            if path in interleaver.awaited:  # by a worker that was served inside the module's call
                output = interleaver.handle(locations[2], output)
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
    traced = _traced(point.find_source(), interleaver)
    if traced is not None:
        traced.points.append((point, path, interleaver.counts.of_module(path)))
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
    traced = _traced(module, interleaver)
    return traced is not None and not module._forward_hooks and any(each is point for each, *_ in traced.points)


def _traced(module: nn.Module, interleaver: Any) -> TracedModule | None:
    """What the interleaver knows of a module; None if it has no controller."""
    controller = vars(module).get("forward")
    if not isinstance(controller, ModuleController):
        return None
    paths = [path for reference, path, _ in controller.state.routes if reference() is interleaver]
    return interleaver.modules.get(paths[0]) if paths else None
