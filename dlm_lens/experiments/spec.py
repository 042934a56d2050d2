"""`Experiment`: what a figure or table of a paper is, as data; `Config`: one run of it."""

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dlm_lens.experiments.bench import Bench
    from dlm_lens.experiments.results import Results

Settings = Mapping[str, Any]
"""Settings of an experiment: JSON values by name."""

Item = Mapping[str, Any]
"""What one line of the results answers, such as a model, a condition and some prompts: JSON values by name."""

Verdict = Literal["agrees", "disagrees", "undecided", "no counterpart"]
"""How a number here stands to the paper's: "undecided" if the interval allows both."""


@dataclass(frozen=True)
class Finding:
    """A sentence of the paper beside what was measured.

    Args:
        paper: what the paper says, with its number.
        here: what came out, with its interval.
        verdict: whether the two agree, by a rule on the numbers.
        why: the reason, where one is known, or that none is.
    """

    paper: str
    here: str
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text under a head.

    Raises:
        ValueError: a row of another length.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"{self.title!r}: a row of {len(row)} cells under a head of {len(self.head)}")


@dataclass(frozen=True)
class Rendering:
    """What is made of results: tables, figures, findings, and sentences that go with them."""

    tables: Sequence[Table] = ()
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Cost:
    """Forward passes of one item.

    Args:
        passes: how many.
        rows: canvases in each.
        positions: tokens of each canvas; for an AR model the longest prefix.
        model: which model runs.
        backward: whether each is followed by a backward pass (training).
    """

    passes: int
    rows: int
    positions: int
    model: str
    backward: bool = False


@dataclass(frozen=True)
class Experiment:
    """One figure or table: a small file declares one of these as `EXPERIMENT`.

    Args:
        name: on the command line.
        shows: paper and figure or table, "2510.15731, Figure 7"; or "beyond 2510.15731".
        title: what is measured, in one sentence.
        metric: the number, with its unit.
        small: settings that take less than a minute with the embedded models; `models` is among them.
        full: settings for real checkpoints.
        items: settings -> what is to be computed, in an order that never changes.
        run: (item, settings, bench) -> JSON values; pure but for the model.
        render: results -> tables and figures, from nothing else.
        cost: (item, settings, bench) -> forward passes; None if it runs no model.
        paper: the paper's own numbers.
        uses_prompts: whether prompts stand among the settings (they are read before the start).

    Raises:
        ValueError: settings of different names, or a name that cannot be a folder's.
    """

    name: str
    shows: str
    title: str
    metric: str
    small: Settings
    full: Settings
    items: Callable[[Settings], Iterable[Item]]
    run: Callable[[Item, Settings, "Bench"], Mapping[str, Any]]
    render: Callable[["Results"], Rendering]
    cost: Callable[[Item, Settings], Sequence[Cost]] | None = None
    paper: Sequence[Table] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").isalnum():
            raise ValueError(f"{self.name!r} is no name of an experiment; use letters, digits and hyphens")
        if set(self.small) != set(self.full):
            lacking = sorted(set(self.small) ^ set(self.full))
            raise ValueError(f"{self.name}: {', '.join(lacking)} is set in one of small and full only")

    def config(
        self, small: bool, models: Sequence[str] = (), given: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The settings of a run: the defaults, with some replaced; what a resume is compared with.

        Raises:
            ValueError: a setting that there is not or of another kind, or models where there are none.
        """
        settings: dict[str, Any] = dict(self.small if small else self.full)
        given = dict(given or {}) | ({"models": list(models)} if models else {})
        for name in given:
            if name not in settings:
                raise ValueError(f"{self.name} has no setting {name!r}; it has {', '.join(settings)}")
            _check_kind(name, given[name], (self.small[name], self.full[name]))
        found: dict[str, Any] = json.loads(json.dumps({**settings, **given}))
        return {"experiment": self.name, "small": small, "settings": found}


def _check_kind(name: str, value: Any, defaults: Sequence[Any]) -> None:
    """Raise where the defaults say what kind of value a setting has, and this is another."""
    kinds = {_kind(default) for default in defaults}
    # A whole number may stand for a share or a rate; None says nothing about the kind.
    fits = _kind(value) in kinds or (_kind(value) == "whole number" and "number" in kinds)
    if "None" not in kinds and not fits:
        raise ValueError(
            f"{name} is {value!r}; it must be a {' or '.join(sorted(kinds))}, such as {name}={defaults[0]!r}"
        )


def _kind(value: Any) -> str:
    # bool stands before int, which it is in Python.
    kinds = {bool: "truth value", int: "whole number", float: "number", str: "text"}
    kinds |= {list: "list", tuple: "list", dict: "mapping"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "None")


def key_of(item: Item) -> str:
    """An item as text, the same for equal items."""
    return json.dumps(item, sort_keys=True)


def read_setting(text: str) -> tuple[str, Any]:
    """A setting written as name=value; the value is a Python literal or plain text.

    Raises:
        ValueError: there is no "=", or the value is nested too deeply.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{text!r} is no setting; write name=value, such as prompts=64")
    try:
        return name.strip(), ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError):  # TypeError: a dictionary as a key
        return name.strip(), value
    except (RecursionError, MemoryError):
        raise ValueError(f"{text[:60]!r}... is nested too deeply for a setting; write a plain value") from None
