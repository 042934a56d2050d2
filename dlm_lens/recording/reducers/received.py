"""`ReceivedAttention` and statistics computed from it: the norm that a key writes, the keys that receive most."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.arguments import LARGEST_COUNT, RULES, store_plain_numbers, whole
from dlm_lens.attention import MIN_VIEWERS
from dlm_lens.attention.column_stats import largest
from dlm_lens.printable import shown
from dlm_lens.recording.query_classes import QueryClass, checked_class, received_name
from dlm_lens.recording.reducer_registry import ReducerEntry
from dlm_lens.recording.reducers.base import LayerStep, Reducer, ReducerGroup

ENTRIES = (
    ReducerEntry(name="received", kind="ReceivedAttention", setting="queries", values="query classes"),
    ReducerEntry(name="weighted-value", kind="WeightedValue", setting="queries", values="query class"),
    ReducerEntry(name="stale", kind="StaleAttention", setting="queries", values="query class"),
    ReducerEntry(name="top-keys", kind="TopKeys", setting="k", values="count"),
)


@dataclass(frozen=True)
class ReceivedAttention(Reducer):
    """Received attention of every key relative to uniform, score_j = r_j / e_j.

    r_j = sum_i A_ij over a class of queries (2510.15731, section 4.1); e_j = sum_i M_ij / sum_k M_ik is r_j under
    uniform attention, so that a score of 1 is uniform. `Recording.received_sums` gives r_j.

    Args:
        queries: "all", "masked" (or "open"), "unmasked" (or "decided"), "prompt", "block", or several of them. All
            but "all" are recorded as received_CLASS under the first of these names, each divided by its own e_j, so
            that scores do not fall only because the masks run out.
        min_viewers: a key that fewer queries of the class see is undefined (NaN).

    Raises:
        ValueError: no such class, or min_viewers below 1 or no whole number.
    """

    queries: QueryClass | Sequence[QueryClass] = "all"
    min_viewers: int = MIN_VIEWERS

    unit = "relative to uniform"

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        RULES["min_viewers"].check("ReceivedAttention.min_viewers", self.min_viewers)
        one = isinstance(self.queries, str)
        names = self._classes if isinstance(self.queries, Iterable) else ()
        if not names:
            raise ValueError(
                f"ReceivedAttention(queries={shown(self.queries)}): give at least one class of queries, such as "
                "'all' or ('masked', 'unmasked')"
            )
        known = tuple(checked_class(name, "ReceivedAttention") for name in names)
        object.__setattr__(self, "queries", known[0] if one else known)

    @property
    def parts(self) -> "tuple[ReceivedAttention, ...]":
        """One reducer per class."""
        return tuple(ReceivedAttention(name, self.min_viewers) for name in self._classes)

    @property
    def name(self) -> str:
        """The array: received, or received_CLASS."""
        return received_name(self._classes[0])

    @property
    def formula(self) -> str:
        """The formula, with its source."""
        return f"sum_i A_ij / e_j over {self._classes[0]} queries (2510.15731, section 4.1, relative to uniform)"

    @property
    def reads(self) -> tuple[str, ...]:
        """The column sums of its class."""
        return (f"received:{self._classes[0]}",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head key"]:
        """score_j, NaN where undefined."""
        return layer.received(self._classes[0], min_viewers=self.min_viewers)

    @property
    def _classes(self) -> tuple[QueryClass, ...]:
        return (self.queries,) if isinstance(self.queries, str) else tuple(self.queries)


@dataclass(frozen=True)
class WeightedValue(Reducer):
    """The norm that each key writes: r_j ||W_O v_j||, its received attention times the norm of its projected value.

    The norm-based weight of 2004.10102 (section 3), summed over queries: sum_i A_ij ||W_O^h v_j^h||, in the units
    of the residual stream. With gated attention the gate is taken as open. NaN at padding; 0 where no query of the
    class sees the key.

    Args:
        queries: which queries count.

    Raises:
        ValueError: no such class.
    """

    queries: QueryClass = "all"

    unit = "norm of the residual stream"
    formula = "sum_i A_ij ||W_O v_j|| (2004.10102, section 3, summed over queries)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", checked_class(self.queries, "WeightedValue"))

    @property
    def name(self) -> str:
        """The array: weighted_value, or weighted_value_CLASS."""
        return "weighted_value" if self.queries == "all" else f"weighted_value_{self.queries}"

    @property
    def reads(self) -> tuple[str, ...]:
        """The column sums of its class."""
        return (f"received:{self.queries}",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head key"]:
        """The sum, NaN at padding, 0 where no query of the class sees the key."""
        if ("constant", "written") not in layer.memory:
            layer.memory["constant", "written"] = _triangle(layer)
        values, groups = layer.inputs.v.float(), layer.inputs.q.shape[1] // layer.inputs.v.shape[1]
        values = values if groups == 1 else values.repeat_interleave(groups, 1)
        # ||W v|| = ||R v|| for W = Q R: a [d_head, d_head] product per key, and no [key, d_model].
        written = (values @ layer.memory["constant", "written"].mT).norm(dim=-1)
        return layer.only_keys(layer.sums[self.queries] * written)


@dataclass(frozen=True)
class StaleAttention(Reducer):
    """The share of attention that comes to keys of an earlier step, which an approximate cache keeps.

    1/n sum_i sum_j A_ij over the n computed queries i of a class and the kept keys j: 0 at a step that computes
    everything, and in runs without such a cache. Under uniform attention it is the share of keys that are kept. NaN
    where the step computes no query of the class.

    Args:
        queries: which queries count.

    Raises:
        ValueError: no such class.
    """

    queries: QueryClass = "all"

    dims = ("step", "batch", "layer", "head")
    unit = "share of attention"
    formula = "1/n sum_i sum_{j kept} A_ij"

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", checked_class(self.queries, "StaleAttention"))

    @property
    def name(self) -> str:
        """The array: stale_attention, or stale_attention_CLASS."""
        return "stale_attention" if self.queries == "all" else f"stale_attention_{self.queries}"

    @property
    def reads(self) -> tuple[str, ...]:
        """The column sums of its class."""
        return (f"received:{self.queries}",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head"]:
        """The share, NaN without a query."""
        facts = layer.facts
        kept = facts.present & ~facts.attending
        sums = layer.sums[self.queries][..., : kept.shape[1]]
        return (sums * kept[:, None]).sum(-1) / facts.queries(self.queries).sum(-1)[:, None]  # 0 / 0 is NaN


def _triangle(layer: LayerStep) -> Float[Tensor, "head d_head d_head"]:
    if layer.weight is None:
        raise ValueError("WeightedValue needs the output projection, which this recorder lacks")
    return torch.linalg.qr(layer.weight().float().mT, mode="r").R


@dataclass(frozen=True)
class TopKeys(ReducerGroup):
    """The k keys of every head that receive most, in falling order: positions `top_keys`, scores `top_scores`.

    Scores are relative to uniform. Learned sink tokens have the positions after the canvas. Where fewer than k keys
    are defined, the rest has position -1 and score NaN. Of equal scores the earlier key comes first.

    Args:
        k: the number of keys.
        queries: which queries count.
        min_viewers: a key that fewer queries of the class see is undefined.

    Raises:
        ValueError: k or min_viewers below 1 or no whole number, or no such class.
    """

    k: int = 5
    queries: QueryClass = "all"
    min_viewers: int = MIN_VIEWERS

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        whole(least=1, most=LARGEST_COUNT).check("TopKeys.k", self.k)
        RULES["min_viewers"].check("TopKeys.min_viewers", self.min_viewers)
        object.__setattr__(self, "queries", checked_class(self.queries, "TopKeys"))

    @property
    def parts(self) -> "tuple[_Top, ...]":
        """The positions and the scores."""
        return _Top(self, "top_keys"), _Top(self, "top_scores")


@dataclass(frozen=True)
class _Top(Reducer):
    """The positions or the scores."""

    top: TopKeys
    kind: str

    dims = ("step", "batch", "layer", "head", "rank")

    @property
    def name(self) -> str:
        return self.kind if self.top.queries == "all" else f"{self.kind}_{self.top.queries}"

    @property
    def unit(self) -> str:
        return "key position" if self.kind == "top_keys" else "relative to uniform"

    @property
    def formula(self) -> str:
        return f"the {self.top.k} keys with the largest r_j / e_j over {self.top.queries} queries"

    @property
    def positions(self) -> bool:
        """Whether the numbers are positions of keys, which change where recordings of unequal width are joined."""
        return self.kind == "top_keys"

    @property
    def reads(self) -> tuple[str, ...]:
        return (f"received:{self.top.queries}",)

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head rank"] | Int[Tensor, "batch head rank"]:
        """The positions, or the scores, in falling order of score."""
        scores, order = layer.once(self.top, lambda: self._sorted(layer))
        if self.kind == "top_keys":
            return order.masked_fill(scores == -torch.inf, -1).int()
        return scores.masked_fill(scores == -torch.inf, torch.nan)

    def _sorted(self, layer: LayerStep) -> tuple[Float[Tensor, "batch head rank"], Int[Tensor, "batch head rank"]]:
        """The scores in falling order, -inf where fewer keys are defined, and their positions."""
        scores = layer.received(self.top.queries, min_viewers=self.top.min_viewers)
        if scores.shape[-1] < self.top.k:
            scores = torch.nn.functional.pad(scores, (0, self.top.k - scores.shape[-1]), value=torch.nan)
        return largest(scores.nan_to_num(nan=-torch.inf), self.top.k)
