"""The conditions of Table 1: readings of "top 1, 5 and 10 sinks", classes of tokens, and controls."""

from collections.abc import Mapping
from typing import Any

from dlm_lens.experiments.results import Settings

BASE: dict[str, Any] = {
    "choose": "top", "per": "head", "source": "current", "stage": "before_softmax", "scale": "relative",
    "classes": None,
}  # fmt: skip
"""The base reading: the k strongest columns of every head, chosen in the same pass, whatever their tokens."""

CLASSES: dict[str, tuple[str, ...]] = {
    "function": ("punctuation", "special", "mask", "end of text"),
    "content": ("digits", "words"),
}
"""Classes of tokens: of the k strongest columns, only those whose token belongs to these are hidden."""

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
    "raw-layer": {"scale": "raw", "per": "layer"},
    "first": {"choose": "first"},
    **{name: {"classes": name} for name in CLASSES},
}
"""Each variant changes one part of the base reading: random columns (as many, or of the same mass), Eq. 3 with eps
lowered until as many columns are hidden on average, level, source, stage, scale, classes of tokens; "first" hides
the first positions instead of the strongest columns."""

CONTROLS = {"random": "as many random columns", "mass": "random columns of the same mass"}
"""The controls; those of the base reading are run with every number of columns."""

CONTROLLED: dict[str, tuple[str, ...]] = {
    "layer": ("mass",), "raw": ("mass",), "raw-layer": ("mass",), **dict.fromkeys(CLASSES, tuple(CONTROLS)),
}  # fmt: skip
"""Variants that get a verdict, and the controls that they have for it."""

READINGS: tuple[dict[str, Any], ...] = ({}, VARIANTS["layer"], VARIANTS["model"])
"""Readings of "one sink"; the paper does not say which of them it uses."""

JUDGED: tuple[dict[str, Any], ...] = (*READINGS[:2], *(VARIANTS[name] for name in CLASSES))
"""What gets a verdict on the cost of one sink: per head, per layer, and per head by classes of tokens."""


def conditions(settings: Settings) -> list[dict[str, Any]]:
    """Unmasked, the base reading with every number of columns, and the variants.

    A condition without classes has no entry `classes`, as in results stored before there were any.

    Raises:
        ValueError: an unknown variant.
    """
    chosen = list(settings["variants"])
    found: list[dict[str, Any]] = [{"columns": 0}] + [{"columns": k} for k in settings["columns"]]
    for variant in chosen:
        if variant not in VARIANTS:
            raise ValueError(f"unknown variant {variant!r}; choose from {', '.join(VARIANTS)}")
        counts = settings["columns"] if variant in CONTROLS else settings["varied"]
        found += [{"columns": k, **VARIANTS[variant]} for k in counts]
        controls = (one for one in CONTROLLED.get(variant, ()) if one in chosen)
        found += [{"columns": k, **VARIANTS[variant], **VARIANTS[one]} for one in controls for k in counts]
    whole = ({"columns": one["columns"], **BASE, **one} for one in found)
    return [{name: value for name, value in one.items() if value is not None} for one in whole]


def reading_of(condition: Mapping[str, Any]) -> dict[str, Any]:
    """What a condition changes in the base reading, without the choice of columns."""
    return {
        name: value
        for name, value in condition.items()
        if name in BASE and name != "choose" and value != BASE[name]
    }


def condition_cells(condition: Mapping[str, Any]) -> list[str]:
    """Two cells of the table: the number of columns and the reading."""
    if not condition["columns"]:
        return ["0", "unmasked"]
    reading = reading_of(condition)
    changed = [
        f"only {value} tokens" if name == "classes" else f"{name} {value}" for name, value in reading.items()
    ]
    if condition["choose"] in CONTROLS:
        of = f" of {', '.join(changed)}" if changed else ""
        return [str(condition["columns"]), f"control{of}: {CONTROLS[condition['choose']]}"]
    if condition["choose"] == "first":
        return [str(condition["columns"]), "the first positions, whatever they receive"]
    changed = [f"choose {condition['choose']}"] * (condition["choose"] != BASE["choose"]) + changed
    return [str(condition["columns"]), ", ".join(changed) or "top k of every head, this pass, before the softmax"]
