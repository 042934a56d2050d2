"""`linear_probe`: are labels of one's own readable from the residual stream, at which step and layer?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import checked_arguments, chosen_indices, one_of, place_of_layer, whole
from dlm_lens.attention import HookLike, attention_blocks, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.placement import in_float64
from dlm_lens.printable import shown
from dlm_lens.probes.clock.fitting import RIDGES, split_by_prompt, warn_of_one_prompt
from dlm_lens.probes.clock.states import POSITIONS, kinds_of, read_states
from dlm_lens.probes.normal_equations import NormalEquations, best_ridges
from dlm_lens.probes.remasking import SHARE
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import on_canvases
from dlm_lens.sampling.prompt_positions import of_whole_run
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import CORRELATION_BOUNDS, SHARE_BOUNDS, Bounds, Estimate, estimate_mean

MOST_TARGETS = 4096
"""Of a regression: the classes of the labels and of all shuffled ones."""

Labels = Int[Tensor, "step batch position"]


class ProbeReadings(ShowsItself):
    """Accuracies of what probes of layers read at positions of a run, and of their nulls."""

    compared: ClassVar[tuple[str, ...]]
    """What is compared with the labels, the probe first."""
    layers: tuple[int, ...]
    seed: int

    def accuracy(self, layer: int, of: str | None = None, step: int | None = None) -> Estimate:
        """The share of positions, over all steps or at one, of which something is right; over held-out prompts.

        Args:
            layer: whose probe.
            of: one of `compared`; None for the probe.
            step: of the run, negative from the end; None for all.

        Raises:
            ValueError: a layer that was not read, another `of`, or a step that the run does not have.
        """
        return self._mean(self._right(layer, of or self.compared[0]), step, "accuracy: ", SHARE_BOUNDS)

    def by_step(self, layer: int) -> pd.DataFrame:
        """One line per step with positions to read, by its number in the whole run: the accuracies of a layer."""
        lines = []
        for step, count in enumerate(self._counted.sum((1, 2)).tolist()):
            if count:
                line: dict[str, Any] = {"step": step, "positions": count}
                for name in self.compared:
                    line |= self.accuracy(layer, name, step).columns(name)
                lines.append(line)
        return of_whole_run(pd.DataFrame(lines), self._run, ())

    def _mean(
        self, values: Float[Tensor, "step batch position"], step: int | None, who: str, bounds: Bounds
    ) -> Estimate:
        counted = self._counted
        if step is not None:
            at = list(chosen_indices("step", [step], len(counted), who))
            values, counted = values[at], counted[at]
        return self._over_prompts(values[counted], counted.nonzero()[:, 1], bounds)

    def _over_prompts(self, values: Tensor, rows: Tensor, bounds: Bounds | None = None) -> Estimate:
        prompt = self._run.row_prompts
        return estimate_mean(values.numpy(), prompt[rows].numpy(), len(prompt), bounds=bounds, seed=self.seed)

    def _checked(self, of: str) -> str:
        if of not in self.compared:
            raise ValueError(f"of is {shown(of)}; it must be {', '.join(self.compared)}")
        return of

    @property
    def _run(self) -> DenoisingRun:
        raise NotImplementedError

    @property
    def _counted(self) -> Bool[Tensor, "step batch position"]:
        raise NotImplementedError

    def _right(self, layer: int, of: str) -> Float[Tensor, "step batch position"]:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class LinearProbe(ProbeReadings):
    """What linear probes of the residual stream read about labels, at one class of positions, in held-out prompts.

    A probe is a ridge regression of the indicators of the classes on the states of one layer at these positions of
    all steps; it reads the class with the largest value, argmax_c w_c h + b_c. Compared with the labels are the
    "probe", "place", the most frequent label at the position, and "token", the most frequent one beside the token
    that the position holds; "shuffled" is the mean over probes that are fitted to labels in another order, and
    scored on these.

    Args:
        run: whose canvases were read.
        layers: whose outputs were read.
        names: of the classes.
        positions: the class of positions.
        held_out: the rows that were not fitted.
        wanted: the label of each position that is read; -1 elsewhere.
        read: the class that each layer's probe reads; -1 elsewhere.
        shuffled: the share of probes of shuffled labels that read the position's shuffled label.
        draws: the accuracy of each of these probes over all positions.
        place: the most frequent label of the fitted rows at the same canvas position; -1 if they have none.
        token: the most frequent label of the fitted states whose position holds the same token; if there is none,
            of all of them.
        weight: w of every layer and class, for states as the layer returns them.
        bias: b.
        seed: of the split, the permutation and the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    compared: ClassVar[tuple[str, ...]] = ("probe", "shuffled", "place", "token")

    run: DenoisingRun = field(repr=False)
    layers: tuple[int, ...]
    names: tuple[str, ...]
    positions: str
    held_out: Bool[Tensor, "batch"]
    wanted: Int[Tensor, "step batch position"]
    read: Int[Tensor, "layer step batch position"]
    shuffled: Float[Tensor, "layer step batch position"]
    draws: Float[Tensor, "shuffle layer"]
    place: Int[Tensor, "step batch position"]
    token: Int[Tensor, "step batch position"]
    weight: Float[Tensor, "layer class d_model"]
    bias: Float[Tensor, "layer class"]
    seed: int = 0

    def __post_init__(self) -> None:
        steps, batch, positions = self.run.unmasked.shape
        sizes = {"layer": len(self.layers), "class": len(self.names)}
        check_shapes(self, step=steps, batch=batch, position=positions, **sizes)

    def __repr__(self) -> str:
        layer = self.layers[-1]
        known, shuffled = self.accuracy(layer), self.accuracy(layer, "shuffled")
        return f"LinearProbe({len(self.names)} classes; layer {layer}: {known}, shuffled labels {shuffled})"

    def gain(self, layer: int, over: str = "shuffled", step: int | None = None) -> Estimate:
        """The accuracy of the probe less that of a null, paired by position; arguments as for `accuracy`."""
        difference = self._right(layer, "probe") - self._right(layer, over)
        return self._mean(difference, step, "gain: ", CORRELATION_BOUNDS)

    def p_value(self, layer: int | None = None) -> float:
        """(1 + k) / (1 + n), where k of n probes of shuffled labels are right at as many positions or more.

        Without a layer the best layer of the probe is compared with the best one of each shuffle.
        """
        chosen = self.layers if layer is None else (layer,)
        own = max(self.accuracy(one).value for one in chosen)
        draws = self.draws[:, [place_of_layer(one, self.layers) for one in chosen]].amax(1)
        return (1 + int((draws >= own - 1e-9).sum())) / (1 + len(draws))

    def table(self) -> pd.DataFrame:
        """One line per layer: the accuracies, the gain over each null, and `p_value`."""
        lines = []
        for layer in self.layers:
            line: dict[str, Any] = {"layer": layer}
            for name in self.compared:
                line |= self.accuracy(layer, name).columns(name)
            for name in self.compared[1:]:
                line |= self.gain(layer, name).columns(f"over_{name}")
            lines.append(line | {"p": self.p_value(layer)})
        return pd.DataFrame(lines)

    @property
    def _run(self) -> DenoisingRun:
        return self.run

    @property
    def _counted(self) -> Bool[Tensor, "step batch position"]:
        return self.wanted >= 0

    def _right(self, layer: int, of: str) -> Float[Tensor, "step batch position"]:
        index = place_of_layer(layer, self.layers)
        if self._checked(of) == "shuffled":
            return self.shuffled[index].double()
        found = {"probe": self.read[index], "place": self.place, "token": self.token}[of]
        return (found == self.wanted).double()


