"""`sink_mechanism`: which positions lose confidence and are decoded later when the sinks are masked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.adapters import family_of
from dlm_lens.arguments import INDICES, listed_indices
from dlm_lens.attention import Hook, exclusive, predicting_position
from dlm_lens.display import ShowsItself
from dlm_lens.hooks import mask_random, mask_sinks
from dlm_lens.printable import shown
from dlm_lens.probes.replays import Replay, replay
from dlm_lens.probes.updates import SinkMass, spearman
from dlm_lens.recording import ReceivedAttention, rerun
from dlm_lens.sampling import Comparison, DenoisingRun, denoise
from dlm_lens.sampling.moved_tokens import at_places
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import Detector, find_sinks
from dlm_lens.statistics import (
    CORRELATION_BOUNDS,
    Estimate,
    Floats,
    difference_of,
    difference_of_differences,
    estimate,
    estimate_mean,
    mean_of,
    summed,
)


@dataclass(frozen=True, eq=False)
class SinkMechanism(ShowsItself):
    """Do positions that attend to sinks lose confidence, and are they decoded later, when the sinks are masked?

    2510.15731, section 5.2. A position's dependence is the share of its attention on sinks in the run without
    hooks, mean over layers and heads. "Dependent" positions are the masked ones above the median of their step and
    row (for
    the decoding order: of their row), the others are "others": the comparison is within a canvas.

    Args:
        run: the run without hooks.
        dependence: share of each query's attention that goes to sinks.
        predicted: the masked positions, which the step predicts; in block diffusion those of the row's block.
        confidence: confidence with the sinks masked minus without, on the same canvas; NaN where not predicted.
        confidence_control: the same with as many random columns masked, mean over the controls' seeds.
        later: step at which a position was decoded in a separate run with the sinks masked, minus without; NaN
            outside the answer.
        later_control: the same with random columns, mean over the seeds.
        tokens_changed: how many final tokens differ, with the sinks masked and with random columns (mean), per row.
        rule: rule, scale and level of the sinks.
        controls: seeds of the random columns.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: DenoisingRun = field(repr=False)
    dependence: Float[Tensor, "step batch position"]
    predicted: Bool[Tensor, "step batch position"]
    confidence: Float[Tensor, "step batch position"]
    confidence_control: Float[Tensor, "step batch position"]
    later: Float[Tensor, "batch position"]
    later_control: Float[Tensor, "batch position"]
    tokens_changed: Float[Tensor, "kind batch"]
    rule: str
    controls: tuple[int, ...]

    def __post_init__(self) -> None:
        step, batch, position = self.run.unmasked.shape
        check_shapes(self, step=step, batch=batch, position=position, kind=2)

    def __repr__(self) -> str:
        steps, rows, _ = self.predicted.shape
        return f"SinkMechanism({rows} prompts, {steps} steps; {len(self.controls)} controls; sinks by {self.rule})"

    @property
    def dependent(self) -> Bool[Tensor, "step batch position"]:
        """Masked positions whose dependence is above the median of their step and row."""
        return _above_median(self.dependence, self.predicted)

    @property
    def mean_dependence(self) -> Float[Tensor, "batch position"]:
        """Dependence of each token of the result, mean over the steps at which it was masked; NaN for none."""
        known = self.dependence.masked_fill(~self.predicted, torch.nan)
        return at_places(known, self.run.token_places[:-1], torch.nan).nanmean(0)

    def table(self) -> pd.DataFrame:
        """Two lines per measure, with the sinks and with random columns masked: dependent positions and others.

        Measures: "confidence" (change of the largest probability, same canvas) and "steps later" (decoding order,
        separate runs; its mean over an answer is near 0 because the number decoded per step is fixed).
        `difference` is dependent minus others, `beyond` its excess over the difference with random columns masked;
        `correlation` is Spearman's, of dependence and change within a canvas. Intervals draw prompts.
        """
        mean = self.mean_dependence
        answer = self.later.isfinite() & self.later_control.isfinite() & mean.isfinite()
        late = _above_median(mean, answer)
        parts = {
            "confidence": (
                self.confidence,
                self.confidence_control,
                self.dependence,
                self.predicted,
                self.dependent,
            ),
            "steps later": (self.later[None], self.later_control[None], mean[None], answer[None], late[None]),
        }
        lines = []
        for name, (sinks, control, dependence, predicted, dependent) in parts.items():
            both = [self._sums(values, predicted, dependent) for values in (sinks, control)]
            beyond = estimate(np.concatenate(both, -1), difference_of_differences)
            for masked, sums, values in (("sinks", both[0], sinks), ("random", both[1], control)):
                rho = self._correlation(dependence, values, predicted)
                lines.append({"measure": name, "masked": masked, **self._line(sums, rho)})
            lines[-2] |= beyond.columns("beyond")
        return pd.DataFrame(lines)

    def _line(self, sums: Floats, rho: Estimate) -> dict[str, float]:
        line: dict[str, float] = {}
        found: dict[str, Estimate] = {
            "dependent": estimate(sums[:, :2], mean_of),
            "others": estimate(sums[:, 2:], mean_of),
            "difference": estimate(sums, difference_of),
            "correlation": rho,
        }
        for name, e in found.items():
            line |= e.columns(name)
        return line

    def _sums(self, values: Tensor, predicted: Tensor, dependent: Tensor) -> Floats:
        """Per prompt: sum and count of the dependent positions, sum and count of the others."""
        columns: list[Any] = []
        prompt = self.run.row_prompts
        for kept in (dependent, predicted & ~dependent):
            kept = kept & values.isfinite()
            rows = kept.nonzero()[:, 1]
            pairs = torch.stack([values[kept].double(), torch.ones(int(kept.sum())).double()], -1)
            columns.append(summed(pairs, prompt[rows], len(prompt)))
        return np.concatenate(columns, -1)

    def _correlation(self, dependence: Tensor, values: Tensor, predicted: Tensor) -> Estimate:
        rho, defined = spearman(dependence, values, predicted & values.isfinite())
        prompt = self.run.row_prompts
        of_prompt = prompt[defined.nonzero()[:, 1]]
        return estimate_mean(rho[defined], of_prompt, len(prompt), bounds=CORRELATION_BOUNDS)


