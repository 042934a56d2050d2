"""The positions that a lens reads: given ones, a class of them, or the sinks of every step with controls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.hooks.positions import PositionClass, of_class
from dlm_lens.printable import shown
from dlm_lens.sampling import DenoisingRun, StoredCanvases
from dlm_lens.sampling.moved_tokens import answer_of_steps
from dlm_lens.sinks import Sinks

PositionMask = Bool[Tensor, "batch position"] | Bool[Tensor, "step batch position"]
"""The positions to read, the same at every step or those of each step of the run."""

GivenLensPositions = Sinks | Sequence[int] | PositionMask | PositionClass | None
"""Positions as a user gives them to a lens."""


@dataclass(frozen=True, eq=False)
class LensPositions:
    """Positions of a run, one entry each.

    Args:
        step: step of each entry.
        batch: row of each entry.
        position: canvas position; learned sink tokens come after the canvas.
        sink: whether it is a sink in any of the layers; False for a control.
        sink_layer: the layers in which it is a sink, in any head.
    """

    step: Int[Tensor, "entry"]
    batch: Int[Tensor, "entry"]
    position: Int[Tensor, "entry"]
    sink: Bool[Tensor, "entry"]
    sink_layer: Bool[Tensor, "entry layer"]


def choose_positions(
    stored: StoredCanvases,
    positions: GivenLensPositions,
    steps: Sequence[int],
    layers: tuple[int, ...],
    learned: int,
    controls: bool,
    seed: int,
) -> LensPositions:
    """The entries to read, in the order of steps, rows and positions; controls come after all sinks.

    Args:
        stored: the run whose canvases are read, with its network.
        positions: sinks, canvas positions, a mask of them, a class of them, or None for all.
        steps: the steps to read.
        layers: the layers to read.
        learned: how many learned sink tokens the model has.
        controls: whether each sink is paired with a control.
        seed: of the controls.

    Raises:
        ValueError: a position or class that does not exist, a mask of another shape, or sinks of another run.
    """
    run = stored.run
    if isinstance(positions, str):
        if positions not in get_args(PositionClass):
            known = ", ".join(map(repr, get_args(PositionClass)))
            raise ValueError(
                f"positions is {shown(positions)}; give Sinks, canvas positions, a mask, or one of {known}"
            )
        positions = of_class(positions, run.open[:-1], run.attention_mask, answer_of_steps(run))
    if isinstance(positions, Sinks):
        return _of_sinks(stored, positions, steps, layers, controls, seed)
    canvas = run.tokens.shape[1]
    if isinstance(positions, Tensor):
        return _given(run, positions, steps, layers, canvas + learned)
    chosen = range(canvas + learned) if positions is None else list(positions)
    if positions is not None and not len(chosen):
        raise ValueError("positions is empty; give at least one, or None for all")
    for position in chosen:
        if not -canvas <= position < canvas + learned:
            raise ValueError(
                f"position {position}: canvas positions go from 0 to {canvas - 1}, or from -{canvas} to -1"
                + (f", and the learned sink tokens' up to {canvas + learned - 1}" if learned else "")
            )
    wanted = torch.zeros(len(steps), len(run.tokens), canvas + learned, dtype=torch.bool)
    wanted[..., [p % canvas if p < 0 else p for p in chosen]] = True
    wanted &= _content(run, learned)
    return _entries(wanted, steps, torch.zeros(*wanted.shape[:2], len(layers), wanted.shape[2], dtype=torch.bool))


def _given(
    run: DenoisingRun, positions: PositionMask, steps: Sequence[int], layers: tuple[int, ...], keys: int
) -> LensPositions:
    """The positions of a mask; without learned sink tokens, of which it then has none."""
    rows, canvas = run.tokens.shape
    shapes = [[*first, rows, last] for first in ([], [run.steps]) for last in sorted({canvas, keys})]
    if positions.dtype != torch.bool or list(positions.shape) not in shapes:
        raise ValueError(
            f"positions is {positions.dtype} of shape {list(positions.shape)}; the run needs a mask of shape "
            f"{' or '.join(map(str, shapes))}, or a list of positions"
        )
    positions = torch.nn.functional.pad(positions.cpu(), (0, keys - positions.shape[-1]))
    wanted = (positions & _content(run, keys - canvas)).expand(run.steps, rows, keys)[list(steps)]
    return _entries(wanted, steps, torch.zeros(*wanted.shape[:2], len(layers), keys, dtype=torch.bool))


def _of_sinks(
    stored: StoredCanvases,
    sinks: Sinks,
    steps: Sequence[int],
    layers: tuple[int, ...],
    controls: bool,
    seed: int,
) -> LensPositions:
    run = stored.run
    if sinks.dims[:2] != ("step", "batch") or sinks.is_sink.shape[:2] != run.unmasked.shape[:2]:
        raise ValueError(
            f"the sinks have axes {sinks.dims} of {list(sinks.is_sink.shape)}; a run of {run.steps} steps and "
            f"{len(run.tokens)} rows needs sinks of this run, found at every step"
        )
    found = sinks.is_sink[list(steps)]
    if "head" in sinks.dims:
        found = found.any(-2)
    if "layer" in sinks.dims:
        none = torch.zeros_like(found[:, :, 0])
        where = [sinks.layers.index(layer) if layer in sinks.layers else None for layer in layers]
        by_layer = torch.stack([none if i is None else found[:, :, i] for i in where], 2)
        anywhere, found = found.any(2), by_layer.any(2)
    else:
        anywhere = found
        by_layer = found[:, :, None].expand(-1, -1, len(layers), -1)
    # Of the positions that a step computes, which alone have states to read: sinks, and so many controls.
    computed = torch.stack([stored.computes(step) for step in steps])
    found = (
        found & torch.nn.functional.pad(computed.byte(), (0, found.shape[-1] - computed.shape[-1]), value=1).bool()
    )
    entries = _entries(found, steps, by_layer)
    if not controls:
        return entries
    chosen = _controls(run, found, anywhere, computed, steps, seed)
    others = _entries(chosen, steps, torch.zeros_like(by_layer))
    sinks_first = {
        name: torch.cat([getattr(entries, name), getattr(others, name)])
        for name in ("step", "batch", "position", "sink_layer")
    }
    return LensPositions(**sinks_first, sink=torch.arange(len(entries.step) + len(others.step)) < len(entries.step))


def _controls(
    run: DenoisingRun,
    found: Bool[Tensor, "step batch key"],
    anywhere: Bool[Tensor, "step batch key"],
    computed: Bool[Tensor, "step batch position"],
    steps: Sequence[int],
    seed: int,
) -> Bool[Tensor, "step batch key"]:
    """Positions that are a sink in no layer: per step and row as many masked and as many visible ones as sinks."""
    canvas = run.tokens.shape[1]
    masked, chosen = run.masked[list(steps)], torch.zeros_like(found)
    draws = torch.rand(masked.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    content = _content(run, 0) & computed
    if run.autoregressive:
        content, masked = content & ~masked, torch.zeros_like(masked)
    for kind in (masked, ~masked):
        count = (found[..., :canvas] & kind).sum(-1, keepdim=True)
        free = kind & content & ~anywhere[..., :canvas]
        order = draws.masked_fill(~free, -1.0).argsort(-1, descending=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(canvas).expand_as(order))
        chosen[..., :canvas] |= free & (rank < count)
    return chosen


def _entries(wanted: Tensor, steps: Sequence[int], by_layer: Bool[Tensor, "step batch layer key"]) -> LensPositions:
    place, batch, position = wanted.nonzero(as_tuple=True)
    sink_layer = by_layer[place, batch, :, position]
    return LensPositions(torch.tensor(list(steps))[place], batch, position, sink_layer.any(-1), sink_layer)


def _content(run: DenoisingRun, learned: int) -> Bool[Tensor, "batch key"]:
    return torch.nn.functional.pad(run.attention_mask.byte(), (0, learned), value=1).bool()
