"""What `denoising_clock` adds up over training prompts: sums of the regressions, mean states, and baselines."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.placement import float64_device, in_float64
from dlm_lens.probes.clock.states import POSITIONS, QUANTITIES, StepStates, quantities_of
from dlm_lens.probes.normal_equations import NormalEquations, best_ridges
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.run_rows import open_and_planned, prompt_numbers, prompts_of_rows
from dlm_lens.shapes import check_shapes

if TYPE_CHECKING:
    from dlm_lens.probes.clock.clocks import DenoisingClock
    from dlm_lens.probes.clock.readings import ClockReading

logger = logging.getLogger(__name__)

RIDGES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
"""Penalties to choose from, in units of the features' variances."""

DRAWS = 16
"""Directions of natural variation that a clock keeps per probe."""


@dataclass(frozen=True, eq=False)
class GroupMeans:
    """The mean label of the states of a group: of equal token, position, or number of open positions.

    Args:
        sums: of the labels.
        counts: of the states.
        longest: positions of the longest canvas.

    Raises:
        ValueError: the shapes contradict each other.
    """

    sums: Float[Tensor, "kind group"]
    counts: Float[Tensor, "kind group"]
    longest: int

    def __post_init__(self) -> None:
        check_shapes(self)

    @classmethod
    def empty(cls, kinds: int, size: int, longest: int) -> "GroupMeans":
        """No states yet, in `size` groups of each of `kinds` classes of positions."""
        sums, counts = (torch.zeros(kinds, size, dtype=torch.float64) for _ in range(2))
        return cls(sums, counts, longest)

    def groups(self, name: str, states: StepStates, where: Tensor, run: DenoisingRun) -> Tensor:
        """The group of every state: its token, its place from the end of the prompt, or the open positions."""
        row, position = states.row[where], states.position[where]
        if name == "token":
            return run.canvases[states.step, row, position]
        if name == "position":
            # Longer canvases than those of the training runs share the outermost groups.
            return (position - run.prompt_length + self.longest).clamp(0, self.sums.shape[1] - 1)
        opened, _ = open_and_planned(run, run.answer)  # of what was planned, as the label's
        return opened[states.step, row].clamp(max=self.sums.shape[1] - 1)

    def add(self, kind: int, group: Tensor, label: Float[Tensor, "state"]) -> None:
        """Add labels to the groups."""
        self.sums[kind].index_add_(0, group, label)
        self.counts[kind].index_add_(0, group, torch.ones_like(label))

    def predict(
        self, kind: int, name: str, states: StepStates, where: Tensor, run: DenoisingRun
    ) -> Float[Tensor, "state"]:
        """The mean label of every state's group; for groups without any, the mean over all."""
        counts = self.counts[kind]
        overall = self.sums[kind].sum() / counts.sum().clamp(min=1)
        means = torch.where(counts > 0, self.sums[kind] / counts.clamp(min=1), overall)
        return means[self.groups(name, states, where, run)]


