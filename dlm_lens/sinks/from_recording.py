"""Received attention and statistics of hidden states, read from a Recording or computed for a finished run."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import checked_arguments, meant
from dlm_lens.attention import MIN_VIEWERS, HookLike
from dlm_lens.recording import KeyNorm, MassiveActivations, QueryClass, ReceivedAttention, Recording, rerun
from dlm_lens.recording.query_classes import checked_class, received_name
from dlm_lens.recording.recording import as_recording
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sinks.detectors.base import HiddenQuantity, Quantity
from dlm_lens.sinks.key_axes import AXES, shared_fields_of
from dlm_lens.sinks.key_statistics import KeyStatistic
from dlm_lens.sinks.received import COLUMN_SUM, RECEIVED, RELATIVE, Received, warn_unscored


@checked_arguments()
def received_over_steps(
    model: Any,
    run: RunLike,
    *,
    relative: bool = True,
    queries: QueryClass = "all",
    layers: Sequence[int] | None = None,
    min_viewers: int = MIN_VIEWERS,
    hooks: Sequence[HookLike] = (),
    rows_per_pass: int | None = None,
    progress: bool = False,
) -> Received:
    """Received attention of every key at every step of a finished run, by a rerun of its canvases.

    r_j = sum_i A_ij over the counted queries (2510.15731, section 4.1), by default divided by e_j, the sum under
    uniform attention. Step t runs on `run.canvases[t]`; of a guided run the conditional half counts. No pattern is
    formed: the sums are those of `record` with `ReceivedAttention`.

    The keys are canvas positions and, after them, the model's learned sink tokens, whose own rows are not counted
    as queries. Padding is neither a query nor a key. In a causal model positions that are not written yet are
    neither, and step t counts all written positions, also where decoding used a cache. In a layer with a sliding
    window a query sees the keys in it; `Received.expected` has an axis of layers then.

    Args:
        model: the model of the run; its attention implementation may be any, and does not change.
        run: from `denoise`.
        relative: scores relative to uniform, or raw column sums (in queries).
        queries: which queries are counted, see `QueryClass`. Each class is divided by its own e_j, so that scores
            do not fall only because the masks run out.
        layers: indices of the layers, negative from the end; None for all.
        min_viewers: a key seen by fewer counted queries is undefined (NaN).
        hooks: interventions under which the canvases are seen, as for `recording.rerun`.
        rows_per_pass: rows of the run in one forward pass; None for all of them.
        progress: show a progress bar.

    Returns:
        A `Received` on the CPU in float32, its layers in increasing order.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a model without hook points, with attention that `layer_windows` refuses, a run of another
            model, an unknown class of queries, or a layer that does not exist.
        RuntimeError: a pattern is not finite.
    """
    run = as_run(run)
    recording = rerun(
        model,
        run,
        [ReceivedAttention(queries, min_viewers)],
        hooks=hooks,
        layers=layers,
        rows_per_pass=rows_per_pass,
        progress=progress,
    )
    received = received_of(recording, queries)
    _check_finite(received)
    return received if relative else received.on_scale(COLUMN_SUM)


def _check_finite(received: Received) -> None:
    """Raise if a key that enough queries see has no score.

    Raises:
        RuntimeError: naming the first step and layer.
    """
    assert received.viewers is not None
    assert received.valid is not None
    scored = (received.viewers >= max(1, received.min_viewers)) & received.valid[:, None, None]
    wrong = scored & ~received.values.isfinite()
    if bool(wrong.any()):
        step, row, layer, *_ = wrong.nonzero()[0].tolist()
        raise RuntimeError(
            f"a pattern of step {step}, row {row}, layer {received.layers[layer]} is not finite; check the model's "
            "weights and dtype"
        )


@checked_arguments()
def key_statistic_over_steps(
    model: Any,
    run: RunLike,
    quantity: HiddenQuantity,
    *,
    hooks: Sequence[HookLike] = (),
    layers: Sequence[int] | None = None,
    rows_per_pass: int | None = None,
) -> KeyStatistic:
    """Rerun a finished run and measure every position: its largest activation, or the norm of its key.

    "max activation": max_d |h_jd| of the residual stream that enters each layer (2402.17762), with the median of
    |h| over content positions and features (of an even number of values the lower middle one). "key norm":
    ||k_j||_2, which the rotation keeps; every query head has the norm of the key that it uses. In a causal model
    positions that are not written yet have none. Learned sink tokens follow the canvas positions.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: an unknown quantity, a model without hook points, or a layer that does not exist.
    """
    run = as_run(run)
    if quantity not in get_args(HiddenQuantity):
        raise ValueError(f"quantity is {quantity!r}; it must be one of {', '.join(get_args(HiddenQuantity))}")
    reducer = MassiveActivations() if quantity == "max activation" else KeyNorm()
    recording = rerun(model, run, [reducer], hooks=hooks, layers=layers, rows_per_pass=rows_per_pass)
    return key_statistic_of(recording, quantity)


def received_of(recording: Recording, queries: QueryClass = "all") -> Received:
    """The received attention of a recorded class of queries, as `received_over_steps` gives it for the same run.

    Raises:
        TypeError: no `Recording`.
        ValueError: ReceivedAttention of this class was not recorded.
    """
    recording = as_recording(recording)
    given, queries = queries, checked_class(queries, "received_of")
    name = received_name(queries)
    if name not in recording.specs:
        raise ValueError(
            f"this recording has no {name}; record with ReceivedAttention(queries={given!r}), it has "
            f"{', '.join(recording.specs) or 'none'}"
        )
    counted = recording.counted(queries)
    min_viewers = int(recording.specs[name].settings["min_viewers"])
    warn_unscored(counted, min_viewers)
    return Received(
        values=getattr(recording, name),
        expected=recording.expected_by_layer(queries)[:, :, :, None],
        counted=counted,
        scale=RELATIVE,
        heads=recording.heads or (),
        queries=queries,
        min_viewers=min_viewers,
        viewers=recording.viewers_by_layer(queries)[:, :, :, None],
        **shared_fields_of(recording.run, recording.layers, recording.steps, recording.sinks),
    )


def received_in(given: Any, name: str, queries: QueryClass = "all") -> Received:
    """A `Received` as it is, or the received attention of a class of queries of a `Recording`.

    Args:
        given: one of them.
        name: of the argument, for the error.
        queries: the class that is read from a recording.

    Raises:
        ValueError: neither of them, or ReceivedAttention of this class was not recorded.
    """
    given = meant(given)
    received = received_of(given, queries) if isinstance(given, Recording) else given
    RECEIVED.check(name, received)
    assert isinstance(received, Received)
    return received


HIDDEN: Mapping[HiddenQuantity, tuple[str, str]] = {
    "max activation": ("max_activation", "MassiveActivations()"),
    "key norm": ("key_norm", "KeyNorm()"),
}
"""Quantity -> the statistic of a recording that holds it, and the reducer that records it."""


def key_statistic_of(recording: Recording, quantity: HiddenQuantity) -> KeyStatistic:
    """The statistic that detectors of hidden states read: "max activation" or "key norm", as recorded.

    Raises:
        TypeError: no `Recording`.
        ValueError: MassiveActivations, or KeyNorm per head, was not recorded.
    """
    recording = as_recording(recording)
    name, reducer = HIDDEN[quantity]
    if name not in recording.specs:
        raise ValueError(f"this recording has no {name}; record with {reducer}")
    values: Tensor = getattr(recording, name)
    median = None
    if quantity == "max activation":
        values, median = values[:, :, :, None], recording.median_activation[..., None, None]
    else:
        # Every query head has its key's norm.
        values = values.repeat_interleave(_groups(recording, values), 3)
        # A part of some heads keeps the norms of all key heads.
        values = values if recording.heads is None else values[:, :, :, list(recording.heads)]
    return KeyStatistic(
        values=values,
        quantity=quantity,
        median=median,
        heads=() if quantity == "max activation" else recording.heads or (),
        dims=tuple(axis for axis in AXES if axis != "head") if quantity == "max activation" else AXES,
        **shared_fields_of(recording.run, recording.layers, recording.steps, recording.sinks),
    )


def has_scores(source: Recording | Received, quantity: Quantity, queries: QueryClass = "all") -> bool:
    """Whether a recording, or received attention, has the scores that a detector of this quantity reads.

    Args:
        source: one of them.
        quantity: that the detector reads.
        queries: the class whose received attention is read from a recording.
    """
    if isinstance(source, Received):
        return source.has(quantity)
    if quantity == "max activation" or quantity == "key norm":
        return HIDDEN[quantity][0] in source.specs
    return received_name(queries) in source.specs


def _groups(recording: Recording, values: Float[Tensor, "step batch layer kv_head key"]) -> int:
    """Query heads per key head."""
    return max(1, recording.query_heads // values.shape[3])
