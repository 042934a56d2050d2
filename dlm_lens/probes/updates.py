"""`sink_updates`: is attention to a sink a no-op? And the reducers per query that it records."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import ONE_SEED, Rule, checked_arguments, is_real
from dlm_lens.attention import HookLike, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.probes.norms import TIE
from dlm_lens.recording import LayerStep, PatternReducer, ResidualNorm, UpdateNorm, rerun
from dlm_lens.recording.reducers.norms import norm32
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import Sinks
from dlm_lens.sinks.detection import SinksLike, as_sinks, check_all_heads
from dlm_lens.statistics import (
    CORRELATION_BOUNDS,
    POSITIVE_BOUNDS,
    estimate,
    mean_of,
    prompts_or_rows,
    ratio_of,
    summed,
)

QUERIES = ("step", "batch", "layer", "head", "query")


@dataclass(frozen=True, eq=False)
class SinkMass(PatternReducer):
    """Share of every query's attention that goes to the sinks of its pattern, m_i = sum_{j in sinks} A_ij.

    Args:
        sinks: known sinks of the same prompts and steps, at level "head" or "layer"; sinks of a layer are those of
            all of its heads.

    Raises:
        ValueError: sinks without steps, prompts and layers.
    """

    sinks: Sinks

    name = "sink_mass"
    dims = QUERIES
    unit = "share of attention"
    formula = "sum_{j in sinks} A_ij"

    def __post_init__(self) -> None:
        wanted = (
            ("step", "batch", "layer", "head", "key")
            if self.sinks.level == "head"
            else ("step", "batch", "layer", "key")
        )
        if self.sinks.dims != wanted:
            raise ValueError(f"the sinks have axes {self.sinks.dims}; SinkMass needs {wanted}")

    def __repr__(self) -> str:
        return f"SinkMass({self.sinks.rule})"

    def start(self, layer: LayerStep) -> tuple[Bool[Tensor, "batch #head key"], list[Tensor]]:
        """The sinks of this step and layer, and no tile yet.

        Raises:
            ValueError: there are none of this step and layer, or they are of some of its heads.
        """
        if layer.index not in self.sinks.layers or layer.run.step >= len(self.sinks.is_sink):
            raise ValueError(f"there are no sinks of step {layer.run.step}, layer {layer.index} among {self.sinks}")
        if self.sinks.level == "head":
            check_all_heads(self.sinks.is_sink.shape[3], layer.inputs.q.shape[1], str(self))
        found = self.sinks.is_sink[layer.run.step, :, self.sinks.layers.index(layer.index)]
        found = found[:, None] if found.ndim == 2 else found
        learned, keys = layer.facts.sinks, layer.inputs.k.shape[2]
        # An AR step has fewer keys than the run.
        parts = [found[..., : keys - learned], found[..., found.shape[-1] - learned :]]
        return torch.cat(parts, -1).to(layer.inputs.q.device), []

    def tile(self, state: Any, layer: LayerStep, rows: slice, pattern: Tensor) -> Any:
        """Add the queries of a tile."""
        found, parts = state
        return found, [*parts, (pattern * found[:, :, None]).sum(-1)]

    def finish(self, state: Any, layer: LayerStep) -> Float[Tensor, "batch head query"]:
        """The values of all queries, NaN at padding."""
        return layer.only_queries(torch.cat(state[1], -1))


@dataclass(frozen=True)
class MixingBound(PatternReducer):
    """The upper bound sum_j A_ij ||v_j|| of the norm ||o_i|| of a head's output (2601.19657, Eq. 20)."""

    name = "mixing_bound"
    dims = QUERIES
    unit = "norm of a value"
    formula = "sum_j A_ij ||v_j||_2 (2601.19657, Eq. 20)"

    def start(self, layer: LayerStep) -> tuple[Float[Tensor, "batch head key 1"], list[Tensor]]:
        """The norm of every value, for every query head."""
        norms = norm32(layer.inputs.v)
        return norms.repeat_interleave(layer.inputs.q.shape[1] // norms.shape[1], 1)[..., None], []

    def tile(self, state: Any, layer: LayerStep, rows: slice, pattern: Tensor) -> Any:
        """Add the queries of a tile."""
        norms, parts = state
        return norms, [*parts, (pattern @ norms)[..., 0]]

    def finish(self, state: Any, layer: LayerStep) -> Float[Tensor, "batch head query"]:
        """The values of all queries, NaN at padding."""
        return layer.only_queries(torch.cat(state[1], -1))


ATTENDS = Rule("a share of attention, from 0 to below 1", lambda value: is_real(value) and 0 <= value < 1)


@dataclass(frozen=True, eq=False)
class SinkUpdates(ShowsItself):
    """Norm of the attention output of every query, and the share of the query's attention on sinks.

    NaN at padding and at positions that an AR run has not decoded yet.

    Args:
        mass: share of the query's attention on the sinks of its pattern.
        mixed: ||o_i||, the norm of the head's weighted sum of values (2601.19657, Eq. 17).
        bound: sum_j A_ij ||v_j||, the upper bound of it (Eq. 20).
        update: ||z_i||, the norm of what all heads together add to the residual stream (Eq. 21).
        stream: ||h_i||, the norm of the residual stream before the addition.
        layers: index of each layer in the model.
        rule: rule, scale and level of the sinks.
        attends: a query attends to the sinks if it has more than this share of its attention there.
        seed: of the intervals.
        prompt: the number of each row's prompt (`DenoisingRun.row_prompts`); None: every row is one of its own.

    Raises:
        ValueError: shapes that contradict each other, or a share out of range.
    """

    mass: Float[Tensor, "step batch layer head query"]
    mixed: Float[Tensor, "step batch layer head query"]
    bound: Float[Tensor, "step batch layer head query"]
    update: Float[Tensor, "step batch layer query"]
    stream: Float[Tensor, "step batch layer query"]
    layers: tuple[int, ...]
    rule: str
    attends: float = 0.5
    seed: int = 0
    prompt: Int[Tensor, "batch"] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_shapes(self, layer=len(self.layers))
        ATTENDS.check("attends", self.attends)

    def __repr__(self) -> str:
        return f"SinkUpdates({self.mass.shape[0]} steps, {len(self.layers)} layers; sinks by {self.rule})"

    def table(self) -> pd.DataFrame:
        """Per layer and measure: mean over the queries that attend to the sinks, and over the others.

        Measures: `mixed` ||o_i||, `bound` of Eq. 20, `tightness` = ||o_i|| / bound (1 if nothing cancels), all per
        head; `relative` = ||z_i|| / ||h_i||, where a query attends if the mean over heads of its share exceeds
        `attends`. `ratio` is attending over others with its 95% interval over prompts; `correlation` is Spearman's,
        of the share with the measure, within a pattern and step, mean over them. NaN where a group is empty.
        """
        measures = {
            "mixed": (self.mixed, self.mass),
            "bound": (self.bound, self.mass),
            "tightness": (self.mixed / self.bound.clamp(min=1e-30), self.mass),
            "relative": (self.update / self.stream.clamp(min=1e-30), self.mass.mean(3)),
        }
        lines = [
            {"layer": layer, "measure": name, **self._line(values[:, :, place], mass[:, :, place])}
            for place, layer in enumerate(self.layers)
            for name, (values, mass) in measures.items()
        ]
        return pd.DataFrame(lines)

    def _line(self, values: Tensor, mass: Tensor) -> dict[str, float | int]:
        known = values.isfinite() & mass.isfinite()
        attends = known & (mass > self.attends)
        prompt = prompts_or_rows(self.prompt, values.shape[1])
        rows = torch.stack([x for kept in (attends, known & ~attends) for x in _sums(values, kept)], -1)
        sums = summed(rows, prompt, len(prompt))
        ratio = estimate(sums, ratio_of, bounds=POSITIVE_BOUNDS, seed=self.seed)
        totals = rows.sum(0)
        rho = estimate(
            summed(torch.stack(_sums(*spearman(mass, values, known)), -1), prompt, len(prompt)),
            mean_of,
            bounds=CORRELATION_BOUNDS,
            seed=self.seed,
        )
        return {
            "queries": int(totals[1]),
            "others": int(totals[3]),
            "attending": float(totals[0] / totals[1]),
            "other": float(totals[2] / totals[3]),
            **ratio.columns("ratio"),
            **rho.columns("correlation"),
        }


@checked_arguments(attends=ATTENDS, seed=ONE_SEED)
@exclusive
def sink_updates(
    model: Any,
    run: RunLike,
    sinks: SinksLike,
    *,
    attends: float = 0.5,
    hooks: Sequence[HookLike] = (),
    layers: Sequence[int] | None = None,
    seed: int = 0,
) -> SinkUpdates:
    """Is attention to a sink a no-op, as low-norm values would make it (2601.19657, Eq. 17-22)?

    Replays the run, one forward pass a step, and records for every query the share of its attention on the sinks,
    ||o_i|| with its bound, and ||z_i|| / ||h_i||. If it is a no-op, queries that attend to sinks have smaller
    updates.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, or a recording.
        sinks: found in the same run (`find_sinks`), at level "head" or "layer"; with a recording also a detector.
        attends: a query attends to the sinks if it has more than this share of its attention there.
        hooks: interventions under which the canvases are seen, as for `recording.rerun`.
        layers: the layers, of those that the sinks have; None for all of them.
        seed: of the intervals.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: sinks of another run or level or of some heads, a layer without sinks, a share out of range.
    """
    sinks, run = as_sinks(sinks, run), as_run(run)
    if sinks.is_sink.shape[:2] != run.unmasked.shape[:2]:
        raise ValueError(
            f"the sinks have {list(sinks.is_sink.shape[:2])} steps and prompts, "
            f"the run {list(run.unmasked.shape[:2])}"
        )
    reducers = [SinkMass(sinks), MixingBound(), UpdateNorm(), ResidualNorm()]
    rec = rerun(model, run, reducers, hooks=hooks, layers=sinks.layers if layers is None else layers)
    return SinkUpdates(
        mass=rec.sink_mass,
        mixed=rec.mixed_norm,
        bound=rec.mixing_bound,
        update=rec.update_norm,
        stream=rec.residual_norm[..., : run.tokens.shape[1]],
        layers=rec.layers,
        rule=sinks.rule,
        attends=attends,
        seed=seed,
        prompt=run.row_prompts,
    )


def _sums(values: Tensor, kept: Bool[Tensor, "step batch *axes"]) -> tuple[Tensor, Tensor]:
    """Sum and count over everything but the prompts."""
    values = torch.where(kept, values, 0.0).double()
    return tuple(x.transpose(0, 1).flatten(1).sum(-1) for x in (values, kept.double()))  # type: ignore[return-value]


def spearman(
    one: Float[Tensor, "*axes query"], two: Float[Tensor, "*axes query"], known: Bool[Tensor, "*axes query"]
) -> tuple[Float[Tensor, "*axes"], Bool[Tensor, "*axes"]]:
    """Spearman's correlation along the known queries, and where it is defined.

    It is not where one side is constant, up to rounding: a network that normalises its values has one bound of
    Eq. 20 everywhere, and the order of its rounding errors says nothing.
    """
    ranks = [_ranks(values, known) for values in (one, two)]
    count = known.sum(-1, keepdim=True).clamp(min=1)
    centred = [(r - (r * known).sum(-1, keepdim=True) / count) * known for r in ranks]
    norms = [r.square().sum(-1).sqrt() for r in centred]
    rho = (centred[0] * centred[1]).sum(-1) / (norms[0] * norms[1])
    return rho, (norms[0] > 0) & (norms[1] > 0) & _varies(one, known) & _varies(two, known)


def _varies(values: Tensor, known: Tensor) -> Bool[Tensor, "*axes"]:
    """Whether the known values differ by more than `TIE`, relatively."""
    largest = values.masked_fill(~known, -torch.inf).amax(-1)
    smallest = values.masked_fill(~known, torch.inf).amin(-1)
    return (largest - smallest) > TIE * torch.maximum(largest.abs(), smallest.abs())


def _ranks(values: Tensor, known: Tensor) -> Float[Tensor, "*axes query"]:
    """Ranks among the known values; equal values get their mean rank."""
    found = np.zeros(values.shape)
    flat = values.double().masked_fill(~known, torch.inf).flatten(0, -2).numpy()
    for row, line in zip(found.reshape(-1, values.shape[-1]), flat, strict=True):
        _, inverse, counts = np.unique(line, return_inverse=True, return_counts=True)
        row[:] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return torch.from_numpy(found)
