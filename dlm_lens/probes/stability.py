"""`pattern_stability`: how similar a head's patterns are from step to step, and what its sink does meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import ONE_SEED, Rule, checked_arguments, is_real, store_plain_numbers, whole
from dlm_lens.attention import HookLike, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.placement import in_float64
from dlm_lens.recording import LayerStep, PatternReducer, ReceivedAttention, rerun
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import Detector, find_sinks
from dlm_lens.statistics import SHARE_BOUNDS, Estimate, estimate_mean, prompts_or_rows

MEASURES = ("cosine", "overlap", "kept", "best")

KEEP = Rule("a number above 0 and at most 1", lambda keep: is_real(keep) and 0 < keep <= 1)


@dataclass(frozen=True)
class PatternSimilarity(PatternReducer):
    """Reducer: similarity of a pattern to that of the step before, and to the top keys of a reference step.

    Over the n queries i that are content and that both compared steps compute: `cosine` of A_t and A_{t-1} as
    vectors; `overlap` = 1/n sum_i sum_j min(A_t, A_{t-1}), the attention that stays on its keys; `kept` = 1/n sum_i
    of the attention on the keys that query i attended to most at the reference step, a share `keep` of the row's
    keys; `best` the same with the keys of step t. In a part of a run, steps are those of the part. NaN at the first
    step, or before the reference step; with an approximate cache also where a step computes no query of the other.
    Memory: one pattern [head, query, key] per layer, and a mask of that size.

    Args:
        reference: the step whose top keys are kept.
        keep: the share of the keys of a row, above 0 and at most 1; padding is no key, learned sink tokens are.

    Raises:
        ValueError: a reference that is no step, or another share.
    """

    reference: int = 0
    keep: float = 0.3

    name = "pattern_similarity"
    dims = ("step", "batch", "layer", "head", "measure")
    unit = "cosine, or share of attention"
    formula = "cos(A_t, A_t-1); 1/n sum_ij min(A_t, A_t-1); 1/n sum of A_t on kept keys"

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        whole(least=0).check("PatternSimilarity.reference", self.reference)
        KEEP.check("PatternSimilarity.keep", self.keep)

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """The names of the measures."""
        return {"measure": MEASURES}

    def start(self, layer: LayerStep) -> list[Tensor]:
        """No tile yet.

        Raises:
            ValueError: the run's canvas grows from step to step.
        """
        run, seen = layer.run, layer.run.tokens.shape[1]
        if run.step == 0 and run.total > 1 and run.whole not in (None, seen):
            raise ValueError(
                f"{self.name} compares the patterns of neighbouring steps, and the run's canvas grows from {seen} "
                f"to {run.whole} positions: leave it out for AR decoding and for block diffusion with more than "
                "one block"
            )
        return []

    def tile(self, state: list[Tensor], layer: LayerStep, rows: slice, pattern: Tensor) -> list[Tensor]:
        """Add the queries of a tile."""
        return [*state, pattern]

    def finish(self, state: list[Tensor], layer: LayerStep) -> Float[Tensor, "batch head measure"]:
        """The four measures of every head."""
        attending = layer.facts.attending
        now = torch.cat(state, -2)
        found = now.new_full((*now.shape[:2], len(MEASURES)), torch.nan)
        earlier = layer.memory.get(("similarity", "before"))
        if earlier is not None and earlier[0].shape != now.shape:
            before = earlier[0]
            raise ValueError(
                f"{self.name} compares the patterns of neighbouring steps, and step {layer.run.step} has "
                f"{now.shape[-2]} queries and {now.shape[-1]} keys, the one before {before.shape[-2]} and "
                f"{before.shape[-1]}: leave it out for AR decoding and for block diffusion with more than one block"
            )
        if earlier is not None:
            both = attending & earlier[1]
            one, other = (pattern * both[:, None, :, None] for pattern in (now, earlier[0]))
            overlap = torch.minimum(one, other).sum((-1, -2)) / _number(both)
            cosine = torch.cosine_similarity(one.flatten(2), other.flatten(2), -1)
            found[..., :2] = _where_any(torch.stack([cosine, overlap], -1), both)
        if layer.run.step == self.reference:
            layer.memory["similarity", "kept"] = self._largest(now, layer.facts.keys), attending
        kept = layer.memory.get(("similarity", "kept"))
        if kept is not None:
            both = attending & kept[1]
            one = now * both[:, None, :, None]
            largest = self._largest(one, layer.facts.keys)
            sums = torch.stack([(one * chosen).sum((-1, -2)) for chosen in (kept[0], largest)], -1)
            found[..., 2:] = _where_any(sums / _number(both)[..., None], both)
        layer.memory["similarity", "before"] = now, attending
        return found

    def _largest(
        self, pattern: Float[Tensor, "batch head query key"], keys: Bool[Tensor, "batch key"]
    ) -> Bool[Tensor, "batch head query key"]:
        """The share `keep` of a row's keys with the most attention of each query; padding is no key."""
        counts = (self.keep * in_float64(keys.sum(-1))).round().long().clamp(min=1)[:, None, None, None]
        most = max(1, round(self.keep * keys.shape[-1]))  # of any row, known without waiting for the device
        order = pattern.masked_fill(~keys[:, None, None], -1).topk(most, -1).indices
        first = torch.arange(order.shape[-1], device=order.device) < counts.to(order.device)
        chosen = torch.zeros_like(pattern, dtype=torch.bool)
        return chosen.scatter_(-1, order, first.expand_as(order))


