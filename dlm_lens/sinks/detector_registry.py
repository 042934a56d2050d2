"""The detectors' names and the ranges of their numbers: what can be checked before torch is imported."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def check_not_negative(rule: str, name: str, value: Any) -> None:
    """Raise unless a setting of a rule is a finite number of at least 0.

    Raises:
        ValueError: it is not.
    """
    if not _is_finite(value) or value < 0:
        raise ValueError(f"{rule}({name}={value!r}): {name} must be a finite number of at least 0")


def check_positive(rule: str, name: str, value: Any) -> None:
    """Raise unless a setting of a rule is a finite number above 0.

    Raises:
        ValueError: it is not.
    """
    if not _is_finite(value) or value <= 0:
        raise ValueError(f"{rule}({name}={value!r}): {name} must be positive and finite")


def check_part(rule: str, name: str, value: Any) -> None:
    """Raise unless a setting of a rule is a part of a whole: a number above 0 and below 1.

    Raises:
        ValueError: it is not.
    """
    if not _is_finite(value) or not 0 < value < 1:
        raise ValueError(f"{rule}({name}={value!r}): {name} must lie between 0 and 1")


def check_count(rule: str, name: str, value: Any) -> None:
    """Raise unless a setting of a rule is a whole number of at least 1.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{rule}({name}={value!r}): {name} must be a whole number of at least 1")


def _is_finite(value: Any) -> bool:
    # Compared instead of math.isfinite, which raises for whole numbers beyond the largest float.
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= sys.float_info.max


@dataclass(frozen=True)
class NamedDetector:
    """A detector as a command line names it.

    Args:
        kind: its class in `dlm_lens.sinks`.
        parameter: the number that may follow a colon.
        check: what its values must satisfy.
        default: where none is given; None for the class's own.
    """

    kind: str
    parameter: str
    check: Callable[[str, str, Any], None]
    default: float | None = None


DETECTORS: Mapping[str, NamedDetector] = {
    "above-mean": NamedDetector("AboveMean", "eps", check_not_negative),
    "above-std": NamedDetector("AboveStd", "k", check_not_negative),
    "attention-share": NamedDetector("AttentionShare", "threshold", check_part),
    "mean-received": NamedDetector("MeanReceived", "threshold", check_part),
    "soft-sigmoid": NamedDetector("SoftSigmoid", "alpha", check_positive),
    "top-k": NamedDetector("TopK", "k", check_count, 5),
    "above-median": NamedDetector("AboveMedian", "times", check_positive),
    "low-key-norm": NamedDetector("LowKeyNorm", "below", check_part),
}
"""By the name on the command line."""


@dataclass(frozen=True)
class DetectorChoice:
    """A detector and its setting, read from text and checked; `build` imports torch and makes it."""

    kind: str
    settings: Mapping[str, float]

    def build(self) -> Any:
        """The detector."""
        import dlm_lens.sinks as room

        return getattr(room, self.kind)(**self.settings)


def read_detector(text: str, eps: float | None = None, *, option: str = "--detector") -> DetectorChoice:
    """The detector that an option names, such as "above-std:3"; `eps` is that of above-mean.

    Raises:
        ValueError: no such detector, or a setting that it does not take.
    """
    name, _, given = text.partition(":")
    if name not in DETECTORS:
        raise ValueError(f"{option} {text!r}: there are {', '.join(DETECTORS)}")
    entry = DETECTORS[name]
    if eps is not None and (name != "above-mean" or given):
        raise ValueError(f"--eps {eps} is above-mean's, not that of {option} {text}")
    value: float | None = eps if eps is not None else entry.default
    if given:
        whole = entry.check is check_count
        try:
            value = int(given) if whole else float(given)
        except ValueError:
            kind = "whole number" if whole else "number"
            raise ValueError(f"{option} {text!r}: {entry.parameter} must be a {kind}, got {given!r}") from None
    if value is None:
        return DetectorChoice(entry.kind, {})
    try:
        entry.check(entry.kind, entry.parameter, value)
    except ValueError as error:
        shown = f"{option} {text!r}" if eps is None else f"--eps {eps}"
        raise ValueError(f"{shown}: {error}") from None
    return DetectorChoice(entry.kind, {entry.parameter: value})
