"""`early_attention`: does a block's attention at its first step predict that at its later steps?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import Rule, checked_arguments, is_real, one_of, whole
from dlm_lens.display import ShowsItself
from dlm_lens.printable import shown
from dlm_lens.probes.updates import spearman
from dlm_lens.recording import Recording
from dlm_lens.recording.recording import as_recording
from dlm_lens.sampling.run_rows import prompts_of_rows
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import (
    CORRELATION_BOUNDS,
    SHARE_BOUNDS,
    Bounds,
    Estimate,
    Floats,
    difference_of,
    estimate,
    mean_of,
)

PREDICTORS = ("first steps", "step before", "other block", "other prompt")
MEASURES = ("correlation", "recall", "kept")
OTHERS = 3
"""Most other prompts whose attention is the null of a prompt."""

SHARE = Rule("a share of the keys, above 0 and below 1", lambda value: is_real(value) and 0 < value < 1)


@dataclass(frozen=True, eq=False)
class EarlyAttention(ShowsItself):
    """How well received attention of four predictors agrees with that of a block's later steps.

    For every prompt, block, later step t of it, layer and head, over the n keys: `correlation`, Spearman's rank
    correlation of predictor and r_t; `recall`, the share of the k keys with the largest r_t that are among the k
    largest of the predictor (2602.14209 measures the recall of the first step's top-k set; k is a share of n here);
    `kept`, the attention r_t on the predictor's k keys over that on the k best ones, which is what sparse attention
    keeps. Predictors: the mean over the block's first steps; the step before t (persistence: the best that reuse
    could do); and two nulls, the first steps of another block of the same prompt and those of up to three
    rows with other prompts in a block of the same number, at the same positions of the canvas (NaN if all rows have
    one prompt). Recall by chance is k / n. A mean of a predictor is over the blocks and steps that have it (a
    single block has no other one); differences are over those that have both predictors.

    Args:
        by_head: sums over blocks and steps, and their numbers; prompts by their numbers in
            `DenoisingRun.row_prompts`.
        by_lag: the same over layers and heads, by the steps since the block began.
        common: where a predictor and the first steps are both defined: sums of the first steps, of the predictor
            (mean over its rows), and their numbers.
        chance: recall of random keys: sums over blocks and steps, of the mean over layers, and their numbers. A
            layer without two keys has no part in either.
        layers: index of each layer in the model.
        first: how many first steps are averaged.
        share: of the keys that count as the largest.
        keys: which keys.
        seed: of the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    by_head: Float[Tensor, "predictor measure prompt layer head 2"]
    by_lag: Float[Tensor, "predictor measure prompt lag 2"]
    common: Float[Tensor, "predictor measure prompt layer head 3"]
    chance: Float[Tensor, "prompt 2"]
    layers: tuple[int, ...]
    first: int
    share: float
    keys: str
    seed: int = 0

    def __post_init__(self) -> None:
        check_shapes(self, layer=len(self.layers), predictor=len(PREDICTORS), measure=len(MEASURES))

    def __repr__(self) -> str:
        said = ", ".join(f"{name} {self.mean('recall', name).value:.3g}" for name in PREDICTORS)
        chance = estimate(self.chance.numpy(), mean_of, seed=self.seed).value
        return f"EarlyAttention(recall of the top {self.share:.0%} of keys: {said}, chance {chance:.3g})"

    def mean(self, measure: str, predictor: str = "first steps", layer: int | None = None) -> Estimate:
        """A measure over prompts, blocks, steps and heads, with its interval over prompts; NaN where there is none.

        Raises:
            ValueError: another measure or predictor, or a layer that was not recorded.
        """
        sums = self._sums(measure, predictor, layer).numpy()
        return estimate(sums, mean_of, bounds=_bounds(measure), seed=self.seed)

    def excess(self, measure: str, null: str = "other prompt", layer: int | None = None) -> Estimate:
        """The measure of the first steps minus that of another predictor, on the blocks and steps that have both.

        Raises:
            ValueError: as `mean`.
        """
        sums = _pairs(self._sums(measure, null, layer, self.common))
        return estimate(sums, difference_of, bounds=_bounds(measure, excess=True), seed=self.seed)

    def table(self, layer: int | None = None) -> pd.DataFrame:
        """One line per predictor: the three measures with intervals over prompts.

        Raises:
            ValueError: a layer that was not recorded.
        """
        lines = []
        for name in PREDICTORS:
            line: dict[str, Any] = {"predictor": name}
            for measure in MEASURES:
                line |= self.mean(measure, name, layer).columns(measure)
            lines.append(line)
        return pd.DataFrame(lines)

    def lags(self, measure: str = "recall") -> pd.DataFrame:
        """A measure by the number of steps since the block began: one line per step, one column per predictor.

        Each column is over the blocks that have its predictor.

        Raises:
            ValueError: another measure.
        """
        place = _index("measure", measure, MEASURES)
        sums = self.by_lag[:, place].sum(1)
        means = (sums[..., 0] / sums[..., 1]).tolist()
        table = pd.DataFrame(dict(zip(PREDICTORS, means, strict=True)))
        table.insert(0, "lag", range(len(table)))
        return table[table["first steps"].notna()].reset_index(drop=True)

    def heads(self, measure: str = "recall") -> pd.DataFrame:
        """One line per head: the measure of the first steps and of other prompts, and the difference's interval.

        The difference is on the blocks and steps that have both.

        Raises:
            ValueError: another measure.
        """
        place, lines = _index("measure", measure, MEASURES), []
        for number, layer in enumerate(self.layers):
            for head in range(self.by_head.shape[4]):
                early, other = (
                    self.by_head[PREDICTORS.index(name), place, :, number, head]
                    for name in ("first steps", "other prompt")
                )
                line: dict[str, Any] = {"layer": layer, "head": head}
                first = estimate(early.numpy(), mean_of, bounds=_bounds(measure), seed=self.seed)
                line |= first.columns("first_steps")
                line["other_prompt"] = estimate(other.numpy(), mean_of, seed=self.seed).value
                both = _pairs(self.common[PREDICTORS.index("other prompt"), place, :, number, head])
                excess = estimate(both, difference_of, bounds=_bounds(measure, excess=True), seed=self.seed)
                lines.append(line | excess.columns("excess"))
        return pd.DataFrame(lines)

    def _sums(
        self, measure: str, predictor: str, layer: int | None, of: Tensor | None = None
    ) -> Float[Tensor, "prompt sums"]:
        sums = self.by_head if of is None else of
        found = sums[_index("predictor", predictor, PREDICTORS), _index("measure", measure, MEASURES)]
        if layer is not None:
            found = found[:, [_index("layer", layer, self.layers)]]
        return found.sum((1, 2))


