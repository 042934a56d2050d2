"""nnsight's tracers with `steps`, and an interleaver whose errors explain reads that no step can serve."""

import threading
from contextlib import suppress
from types import CodeType
from typing import Any

from jaxtyping import Int
from nnsight.intervention.editing import EditingTracer
from nnsight.intervention.interleaver import (
    EarlyStopException,
    GreenletExit,
    Interleaver,
    Mediator,
    OutOfOrderError,
    getcurrent,
)
from nnsight.intervention.tracer import InterleavingTracer, Invoker, ScanningTracer
from torch import Tensor

from dlm_lens.adapters.expert_products import shapes_of_experts
from dlm_lens.attention import in_use, listening
from dlm_lens.attention.hook_points import ProjectionPoint
from dlm_lens.sampling import DenoisingRun
from dlm_lens.tracing.controllers import (
    ModuleController,
    TracedModule,
    VisitCounts,
    connected_projections,
)
from dlm_lens.tracing.steps import STEP, Steps, loop_state


class WithSteps:
    """Mixin of nnsight's tracers: the steps of a denoising run, and exclusive use of the model."""

    @property
    def steps(self) -> Steps:
        """The steps of the run: `for step in tracer.steps[10:20]:`."""
        return Steps()

    def execute(self, code: CodeType) -> None:
        """Run the block; other threads wait for the model, and compiled code is not used."""
        root = self.envoy.root  # type: ignore[attr-defined]
        model = root._module
        with in_use(model), listening(model), connected_projections(root.interleaver):
            super().execute(code)  # type: ignore[misc]