@checked_arguments(held_out=SHARE, seed=whole(least=0), shuffles=whole(least=1), positions=one_of(*POSITIONS))
@torch.no_grad()
@exclusive
def linear_probe(
    model: Any,
    run: RunLike,
    labels: Int[Tensor, "batch"] | Int[Tensor, "batch position"] | Sequence[int] | Any,
    *,
    names: Sequence[str] | None = None,
    positions: Literal["open", "written", "prompt"] = "open",
    layers: Sequence[int] | None = None,
    held_out: float = 0.5,
    shuffles: int = 20,
    hooks: Sequence[HookLike] = (),
    seed: int = 0,
    progress: bool = False,
) -> LinearProbe:
    """Fit probes of labels to some prompts of a run, and read the labels at the same positions of the others.

    Two passes over the canvases, one to fit and one to read; float64 sums of d_model^2 numbers per layer are kept,
    no state is. The penalty is chosen by predicting each half of the fitted prompts from the other.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, or a recording; many prompts in one batch.
        labels: a class of every row [batch] (is its answer right?), or of every canvas position [batch, position]
            (what stands there in the end?), as whole numbers from 0 or truth values; -1 leaves a row or position
            out. Labels of positions stay with their tokens where a sampler moves these.
        names: of the classes; None for their numbers.
        positions: where states are read: "open" positions, "written" ones of the answer, or the "prompt".
        layers: whose output to read, negative from the end; None for all.
        held_out: share of the prompts to read.
        shuffles: how many times the labels are put in another order, as a null: of the prompts, or of the
            positions in each row.
        hooks: interventions under which states are read.
        seed: of the split, the permutation and the intervals.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: labels of another shape or kind, or of fewer than two classes; a run of another model, or with
            fewer than two different prompts; an unknown layer; no position to fit or to read.
    """
    run = as_run(run)
    stored = StoredRun(model, run, hooks=hooks)
    chosen = chosen_indices("layer", layers, len(attention_blocks(model)), "linear_probe: ")
    given = _checked(labels, run)
    classes = _names(names, given, shuffles)
    (train,), (test,), (half,) = split_by_prompt([run], held_out, seed, "linear_probe")
    of_rows = given.ndim == 1
    every = given[:, None].expand_as(run.tokens) if of_rows else given

    def on_steps(values: Int[Tensor, "batch position"]) -> Labels:
        return values.expand(run.unmasked.shape) if of_rows else on_canvases(run, values, -1)

    wanted, where = on_steps(every), POSITIONS.index(positions)
    there = _labelled(stored, wanted, where, {"fitted": train, "held-out": test})
    warn_of_one_prompt([run], [train], "linear_probe")
    draw = torch.Generator().manual_seed(seed)
    others = [
        of_other_prompts(given, run, draw)[:, None].expand_as(every) if of_rows else permuted(given, draw)
        for _ in range(shuffles)
    ]
    targets = torch.stack([one.short() for one in (wanted, *map(on_steps, others))])
    fits = fit(stored, chosen, train, half, targets, len(classes), where, "fitting" * progress)
    wanted = wanted.masked_fill(~(there & test[:, None]), -1)
    targets = targets.masked_fill(wanted < 0, -1)
    read, shuffled, draws = _read(stored, chosen, test, fits, targets, where, "reading" * progress)
    return LinearProbe(
        run=run,
        layers=chosen,
        names=classes,
        positions=positions,
        held_out=test,
        wanted=wanted,
        read=read,
        shuffled=shuffled,
        draws=draws,
        place=on_steps(by_place(every, train, len(classes))),
        token=_by_token(run, on_steps(every), fits.states),
        weight=torch.stack([fits.weight[layer][0].cpu() for layer in chosen]),
        bias=torch.stack([fits.bias[layer][0].cpu() for layer in chosen]),
        seed=seed,
    )


