"""What a host that traces runs (nnsight) does at every step of the loop."""

from typing import Protocol

from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.sampler import Sampler, StepPlan


class Host(Protocol):
    """Somebody who follows a run from inside the process: told of every step, asked for its canvas."""

    @property
    def grad(self) -> bool:
        """Whether the network's forward passes keep their graphs."""
        ...

    def start(self, sampler: Sampler | None, content: Bool[Tensor, "batch position"]) -> None:
        """A run begins with this sampler (None: AR decoding); `content` is False where there is padding."""
        ...

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins; returns the canvas that it shall see, which may be the one given."""
        ...

    def stop(self) -> None:
        """The run is over."""
        ...
