"""Fields of an answer against the right values: types, lengths, numbers within a tolerance."""

from typing import Any


def differences(answer: dict[str, Any], right: dict[str, Any], absolute: float, relative: float = 0.0) -> list[str]:
    """One sentence for each field of `right` that the answer lacks or that differs by more than the tolerance.

    A number may differ by `absolute` plus `relative` times its size; all else must be equal. The sentences do not
    say the right value.
    """
    found = []
    for name, wanted in right.items():
        if name not in answer:
            found.append(f"the field {name!r} is missing")
        else:
            found += _compared(name, answer[name], wanted, absolute, relative)
    return found


def _compared(name: str, given: Any, wanted: Any, absolute: float, relative: float) -> list[str]:
    if isinstance(wanted, list):
        if not isinstance(given, list) or len(given) != len(wanted):
            size = len(given) if isinstance(given, list) else type(given).__name__
            return [f"{name} should be a list of another length than {size}"]
        pairs = enumerate(zip(given, wanted, strict=True))
        return [line for i, (a, b) in pairs for line in _compared(f"{name}[{i}]", a, b, absolute, relative)]
    if isinstance(wanted, dict):
        if not isinstance(given, dict) or set(given) != set(wanted):
            return [f"{name} must be an object with the fields {', '.join(wanted)}"]
        return [
            line
            for key in wanted
            for line in _compared(f"{name}.{key}", given[key], wanted[key], absolute, relative)
        ]
    if isinstance(wanted, float):
        number = isinstance(given, int | float) and not isinstance(given, bool)
        close = number and abs(given - wanted) <= absolute + relative * abs(wanted)
        return [] if close else [f"{name} is {given!r}, which is not right"]
    return [] if type(given) is type(wanted) and given == wanted else [f"{name} is {given!r}, which is not right"]
