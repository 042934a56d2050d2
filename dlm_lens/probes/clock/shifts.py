"""`shift_clock` moves states along a model's clock; `clock_steering` measures what that does to its predictions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import FINITE, checked_arguments, is_real, is_whole, one_of, plain_number, whole
from dlm_lens.attention import Hook, SinkLayout, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.hooks import SteerAlong, at_layers
from dlm_lens.placement import in_float64
from dlm_lens.printable import shown
from dlm_lens.probes.clock.clocks import CLOCK, DenoisingClock
from dlm_lens.probes.clock.states import EMBEDDING
from dlm_lens.probes.residual_reader import ResidualReader, reading
from dlm_lens.probes.unembedding import kl_divergence, positions_at_once, without_mask
from dlm_lens.sampling import StoredRun
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import Estimate, estimate, mean_of, summed

Along = Literal["means", "slope", "readout"]
"""The direction of a shift: the curve of mean states, its straight line, or the probe's own direction."""

Direction = Literal["clock", "random", "orthogonal"]
"""The clock's direction, or a control of the same length."""

MEASURES = ("confidence", "entropy", "kl", "flipped", "read")
"""Changes of the largest probability and of the entropy (nats), KL(plain || steered) (nats), changed predictions,
and the change of the time read in the last layer."""

FAR = 4.0
"""The straight line is defined from -FAR to 1 + FAR, so that a shift is never cut."""


@dataclass(frozen=True, eq=False)
class _Redirected(SteerAlong):
    """A shift of the same length in another direction, at every place of the axis: a control."""

    direction: Float[Tensor, "d_model"] = field(default_factory=lambda: torch.ones(1))

    def added(self, places: Float[Tensor, "row"]) -> Float[Tensor, "row d_model"]:
        """The length of the shift times the direction."""
        unit = self.direction.double().cpu() / self.direction.double().norm().cpu()
        return super().added(places).norm(dim=-1, keepdim=True) * unit


@checked_arguments(clock=CLOCK)
def shift_clock(
    clock: DenoisingClock, by: float, *, layer: int | None = None, along: Along = "means", positions: str = "open"
) -> Hook:
    """A hook that shifts the time of a model's states in one layer: h + mu(t + by) - mu(t) at the row's time t.

    mu are the mean states that the clock found, straight between their bins ("means": 2607.01774 as others describe
    it, h + mu(t') - mu(t) at the open positions). "slope" takes their straight line, cov(x, t) / var(t) * by, also
    beyond the ends of the run; "readout" the shortest shift that moves the reading of this layer's probe by exactly
    `by`, w by / |w|^2. The time is what the clock's `target` is: t / T, or the decided share of the row's answer.

    Args:
        clock: from `denoising_clock`.
        by: how far, on the target's scale of 0 to 1; negative for back.
        layer: whose output is shifted, from 0; None for the clock's best layer at these positions, 0 if that is the
            embedding.
        along: "means", "slope" or "readout".
        positions: the class of positions that is shifted, by that class's states: "open" or "prompt".

    Raises:
        ValueError: a class or layer that the clock does not have, an unknown direction, or a constant curve.
    """
    chosen = _layer(clock, layer, positions)
    return at_layers(_shift(clock, by, chosen, along, positions), [chosen])


def _layer(clock: DenoisingClock, layer: int | None, positions: str) -> int:
    known = [one for one in clock.layers if one != EMBEDDING]
    if layer is None:
        return max(clock.best_layer(positions), known[0])
    if not is_whole(layer) or layer not in known:
        raise ValueError(f"layer {shown(layer)} cannot be shifted; the clock has {', '.join(map(str, known))}")
    return layer


