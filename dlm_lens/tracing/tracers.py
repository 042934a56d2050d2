"""nnsight's tracers with `steps`, and the interleaver that explains what a trace waited for in vain."""

import threading
from types import CodeType
from typing import Any

from nnsight.intervention.editing import EditingTracer
from nnsight.intervention.interleaver import GreenletExit, Interleaver, Mediator, OutOfOrderError, getcurrent
from nnsight.intervention.tracer import InterleavingTracer, ScanningTracer

from dlm_lens.attention import listening
from dlm_lens.tracing.steps import STEP, Steps, place_of


class WithSteps:
    """What a tracer of a denoising run has on top of nnsight's."""

    @property
    def steps(self) -> Steps:
        """The steps of the run: `for step in tracer.steps[10:20]:`."""
        return Steps()

    def execute(self, code: CodeType) -> None:
        """Run the block, while other threads wait for the model and no compiled code runs."""
        with listening(self.envoy.root._module):  # type: ignore[attr-defined]
            super().execute(code)  # type: ignore[misc]


class RunTracer(WithSteps, InterleavingTracer):
    """The tracer of `lm.generate` and `lm.trace`."""


class RunScanningTracer(WithSteps, ScanningTracer):
    """The tracer of `lm.scan`."""


class RunEditingTracer(WithSteps, EditingTracer):
    """The tracer of `lm.edit`."""


class RunInterleaver(Interleaver):
    """nnsight's interleaver, with an error instead of a warning for what a step never reached."""

    thread: int | None = None

    def __enter__(self) -> Any:
        self.thread = threading.get_ident()
        return super().__enter__()

    def check_free(self) -> None:
        """Refuse to begin a run inside another one.

        Raises:
            RuntimeError: this or another thread is in the middle of a trace of the model.
        """
        if self.interleaving and self.thread != threading.get_ident():
            raise RuntimeError(
                "another thread is tracing this model; one run at a time: give each thread a model of its "
                "own, or a lock"
            )
        if getattr(getcurrent(), "mediator", None) is not None:
            raise RuntimeError(
                "a run cannot begin inside the body of another; run one behind the other, in `with lm.session():` "
                "where they share values"
            )

    def check_dangling_mediators(self) -> None:
        """Raise in the worker's own frame what it waited for in vain.

        Raises:
            OutOfOrderError: a location that the model had passed, or never calls.
        """
        for mediator in self.mediators:
            if mediator.alive and mediator.copy and mediator.pending.provider == STEP:
                # A stored edit of steps has nothing to do in lm.trace's single forward.
                mediator.worker.throw(GreenletExit)
            elif mediator.alive and (message := _explanation(mediator)):
                mediator.worker.throw(OutOfOrderError(message))
        super().check_dangling_mediators()


def _explanation(mediator: Mediator) -> str | None:
    pending, place = mediator.pending, place_of(mediator.worker)
    if pending is None or pending.provider is None:
        return None  # a barrier: nnsight says what is wrong
    if pending.provider == STEP:
        return "tracer.steps needs a run: open it with lm.generate(...); lm.trace(...) is one forward without steps"
    if place.at < 0 and mediator.iteration != 0:
        return None  # tracer.iter's loops keep nnsight's rules
    part = pending.provider.split(".")[1:2]
    if part in (["canvas"], ["sampler"]) and mediator.occurrence(pending.provider) == 0:
        return (
            f"{pending.provider!r} was never reached: an AR baseline has neither canvas nor sampler, and neither "
            "has lm.trace(...), which is one forward; open a run of a masked DLM with lm.generate(...)"
        )
    where = "in the trace" if place.at < 0 else f"{'in' if place.inside else 'behind'} step {place.at}"
    return (
        f"{pending.provider!r} was asked for {where}, but the model had passed it already or never reaches it: "
        "read in the order in which the model runs, or in another tracer.invoke(); a value of a step is read "
        "inside `for step in tracer.steps[...]`"
    )