def _number(queries: Bool[Tensor, "batch query"]) -> Float[Tensor, "batch 1"]:
    """How many queries each row has, at least 1."""
    return queries.sum(-1)[:, None].clamp(min=1).float()


def _where_any(
    measures: Float[Tensor, "batch head measure"], queries: Bool[Tensor, "batch query"]
) -> Float[Tensor, "batch head measure"]:
    """The measures; NaN in rows without a query."""
    return measures.masked_fill(~queries.any(-1)[:, None, None], torch.nan)


@dataclass(frozen=True, eq=False)
class PatternStability(ShowsItself):
    """Similarity of each head's patterns over the steps, and the changes of its largest sink.

    Args:
        cosine: cosine of the pattern and that of the step before, NaN at the first.
        overlap: attention that stays on the same keys since the step before.
        kept: attention on the keys that each query attended to most at the reference step; NaN before it.
        best: the same with the top keys of the step itself, an upper bound of `kept`.
        main: key of the largest sink; -1 for none.
        layers: index of each layer in the model.
        reference: the reference step.
        keep: share of the keys kept.
        rule: rule, scale and level of the sinks.
        seed: of the intervals.
        prompt: the number of each row's prompt (`DenoisingRun.row_prompts`); None: every row is one of its own.

    Raises:
        ValueError: the shapes contradict each other.
    """

    cosine: Float[Tensor, "step batch layer head"]
    overlap: Float[Tensor, "step batch layer head"]
    kept: Float[Tensor, "step batch layer head"]
    best: Float[Tensor, "step batch layer head"]
    main: Int[Tensor, "step batch layer head"]
    layers: tuple[int, ...]
    reference: int
    keep: float
    rule: str
    seed: int = 0
    prompt: Int[Tensor, "batch"] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_shapes(self, layer=len(self.layers))

    def __repr__(self) -> str:
        steps, rows, layers, heads = self.cosine.shape
        return f"PatternStability({steps} steps, {rows} prompts, {layers} layers, {heads} heads; {self.rule})"

    @property
    def changes(self) -> dict[str, Bool[Tensor, "step batch layer head"]]:
        """Class of every (step, pattern) by the change of its largest sink since the step before.

        "stays", "changes" (moves and switches alike), "comes or goes", "none"; the first step is in no class, nor
        are those after a row's end.
        """
        now, before = self.main, self.main.roll(1, 0)
        counts = self.cosine.isfinite()
        there, was = now >= 0, before >= 0
        return {
            "stays": counts & there & was & (now == before),
            "changes": counts & there & was & (now != before),
            "comes or goes": counts & (there != was),
            "none": counts & ~there & ~was,
        }

    def table(self) -> pd.DataFrame:
        """One line per head: means over steps and prompts with intervals, and how often its largest sink changes.

        `recall` is `kept` over `best`, after the reference step: 1 if the old keys hold as much as the best ones.
        """
        changes = self.changes
        after = torch.arange(len(self.cosine))[:, None] > self.reference
        lines = []
        for place, layer in enumerate(self.layers):
            for head in range(self.cosine.shape[3]):
                line: dict[str, float | int] = {"layer": layer, "head": head}
                for name, values in (("cosine", self.cosine), ("overlap", self.overlap)):
                    e = self._mean(values[:, :, place, head])
                    line |= e.columns(name)
                ratio = (self.kept / self.best)[:, :, place, head].where(after, torch.nan)
                e = self._mean(ratio)
                line |= e.columns("recall")
                line |= {name: int(kind[:, :, place, head].sum()) for name, kind in changes.items()}
                lines.append(line)
        return pd.DataFrame(lines)

    def by_change(self) -> pd.DataFrame:
        """Similarity of successive patterns, by the change of the largest sink between them, with intervals."""
        lines = []
        for name, kind in self.changes.items():
            line: dict[str, float | int | str] = {"sink": name, "pairs": int(kind.sum())}
            for measure, values in (("cosine", self.cosine), ("overlap", self.overlap)):
                e = self._mean(values.where(kind, torch.nan))
                line |= e.columns(measure)
            lines.append(line)
        return pd.DataFrame(lines)

    def _mean(self, values: Float[Tensor, "step batch *axes"]) -> Estimate:
        defined = values.isfinite()
        prompt = prompts_or_rows(self.prompt, values.shape[1])
        of_prompt = prompt[defined.nonzero()[:, 1].numpy()]  # NumPy reads a tensor of one index as a number
        return estimate_mean(values[defined], of_prompt, len(prompt), bounds=SHARE_BOUNDS, seed=self.seed)