def _shift(clock: DenoisingClock, by: float, layer: int, along: Along, positions: str) -> SteerAlong:
    if along not in get_args(Along):
        raise ValueError(f"along is {shown(along)}; it must be 'means', 'slope' or 'readout'")
    if not is_real(by):
        raise ValueError(f"by is {shown(by)}; it must be {FINITE}")
    if positions not in ("open", "prompt"):
        raise ValueError(f"positions is {shown(positions)}; a hook acts on 'open' or 'prompt' ones")
    kind, place = clock.reading.kind_index(positions), clock.reading.layer_index(layer)
    if along == "means":
        known = clock.curve_counts[kind] > 0
        curve, knots = clock.curve[kind, place, known], clock.knots[kind, known]
    else:
        weight = clock.weight[kind, place]
        step = clock.slope[kind, place] if along == "slope" else weight / weight.square().sum().clamp(min=1e-30)
        knots = torch.tensor([-FAR, 1 + FAR], dtype=torch.float64)
        curve = knots[:, None] * step
    if float((curve - curve.mean(0)).norm()) == 0:
        raise ValueError(f"the clock's states at {positions} positions of layer {layer} do not move with time")
    over: Any = clock.target
    where: Any = positions
    return SteerAlong(curve, tuple(knots.tolist()), float(by), over, "resid", where)


