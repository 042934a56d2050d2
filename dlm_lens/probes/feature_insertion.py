"""`insertion_loss`: what the predictions of a run lose when an activation is replaced by its reconstruction."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import INDICES, ONE_SEED, WORDS, checked_arguments, chosen_indices, place_of_layer
from dlm_lens.attention import Hook, PointContext, Site, exclusive, run_of
from dlm_lens.display import ShowsItself
from dlm_lens.features import SparseAutoencoder, random_decoder, untrained
from dlm_lens.hooks import HookWrapper, ablate, at_layers, reconstruct
from dlm_lens.hooks.positions import where
from dlm_lens.placement import in_float64
from dlm_lens.printable import shown
from dlm_lens.probes.predictions import result_of, right_tokens
from dlm_lens.probes.unembedding import kl_divergence, positions_at_once, without_mask
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import on_canvases
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import (
    POSITIVE_BOUNDS,
    Bounds,
    Estimate,
    Floats,
    difference_of,
    estimate,
    mean_of,
    summed,
)

PLACES: dict[str, Any] = {"all": None, "open": "open", "decided": "decided"}
"""Where the activation is replaced -> positions of the hook: everywhere, at open positions, at all others."""

NULLS: dict[str, Callable[..., SparseAutoencoder]] = {"untrained": untrained, "random_decoder": random_decoder}
"""Name -> what makes the autoencoder that stands for chance."""


@dataclass(frozen=True, eq=False)
class InsertionLoss(ShowsItself):
    """The loss of a run's predictions with an autoencoder inserted, on the stored canvases (2602.05859).

    The loss is the cross-entropy -ln p of the right token at the open positions that a step predicts, in nats;
    [MASK] has no probability. Sums are over the positions of a step and row.

    Args:
        run: the run.
        layers: of the autoencoders.
        insertions: "sae", "zero", "mean", and the nulls.
        places: where the activation is replaced.
        steps: index of each step in the run.
        positions: how many predictions have a known right token.
        plain: the summed loss of the model as it is.
        loss: the summed loss with the insertion.
        kl: the summed KL(plain || inserted).
        seed: of the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: DenoisingRun = field(repr=False)
    layers: tuple[int, ...]
    insertions: tuple[str, ...]
    places: tuple[str, ...]
    steps: tuple[int, ...]
    positions: Int[Tensor, "step batch"]
    plain: Float[Tensor, "step batch"]
    loss: Float[Tensor, "layer insertion place step batch"]
    kl: Float[Tensor, "layer insertion place step batch"]
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {"layer": self.layers, "insertion": self.insertions, "place": self.places, "step": self.steps}
        check_shapes(self, batch=len(self.run.tokens), **{name: len(values) for name, values in sizes.items()})

    def __repr__(self) -> str:
        lines = ", ".join(
            f"layer {layer}: {self.added(layer)} nats, {self.recovered(layer)} of zero ablation recovered"
            for layer in self.layers
        )
        return f"InsertionLoss({lines}; {len(self.steps)} steps, at {self.places[0]!r} positions)"

    def added(
        self, layer: int, insertion: str = "sae", place: str = "", steps: Iterable[int] | None = None
    ) -> Estimate:
        """The mean loss with the insertion minus the mean loss without; the interval is over prompts.

        Args:
            layer: of the autoencoder.
            insertion: one of `insertions`.
            place: one of `places`; "" for the first.
            steps: steps of the run that count, negative from its end; None for all that were measured.

        Raises:
            ValueError: what was not measured.
        """
        count = self._sum(self.positions, steps)
        sums = [self._sum(self._of(self.loss, layer, insertion, place), steps), count, self._sum(self.plain, steps)]
        return self._estimate([*sums, count], difference_of)

    def recovered(self, layer: int, insertion: str = "sae", place: str = "", against: str = "zero") -> Estimate:
        """The share of an ablation's loss that the insertion does not have: (L_0 - L) / (L_0 - L_plain).

        1 is the model's own loss, 0 that of the ablation `against` ("zero" or "mean") at the same positions, as
        2404.16014 and others define "loss recovered". It says nothing where the ablation itself costs little.

        Raises:
            ValueError: what was not measured.
        """
        parts = [self._of(self.loss, layer, name, place) for name in (against, insertion)]

        def share(sums: Floats) -> Floats:
            found: Floats = (sums[..., 0] - sums[..., 1]) / (sums[..., 0] - sums[..., 2])
            return found

        return self._estimate([self._sum(part) for part in (*parts, self.plain)], share)

    def table(self) -> pd.DataFrame:
        """One line per layer, insertion and place: loss, added loss, KL and shares recovered, with intervals."""
        lines = []
        count = self._sum(self.positions)
        for layer in self.layers:
            for name in self.insertions:
                for place in self.places:
                    line: dict[str, Any] = {"layer": layer, "insertion": name, "place": place}
                    line |= {"predictions": int(count.sum()), "plain": float(self.plain.sum() / count.sum())}
                    sums = [self._sum(self._of(self.loss, layer, name, place)), count]
                    line |= {"loss": float(sums[0].sum() / count.sum())}
                    line |= self.added(layer, name, place).columns("added")
                    divergence = self._sum(self._of(self.kl, layer, name, place))
                    line |= self._estimate([divergence, count], mean_of, POSITIVE_BOUNDS).columns("kl")
                    for against in ("zero", "mean"):
                        line |= self.recovered(layer, name, place, against).columns(f"recovered_{against}")
                    lines.append(line)
        return pd.DataFrame(lines)

    def by_step(self) -> pd.DataFrame:
        """One line per step, layer, insertion and place: the added loss with its interval over prompts.

        `step` is the number in the whole run.
        """
        return pd.DataFrame(
            [
                {"step": self.run.step_numbers[step], "layer": layer, "insertion": name, "place": place}
                | self.added(layer, name, place, [step]).columns("added")
                for layer in self.layers
                for name in self.insertions
                for place in self.places
                for step in self.steps
            ]
        )

    def _of(self, sums: Tensor, layer: int, insertion: str, place: str) -> Float[Tensor, "step batch"]:
        place = self.places[0] if isinstance(place, str) and not place else place
        for name, value, known in (("insertion", insertion, self.insertions), ("place", place, self.places)):
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name} {shown(value)} was not measured; there are {', '.join(map(repr, known))}")
        row = place_of_layer(layer, self.layers, "measured")
        return sums[row, self.insertions.index(insertion), self.places.index(place)]

    def _sum(self, values: Tensor, steps: Iterable[int] | None = None) -> Floats:
        """Sums over the steps, one per row."""
        at = list(range(len(self.steps)))
        if steps is not None:
            chosen = chosen_indices("step", steps, self.run.steps, "InsertionLoss: ")
            if missing := [step for step in chosen if step not in self.steps]:
                listed = ", ".join(map(str, self.steps))
                raise ValueError(f"step {missing[0]} was not measured; there are {listed}")
            at = [self.steps.index(step) for step in chosen]
        found: Floats = values[at].double().sum(0).numpy()
        return found

    def _estimate(
        self, sums: Sequence[Floats], statistic: Callable[[Floats], Floats], bounds: Bounds | None = None
    ) -> Estimate:
        prompt = self.run.row_prompts
        of_prompts = summed(np.stack(sums, -1), prompt, len(prompt))
        return estimate(of_prompts, statistic, bounds=bounds, seed=self.seed)


