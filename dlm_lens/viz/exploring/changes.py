"""What an explorer changes in a run: hidden keys, hidden heads, tokens of the canvas; and the hooks that do it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlm_lens.attention import HookLike, SinkToken
from dlm_lens.hooks import ablate, at_heads, at_layers, mask_positions, sink


@dataclass(frozen=True)
class HiddenKey:
    """A key that no query sees, in any layer, head or step: a canvas position, or a learned sink token."""

    position: int | SinkToken


@dataclass(frozen=True)
class HiddenHead:
    """A head whose output is zero at every position and step."""

    layer: int
    head: int


@dataclass(frozen=True)
class CanvasEdit:
    """A token that a step finds at a position, instead of the run's own; in AR decoding the one decoded there.

    Args:
        step: the step that sees it first; in AR decoding the one that decodes the position.
        position: canvas position.
        token: its id.
    """

    step: int
    position: int
    token: int


def place_of(position: int | SinkToken) -> tuple[bool, int]:
    """By which positions are ordered: those of the canvas, then learned sink tokens."""
    return (True, position.index) if isinstance(position, SinkToken) else (False, position)


def coded(position: int | SinkToken) -> int:
    """A position as pages have it: -1 - i for learned sink token i."""
    return -1 - position.index if isinstance(position, SinkToken) else position


def decoded(position: int) -> int | SinkToken:
    """The inverse of `coded`."""
    return sink(-1 - position) if position < 0 else position


Change = HiddenKey | HiddenHead | CanvasEdit


def hooks_of(changes: Sequence[Change]) -> tuple[HookLike, ...]:
    """The hooks that hide the keys and heads: one for all keys, one for each layer with hidden heads."""
    keys = [change.position for change in changes if isinstance(change, HiddenKey)]
    heads: dict[int, list[int]] = {}
    for change in changes:
        if isinstance(change, HiddenHead):
            heads.setdefault(change.layer, []).append(change.head)
    found: list[HookLike] = [mask_positions(*sorted(keys, key=place_of))] if keys else []
    found += [at_heads(at_layers(ablate("z"), [layer]), sorted(own)) for layer, own in sorted(heads.items())]
    return tuple(found)


def edits_of(changes: Sequence[Change]) -> tuple[CanvasEdit, ...]:
    """The edits of the canvas, in the order in which the run meets them; of a place the last edit counts."""
    edits = {(one.step, one.position): one for one in changes if isinstance(one, CanvasEdit)}
    return tuple(edits[place] for place in sorted(edits))


def callbacks_of(changes: Sequence[Change], *, autoregressive: bool) -> dict[str, Callable[..., Any]]:
    """The argument of `denoise` that makes the edits, if any: `on_canvas`, in AR decoding `on_logits`."""
    edits = edits_of(changes)
    if not edits:
        return {}

    def plant(step: int, canvas: Tensor) -> Tensor:
        for edit in edits:
            if edit.step == step:
                canvas[:, edit.position] = edit.token
        return canvas

    def force(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        for edit in edits:
            if edit.step == step:
                logits = torch.full_like(logits, -torch.inf)
                logits[:, edit.token] = 0.0
        return logits

    return {"on_logits": force} if autoregressive else {"on_canvas": plant}
