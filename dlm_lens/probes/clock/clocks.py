"""`denoising_clock`: denoising time read linearly from the residual stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.model_names import name_of
from dlm_lens.arguments import (
    WORDS,
    Rule,
    checked_arguments,
    chosen_indices,
    instance,
    is_real,
    is_whole,
    one_of,
    whole,
)
from dlm_lens.attention import HookLike, attention_blocks, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.placement import in_float64
from dlm_lens.printable import shown
from dlm_lens.probes.clock.fitting import (
    ClockSums,
    GroupMeans,
    count_prompts,
    permuted,
    split_by_prompt,
    warn_of_one_prompt,
)
from dlm_lens.probes.clock.readings import BASELINES, ClockReading, empty_reading, joined
from dlm_lens.probes.clock.saved_clocks import read_saved, write_saved
from dlm_lens.probes.clock.states import (
    EMBEDDING,
    POSITIONS,
    QUANTITIES,
    TARGETS,
    StepStates,
    labels_of,
    quantities_of,
    read_states,
)
from dlm_lens.recording.model_identity import weights_digest
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.run_like import RunLike
from dlm_lens.sampling.run_rows import open_and_planned, prompt_numbers
from dlm_lens.shapes import check_shapes

MAX_BYTES = 4 * 2**30
"""Default limit of the memory of the sums."""

Target = Literal["time", "progress"]
"""What the probe predicts: t / T of step t of T, or the share of the row's answer that is decided."""

SHARE = Rule("a share, above 0 and below 1", lambda value: is_real(value) and 0 < value < 1)
PENALTY = Rule("a number above 0", lambda value: is_real(value) and value > 0)


