"""How commands print: tables as text or CSV, everything as JSON, and one sentence where a training stops."""

import json
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dlm_lens.printable import echo, printable

if TYPE_CHECKING:
    import pandas as pd
from collections.abc import Iterator
from contextlib import contextmanager

import typer


def show_json(values: Any) -> None:
    """Print JSON, with non-ASCII characters as they are where a terminal may show all of them."""
    text = json.dumps(values, ensure_ascii=False, indent=1, allow_nan=False, default=str)
    echo(text if printable(text) == text else json.dumps(values, indent=1, allow_nan=False, default=str))


def show_tables(as_json: bool, about: Mapping[str, Any], tables: "Mapping[str, pd.DataFrame]") -> None:
    """Print what the tables are about, and the tables, as JSON (NaN is null) or as text (NaN is -)."""
    if as_json:
        show_json({**about, **{name: lines_of(table) for name, table in tables.items()}})
        return
    for name, value in about.items():
        echo(f"{name}: {value}")
    for name, table in tables.items():
        echo(f"\n{name}")
        if table.empty:
            echo("(none)")
            continue
        echo(_measured(table).to_string(index=False, na_rep="-", float_format=lambda x: f"{x:.4g}"))


def lines_of(table: "pd.DataFrame") -> list[dict[Any, Any]]:
    """The lines of a table for JSON: all digits of its numbers, and None for what is none or not finite."""
    known = table.notna() & ~table.isin([math.inf, -math.inf])
    return table.astype(object).where(known, None).to_dict("records")


def show_csv(table: "pd.DataFrame") -> None:
    """Print a table as CSV, with all its columns."""
    table.to_csv(sys.stdout, index=False)


def _measured(table: "pd.DataFrame") -> "pd.DataFrame":
    """Without columns that hold no value, and without scale and level, which the lines above the tables name."""
    repeated = [name for name in ("scale", "level") if name in table]
    return table.dropna(axis=1, how="all").drop(columns=repeated, errors="ignore")


@contextmanager
def one_sentence_of_a_stop(remedy: str = "") -> Iterator[None]:
    """Print why a training inside stopped (SIGTERM, a loss that is no number, a full disk), and exit with status 1.

    Args:
        remedy: what follows the sentence where the training can be continued as it was, such as "; the same command
            continues". One that stopped for its numbers or its data would stop again at the same step.
    """
    from dlm_lens.training.checkpoints import NonFiniteLossError, TrainingDataError, TrainingStoppedError

    try:
        yield
    except TrainingStoppedError as error:
        again = isinstance(error, NonFiniteLossError | TrainingDataError)
        echo(f"dlm-lens: {error}{'' if again else remedy}", fg=typer.colors.RED, err=True)
        sys.exit(1)