class RunTracer(WithSteps, InterleavingTracer):
    """The tracer of `lm.generate` and `lm.trace`."""

    def invoke(self, *args: Any, **kwargs: Any) -> Invoker:
        """A prompt of the trace, or with none the rows of all; see nnsight's `InterleavingTracer.invoke`.

        Raises:
            ValueError: the trace has its prompt already, or this is the body of another invoke.
        """
        if self.envoy.interleaver.interleaving:
            raise ValueError(
                "tracer.invoke(...) while the model is already running: the trace was given its prompt, or this is "
                "the body of another invoke; give each prompt to an invoke of its own, one after the other, and "
                "lm.generate(...) or lm.trace(...) the settings alone"
            )
        return super().invoke(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Explain where the result of a run is; a tracer has none of its attributes.

        Raises:
            AttributeError: always.
        """
        if hasattr(DenoisingRun, name) or name in DenoisingRun.__dataclass_fields__:
            raise AttributeError(
                f"a tracer has no {name!r}: read tracer.result.{name} in the block of `with lm.generate(...) as "
                "tracer:`. Without a trace, call lm.generate(...) on a line of its own: beside another `with` on "
                "the same line nnsight takes that one for the trace's, and runs nothing"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class RunScanningTracer(WithSteps, ScanningTracer):
    """The tracer of `lm.scan`."""

    def execute(self, code: CodeType) -> None:
        """Run the block with experts whose products have shapes in the model's dtype."""
        with shapes_of_experts(self.envoy.root._module):
            super().execute(code)


class RunEditingTracer(WithSteps, EditingTracer):
    """The tracer of `lm.edit`."""


class RunInterleaver(Interleaver):
    """nnsight's interleaver, with an error instead of a warning for a value that a step never computed.

    Attributes:
        awaited: the modules one of whose values a worker waits for, or a cache keeps.
        controllers: of every module that is traced, by its path, with what is counted of the module.
        projection_points: every `hook_q` and `hook_k` of the model.
        run: the `TracedRun` that began last; None before the first.
        stopped: whether `tracer.stop()` ended what was traced last.
        content: of the prompts of the trace, 0 at the padding on the left; None without prompts.
        warned: the hooks that warned of this padding.
    """

    thread: int | None = None
    stopped: bool = False
    run: Any = None
    content: Int[Tensor, "batch position"] | None = None
    awaited: tuple[TracedModule, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.warned: set[Any] = set()
        self.counts: Any = VisitCounts()
        self.controllers: dict[str, tuple[ModuleController, TracedModule]] = {}
        self.projection_points: list[ProjectionPoint] = []

    @property
    def tracing(self) -> bool:
        """Whether a trace runs, which has workers."""
        return self.interleaving and self.busy

    def instrument(self, envoy: Any) -> None:
        """Give an envoy's module a `ModuleController`."""
        super().instrument(envoy)
        ModuleController.install(envoy._module, self, envoy.path)

    def reindex(self) -> None:
        """As nnsight's, with what is awaited of the caches, and told to every module's controller."""
        super().reindex()
        self._reindex_parked()  # nnsight's comes before the caches'
        if self.tracing:
            for controller, traced in self.controllers.values():
                controller.interleaver, controller.traced = self, traced

    def _reindex_parked(self) -> None:
        super()._reindex_parked()
        self._await((*self.parked, *self.observers))

    def _await(self, locations: tuple[str, ...]) -> None:
        """Tell the modules whether one of their locations is awaited."""
        for traced in self.awaited:
            traced.awaited = False
        self.awaited = self.counts.modules_of(locations)
        for traced in self.awaited:
            traced.awaited = True

    def __enter__(self) -> Any:
        self.thread, self.stopped = threading.get_ident(), False
        if all(mediator.worker is None for mediator in self.mediators):
            self.counts.clear()  # every worker copies the counts when it starts
        return super().__enter__()

    def __exit__(self, *error: Any) -> bool:
        self.stopped = error[0] is EarlyStopException
        try:
            with suppress(EarlyStopException):  # another worker may call tracer.stop() after its loop
                if self.stopped and self.counts.get(STEP, 0):
                    self.run.stop()  # other workers leave their loops over steps, as at the end of every run
        finally:
            self._end()
        return super().__exit__(*error)

    def _end(self) -> None:
        """Nothing is awaited and no module is traced from now on."""
        self.interleaving = False
        for controller, _ in self.controllers.values():
            controller.interleaver = controller.traced = None
        self._await(())

    def check_free(self) -> None:
        """Refuse a run that begins during a trace of the same model.

        Raises:
            RuntimeError: this thread or another one is tracing the model.
        """
        if self.interleaving and self.thread != threading.get_ident():
            raise RuntimeError(
                "another thread is tracing this model; one run at a time: give each thread a model of its "
                "own, or a lock"
            )
        during = self.interleaving and self.run is not None and self.run.going
        if during or getattr(getcurrent(), "mediator", None) is not None:
            raise RuntimeError(
                "a run cannot begin inside the body of another; run one after the other, in `with lm.session():` "
                "if they share values, or in a callback such as on_canvas call dlm_lens.denoise(lm, ...)"
            )

    def check_dangling_mediators(self) -> None:
        """Raise an error in the frame of every worker that still waits for a value.

        Raises:
            OutOfOrderError: the model had computed the value before, or never does.
        """
        for mediator in self.mediators:
            if mediator.alive and mediator.copy and mediator.pending.provider == STEP:
                # A stored edit of steps does nothing in lm.trace's single forward.
                mediator.worker.throw(GreenletExit)
            elif mediator.alive and (message := _explanation(mediator, stopped=self.stopped)):
                mediator.worker.throw(OutOfOrderError(message))
        super().check_dangling_mediators()


def _explanation(mediator: Mediator, *, stopped: bool) -> str | None:
    pending, loop = mediator.pending, loop_state(mediator.worker)
    if pending is None or pending.provider is None:
        return None  # a barrier: nnsight has its own error
    if pending.provider == STEP and mediator.occurrence(STEP):
        return "a loop over tracer.steps began when the run was over: read tracer.result after the loop"
    if pending.provider == STEP:
        return "tracer.steps needs a run: open it with lm.generate(...); lm.trace(...) is one forward without steps"
    if loop.at < 0 and mediator.iteration != 0:
        return None  # tracer.iter's loops keep nnsight's rules
    if stopped:
        return (
            f"tracer.stop() ended the run before {pending.provider!r}, which this block waits for, was computed: "
            "stop after the values that the other invokes read"
        )
    part = pending.provider.split(".")[1:2]
    if part in (["canvas"], ["sampler"]) and mediator.occurrence(pending.provider) == 0:
        return (
            f"{pending.provider!r} was never computed: an AR baseline has neither canvas nor sampler, and neither "
            "has lm.trace(...), which is one forward; open a run of a masked DLM with lm.generate(...)"
        )
    where = "in the trace" if loop.at < 0 else f"{'in' if loop.inside else 'after'} step {loop.at}"
    return (
        f"{pending.provider!r} was read {where}, but the model had passed it already or never computes it: read in "
        "the order in which the model runs, or in another tracer.invoke(); read a value of a step inside `for step "
        "in tracer.steps[...]`"
    )