@dataclass(frozen=True, eq=False)
class DenoisingClock(ShowsItself):
    """Linear probes of denoising time, one per class of positions and layer, and their reading of held-out prompts.

    The probe of layer l reads p = w_l x + b_l from a state x. Layer -1 is the stream that enters layer 0, the token
    embeddings; the stream that enters layer l is the output of layer l - 1.

    Args:
        reading: of the held-out prompts, see `ClockReading`; its methods give R^2, errors, nulls and baselines.
        target: "time" or "progress".
        prompts: how many prompts the probes are fitted to.
        weight: w.
        bias: b.
        null_weight: of the same probes fitted to labels that are permuted among the steps of each prompt.
        null_bias: likewise.
        slope: how the mean state moves with the label, cov(x, y) / var(y); a direction to steer along, while w is
            one to read with.
        curve: the mean state in equal bins of the label.
        knots: the mean label in those bins.
        curve_counts: positions in those bins.
        draws: draws from a normal distribution with the states' covariance: directions of natural variation.
        baselines: what the training prompts' labels are by token, position and number of open positions.
        ridge: the penalty of each probe.
        model: name of the model that it was fitted to.
        digest: of that model's weights.

    Raises:
        ValueError: the shapes contradict each other.
    """

    reading: ClockReading
    target: str
    prompts: int
    weight: Float[Tensor, "kind layer d_model"] = field(repr=False)
    bias: Float[Tensor, "kind layer"] = field(repr=False)
    null_weight: Float[Tensor, "shuffle kind layer d_model"] = field(repr=False)
    null_bias: Float[Tensor, "shuffle kind layer"] = field(repr=False)
    slope: Float[Tensor, "kind layer d_model"] = field(repr=False)
    curve: Float[Tensor, "kind layer bin d_model"] = field(repr=False)
    knots: Float[Tensor, "kind bin"] = field(repr=False)
    curve_counts: Float[Tensor, "kind bin"] = field(repr=False)
    draws: Float[Tensor, "kind layer draw d_model"] = field(repr=False)
    baselines: Mapping[str, GroupMeans] = field(repr=False)
    ridge: Float[Tensor, "kind layer"] = field(repr=False)
    model: str = field(repr=False)
    digest: str = field(repr=False)

    def __post_init__(self) -> None:
        shuffles = len(self.reading.shuffled)
        check_shapes(self, kind=len(self.classes), layer=len(self.layers), shuffle=shuffles)

    def __repr__(self) -> str:
        return f"DenoisingClock({self.target}, fitted to {self.prompts} prompts; held out: {self.reading!r})"

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of positions."""
        return self.reading.classes

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, -1 for the token embeddings."""
        return self.reading.layers

    def check(self, model: Any) -> None:
        """Raise unless the clock was fitted to this model.

        Raises:
            ValueError: another model, or other weights.
        """
        digest = weights_digest(model)
        if digest != self.digest or len(attention_blocks(model)) <= max(self.layers):
            raise ValueError(
                f"this clock was fitted to {self.model} (weights {self.digest}), not to {name_of(model)} (weights "
                f"{digest}); fit one with denoising_clock"
            )

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file: probes, curves, baselines and the reading, with the model's digest.

        A missing directory is made.

        Raises:
            OSError: the path is a directory, the disk is full, or takes no files; a file that was there stays as
                it is.
            ValueError: the path is none.
        """
        return write_saved(self, path)

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> "DenoisingClock":
        """Read what `save` wrote.

        Args:
            path: of the file.
            model: whose clock it must be (`check`); None to take that of any.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no clock, damaged, or another model's.
        """
        return read_saved(cls, path, model)

    def table(self) -> pd.DataFrame:
        """`ClockReading.table` of the held-out prompts."""
        return self.reading.table()

    def best_layer(self, name: str = "open") -> int:
        """The layer with the largest R^2 on the held-out prompts.

        Raises:
            ValueError: a class without positions.
        """
        return self.reading.best_layer(name)

    def cosines(self, name: str = "open", of: str = "slope") -> pd.DataFrame:
        """Cosine between the directions of two layers, layer by layer.

        Args:
            name: class of positions.
            of: "slope", the direction along which mean states move, or "weight", that of the probe.

        Raises:
            ValueError: an unknown class or direction.
        """
        if of not in ("slope", "weight"):
            raise ValueError(f"of is {shown(of)}; it must be 'slope' or 'weight'")
        vectors = (self.slope if of == "slope" else self.weight)[self.reading.kind_index(name)]
        unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        return pd.DataFrame((unit @ unit.T).numpy(), index=list(self.layers), columns=list(self.layers))

    def geometry(self, name: str = "open") -> pd.DataFrame:
        """One line per layer: the dimension of the curve of mean states, by a singular value decomposition.

        With singular values s_i of the centred curve [bin, d_model]: `first` is s_1^2 / sum s^2, `dimension` the
        participation ratio (sum s^2)^2 / sum s^4, and `ninety` the number of components with 90% of the sum.
        Sampling noise of the means adds to the dimension. NaN where the states do not move.

        Raises:
            ValueError: a class that the clock does not have.
        """
        kind = self.reading.kind_index(name)
        known = self.curve_counts[kind] > 0
        lines = []
        for place, layer in enumerate(self.layers):
            curve = self.curve[kind, place, known]
            power = torch.linalg.svdvals(curve - curve.mean(0)).square()
            line: dict[str, Any] = {"layer": layer, "first": torch.nan, "dimension": torch.nan, "ninety": 0}
            # Constant states, such as the embedding of [MASK], have no dimension; rounding would give them one.
            if float(power.sum()) > 1e-12 * float(curve.square().sum()):
                share = power / power.sum()
                line |= {"first": float(share[0]), "dimension": float(1 / share.square().sum())}
                line["ninety"] = int((share.cumsum(0) < 0.9 - 1e-12).sum()) + 1
            lines.append(line)
        return pd.DataFrame(lines)

    def subspace(self, name: str, layer: int, dimensions: int) -> Float[Tensor, "dimension d_model"]:
        """An orthonormal basis of the first principal directions of the curve of mean states.

        Raises:
            ValueError: an unknown class or layer, or more dimensions than the curve has.
        """
        kind, place = self.reading.kind_index(name), self.reading.layer_index(layer)
        curve = self.curve[kind, place, self.curve_counts[kind] > 0]
        if not is_whole(dimensions) or not 1 <= dimensions < len(curve):
            raise ValueError(
                f"dimensions is {shown(dimensions)}; the curve of {len(curve)} points has 1 to {len(curve) - 1}"
            )
        basis: Tensor = torch.linalg.svd(curve - curve.mean(0), full_matrices=False).Vh[:dimensions]
        return basis


CLOCK = instance(DenoisingClock, "a DenoisingClock of denoising_clock")


@checked_arguments(
    target=one_of(*TARGETS),
    held_out=SHARE,
    ridge=PENALTY,
    shuffles=whole(0, 64),
    bins=whole(2, 1024),
    seed=whole(0),
)
@torch.no_grad()
@exclusive
def denoising_clock(
    model: Any,
    runs: RunLike | Sequence[RunLike],
    *,
    layers: Sequence[int] | None = None,
    positions: Sequence[str] = POSITIONS,
    target: Target = "time",
    held_out: float = 0.5,
    ridge: float | None = None,
    shuffles: int = 8,
    bins: int = 16,
    hooks: Sequence[HookLike] = (),
    seed: int = 0,
    max_bytes: int = MAX_BYTES,
    progress: bool = False,
) -> DenoisingClock:
    """Fit linear probes of denoising time to some prompts of finished runs, and score them on the others.

    2607.01774 reads denoising progress from the residual stream by linear probes and steers along the mean states
    of the steps. Only its abstract and descriptions by others could be had; the regression (`NormalEquations`), the
    nulls, the baselines and the split are ours.

    Every state of a class of positions is one case, whose label is that of its canvas. One pass over the training
    prompts' canvases adds up float64 sums, a second one over the others' scores the probes: no state is kept.
    Prompts that occur in several rows are held out together. Each pass is the run's own: guidance (the conditional
    half), padding, blocks, caches, prefixes of an AR run.

    Memory: two matrices of d_model^2 numbers of 8 bytes per class of positions and layer.

    Args:
        model: from `dlm_lens.load`, the run's, or its `untrained_twin`.
        runs: from `denoise`; several, such as batches of prompts, in a list.
        layers: whose output to read, negative from the end; None for all. The token embeddings, layer -1 of the
            result, are always read too.
        positions: the classes to read, each with probes of its own: "open", "written" (positions of the answer that
            are decided), "prompt".
        target: "time", t / T of step t of T, or "progress", the share of the answer that is decided.
        held_out: share of the prompts to score the probes on.
        ridge: penalty, in units of the features' variances; None to choose one for each probe among
            `clock.fitting.RIDGES`, by predicting each half of the training prompts from the other; of a single
            training prompt the largest, with a warning.
        shuffles: how many null probes to fit.
        bins: equal bins of the label, for the curve of mean states.
        hooks: interventions under which states are read.
        seed: of the split, the permutations and the intervals.
        max_bytes: limit of the memory of the sums.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model, fewer than two different prompts, an unknown class of positions or
            layer, or runs in which the label is the same everywhere.
        MemoryError: the sums would take more; raised before the first forward pass.
    """
    given = list(runs) if isinstance(runs, Sequence) else [runs]
    stored = [StoredRun(model, run, hooks=hooks) for run in given]
    kinds = _classes(positions)
    blocks = chosen_indices("layer", layers, len(attention_blocks(model)), "denoising_clock: ")
    chosen = (EMBEDDING, *blocks)
    _check_memory(model, len(kinds) * len(chosen), max_bytes)
    train, test, halves = split_by_prompt([one.run for one in stored], held_out, seed, "denoising_clock")
    if ridge is None:
        warn_of_one_prompt([one.run for one in stored], train, "denoising_clock", ", or ridge=")
    labels = [labels_of(one.run, target) for one in stored]
    if len({round(value, 9) for one in labels for value in one[one.isfinite()].tolist()}) < 2:
        raise ValueError("denoising_clock: every canvas has the same label; give runs of at least two steps")
    sums = ClockSums(kinds, chosen, shuffles, bins, _groups(model, stored, len(kinds)))
    for number, (one, rows) in enumerate(zip(stored, train, strict=True)):
        if not bool(rows.any()):
            continue
        targets = torch.stack([labels[number], *permuted(labels[number], shuffles, seed + number)])
        for states in read_states(one, chosen, rows, progress="fitting the clock" * progress):
            sums.add(states, one.run, targets, halves[number])
    empty = _scored_nothing(kinds, chosen, shuffles, sums.lines(stored, labels, train), seed)
    prompts = prompt_numbers([one.run for one in stored])
    fitted = count_prompts([own[rows] for own, rows in zip(prompts, train, strict=True)])
    clock = sums.solved(ridge, seed, empty, target, fitted)
    readings = [
        _score(one, clock, rows, own, seed + 7919 + number, progress)
        for number, (one, rows, own) in enumerate(zip(stored, test, prompts, strict=True))
        if bool(rows.any())
    ]
    return replace(clock, reading=joined(readings), model=name_of(model), digest=weights_digest(model))


@checked_arguments(clock=CLOCK)
@torch.no_grad()
@exclusive
def read_clock(
    model: Any,
    runs: RunLike | Sequence[RunLike],
    clock: DenoisingClock,
    *,
    hooks: Sequence[HookLike] = (),
    progress: bool = False,
) -> ClockReading:
    """Read a fitted clock on other runs: other prompts, another number of steps, or under hooks.

    Args:
        model: the clock's.
        runs: from `denoise`; several in a list.
        clock: from `denoising_clock`.
        hooks: interventions under which states are read.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model, or a clock of a model of another width or of fewer tokens.
    """
    tokens, width = model.get_input_embeddings().weight.shape
    known = clock.baselines["token"].sums.shape[1]
    if clock.weight.shape[-1] != width or tokens > known:
        raise ValueError(
            f"read_clock: the clock reads states of {clock.weight.shape[-1]} features and {known} tokens, the "
            f"model has {width} and {tokens}; fit one with denoising_clock"
        )
    given = list(runs) if isinstance(runs, Sequence) else [runs]
    stored = [StoredRun(model, run, hooks=hooks) for run in given]
    readings = []
    for number, (one, prompts) in enumerate(zip(stored, prompt_numbers([one.run for one in stored]), strict=True)):
        rows = torch.ones(len(one.run.tokens), dtype=torch.bool)
        readings.append(_score(one, clock, rows, prompts, clock.reading.seed + 7919 + number, progress))
    return joined(readings)


def _classes(positions: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(positions, str):
        WORDS.check("positions", positions)
    given = (positions,) if isinstance(positions, str) else tuple(positions)
    for name in given:
        if name not in POSITIONS:
            raise ValueError(f"positions has {shown(name)}; the classes are {', '.join(POSITIONS)}")
    if not given:
        raise ValueError("positions is empty; give at least one class")
    return tuple(name for name in POSITIONS if name in given)


def _check_memory(model: Any, probes: int, limit: int) -> None:
    width = int(model.get_input_embeddings().weight.shape[-1])
    needed = 2 * probes * width**2 * 8
    if needed > limit:
        raise MemoryError(
            f"denoising_clock: the sums would take {needed / 1e9:.3g} GB ({probes} probes of {width} features), "
            f"and {limit / 1e9:.3g} GB are allowed; give fewer layers= or positions=, or a larger max_bytes="
        )


def _groups(model: Any, stored: Sequence[StoredRun], kinds: int) -> dict[str, GroupMeans]:
    longest = max(one.run.tokens.shape[1] for one in stored)
    opened = max(longest, *(int(open_and_planned(one.run, one.run.answer)[1].max()) for one in stored))
    tokens = int(model.get_input_embeddings().weight.shape[0])
    sizes = dict(zip(BASELINES, (tokens, 2 * longest + 1, opened + 1), strict=True))
    return {name: GroupMeans.empty(kinds, size, longest) for name, size in sizes.items()}


def _scored_nothing(
    kinds: tuple[str, ...],
    layers: tuple[int, ...],
    shuffles: int,
    lines: Mapping[str, tuple[float, float]],
    seed: int,
) -> ClockReading:
    """A reading of no prompt, which holds what readings share."""
    return empty_reading(
        kinds, layers, torch.zeros(0, 0), torch.zeros(len(QUANTITIES), 0, 0), shuffles, lines, seed
    )


def _score(
    stored: StoredRun,
    clock: DenoisingClock,
    rows: Bool[Tensor, "batch"],
    prompts: Int[Tensor, "batch"],
    seed: int,
    progress: bool,
) -> ClockReading:
    """The reading of some rows of a run, with the number of each row's prompt; the others are left out of it."""
    run = stored.run
    label = labels_of(run, clock.target)
    shuffled = permuted(label, len(clock.null_weight), seed)
    found = empty_reading(
        clock.classes, clock.layers, label, quantities_of(run), len(clock.null_weight), clock.reading.lines,
        clock.reading.seed, run.steps_in_all,
    )  # fmt: skip
    for states in read_states(stored, clock.layers, rows, progress="reading the clock" * progress):
        for kind, name in enumerate(clock.classes):
            where = (states.kind == POSITIONS.index(name)).nonzero().flatten()
            if len(where):
                _add(found, clock, states, where, kind, run, torch.stack([label, *shuffled]))
    kept = rows.nonzero().flatten()
    parts = {name: getattr(found, name)[..., kept] for name in ("label", "quantities", "steps", "count", "read")}
    parts |= {name: getattr(found, name)[..., kept] for name in ("square", "absolute", "baseline")}
    parts |= {name: getattr(found, name)[..., kept, :] for name in ("across", "shuffled")}
    parts["prompt"] = prompts[kept]
    return ClockReading(classes=found.classes, layers=found.layers, lines=found.lines, seed=found.seed, **parts)


