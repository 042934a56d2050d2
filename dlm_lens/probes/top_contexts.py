"""`feature_contexts`: where the features of a sparse autoencoder fire most, over whole recordings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.arguments import checked_arguments, chosen_indices, is_whole, whole
from dlm_lens.display import ROWS, Preview, ShowsItself
from dlm_lens.printable import shown
from dlm_lens.recording import Recording
from dlm_lens.recording.recording import as_recording
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.shapes import check_shapes

FIELDS = ("recording", "step", "batch", "position")
"""Where a context is: index of the recording, step, prompt and canvas position."""

ENTRIES_AT_ONCE = 2**22
"""Candidates of all features that are merged at a time."""


@dataclass(frozen=True, eq=False)
class FeatureContexts(ShowsItself):
    """The positions with the largest activation of every feature, each once, at the step where it is largest.

    Args:
        layer: of the autoencoder.
        features: indices of the features.
        activation: largest first; NaN where a feature fires at fewer positions.
        where: (recording, step, prompt, canvas position) of each; -1 where there is none.
        window: token ids around the position on the canvas of that step; -2^31 where the step's pass has no token:
            in padding, after the written part of an AR run, in blocks after the current one.
        padding: of the row, before its prompt.
        tokenizer: of the recordings; None for ids.

    Raises:
        ValueError: the shapes contradict each other.
    """

    layer: int
    features: tuple[int, ...]
    activation: Float[Tensor, "feature rank"]
    where: Int[Tensor, "feature rank 4"]
    window: Int[Tensor, "feature rank token"]
    padding: Int[Tensor, "feature rank"]
    tokenizer: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_shapes(self, feature=len(self.features))

    def __repr__(self) -> str:
        firing = int((self.where[:, :1, 0] >= 0).sum())
        return (
            f"FeatureContexts(layer {self.layer}; {firing} of {len(self.features)} features fire; the top "
            f"{self.activation.shape[1]} positions of each)"
        )

    def table(self, feature: int | None = None) -> pd.DataFrame:
        """One line per feature and rank: activation, place and context, with the token between > and <.

        Args:
            feature: its index; None for all.

        Raises:
            ValueError: a feature that was not chosen.
        """
        if feature is not None and not (is_whole(feature) and feature in self.features):
            raise ValueError(f"feature is {shown(feature)}; chosen were {', '.join(map(str, self.features[:20]))}")
        texts, lines = TokenTexts(self.tokenizer), []
        chosen = range(len(self.features)) if feature is None else [self.features.index(feature)]
        for index in chosen:
            for rank in (self.where[index, :, 0] >= 0).nonzero().flatten().tolist():
                line: dict[str, Any] = {"feature": self.features[index], "rank": rank}
                line |= dict(zip(FIELDS, self.where[index, rank].tolist(), strict=True))
                line["position"] -= int(self.padding[index, rank])
                line["activation"] = float(self.activation[index, rank])
                line["context"] = _shown(self.window[index, rank].tolist(), texts)
                lines.append(line)
        return pd.DataFrame(lines, columns=["feature", "rank", *FIELDS, "activation", "context"])

    def _preview(self) -> Preview:
        """The first features that fire, not the texts of all."""
        firing = (self.where[:, 0, 0] >= 0).nonzero().flatten().tolist()[:ROWS]
        tables = [self.table(self.features[index]) for index in firing]
        table = pd.concat(tables, ignore_index=True) if tables else self.table()
        return Preview(table=table.head(ROWS), note="all: .table()", total=int((self.where[..., 0] >= 0).sum()))


NO_TOKEN = -(2**31)


def _shown(window: list[int], texts: TokenTexts) -> str:
    middle = len(window) // 2
    words = [f">{texts(one)}<" if place == middle else str(texts(one)) for place, one in enumerate(window)
             if one != NO_TOKEN]  # fmt: skip
    return " ".join(words)


@checked_arguments(top=whole(least=1), context=whole(least=0))
def feature_contexts(
    recordings: Recording | Iterable[Recording],
    features: Sequence[int] | None = None,
    *,
    top: int | None = None,
    context: int = 5,
) -> FeatureContexts:
    """Merge the largest activations of every feature over all steps and rows, and over recordings.

    A `FeatureActivations(sae, top=R)` keeps the R largest activations of every step and row. The `top` <= R
    positions that are largest over everything are among them, so that the merge is exact; a position of a row
    counts once, with its largest activation over the steps (the earliest of equal ones). The memory holds `top`
    places for each feature and one recording's arrays: give an iterator, such as `map(Recording.load, paths)`, to
    merge recordings of different rows. Each recording counts as rows of its own: a position that is in two parts
    of one run by steps (`Recording.select(step=)`) counts twice.

    Args:
        recordings: of one autoencoder.
        features: which; None for all.
        top: how many positions to keep for each; None for the R of the first recording.
        context: tokens on each side of a position.

    Raises:
        TypeError: no `Recording`.
        ValueError: no recording, one without `FeatureActivations` or of another autoencoder, a feature that does
            not exist, or `top` above what a recording holds.
    """
    parts: Iterable[Any] = recordings if isinstance(recordings, Iterable) else [recordings]
    merged: _Merged | None = None
    for index, recording in enumerate(parts):
        recording = as_recording(recording)
        if "feature_top" not in recording.arrays:
            raise ValueError(
                "feature_contexts: the recording has no features; record FeatureActivations(sae, top=10)"
            )
        if merged is None:
            merged = _Merged.of(recording, features, top, context)
        merged.add(index, recording)
    if merged is None:
        raise ValueError("feature_contexts: there is no recording; give one or several")
    return merged.result()


class _Merged:
    """The largest activations so far.

    Args:
        formula: of the recordings, which names the autoencoder.
        layer: of it.
        features: indices of the features.
        top: places of each.
        context: tokens on each side.
        tokenizer: of the first recording.
    """

    def __init__(
        self, formula: str, layer: int, features: tuple[int, ...], top: int, context: int, tokenizer: Any
    ) -> None:
        self.formula, self.layer, self.features, self.top = formula, layer, features, top
        self.context, self.tokenizer = context, tokenizer
        shape = (len(features), top)
        self.value = torch.full(shape, -torch.inf)
        # where, padding and window of every place, side by side, so that one gather moves all of them.
        self.facts = torch.full((*shape, len(FIELDS) + 1 + 2 * context + 1), -1)
        self.facts[..., len(FIELDS) + 1 :] = NO_TOKEN

    @classmethod
    def of(cls, recording: Recording, features: Sequence[int] | None, top: int | None, context: int) -> "_Merged":
        """The start of a merge, from the first recording."""
        count, kept = recording.feature_top.shape[-2:]
        chosen = chosen_indices("feature", features, count, "feature_contexts: ")
        spec = recording.specs["feature_top"]
        tokenizer = recording.run.tokenizer
        return cls(spec.formula, recording.layers[0], chosen, kept if top is None else top, context, tokenizer)

    def add(self, index: int, recording: Recording) -> None:
        """Merge a recording, a few rows of a step at a time.

        Raises:
            ValueError: another autoencoder, or fewer places per step than `top`.
        """
        formula, kept = recording.specs["feature_top"].formula, recording.feature_top.shape[-1]
        if formula != self.formula:
            raise ValueError(
                f"feature_contexts: recordings of {self.formula!r} and of {formula!r}; give those of one"
            )
        if self.top > kept:
            raise ValueError(
                f"feature_contexts: top is {self.top} and the recording keeps {kept} a step; record "
                f"FeatureActivations(sae, top={self.top})"
            )
        chosen = list(self.features)
        run = recording.run
        # The canvas holds more: placeholders after an AR prefix, and blocks that the step does not reach.
        present = recording.facts_of(self.layer).present
        windows = run.canvases[: len(recording.steps)].masked_fill(~present, NO_TOKEN)
        windows = torch.nn.functional.pad(windows, (self.context, self.context), value=NO_TOKEN)
        padding = run.padding
        size = max(1, ENTRIES_AT_ONCE // max(1, len(chosen) * kept * self.facts.shape[-1]))
        for step in range(len(recording.steps)):
            for rows in torch.arange(len(recording.rows)).split(size):
                values = recording.feature_top[step, rows, 0][:, chosen].float()  # [row, feature, rank]
                places = recording.feature_top_position[step, rows, 0][:, chosen].long()
                around = places[..., None].clamp(min=0) + torch.arange(2 * self.context + 1)
                prompts = torch.tensor(recording.rows)[rows, None, None].expand_as(places)
                pads = torch.zeros_like(rows) if padding is None else padding[rows]
                facts = torch.cat(
                    [
                        torch.full_like(places, index)[..., None],
                        torch.full_like(places, recording.steps[step])[..., None],
                        prompts[..., None],
                        places[..., None],
                        pads[:, None, None, None].expand(*places.shape, 1),
                        windows[step][rows[:, None, None, None], around],
                    ],
                    -1,
                )
                values = values.masked_fill((places < 0) | values.isnan(), -torch.inf)
                self._merge(values.transpose(0, 1).flatten(1), facts.transpose(0, 1).flatten(1, 2))

    def _merge(
        self, values: Float[Tensor, "feature candidate"], facts: Int[Tensor, "feature candidate fact"]
    ) -> None:
        """The largest of the kept and the given ones, each (recording, prompt, position) once."""
        values, facts = torch.cat([self.value, values], 1), torch.cat([self.facts, facts], 1)
        order = values.sort(dim=1, descending=True, stable=True).indices
        values = values.gather(1, order)
        facts = facts.gather(1, order[..., None].expand_as(facts))
        recording, _, batch, position = facts[..., : len(FIELDS)].unbind(-1)
        key = (recording * (batch.amax() + 1) + batch) * (position.amax() + 1) + position
        found = key.sort(dim=1, stable=True)
        again = torch.zeros_like(found.values, dtype=torch.bool)
        again[:, 1:] = found.values[:, 1:] == found.values[:, :-1]
        repeated = torch.zeros_like(again).scatter(1, found.indices, again)
        values = values.masked_fill(repeated, -torch.inf)
        best = values.sort(dim=1, descending=True, stable=True).indices[:, : self.top]
        self.value, self.facts = (
            values.gather(1, best),
            facts.gather(1, best[..., None].expand(-1, -1, facts.shape[-1])),
        )

    def result(self) -> FeatureContexts:
        """What was merged."""
        none = ~self.value.isfinite()
        facts, count = self.facts.clone(), len(FIELDS)
        facts[none] = -1
        window = facts[..., count + 1 :].masked_fill(none[..., None], NO_TOKEN)
        return FeatureContexts(
            layer=self.layer,
            features=self.features,
            activation=self.value.masked_fill(none, torch.nan),
            where=facts[..., :count],
            window=window,
            padding=facts[..., count].masked_fill(none, 0),
            tokenizer=self.tokenizer,
        )
