"""`find_sinks`: from attention, received or raw, to sinks."""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import LEVEL, RULES, Rule, checked_arguments, instance, shown
from dlm_lens.recording import Recording
from dlm_lens.sinks.hidden import KeyStatistic
from dlm_lens.sinks.patterns import received_from_pattern
from dlm_lens.sinks.received import AXES, COLUMN_SUM, RELATIVE, Level, Received
from dlm_lens.sinks.recorded import judged_of
from dlm_lens.sinks.result import Sinks
from dlm_lens.sinks.rules import Detector


class PatternSettings(TypedDict, total=False):
    """Arguments of `received_from_pattern`, which `find_sinks` hands on."""

    dims: Sequence[str] | None
    visible: Bool[Tensor, "*leading query key"] | None
    queries: Bool[Tensor, "*rows query"] | None
    attention_mask: Int[Tensor, "*rows key"] | Bool[Tensor, "*rows key"] | None
    causal: bool
    tokens: Int[Tensor, "*rows key"] | None
    masked: Bool[Tensor, "*rows key"] | None
    tokenizer: Any
    layers: Sequence[int] | None
    min_viewers: int


@checked_arguments(
    attention=None,
    level=LEVEL,
    dims=Rule("names of axes, or None", lambda dims: all(isinstance(name, str) for name in dims)),
    **dict.fromkeys(
        ("visible", "queries", "attention_mask", "tokens", "masked"), instance(Tensor, "a tensor, or None")
    ),
)
def find_sinks(
    attention: Received | Recording | KeyStatistic | Float[Tensor, "*leading query key"],
    detector: Detector,
    *,
    level: Level = "head",
    relative: bool | None = None,
    **pattern_settings: Unpack[PatternSettings],
) -> Sinks:
    """Apply a detector to received attention: a sink is a key whose score passes the rule (2510.15731, Eq. 3).

    Args:
        attention: a `Received`, a `Recording` (of all queries; `received_of` for others), or a pattern
            [head, query, key], [batch, head, query, key], [step, batch, head, query, key] or
            [step, batch, layer, head, query, key] (other axes: `dims=`); or a `KeyStatistic` of hidden states, for
            `AboveMedian` and `LowKeyNorm`.
        detector: `AboveMean(eps)`, `AboveStd(k)`, `Share(x)`, `MeanAttention(x)`, `SoftSigmoid()`, `TopK(k)` or
            your own `Detector`.
        level: judge every "head", the head-mean pattern of a "layer", or the mean pattern of the "model": the
            mean of r_j over heads (and layers), divided by e_j. A `KeyStatistic` has its own level.
        relative: True for scores relative to uniform, False for raw column sums; None for True with a pattern
            and for the scale that a `Received` has. `Share` always reads shares, `MeanAttention` means.
        **pattern_settings: for patterns, the arguments of `received_from_pattern`: visible, queries,
            attention_mask, causal, tokens, masked, tokenizer, layers, min_viewers, dims.

    Returns:
        Sinks whose axes are those of the input without query and without the merged ones.

    Raises:
        TypeError: no detector, no attention, or settings of a pattern beside a `Received`.
        ValueError: axes that do not fit, rows that do not sum to 1, a level that the input does not have.
    """
    if isinstance(detector, type) or not isinstance(detector, Detector):
        raise TypeError(
            f"{shown(detector)} is not a detector; give one with its settings, such as AboveMean(eps=3.0)"
        )
    if "min_viewers" in pattern_settings:
        RULES["min_viewers"].check("min_viewers", pattern_settings["min_viewers"])
    if isinstance(attention, Recording):
        attention = judged_of(attention, detector.quantity)
    if isinstance(attention, KeyStatistic):
        if pattern_settings or relative is not None or level not in ("head", attention.level):
            raise TypeError(f"{attention!r} is of the {attention.level} level and takes no settings of patterns")
        return _judge(attention, detector)
    if isinstance(attention, Received):
        if pattern_settings:
            raise TypeError(f"{', '.join(pattern_settings)}: for patterns only; this Received is already summed")
        received = attention
        if relative is not None:
            received = received.on_scale(RELATIVE if relative else COLUMN_SUM)
    else:
        received = received_from_pattern(attention, relative=relative is not False, **pattern_settings)
    return _judge(received.at_level(level), detector)


def _judge(given: Received | KeyStatistic, detector: Detector) -> Sinks:
    scores, scale = given.read(detector.quantity)
    judge: Any = detector
    # What a statistic of hidden states is compared with may be more than its own scores tell.
    extra = {} if isinstance(given, Received) or given.median is None else {"median": given.median}
    return Sinks(
        is_sink=_squeeze(judge.detect(scores, **extra), given, AXES),
        scores=_squeeze(scores, given, AXES),
        threshold=_squeeze(judge.thresholds(scores, **extra), given, AXES),
        scale=scale,
        level=given.level,
        detector=detector,
        dims=given.dims,
        tokens=_squeeze(given.tokens, given, ("step", "batch", "key")),
        masked=_squeeze(given.masked, given, ("step", "batch", "key")),
        layers=given.layers,
        queries=given.queries if isinstance(given, Received) else "none (hidden states)",
        sinks=given.sinks,
        padding=given.padding,
        tokenizer=given.tokenizer,
    )


def _squeeze(tensor: Any, received: Received | KeyStatistic, axes: tuple[str, ...]) -> Any:
    """Drop the axes that mean nothing."""
    if tensor is None:
        return None
    return tensor.squeeze([axis for axis, name in enumerate(axes) if name not in received.dims])
