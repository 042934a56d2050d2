"""`replay`: the effect of hooks on the stored canvases of a run, step by step, without the run diverging."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.adapters.registry import excluded_id
from dlm_lens.arguments import checked_arguments, chosen_indices, flag, or_none, whole
from dlm_lens.attention import (
    MIN_VIEWERS,
    ColumnStats,
    HookLike,
    SinkLayout,
    attention_blocks,
    checked,
    exclusive,
    predicting_position,
)
from dlm_lens.display import ShowsItself
from dlm_lens.printable import shown
from dlm_lens.probes.predictions import result_of
from dlm_lens.probes.residual_reader import ResidualReader, reading, stacked_layers
from dlm_lens.probes.unembedding import kl_divergence, positions_at_once, token_rank, without_mask
from dlm_lens.recording.query_classes import checked_class
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import on_canvases
from dlm_lens.sampling.prompt_positions import from_prompt, of_whole_run
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import Detector, Level, Received, find_sinks
from dlm_lens.sinks.key_axes import shared_fields_of
from dlm_lens.sinks.received import COLUMN_SUM, RELATIVE

PER_POSITION = ("kl", "confidence", "confidence_hooked", "rank", "rank_hooked", "token", "token_hooked")


@dataclass(frozen=True, eq=False)
class Replay(ShowsItself):
    """The outputs of a model on a run's canvases with and without hooks, step by step; all on the CPU.

    Quantities per position are defined at the positions that a step's logits predict, `predicted`: every masked
    one (with `decided` also those that may be rewritten), in an AR run the next one. Elsewhere numbers are NaN and
    ranks and tokens -1.

    Args:
        run: the run with the canvases.
        hooks: reprs of the hooks.
        predicted: the positions that the step's logits predict.
        kl: KL(plain || hooked) = sum_v p_v (ln p_v - ln q_v) of the token at the position, in nats.
        confidence: largest probability of a token, without hooks ([MASK] not among them).
        confidence_hooked: the same with hooks.
        rank: how many tokens are likelier than the one that was finally decoded, without hooks; 0 for the first.
        rank_hooked: the same with hooks.
        token: the likeliest token, without hooks.
        token_hooked: the same with hooks.
        layers: indices of the compared layers.
        residual_change: ||h' - h|| / ||h|| of a layer's output, with hooks h' and without h, mean over the
            predicted positions (AR: at the position that predicts); NaN without any.
        residual_cosine: cosine of h' and h, likewise.
        received: received attention without hooks; None if it was not requested.
        received_hooked: with hooks, divided by the same e_j, so that both are on one scale; a hidden key has 0.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: DenoisingRun = field(repr=False)
    hooks: tuple[str, ...]
    predicted: Bool[Tensor, "step batch position"]
    kl: Float[Tensor, "step batch position"]
    confidence: Float[Tensor, "step batch position"]
    confidence_hooked: Float[Tensor, "step batch position"]
    rank: Int[Tensor, "step batch position"]
    rank_hooked: Int[Tensor, "step batch position"]
    token: Int[Tensor, "step batch position"]
    token_hooked: Int[Tensor, "step batch position"]
    layers: tuple[int, ...]
    residual_change: Float[Tensor, "step batch layer"]
    residual_cosine: Float[Tensor, "step batch layer"]
    received: Received | None = None
    received_hooked: Received | None = None

    def __post_init__(self) -> None:
        step, batch, position = self.run.unmasked.shape
        check_shapes(self, step=step, batch=batch, position=position, layer=len(self.layers))
        if (self.received is None) != (self.received_hooked is None):
            raise ValueError("Replay has received attention with and without hooks, or neither")

    def __repr__(self) -> str:
        steps, batch, positions = self.predicted.shape
        kl = float(self.kl.nanmean()) if bool(self.predicted.any()) else 0.0
        return (
            f"Replay(steps={steps}, batch={batch}, positions={positions}; mean KL {kl:.4g} nats, "
            f"{float(self.flipped[self.predicted].float().mean()):.1%} of the predictions flipped; "
            f"hooks=[{', '.join(self.hooks)}])"
        )

    @property
    def flipped(self) -> Bool[Tensor, "step batch position"]:
        """Where another token is the likeliest one with hooks."""
        return (self.token != self.token_hooked) & self.predicted

    @property
    def confidence_change(self) -> Float[Tensor, "step batch position"]:
        """With hooks minus without."""
        return self.confidence_hooked - self.confidence

    @property
    def rank_change(self) -> Int[Tensor, "step batch position"]:
        """How many ranks the finally decoded token falls; 0 where nothing is predicted or was decoded."""
        return self.rank_hooked - self.rank

    @property
    def kl_per_step(self) -> Float[Tensor, "step batch"]:
        """Mean KL over the positions predicted at a step; NaN without any."""
        return self.kl.nanmean(-1)

    @property
    def repair(self) -> Float[Tensor, "step batch"]:
        """1 - residual change of the last layer / largest residual change of any layer.

        1 if the later layers undo all of it, 0 if the last layer has the largest change; NaN where nothing changed
        or nothing is predicted.
        """
        peak = self.residual_change.amax(-1)
        return (1 - self.residual_change[..., -1] / peak).masked_fill(peak == 0, torch.nan)

    def table(self) -> pd.DataFrame:
        """One line per step and predicted position: its measures, and the token that was finally decoded there.

        `step` is the number in the whole run, `position` counts from the prompt's first token, `canvas_position` on
        the canvas.
        """
        where = self.predicted.nonzero(as_tuple=True)
        text = TokenTexts(self.run.tokenizer)
        columns: dict[str, Any] = dict(zip(("step", "batch", "position"), (i.tolist() for i in where), strict=True))
        written = on_canvases(self.run, self.run.tokens, -1)[where].tolist()
        columns["written"] = ["" if i < 0 else text(i) for i in written]
        columns["unmasked"] = self.run.unmasked[where].tolist()
        for name in PER_POSITION:
            found = getattr(self, name)[where].tolist()
            columns[name] = [text(i) for i in found] if name.startswith("token") else found
        columns["flipped"] = self.flipped[where].tolist()
        return of_whole_run(pd.DataFrame(columns), self.run)

    def layer_table(self) -> pd.DataFrame:
        """One line per layer: change and cosine of the residual stream, mean over steps and rows."""
        return pd.DataFrame(
            {
                "layer": self.layers,
                "residual_change": self.residual_change.nanmean((0, 1)).tolist(),
                "residual_cosine": self.residual_cosine.nanmean((0, 1)).tolist(),
            }
        )

    @checked_arguments(top=or_none(whole(), "for all"))
    def gained(self, top: int | None = 10, level: Level = "model") -> pd.DataFrame:
        """The positions that gained most attention under the hooks, mean over the steps in which they are defined.

        `plain` and `hooked` are relative to uniform (r_j / e_j with the e_j of the pass without hooks), `gain` is
        their difference; a negative `top` lists those that lost most. Each line is a position of one row and, by
        `level`, of one layer and head, or of the mean pattern.

        Raises:
            ValueError: attention was not requested, an unknown level, or a `top` that is no whole number.
        """
        one, two = (each.at_level(level) for each in self._pair())
        keys = one.values.shape[-1]
        plain, hooked = (each.values.nanmean(0) for each in (one, two))
        where = plain.isfinite().nonzero(as_tuple=True)
        columns: dict[str, Any] = {"batch": where[0].tolist()}
        if level != "model":
            columns["layer"] = [self.layers[i] for i in where[1].tolist()]
        if level == "head":
            columns["head"] = where[2].tolist()
        columns["position"] = where[3].tolist()
        if one.final_tokens is not None:
            text = TokenTexts(self.run.tokenizer)
            columns["token"] = [text(int(i)) for i in one.final_tokens[where[0], where[3]]]
        columns["plain"], columns["hooked"] = plain[where].tolist(), hooked[where].tolist()
        table = pd.DataFrame(columns)
        table["gain"] = table["hooked"] - table["plain"]
        table = from_prompt(table, self.run.padding, keys - one.sinks, numbers=self.run.rows or ())
        losing = top is not None and top < 0
        table = table.sort_values("gain", ascending=losing, kind="stable", ignore_index=True)
        return table if top is None else table.head(abs(top))

    def moved_mass(self) -> Float[Tensor, "step batch layer head"]:
        """Attention that changed its key, as a share of all: half of sum_j |r'_j - r_j| / sum_j r_j, 0 to 1.

        NaN where no key has a score: after the end of a row, and where fewer than `min_viewers` queries count.
        Hooks after the softmax that remove attention without renormalising count with half of the removed mass.

        Raises:
            ValueError: attention was not requested.
        """
        one, two = (each.on_scale(COLUMN_SUM).values for each in self._pair())
        return (two - one).abs().nansum(-1) / 2 / one.nansum(-1)  # 0 / 0 is NaN

    def new_sinks(self, detector: Detector, level: Level = "head") -> Bool[Tensor, "step batch layer head key"]:
        """Keys that are sinks by the detector with hooks and not without, at every step.

        The keys are those of the canvas, then the learned sink tokens; `level` merges heads (and layers) to size 1.

        Raises:
            ValueError: attention was not requested, or an unknown level.
        """
        one, two = (_full(each, detector, level) for each in self._pair())
        return two & ~one

    def _pair(self) -> tuple[Received, Received]:
        if self.received is None or self.received_hooked is None:
            raise ValueError("this replay has no attention; call replay(..., attention=True)")
        return self.received, self.received_hooked


