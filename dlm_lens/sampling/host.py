"""Who follows a run from inside the process, step by step."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import RunStep
from dlm_lens.sampling.sampler import Proposal, Sampler, StepPlan


class Host(Protocol):
    """Somebody who follows a run: told of every step, asked for its canvas, told what the step did."""

    @property
    def grad(self) -> bool:
        """Whether the network's forward passes keep their graphs."""
        ...

    @property
    def everywhere(self) -> bool:
        """Whether the model's own forward runs, with all logits, rather than the least that is needed."""
        ...

    def start(self, sampler: Sampler | None, content: Bool[Tensor, "batch position"]) -> None:
        """A run begins with this sampler (None: AR decoding); `content` is False where there is padding."""
        ...

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins; returns the canvas that it shall see, which may be the one given."""
        ...

    def finish(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        proposal: Proposal,
        selected: Bool[Tensor, "batch position"],
    ) -> None:
        """A step is over: `canvas` is what it left, `selected` what it wrote of the proposal."""
        ...

    def stop(self) -> None:
        """The run is over."""
        ...


@runtime_checkable
class UsesNetwork(Protocol):
    """A host that runs the run's network itself, for a pass that is no step."""

    def use_network(self, forward: Callable[[Int[Tensor, "batch position"]], Any]) -> None:
        """Take the network without its head, as the run calls it: guidance and padding included."""
        ...


class Follower:
    """A host that changes nothing and knows the run's present step as a `RunStep`, at `now`.

    `answer` is what was masked at the first step that it was told of, unless somebody sets it behind `start`.

    Args:
        model: the network, whose config and tokenizer the steps carry.
    """

    grad = False
    everywhere = False

    def __init__(self, model: Any) -> None:
        self.model = model
        self.now: RunStep | None = None
        self.sampler: Sampler | None = None
        self._content = self.answer = torch.empty(0)
        self._memory: dict[Any, Any] = {}

    def start(self, sampler: Sampler | None, content: Bool[Tensor, "batch position"]) -> None:
        """A run begins."""
        self.sampler, self._content, self._memory = sampler, content, {}
        self.answer = torch.empty(0)

    @property
    def remembers(self) -> bool:
        """Whether a hook has put something into the run's memory."""
        return bool(self._memory)

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins; the canvas stays as it is."""
        if not self.answer.numel():
            self.answer = masked
        now = RunStep(
            step=plan.index,
            total=plan.total,
            block=plan.block,
            span=plan.span,
            tokens=canvas,
            masked=masked,
            valid=self._content,
            answer=self.answer,
            config=self.model.config,
            tokenizer=getattr(self.model, "tokenizer", None),
            memory=self._memory,
        )
        # An AR network sees what is written so far.
        self.now = now if self.sampler is not None else now.until(plan.span[0] + plan.index)
        return canvas

    def finish(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        proposal: Proposal,
        selected: Bool[Tensor, "batch position"],
    ) -> None:
        """A step is over."""

    def stop(self) -> None:
        """The run is over."""
        self.now = None

    def close(self) -> None:
        """The run is over, however it ended: `denoise` calls this also where it raises."""
        self.now = None
