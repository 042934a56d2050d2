"""Statistics of the attention pattern: its entropy, its mass between regions, and the pattern itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import RULES
from dlm_lens.attention import MIN_VIEWERS, QueryStat
from dlm_lens.printable import shown
from dlm_lens.recording.query_classes import QUERY_CLASSES
from dlm_lens.recording.reducer_registry import ReducerEntry
from dlm_lens.recording.reducers.base import LayerStep, PatternReducer, Reducer

ENTRIES = (
    ReducerEntry(name="entropy", kind="AttentionEntropy"),
    ReducerEntry(name="region-mass", kind="RegionMass"),
)

KEY_REGIONS = ("prompt", "masked", "unmasked", "block", "sink", "self", "past", "future")
"""Regions of keys. The first five are sets of keys, which may overlap. Self, past, future and the learned sink
tokens together are all keys."""
RELATIONS: tuple[QueryStat, ...] = ("self", "past", "future")
"""Regions of keys that lie otherwise for every query."""


@dataclass(frozen=True)
class AttentionPattern(PatternReducer):
    """The pattern A itself, for a few steps and layers: [step, batch, layer, head, query, key] takes much memory.

    Queries are canvas positions; keys are canvas positions and, after them, the learned sink tokens. Queries that
    are padding, not written (AR) or not computed (a cache) are NaN. The others have a probability for every key, 0
    for one that they do not see, such as padding: their rows sum to 1 (with learned sink logits, to less).
    """

    name = "pattern"
    dims = ("step", "batch", "layer", "head", "query", "key")
    unit = "share of attention"
    formula = "A_ij"
    zero_padding = True

    def start(self, layer: LayerStep) -> list[Tensor]:
        """No tile yet."""
        return []

    def tile(self, state: list[Tensor], layer: LayerStep, rows: slice, pattern: Tensor) -> list[Tensor]:
        """One more tile of queries."""
        return [*state, pattern.float()]

    def finish(self, state: list[Tensor], layer: LayerStep) -> Float[Tensor, "batch head query key"]:
        """The pattern, NaN for queries that are padding or not written."""
        absent = ~layer.facts.attending[:, None, :, None]
        return torch.cat(state, -2).masked_fill(absent, torch.nan)


@dataclass(frozen=True)
class AttentionEntropy(Reducer):
    """Entropy of every query's attention, H_i = -sum_j A_ij ln A_ij, in nats.

    From 0 (one key) to ln n (even attention over n visible keys).
    """

    name = "entropy"
    dims = ("step", "batch", "layer", "head", "query")
    unit = "nats"
    formula = "-sum_j A_ij ln A_ij"
    reads = ("query:entropy",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head query"]:
        """The entropy of every query, NaN at padding."""
        return layer.only_queries(layer.per_query["entropy"])


@dataclass(frozen=True)
class RegionMass(Reducer):
    """The share of attention that queries of one class give to each region of keys, per head.

    m_cR = 1 / n_c sum_{i in c} sum_{j in R} A_ij, from 0 to 1, for the query classes all, masked, unmasked, prompt
    and block, and the key regions prompt, masked, unmasked, block, sink, self (the query's own position: the
    diagonal of 2510.15731, Figure 4b), past and future (keys before and after it). NaN where a class has no
    queries.

    Args:
        sinks: a detector of `dlm_lens.sinks`, or an object with detect(scores [batch, head, key]) -> bool. Its
            sinks join the learned sink tokens in the region "sink"; None for the learned ones alone. It reads the
            received attention of all queries as its `quantity` says: relative to uniform, also without a
            `quantity`; the share r_j / n of n queries; or the mean attention r_j / n_j of n_j viewers.
        min_viewers: to the detector a key that fewer queries see is undefined (NaN), as in `ReceivedAttention`, so
            that both have the same sinks. Without a detector nothing reads it.

    Raises:
        ValueError: an object without detect, a detector that reads hidden states, or min_viewers below 1.
    """

    sinks: Any = field(default=None)
    min_viewers: int = MIN_VIEWERS

    name = "region_mass"
    dims = ("step", "batch", "layer", "head", "query_region", "key_region")
    unit = "share of attention"
    formula = "1/n_c sum_{i in c} sum_{j in R} A_ij (2510.15731, Figure 4b: self)"
    reads = (*(f"received:{name}" for name in QUERY_CLASSES), *(f"query:{name}" for name in RELATIONS))

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """The names of both regions."""
        return {"query_region": QUERY_CLASSES, "key_region": KEY_REGIONS}

    def __post_init__(self) -> None:
        RULES["min_viewers"].check("RegionMass.min_viewers", self.min_viewers)
        detects = callable(getattr(self.sinks, "detect", None)) and not isinstance(self.sinks, type)
        if self.sinks is not None and not detects:
            raise ValueError(f"RegionMass(sinks={shown(self.sinks)}): give a detector, such as AboveMean(eps=3.0)")
        if self._quantity not in ("received", "share", "mean attention"):
            raise ValueError(
                f"RegionMass(sinks={self.sinks!r}): the detector reads {self._quantity!r}, not attention; give one "
                "of received attention, such as AboveMean(eps=3.0)"
            )

    def __repr__(self) -> str:
        # Without a detector nothing reads min_viewers: the text is that of recordings from before there was one.
        viewers = "" if self.sinks is None else f", min_viewers={self.min_viewers}"
        return f"RegionMass(sinks={self.sinks!r}{viewers})"

    @property
    def stored_settings(self) -> Mapping[str, Any]:
        """`min_viewers`, where a detector reads it."""
        return {} if self.sinks is None else super().stored_settings

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head query_region key_region"]:
        """The matrix [query_region, key_region] of every head."""
        weights = layer.facts.weights(QUERY_CLASSES)
        per_query = torch.stack([layer.per_query[name] for name in RELATIONS], 2)
        relations = dict(zip(RELATIONS, (per_query @ weights.mT[:, None]).unbind(2), strict=True))
        sums = torch.stack([layer.sums[name] for name in QUERY_CLASSES], 2)
        regions: dict[str, Bool[Tensor, "batch #head key"]] = {n: r[:, None] for n, r in layer.regions.items()}
        if self.sinks is not None:
            regions["sink"] = regions["sink"] | self.sinks.detect(self._scores(layer))
        found = {name: (sums * region[:, :, None]).sum(-1) for name, region in regions.items()} | relations
        counts = weights.sum(-1)[:, None, :, None]
        mass = torch.stack([found[name] for name in KEY_REGIONS], -1)
        return mass / counts  # 0 / 0 is NaN

    @property
    def _quantity(self) -> str:
        return str(getattr(self.sinks, "quantity", "received"))

    def _scores(self, layer: LayerStep) -> Float[Tensor, "batch head key"]:
        """The scores of the keys, as `Received.read` gives them."""
        if self._quantity == "received":
            return layer.received("all", min_viewers=self.min_viewers)
        sums, facts = layer.received("all", relative=False, min_viewers=self.min_viewers), layer.facts
        if self._quantity == "share":
            return sums / facts.weights(("all",)).sum(-1, keepdim=True).clamp(min=1)
        return sums / facts.viewers("all")[:, None].clamp(min=1)
