"""Reducers per query: `SinkMass`, its attention on given sinks, and `MixingBound`, the bound of its output."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.recording import LayerStep, PatternReducer
from dlm_lens.recording.reducers.norms import norm32
from dlm_lens.sinks import Sinks
from dlm_lens.sinks.detection import check_all_heads

QUERIES = ("step", "batch", "layer", "head", "query")


@dataclass(frozen=True, eq=False)
class SinkMass(PatternReducer):
    """Share of every query's attention that goes to the sinks of its pattern, m_i = sum_{j in sinks} A_ij.

    Args:
        sinks: known sinks of the same prompts and steps, at level "head" or "layer"; sinks of a layer are those of
            all of its heads.

    Raises:
        ValueError: sinks without steps, prompts and layers.
    """

    sinks: Sinks

    name = "sink_mass"
    dims = QUERIES
    unit = "share of attention"
    formula = "sum_{j in sinks} A_ij"

    def __post_init__(self) -> None:
        wanted = (
            ("step", "batch", "layer", "head", "key")
            if self.sinks.level == "head"
            else ("step", "batch", "layer", "key")
        )
        if self.sinks.dims != wanted:
            raise ValueError(f"the sinks have axes {self.sinks.dims}; SinkMass needs {wanted}")

    def __repr__(self) -> str:
        return f"SinkMass({self.sinks.rule})"

    def start(self, layer: LayerStep) -> tuple[Bool[Tensor, "batch #head key"], list[Tensor]]:
        """The sinks of this step and layer, and no tile yet.

        Raises:
            ValueError: there are none of this step and layer, or they are of some of its heads.
        """
        if layer.index not in self.sinks.layers or layer.run.step >= len(self.sinks.is_sink):
            raise ValueError(f"there are no sinks of step {layer.run.step}, layer {layer.index} among {self.sinks}")
        if self.sinks.level == "head":
            check_all_heads(self.sinks.is_sink.shape[3], layer.inputs.q.shape[1], str(self))
        found = self.sinks.is_sink[layer.run.step, :, self.sinks.layers.index(layer.index)]
        found = found[:, None] if found.ndim == 2 else found
        learned, keys = layer.facts.sinks, layer.inputs.k.shape[2]
        # An AR step has fewer keys than the run.
        parts = [found[..., : keys - learned], found[..., found.shape[-1] - learned :]]
        return torch.cat(parts, -1).to(layer.inputs.q.device), []

    def tile(self, state: Any, layer: LayerStep, rows: slice, pattern: Tensor) -> Any:
        """Add the queries of a tile."""
        found, parts = state
        return found, [*parts, (pattern * found[:, :, None]).sum(-1)]

    def finish(self, state: Any, layer: LayerStep) -> Float[Tensor, "batch head query"]:
        """The values of all queries, NaN at padding."""
        return layer.only_queries(torch.cat(state[1], -1))


@dataclass(frozen=True)
class MixingBound(PatternReducer):
    """The upper bound sum_j A_ij ||v_j|| of the norm ||o_i|| of a head's output (2601.19657, Eq. 20)."""

    name = "mixing_bound"
    dims = QUERIES
    unit = "norm of a value"
    formula = "sum_j A_ij ||v_j||_2 (2601.19657, Eq. 20)"

    def start(self, layer: LayerStep) -> tuple[Float[Tensor, "batch head key 1"], list[Tensor]]:
        """The norm of every value, for every query head."""
        norms = norm32(layer.inputs.v)
        return norms.repeat_interleave(layer.inputs.q.shape[1] // norms.shape[1], 1)[..., None], []

    def tile(self, state: Any, layer: LayerStep, rows: slice, pattern: Tensor) -> Any:
        """Add the queries of a tile."""
        norms, parts = state
        return norms, [*parts, (pattern @ norms)[..., 0]]

    def finish(self, state: Any, layer: LayerStep) -> Float[Tensor, "batch head query"]:
        """The values of all queries, NaN at padding."""
        return layer.only_queries(torch.cat(state[1], -1))
