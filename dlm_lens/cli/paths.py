"""`dlm-lens paths`: lifetimes, moves and switches of the sinks of a recording, as text, JSON or CSV."""

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
from dlm_lens.cli.recordings import detector_of, load_recording
from dlm_lens.option_values import one_of
from dlm_lens.viz.plot_options import FOLLOWS, PLOT_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from dlm_lens.sinks import Received, Trajectories

GROUPINGS = ("pattern", "head", "layer", "all")
TABLES = ("lives", "moves", "switches", "summary")

_OPTIONS = {"batch": "row"}
"""Columns whose option has another name."""

_SHOWN = {
    "lives": ("batch layer head position token masked first_step last_step steps peak main_steps transient "
                  "trajectory came_from moved_by"),
    "summary": ("batch layer head kind patterns none static moving unsettled with_sink sinks lives "
                "life transient moves moves_right jump switches displacement drift"),
}  # fmt: skip
"""Columns of a table in a terminal; JSON and CSV have all."""


def paths_command(
    recording: Annotated[Path, RECORDING],
    detector: Annotated[str, DETECTOR] = "above-mean",
    level: Annotated[str, LEVEL] = "head",
    queries: Annotated[str, QUERIES] = "all",
    hysteresis: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="A sink lasts while it is above this share of its threshold."),
    ] = 0.75,
    follow: Annotated[str, typer.Option(help=PLOT_OPTIONS["follow"])] = "position",
    layer: Annotated[int | None, LAYER] = None,
    head: Annotated[int | None, HEAD] = None,
    row: Annotated[int | None, typer.Option(min=0, help="Only this sequence of the recording.")] = None,
    by: Annotated[str, typer.Option(help="Lines of the summary: pattern, head, layer or all.")] = "head",
    top: Annotated[
        int,
        typer.Option(min=0, help="How many lifetimes, moves and switches to list as text; JSON and CSV have all."),
    ] = 20,
    as_json: Annotated[bool, JSON] = False,
    csv: Annotated[
        str | None, typer.Option(help="Print one table as CSV instead: lives, moves, switches or summary.")
    ] = None,
) -> None:
    """Follow the sinks of a recording over its steps: how long they last, where they move, and what the heads do.

    A lifetime is a run of consecutive steps at which a position is a sink. A sink moves where its lifetime ends
    within one step of the start of another lifetime. A switch is a change of the largest sink between two
    positions that both stay sinks.
    """
    check_place(layer, head, level)
    one_of("--by", by, GROUPINGS)
    one_of("--follow", follow, FOLLOWS)
    check_csv(csv, TABLES, as_json)
    if hysteresis == 0:
        raise ValueError("--hysteresis is 0.0; it is above 0 and at most 1")
    check_rule(recording, detector, level, queries)

    from dlm_lens.sinks import trajectories
    from dlm_lens.viz.selection import as_received

    rule = detector_of(detector)
    if rule.reads_hidden_states:
        raise ValueError(
            f"--detector {detector}: paths follow received attention, and this rule reads hidden states"
        )
    place = {"batch": row, "layer": layer, "head": head}
    received = _part(as_received(load_recording(recording), queries, follow), place)  # type: ignore[arg-type]
    paths = trajectories(received, rule, level=level, hysteresis=hysteresis)  # type: ignore[arg-type]
    tables = tables_of(paths, by)
    if csv is not None:
        show_csv(tables[csv])
        return
    about: dict[str, Any] = {"rule": paths.rule, "found": repr(paths)}
    about |= {_OPTIONS.get(name, name): value for name, value in place.items() if value is not None}
    if not as_json:
        about |= {name: f"{min(top, len(tables[name]))} of {len(tables[name])}" for name in TABLES[:3]}
        tables = {name: table if name == "summary" else table.head(top) for name, table in tables.items()}
        tables = {name: _narrow(name, table) for name, table in tables.items()}
    show_tables(as_json, about, tables)


def tables_of(paths: "Trajectories", by: str) -> "dict[str, pd.DataFrame]":
    """The summary, with lines as in `Trajectories.summary`, and every lifetime, move and switch."""
    lifetimes = paths.table()
    moves = lifetimes[lifetimes["came_from"].notna()]
    summary = paths.summary(by=by)  # type: ignore[arg-type]
    return {"summary": summary, "lives": lifetimes, "moves": moves, "switches": paths.switches()}


def _part(received: "Received", place: "Mapping[str, int | None]") -> "Received":
    """One row, one layer, one head, or all.

    Raises:
        ValueError: an index that the recording does not have.
    """
    rows = received.values.shape[1]
    indices = {"batch": range(rows), "layer": received.layers, "head": received.head_numbers}
    parts = {}
    for name, recorded in indices.items():
        value = place[name]
        if value is not None and value not in recorded:
            option = _OPTIONS.get(name, name)
            raise ValueError(f"--{option} {value}: the recording has {option}s {', '.join(map(str, recorded))}")
        index = None if value is None else list(recorded).index(value)
        parts[name] = slice(None) if index is None else slice(index, index + 1)
    return received.part(parts["batch"], parts["layer"], parts["head"])


def _narrow(name: str, table: "pd.DataFrame") -> "pd.DataFrame":
    wanted = _SHOWN.get(name)
    return table if wanted is None else table[[column for column in wanted.split() if column in table]]
