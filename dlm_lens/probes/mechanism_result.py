"""`SinkMechanism`: what masking sinks does to the positions that depended on them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.probes.intervals import Estimate, Floats, difference_of, estimate, mean_of, summed
from dlm_lens.probes.updates import spearman
from dlm_lens.sampling import Denoised
from dlm_lens.shapes import check_shapes


@dataclass(frozen=True, eq=False)
class SinkMechanism:
    """Where a position depended on sinks, does confidence fall and is it written later (2510.15731, section 5.2)?

    A position's dependence is the share of its attention on sinks in the run without hooks, mean over layers and
    heads. "Dependent" are the masked positions above the median of their step and row (for the order of writing:
    of their row), the others are "others": the comparison is within a canvas.

    Args:
        run: without hooks.
        dependence: share of each query's attention that goes to sinks.
        asked: the masked positions.
        confidence: with the sinks masked minus without, on the same canvas; NaN where not asked.
        confidence_control: the same with as many random columns masked, mean over the controls' seeds.
        later: step at which a position was written with the sinks masked minus without, in a run of its own; NaN
            outside the answer.
        later_control: the same with random columns, mean over the seeds.
        tokens_changed: final tokens that are others, with the sinks masked and with random columns (mean), per row.
        rule: how the sinks were found.
        controls: seeds of the random columns.
        seed: of the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: Denoised = field(repr=False)
    dependence: Float[Tensor, "step batch position"]
    asked: Bool[Tensor, "step batch position"]
    confidence: Float[Tensor, "step batch position"]
    confidence_control: Float[Tensor, "step batch position"]
    later: Float[Tensor, "batch position"]
    later_control: Float[Tensor, "batch position"]
    tokens_changed: Float[Tensor, "kind batch"]
    rule: str
    controls: tuple[int, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        step, batch, position = self.run.selected.shape
        check_shapes(self, step=step, batch=batch, position=position, kind=2)

    def __repr__(self) -> str:
        steps, rows, _ = self.asked.shape
        return f"SinkMechanism({rows} prompts, {steps} steps; {len(self.controls)} controls; sinks by {self.rule})"

    @property
    def dependent(self) -> Bool[Tensor, "step batch position"]:
        """Masked positions whose dependence is above the median of their step and row."""
        return self.asked & (self.dependence > _median(self.dependence, self.asked))

    @property
    def mean_dependence(self) -> Float[Tensor, "batch position"]:
        """A position's dependence, mean over the steps at which it was masked; NaN where it never was."""
        return self.dependence.masked_fill(~self.asked, torch.nan).nanmean(0)

    def table(self) -> pd.DataFrame:
        """One line per measure, with sinks masked and with the control: dependent positions and others.

        Measures: "confidence" (change of the largest probability, same canvas) and "steps later" (order of writing,
        runs of their own; its mean over an answer is near 0 because the number written per step is fixed).
        `difference` is dependent minus others, `beyond` how much larger it is than with random columns masked;
        `correlation` is Spearman's, of dependence and change within a canvas. Intervals draw prompts.
        """
        mean = self.mean_dependence
        answer = self.later.isfinite() & self.later_control.isfinite() & mean.isfinite()
        late = answer & (mean > _median(mean, answer))
        parts = {
            "confidence": (self.confidence, self.confidence_control, self.dependence, self.asked, self.dependent),
            "steps later": (self.later[None], self.later_control[None], mean[None], answer[None], late[None]),
        }
        lines = []
        for name, (sinks, control, dependence, asked, dependent) in parts.items():
            both = [self._sums(values, asked, dependent) for values in (sinks, control)]
            beyond = estimate(np.concatenate(both, -1), _beyond, seed=self.seed)
            for masked, sums, values in (("sinks", both[0], sinks), ("random", both[1], control)):
                rho = self._correlation(dependence, values, asked)
                lines.append({"measure": name, "masked": masked, **self._line(sums, rho)})
            lines[-2] |= {"beyond": beyond.value, "beyond_low": beyond.low, "beyond_high": beyond.high}
        return pd.DataFrame(lines)

    def _line(self, sums: Floats, rho: Estimate) -> dict[str, float]:
        line: dict[str, float] = {}
        found: dict[str, Estimate] = {
            "dependent": estimate(sums[:, :2], mean_of, seed=self.seed),
            "others": estimate(sums[:, 2:], mean_of, seed=self.seed),
            "difference": estimate(sums, difference_of, seed=self.seed),
            "correlation": rho,
        }
        for name, e in found.items():
            line |= {name: e.value, f"{name}_low": e.low, f"{name}_high": e.high}
        return line

    def _sums(self, values: Tensor, asked: Tensor, dependent: Tensor) -> Floats:
        """Per prompt: sum and count of the dependent positions, sum and count of the others."""
        columns: list[Any] = []
        for kept in (dependent, asked & ~dependent):
            kept = kept & values.isfinite()
            rows = kept.nonzero()[:, 1]
            pairs = torch.stack([values[kept].double(), torch.ones(int(kept.sum())).double()], -1)
            columns.append(summed(pairs, rows, values.shape[1]))
        return np.concatenate(columns, -1)

    def _correlation(self, dependence: Tensor, values: Tensor, asked: Tensor) -> Estimate:
        rho, defined = spearman(dependence, values, asked & values.isfinite())
        pairs = torch.stack([rho[defined], torch.ones(int(defined.sum())).double()], -1)
        return estimate(summed(pairs, defined.nonzero()[:, 1], values.shape[1]), mean_of, seed=self.seed)


def _median(values: Tensor, kept: Tensor) -> Float[Tensor, "*axes 1"]:
    """Median over the last axis of those kept, of two the mean; NaN, above which nothing is, without any."""
    return values.masked_fill(~kept, torch.nan).nanquantile(0.5, -1, keepdim=True)


def _beyond(sums: Floats) -> Floats:
    found: Floats = difference_of(sums[..., :4]) - difference_of(sums[..., 4:])
    return found
