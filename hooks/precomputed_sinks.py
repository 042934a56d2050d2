"""Sinks that are known beforehand: the columns that a `Received` or `Sinks` has at a step, for a network's keys."""

from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from dlm_lens.attention import HookContext, SinkLayout, run_of, top_columns
from dlm_lens.sinks import Detector, Received, Sinks
from dlm_lens.sinks.received import AXES, COLUMN_SUM, RELATIVE, Level

KnownSource = Received | Sinks

_PER_STEP = ("values", "expected", "counted", "tokens", "masked", "viewers")


def known_columns(
    source: KnownSource,
    detector: Detector | None,
    top: int | None,
    per: Level,
    relative: bool,
    keys: int,
    hook: HookContext | None,
    who: Any,
) -> Bool[Tensor, "batch #head key"]:
    """The sinks of `source` at the run's step in this layer, in the network's order of positions.

    A source without a step axis holds at every step. Rows: as many as the run's prompts, or one for all.

    Raises:
        ValueError: the source has no such step, layer or rows, or a canvas of another length.
    """
    step = run_of(hook, who).step if "step" in source.dims else 0
    layer = hook.layer() if hook is not None and "layer" in source.dims else 0
    if isinstance(source, Sinks):
        found, scores = (_wide(tensor, source.dims) for tensor in (source.is_sink, source.scores))
        _check_step(len(found), step, who)
        index = _layer_index(source, layer, who)
        found, scores = found[step, :, index], scores[step, :, index]
    else:
        assert detector is not None
        _check_step(len(source.values), step, who)
        received = _at_step(source, step)
        if per != "model" and "layer" in source.dims:
            index = _layer_index(source, layer, who)
            received = received.part(layers=slice(index, index + 1))
        received = received.on_scale(RELATIVE if relative else COLUMN_SUM).at_level(per)
        scores = received.read(detector.quantity)[0][0, :, 0]
        found = detector.detect(scores)
    if top is not None:
        found = top_columns(scores.float().masked_fill(~found, torch.nan), top)
    return _for_network(found, source.sinks, keys, hook, who)


def _at_step(source: Received, step: int) -> Received:
    """One step of it, as views."""
    given = {field.name: getattr(source, field.name) for field in fields(source) if field.name in _PER_STEP}
    part = {name: value[step : step + 1] for name, value in given.items() if value is not None}
    return replace(source, **part)


def _wide(tensor: Tensor, dims: tuple[str, ...]) -> Tensor:
    """Put axes of size 1 back where `dims` has none."""
    for place, name in enumerate(AXES):
        tensor = tensor if name in dims else tensor.unsqueeze(place)
    return tensor


def _check_step(steps: int, step: int, who: Any) -> None:
    if step >= steps:
        raise ValueError(f"{who}: the source has {steps} steps and the run is at step {step}")


def _layer_index(source: KnownSource, layer: int, who: Any) -> int:
    if "layer" not in source.dims:
        return 0
    if layer not in source.layers:
        known = ", ".join(map(str, source.layers))
        raise ValueError(f"{who}: the source knows layers {known}, not {layer}; limit the hook with at_layers")
    return source.layers.index(layer)


def _for_network(
    found: Bool[Tensor, "batch #head key"], sinks: int, keys: int, hook: HookContext | None, who: Any
) -> Bool[Tensor, "rows #head key"]:
    """Canvas and sinks where this network has them; rows repeated for guidance."""
    layout: SinkLayout = getattr(hook, "sinks", None) or SinkLayout()
    canvas, known = keys - layout.count, found.shape[-1] - sinks
    run = getattr(hook, "run", None)
    growing = run is not None and bool(getattr(hook, "causal", False))
    if sinks != layout.count or canvas > known or (canvas < known and not growing):
        raise ValueError(
            f"{who}: the source has {known} canvas positions and {sinks} sink tokens, the run {canvas} and "
            f"{layout.count}; give one of the same prompts, length and model"
        )
    rows = 1 if run is None else len(run.tokens)
    if rows % len(found) and len(found) > 1:
        raise ValueError(f"{who}: the source has {len(found)} rows and the run {rows}")
    found = found if run is None else found.repeat(rows // len(found), 1, 1)
    parts = [found[..., known:], found[..., :canvas]]
    return torch.cat(parts if layout.placement == "front" else parts[::-1], -1)
