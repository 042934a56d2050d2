"""What a function takes for a run: the run, or a recording of it."""

from typing import Any, Protocol

from dlm_lens.arguments import meant
from dlm_lens.sampling.denoising_run import DenoisingRun


class HasRun(Protocol):
    """What holds the run that it came from: a `Recording`."""

    @property
    def run(self) -> DenoisingRun:
        """The run."""


RunLike = DenoisingRun | HasRun
"""A run, or a `Recording` in its place: the run that it recorded, or its part of it."""


def is_run(given: Any) -> bool:
    """Whether this is a run, or holds the one that it came from."""
    return isinstance(getattr(meant(given), "run", given), DenoisingRun)


def as_run(given: RunLike) -> DenoisingRun:
    """The run itself; of a recording, the run that it recorded.

    Raises:
        TypeError: naming the class of what was given.
    """
    run = getattr(meant(given), "run", given)
    if not isinstance(run, DenoisingRun):
        kind = type(given).__name__
        raise TypeError(
            f"the run is a {kind}; give the DenoisingRun that dlm_lens.denoise returned, or a recording"
        )
    return run
