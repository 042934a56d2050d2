"""Where a run stands behind a step, so that it can go on from there in another process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.history import History
from dlm_lens.sampling.sampler import Proposal, StepPlan


@dataclass(frozen=True, eq=False)
class RunState:
    """All that the next step of a run depends on.

    Args:
        canvas: what the finished steps left.
        own: states of the random generators and of the sampler, by name.
        over: no step follows.
        remembers: a hook keeps something of earlier steps, which is not here: such a run cannot go on.
    """

    canvas: Int[Tensor, "batch position"]
    own: Mapping[str, Tensor] = field(default_factory=dict)
    over: bool = False
    remembers: bool = False


@dataclass(frozen=True, eq=False)
class FinishedStep:
    """One step of a run: its plan, what it saw, what it proposed and wrote."""

    plan: StepPlan
    canvas: Int[Tensor, "batch position"]
    masked: Bool[Tensor, "batch position"]
    proposal: Proposal
    selected: Bool[Tensor, "batch position"]


@dataclass(frozen=True, eq=False)
class Resumption:
    """The finished steps of an unfinished run, and where they left it."""

    steps: tuple[FinishedStep, ...]
    state: RunState

    def enter(self, history: History) -> None:
        """Put the finished steps in front of a run's history.

        Raises:
            ValueError: they are of other prompts or of another length.
        """
        held, wanted = tuple(self.state.canvas.shape), tuple(history.attention_mask.shape)
        if held != wanted:
            raise ValueError(
                f"resume holds canvases {list(held)}, this run has {list(wanted)}; it is another run's"
            )
        for step in self.steps:
            history.start(step.canvas.to(self._device(history)), step.masked.to(self._device(history)))
            proposal = Proposal(*(part.to(self._device(history)) for part in step.proposal))
            history.finish(step.plan, proposal, step.selected.to(self._device(history)))

    def canvas(self, history: History) -> Int[Tensor, "batch position"]:
        """The canvas that the next step starts from."""
        return self.state.canvas.to(self._device(history))

    def _device(self, history: History) -> torch.device:
        return history.attention_mask.device


@runtime_checkable
class StateKeeper(Protocol):
    """A host that is also told, behind every step, where the run stands."""

    def keep(self, state: RunState) -> None:
        """The run stands here."""
        ...


class Stateful(Protocol):
    """A part of a run with a state of its own: random generators, a sampler."""

    def state(self) -> dict[str, Tensor]:
        """The state, by name."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        ...