def _above_median(values: Float[Tensor, "*axes position"], kept: Tensor) -> Bool[Tensor, "*axes position"]:
    """Which kept positions are above the median of the kept ones, along the last axis."""
    median = values.masked_fill(~kept, torch.nan).nanquantile(0.5, -1, keepdim=True)
    return kept & (values > median)


@exclusive
def sink_mechanism(
    model: Any,
    prompts: Any,
    detector: Detector,
    *,
    per: str = "head",
    controls: Sequence[int] = (0, 1, 2),
    seed: int | list[int] = 0,
    **settings: Any,
) -> SinkMechanism:
    """Test the mechanism that 2510.15731, section 5.2, proposes for the robustness of DLMs to masked sinks.

    "When a sink is masked, the model likely becomes less confident about those tokens that are highly affected by
    the sink, and therefore [does] not consider them for unmasking." Two questions: on the canvases of a run without
    hooks, does masking its sinks lower the confidence of the positions that attended to them more than of others?
    And in a separate run with the sinks masked, are those positions decoded later? The control of both masks as
    many random columns (`mask_random`), with the same sampling seed.

    Args:
        model: a DLM from `dlm_lens.load`.
        prompts: as for `dlm_lens.denoise`; intervals draw prompts, so give several.
        detector: the rule for sinks; it reads attention.
        per: find sinks in every "head", or in the head-mean pattern of a "layer".
        controls: seeds of the random columns; the controls are averaged.
        seed: of the sampling.
        **settings: of `dlm_lens.denoise`: steps, gen_length, block_length, temperature, ...

    Raises:
        ValueError: an AR model, whose decoding order is fixed, no control, another `per`, or no sink.
    """
    if family_of(model.config.model_type).causal:
        raise ValueError("an AR model decodes from left to right whatever is masked; sink_mechanism takes a DLM")
    controls = listed_indices("control", controls, "sink_mechanism: ")
    INDICES.check("controls", controls)
    if per not in ("head", "layer") or not controls:
        raise ValueError(
            f"sink_mechanism(per={shown(per)}, controls={shown(controls)}): per is 'head' or 'layer', one control "
            "at least"
        )
    plain = denoise(model, prompts, seed=seed, **settings)
    rec = rerun(model, plain, [ReceivedAttention()])
    sinks = find_sinks(rec, detector, level=per)  # type: ignore[arg-type]
    if not bool(sinks.is_sink.any()):
        raise ValueError(f"there is no sink by {sinks.rule}; lower the threshold")
    mass = rerun(model, plain, [SinkMass(sinks)]).sink_mass
    known = mask_sinks(source=sinks, per=per)  # type: ignore[arg-type]
    own = mask_sinks(detector, per=per)  # type: ignore[arg-type]

    def replayed(hook: Hook) -> Replay:
        return replay(model, plain, [hook], attention=False)

    def compared(hook: Hook) -> Comparison:
        return Comparison(plain, denoise(model, prompts, seed=seed, hooks=[hook], **settings), (repr(hook),))

    def later(pair: Comparison) -> Float[Tensor, "batch position"]:
        # A run that decodes more blocks than the plain one has more positions, which are in no relation to it.
        return pair.step_change[:, : plain.tokens.shape[1]]

    without = replayed(known)
    with_sinks = compared(own)
    others = [compared(mask_random(like=own, seed=s)) for s in controls]
    return SinkMechanism(
        run=plain,
        dependence=_of_predictions(model, plain, mass.mean((2, 3))),
        predicted=without.predicted,
        confidence=without.confidence_change,
        confidence_control=torch.stack(
            [replayed(mask_random(like=known, seed=s)).confidence_change for s in controls]
        ).mean(0),
        later=later(with_sinks),
        later_control=torch.stack([later(other) for other in others]).mean(0),
        tokens_changed=torch.stack([with_sinks.tokens_changed.float(), _mean_changed(others)]),
        rule=sinks.rule,
        controls=controls,
    )


def _of_predictions(
    model: Any, run: DenoisingRun, mass: Float[Tensor, "step batch position"]
) -> Float[Tensor, "step batch position"]:
    """The mass of the query that predicts each position: with a logit shift and in AR runs the one before."""
    before = mass.gather(-1, predicting_position(run.attention_mask).expand(mass.shape))
    shifted = torch.tensor([run.predicts_next(step, model.config) for step in range(run.steps)])
    return torch.where(shifted[:, None, None].to(mass.device), before, mass)


def _mean_changed(runs: Sequence[Comparison]) -> Tensor:
    return torch.stack([run.tokens_changed.float() for run in runs]).mean(0)
