"""`SplitAttention`: received attention of random parts of the queries, the null of "separate sinks" (Figure 6a)."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import LARGEST_COUNT, RULES, SEED, store_plain_numbers, whole
from dlm_lens.attention import MIN_VIEWERS, received_by_class
from dlm_lens.placement import in_float64
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.recording.recording import as_recording
from dlm_lens.recording.reducers.base import LayerStep, Reducer
from dlm_lens.sinks.from_recording import received_of
from dlm_lens.sinks.received import Received

SplitBy = Literal["random", "position"]
"""At random, or by position: the last queries of the canvas against the others."""

PARTS: tuple[QueryClass, ...] = ("masked", "unmasked")


@dataclass(frozen=True)
class SplitAttention(Reducer):
    """Received attention of both parts of a split of the queries that ignores which of them are masked.

    A step with m masked and u unmasked queries is split into parts of m and u queries, with the same split in all
    layers and heads (with an approximate cache, of the queries that the step computes): score_j = r_j / e_j of
    each part, as `ReceivedAttention` has it for the two classes. Sinks of the parts differ as far as any m and u
    queries differ; only what the classes differ beyond that is due to the masks. In block causal attention, where
    queries of several blocks see different keys, every block is split into parts of its own m and u queries: their
    e_j are those of the classes. Record it together with `ReceivedAttention(queries=("masked", "unmasked"))`;
    `received_of_split` reads it. Not for causal models, in which a masked position is no query, nor for layers with
    a sliding window shorter than the canvas, in which every query has other keys.

    Args:
        draws: how many random splits; 1 for a split by position.
        by: "random", or "position": the last m queries (of each block) against the first u.
        seed: of the random splits, which depend on the prompt, the step and the draw alone.
        min_viewers: in a part of fewer queries all keys are undefined (NaN).

    Raises:
        ValueError: no draw, several draws by position, no such split, or no whole number.
    """

    draws: int = 8
    by: SplitBy = "random"
    seed: int = 0
    min_viewers: int = MIN_VIEWERS

    dims = ("step", "batch", "layer", "head", "key", "draw", "part")
    unit = "relative to uniform"
    formula = "sum_i A_ij / e_j over each part of a split of the queries"

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        whole(least=1, most=LARGEST_COUNT).check("SplitAttention.draws", self.draws)
        RULES["min_viewers"].check("SplitAttention.min_viewers", self.min_viewers)
        SEED.check("SplitAttention.seed", self.seed)
        if self.by not in get_args(SplitBy) or (self.by == "position" and self.draws > 1):
            raise ValueError(f"{self}: by is 'random', or 'position' with draws=1")

    @property
    def name(self) -> str:
        """The array: split_random or split_position."""
        return f"split_{self.by}"

    @property
    def labels(self) -> Mapping[str, tuple[str, ...]]:
        """The class whose size each part has."""
        return {"part": PARTS}

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head key draw part"]:
        """The scores of both parts of every draw.

        Raises:
            ValueError: a causal model, one that attends to observed tokens first, or a layer with a sliding window
                shorter than the canvas.
        """
        facts = layer.facts
        if facts.causal:
            raise ValueError(f"{self}: in a causal model masked positions are no queries, so nothing is split")
        if facts.observed_first:
            raise ValueError(
                f"{self}: each query sees other keys (observed tokens first), so that parts of as many queries "
                "have other e_j; take a model that sees its whole canvas"
            )
        if facts.window is not None and facts.blocks is None and facts.window < facts.valid.shape[-1]:
            raise ValueError(
                f"{self}: in layer {layer.index} each query sees other keys (a sliding window of {facts.window}), "
                "so that parts of as many queries have other e_j; choose layers without a window (layers=)"
            )
        weights: Tensor = layer.run.once((self, layer.run.step), lambda: self._weights(layer))
        sums = received_by_class(layer.inputs, weights.float())
        sums = sums.unflatten(1, (self.draws, len(PARTS))).permute(0, 3, 4, 1, 2)
        expected = torch.stack([layer.facts.expected(name) for name in PARTS], -1)[:, None, :, None]
        undefined = torch.stack([layer.undefined(name, self.min_viewers) for name in PARTS], -1)
        return (sums / expected).masked_fill(undefined[:, None, :, None], torch.nan)

    def _weights(self, layer: LayerStep) -> Bool[Tensor, "batch klass query"]:
        """The two parts of every draw, one after the other."""
        # With a cache a pass computes the queries of a span alone, and the sizes and e_j of the classes are theirs.
        facts = layer.facts
        positions = facts.valid.shape[-1]
        blocks = facts.attending.new_zeros((len(facts.attending), positions), dtype=torch.long)
        if facts.blocks is not None:
            blocks += facts.block_bounds()[0]
        rows = []
        for row, (inside, masked, block) in enumerate(
            zip(facts.attending, facts.queries("masked"), blocks, strict=True)
        ):
            order = self._order(layer, row, inside, block)
            in_block = torch.bincount(block[inside], minlength=len(block))
            masked_in_block = torch.bincount(block[masked], minlength=len(block))
            place = order - (in_block.cumsum(0) - in_block)[block]  # among the queries of the same block
            first = (place < masked_in_block[block]) & inside
            rows.append(torch.stack([first, ~first & inside], 1).flatten(0, 1))
        return torch.stack(rows)

    def _order(
        self, layer: LayerStep, row: int, inside: Bool[Tensor, "query"], block: Int[Tensor, "query"]
    ) -> Int[Tensor, "draw query"]:
        """Per draw, every query's place in an order by block; the first m of a block are its first part."""
        if self.by == "position":
            keys = -torch.arange(len(inside), device=inside.device)[None] / len(inside)
        else:
            run = layer.run
            prompt = run.tokens[row][run.prompt[row]].tolist()
            seed = zlib.crc32(repr((self.seed, run.step, prompt)).encode())
            drawn = torch.rand(
                self.draws, int(inside.sum()), generator=torch.Generator().manual_seed(seed), dtype=torch.float32
            )
            keys = torch.zeros(self.draws, len(inside))
            keys[:, inside.cpu()] = drawn
            keys = keys.to(inside.device)
        # Numbers below 1 apart, so that blocks stay together; what is no query comes last.
        wide = in_float64(keys)
        keys = torch.where(inside.to(wide.device), wide + 2 * block.to(wide.device), torch.inf)
        return keys.argsort(dim=-1, stable=True).argsort(-1).to(inside.device)


def received_of_split(recording: Recording, by: SplitBy = "random", draw: int = 0) -> tuple[Received, Received]:
    """Received attention of the two parts of one recorded split: as many queries as are masked, and the others.

    Args:
        recording: with `SplitAttention(by=by)` and `ReceivedAttention(queries=("masked", "unmasked"))`.
        by: "random" or "position".
        draw: index of the split.

    Raises:
        TypeError: no `Recording`.
        ValueError: one of the three was not recorded.
        IndexError: no such draw.
    """
    recording = as_recording(recording)
    name = f"split_{by}"
    if name not in recording.specs:
        raise ValueError(f"this recording has no {name}; record with SplitAttention(by={by!r})")
    values = getattr(recording, name)[..., draw, :]
    first, second = (
        replace(received_of(recording, kind), values=values[..., part]) for part, kind in enumerate(PARTS)
    )
    return first, second
