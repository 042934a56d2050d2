"""`FeatureActivations`: the features of a sparse autoencoder at every step, without keeping one per position."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import LARGEST_COUNT, chosen_indices, listed_indices, whole
from dlm_lens.features import SparseAutoencoder, load_sae
from dlm_lens.recording.reducer_registry import ReducerEntry
from dlm_lens.recording.reducers.base import LayerStep, Reducer, ReducerGroup

ENTRY = ReducerEntry(name="features", kind="FeatureActivations", setting="sae", values="path")

POSITION_CLASSES = ("open", "decided", "prompt")
"""Positions that the step finds open, those of the answer that are decided, those of the prompt."""


@dataclass(frozen=True)
class FeatureActivations(ReducerGroup):
    """What the features of a sparse autoencoder do at every step, by class of position.

    With f_ij the activation of feature j at position i, over the positions of each class (open, decided, prompt):
    `feature_count` is the number of positions with f_ij > 0, `feature_mean` their mean (zeros count), `feature_max`
    the largest; `feature_positions` is the number of positions. `feature_top` and `feature_top_position` are, over
    all classes, the largest activations above 0 of a row and where they are (NaN and -1 where there are fewer).
    `feature_values` has the chosen features at every position.

    Nothing of the size [position, feature] is kept; one step and row have 11 numbers (with top=1) per feature.

    Args:
        sae: of the residual stream of one layer, which alone is recorded: `layers=[sae.layer]`; or the path of its
            directory.
        features: features whose activation is kept at every position.
        top: how many positions per row and step to keep for every feature.

    Raises:
        ValueError: an autoencoder of another site or of an unknown layer, a feature that does not exist, or `top`
            below 1.
    """

    sae: SparseAutoencoder
    features: tuple[int, ...] = ()
    top: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.sae, str | Path):
            object.__setattr__(self, "sae", load_sae(self.sae))
        if not isinstance(self.sae, SparseAutoencoder):
            raise ValueError(
                f"FeatureActivations: {self.sae!r:.60} is no SparseAutoencoder; read one with load_sae"
            )
        if self.sae.site != "resid" or self.sae.layer is None:
            raise ValueError(
                f"FeatureActivations: {self.sae} is of {self.sae.site!r} and layer {self.sae.layer}; recorded are "
                "those of the residual stream of a layer: load_sae(..., site='resid', layer=)"
            )
        whole(least=1, most=LARGEST_COUNT).check("FeatureActivations: top", self.top)
        given = listed_indices("feature", self.features, "FeatureActivations: ")
        chosen = chosen_indices("feature", given, self.sae.features) if given else ()
        object.__setattr__(self, "features", chosen)

    @property
    def parts(self) -> "tuple[_FeaturePart, ...]":
        """The arrays."""
        classes = [
            _FeaturePart(self, kind) for kind in ("count", "mean", "max", "positions", "top", "top_position")
        ]
        return (*classes, _FeaturePart(self, "values")) if self.features else tuple(classes)


_AXES = {
    "positions": ("position_class",),
    "top": ("feature", "rank"),
    "top_position": ("feature", "rank"),
    "values": ("query", "chosen_feature"),
}
_FORMULAS = {
    "count": "#{i: f_ij > 0}",
    "mean": "mean_i f_ij",
    "max": "max_i f_ij",
    "positions": "#{i}",
    "top": "the largest f_ij",
    "top_position": "arg max_i f_ij",
    "values": "f_ij",
}


@dataclass(frozen=True)
class _FeaturePart(Reducer):
    """One array of `FeatureActivations`."""

    of: FeatureActivations
    kind: str

    reads = ("resid_out",)

    @property
    def name(self) -> str:
        return f"feature_{self.kind}"

    @property
    def dims(self) -> tuple[str, ...]:
        return ("step", "batch", "layer", *_AXES.get(self.kind, ("position_class", "feature")))

    @property
    def unit(self) -> str:
        return {"count": "positions", "positions": "positions", "top_position": "position"}.get(
            self.kind, "activation"
        )

    @property
    def formula(self) -> str:
        return f"{_FORMULAS[self.kind]}, f = encode(x) of {self.of.sae}"

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        if self.kind == "values":
            return {"chosen_feature": tuple(map(str, self.of.features))}
        return {"position_class": POSITION_CLASSES} if "position_class" in self.dims else {}

    @property
    def positions(self) -> bool:
        return self.kind == "top_position"

    def check(self, model: Any, layers: tuple[int, ...]) -> None:
        """Refuse a model of another width, and other layers."""
        sae = self.of.sae
        sae.check(model)
        if layers != (sae.layer,):
            raise ValueError(f"FeatureActivations of {sae}: record its layer alone, layers=[{sae.layer}]")

    def reduce(self, layer: LayerStep) -> Tensor:
        """The array, from one encoding of the layer for all parts."""
        found: dict[str, Tensor] = layer.once(("features", self.of), lambda: _reduced(layer, self.of))
        return found[self.kind]


def _reduced(layer: LayerStep, of: FeatureActivations) -> dict[str, Tensor]:
    """Kind of part -> array, of one layer at one step."""
    if layer.resid_out is None:
        raise ValueError("FeatureActivations reads the stream that leaves a layer, which this recorder lacks")
    classes = position_classes(layer)
    states = layer.resid_out[:, : classes.shape[-1]]
    device = states.device
    sae: SparseAutoencoder = layer.memory.setdefault(("constant", of, device), of.sae.to(device))
    rows = [_row(sae, state, klass, of) for state, klass in zip(states, classes, strict=True)]
    return {kind: torch.stack([row[kind] for row in rows]) for kind in rows[0]}


def position_classes(layer: LayerStep) -> Bool[Tensor, "batch position_class position"]:
    """The positions of each class whose states the step computes."""
    facts = layer.facts
    prompt = facts.queries("prompt")
    return torch.stack([facts.queries("open"), facts.queries("decided") & ~prompt, prompt], 1)


def _row(
    sae: SparseAutoencoder,
    states: Float[Tensor, "position d_model"],
    classes: Bool[Tensor, "position_class position"],
    of: FeatureActivations,
) -> dict[str, Tensor]:
    """The statistics of one row, from a few positions at a time."""
    shape = (len(classes), sae.features)
    count = torch.zeros(shape, dtype=torch.int32, device=states.device)
    total = torch.zeros(shape, device=states.device)
    largest = torch.full(shape, -torch.inf, device=states.device)
    top = torch.zeros(sae.features, of.top, device=states.device)
    place = torch.full_like(top, -1, dtype=torch.int64)
    values = torch.full((len(states), len(of.features)), torch.nan, device=states.device)
    counted = classes.any(0).nonzero().flatten()
    # Of nothing `split` gives one empty part, and a step of block diffusion may compute none of a row's positions.
    for where in counted.split(sae.at_once) if len(counted) else ():
        found, member = sae.encode(states[where]).float(), classes[:, where]
        fires = found > 0
        for index, inside in enumerate(member):
            count[index] += (fires & inside[:, None]).sum(0, dtype=torch.int32)
            total[index] += found.masked_fill(~inside[:, None], 0.0).sum(0)
            largest[index] = torch.maximum(largest[index], found.masked_fill(~inside[:, None], -torch.inf).amax(0))
        values[where] = found[:, list(of.features)]
        top, place = _merged(top, place, found, where)
    positions = classes.sum(-1)
    none = positions[:, None] == 0
    return {
        "count": count,
        "mean": total / positions[:, None],  # 0 / 0 is NaN
        "max": largest.masked_fill(none, torch.nan),
        "positions": positions,
        "top": top.masked_fill(place < 0, torch.nan),
        "top_position": place,
        "values": values,
    }


def _merged(
    top: Float[Tensor, "feature rank"],
    place: Int[Tensor, "feature rank"],
    found: Float[Tensor, "position feature"],
    where: Int[Tensor, "position"],
) -> tuple[Float[Tensor, "feature rank"], Int[Tensor, "feature rank"]]:
    """The largest activations so far and those of more positions together."""
    best = found.T.topk(min(len(where), top.shape[-1]))
    # Zeros are no activations: they get the place -1 of an empty rank.
    places = where[best.indices].masked_fill(best.values <= 0, -1)
    order = torch.cat([top, best.values], -1).topk(top.shape[-1])
    return order.values, torch.cat([place, places], -1).gather(-1, order.indices)