def _bounds(measure: str, excess: bool = False) -> Bounds:
    """Of a measure, or of its excess over another predictor's."""
    least, most = CORRELATION_BOUNDS if measure == "correlation" else SHARE_BOUNDS
    return (least - most, most - least) if excess else (least, most)


def _pairs(common: Float[Tensor, "prompt 3"]) -> Floats:
    """The sums and numbers of two predictors, as `difference_of` reads them."""
    return np.asarray(common[:, [0, 2, 1, 2]].numpy())


def _index(name: str, value: Any, known: tuple[Any, ...]) -> int:
    if not isinstance(value, str | int) or value not in known:
        raise ValueError(f"{name} is {shown(value)}; it must be one of {', '.join(map(str, known))}")
    return known.index(value)


class _Block(NamedTuple):
    """The steps of a block in a row, and the keys that are compared."""

    number: int
    steps: list[int]
    keys: Bool[Tensor, "layer key"]
    """Of a sliding layer those in its window: what a layer gives does not depend on the other layers."""


@checked_arguments(first=whole(least=1), share=SHARE, keys=one_of("context", "all"), seed=whole(least=0))
def early_attention(
    recording: Recording,
    *,
    first: int = 1,
    share: float = 0.25,
    keys: Literal["context", "all"] = "context",
    seed: int = 0,
) -> EarlyAttention:
    """Compare the attention that keys receive from a block at its first steps with that at its later ones.

    Sparse attention for block diffusion chooses keys at the first, fully masked step of a block and reuses them for
    the rest (2602.14209), or reuses what barely changes from step to step (2604.12056). This measures from a
    recording whether the model's attention allows that, and beside what it would give by chance.

    Args:
        recording: of a DLM, with `ReceivedAttention("block", min_viewers=1)`; with a `block_length`, so that there
            are several blocks.
        first: how many first steps are averaged.
        share: of the keys that count as the largest, at least one key.
        keys: "context", what was decided before the block began, as a block-diffusion model's cache; "all" content
            that the block sees. Learned sink tokens are left out.
        seed: of the intervals.

    Raises:
        TypeError: not a recording.
        ValueError: an AR run, a recording without the attention of blocks, or no block with more than `first`
            steps.
    """
    recording = as_recording(recording)
    if recording.causal:
        raise ValueError("early_attention: an AR model has no steps within a block; give the recording of a DLM")
    if "received_block" not in recording.specs:
        raise ValueError(
            'early_attention: this recording lacks the attention of blocks; record with ReceivedAttention("block", '
            f"min_viewers=1), it has {', '.join(recording.specs) or 'none'}"
        )
    if list(recording.steps) != list(range(recording.run.steps)):
        raise ValueError("early_attention: this recording has some steps only; give all steps of the run")
    sums = recording.received_sums("block").double()[..., : recording.run.tokens.shape[1]]
    rows = [_blocks(recording, row, first, keys, sums) for row in range(len(recording.run.tokens))]
    if not any(rows):
        raise ValueError(
            f"early_attention: no block has more than first={first} steps with a defined key; give more steps, a "
            "larger block_length, or record with min_viewers=1"
        )
    lags = max(len(block.steps) for blocks in rows for block in blocks)
    shape = (len(PREDICTORS), len(MEASURES), len(rows))
    by_head = torch.zeros(*shape, *sums.shape[2:4], 2, dtype=torch.float64)
    by_lag, common, chance = (
        torch.zeros(*shape, lags, 2, dtype=torch.float64),
        torch.zeros(*shape, *sums.shape[2:4], 3, dtype=torch.float64),
        torch.zeros(len(rows), 2, dtype=torch.float64),
    )
    prompts, numbers = prompts_of_rows(recording.run), recording.run.row_prompts.tolist()
    for row, blocks in enumerate(rows):
        of = numbers[row]
        for block in blocks:
            chance[of] += _chance(block.keys, share) * (len(block.steps) - first)
            both: dict[int, Tensor] = {}
            for kind, predictor in _predictors(sums, rows, prompts, row, block, first):
                found = _measured_by_layer(predictor, sums[block.steps[first:], row], block.keys, share)
                both[kind] = both.get(kind, 0) + found
                by_head[kind, :, of] += found.sum(1)
                by_lag[kind, :, of, first : len(block.steps)] += found.sum((2, 3))
            for kind, found in both.items():
                common[kind, :, of] += _common(both[0], found).sum(1)
    return EarlyAttention(by_head, by_lag, common, chance, recording.layers, first, share, keys, seed)


