"""`sink_anatomy`: are sinks explained by the norms of their keys, by angles, or by position?"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import checked_arguments, flag, place_of_layer, whole
from dlm_lens.attention import MIN_VIEWERS, attach_hooks, attention_stacks, exclusive
from dlm_lens.display import Preview, ShowsItself
from dlm_lens.probes.score_parts import PARTS, SHARES, ScoreParts, rotation_readers
from dlm_lens.recording import KeyNorm, QueryClass, QueryNorm, ReceivedAttention, Recording, rerun
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import Detector, Received, find_sinks, received_of
from dlm_lens.sinks.received import COLUMN_SUM, RELATIVE
from dlm_lens.statistics import (
    CORRELATION_BOUNDS,
    SHARE_BOUNDS,
    Bounds,
    Estimate,
    difference_of,
    estimate,
    estimate_mean,
    prompts_or_rows,
    summed,
)

CAUSES = ("norms", "angles", "either", "together")
"""What explains a sink: it survives with norms alone, with angles alone, with either alone, or with neither."""


@dataclass(frozen=True, eq=False)
class SinkAnatomy(ShowsItself):
    """The sinks of a run, and which of them remain in patterns without a part of the scores.

    The patterns are `PARTS`, explained in `ScoreParts`. A sink *survives* in a pattern if the same key is a sink
    there by the same rule. By chance it would with the share of that pattern's defined keys that are sinks (a key
    drawn at random). The cause of a sink is "norms" if it survives with equal angles (norms alone) and not with
    equal norms, "angles" the other way round, "either" if it survives in both, "together" if in neither.

    Args:
        received: received attention of the network's own patterns, relative to uniform.
        is_sink: sinks by the rule in each of the patterns; False where a pattern is not known.
        mean_cosine: mean cosine of a key with the counted queries that see it, after rotation.
        query_norm: norm of every query.
        key_norm: norm of every key.
        variance_shares: shares of the scores' variance over keys (`SHARES`).
        layers: index of each layer in the model.
        position: whether patterns without position are known.
        detector: the rule.
        seed: of permutations and intervals.
        prompt: the number of each row's prompt (`DenoisingRun.row_prompts`); None: every row is one of its own.

    Raises:
        ValueError: the shapes contradict each other.
    """

    received: Received = field(repr=False)
    is_sink: Bool[Tensor, "step batch layer head key part"]
    mean_cosine: Float[Tensor, "step batch layer head key"]
    query_norm: Float[Tensor, "step batch layer head query"]
    key_norm: Float[Tensor, "step batch layer kv_head key"]
    variance_shares: Float[Tensor, "step batch layer head share"]
    layers: tuple[int, ...]
    position: bool
    detector: Detector
    seed: int = 0
    prompt: Int[Tensor, "batch"] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_shapes(self, layer=len(self.layers), part=len(PARTS), share=len(SHARES))

    def __repr__(self) -> str:
        causes = self.causes()
        shares = ", ".join(f"{name} {share:.0%}" for name, share in zip(CAUSES, causes["share"], strict=True))
        return f"SinkAnatomy({self.sinks} sinks by {self.detector}: {shares})"

    def _preview(self) -> Preview:
        return Preview(table=self.causes(), note="more: .survival(), .by_layer(), .geometry(), .variance()")

    @property
    def sinks(self) -> int:
        """How many sinks the network's own patterns have, over steps, prompts, layers and heads."""
        return int(self.is_sink[..., 0].sum())

    def survival(self, layer: int | None = None) -> pd.DataFrame:
        """One line per counterfactual pattern: the share of sinks that survive, by chance, and the excess.

        Intervals are over prompts.

        Args:
            layer: of the model; None for all together.

        Raises:
            ValueError: a layer that was not measured.
        """
        lines = []
        for place, name in enumerate(PARTS[1:], 1):
            if name == "no position" and not self.position:
                continue
            share, chance = self._survival(place, layer)
            excess = self._estimate([share, chance])
            line: dict[str, Any] = {"pattern": name, "sinks": len(share[0])}
            line |= self._mean(*share).columns("survive") | self._mean(*chance).columns("chance")
            lines.append(line | excess.columns("excess"))
        return pd.DataFrame(lines)

    def causes(self, layer: int | None = None) -> pd.DataFrame:
        """One line per cause of `CAUSES`: the share of sinks with it, and its interval over prompts.

        `position`: of these sinks the share that disappears in the pattern without position.

        Args:
            layer: of the model; None for all together.

        Raises:
            ValueError: a layer that was not measured.
        """
        _, prompt, kept = self._own(layer)
        angles, norms = (kept[:, PARTS.index(name)] for name in ("equal norms", "equal angles"))
        classes = (norms & ~angles, angles & ~norms, angles & norms, ~angles & ~norms)
        lines = []
        for name, chosen in zip(CAUSES, classes, strict=True):
            line: dict[str, Any] = {"cause": name, "sinks": int(chosen.sum())}
            line |= self._mean(chosen.double(), prompt).columns("share")
            if self.position:
                gone = ~kept[chosen, PARTS.index("no position")]
                line |= self._mean(gone.double(), prompt[chosen]).columns("position")
            lines.append(line)
        return pd.DataFrame(lines)

    def by_layer(self) -> pd.DataFrame:
        """One line per layer: its sinks, and the share of each cause."""
        return pd.DataFrame(
            [
                {
                    "layer": layer,
                    "sinks": int(self.is_sink[:, :, place, ..., 0].sum()),
                    **self.causes(layer).set_index("cause")["share"].to_dict(),
                }
                for place, layer in enumerate(self.layers)
            ]
        )

    def geometry(self) -> pd.DataFrame:
        """Per layer: key norm and mean cosine of sinks and of other keys, and the mean norm of queries."""
        lines = []
        heads = self.is_sink.shape[3]
        for place, layer in enumerate(self.layers):
            sink = self.is_sink[:, :, place, ..., 0]
            there = self.received.values[:, :, place].isfinite()
            norms = self.key_norm[:, :, place].repeat_interleave(heads // self.key_norm.shape[3], 2)
            line: dict[str, Any] = {"layer": layer, "sinks": int(sink.sum())}
            queries = self.query_norm[:, :, place]
            line |= self._masked(queries, queries.isfinite()).columns("query_norm")
            for name, values in (("key_norm", norms), ("cosine", self.mean_cosine[:, :, place])):
                for which, chosen in (("sinks", sink), ("others", there & ~sink)):
                    line |= self._masked(values, chosen & values.isfinite()).columns(f"{name}_{which}")
            lines.append(line)
        return pd.DataFrame(lines)

    def variance(self) -> pd.DataFrame:
        """Per layer: the share of the variance of scores over keys that each of `SHARES` has, with intervals."""
        lines = []
        for place, layer in enumerate(self.layers):
            line: dict[str, Any] = {"layer": layer}
            for index, name in enumerate(SHARES):
                values = self.variance_shares[:, :, place, :, index]
                line |= self._masked(values, values.isfinite()).columns(name)
            lines.append(line)
        return pd.DataFrame(lines)

    def _own(self, layer: int | None) -> tuple[Tensor, Tensor, Bool[Tensor, "sink part"]]:
        """Where the network's sinks are, the prompt of each, and in which patterns it survives."""
        own = self.is_sink[..., 0]
        if layer is not None:
            other = torch.arange(len(self.layers)) != place_of_layer(layer, self.layers, "measured")
            own = own & ~other[:, None, None]
        where = own.nonzero()
        return where, self._prompts[where[:, 1]], self.is_sink[tuple(where.T)]

    @property
    def _prompts(self) -> Int[Tensor, "batch"]:
        return torch.from_numpy(prompts_or_rows(self.prompt, self.is_sink.shape[1]))

    def _survival(self, place: int, layer: int | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Per sink: whether it survives in a pattern, and its chance to, each with its prompt."""
        where, prompt, kept = self._own(layer)
        known = self.received.values.isfinite()
        chance = (self.is_sink[..., place] & known).sum(-1) / known.sum(-1).clamp(min=1)
        return (kept[:, place].double(), prompt), (chance[tuple(where[:, :4].T)].double(), prompt)

    def _mean(self, values: Tensor, prompt: Tensor, bounds: Bounds | None = SHARE_BOUNDS) -> Estimate:
        return estimate_mean(values.numpy(), prompt.numpy(), self.is_sink.shape[1], bounds=bounds, seed=self.seed)

    def _estimate(self, pair: Sequence[tuple[Tensor, Tensor]]) -> Estimate:
        """The difference of two shares over the same sinks."""
        prompts = self.is_sink.shape[1]
        sums = [
            summed(torch.stack([values, torch.ones_like(values)], -1).numpy(), prompt.numpy(), prompts)
            for values, prompt in pair
        ]
        return estimate(np.concatenate(sums, -1), difference_of, bounds=CORRELATION_BOUNDS, seed=self.seed)

    def _masked(self, values: Tensor, chosen: Bool[Tensor, "step batch *axes"]) -> Estimate:
        return self._mean(values[chosen].double(), self._prompts[chosen.nonzero()[:, 1]], None)


@checked_arguments(position=flag(), seed=whole(least=0))
@torch.no_grad()
@exclusive
def sink_anatomy(
    model: Any,
    run: RunLike,
    detector: Detector,
    *,
    queries: QueryClass = "all",
    position: bool = True,
    layers: Sequence[int] | None = None,
    min_viewers: int = MIN_VIEWERS,
    rows_per_pass: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> SinkAnatomy:
    """Decompose attention scores into |q||k|cos, and ask which part the sinks of a run need.

    Replays the run, one forward pass a step, and recomputes what every key receives with key norms made equal, with
    angles made equal, without rotation, and with norms or angles of other keys (`ScoreParts`); no pattern is kept.
    That the recomputed own pattern gives the network's received attention is checked in every layer and step.

    Args:
        model: from `dlm_lens.load`, the run's; in float32.
        run: from `denoise`.
        detector: the rule for sinks.
        queries: which queries count.
        position: compute the pattern without position, for which queries and keys are read before rotation.
        layers: which layers; None for all.
        min_viewers: a key seen by fewer counted queries is undefined.
        rows_per_pass: rows of the run in one forward pass; None for all of them.
        seed: of permutations and intervals.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: `position=True` for a cached run or a model with an encoder, a model whose scores do not follow
            from queries and keys alone, or what `rerun` refuses.
    """
    run = as_run(run)
    if position and run.computed:
        if len(attention_stacks(model)) > 1:
            raise ValueError(
                f"sink_anatomy: the canvas of {type(model).__name__} reads the prompt's keys from its encoder, "
                "which are known after rotation only; give position=False"
            )
        raise ValueError(
            "sink_anatomy: this run keeps keys of earlier steps in a cache, which are known after rotation only; "
            "give position=False, or run without a cache"
        )
    readers = rotation_readers(model) if position else None
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) or 0.0
    parts = ScoreParts(queries, readers, float(softcap), seed, run.step_numbers)
    with ExitStack() as stack:
        if readers is not None:
            stack.enter_context(attach_hooks(model, readers.q, readers.k, layers=layers))
        rec = rerun(
            model,
            run,
            [ReceivedAttention(queries, min_viewers), parts, QueryNorm(), KeyNorm()],
            layers=layers,
            rows_per_pass=rows_per_pass,
            progress=progress,
        )
    received = received_of(rec, queries)
    return SinkAnatomy(
        received=received,
        is_sink=_sinks(rec, received, detector),
        mean_cosine=rec.mean_cosine,
        query_norm=rec.query_norm,
        key_norm=rec.key_norm,
        variance_shares=rec.variance_shares,
        layers=rec.layers,
        position=position,
        detector=detector,
        seed=seed,
        prompt=run.row_prompts,
    )


def _sinks(
    rec: Recording, received: Received, detector: Detector
) -> Bool[Tensor, "step batch layer head key part"]:
    """The sinks of every pattern, by the same rule on the same scale."""
    found = []
    for sums in rec.part_sums.unbind(-1):
        values = sums.where(received.values.isfinite(), torch.nan)
        one = replace(received, values=values, scale=COLUMN_SUM).on_scale(RELATIVE)
        found.append(find_sinks(one, detector).is_sink)
    return torch.stack(found, -1)
