"""Readers of one forward pass: hooks that change nothing and keep the residual stream, and received attention."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import (
    AttentionInputs,
    ColumnStats,
    Hook,
    PointContext,
    SinkLayout,
    Site,
    attach_hooks,
    hooked_attentions,
    listening,
    stream_columns,
)


@dataclass(eq=False)
class EntryReader(Hook):
    """Keeps the output of some layers at single positions; a hook of the residual stream that changes nothing.

    Args:
        layout: where the network has its learned sink tokens.
        rows: rows of the batch, without guidance's second half.
        batch: row of every entry.
        position: its position: canvas positions first, then the learned sink tokens.
        streams: layer -> what it kept in the last pass.
    """

    layout: SinkLayout
    rows: int
    batch: Int[Tensor, "entry"]
    position: Int[Tensor, "entry"]
    streams: dict[int, Float[Tensor, "entry d_model"]] = field(default_factory=dict)

    site: Site = "resid"

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Keep the states of the entries."""
        states = self.layout.sinks_last(tensor[: self.rows], 1)
        self.streams[hook.layer()] = states[self.batch.to(tensor.device), self.position.to(tensor.device)]
        return tensor


@dataclass(eq=False)
class ResidualReader(Hook):
    """Keeps the output of some layers at a mask of positions, and the received attention of those layers.

    Args:
        layout: where the network has its learned sink tokens.
        rows: rows of the batch, without guidance's second half.
        states: the canvas positions whose residual stream it keeps.
        queries: the canvas positions that count as queries; a pass over a prefix has the first ones only.
        layers: the layers that it reads.
        first: the position of the pass's first query.
        residual: layer -> the states that it kept in the last pass.
        columns: layer -> the sums of received attention in the last pass.
    """

    layout: SinkLayout
    rows: int
    states: Bool[Tensor, "batch position"]
    queries: Bool[Tensor, "batch position"]
    layers: tuple[int, ...] = field()
    first: int = 0
    residual: dict[int, Float[Tensor, "state d_model"]] = field(default_factory=dict)
    columns: dict[int, ColumnStats] = field(default_factory=dict)

    site: Site = "resid"

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Keep the states at the positions."""
        self.keep(hook.layer(), tensor)
        return tensor

    def keep(self, layer: int, tensor: Float[Tensor, "row position d_model"]) -> None:
        """Keep the states of a tensor of the network's positions as those of a layer."""
        canvas = tensor[: self.rows, self.layout.canvas(tensor.shape[1])]
        wanted = self.states[:, self.first : self.first + canvas.shape[1]].to(canvas.device)
        self.residual[layer] = canvas[wanted]

    def read(self, inputs: AttentionInputs) -> None:
        """Sum the attention that each key receives, in the network's order of positions."""
        if inputs.layer not in self.layers:
            return
        given = _first_rows(inputs, self.rows)
        keys = given.k.shape[2]
        counted = torch.zeros(self.rows, keys, dtype=torch.bool, device=given.q.device)
        canvas = self.layout.canvas(keys)
        counted[:, canvas] = self.queries[:, : canvas.stop - canvas.start].to(counted.device)
        # Queries of learned sink tokens, where a module has them, do not count.
        self.columns[inputs.layer] = stream_columns(given, counted[:, given.own])


@contextmanager
def reading(model: Any, reader: ResidualReader, attention: bool) -> Iterator[None]:
    """Attach a reader to the forward passes of the block, after every hook that is attached already."""
    modules = hooked_attentions(model) if attention else []
    with listening(model):
        before = [module.hook_z.readers for module in modules]
        for module in modules:
            module.hook_z.readers = (*module.hook_z.readers, reader.read)
        try:
            with attach_hooks(model, reader, layers=reader.layers):
                yield
        finally:
            for module, readers in zip(modules, before, strict=True):
                module.hook_z.readers = readers


def stacked_layers(
    values: Sequence[Float[Tensor, "batch head key"]], layout: SinkLayout, length: int
) -> Float[Tensor, "batch layer head key"]:
    """The layers in one tensor, canvas keys first, learned sinks last; NaN for keys that the pass did not have."""
    found = layout.sinks_last(torch.stack([value.float().cpu() for value in values], 1))
    missing = length + layout.count - found.shape[-1]
    return torch.nn.functional.pad(found, (0, missing), value=torch.nan) if missing else found


def _first_rows(inputs: AttentionInputs, rows: int) -> AttentionInputs:
    if len(inputs.q) == rows:
        return inputs

    def cut(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or len(tensor) == 1 else tensor[:rows]

    dropped = inputs.dropped
    if dropped is not None:
        columns = cut(dropped.columns)
        dropped = replace(dropped, columns=dropped.columns if columns is None else columns)
    return replace(
        inputs,
        q=inputs.q[:rows],
        k=inputs.k[:rows],
        v=inputs.v[:rows],
        visible=cut(inputs.visible),
        dropped=dropped,
        pattern=cut(inputs.pattern),
        z=cut(inputs.z),
        lse=cut(inputs.lse),
    )
