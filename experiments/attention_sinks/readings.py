"""What "top 1, 5 and 10 sinks" may mean, and the controls: the conditions of Table 1."""

from collections.abc import Mapping
from typing import Any

from dlm_lens.experiments.results import Settings

BASE: dict[str, Any] = {
    "choose": "top", "per": "head", "source": "current", "stage": "before_softmax", "scale": "relative"
}  # fmt: skip
"""The reading that the others are set beside: the k strongest columns of every head, in this pass."""

VARIANTS: dict[str, dict[str, Any]] = {
    "random": {"choose": "random"},
    "mass": {"choose": "mass"},
    "eps": {"choose": "eps"},
    "layer": {"per": "layer"},
    "model": {"per": "model", "source": "previous"},
    "previous": {"source": "previous"},
    "clean": {"source": "clean"},
    "after": {"stage": "after"},
    "raw": {"scale": "raw"},
}
"""One change each: as many random columns, random columns of the same mass, Eq. 3 with eps lowered until so many
go, level, source, stage, scale."""

CONTROLS = {"random": "as many random columns", "mass": "random columns of the same mass"}
"""These stand beside every number of columns."""

READINGS: tuple[dict[str, Any], ...] = ({}, VARIANTS["layer"], VARIANTS["model"])
"""Readings of "one sink" that the verdicts are given for; the paper does not say which is its own."""


def conditions(settings: Settings) -> list[dict[str, Any]]:
    """Unmasked, the base reading with every number of columns, and the variants.

    Raises:
        ValueError: a variant that there is not.
    """
    found = [{"columns": 0, **BASE}] + [{"columns": k, **BASE} for k in settings["columns"]]
    for variant in settings["variants"]:
        if variant not in VARIANTS:
            raise ValueError(f"variant {variant!r} is not there; there are {', '.join(VARIANTS)}")
        numbers = settings["columns"] if variant in CONTROLS else settings["varied"]
        found += [{"columns": k, **BASE, **VARIANTS[variant]} for k in numbers]
    return found


def named(condition: Mapping[str, Any]) -> list[str]:
    """Number of columns and reading, as the table writes them."""
    if not condition["columns"]:
        return ["0", "unmasked"]
    if condition["choose"] in CONTROLS:
        return [str(condition["columns"]), f"control: {CONTROLS[condition['choose']]}"]
    changed = [f"{name} {value}" for name, value in condition.items() if name != "columns" and value != BASE[name]]
    return [str(condition["columns"]), ", ".join(changed) or "top k of every head, this pass, before the softmax"]
