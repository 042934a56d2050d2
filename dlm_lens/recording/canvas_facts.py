"""`CanvasFacts`: classes of queries and the uniform expectation of every key, without a pattern."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import BlockLayout, beside_sinks, observed_order, sees_observed_first
from dlm_lens.placement import in_float64
from dlm_lens.recording.query_classes import QueryClass, checked_class


@dataclass(frozen=True, eq=False)
class CanvasFacts:
    """Which positions of canvases are content, masked, answer and block, and from that the classes of queries.

    Leading axes are any, such as step and batch.

    Args:
        valid: content (True) or padding (False).
        masked: open positions, with [MASK] or a random token in them (in an AR run: not written yet).
        answer: positions that were open when the run began.
        block: positions of the block that is being decoded, in block diffusion those of each row's.
        causal: an AR run, in which positions that are not written yet are neither queries nor keys.
        sinks: number of learned sink tokens: keys after the canvas positions; as queries they are not counted.
        unpadded: the network takes padding for content (a quirk of a reference), so that padding is a key.
        own_canvas: the positions of each row's own canvas: what joined rows were padded with later is no key. None:
            all.
        window: the sliding window w of the layer: query i sees the keys i - w + 1, ..., i in an AR run, else those
            from i - w to i + w; with blocks (DiffusionGemma) all that are `computed`, and the last w - 1 positions
            before them. None if the layer has none.
        blocks: of block causal attention, where a position sees its own and earlier blocks of the row; positions
            after the row's current block are neither queries nor keys. Rows are the axis before positions.
        computed: positions whose queries a step with an approximate cache computes; all are keys. None: all.
        observed_first: attention is causal in the order of `observed_order` (WeDLM); `valid` are then the positions
            that the step sees.

    Raises:
        ValueError: a window below 1, or beside learned sinks, or beside blocks of which no span is computed; blocks
            beside causality; `observed_first` beside any of these.
    """

    valid: Bool[Tensor, "*run position"]
    masked: Bool[Tensor, "*run position"]
    answer: Bool[Tensor, "*run position"]
    block: Bool[Tensor, "*run position"]
    causal: bool = False
    sinks: int = 0
    unpadded: bool = False
    window: int | None = None
    blocks: BlockLayout | None = None
    computed: Bool[Tensor, "*#run position"] | None = None
    observed_first: bool = False
    own_canvas: Bool[Tensor, "*#run position"] | None = None
    _computed: dict[Hashable, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        whole = self.blocks is not None and self.computed is None
        if self.window is not None and (self.window < 1 or self.sinks or whole):
            raise ValueError(
                f"CanvasFacts(window={self.window}, sinks={self.sinks}): a window is at least 1, in a run without "
                "learned sink tokens, and without blocks unless a step computes one alone"
            )

        if self.blocks is not None and (self.causal or self.unpadded):
            raise ValueError("block causal attention is not causal, and sees no padding")
        others = (self.causal, self.sinks, self.unpadded, self.window, self.blocks is not None)
        if self.observed_first and any(others):
            raise ValueError(
                "attention to observed positions first is of whole canvases, without sinks and windows"
            )

    @property
    def present(self) -> Bool[Tensor, "*run position"]:
        """Content that the network sees: all of it, in an AR run what is written, with blocks up to the current.

        With a window of masks (SDLM) `valid` says what is seen; after clean text (GIDD) all is.
        """
        if self.blocks is not None and self.blocks.context not in ("window", "clean"):
            return self.valid & (self.block.flip(-1).long().cumsum(-1).flip(-1) > 0)
        return self.valid & ~self.masked if self.causal else self.valid

    def block_bounds(self) -> tuple[Int[Tensor, "*run position"], Int[Tensor, "*run position"]]:
        """First and last position of every position's block, in block causal attention."""
        assert self.blocks is not None
        return self.blocks.bounds(self.block.expand(self.valid.shape))

    @property
    def attending(self) -> Bool[Tensor, "*run position"]:
        """Content whose queries the network computes: what is present, with a cache in the computed span."""
        return self._once("attending", self._attending)

    @property
    def prompt(self) -> Bool[Tensor, "*run position"]:
        """Content that was not masked when the run began."""
        return self.valid & ~self.answer

    @property
    def keys(self) -> Bool[Tensor, "*run key"]:
        """Which keys are defined: the present canvas positions and, after them, the learned sink tokens."""
        return self._once("keys", lambda: beside_sinks(self.present, self.sinks, value=True))

    @property
    def absent_keys(self) -> Bool[Tensor, "*run key"]:
        """Which keys are not defined."""
        return self._once("absent keys", lambda: ~self.keys)

    @property
    def absent_queries(self) -> Bool[Tensor, "*run position"]:
        """Which positions have no query that the network computes."""
        return self._once("absent queries", lambda: ~self.attending)

    def queries(self, name: QueryClass) -> Bool[Tensor, "*run position"]:
        """The queries of a class: its positions, with a cache those that the step computes."""
        found = self.positions(name)
        return found if self.computed is None else found & self.attending

    def positions(self, name: QueryClass) -> Bool[Tensor, "*run position"]:
        """The content of a class that the network sees, whether or not the step computes it."""
        name = checked_class(name, "queries")
        return self._once(("positions", name), lambda: self._positions(name))

    def weights(self, names: Sequence[QueryClass]) -> Float[Tensor, "*run klass position"]:
        """1 for the queries of each class, else 0."""
        return self._once(
            ("weights", *names), lambda: torch.stack([self.queries(name) for name in names], -2).float()
        )

    def expected(self, name: QueryClass) -> Float[Tensor, "*run key"]:
        """e_j = sum_i M_ij / sum_k M_ik over a class of queries: r_j under uniform attention.

        Without causality and windows every query gives 1 / n to each of the n visible keys: all have the same e_j.
        """
        name = checked_class(name, "expected")
        return self._once(("expected", name), lambda: self._expected(name))

    def viewers(self, name: QueryClass) -> Float[Tensor, "*run key"]:
        """How many queries of a class see each key."""
        name = checked_class(name, "viewers")
        return self._once(("viewers", name), lambda: self._viewers(name))

    def undefined(self, name: QueryClass, min_viewers: int) -> Bool[Tensor, "*run key"]:
        """Keys that fewer than `min_viewers` (at least 1) queries of a class see, and those that are absent."""
        name, least = checked_class(name, "undefined"), max(1, min_viewers)
        return self._once(("undefined", name, least), lambda: (self.viewers(name) < least) | self.absent_keys)

    def _once(self, what: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Compute once: all layers of a step read the same."""
        if what not in self._computed:
            self._computed[what] = compute()
        return self._computed[what]

    def _attending(self) -> Bool[Tensor, "*run position"]:
        return self.present if self.computed is None else self.present & self.computed

    def _positions(self, name: QueryClass) -> Bool[Tensor, "*run position"]:
        chosen: dict[str, Tensor] = {
            "all": self.present,
            "masked": self.masked,
            "unmasked": ~self.masked,
            "prompt": self.prompt,
            "block": self.block,
        }
        return self.present & chosen[name]

    def _expected(self, name: QueryClass) -> Float[Tensor, "*run key"]:
        queries, seen = self.queries(name).float(), self.visible
        if self.observed_first:
            # As in a causal model, in the order of attention.
            order = observed_order(self.masked & seen)
            queries, seen = queries.gather(-1, order), seen.gather(-1, order)
            each = (queries / seen.cumsum(-1).clamp(min=1)).flip(-1).cumsum(-1).flip(-1) * seen
            return torch.empty_like(each).scatter(-1, order, each)
        if self.blocks is not None:
            # Key j is seen by the queries from its block's start on; query i sees the keys up to its block's end.
            wide = in_float64(queries)
            start, end, seen = (part.to(wide.device) for part in (*self.block_bounds(), seen))
            each = wide / (seen.cumsum(-1).gather(-1, end) + self.sinks).clamp(min=1)
            found = each.flip(-1).cumsum(-1).flip(-1).gather(-1, start) * seen
            return self._beside(found, each).to(queries)
        if not self.causal and self._whole:
            each = queries.sum(-1, keepdim=True) / (seen.sum(-1, keepdim=True) + self.sinks).clamp(min=1)
            return beside_sinks(seen, self.sinks, value=True) * each
        # Key j is seen by the queries i >= j; query i sees the keys up to i.
        if self.causal and self._whole:
            each = queries / seen.cumsum(-1).clamp(min=1)
            return each.flip(-1).cumsum(-1).flip(-1) * seen
        # Differences of sums over long canvases: in float32 they would lose digits.
        wide = in_float64(queries)
        each = wide / self._in_window(seen.long()).clamp(min=1).to(wide.device)
        even = self._in_window(each.flip(-1)).flip(-1)  # turned round: the queries that see a key
        return even.to(queries).masked_fill(~seen | (self.viewers(name) == 0), 0.0)

    def _viewers(self, name: QueryClass) -> Float[Tensor, "*run key"]:
        queries, seen = self.queries(name).float(), self.visible
        if self.observed_first:
            order = observed_order(self.masked & seen)
            each = queries.gather(-1, order).flip(-1).cumsum(-1).flip(-1)
            return torch.empty_like(each).scatter(-1, order, each) * seen
        if self.blocks is not None:
            found = queries.flip(-1).cumsum(-1).flip(-1).gather(-1, self.block_bounds()[0]) * seen
            return self._beside(found, queries)
        if not self.causal and self._whole:
            return beside_sinks(seen, self.sinks, value=True) * queries.sum(-1, keepdim=True)
        if self._whole:
            return queries.flip(-1).cumsum(-1).flip(-1) * seen
        return self._in_window(self.queries(name).long().flip(-1)).flip(-1).float() * seen

    def _beside(
        self, canvas: Float[Tensor, "*run position"], queries: Float[Tensor, "*run position"]
    ) -> Float[Tensor, "*run key"]:
        """Sums over the queries that see each key, with those of the learned sinks, which all queries see."""
        if not self.sinks:
            return canvas
        return torch.cat([canvas, queries.sum(-1, keepdim=True).expand(*queries.shape[:-1], self.sinks)], -1)

    def pairs(self) -> Bool[Tensor, "*run query key"]:
        """Which attending query sees which canvas key; as large as a pattern, for a single step and layer."""
        where = torch.arange(self.valid.shape[-1], device=self.valid.device)
        distance = where[:, None] - where
        seen = self.attending[..., :, None] & self.visible[..., None, :]
        if self.causal:
            seen = seen & (distance >= 0)
        if self.window is not None and self.blocks is None:  # with blocks `_visible` has the window
            seen = seen & (distance < self.window if self.causal else distance.abs() <= self.window)
        if self.blocks is not None:
            start = self.block_bounds()[0]
            seen = seen & (start[..., None, :] <= start[..., :, None])
        if self.observed_first:
            seen = seen & sees_observed_first(self.masked & self.visible)
        return seen

    @property
    def _whole(self) -> bool:
        """Whether the window, if there is one, holds the canvas."""
        return self.window is None or self.window >= self.valid.shape[-1]

    def _in_window(self, values: Tensor) -> Tensor:
        """The sum of the values at i - w + 1, ..., i, for every i; without causality at i - w, ..., i + w."""
        window, positions = self.window or 0, values.shape[-1]
        after, before = (0, window) if self.causal else (window, window + 1)
        sums = torch.nn.functional.pad(values, (0, after)).cumsum(-1)
        earlier = torch.nn.functional.pad(sums, (before, 0))[..., :positions]
        return sums[..., after:] - earlier

    @property
    def visible(self) -> Bool[Tensor, "*run position"]:
        """Canvas positions that are keys of the computed queries: what is present, and padding that is no padding.

        With `unpadded` the network attends to padding too, which has no score but a share in e_j.
        """
        if self.window is not None and self.blocks is not None:
            assert self.computed is not None
            start = self.computed.int().argmax(-1, keepdim=True)
            where = torch.arange(self.valid.shape[-1], device=self.valid.device)
            return self.present & (where >= start - (self.window - 1))
        if not self.unpadded:
            return self.present
        return torch.ones_like(self.valid) if self.own_canvas is None else self.own_canvas.expand(self.valid.shape)