class ClockSums:
    """All sums of a fit; states are added step by step.

    Args:
        kinds: classes of positions.
        layers: of the streams.
        shuffles: number of null labels.
        bins: of the label, for mean states.
        baselines: by name.
    """

    def __init__(
        self,
        kinds: tuple[str, ...],
        layers: tuple[int, ...],
        shuffles: int,
        bins: int,
        baselines: Mapping[str, GroupMeans],
    ) -> None:
        self.kinds, self.layers, self.shuffles, self.bins = kinds, layers, shuffles, bins
        self.baselines = baselines
        self.equations: dict[tuple[int, int], tuple[NormalEquations, NormalEquations]] = {}
        self.curves: dict[tuple[int, int], Tensor] = {}
        self.labels = torch.zeros(len(kinds), bins, dtype=torch.float64)
        self.counts = torch.zeros(len(kinds), bins, dtype=torch.float64)

    def add(
        self,
        states: StepStates,
        run: DenoisingRun,
        targets: Float[Tensor, "target step batch"],
        half: Int[Tensor, "batch"],
    ) -> None:
        """Add the states of a step; `half` says in which of two halves of the prompts each row is."""
        for kind, name in enumerate(self.kinds):
            where = (states.kind == POSITIONS.index(name)).nonzero().flatten()
            y = targets[:, states.step, states.row[where]].T
            bin_of = (y[:, 0] * self.bins + 1e-9).long().clamp(0, self.bins - 1)
            self.labels[kind].index_add_(0, bin_of, y[:, 0])
            self.counts[kind].index_add_(0, bin_of, torch.ones_like(y[:, 0]))
            for one, groups in self.baselines.items():
                groups.add(kind, groups.groups(one, states, where, run), y[:, 0])
            for place, layer in enumerate(self.layers):
                self._add_layer((kind, place), states.streams[layer], where, y, bin_of, half[states.row[where]])

    def _add_layer(
        self, key: tuple[int, int], stream: Tensor, where: Tensor, y: Tensor, bin_of: Tensor, half: Tensor
    ) -> None:
        width, device = stream.shape[-1], float64_device(stream.device)
        if key not in self.equations:
            one, other = (NormalEquations(width, 1 + self.shuffles, device) for _ in range(2))
            self.equations[key] = one, other
            self.curves[key] = torch.zeros(self.bins, width, dtype=torch.float64, device=device)
        if len(where):
            x = in_float64(stream[where.to(stream.device)])
            for number, equations in enumerate(self.equations[key]):
                inside = half == number
                equations.add(x[inside.to(device)], y[inside])
            self.curves[key].index_add_(0, bin_of.to(device), x)

    def lines(
        self,
        stored: Sequence[StoredRun],
        labels: Sequence[Float[Tensor, "step batch"]],
        rows: Sequence[Bool[Tensor, "batch"]],
    ) -> dict[str, tuple[float, float]]:
        """For each quantity a and b of the line a + b q that is nearest to the labels of the training canvases."""
        q = torch.cat(
            [quantities_of(one.run)[:, :, chosen].flatten(1) for one, chosen in zip(stored, rows, strict=True)], -1
        )
        y = torch.cat([label[:, chosen].flatten() for label, chosen in zip(labels, rows, strict=True)])
        q, y = q[:, y.isfinite()], y[y.isfinite()]
        found = {}
        for number, name in enumerate(QUANTITIES):
            centred = q[number] - q[number].mean()
            spread = float(centred.square().sum())
            b = float((centred * y).sum()) / spread if spread > 1e-12 else 0.0
            found[name] = float(y.mean()) - b * float(q[number].mean()), b
        return found

    def solved(
        self, ridge: float | None, seed: int, reading: "ClockReading", target: str, prompts: int
    ) -> "DenoisingClock":
        """The clock, with a reading of no prompt; a `ridge` of None is chosen for each probe."""
        from dlm_lens.probes.clock.clocks import DenoisingClock

        generator = torch.Generator().manual_seed(seed)
        names = ("weight", "bias", "slope", "curve", "ridge", "draws")
        each: dict[str, list[Tensor]] = {name: [] for name in names}
        for kind in range(len(self.kinds)):
            for place in range(len(self.layers)):
                one, other = self.equations[kind, place]
                penalty = best_ridges((one, other), RIDGES)[0] if ridge is None else ridge
                equations = one + other
                weight, bias = equations.solve(penalty)
                curve = self.curves[kind, place].cpu() / self.counts[kind].clamp(min=1)[:, None]
                values = (weight, bias, equations.slope()[0], curve, torch.tensor(penalty, dtype=torch.float64))
                for name, value in zip(each, (*values, equations.draws(DRAWS, generator)), strict=True):
                    each[name].append(value.cpu())
        k, n = len(self.kinds), len(self.layers)
        stacked = {name: torch.stack(values).unflatten(0, (k, n)) for name, values in each.items()}
        return DenoisingClock(
            reading=reading,
            target=target,
            prompts=prompts,
            weight=stacked["weight"][:, :, 0],
            bias=stacked["bias"][:, :, 0],
            null_weight=stacked["weight"][:, :, 1:].movedim(2, 0),
            null_bias=stacked["bias"][:, :, 1:].movedim(2, 0),
            slope=stacked["slope"],
            curve=stacked["curve"],
            knots=self.labels / self.counts.clamp(min=1),
            curve_counts=self.counts,
            draws=stacked["draws"],
            baselines=self.baselines,
            ridge=stacked["ridge"],
            model="",
            digest="",
        )


def permuted(label: Float[Tensor, "step batch"], count: int, seed: int) -> list[Float[Tensor, "step batch"]]:
    """The labels with the steps of every row permuted, `count` times; the ends of rows stay where they are."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        one = label.clone()
        for row in range(label.shape[1]):
            there = label[:, row].isfinite().nonzero().flatten()
            one[there, row] = label[there[torch.randperm(len(there), generator=generator)], row]
        found.append(one)
    return found


def warn_of_one_prompt(
    runs: Sequence[DenoisingRun], train: Sequence[Bool[Tensor, "batch"]], who: str, remedy: str = ""
) -> None:
    """Warn where a penalty is to be chosen by halves of the training prompts, and there is one prompt."""
    prompts = {
        prompt
        for run, rows in zip(runs, train, strict=True)
        for prompt, inside in zip(prompts_of_rows(run), rows.tolist(), strict=True)
        if inside
    }
    if len(prompts) < 2:
        logger.warning(
            "%s: there is one training prompt, so that no penalty can be chosen by predicting half of the prompts "
            "from the others: the largest, %g, is taken; give more different prompts, a smaller held_out=%s",
            who,
            max(RIDGES),
            remedy,
        )


def count_prompts(numbers: Sequence[Int[Tensor, "batch"]]) -> int:
    """How many different numbers there are."""
    return len({number for each in numbers for number in each.tolist()})


def split_by_prompt(
    runs: Sequence[DenoisingRun], held_out: float, seed: int, who: str
) -> tuple[list[Bool[Tensor, "batch"]], list[Bool[Tensor, "batch"]], list[Int[Tensor, "batch"]]]:
    """The rows to fit to, the rows to score, and the half (0 or 1) of each row to fit to, run by run.

    Rows of equal prompts are on the same side.

    Args:
        runs: whose rows are split.
        held_out: share of the prompts to score.
        seed: of the split.
        who: the function that asks, for messages.

    Raises:
        ValueError: fewer than two different prompts.
    """
    numbers = prompt_numbers(runs)
    prompts = count_prompts(numbers)
    if prompts < 2:
        raise ValueError(
            f"{who}: {prompts} different prompt; give runs of at least two, so that one can be held out"
        )
    order = torch.randperm(prompts, generator=torch.Generator().manual_seed(seed))
    count = min(max(round(prompts * held_out), 1), prompts - 1)
    place = order.argsort()
    scored, half = place < count, place % 2
    return [~scored[one] for one in numbers], [scored[one] for one in numbers], [half[one] for one in numbers]