@dataclass(frozen=True, eq=False)
class ClockSteering(ShowsItself):
    """What a shift of the clock does to the predictions at open positions, beside shifts of the same length.

    Args:
        layer: whose output was shifted.
        along: "means", "slope" or "readout".
        by: the shift of each variant.
        direction: its direction, "clock", "random" or "orthogonal".
        sums: of the changes (`MEASURES`) over the predicted positions of a row, all steps.
        count: predicted positions of a row.
        prompt: the number of each row's prompt; equal prompts have one number.
        seed: of directions and intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    layer: int
    along: str
    by: tuple[float, ...]
    direction: tuple[str, ...]
    sums: Float[Tensor, "variant batch measure"] = field(repr=False)
    count: Float[Tensor, "batch"] = field(repr=False)
    prompt: Int[Tensor, "batch"] = field(repr=False)
    seed: int = 0

    def __post_init__(self) -> None:
        check_shapes(self, variant=len(self.by), measure=len(MEASURES))

    def __repr__(self) -> str:
        parts = []
        for by in dict.fromkeys(self.by):
            sure, entropy = (self.change(by, name) for name in ("confidence", "entropy"))
            parts.append(f"by {by:+g}: confidence {sure}, entropy {entropy} nats")
        return f"ClockSteering(layer {self.layer}; {'; '.join(parts)})"

    def change(self, by: float, measure: str, direction: Direction = "clock") -> Estimate:
        """The mean change over predicted positions, controls averaged; the interval is over prompts.

        Raises:
            ValueError: an unknown shift, measure or direction.
        """
        return self._mean(*self.row_sums(by, measure, direction))

    def beyond(self, by: float, measure: str, direction: Direction) -> Estimate:
        """The change along the clock minus that along the mean control, on the same predictions.

        Raises:
            ValueError: an unknown shift, measure or direction.
        """
        (one, count), (other, _) = (self.row_sums(by, measure, each) for each in ("clock", direction))
        return self._mean(one - other, count)

    def rank(self, by: float, measure: str, direction: Direction) -> tuple[int, int]:
        """How many controls change the measure at least as much as the clock, in absolute size, of how many.

        Raises:
            ValueError: an unknown shift, measure or direction.
        """
        own = float(self.row_sums(by, measure, "clock")[0].sum().abs())
        place = MEASURES.index(measure)
        found = [float(self.sums[i, :, place].sum().abs()) for i in self._variants(by, direction)]
        return sum(value >= own for value in found), len(found)

    def table(self) -> pd.DataFrame:
        """One line per shift and direction: mean changes with intervals over prompts; controls are averaged."""
        lines = []
        for by in dict.fromkeys(self.by):
            for direction in get_args(Direction):
                if direction not in self.direction:
                    continue
                line: dict[str, Any] = {"by": by, "direction": direction}
                for measure in MEASURES:
                    line |= self.change(by, measure, direction).columns(measure)
                lines.append(line)
        return pd.DataFrame(lines)

    def _mean(self, total: Float[Tensor, "batch"], count: Float[Tensor, "batch"]) -> Estimate:
        """A mean of sums over rows; the interval is over prompts, each with all of its rows."""
        of_prompts = summed(torch.stack([total, count], -1), self.prompt, len(self.prompt))
        return estimate(of_prompts, mean_of, seed=self.seed)

    def _variants(self, by: float, direction: str) -> list[int]:
        pairs = enumerate(zip(self.by, self.direction, strict=True))
        found = [i for i, (one, kind) in pairs if one == by and kind == direction]
        if not found:
            raise ValueError(f"no shift by {shown(by)} along {shown(direction)} was measured")
        return found

    def row_sums(
        self, by: float, measure: str, direction: str
    ) -> tuple[Float[Tensor, "batch"], Float[Tensor, "batch"]]:
        """The sum of the changes of every row, controls averaged, and how many predictions it has.

        Raises:
            ValueError: an unknown shift, measure or direction.
        """
        if measure not in MEASURES:
            raise ValueError(f"measure is {shown(measure)}; it must be one of {', '.join(MEASURES)}")
        chosen = self._variants(by, direction)
        return self.sums[chosen, :, MEASURES.index(measure)].mean(0), self.count


@checked_arguments(clock=CLOCK, along=one_of(*get_args(Along)), controls=whole(0, 64), seed=whole(0))
@torch.no_grad()
@exclusive
def clock_steering(
    model: Any,
    run: RunLike,
    clock: DenoisingClock,
    *,
    by: Sequence[float] = (-0.25, 0.25),
    layer: int | None = None,
    along: Along = "means",
    controls: int = 4,
    dimensions: int = 3,
    seed: int = 0,
    progress: bool = False,
) -> ClockSteering:
    """Shift the clock at the open positions of a run's canvases, and compare the predictions with those without.

    The canvases are the stored ones, so that step t shows the effect of a shift at step t alone. Each control has
    at every step the length of the clock's shift. "random" directions are uniform. "orthogonal" ones are drawn with
    the states' own covariance, and their parts along the probe and the first `dimensions` principal directions of
    the mean states are removed: they vary as states do, and say nothing about time.

    Args:
        model: from `dlm_lens.load`, the clock's and the run's.
        run: from `denoise`; not the prompts that the clock was fitted to.
        clock: from `denoising_clock`, with the class "open".
        by: the shifts, on the target's scale.
        layer: whose output is shifted; None for the best layer of the clock.
        along: as of `shift_clock`.
        controls: directions of each kind, at most `clock.fitting.DRAWS`.
        dimensions: of the subspace of time that "orthogonal" directions avoid.
        seed: of the directions and the intervals.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model, an AR run, a clock without open positions, no shift, or as
            `shift_clock`.
    """
    run = as_run(run)
    stored = StoredRun(model, run)
    if stored.autoregressive:
        raise ValueError("clock_steering: an AR run has no open positions in its passes; take a run of a DLM")
    listed = tuple(map(plain_number, by)) if isinstance(by, Iterable) else ()
    if not listed or not all(map(is_real, listed)):
        raise ValueError(f"clock_steering: by is {shown(by)}; give a list of shifts, such as by=(-0.25, 0.25)")
    given = tuple(map(float, listed))
    where = _layer(clock, layer, "open")
    shifts = [_shift(clock, one, where, along, "open") for one in given]
    directions = _controls(clock, where, controls, dimensions, seed)
    hooks: list[Hook] = []
    labels: list[tuple[float, str]] = []
    for amount, shift in zip(given, shifts, strict=True):
        for name, vector in [("clock", None), *directions]:
            one = shift if vector is None else _redirected(shift, vector)
            hooks.append(at_layers(one, [where]))
            labels.append((amount, name))
    sums = torch.zeros(len(hooks), len(run.tokens), len(MEASURES), dtype=torch.float64)
    count = torch.zeros(len(run.tokens), dtype=torch.float64)
    for rows, changes in _changes(stored, clock, hooks, progress):
        count.index_add_(0, rows, torch.ones(len(rows), dtype=torch.float64))
        sums.index_add_(1, rows, changes)
    amounts, names = zip(*labels, strict=True)
    return ClockSteering(where, along, amounts, names, sums, count, run.row_prompts, seed)


def _redirected(shift: SteerAlong, direction: Tensor) -> _Redirected:
    return _Redirected(
        shift.curve, shift.knots, shift.by, shift.over, shift.site, shift.positions, direction=direction
    )


def _controls(
    clock: DenoisingClock, layer: int, controls: int, dimensions: int, seed: int
) -> list[tuple[str, Tensor]]:
    """Random directions, and directions of the states' own variation that are orthogonal to the clock."""
    kind, place = clock.reading.kind_index("open"), clock.reading.layer_index(layer)
    draws = clock.draws[kind, place]
    if controls > len(draws):
        raise ValueError(f"controls is {controls}; this clock holds {len(draws)} directions of each kind")
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(controls, draws.shape[-1], dtype=torch.float64, generator=generator)
    time = torch.cat([clock.subspace("open", layer, dimensions), clock.weight[kind, place][None]])
    basis = torch.linalg.qr(time.T).Q
    apart = draws[:controls] - draws[:controls] @ basis @ basis.T
    return [("random", one) for one in random] + [("orthogonal", one) for one in apart]


