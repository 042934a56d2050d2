"""`compare_query_classes`: whether masked and decoded queries attend to different sinks (Figure 6a)."""

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dlm_lens.arguments import checked_arguments
from dlm_lens.recording import Recording
from dlm_lens.sinks.detection import Sinks, find_sinks
from dlm_lens.sinks.detectors.above_mean import AboveMean
from dlm_lens.sinks.detectors.base import Detector
from dlm_lens.sinks.from_recording import received_in
from dlm_lens.sinks.received import Level, Received, in_model
from dlm_lens.statistics import SHARE_BOUNDS, prompts_with_cases, ratio_by_prompt


@checked_arguments()
def compare_query_classes(
    masked: Received | Recording,
    unmasked: Received | Recording,
    detector: Detector | None = None,
    *,
    level: Level = "head",
) -> pd.DataFrame:
    """Sinks of masked queries compared with those of decoded queries, per (layer, head): 2510.15731, Figure 6a.

    In the deepest layers of LLaDA "masked and unmasked tokens maintain separate attention sinks". Each class is
    divided by its own even attention, and has its own sinks. The comparison is over the steps at which both classes
    have enough queries for a score.

    Columns: layer, head; `differ`, part of the steps with a sink of both classes whose largest sinks differ, with
    its 95% interval `low`, `high` (bootstrap over prompts; NaN for one); `disjoint`, part of them in which no
    position is a sink of both; `jaccard` of all sinks; `only_masked`, `only_unmasked`, part of the steps in which
    one class alone has a sink; `both`, how many steps have a sink of both, of `steps` compared; `sequences`;
    `prompts`, those that have such a step.

    Args:
        masked: `received_over_steps(model, run, queries="masked")`, or "open"; or a `Recording` with this class.
        unmasked: the same with queries="unmasked", or "decided"; the same `Recording` may have both.
        detector: the rule; `AboveMean(3.0)` by default.
        level: the level of the patterns.

    Raises:
        ValueError: other shapes, not these two classes, or a recording without one of them.
    """
    masked = received_in(masked, "masked", "masked")
    unmasked = received_in(unmasked, "unmasked", "unmasked")
    if (masked.queries, unmasked.queries) != ("masked", "unmasked"):
        raise ValueError(
            f"the queries are {masked.queries!r} and {unmasked.queries!r}; give received_over_steps(..., "
            "queries='masked') first and queries='unmasked' second"
        )
    if masked.values.shape != unmasked.values.shape or "step" not in masked.dims:
        raise ValueError(
            f"scores of shape {list(masked.values.shape)} and {list(unmasked.values.shape)}; give one run's steps"
        )
    rule = AboveMean(3.0) if detector is None else detector
    first, second = (find_sinks(given.at_level(level), rule, level=level) for given in (masked, unmasked))
    counts = _counts(first, second)
    differ, low, high = ratio_by_prompt(counts["differ"], counts["both"], masked.row_prompts, bounds=SHARE_BOUNDS)
    sums = {name: value.sum(0) for name, value in counts.items()}
    groups = [name for name in ("layer", "head") if name in first.dims]
    at = dict(zip(map(str, groups), map(np.ravel, np.indices(differ.shape)), strict=True))
    places = in_model(at, first.layers, first.heads)
    with np.errstate(invalid="ignore", divide="ignore"):
        columns = {
            "differ": differ,
            "low": low,
            "high": high,
            "disjoint": sums["disjoint"] / sums["both"],
            "jaccard": sums["shared"] / sums["either"],
            "only_masked": sums["only_masked"] / sums["steps"],
            "only_unmasked": sums["only_unmasked"] / sums["steps"],
            "both": sums["both"].astype(int),
            "steps": sums["steps"].astype(int),
            "sequences": np.full(differ.shape, len(counts["both"])),
            "prompts": prompts_with_cases(counts["both"], masked.row_prompts),
        }
    flat = {name: np.ravel(value) for name, value in columns.items()}
    return pd.DataFrame({**places, **flat})


def _counts(first: Sinks, second: Sinks) -> dict[str, np.ndarray]:
    """Counts of steps and keys by outcome, per [batch, (layer,) (head)]."""
    a, b = first.is_sink, second.is_sink
    comparable = ~first.scores.isnan().all(-1) & ~second.scores.isnan().all(-1)
    has_a, has_b = a.any(-1) & comparable, b.any(-1) & comparable
    both = has_a & has_b
    shared, either = (a & b).sum(-1) * comparable, (a | b).sum(-1) * comparable
    counts: dict[str, Tensor] = {
        "steps": comparable,
        "both": both,
        "differ": both & (first.main() != second.main()),
        "disjoint": both & (shared == 0),
        "only_masked": has_a & ~has_b,
        "only_unmasked": has_b & ~has_a,
        "shared": shared,
        "either": either,
    }
    rows = {name: value.double().sum(0) for name, value in counts.items()}
    return {
        name: (value if "batch" in first.dims else value[None]).to(torch.float64).numpy()
        for name, value in rows.items()
    }