@dataclass(eq=False)
class _Mean(Hook):
    """Sums the activation of one layer over the content of rows that are not over; a hook that changes nothing."""

    site: Site
    layers: tuple[int, ...]
    run: DenoisingRun = field(kw_only=True)
    sums: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    remembers = False

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Keep the sum over the content positions of the step, which may run more than once."""
        # A hook sees a step's number in the whole run, of which this run may be a part.
        step = self.run.step_numbers.index(run_of(hook, self).step)
        here = where(None, tensor, hook, self)
        here &= ~hook.sinks.is_sink(here.shape[1], here.device)  # learned sink tokens are no content of the canvas
        running = self.run.running[step].to(here.device)
        # The second rows of guidance see a canvas with a masked prompt.
        content = tensor[: len(running)][here[: len(running)] & running[:, None]]
        self.sums[step] = in_float64(content).sum(0).cpu(), len(content)
        return tensor

    def mean(self, steps: Sequence[int]) -> Float[Tensor, "d_model"]:
        """The mean over the positions of these steps."""
        kept = [self.sums[step] for step in steps]
        return (torch.stack([total for total, _ in kept]).sum(0) / max(1, sum(count for _, count in kept))).float()


@checked_arguments(steps=INDICES, seed=ONE_SEED)
@torch.no_grad()
@exclusive
def insertion_loss(
    model: Any,
    run: RunLike,
    saes: SparseAutoencoder | Sequence[SparseAutoencoder],
    *,
    steps: Sequence[int] | None = None,
    places: Sequence[str] = ("all", "open", "decided"),
    nulls: Sequence[str] = ("untrained", "random_decoder"),
    reference: Any = None,
    seed: int = 0,
    progress: bool = False,
) -> InsertionLoss:
    """Replace an activation by its reconstruction on every canvas of a run, and measure what predictions lose.

    At each step, for each autoencoder, x is replaced at all positions, at the open ones, and at the others (decided
    ones and the prompt), one layer at a time: by decode(encode(x)) ("sae"), by 0 ("zero"), by the mean of x over
    the content of the canvases of `steps` ("mean"; of guidance the conditional half), and by the reconstruction of
    each null. The canvases are the run's own, so that step t shows what the insertion at step t costs. Learned sink
    tokens beside the canvas are replaced too where all positions are ("all"), by the reconstructions of their own
    states, 0, or the mean over the canvas; that mean is without them.

    One forward pass per step and combination: with n autoencoders and the defaults 1 + 15 n, and one for the means.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`.
        saes: autoencoders of different layers, from `load_sae`.
        steps: indices of the steps, negative from the end; None for all.
        places: some of "all", "open", "decided".
        nulls: some of "untrained" (random weights, the same k) and "random_decoder" (random directions).
        reference: token ids [batch, position] that count as right, -1 where none is known; None for the run's own
            result. 2602.05859 measures on text whose tokens are known: mask it, and give it here.
        seed: of the nulls and the intervals.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model, an autoencoder that does not fit, two of one layer, an unknown place or
            null, a step that does not exist, or a reference of another shape.
    """
    run = as_run(run)
    given = list(saes) if isinstance(saes, Iterable) else [saes]
    _check(model, given, places, nulls)
    stored = StoredRun(model, run)
    right = right_tokens(result_of(stored.run), reference)
    chosen = chosen_indices("step", steps, run.steps)
    insertions = ("sae", "zero", "mean", *nulls)
    hooks = [
        hook
        for sae, mean in zip(given, _means(stored, given, chosen), strict=True)
        for hook in _hooks(sae, mean, places, nulls, seed)
    ]
    found = _losses(stored, hooks, right, chosen, progress)
    shape = (len(given), len(insertions), len(places), len(chosen), len(run.tokens))
    return InsertionLoss(
        run=stored.run,
        layers=tuple(int(sae.layer or 0) for sae in given),
        insertions=insertions,
        places=tuple(places),
        steps=chosen,
        positions=found["positions"][:, 0].long(),
        plain=found["loss"][:, 0],
        loss=found["loss"][:, 1:].permute(1, 0, 2).reshape(shape),
        kl=found["kl"][:, 1:].permute(1, 0, 2).reshape(shape),
        seed=seed,
    )


def _check(model: Any, saes: Sequence[Any], places: Sequence[str], nulls: Sequence[str]) -> None:
    for sae in saes:
        if not isinstance(sae, SparseAutoencoder):
            raise ValueError(f"insertion_loss: {shown(sae)} is no SparseAutoencoder; read one with load_sae")
        sae.check(model)
    layers = [sae.layer for sae in saes]
    if not saes or len(set(layers)) < len(layers):
        raise ValueError(
            f"insertion_loss: autoencoders of the layers {layers}; give at least one, each of its own layer"
        )
    for name, values, known in (("places", places, PLACES), ("nulls", nulls, NULLS)):
        if not WORDS.holds(values) or not set(values) <= set(known) or (name == "places" and not len(values)):
            raise ValueError(
                f"insertion_loss: {name} is {shown(values)}; give a list of some of {', '.join(known)}"
            )


def _means(
    stored: StoredRun, saes: Sequence[SparseAutoencoder], steps: Sequence[int]
) -> list[Float[Tensor, "d_model"]]:
    """The mean activation of every autoencoder's layer over the content of the canvases of these steps."""
    readers = [_Mean(sae.site, (int(sae.layer or 0),), run=stored.run) for sae in saes]
    # A pass of its own keys: with a cache those of the compared passes stay as they are.
    again = StoredRun(stored.model, stored.run, hooks=readers, carried="keys", warn=False)
    for step in steps:
        again.states(step)
    return [reader.mean(steps) for reader in readers]


def _hooks(
    sae: SparseAutoencoder, mean: Tensor, places: Sequence[str], nulls: Sequence[str], seed: int
) -> list[Hook]:
    """The interventions of one autoencoder: insertion by insertion, place by place."""

    def ablated(value: Any, place: str) -> HookWrapper:
        return at_layers(ablate(sae.site, PLACES[place], value), [int(sae.layer or 0)])

    inserted = [sae, *(NULLS[name](sae, seed) for name in nulls)]
    rebuilt: list[list[Hook]] = [
        [reconstruct(one, positions=PLACES[place]) for place in places] for one in inserted
    ]
    zero: list[Hook] = [ablated("zero", place) for place in places]
    means: list[Hook] = [ablated(mean, place) for place in places]
    return [*rebuilt[0], *zero, *means, *(hook for row in rebuilt[1:] for hook in row)]


def _losses(
    stored: StoredRun,
    hooks: Sequence[Hook],
    right: Int[Tensor, "batch position"],
    steps: Sequence[int],
    progress: bool,
) -> dict[str, Float[Tensor, "step hook batch"]]:
    """Sums over the predictions of a row: of the plain pass first, then with each hook."""
    hooked = [StoredRun(stored.model, stored.run, hooks=[hook], carried="keys", warn=False) for hook in hooks]
    found: dict[str, list[Tensor]] = {"loss": [], "kl": [], "positions": []}
    total, results = len(steps) * (1 + len(hooks)), on_canvases(stored.run, right, -1)
    with tqdm(total=total, desc="inserting", unit="pass", disable=not progress) as bar:
        for step in steps:
            plain = stored.states(step)
            bar.update()
            lines = [_compared(stored, step, plain, plain, results[step])]
            for one in hooked:
                lines.append(_compared(stored, step, plain, one.states(step), results[step]))
                bar.update()
            for name, values in found.items():
                values.append(torch.stack([line[name] for line in lines]))
    return {name: torch.stack(values) for name, values in found.items()}


def _compared(
    stored: StoredRun, step: int, plain: Tensor, states: Tensor, right: Int[Tensor, "batch position"]
) -> dict[str, Float[Tensor, "batch"]]:
    """Loss and KL of a step, summed over the predictions of each row whose right token is known."""
    predicted = stored.predicted(step).cpu()
    wanted, rows = right[predicted], predicted.nonzero()[:, 0]
    size = positions_at_once(stored.model)
    parts = []
    for one, two, token in zip(plain.split(size, 1), states.split(size, 1), wanted.split(size), strict=True):
        p, q = (without_mask(stored.model, stored.logits(part).double()).log_softmax(-1) for part in (one, two))
        picked = token.clamp(min=0).to(q.device)[:, None]
        parts.append((-q.gather(-1, picked)[:, 0].cpu(), kl_divergence(p, q).cpu()))
    known = wanted >= 0
    loss, kl = (torch.cat(values) for values in zip(*parts, strict=True)) if parts else (torch.zeros(0),) * 2
    zero = torch.zeros(len(predicted), dtype=torch.float64)
    sums = {"loss": loss, "kl": kl, "positions": torch.ones(len(rows))}
    return {name: zero.index_add(0, rows[known], value[known].double()) for name, value in sums.items()}
