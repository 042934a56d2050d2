"""Received attention of tokens in place of canvas positions, where a sampler inserts and deletes masks."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.attention import beside_sinks
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.moved_tokens import NOWHERE, at_places, history_places
from dlm_lens.sinks.from_recording import received_of
from dlm_lens.sinks.received import Received


def received_by_token(recording: Any, queries: QueryClass = "all") -> Received:
    """`of_tokens` of the attention that a recording holds.

    Raises:
        TypeError: something else than a `Recording`.
        ValueError: it has no received attention of these queries.
    """
    if not isinstance(recording, Recording):
        raise TypeError(
            f'follow="token" reads where tokens went in a Recording, not in a {type(recording).__name__}'
        )
    return of_tokens(received_of(recording, queries), recording.run)


def of_tokens(received: Received, run: DenoisingRun) -> Received:
    """The same attention by token: key j is one token or mask at every step, wherever it was (`history_places`).

    A key has no score where it was on no canvas: before its mask was inserted, after it was deleted. Its token is
    then the last one that it had, before that the first one. Learned sink tokens stay the last keys. Where nothing
    can move, keys are positions.

    Args:
        received: by position, of all steps and rows of the run.
        run: from `denoise`, or a part of one.
    """
    if run.origins is None:
        return received
    places, sinks = history_places(run), received.sinks

    def moved(values: Float[Tensor, "step batch #layer #head key"], missing: float) -> Tensor:
        at = places[:-1, :, None, None].expand(*values.shape[:-1], -1)
        canvas = values[..., : values.shape[-1] - sinks]
        found = canvas.gather(-1, at.clamp(min=0)).masked_fill(at == NOWHERE, missing)
        return torch.cat([found, values[..., canvas.shape[-1] :]], -1)

    tokens = _of_nearest_step(at_places(run.canvases, places, NOWHERE), places)
    flags: dict[str, Any] = {}
    for name in ("masked", "answer", "decided"):
        if (given := getattr(received, name)) is not None:
            there = at_places(given[..., : run.tokens.shape[-1]], places[:-1], False)
            flags[name] = beside_sinks(there, sinks, value=False)
    content = at_places(run.attention_mask[None], places[:1], True)[0] & (places != NOWHERE).any(0)
    return replace(
        received,
        values=moved(received.values, torch.nan),
        expected=moved(received.expected, 0.0),
        viewers=None if received.viewers is None else moved(received.viewers, 0.0),
        tokens=beside_sinks(tokens[:-1], sinks),
        **flags,
        valid=beside_sinks(content, sinks, value=True),
        final_tokens=beside_sinks(tokens[-1], sinks),
        follow="token",
    )


def _of_nearest_step(
    tokens: Int[Tensor, "canvas batch entry"], places: Int[Tensor, "canvas batch entry"]
) -> Int[Tensor, "canvas batch entry"]:
    """The token of an entry at every step: the last one that it had, before its first step the first one."""
    there = places != NOWHERE
    step = torch.arange(len(places))[:, None, None]
    # The number of the last step so far, else of the first one, at which the entry was on the canvas.
    so_far = (there * (step + 1)).cummax(0).values - 1
    return tokens.gather(0, torch.where(so_far < 0, there.int().argmax(0), so_far))