def _blocks(recording: Recording, row: int, first: int, keys: str, sums: Tensor) -> list[_Block]:
    """The blocks of a row that have later steps."""
    run, found = recording.run, []
    ran = int(run.row_steps[row])
    for number in sorted(set(run.blocks)):
        steps = [step for step in range(min(run.steps, ran)) if run.blocks[step] == number]
        if len(steps) <= first:
            continue
        start = steps[0]
        there = run.attention_mask[row] & sums[steps, row].isfinite().all(2).all(0)
        if keys == "context":
            there = there & ~run.open[start, row] & ~run.in_block[start, row]
        if int(there.sum(-1).max()) >= 2:
            found.append(_Block(number, steps, there))
    return found


def _predictors(
    sums: Float[Tensor, "step batch layer head key"],
    rows: list[list[_Block]],
    prompts: Sequence[tuple[int, ...]],
    row: int,
    block: _Block,
    first: int,
) -> Iterator[tuple[int, Float[Tensor, "#later layer head key"]]]:
    """(index in PREDICTORS, attention of every key) for the later steps of a block; nulls that exist only."""

    def early(of: int, one: _Block) -> Float[Tensor, "1 layer head key"]:
        # A key that the other canvas does not have receives nothing there.
        return sums[one.steps[:first], of].mean(0, keepdim=True).nan_to_num()

    yield 0, early(row, block)
    yield 1, sums[block.steps[first - 1 : -1], row].nan_to_num()
    others = [one for one in rows[row] if one.number != block.number]
    if others:
        # The nearest one, of two the earlier.
        yield 2, early(row, min(others, key=lambda one: (abs(one.number - block.number), one.number)))
    # Rows of equal prompts have no other prompt: their attention would be nearly the row's own.
    after = [(row + shift) % len(rows) for shift in range(1, len(rows))]
    for other in [one for one in after if prompts[one] != prompts[row]][:OTHERS]:
        same = [one for one in rows[other] if one.number == block.number]
        if same:
            yield 3, early(other, same[0])