def _labelled(
    stored: StoredRun, labels: Labels, where: int, parts: Mapping[str, Bool[Tensor, "batch"]]
) -> Bool[Tensor, "step batch position"]:
    """The positions of a class that a step computes and that have a label.

    Raises:
        ValueError: a part of the rows has none; names the classes at which it has some.
    """
    run = stored.run
    kinds = torch.stack([kinds_of(run, step).masked_fill(~stored.computes(step), -1) for step in range(run.steps)])
    kinds = kinds.masked_fill(~run.attention_mask | (labels < 0), -1)
    for name, rows in parts.items():
        have = [repr(one) for kind, one in enumerate(POSITIONS) if bool((kinds[:, rows] == kind).any())]
        if (wanted := repr(POSITIONS[where])) not in have:
            raise ValueError(
                f"linear_probe: no {name} prompt has a label at the positions {wanted}; there are some at "
                f"{', '.join(have) or 'none of the positions that its steps compute'}"
            )
    return kinds == where


def _read(
    stored: StoredRun,
    layers: Sequence[int],
    rows: Bool[Tensor, "batch"],
    fits: "Fits",
    labels: Int[Tensor, "kind step batch position"],
    where: int,
    progress: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`LinearProbe.read`, `shuffled` and `draws`; each probe is compared with the labels of its own kind."""
    read = torch.full((len(layers), *labels.shape[1:]), -1, dtype=torch.int16)
    shuffled = torch.zeros(read.shape)
    right: Tensor = torch.zeros((), dtype=torch.float64)
    for step, row, position, found in read_classes(stored, layers, rows, fits, where, progress):
        label = labels[:, None, step, row, position]
        read[:, step, row, position] = found[0].short().masked_fill(label[0] < 0, -1)
        matches = (found[1:] == label[1:]).float()
        shuffled[:, step, row, position] = matches.mean(0)
        right = right + matches.sum(-1)
    return read, shuffled, right / int((labels[0] >= 0).sum())


class Fits(NamedTuple):
    """Solved regressions: layer -> w and b of each kind of labels and class, and which states were fitted."""

    weight: Mapping[int, Float[Tensor, "kind class d_model"]]
    bias: Mapping[int, Float[Tensor, "kind class"]]
    states: Bool[Tensor, "step batch position"]


def fit(
    stored: StoredRun,
    layers: Sequence[int],
    train: Bool[Tensor, "batch"],
    half: Int[Tensor, "batch"],
    labels: Int[Tensor, "kind step batch position"],
    classes: int,
    where: int,
    progress: str,
) -> Fits:
    """Regressions of several kinds of labels on the states of some rows, at one class of positions.

    The values of a position's classes sum to 1, and that of a class that no fitted position has is 0: it is never
    the largest. Of each kind the penalty is that with which half of the rows predicts the other half's labels best.

    Args:
        stored: the run.
        layers: whose outputs are read.
        train: the rows to fit to.
        half: the half of them, 0 or 1, of each row.
        labels: on the canvas of every step, -1 for none; all kinds have labels at the same positions.
        classes: how many.
        where: the class of positions, an index of `POSITIONS`.
        progress: what a progress bar calls it; empty for none.
    """
    sums: dict[int, tuple[NormalEquations, NormalEquations]] = {}
    fitted = torch.zeros(labels.shape[1:], dtype=torch.bool)
    for states in read_states(stored, layers, train, progress=progress):
        known = labels[0, states.step, states.row, states.position] >= 0
        chosen = ((states.kind == where) & known).nonzero().flatten()
        row, position = states.row[chosen], states.position[chosen]
        fitted[states.step, row, position] = True
        y = torch.nn.functional.one_hot(labels[:, states.step, row, position].T.long(), classes).flatten(1).double()
        for layer in layers:
            stream = states.streams[layer]
            if layer not in sums:
                one, other = (NormalEquations(stream.shape[-1], y.shape[-1], stream.device) for _ in range(2))
                sums[layer] = one, other
            x = in_float64(stream[chosen.to(stream.device)])
            for number, equations in enumerate(sums[layer]):
                inside = half[row] == number
                equations.add(x[inside.to(x.device)], y[inside])
    weight, bias = {}, {}
    for layer, (one, other) in sums.items():
        ridges, both = best_ridges((one, other), RIDGES, classes), one + other
        solved = {ridge: both.solve(ridge) for ridge in {*ridges}}
        weight[layer], bias[layer] = (
            torch.stack(
                [solved[ridge][part].unflatten(0, (-1, classes))[kind] for kind, ridge in enumerate(ridges)]
            )
            for part in range(2)
        )
    return Fits(weight, bias, fitted)


def read_classes(
    stored: StoredRun, layers: Sequence[int], rows: Bool[Tensor, "batch"], fits: Fits, where: int, progress: str
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """The classes with the largest values at one class of positions of some rows; arguments as for `fit`.

    Yields:
        Of every step its index, the rows and positions of the states, and the classes [kind, layer, state].
    """
    for states in read_states(stored, layers, rows, progress=progress):
        chosen = (states.kind == where).nonzero().flatten()
        found = []
        for layer in layers:
            weight, bias = fits.weight[layer], fits.bias[layer]
            x = in_float64(states.streams[layer][chosen.to(weight.device)])
            values = x @ weight.flatten(0, 1).T + bias.flatten()
            found.append(values.unflatten(-1, bias.shape).argmax(-1).T.cpu())
        yield states.step, states.row[chosen], states.position[chosen], torch.stack(found, 1)


def permuted(labels: Int[Tensor, "batch position"], generator: torch.Generator) -> Int[Tensor, "batch position"]:
    """The labels of every row's positions in another order, once for the whole run."""
    found = labels.clone()
    for row in range(len(labels)):
        there = (labels[row] >= 0).nonzero().flatten()
        found[row, there] = labels[row, there[torch.randperm(len(there), generator=generator)]]
    return found


def of_other_prompts(
    labels: Int[Tensor, "batch"], run: DenoisingRun, generator: torch.Generator
) -> Int[Tensor, "batch"]:
    """The labels of the prompts in another order; rows of one prompt get those of one.

    Rows without a label keep none, and give none.
    """
    found, prompts = labels.clone(), run.row_prompts.masked_fill(labels < 0, -1)
    rows = [(prompts == one).nonzero().flatten() for one in prompts.unique() if one >= 0]
    order = torch.randperm(len(rows), generator=generator).tolist()
    for own, other in zip(rows, order, strict=True):
        found[own] = labels[rows[other][torch.arange(len(own)) % len(rows[other])]]
    return found


def by_place(
    labels: Int[Tensor, "batch position"], train: Bool[Tensor, "batch"], classes: int
) -> Int[Tensor, "batch position"]:
    """The most frequent label of the fitted rows at each position; -1 where they have none."""
    counts = torch.zeros(labels.shape[1], classes, dtype=torch.long)
    for row in labels[train]:
        there = (row >= 0).nonzero().flatten()
        counts[there, row[there]] += 1
    best = counts.argmax(-1).masked_fill(counts.sum(-1) == 0, -1)
    return best.expand_as(labels).clone()


def _by_token(run: DenoisingRun, labels: Labels, fitted: Bool[Tensor, "step batch position"]) -> Labels:
    """The most frequent label of the fitted states that hold the token of each position; of all, if none does."""
    tokens = run.canvases[:-1]
    seen = pd.DataFrame({"token": tokens[fitted].numpy(), "label": labels[fitted].numpy()})
    most = seen.value_counts().reset_index().drop_duplicates("token").set_index("token")["label"]
    usual = int(seen["label"].mode()[0])
    found = most.reindex(tokens.flatten().numpy()).fillna(usual).to_numpy(dtype=np.int64)
    return torch.from_numpy(found).view_as(tokens)


def _checked(labels: Any, run: DenoisingRun) -> Int[Tensor, "batch"] | Int[Tensor, "batch position"]:
    """Labels as whole numbers.

    Raises:
        ValueError: another shape or kind, or fewer than two classes.
    """
    rows, positions = run.tokens.shape
    try:
        found = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if list(found.shape) not in ([rows], [rows, positions]) or found.is_floating_point() or found.is_complex():
        given = f"{found.dtype} of shape {list(found.shape)}" if isinstance(labels, Tensor) else shown(labels)
        raise ValueError(
            f"labels is {given}; it must be whole numbers or truth values of rows, of shape [{rows}], or of "
            f"canvas positions, of shape [{rows}, {positions}]"
        )
    found = found.long()
    seen = found[found >= 0].unique()
    if len(seen) < 2 or int(found.min()) < -1 or int(seen.max()) >= MOST_TARGETS:
        raise ValueError(
            f"labels has the values {shown(found.unique().tolist())}; it must have at least two classes, numbered "
            "from 0, and -1 where there is no label"
        )
    return found


def _names(names: Sequence[str] | None, labels: Tensor, shuffles: int) -> tuple[str, ...]:
    """The names of the classes.

    Raises:
        ValueError: too few of them, or more targets of the regression than are possible.
    """
    count = int(labels.max()) + 1
    if (targets := count * (1 + shuffles)) > MOST_TARGETS:
        raise ValueError(
            f"linear_probe: {count} classes and {shuffles} shuffles are {targets} targets; give fewer, for at most "
            f"{MOST_TARGETS}"
        )
    if names is None:
        return tuple(map(str, range(count)))
    if isinstance(names, str) or len(names) < count:
        raise ValueError(f"names is {shown(names)}; it must be a list of names of the classes 0 to {count - 1}")
    return tuple(map(str, names))
