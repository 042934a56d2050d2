"""Received attention, and statistics of hidden states, out of a Recording."""

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sinks.detectors.base import HiddenQuantity, Quantity
from dlm_lens.sinks.key_statistics import KeyStatistic
from dlm_lens.sinks.received import AXES, RELATIVE, Received


def received_of(recording: Recording, queries: QueryClass = "all") -> Received:
    """The received attention of a recorded class of queries, as `received_over_steps` gives it for the same run.

    Raises:
        ValueError: ReceivedAttention of this class was not recorded.
    """
    name = "received" if queries == "all" else f"received_{queries}"
    if name not in recording.specs:
        raise ValueError(
            f"this recording has no {name}; record with ReceivedAttention(queries={queries!r}), it has "
            f"{', '.join(recording.specs)}"
        )
    run = recording.run
    return Received(
        values=getattr(recording, name),
        expected=recording.expected_by_layer(queries)[:, :, :, None],
        counted=recording.counted(queries),
        tokens=recording.tokens,
        masked=recording.masked,
        valid=recording.valid,
        final_tokens=_final(recording),
        scale=RELATIVE,
        layers=recording.layers,
        queries=queries,
        min_viewers=int(recording.specs[name].settings["min_viewers"]),
        sinks=recording.sinks,
        tokenizer=run.tokenizer,
        viewers=recording.viewers_by_layer(queries)[:, :, :, None],
    )


def key_statistic_of(recording: Recording, quantity: HiddenQuantity) -> KeyStatistic:
    """What detectors of hidden states judge: "max activation" or "key norm", as recorded.

    Raises:
        ValueError: MassiveActivations, or KeyNorm per head, was not recorded.
    """
    name, reducer = {
        "max activation": ("max_activation", "MassiveActivations()"),
        "key norm": ("key_norm", "KeyNorm()"),
    }[quantity]
    if name not in recording.specs:
        raise ValueError(f"this recording has no {name}; record with {reducer}")
    values: Tensor = getattr(recording, name)
    median = None
    if quantity == "max activation":
        values, median = values[:, :, :, None], recording.median_activation[..., None, None]
    else:
        # Every query head has its key's norm.
        values = values.repeat_interleave(_groups(recording, values), 3)
    return KeyStatistic(
        values=values,
        quantity=quantity,
        median=median,
        tokens=recording.tokens,
        masked=recording.masked,
        valid=recording.valid,
        layers=recording.layers,
        dims=tuple(axis for axis in AXES if axis != "head") if quantity == "max activation" else AXES,
        sinks=recording.sinks,
        tokenizer=recording.run.tokenizer,
    )


def judged_of(recording: Recording, quantity: Quantity) -> Received | KeyStatistic:
    """What a detector of this quantity judges: received attention of all queries, or a statistic of hidden states.

    Raises:
        ValueError: it was not recorded.
    """
    if quantity == "max activation" or quantity == "key norm":
        return key_statistic_of(recording, quantity)
    return received_of(recording)


def _groups(recording: Recording, values: Float[Tensor, "step batch layer kv_head key"]) -> int:
    """Query heads per key head."""
    return max(1, recording.query_heads // values.shape[3])


def _final(recording: Recording) -> Tensor:
    tokens = recording.run.tokens
    sinks = -1 - torch.arange(recording.sinks)
    return torch.cat([tokens, sinks.expand(len(tokens), -1)], -1) if recording.sinks else tokens
