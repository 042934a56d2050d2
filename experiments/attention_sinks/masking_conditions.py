"""The conditions of Table 1: readings of "top 1, 5 and 10 sinks", and controls."""

from collections.abc import Mapping
from typing import Any

from dlm_lens.experiments.results import Settings

BASE: dict[str, Any] = {
    "choose": "top", "per": "head", "source": "current", "stage": "before_softmax", "scale": "relative"
}  # fmt: skip
"""The base reading: the k strongest columns of every head, chosen in the same pass."""

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
"""Each variant changes one part of the base reading: random columns (as many, or of the same mass), Eq. 3 with eps
lowered until as many columns are hidden on average, level, source, stage, scale."""

CONTROLS = {"random": "as many random columns", "mass": "random columns of the same mass"}
"""The controls, run with every number of columns."""

READINGS: tuple[dict[str, Any], ...] = ({}, VARIANTS["layer"], VARIANTS["model"])
"""Readings of "one sink" that get a verdict; the paper does not say which of them it uses."""


def conditions(settings: Settings) -> list[dict[str, Any]]:
    """Unmasked, the base reading with every number of columns, and the variants.

    Raises:
        ValueError: an unknown variant.
    """
    found = [{"columns": 0, **BASE}] + [{"columns": k, **BASE} for k in settings["columns"]]
    for variant in settings["variants"]:
        if variant not in VARIANTS:
            raise ValueError(f"unknown variant {variant!r}; choose from {', '.join(VARIANTS)}")
        counts = settings["columns"] if variant in CONTROLS else settings["varied"]
        found += [{"columns": k, **BASE, **VARIANTS[variant]} for k in counts]
    return found


def condition_cells(condition: Mapping[str, Any]) -> list[str]:
    """Two cells of the table: the number of columns and the reading."""
    if not condition["columns"]:
        return ["0", "unmasked"]
    if condition["choose"] in CONTROLS:
        return [str(condition["columns"]), f"control: {CONTROLS[condition['choose']]}"]
    changed = [f"{name} {value}" for name, value in condition.items() if name != "columns" and value != BASE[name]]
    return [str(condition["columns"]), ", ".join(changed) or "top k of every head, this pass, before the softmax"]
