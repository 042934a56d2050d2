"""`reconstruct`, `scale_features`, `ablate_features`, `steer_feature`: an activation edited by its features."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from dlm_lens.arguments import FINITE, chosen_indices, is_real, listed_indices, store_plain_numbers
from dlm_lens.attention import Hook, PointContext, RunStep, Site
from dlm_lens.features import SparseAutoencoder, load_sae
from dlm_lens.hooks.base import makes_hook
from dlm_lens.hooks.positions import GivenPositions, Positions, read_positions, spread, where
from dlm_lens.hooks.schedules import Schedule, check_schedule, shown_schedule, spread_weights, weights_of
from dlm_lens.printable import shown


@dataclass(frozen=True, eq=False, repr=False)
class EditFeatures(Hook):
    """Edit an activation in terms of an autoencoder's features, in the autoencoder's layer alone.

    Build it with `reconstruct`, `scale_features`, `ablate_features` or `steer_feature`.

    Raises:
        ValueError: an autoencoder of an unknown layer, a feature that does not exist, a number that is not finite,
            or an invalid position or schedule.
    """

    sae: SparseAutoencoder
    kind: Literal["reconstruct", "scale", "steer"]
    features: tuple[int, ...] = ()
    amount: float = 0.0
    keep_error: bool = True
    positions: Positions = None
    schedule: Schedule = None

    remembers = False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        who = self.name
        if isinstance(self.sae, str | Path):
            object.__setattr__(self, "sae", load_sae(self.sae))
        if not isinstance(self.sae, SparseAutoencoder):
            raise ValueError(f"{who}: {self.sae!r:.60} is no SparseAutoencoder; read one with load_sae")
        if self.sae.layer is None:
            raise ValueError(f"{who}: {self.sae} does not say of which layer it is; give load_sae(..., layer=)")
        if not is_real(self.amount):
            amount = "factor" if self.kind == "scale" else "strength"
            raise ValueError(f"{who}: {amount} is {shown(self.amount)}; it must be {FINITE}")
        if self.kind != "reconstruct":
            if not len(self.features):
                raise ValueError(f"{who}: no feature; give at least one")
            object.__setattr__(self, "features", chosen_indices("feature", self.features, self.sae.features))
        check_schedule(self.schedule, who)
        object.__setattr__(self, "positions", read_positions(self.positions, who))

    @property
    def name(self) -> str:
        """The function that makes it."""
        return {"reconstruct": "reconstruct", "scale": "scale_features", "steer": "steer_feature"}[self.kind]

    @property
    def site(self) -> Site:
        """The activation that the autoencoder was trained on."""
        return self.sae.site

    @property
    def layers(self) -> tuple[int, ...]:
        """The autoencoder's."""
        return (int(self.sae.layer or 0),)

    def __repr__(self) -> str:
        parts = [repr(self.sae)]
        if self.kind == "scale":
            parts += [repr(list(self.features)), f"factor={self.amount}"]
        if self.kind == "steer":
            parts += [repr(self.features[0]), f"strength={self.amount}"]
        parts += ["keep_error=False"] * (self.kind == "scale" and not self.keep_error)
        parts += [f"positions={self.positions!r}"] * (self.positions is not None)
        parts += [f"schedule={shown_schedule(self.schedule)}"] * (self.schedule is not None)
        return f"{self.name}({', '.join(parts)})"

    def check_run(self, run: RunStep) -> None:
        """Refuse a model of another width.

        Raises:
            ValueError: naming both.
        """
        super().check_run(run)
        width = getattr(run.config, "hidden_size", None)
        if width is not None and width != self.sae.d_model:
            raise ValueError(
                f"{self.sae} was trained on vectors of {self.sae.d_model} entries; the model's have {width}"
            )

    def check_layer(self, block: nn.Module) -> None:
        """Refuse a layer that norms the output of which the autoencoder is.

        Raises:
            ValueError: as `SparseAutoencoder.check_layer`.
        """
        self.sae.check_layer(block)

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Return x + w (edited - x) at the positions.

        Raises:
            ValueError: a position that does not exist, a class or a schedule over progress outside a run, or an
                activation of another width.
        """
        if tensor.shape[-1] != self.sae.d_model:
            raise ValueError(f"{self}: the activation has {tensor.shape[-1]} features a position")
        shares = weights_of(self.schedule, tensor, hook, self)
        chosen = where(self.positions, tensor, hook, self)
        if not any(shares):
            return tensor
        flat, sae = tensor.reshape(-1, tensor.shape[-1]), self._sae_on(tensor, hook)
        parts = [self._change(part, sae) for part in flat.split(sae.at_once)]
        change = torch.cat(parts).reshape(tensor.shape)
        weights = spread_weights(shares, change, hook)
        edited = (tensor.to(change.dtype) + weights * change).to(tensor.dtype)
        return torch.where(spread(chosen, tensor), edited, tensor)

    def _change(self, x: Tensor, sae: SparseAutoencoder) -> Tensor:
        """What the edit adds to vectors [vector, d_model], in the dtype of the autoencoder."""
        if self.kind == "steer":
            return sae.change(x, sae.decoder_bias.new_full((len(x), 1), self.amount), self.features)
        features = sae.encode(x)
        change = torch.zeros_like(sae.decoder_bias).expand(x.shape)
        if self.kind == "scale":
            change = sae.change(x, (self.amount - 1) * features[:, list(self.features)], self.features)
        if self.kind == "reconstruct" or not self.keep_error:
            change = change + sae.decode(features, x) - x.to(change.dtype)
        return change

    def _sae_on(self, tensor: Tensor, hook: PointContext) -> SparseAutoencoder:
        """The autoencoder on the activation's device; in a run it is copied there once a step."""
        sae, run = self.sae, hook.run
        if run is None or sae.decoder_bias.device == tensor.device:
            return sae.to(tensor.device)
        moved: SparseAutoencoder = run.once(("autoencoder", id(sae), tensor.device), lambda: sae.to(tensor.device))
        return moved


