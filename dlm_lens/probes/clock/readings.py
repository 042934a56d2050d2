"""`ClockReading`: the time that a clock reads from the states of a run, and how near it is to the true time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.arguments import LARGEST_COUNT, check_index, place_of_layer, whole
from dlm_lens.display import ShowsItself
from dlm_lens.printable import shown
from dlm_lens.probes.clock.states import QUANTITIES
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import POSITIVE_BOUNDS, R2_BOUNDS, Bounds, Estimate, Floats, estimate, mean_of

BASELINES = ("token", "position", "open count")
"""What is known without the states: the token at the position, its place in the answer, and how many positions of
the canvas are open."""


@dataclass(frozen=True, eq=False)
class ClockReading(ShowsItself):
    """What a clock reads at the positions of a run, summed over the positions of each class.

    Rows of equal prompts (several seeds of one) are one prompt to intervals. With p the time read at a position
    and y the label of its canvas:

    Args:
        classes: of positions, of `clock.states.POSITIONS`.
        layers: -1 for the token embeddings, otherwise the output of that layer.
        label: y; NaN after the end of a row.
        quantities: `clock.states.QUANTITIES` of every canvas.
        steps: T of every row.
        prompt: the number of every row's prompt, the same for rows of equal prompts.
        count: positions.
        read: sum of p.
        square: sum of p^2.
        absolute: sum of |p - y|.
        across: sums of p, p^2 and p y where the probe of layer `probe` reads the states of `layer`.
        shuffled: sums of p^2 - 2 p z + z^2, z and z^2, of probes fitted to labels z that are permuted among the
            steps of each prompt.
        baseline: sum of (g - y)^2, where g is the mean label that the training prompts have at an equal value of a
            baseline (`BASELINES`).
        lines: quantity -> a, b of the line a + b q that fits the labels of the training prompts best.
        seed: of the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    classes: tuple[str, ...]
    layers: tuple[int, ...]
    label: Float[Tensor, "step batch"] = field(repr=False)
    quantities: Float[Tensor, "quantity step batch"] = field(repr=False)
    steps: Int[Tensor, "batch"]
    prompt: Int[Tensor, "batch"] = field(repr=False)
    count: Float[Tensor, "kind step batch"] = field(repr=False)
    read: Float[Tensor, "kind layer step batch"] = field(repr=False)
    square: Float[Tensor, "kind layer step batch"] = field(repr=False)
    absolute: Float[Tensor, "kind layer step batch"] = field(repr=False)
    across: Float[Tensor, "kind probe layer batch three"] = field(repr=False)
    shuffled: Float[Tensor, "shuffle kind layer batch three"] = field(repr=False)
    baseline: Float[Tensor, "baseline kind batch"] = field(repr=False)
    lines: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {"kind": len(self.classes), "layer": len(self.layers), "probe": len(self.layers), "three": 3}
        check_shapes(self, quantity=len(QUANTITIES), baseline=len(BASELINES), **sizes)

    def __repr__(self) -> str:
        parts = []
        for name in self.classes:
            layer = self._best_layer(name)
            if layer is not None:
                parts.append(f"{name} R^2 {self.r2(name, layer)} in layer {layer}")
        return f"ClockReading({len(self.prompt.unique())} prompts; {'; '.join(parts)})"

    def errors(self, name: str, layer: int) -> Float[Tensor, "batch"]:
        """The sum of (p - y)^2 over the positions of every row.

        Raises:
            ValueError: a class or a layer that the clock does not have.
        """
        kind, place = self.kind_index(name), self.layer_index(layer)
        label = self.label.nan_to_num()
        each = self.square[kind, place] - 2 * label * self.read[kind, place] + label.square() * self.count[kind]
        return each.sum(0)

    def baseline_errors(self, name: str, baseline: str) -> Float[Tensor, "batch"]:
        """The sum of (g - y)^2 over the positions of every row.

        Raises:
            ValueError: an unknown class or baseline.
        """
        if baseline not in BASELINES:
            raise ValueError(f"baseline is {shown(baseline)}; it must be one of {', '.join(BASELINES)}")
        return self.baseline[BASELINES.index(baseline), self.kind_index(name)]

    def spread(self, name: str) -> Float[Tensor, "batch"]:
        """The sum of (y - mean y)^2 over the positions of every row, the mean over all rows.

        Raises:
            ValueError: a class that the clock does not have.
        """
        n, y, yy = self.label_sums(self.kind_index(name)).unbind(-1)
        mean = y.sum() / n.sum().clamp(min=1)
        return (yy - 2 * mean * y + mean.square() * n).clamp(min=0)

    def best_layer(self, name: str = "open") -> int:
        """The layer with the largest R^2.

        Raises:
            ValueError: a class without positions.
        """
        self.kind_index(name)
        best = self._best_layer(name)
        if best is None:
            raise ValueError(f"the run has no {name} positions, or its label is the same everywhere")
        return best

    def _best_layer(self, name: str) -> int | None:
        """The layer with the largest R^2; None where it is defined in no layer."""
        found = [self.r2(name, layer).value for layer in self.layers]
        return self.layers[int(np.nanargmax(found))] if np.isfinite(found).any() else None

    def r2(self, name: str, layer: int) -> Estimate:
        """R^2 = 1 - sum (p - y)^2 / sum (y - mean y)^2 over positions; the interval is over prompts.

        Raises:
            ValueError: a class or a layer that the clock does not have.
        """
        return self._estimate(self._sums(name, self.errors(name, layer)), _r2, R2_BOUNDS)

    def mae(self, name: str, layer: int) -> Estimate:
        """Mean absolute error in steps, mean |p - y| T; the interval is over prompts.

        Raises:
            ValueError: a class or a layer that the clock does not have.
        """
        kind, place = self.kind_index(name), self.layer_index(layer)
        sums = torch.stack([self.absolute[kind, place].sum(0) * self.steps, self.count[kind].sum(0)], -1)
        return self._estimate(sums, mean_of, POSITIVE_BOUNDS)

    def null(self, name: str, layer: int) -> list[float]:
        """R^2 of each probe fitted to labels that are permuted among the steps of each prompt."""
        kind, place = self.kind_index(name), self.layer_index(layer)
        n = self.count[kind].sum((0, 1))
        found = []
        for error, total, square in self.shuffled[:, kind, place].sum(1).tolist():
            spread = square - total**2 / float(n) if n else 0.0
            found.append(1 - error / spread if spread > 0 else np.nan)
        return found

    def baseline_r2(self, name: str, baseline: str) -> Estimate:
        """R^2 of a baseline: the mean label of the training prompts at an equal value of it.

        Raises:
            ValueError: an unknown class or baseline.
        """
        return self._estimate(self._sums(name, self.baseline_errors(name, baseline)), _r2, R2_BOUNDS)

    def beyond(self, name: str, layer: int, baseline: str) -> Estimate:
        """1 - sum (p - y)^2 / sum (g - y)^2: the share of a baseline's error that the states remove.

        Below 0 the states say less about the time than the baseline does.

        Raises:
            ValueError: an unknown class, layer or baseline.
        """
        sums = torch.stack([self.errors(name, layer), self.baseline_errors(name, baseline)], -1)
        return self._estimate(sums, lambda total: 1 - total[..., 0] / total[..., 1], R2_BOUNDS)

    def table(self) -> pd.DataFrame:
        """One line per class of positions and layer: R^2, error in steps, largest R^2 of the null, baselines."""
        lines = []
        for name in self.classes:
            if not bool(self.count[self.kind_index(name)].any()):
                continue
            known = {one.replace(" ", "_"): self.baseline_r2(name, one).value for one in BASELINES}
            for layer in self.layers:
                line: dict[str, Any] = {"positions": name, "layer": layer}
                line |= self.r2(name, layer).columns("r2") | self.mae(name, layer).columns("steps_off")
                line |= {"null": max(self.null(name, layer), default=np.nan), **known}
                lines.append(line)
        return pd.DataFrame(lines)

    def by_label(self, name: str, layer: int, bins: int = 16) -> pd.DataFrame:
        """The true label against the mean label read, in equal bins of the true one; intervals over prompts.

        Raises:
            ValueError: a class or a layer that the clock does not have, or fewer than one bin.
        """
        whole(least=1, most=LARGEST_COUNT).check("by_label: bins", bins)
        kind, place = self.kind_index(name), self.layer_index(layer)
        known = self.label.isfinite()
        bin_of = (self.label.nan_to_num() * bins + 1e-9).long().clamp(0, bins - 1)
        lines = []
        for number in range(bins):
            here = known & (bin_of == number)
            count = (self.count[kind] * here).sum(0)
            if not bool(count.any()):
                continue
            label = (self.label.nan_to_num() * self.count[kind] * here).sum() / count.sum()
            sums = torch.stack([(self.read[kind, place] * here).sum(0), count], -1)
            read = self._estimate(sums, mean_of)
            lines.append({"label": float(label), **read.columns("read"), "positions": int(count.sum())})
        return pd.DataFrame(lines)

    def transfer(self, name: str) -> pd.DataFrame:
        """One line per pair of layers: the probe of one reads the states of the other.

        `r2` takes the reading as it is, `correlation` is that of reading and label, which an offset and a scale do
        not change.

        Raises:
            ValueError: a class that the clock does not have.
        """
        kind = self.kind_index(name)
        n, y, yy = self.label_sums(kind).sum(0).tolist()
        lines = []
        for i, probe in enumerate(self.layers):
            for j, layer in enumerate(self.layers):
                p, pp, py = self.across[kind, i, j].sum(0).tolist()
                spread, moved = yy - y * y / n, pp - p * p / n
                both = py - p * y / n
                line: dict[str, Any] = {"probe": probe, "layer": layer}
                line["r2"] = 1 - (pp - 2 * py + yy) / spread if spread > 0 else np.nan
                # A reading that does not move has no correlation; rounding would give it one.
                flat = moved <= 1e-10 * max(pp, 1e-30) or spread <= 0
                line["correlation"] = np.nan if flat else both / np.sqrt(spread * moved)
                lines.append(line)
        return pd.DataFrame(lines)

    def follows(self, name: str, layer: int) -> pd.DataFrame:
        """One line per quantity: how far the mean reading of a canvas is from what that quantity would make it.

        A clock that counts open positions reads a + b q at q open positions in any run, where a and b are those of
        the training prompts; one that knows its share of the run reads that. In runs of another length than the
        training runs' the two differ. `off` is the root mean square of the distance over canvases, nearest first;
        quantities that are the same in these runs keep the order of `QUANTITIES`.

        Raises:
            ValueError: a class or a layer that the clock does not have.
        """
        lines = []
        for quantity in QUANTITIES:
            sums = self.distances(name, layer, quantity)
            off = self._estimate(sums, lambda total: np.sqrt(total[..., 0] / total[..., 1]), POSITIVE_BOUNDS)
            lines.append({"quantity": quantity, **off.columns("off")})
        # Rounded: equal quantities differ in the last digits, in another order on each machine.
        table = pd.DataFrame(lines)
        return table.sort_values("off", kind="stable", ignore_index=True, key=lambda off: off.round(9))

    def distances(self, name: str, layer: int, quantity: str) -> Float[Tensor, "batch two"]:
        """For every row the sum over canvases of the squared distance of `follows`, and how many canvases.

        Raises:
            ValueError: a class, layer or quantity that the clock does not have.
        """
        kind, place = self.kind_index(name), self.layer_index(layer)
        if quantity not in QUANTITIES:
            raise ValueError(f"quantity is {shown(quantity)}; it must be one of {', '.join(QUANTITIES)}")
        there = (self.count[kind] > 0) & self.label.isfinite()
        read = self.read[kind, place] / self.count[kind].clamp(min=1)
        a, b = self.lines[quantity]
        error = (read - a - b * self.quantities[QUANTITIES.index(quantity)]).square() * there
        return torch.stack([error.sum(0), there.sum(0).double()], -1)

    def kind_index(self, name: str) -> int:
        """The place of a class of positions on the axis "kind".

        Raises:
            ValueError: a class that the clock does not have.
        """
        if name not in self.classes:
            raise ValueError(f"positions is {shown(name)}; this clock reads {', '.join(self.classes)}")
        return self.classes.index(name)

    def layer_index(self, layer: int) -> int:
        """The place of a layer on the axis "layer".

        Raises:
            ValueError: a layer that the clock does not have.
        """
        return place_of_layer(layer, self.layers)

    def label_sums(self, kind: int) -> Float[Tensor, "batch three"]:
        """Sums over positions of 1, y and y^2; `kind` is the place of a class (`kind_index`).

        Raises:
            ValueError: a place that does not exist.
        """
        check_index("kind", kind, len(self.classes), "label_sums: ")
        label, count = self.label.nan_to_num(), self.count[kind]
        return torch.stack([count.sum(0), (count * label).sum(0), (count * label.square()).sum(0)], -1)

    def _sums(self, name: str, error: Float[Tensor, "batch"]) -> Float[Tensor, "batch four"]:
        return torch.cat([self.label_sums(self.kind_index(name)), error[:, None]], -1)

    def _estimate(
        self,
        sums: Float[Tensor, "batch summand"],
        statistic: Callable[[Floats], Floats],
        bounds: Bounds | None = None,
    ) -> Estimate:
        """A statistic of sums over rows; the interval is over prompts, each with all of its rows."""
        _, prompt = self.prompt.unique(return_inverse=True)
        of_prompts = sums.new_zeros(int(prompt.max()) + 1 if len(prompt) else 0, sums.shape[1])
        return estimate(of_prompts.index_add_(0, prompt, sums).numpy(), statistic, bounds=bounds, seed=self.seed)


