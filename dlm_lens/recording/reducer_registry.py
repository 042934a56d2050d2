"""The registry of reducers and the parser of their texts, such as "top-keys:5". Nothing here imports torch.

A reducer is a class in a file of `reducers/` with a `ReducerEntry` beside it. The entries are read from the
source of those files, which are imported only when a reducer is built: a command line is checked without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dlm_lens.arguments import near_name
from dlm_lens.declarations import Declaration, by_name, declarations
from dlm_lens.option_values import one_of, whole_number, words
from dlm_lens.recording.query_classes import OTHER_NAMES, QUERY_CLASSES

_VALUES = ("count", "query class", "query classes", "path")
"""What the text after a colon may be, beside one of given words."""


@dataclass(frozen=True)
class ReducerEntry:
    """What command lines need to know of a reducer.

    It stands in the reducer's file, with keyword arguments that are literals: the file is read, not imported.

    Args:
        name: as a command line names it, such as "top-keys".
        kind: name of the class.
        setting: the field that the text after the colon sets; None for a reducer without one.
        values: what that text may be: "count" (a whole number of at least 1), "query class", "query classes"
            (several, with + between them), "path" (of a file or directory; it must be given), or a tuple of words.
        module: the module of the class; filled in by the registry.

    Raises:
        ValueError: `values` is a text that is none of these.
    """

    name: str
    kind: str
    setting: str | None = None
    values: str | tuple[str, ...] = ()
    module: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.values, str):
            one_of(f"values of {self.name}", self.values, _VALUES)

    @property
    def usage(self) -> str:
        """The name and the setting as help texts show them: top-keys[:K]."""
        if self.setting is None:
            return self.name
        if not isinstance(self.values, str):
            return f"{self.name}[:{'|'.join(self.values)}]"
        if self.values == "path":
            return f"{self.name}:PATH"
        shown = {"query class": "CLASS", "query classes": "CLASS+..."}.get(self.values, self.setting.upper())
        return f"{self.name}[:{shown}]"

    def read(self, text: str, option: str) -> Any:
        """The value of the setting that a text names.

        Args:
            text: after the colon.
            option: how errors call the option.

        Raises:
            ValueError: the reducer has no setting, or not this value of it.
        """
        where = f"{option} '{self.name}:{text}'"
        if self.setting is None:
            raise ValueError(f"{where}: {self.name} takes nothing after a colon")
        if self.values == "path":
            return text
        if self.values == "count":
            count = whole_number(f"{option} {self.name}", text)
            if count < 1:
                raise ValueError(f"{where}: {self.setting} is {count}; it must be at least 1")
            return count
        classes = isinstance(self.values, str)
        parts = text.split("+") if self.values == "query classes" else [text]
        allowed = (*QUERY_CLASSES, *OTHER_NAMES) if classes else self.values
        for word in parts:
            if word not in allowed:
                subject = "the classes of queries are" if classes else f"{self.setting} is one of"
                raise ValueError(f"{where}: {subject} {', '.join(allowed)}")
        return parts if self.values == "query classes" else text

    def load(self) -> Any:
        """The class; imports torch."""
        return getattr(import_module(self.module), self.kind)


_FOLDER = Path(__file__).parent / "reducers"


def _registry() -> Mapping[str, ReducerEntry]:
    found = [one for one in declarations(_FOLDER, "dlm_lens.recording.reducers") if one.callee == "ReducerEntry"]
    return by_name((_entry(one) for one in found), "reducers")


def _entry(declared: Declaration) -> ReducerEntry:
    settings = declared.arguments()[1]
    try:
        return ReducerEntry(**settings, module=declared.module)
    except TypeError as error:
        raise ValueError(declared.error(error)) from None


REDUCERS: Mapping[str, ReducerEntry] = _registry()
"""Name on the command line -> entry, for every reducer in `reducers/`."""

REDUCERS_HELP = (
    "names separated by commas, such as received:all+masked,value-norm,top-keys:5; there are "
    f"{', '.join(entry.usage for entry in REDUCERS.values())}. CLASS is a class of queries: "
    f"{', '.join(QUERY_CLASSES)} (open is masked, decided is unmasked)"
)


@dataclass(frozen=True)
class ReducerText:
    """A reducer that was read from text and checked; `build` imports torch and makes it.

    Args:
        entry: of the reducer.
        value: of its setting; None for the class's own default.
    """

    entry: ReducerEntry
    value: Any = None

    def build(self) -> Any:
        """The reducer."""
        settings = {} if self.entry.setting is None or self.value is None else {self.entry.setting: self.value}
        return self.entry.load()(**settings)


def parse_reducers(text: str, *, option: str = "--reducers") -> list[ReducerText]:
    """Read reducers separated by commas, such as "received:all+masked,top-keys:5".

    Args:
        text: what to read.
        option: how errors call it.

    Raises:
        ValueError: an unknown name, or a setting that the reducer does not take.
    """
    found = []
    for part in words(option, text):
        name, colon, setting = part.partition(":")
        if name not in REDUCERS:
            raise ValueError(f"{option} {part!r}{near_name(name, REDUCERS, {})}: there are {', '.join(REDUCERS)}")
        entry = REDUCERS[name]
        if entry.values == "path" and not setting:
            raise ValueError(f"{option} {part!r}: give {entry.usage}")
        found.append(ReducerText(entry, entry.read(setting, option) if colon else None))
    return found


def named_reducers(text: str, *, option: str = "reducers") -> list[Any]:
    """The reducers of a text, as `parse_reducers` reads it.

    Raises:
        ValueError: as `parse_reducers`.
    """
    return [reducer.build() for reducer in parse_reducers(text, option=option)]