def _common(
    early: Float[Tensor, "measure later layer head 2"], other: Float[Tensor, "measure later layer head 2"]
) -> Float[Tensor, "measure later layer head 3"]:
    """Where both are defined: the first steps, the mean over the rows of the other predictor, and 1; else zeros."""
    known = ((early[..., 1] > 0) & (other[..., 1] > 0)).double()
    means = [one[..., 0] / one[..., 1].clamp(min=1) * known for one in (early, other)]
    return torch.stack([*means, known], -1)


def _largest(count: int, share: float) -> int:
    """How many of so many keys count as the largest."""
    return max(1, round(share * count))


def _chance(keys: Bool[Tensor, "layer key"], share: float) -> Float[Tensor, "2"]:
    """The recall of random keys, and its number: means over the layers; 0 in those without two keys."""
    counts = keys.sum(-1).tolist()
    shares = [_largest(count, share) / count for count in counts if count >= 2]
    return torch.tensor([sum(shares), len(shares)], dtype=torch.float64) / len(counts)


def _measured_by_layer(
    predictor: Float[Tensor, "#later layer head key"],
    target: Float[Tensor, "later layer head key"],
    keys: Bool[Tensor, "layer key"],
    share: float,
) -> Float[Tensor, "measure later layer head 2"]:
    """Values and numbers of the three measures, over each layer's own keys; zeros in a layer without two."""
    found = torch.zeros(len(MEASURES), *target.shape[:3], 2, dtype=torch.float64)
    for own in keys.unique(dim=0):  # layers of the same keys at once
        count = int(own.sum())
        if count < 2:
            continue
        layers = keys.eq(own).all(-1)
        of = target[:, layers][..., own]
        values, known = _measured(predictor[:, layers][..., own].expand_as(of), of, _largest(count, share))
        found[:, :, layers] = torch.stack([values.where(known, 0.0), known.double()], -1)
    return found


def _measured(
    predictor: Float[Tensor, "later layer head key"], target: Float[Tensor, "later layer head key"], top: int
) -> tuple[Float[Tensor, "measure later layer head"], Bool[Tensor, "measure later layer head"]]:
    """The three measures, and where they are defined."""
    rho, defined = spearman(predictor, target, torch.ones_like(target, dtype=torch.bool))
    chosen = torch.zeros_like(target, dtype=torch.bool).scatter_(-1, predictor.topk(top, -1).indices, True)
    best = torch.zeros_like(target, dtype=torch.bool).scatter_(-1, target.topk(top, -1).indices, True)
    recall = (chosen & best).sum(-1) / top
    most = (target * best).sum(-1)
    kept = (target * chosen).sum(-1) / most
    always = torch.ones_like(defined)
    return torch.stack([rho, recall.double(), kept]), torch.stack([defined, always, most > 0])