def _r2(sums: Floats) -> Floats:
    """R^2 from sums over positions of 1, y, y^2 and the squared error; NaN where all labels are equal."""
    n, y, yy, error = np.moveaxis(sums, -1, 0)
    spread = yy - y * y / n
    found: Floats = np.where(spread > 1e-12 * np.maximum(yy, 1e-30), 1 - error / spread, np.nan)
    return found


def empty_reading(
    classes: tuple[str, ...],
    layers: tuple[int, ...],
    label: Tensor,
    quantities: Tensor,
    shuffles: int,
    lines: Mapping[str, tuple[float, float]],
    seed: int,
    steps: Tensor | None = None,
) -> ClockReading:
    """A reading whose sums are all 0; arguments: `ClockReading`."""
    step, batch = label.shape
    k, n = len(classes), len(layers)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64)

    return ClockReading(
        classes=classes,
        layers=layers,
        label=label.double(),
        quantities=quantities.double(),
        steps=torch.zeros(batch, dtype=torch.long) if steps is None else steps,
        prompt=torch.arange(batch),
        count=zeros(k, step, batch),
        read=zeros(k, n, step, batch),
        square=zeros(k, n, step, batch),
        absolute=zeros(k, n, step, batch),
        across=zeros(k, n, n, batch, 3),
        shuffled=zeros(shuffles, k, n, batch, 3),
        baseline=zeros(len(BASELINES), k, batch),
        lines=lines,
        seed=seed,
    )


