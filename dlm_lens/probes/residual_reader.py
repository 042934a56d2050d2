"""What `replay` reads in one forward pass: received attention, and the residual stream where logits come from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
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
class ResidualReader(Hook):
    """Reads one pass; a hook at the residual stream that changes nothing, and a reader of attention.

    Args:
        layout: where the sink tokens stand.
        rows: rows of the batch, without guidance's second half.
        states: which canvas positions' residual stream to keep.
        queries: which canvas positions count as queries; the network may see fewer, the first ones.
        layers: the layers to watch.
    """

    layout: SinkLayout
    rows: int
    states: Bool[Tensor, "batch position"]
    queries: Bool[Tensor, "batch position"]
    layers: tuple[int, ...] = field()
    residual: dict[int, Float[Tensor, "state d_model"]] = field(default_factory=dict)
    columns: dict[int, ColumnStats] = field(default_factory=dict)

    site: Site = "resid"

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Keep the residual stream of the wanted positions."""
        canvas = tensor[: self.rows, self.layout.canvas(tensor.shape[1])]
        wanted = self.states[:, : canvas.shape[1]].to(canvas.device)
        self.residual[hook.layer()] = canvas[wanted]
        return tensor

    def read(self, inputs: AttentionInputs) -> None:
        """Sum what each key receives, in the network's order of positions."""
        if inputs.layer not in self.layers:
            return
        given = _first_rows(inputs, self.rows)
        keys = given.k.shape[2]
        counted = torch.zeros(self.rows, keys, dtype=torch.bool, device=given.q.device)
        canvas = self.layout.canvas(keys)
        counted[:, canvas] = self.queries[:, : canvas.stop - canvas.start].to(counted.device)
        # A module may hand on the canvas's queries alone, or the sinks' too, which do not count.
        self.columns[inputs.layer] = stream_columns(given, counted[:, given.own])


@contextmanager
def watching(model: Any, watcher: ResidualReader, attention: bool) -> Iterator[None]:
    """Let a watcher see the forward passes of the block, behind every hook attached so far."""
    modules = hooked_attentions(model) if attention else []
    with listening(model):
        before = [module.hook_z.readers for module in modules]
        for module in modules:
            module.hook_z.readers = (*module.hook_z.readers, watcher.read)
        try:
            with attach_hooks(model, watcher, layers=watcher.layers):
                yield
        finally:
            for module, readers in zip(modules, before, strict=True):
                module.hook_z.readers = readers


def stacked_layers(
    values: Sequence[Float[Tensor, "batch head key"]], layout: SinkLayout, length: int
) -> Float[Tensor, "batch layer head key"]:
    """Layers side by side, keys as the sinks room has them: the canvas's, then the sinks'; NaN where nothing is."""
    found = layout.sinks_last(torch.stack([value.float().cpu() for value in values], 1))
    missing = length + layout.count - found.shape[-1]
    return torch.nn.functional.pad(found, (0, missing), value=torch.nan) if missing else found


def _first_rows(inputs: AttentionInputs, rows: int) -> AttentionInputs:
    """The conditional rows of a pass."""
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
    )
