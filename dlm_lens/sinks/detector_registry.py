"""The registry of detectors and the parser of their texts, such as "above-std:3". Nothing here imports torch.

A detector is a class in a file of `detectors/`, which also contains its `DetectorEntry`. The entries are read from
the source of those files, which are imported only when a detector is built, so that a command line is checked
before torch loads.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from dlm_lens.arguments import near_name
from dlm_lens.declarations import Declaration, by_name, declarations
from dlm_lens.option_values import one_of

Range = Literal["not negative", "positive", "fraction", "count"]
"""The values that a setting takes: x >= 0, x > 0, 0 < x < 1, or whole numbers of at least 1."""

_RANGES: Mapping[Range, tuple[Callable[[Any], bool], str]] = {
    "not negative": (lambda value: _is_finite(value) and value >= 0, "must be a finite number of at least 0"),
    "positive": (lambda value: _is_finite(value) and value > 0, "must be positive and finite"),
    "fraction": (lambda value: _is_finite(value) and 0 < value < 1, "must lie between 0 and 1"),
    "count": (lambda value: _is_whole(value) and value >= 1, "must be a whole number of at least 1"),
}


def _is_finite(value: Any) -> bool:
    # Compared instead of math.isfinite, which raises for whole numbers beyond the largest float.
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_setting(kind: str, setting: str, value: Any, values: Range) -> None:
    """Raise unless a setting of a detector is in its range.

    Args:
        kind: class of the detector.
        setting: name of the field.
        value: its value.
        values: the range.

    Raises:
        ValueError: the value is out of range.
    """
    holds, sentence = _RANGES[values]
    if not holds(value):
        raise ValueError(f"{kind}({setting}={value!r}): {setting} {sentence}")


@dataclass(frozen=True)
class DetectorEntry:
    """Name, setting and formula of a detector, for command lines, hook expressions and reports.

    It is a constant of the detector's module, with literal keyword arguments: the file is read, not imported.

    Args:
        name: as a command line names it, such as "above-std"; a hook expression calls it `above_std`.
        kind: name of the class.
        setting: the field that the number after the colon sets.
        values: range of that number.
        formula: when a key is a sink, in one line, such as "score > mean + k std".
        default: the number where the text has none; None for the class's own default.
        module: the module of the class; filled in by the registry.

    Raises:
        ValueError: there is no such range.
    """

    name: str
    kind: str
    setting: str
    values: Range
    formula: str
    default: float | None = None
    module: str = ""

    def __post_init__(self) -> None:
        one_of(f"values of {self.name}", self.values, _RANGES)

    @property
    def function(self) -> str:
        """Its name in a hook expression: above_std."""
        return self.name.replace("-", "_")

    def check(self, value: Any) -> None:
        """Raise unless `setting` takes this value.

        Raises:
            ValueError: the value is out of range.
        """
        check_setting(self.kind, self.setting, value, self.values)

    def load(self) -> Any:
        """The class; imports torch."""
        return getattr(import_module(self.module), self.kind)


_FOLDER = Path(__file__).parent / "detectors"


def _registry() -> Mapping[str, DetectorEntry]:
    found = [one for one in declarations(_FOLDER, "dlm_lens.sinks.detectors") if one.callee == "DetectorEntry"]
    return by_name((_entry(one) for one in found), "detectors")


def _entry(declared: Declaration) -> DetectorEntry:
    settings = declared.arguments()[1]
    try:
        return DetectorEntry(**settings, module=declared.module)
    except TypeError as error:
        raise ValueError(declared.error(error)) from None


DETECTORS: Mapping[str, DetectorEntry] = _registry()
"""Name on the command line -> entry, for every detector in `detectors/`."""


@dataclass(frozen=True)
class DetectorText:
    """A detector that was read from text and checked; `build` imports torch and makes it.

    Args:
        entry: of the detector.
        value: of its setting; None for the class's own default.
    """

    entry: DetectorEntry
    value: float | None

    def build(self) -> Any:
        """The detector."""
        return self.entry.load()(**({} if self.value is None else {self.entry.setting: self.value}))


def parse_detector(text: str, *, option: str = "--detector") -> DetectorText:
    """Read "NAME" or "NAME:NUMBER", such as "above-std:3".

    Args:
        text: what to read.
        option: how errors call the text.

    Raises:
        ValueError: an unknown name, or a number that the detector does not take.
    """
    name, colon, number = text.partition(":")
    if name not in DETECTORS:
        raise ValueError(f"{option} {text!r}{near_name(name, DETECTORS, {})}: there are {', '.join(DETECTORS)}")
    entry = DETECTORS[name]
    value = entry.default
    if colon:
        whole = entry.values == "count"
        try:
            value = int(number) if whole else float(number)
        except ValueError:
            kind = "whole number" if whole else "number"
            raise ValueError(f"{option} {text!r}: {entry.setting} must be a {kind}, got {number!r}") from None
    if value is not None:
        try:
            entry.check(value)
        except ValueError as error:
            raise ValueError(f"{option} {text!r}: {error}") from None
    return DetectorText(entry, value)


def text_of(detector: Any) -> DetectorText | None:
    """The entry and number that build a detector equal to this one; None if no text does.

    None for a detector outside the registry, and for one with further settings, such as
    `AboveMean(0.03, literal=True)`.
    """
    for entry in DETECTORS.values():
        if entry.kind == type(detector).__name__:
            text = DetectorText(entry, getattr(detector, entry.setting))
            return text if text.build() == detector else None
    return None
