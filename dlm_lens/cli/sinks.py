"""`dlm-lens sinks`: the attention sinks of a recording, per layer and one by one."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_lens.cli.options import (
    DETECTOR,
    HEAD,
    JSON,
    LAYER,
    LEVEL,
    QUERIES,
    RECORDING,
    check_csv,
    check_place,
    check_rule,
)
from dlm_lens.cli.output import show_csv, show_tables
from dlm_lens.cli.recordings import load_recording, sinks_of

if TYPE_CHECKING:
    import pandas as pd

    from dlm_lens.sinks import Sinks


TABLES = ("layers", "sinks")


def sinks_command(
    recording: Annotated[Path, RECORDING],
    detector: Annotated[str, DETECTOR] = "above-mean",
    level: Annotated[str, LEVEL] = "head",
    queries: Annotated[str, QUERIES] = "all",
    layer: Annotated[int | None, LAYER] = None,
    head: Annotated[int | None, HEAD] = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many sinks to list, each at its strongest step, strongest first; 20 as text, all in JSON and "
            "CSV.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, JSON] = False,
    csv: Annotated[str | None, typer.Option(help="Print one table as CSV instead: layers or sinks.")] = None,
) -> None:
    """Find the attention sinks of a recording: how many per layer, and the strongest ones."""
    check_place(layer, head, level)
    check_csv(csv, TABLES, as_json)
    check_rule(recording, detector, level, queries)
    found = sinks_of(load_recording(recording), detector, level, queries)
    # All sinks first, then those of the layer and head, so that --top counts only lines that are shown.
    listed = _lines_of(found.table(int(found.is_sink.sum())), layer, head, found)
    place = {name: value for name, value in (("layer", layer), ("head", head)) if value is not None}
    about = {"rule": found.rule, "found": f"{found!r}{' in every layer and head' if place else ''}", **place}
    lines = top if top is not None else len(listed) if as_json or csv else 20
    tables = {"layers": per_layer(found, layer, head), "sinks": listed.head(lines)}
    if csv is not None:
        show_csv(tables[csv])
        return
    if not as_json:
        about["sinks"] = f"{min(lines, len(listed))} of {len(listed)}, each at its strongest step"
        if not lines:  # an empty table would say that there is none
            del tables["sinks"]
    show_tables(as_json, about, tables)


def _lines_of(table: "pd.DataFrame", layer: int | None, head: int | None, found: "Sinks") -> "pd.DataFrame":
    """The lines of one layer and one head; None keeps all.

    Raises:
        ValueError: a layer or a head that the recording does not have.
    """
    for name, value, indices in (("layer", layer, found.layers), ("head", head, found.head_numbers)):
        if value is None:
            continue
        if value not in indices:
            listed = ", ".join(map(str, indices)) or "(none)"
            raise ValueError(f"--{name} {value}: the recording has {name}s {listed}")
        table = table[table[name] == value]
    return table


def per_layer(found: "Sinks", layer: int | None = None, head: int | None = None) -> "pd.DataFrame":
    """Per layer: sinks per pattern, share of patterns with one, how often the next step keeps the main one.

    Args:
        found: the sinks.
        layer: only this one; None for all.
        head: only this head of every layer; None for all.
    """
    if head is not None:
        axis, place = found.dims.index("head"), found.head_numbers.index(head)
        parts = {name: getattr(found, name).narrow(axis, place, 1) for name in ("is_sink", "scores", "threshold")}
        found = replace(found, **parts, heads=(head,))
    table = _layer_table(found)
    return table if layer is None else table[table["layer"] == layer]


def _layer_table(found: "Sinks") -> "pd.DataFrame":
    import pandas as pd

    defined = ~found.scores.isnan().all(-1)
    if "layer" not in found.dims:
        return pd.DataFrame([{"layer": "all", **_counts(found.is_sink, defined, found.main(), found.dims)}])
    axis = found.dims.index("layer")
    main, dims = found.main(), tuple(name for name in found.dims if name != "layer")
    lines = [
        {
            "layer": layer,
            **_counts(found.is_sink.select(axis, i), defined.select(axis, i), main.select(axis, i), dims),
        }
        for i, layer in enumerate(found.layers)
    ]
    return pd.DataFrame(lines)


def _counts(is_sink: Any, defined: Any, main: Any, dims: tuple[str, ...]) -> dict[str, float | int]:
    """Means over the patterns with any score: a row that has ended has none at later steps."""
    line: dict[str, float | int] = {
        "sinks": int(is_sink.sum()),
        "sinks_per_pattern": float(is_sink.sum(-1)[defined].float().mean()),
    }
    line["patterns_with_sink"] = float(is_sink.any(-1)[defined].float().mean())
    if dims[0] == "step" and len(main) > 1:
        both = (main[1:] >= 0) & (main[:-1] >= 0)
        stays = (main[1:] == main[:-1])[both].float().mean() if bool(both.any()) else float("nan")
        line["main_sink_stays"] = float(stays)
    return line
