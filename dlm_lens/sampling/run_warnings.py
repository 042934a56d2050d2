"""Warnings where passes over the canvases of a finished run have another model, or other hooks, than the run."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlm_lens.adapters.model_names import name_of
from dlm_lens.attention import HookLike
from dlm_lens.sampling.denoising_run import DenoisingRun

logger = logging.getLogger(__name__)


def warn_of_model(run: DenoisingRun, model: Any) -> None:
    """Warn where another model sees a run's canvases, by the last part of its name."""
    if run.model and Path(run.model).name != Path(name_of(model)).name:
        logger.warning("the run is of the model %s, and %s reads its canvases", run.model, name_of(model))


def warn_of_hooks(run: DenoisingRun, hooks: Sequence[HookLike]) -> None:
    """Warn where passes over a run's canvases are made under other hooks than the run."""
    had = tuple(run.settings.get("hooks", ()))
    if had and had != tuple(map(repr, hooks)):
        logger.warning(
            "the run was made under the hooks [%s]; this computes the network on its canvases under [%s] "
            "(its own: hooks=dlm_lens.hooks.hooks_of_run(run))",
            ", ".join(had),
            ", ".join(map(repr, hooks)),
        )