def _full(received: Received, detector: Detector, level: Level) -> Bool[Tensor, "step batch layer head key"]:
    """Sinks with all five axes."""
    found = find_sinks(received, detector, level=level).is_sink
    return found.reshape(received.at_level(level).values.shape)


@checked_arguments(decided=flag())
@torch.no_grad()
@exclusive
def replay(
    model: Any,
    run: RunLike,
    hooks: Sequence[HookLike],
    *,
    layers: Sequence[int] | None = None,
    attention: bool = True,
    queries: str = "all",
    min_viewers: int = MIN_VIEWERS,
    decided: bool = False,
    progress: bool = False,
) -> Replay:
    """Run the model on every canvas of a run with and without hooks, and compare the predictions.

    The canvases are the stored ones at every step, so that step t shows the effect of the hooks at step t alone;
    `dlm_lens.compare` lets the runs diverge. Hooks get the step and keep their state from step to step, as in a
    run; guidance, padding and Dream's logit shift are those of the run. An AR run is replayed prefix by prefix.
    With an approximate cache a step sees the keys that an earlier step left, and with hooks those of that step's
    pass with hooks, as a run with the hooks would. DiffusionGemma's steps are conditioned on logits without hooks,
    DMax's on the confidences of the run.

    Each step takes two forward passes of the run's batch (a third for hooks that want clean statistics). Logits are
    compared a few positions at a time. Memory besides the pass: the residual stream of the predicted positions in
    every compared layer, twice; and the result, [step, batch, layer, head, key] twice in float32.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, with or without hooks.
        hooks: interventions (`dlm_lens.hooks`).
        layers: the layers to compare, negative from the end; None for all. Hooks act in all of their own layers.
        attention: compute received attention too, without storing patterns.
        queries: the queries that count for it: "all", or those whose position is "masked" (or "open") at the step.
        min_viewers: a key seen by fewer counted queries is undefined (NaN).
        decided: also the decided positions that a step may rewrite, in models that revise (uniform noise,
            LLaDA2.1).
        progress: show a progress bar.

    Returns:
        A `Replay`: `kl`, KL(plain || hooked) = sum_v p_v (ln p_v - ln q_v) in nats, and confidences, ranks and
        likeliest tokens without and with hooks, each [step, batch, position] (NaN or -1 where not `predicted`); the
        change of the residual stream [step, batch, layer]; with `attention` what keys receive, without and with
        hooks.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model or sampler or without steps, no hook, or a layer or class of queries that
            is not there.
    """
    run = as_run(run)
    stored = StoredRun(model, run, decided=decided, warn=False)
    hooks = checked(hooks)
    if not len(hooks):
        raise ValueError("replay: hooks is empty; give at least one hook")
    if not run.steps:
        raise ValueError("replay: the run has no steps, as its prompts leave nothing to decide; give another run")
    queries = checked_class(queries, "replay")
    if queries not in ("all", "masked") or (queries == "masked" and stored.autoregressive):
        raise ValueError(f"replay: queries is {shown(queries)}; 'all', or (in a DLM) 'masked'")
    chosen = chosen_indices("layer", layers, len(attention_blocks(model)), "replay: ")
    passes = _Passes(stored, hooks, chosen, attention, queries)
    found: dict[str, list[Tensor]] = {}
    for step in tqdm(range(run.steps), desc="replaying", unit="step", disable=not progress):
        for name, value in passes.compared(step).items():
            found.setdefault(name, []).append(value)
    stacked = {name: torch.stack(values) for name, values in found.items()}
    measures = {name: stacked[name] for name in ("predicted", *PER_POSITION, "residual_change", "residual_cosine")}
    plain, hooked = _received(stored, passes, stacked, queries, min_viewers) if attention else (None, None)
    return Replay(
        run=stored.run,
        hooks=tuple(map(repr, hooks)),
        layers=passes.layers,
        received=plain,
        received_hooked=hooked,
        **measures,
    )


