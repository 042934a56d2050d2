"""Classes of queries, and what even attention would give each key: from facts of the canvas, without a pattern."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

QueryClass = Literal["all", "masked", "unmasked", "prompt", "block"]
"""Which queries count: all content, what is masked or is not at the step, the prompt, the block being decoded."""

CLASSES: tuple[QueryClass, ...] = get_args(QueryClass)


@dataclass(frozen=True, eq=False)
class CanvasFacts:
    """What is where on canvases, as far as statistics of attention care; leading axes are anything.

    Args:
        valid: content rather than padding.
        masked: masked (in an AR run: not yet written).
        answer: masked when the run began.
        block: inside the block being decoded.
        causal: an AR run, in which what is not yet written is neither query nor key.
        sinks: learned sink tokens; as keys they stand behind the canvas, as queries they do not count.
        unpadded: the network takes padding for content (a quirk of a reference), so that it is a key.
        window: the sliding window w of the layer, in an AR run: query i sees the keys i - w + 1, ..., i; None if
            the layer has none.

    Raises:
        ValueError: a window below 1, or in a run that is not causal.
    """

    valid: Bool[Tensor, "*run position"]
    masked: Bool[Tensor, "*run position"]
    answer: Bool[Tensor, "*run position"]
    block: Bool[Tensor, "*run position"]
    causal: bool = False
    sinks: int = 0
    unpadded: bool = False
    window: int | None = None
    _known: dict[tuple[str, str], Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal or self.sinks):
            raise ValueError(
                f"CanvasFacts(window={self.window}, causal={self.causal}, sinks={self.sinks}): a window is at "
                "least 1, in a causal run without learned sink tokens"
            )

    @property
    def present(self) -> Bool[Tensor, "*run position"]:
        """Content that the network sees: all of it, or in an AR run what is written."""
        return self.valid & ~self.masked if self.causal else self.valid

    @property
    def prompt(self) -> Bool[Tensor, "*run position"]:
        """Content that was there when the run began."""
        return self.valid & ~self.answer

    @property
    def keys(self) -> Bool[Tensor, "*run key"]:
        """Which keys are defined: the canvas's present positions and, behind them, the sink tokens."""
        return self._beside_sinks(self.present)

    def queries(self, name: QueryClass) -> Bool[Tensor, "*run position"]:
        """The queries of a class."""
        return self._once("queries", name, self._queries)

    def expected(self, name: QueryClass) -> Float[Tensor, "*run key"]:
        """e_j = sum_i M_ij / sum_k M_ik over a class of queries: what key j gets of even attention.

        Without causality every query of the n visible keys spreads 1 / n, so e_j is the same for all of them.
        """
        return self._once("expected", name, self._expected)

    def viewers(self, name: QueryClass) -> Float[Tensor, "*run key"]:
        """How many queries of a class see each key."""
        return self._once("viewers", name, self._viewers)

    def _once(self, kind: str, name: QueryClass, compute: Callable[[QueryClass], Tensor]) -> Tensor:
        """Every layer of a step asks for the same."""
        if (kind, name) not in self._known:
            self._known[kind, name] = compute(name)
        return self._known[kind, name]

    def _queries(self, name: QueryClass) -> Bool[Tensor, "*run position"]:
        chosen = {
            "all": self.present,
            "masked": self.masked,
            "unmasked": ~self.masked,
            "prompt": self.prompt,
            "block": self.block,
        }
        return self.present & chosen[name]

    def _expected(self, name: QueryClass) -> Float[Tensor, "*run key"]:
        queries, seen = self.queries(name).float(), self._visible
        if not self.causal:
            each = queries.sum(-1, keepdim=True) / (seen.sum(-1, keepdim=True) + self.sinks).clamp(min=1)
            return self._beside_sinks(seen) * each
        # Key j is seen by the queries at j and behind it, query i sees the keys up to i.
        if self._whole:
            each = queries / seen.cumsum(-1).clamp(min=1)
            return each.flip(-1).cumsum(-1).flip(-1) * seen
        # Differences of sums over long canvases: in float32 they would lose digits.
        each = queries.double() / self._in_window(seen.long()).clamp(min=1)
        even = self._in_window(each.flip(-1)).flip(-1)
        return even.masked_fill(~seen | (self.viewers(name) == 0), 0.0).float()

    def _viewers(self, name: QueryClass) -> Float[Tensor, "*run key"]:
        queries, seen = self.queries(name).float(), self._visible
        if not self.causal:
            return self._beside_sinks(seen) * queries.sum(-1, keepdim=True)
        if self._whole:
            return queries.flip(-1).cumsum(-1).flip(-1) * seen
        return self._in_window(self.queries(name).long().flip(-1)).flip(-1).float() * seen

    @property
    def _whole(self) -> bool:
        """Whether the window, if there is one, holds the canvas."""
        return self.window is None or self.window >= self.valid.shape[-1]

    def _in_window(self, values: Tensor) -> Tensor:
        """The sum of the values at i - w + 1, ..., i, for every i."""
        sums = values.cumsum(-1)
        earlier = torch.nn.functional.pad(sums, (self.window or 0, 0))[..., : sums.shape[-1]]
        return sums - earlier

    @property
    def _visible(self) -> Bool[Tensor, "*run position"]:
        return torch.ones_like(self.valid) if self.unpadded else self.present

    def _beside_sinks(self, canvas: Bool[Tensor, "*run position"]) -> Bool[Tensor, "*run key"]:
        if not self.sinks:
            return canvas
        return torch.cat([canvas, canvas.new_ones(*canvas.shape[:-1], self.sinks)], -1)


def checked_class(name: str, owner: str) -> QueryClass:
    """The class of queries, if there is such a one.

    Raises:
        ValueError: naming it and those that there are.
    """
    if name not in CLASSES:
        raise ValueError(f"{owner}(queries={name!r}): the classes of queries are {', '.join(CLASSES)}")
    return name
