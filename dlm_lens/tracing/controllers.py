"""Controllers of a traced model's modules: little work where no worker waits, and values for `hook_q` and `hook_k`.

nnsight's controller of a module hands three locations (input, skip, output) to the interleaver in every call, which
counts each. A step of a small model has some 150 calls. `ModuleController` counts by itself and hands over only
what a worker waits for or a cache keeps (`benchmarks/tracing.py --calls`). While a trace runs, it knows the
interleaver, and looks for none.

Outside traces a PyTorch hook on the projection passes queries and keys to `hook_q` and `hook_k`
(`attention.hook_points.ProjectionPoint`). In a trace the controller of the projection does, where they are read,
without PyTorch's slower call of modules that have hooks.
"""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from nnsight.intervention.source import STATE, Controller, run_body
from torch import nn

from dlm_lens.attention.hook_points import ProjectionPoint


class TracedModule:
    """What a trace knows of a module; attributes, because every call of the module reads them.

    Attributes:
        path: of the module.
        inputs: how often its input was passed.
        skips: how often its skip was.
        outputs: how often its output was.
        awaited: whether a worker waits for one of the three, or a cache keeps it.
        points: the `hook_q` and `hook_k` that the module's output belongs to.
    """

    __slots__ = ("awaited", "inputs", "outputs", "path", "points", "skips")

    def __init__(self, path: str) -> None:
        self.path, self.awaited = path, False
        self.inputs = self.skips = self.outputs = 0
        self.points: list[tuple[ProjectionPoint, TracedModule]] = []

    def pass_by(self) -> None:
        """Count a call in which nothing is handed over."""
        self.inputs += 1
        self.skips += 1
        self.outputs += 1


_COUNTED = {"input": "inputs", "skip": "skips", "output": "outputs"}


class VisitCounts(MutableMapping[str, int]):
    """nnsight's number of visits of every location; a module's controller increments those of the module.

    Attributes:
        modules: the modules whose visits are counted, by path.
    """

    def __init__(self) -> None:
        self.modules: dict[str, TracedModule] = {}
        self._locations: dict[str, tuple[TracedModule, str]] = {}
        self._others: dict[str, int] = {}

    def modules_of(self, locations: Iterable[str]) -> tuple[TracedModule, ...]:
        """The modules that some of the locations belong to."""
        found = map(self._locations.get, locations)
        return tuple(each[0] for each in found if each is not None)

    def of_module(self, path: str) -> TracedModule:
        """The module at a path, made on first use."""
        if path not in self.modules:
            traced = self.modules[path] = TracedModule(path)
            for name, counter in _COUNTED.items():
                self._locations[f"{path}.{name}"] = traced, counter
        return self.modules[path]

    def get(self, location: str, default: Any = None) -> Any:
        """The number of visits; `default` where there was none."""
        found = self._locations.get(location)
        return self._others.get(location, default) if found is None else getattr(*found) or default

    def __getitem__(self, location: str) -> int:
        return int(self.get(location) or self._others[location])

    def __setitem__(self, location: str, count: int) -> None:
        found = self._locations.get(location)
        if found is None:
            self._others[location] = count
        else:
            setattr(*found, count)

    def clear(self) -> None:
        """Count from 0 again."""
        for traced in self.modules.values():
            traced.inputs = traced.skips = traced.outputs = 0
        self._others.clear()

    def __delitem__(self, location: str) -> None:
        self[location] = 0

    def __iter__(self) -> Iterator[str]:
        yield from (location for location, found in self._locations.items() if getattr(*found))
        yield from self._others

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ModuleController(Controller):
    """nnsight's controller of a module, which hands nothing over while no worker waits for the module.

    Attributes:
        interleaver: of the trace that runs; None outside traces.
        traced: the module in that trace.
    """

    interleaver: Any = None
    traced: TracedModule | None = None

    @classmethod
    def install(cls, module: nn.Module, interleaver: Any, path: str) -> None:
        """Take the place of the controller that nnsight gave the module for this interleaver."""
        own = vars(module)
        if type(own.get("forward")) is Controller:
            own["forward"] = cls(module, own[STATE])
        controller = own.get("forward")
        if isinstance(controller, cls):
            traced = interleaver.counts.of_module(path)
            interleaver.controllers[path] = controller, traced
            if interleaver.tracing:  # a run's sampler
                controller.interleaver, controller.traced = interleaver, traced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as nnsight's controller returns it."""
        interleaver, traced = self.interleaver, self.traced
        if traced is None or not interleaver.interleaving:
            interleaver, path, _ = self.state.active()
            if interleaver is None:
                return run_body(self.state, self.module_ref(), args, kwargs)
            if not isinstance(interleaver.counts, VisitCounts):  # a trace of another wrapper of nnsight
                return super().__call__(*args, **kwargs)
            traced = interleaver.counts.of_module(path)
        awaited_before = traced.awaited
        if awaited_before:
            output = super().__call__(*args, **kwargs)
        else:
            traced.inputs += 1
            traced.skips += 1
            output = run_body(self.state, self.module_ref(), args, kwargs)
            if traced.awaited:  # by a worker that was served inside the module's call
                output = interleaver.handle(f"{traced.path}.output", output)
            else:
                traced.outputs += 1
        return self._through_points(traced, args, output) if traced.points else output

    def _through_points(self, traced: TracedModule, args: tuple[Any, ...], output: Any) -> Any:
        """A projection's output after `hook_q` and `hook_k`."""
        for point, of_point in traced.points:
            if point.connections:
                continue  # a PyTorch hook passes the output on
            if of_point.awaited:
                edited = point.pass_through(self.module_ref(), args, output)
                output = output if edited is None else edited
            else:
                of_point.pass_by()
        return output


def add_projection_point(point: ProjectionPoint, interleaver: Any, path: str) -> None:
    """Let the controller of a projection pass its output to `hook_q` or `hook_k` in traces of `interleaver`."""
    traced = _traced(point.find_source(), interleaver)
    if traced is not None:
        traced.points.append((point, interleaver.counts.of_module(path)))
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
    return interleaver.counts.modules.get(paths[0]) if paths else None