def _add(
    found: ClockReading,
    clock: DenoisingClock,
    states: StepStates,
    where: Tensor,
    kind: int,
    run: DenoisingRun,
    targets: Float[Tensor, "target step batch"],
) -> None:
    """Add the states of a class at a step to the sums of a reading."""
    step, row = states.step, states.row[where]
    label = targets[0, step, row]
    found.count[kind, step].index_add_(0, row, torch.ones_like(label))
    for number, name in enumerate(BASELINES):
        guess = clock.baselines[name].predict(kind, name, states, where, run)
        found.baseline[number, kind].index_add_(0, row, (guess - label).square())
    for place, layer in enumerate(clock.layers):
        stream = states.streams[layer]
        x = in_float64(stream[where.to(stream.device)])
        weight = torch.cat([clock.weight[kind], clock.null_weight[:, kind, place]]).to(x.device)
        bias = torch.cat([clock.bias[kind], clock.null_bias[:, kind, place]]).to(x.device)
        every = (x @ weight.T + bias).cpu()
        probes, nulls = every[:, : len(clock.layers)], every[:, len(clock.layers) :]
        own = probes[:, place]
        found.read[kind, place, step].index_add_(0, row, own)
        found.square[kind, place, step].index_add_(0, row, own.square())
        found.absolute[kind, place, step].index_add_(0, row, (own - label).abs())
        across = torch.stack([probes, probes.square(), probes * label[:, None]], -1)
        found.across[kind, :, place].index_add_(1, row, across.transpose(0, 1))
        z = targets[1:, step, row]
        null = torch.stack([(nulls.T - z).square(), z, z.square()], -1)
        found.shuffled[:, kind, place].index_add_(1, row, null)
