"""The loop's steps as nnsight locations."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Int
from nnsight.intervention.interleaver import Interleaver
from torch import Tensor

from dlm_lens.sampling import Denoised, Proposal, Sampler, StepPlan
from dlm_lens.tracing.steps import STEP


class Run(Denoised):
    """The result of `lm.generate`: a `Denoised` that knows what `with` was meant to say."""

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "this run is finished and was not traced: `with lm.generate(...) as tracer:` has to stand there "
            "literally, not in a function that returns it, and in a file or a notebook cell, not on stdin (nnsight "
            "reads the source of the block)"
        )

    def __exit__(self, *error: object) -> None: ...

    @classmethod
    def of(cls, run: Denoised) -> "Run":
        """The same run."""
        return cls(**{name.name: getattr(run, name.name) for name in fields(run)})


class TracedRun:
    """Hands every step of a run, and its canvas, to the workers of a trace (the Host protocol of `sampling`).

    Args:
        interleaver: of the traced model.
        canvas: the location of the canvas.
        grad: whether the network's forward passes keep their graphs.
        on_start: called with the run's sampler, None for AR decoding.
    """

    def __init__(
        self, interleaver: Interleaver, canvas: str, *, grad: bool, on_start: Callable[[Sampler | None], None]
    ) -> None:
        self.interleaver, self.location, self.grad, self.on_start = interleaver, canvas, grad, on_start
        self.everywhere = True
        self.state: dict[str, Tensor] = {}
        self.editable = False

    def start(self, sampler: Sampler | None, content: Bool[Tensor, "batch position"]) -> None:
        """A run begins."""
        self.on_start(sampler)
        self.editable = sampler is not None
        self.state = {"valid": content}

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins: tell who waits for it, and offer its canvas for reading and editing."""
        if "answer" not in self.state:
            self.state["answer"] = masked
        state = {"tokens": canvas, "masked": masked, **self.state}
        self._handle(STEP, (plan, state))
        if not self.editable:
            return canvas
        edited: Any = self._handle(self.location, canvas)
        return torch.as_tensor(edited, device=canvas.device)

    def finish(self, plan: StepPlan, canvas: Tensor, proposal: Proposal, selected: Tensor) -> None:
        """A step is over; the trace has seen it in the sampler."""

    def stop(self) -> None:
        """The run is over: whoever waits for another step goes on behind its loop."""
        self._handle(STEP, None)

    def _handle(self, location: str, value: Any) -> Any:
        return self.interleaver.handle(location, value) if self.interleaver.interleaving else value
