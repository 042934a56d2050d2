"""A float64 network with explicit stale keys and values: what a step under an approximate cache computes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import dlm_lens as dl
from tests.reference import Edit, forward64


def span_of(run: dl.DenoisingRun, step: int, *, shift: bool) -> tuple[int, int] | None:
    """What a step computes, counted from the blocks of the run; None for everything."""
    if not run.settings.get("cache") or run.blocks[: step + 1].count(run.blocks[step]) == 1:
        return None
    start, stop = run.spans[step]
    return start - shift, run.tokens.shape[1] if run.settings.get("cache") == "prefix" else stop


def whole_step(run: dl.DenoisingRun, step: int) -> int:
    """The step whose keys and values a step finds."""
    return run.blocks.index(run.blocks[step])


def stale64(
    model: Any,
    run: dl.DenoisingRun,
    step: int,
    row: int,
    *,
    canvas: Tensor | None = None,
    edits: Mapping[tuple[int, str], Edit] | None = None,
    whole_edits: Mapping[tuple[int, str], Edit] | None = None,
    visible: Tensor | None = None,
) -> dict[str, Tensor]:
    """Everything that a float64 network computes of one row, without its padding; only the span's queries count.

    Keys and values outside the span are replaced by those of the block's first step, in every layer.
    """
    keep = run.attention_mask[row]
    shown = (run.canvases[step, row] if canvas is None else canvas)[keep][None]
    span = span_of(run, step, shift=bool(getattr(model.config, "logit_shift", False)))
    if span is None:
        return forward64(model, shown, edits=whole_edits if edits is None else edits, visible=visible)
    first = run.canvases[whole_step(run, step), row]
    old = forward64(model, first[keep][None], edits=whole_edits, visible=visible)
    where = torch.arange(len(keep))[keep]
    outside = ((where < span[0]) | (where >= span[1]))[None, :, None, None]
    replaced: dict[tuple[int, str], Edit] = dict(edits or {})
    for layer in range(model.config.num_hidden_layers):
        for name in ("rot_k", "v"):
            kept, before = old[f"{name}{layer}"], replaced.get((layer, name), lambda same: same)
            replaced[layer, name] = lambda new, kept=kept, before=before: torch.where(outside, kept, before(new))
    return forward64(model, shown, edits=replaced, visible=visible)