class _Pass(NamedTuple):
    """The results of one forward pass."""

    states: Float[Tensor, "half predicted d_model"]
    reader: ResidualReader


class _Passes:
    """The two passes of every step, and their comparison."""

    def __init__(
        self, stored: StoredRun, hooks: Sequence[HookLike], layers: tuple[int, ...], attention: bool, queries: str
    ) -> None:
        self.stored, self.layers, self.attention, self.queries = stored, layers, attention, queries
        self.layout = SinkLayout.of(stored.model)
        self.results = on_canvases(stored.run, result_of(stored.run), -1)
        # With a cache the passes with hooks keep keys of their own.
        self.hooked = StoredRun(stored.model, stored.run, decided=stored.decided, hooks=hooks, carried="keys")

    def compared(self, step: int) -> dict[str, Tensor]:
        """All measures of a step, on the CPU."""
        plain, hooked = self._run(self.stored, step), self._run(self.hooked, step)
        predicted = self.stored.predicted(step).cpu()
        found = {"predicted": predicted, **self._per_position(step, predicted, plain.states, hooked.states)}
        found |= self._residual(step, plain.reader, hooked.reader)
        if self.attention:
            found |= self._columns(plain.reader, hooked.reader)
        return found

    def counted(self, step: int) -> Bool[Tensor, "batch position"]:
        """The queries that count at a step: the content that is in the pass."""
        seen = self.stored.content.clone()
        seen &= self.stored.computes(step).to(seen.device)
        return seen if self.queries == "all" else seen & self.stored.run.masked[step].to(seen.device)

    def _run(self, stored: StoredRun, step: int) -> _Pass:
        rows = len(stored.run.tokens)
        sources, counted, first = self._sources(step), self.counted(step), stored.first(step)
        reader = ResidualReader(self.layout, rows, sources, counted, self.layers, first)
        with stored.at(step), reading(stored.model, reader, self.attention):
            return _Pass(stored.states(step), reader)

    def _sources(self, step: int) -> Bool[Tensor, "batch position"]:
        """Where the residual stream is compared: the outputs that predict; with a logit shift, those before."""
        predicted = self.stored.predicted(step)
        if not self.stored.run.predicts_next(step, self.stored.model.config):
            return predicted
        row, position = predicted.nonzero(as_tuple=True)
        sources = torch.zeros_like(predicted)
        sources[row, predicting_position(self.stored.content)[row, position]] = True
        # A cached pass may not have the output before its span (`CachedLogits`, `alone`).
        return sources & self.stored.computes(step).to(sources.device)

    def _per_position(
        self, step: int, predicted: Bool[Tensor, "batch position"], plain: Tensor, hooked: Tensor
    ) -> dict[str, Float[Tensor, "batch position"]]:
        # A position that was never decoded has no rank.
        written = self.results[step][predicted.cpu()].to(plain.device)
        size = positions_at_once(self.stored.model)
        parts = zip(plain.split(size, 1), hooked.split(size, 1), written.split(size), strict=True)
        rows = [self._measures(*part) for part in parts]
        found = {}
        for name in PER_POSITION:
            values = torch.cat([row[name] for row in rows]) if rows else torch.empty(0)
            whole = name.startswith(("rank", "token"))
            dtype, missing = (torch.long, -1) if whole else (torch.float32, torch.nan)
            empty = torch.full(predicted.shape, missing, dtype=dtype)
            found[name] = empty.masked_scatter(predicted, values.to(dtype).cpu())
        return found

    def _measures(self, plain: Tensor, hooked: Tensor, written: Int[Tensor, "predicted"]) -> dict[str, Tensor]:
        logs = [self.stored.logits(states).double().log_softmax(-1) for states in (plain, hooked)]
        found: dict[str, Tensor] = {"kl": kl_divergence(*logs)}
        mask_id = excluded_id(self.stored.model.config)
        for name, log in zip(("", "_hooked"), logs, strict=True):
            best, rank = without_mask(self.stored.model, log).max(-1), token_rank(log, written, mask_id)
            found |= {f"confidence{name}": best.values.exp(), f"rank{name}": rank, f"token{name}": best.indices}
        return found

    def _residual(
        self, step: int, plain: ResidualReader, hooked: ResidualReader
    ) -> dict[str, Float[Tensor, "batch layer"]]:
        rows = self._sources(step).nonzero()[:, 0].cpu()
        shape = (len(self.stored.run.tokens), len(self.layers))
        change, cosine = (torch.zeros(shape, dtype=torch.float32) for _ in range(2))
        for place, layer in enumerate(self.layers):
            one, two = plain.residual[layer].float(), hooked.residual[layer].float()
            relative = (two - one).norm(dim=-1) / one.norm(dim=-1).clamp(min=1e-30)
            change[:, place].index_add_(0, rows, relative.cpu())
            cosine[:, place].index_add_(0, rows, torch.cosine_similarity(one, two, -1).cpu())
        count = rows.bincount(minlength=shape[0])[:, None]
        return {
            name: (value / count.clamp(min=1)).masked_fill(count == 0, torch.nan)
            for name, value in (("residual_change", change), ("residual_cosine", cosine))
        }

    def _columns(self, plain: ResidualReader, hooked: ResidualReader) -> dict[str, Tensor]:
        length = int(self.stored.run.canvases.shape[-1])

        def gathered(columns: dict[int, ColumnStats], name: str) -> Tensor:
            values = [getattr(columns[layer], name) for layer in self.layers]
            rows = len(self.stored.run.tokens)
            return stacked_layers([value.expand(rows, *value.shape[1:]) for value in values], self.layout, length)

        return {
            "plain": gathered(plain.columns, "sums"),
            "hooked": gathered(hooked.columns, "sums"),
            "expected": gathered(plain.columns, "expected"),
            "viewers": gathered(plain.columns, "viewers"),
        }


def _received(
    stored: StoredRun, passes: _Passes, stacked: dict[str, Tensor], queries: str, min_viewers: int
) -> Iterator[Received]:
    """Received attention without and with hooks, over the same e_j."""
    run = stored.run
    expected, viewers = stacked["expected"].nan_to_num(0.0), stacked["viewers"].nan_to_num(0.0)
    undefined = viewers < min_viewers
    counted = torch.stack([passes.counted(step).sum(-1).cpu() for step in range(run.steps)])
    for name in ("plain", "hooked"):
        values = (stacked[name] / expected).masked_fill(undefined, torch.nan)
        yield Received(
            values=values,
            expected=expected.expand(*values.shape[:3], expected.shape[3], -1),
            counted=counted,
            scale=RELATIVE,
            queries=queries,
            min_viewers=min_viewers,
            viewers=viewers,
            **shared_fields_of(run, passes.layers, run.part.numbers if run.part else (), passes.layout.count),
        )