@makes_hook
def reconstruct(
    sae: SparseAutoencoder | str | Path, *, positions: GivenPositions = None, schedule: Schedule = None
) -> EditFeatures:
    """Replace an activation x by x + w (decode(encode(x)) - x): the autoencoder is inserted (2602.05859).

    Args:
        sae: from `load_sae`, or the path of its directory; its site and layer say where.
        positions: canvas positions, `sink(i)`, `by_row`, or "open", "decided", "prompt", "answer"; None for all.
        schedule: w as a function of a row's progress, (lo, hi) for a straight line, a number, or None for 1.

    Raises:
        ValueError: an autoencoder of an unknown layer, or an invalid position or schedule.
    """
    return EditFeatures(sae, "reconstruct", positions=positions, schedule=schedule)  # type: ignore[arg-type]


@makes_hook
def scale_features(
    sae: SparseAutoencoder | str | Path,
    features: int | Sequence[int],
    factor: float,
    *,
    keep_error: bool = True,
    positions: GivenPositions = None,
    schedule: Schedule = None,
) -> EditFeatures:
    """Multiply features by a factor: x + w (decode(f') - decode(f)), f' = f but f'_j = factor f_j.

    The error of the reconstruction, x - decode(f), stays; without it x becomes x + w (decode(f') - x).

    Args:
        sae: from `load_sae`, or the path of its directory; its site and layer say where.
        features: indices, negative from the end.
        factor: 0 removes them, 1 changes nothing.
        keep_error: whether the error of the reconstruction stays.
        positions: canvas positions, `sink(i)`, `by_row`, or "open", "decided", "prompt", "answer"; None for all.
        schedule: w as a function of a row's progress, (lo, hi) for a straight line, a number, or None for 1.

    Raises:
        ValueError: a feature that does not exist, an autoencoder of an unknown layer, or an invalid argument.
    """
    chosen = listed_indices("feature", features, "scale_features: ")
    return EditFeatures(sae, "scale", chosen, factor, keep_error, positions, schedule)  # type: ignore[arg-type]


@makes_hook
def ablate_features(
    sae: SparseAutoencoder | str | Path,
    features: int | Sequence[int],
    *,
    keep_error: bool = True,
    positions: GivenPositions = None,
    schedule: Schedule = None,
) -> EditFeatures:
    """Remove features: `scale_features` with the factor 0.

    Args:
        sae: from `load_sae`, or the path of its directory; its site and layer say where.
        features: indices, negative from the end.
        keep_error: whether the error of the reconstruction stays.
        positions: canvas positions, `sink(i)`, `by_row`, or "open", "decided", "prompt", "answer"; None for all.
        schedule: w as a function of a row's progress, (lo, hi) for a straight line, a number, or None for 1.

    Raises:
        ValueError: as `scale_features`.
    """
    return scale_features(sae, features, 0.0, keep_error=keep_error, positions=positions, schedule=schedule)


@makes_hook
def steer_feature(
    sae: SparseAutoencoder | str | Path,
    feature: int,
    strength: float,
    *,
    positions: GivenPositions = None,
    schedule: Schedule = None,
) -> EditFeatures:
    """Add a feature: x + w strength W_dec[feature], as if the feature were larger by `strength`.

    The direction is not normalised; in Top-K autoencoders it usually has length 1. With an autoencoder that
    normalises its input the strength is in normalised units, and the addition is scaled back.

    Args:
        sae: from `load_sae`, or the path of its directory; its site and layer say where.
        feature: index, negative from the end.
        strength: in the units of the feature's activation; `feature_max` of a recording says what it reaches.
        positions: canvas positions, `sink(i)`, `by_row`, or "open", "decided", "prompt", "answer"; None for all.
        schedule: w as a function of a row's progress, (lo, hi) for a straight line, a number, or None for 1.
            `until_committed(hook, steps)` ends the steering of each position where its prediction settles.

    Raises:
        ValueError: a feature that does not exist, an autoencoder of an unknown layer, or an invalid argument.
    """
    return EditFeatures(sae, "steer", (feature,), strength, True, positions, schedule)  # type: ignore[arg-type]