def joined(readings: Sequence[ClockReading]) -> ClockReading:
    """The readings of several runs as one, their prompts after one another.

    Raises:
        ValueError: no reading.
    """
    if not readings:
        raise ValueError("no reading; give at least one")
    first = readings[0]
    longest = max(one.label.shape[0] for one in readings)

    def steps_of(name: str, axis: int, fill: float) -> Tensor:
        """A field with an axis of steps, the shorter ones filled up."""
        parts = []
        for one in readings:
            value = getattr(one, name)
            extra = list(value.shape)
            extra[axis] = longest - value.shape[axis]
            parts.append(torch.cat([value, value.new_full(extra, fill)], axis))
        return torch.cat(parts, -1)

    def rows_of(name: str, axis: int) -> Tensor:
        """A field without one."""
        return torch.cat([getattr(one, name) for one in readings], axis)

    return ClockReading(
        classes=first.classes,
        layers=first.layers,
        label=steps_of("label", 0, torch.nan),
        quantities=steps_of("quantities", 1, 0.0),
        steps=rows_of("steps", 0),
        prompt=rows_of("prompt", 0),
        count=steps_of("count", 1, 0.0),
        read=steps_of("read", 2, 0.0),
        square=steps_of("square", 2, 0.0),
        absolute=steps_of("absolute", 2, 0.0),
        across=rows_of("across", 3),
        shuffled=rows_of("shuffled", 3),
        baseline=rows_of("baseline", 2),
        lines=first.lines,
        seed=first.seed,
    )
