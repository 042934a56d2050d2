"""What hooks refuse before a run, what runs say of them at the end, and warnings of passes over a run again."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlm_lens.adapters.model_names import name_of
from dlm_lens.attention import Hook, HookLike, RunStep, hidden_mass, hidden_per_map, hook_keys, warn_of_shifts
from dlm_lens.sampling.denoising_run import DenoisingRun

logger = logging.getLogger(__name__)


def hidden_in(memory: Mapping[Any, Any], hooks: Sequence[HookLike]) -> dict[str, tuple[float | None, ...]]:
    """The entries of a run's settings about the hooks that hide columns: how many they hid, and their attention."""
    placed = list(zip(hooks, hook_keys(hooks), strict=True))
    return {
        "columns_hidden": tuple(hidden_per_map(memory, hook, place) for hook, place in placed),
        "mass_hidden": tuple(hidden_mass(memory, hook, place) for hook, place in placed),
    }


def check_hooks(hooks: Sequence[Hook], run: RunStep) -> None:
    """Call `Hook.check_run` of every hook, which refuses a run or a model that lacks what the hook needs.

    Warns of a hook that names canvas positions where rows are padded, and so begin at different ones.

    Raises:
        ValueError: a step, a layer or a head that is not there.
    """
    for hook in {hook.key: hook for hook in hooks}.values():  # a bridge has one of every layer
        hook.check_run(run)
    warn_of_shifts(hooks, run.valid)


def check_steps(hooks: Iterable[Hook], steps: Sequence[int], total: int) -> None:
    """Call `Hook.check_steps` of every hook: the run has `total` steps, and is sure to come to all of `steps`.

    Raises:
        ValueError: a step for which a hook lacks what it needs.
    """
    for hook in {hook.key: hook for hook in hooks}.values():
        hook.check_steps(steps, total)


def warn_of_steps_not_reached(hooks: Sequence[Hook], last: RunStep | None) -> None:
    """Warn of hooks whose steps all lie after the end of the run, which may have ended early.

    Args:
        hooks: of the run.
        last: its last step; None if there was none.
    """
    if last is None:
        return
    for hook in {hook.key: hook for hook in hooks}.values():
        first = hook.first_step(last.total)
        if first is not None and first >= last.total:
            logger.warning(
                "%s did not act: the run has steps 0 to %d, and none of the hook's", hook, last.total - 1
            )
        elif first is not None and last.step < first:
            logger.warning(
                "%s did not act: it begins at step %d, and the run ended after %d of at most %d steps; give steps "
                "that it has (negative ones count from the end of the longest run)",
                hook,
                first,
                last.step + 1,
                last.total,
            )


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