def _changes(
    stored: StoredRun, clock: DenoisingClock, hooks: Sequence[Hook], progress: bool
) -> Iterator[tuple[Int[Tensor, "predicted"], Float[Tensor, "variant predicted measure"]]]:
    """Step by step the row of every prediction, and what every hook changes there."""
    # With a cache each keeps keys of its own.
    hooked = [StoredRun(stored.model, stored.run, hooks=[hook], carried="keys", warn=False) for hook in hooks]
    for step in tqdm(range(stored.run.steps), desc="steering", unit="step", disable=not progress):
        predicted = stored.predicted(step).cpu()
        if not bool(predicted.any()):
            continue
        plain = _outputs(stored, clock, step, predicted)
        changes = [_compared(stored, plain, _outputs(one, clock, step, predicted)) for one in hooked]
        yield predicted.nonzero()[:, 0], torch.stack(changes)


def _outputs(
    stored: StoredRun, clock: DenoisingClock, step: int, predicted: Bool[Tensor, "batch position"]
) -> tuple[Tensor, Tensor]:
    """The head's inputs at the predicted positions, and the time that the last layer's probe reads there."""
    layer = clock.layers[-1]
    layout = SinkLayout.of(stored.model)
    reader = ResidualReader(layout, len(predicted), predicted, predicted, (layer,), stored.first(step))
    with stored.at(step), reading(stored.model, reader, attention=False):
        states = stored.states(step)
    kind = clock.reading.kind_index("open")
    x = in_float64(reader.residual[layer]).cpu()
    return states, x @ clock.weight[kind, -1] + clock.bias[kind, -1]


def _compared(
    stored: StoredRun, plain: tuple[Tensor, Tensor], steered: tuple[Tensor, Tensor]
) -> Float[Tensor, "predicted measure"]:
    """`MEASURES` of every prediction, a few at a time; [MASK] has no probability."""
    size, parts = positions_at_once(stored.model), []
    for pair in zip(plain[0].split(size, 1), steered[0].split(size, 1), strict=True):
        logs = [without_mask(stored.model, stored.logits(states).double()).log_softmax(-1) for states in pair]
        likely = [log.exp() for log in logs]
        best = [one.max(-1) for one in likely]
        entropy = [torch.special.entr(one).sum(-1) for one in likely]
        kl = kl_divergence(logs[0], logs[1])
        changed = (best[0].indices != best[1].indices).double()
        measures = (best[1].values - best[0].values, entropy[1] - entropy[0], kl, changed)
        parts.append(torch.stack(measures, -1).cpu())
    return torch.cat([torch.cat(parts), (steered[1] - plain[1])[:, None]], -1)