@checked_arguments(reference=whole(least=0), keep=KEEP, seed=ONE_SEED)
@exclusive
def pattern_stability(
    model: Any,
    run: RunLike,
    detector: Detector,
    *,
    reference: int | None = None,
    keep: float = 0.3,
    hooks: Sequence[HookLike] = (),
    layers: Sequence[int] | None = None,
    seed: int = 0,
) -> PatternStability:
    """Are patterns similar from step to step, as sparse attention that reuses them assumes (SparseD, 2509.24014)?

    Replays the run, one forward pass a step; holds one pattern [head, query, key] of every layer, with all rows of
    the run. The result has the similarity of each head and the changes of its largest sink: stable patterns and
    moving sinks are compatible if they occur in different heads, or if `by_change` shows that patterns stay similar
    while the sink changes.

    Args:
        model: a DLM from `dlm_lens.load`.
        run: from `denoise`.
        detector: the rule for sinks.
        reference: the step whose top keys are kept; None for the step at a fifth of the run. With an approximate
            cache choose one that computes all queries, such as the first of the run.
        keep: share of the keys of a row that are kept per query.
        hooks: interventions under which the canvases are seen, as for `recording.rerun`.
        layers: which layers; None for all.
        seed: of the intervals.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: an AR run, whose rows of the pattern never change; a step or share out of range.
    """
    run = as_run(run)
    if run.autoregressive:
        raise ValueError("the rows of an AR model's pattern never change once decoded; give the run of a DLM")
    chosen = run.steps // 5 if reference is None else reference
    if chosen >= run.steps:
        raise ValueError(f"reference is {chosen}; the run has {run.steps} steps, so give 0 to {run.steps - 1}")
    rec = rerun(model, run, [ReceivedAttention(), PatternSimilarity(chosen, keep)], hooks=hooks, layers=layers)
    sinks = find_sinks(rec, detector)
    values = dict(zip(MEASURES, rec.pattern_similarity.unbind(-1), strict=True))
    return PatternStability(
        **values,
        main=sinks.main(),
        layers=rec.layers,
        reference=chosen,
        keep=keep,
        rule=sinks.rule,
        seed=seed,
        prompt=run.row_prompts,
    )
