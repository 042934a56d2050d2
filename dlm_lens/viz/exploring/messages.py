"""Messages between an explorer and its page: JSON, with the bytes of arrays beside it."""

from importlib.resources import files
from typing import Any

from dlm_lens.viz.reporting.page import SCRIPTS as REPORT_SCRIPTS
from dlm_lens.viz.reporting.page import part_of_page

SCRIPTS = ("kernel", "live", "lens", "pattern", "explorer")
"""The scripts of the widget, after those of the report."""


def split(value: Any) -> tuple[Any, list[bytes]]:
    """A message with {"buffer": i} in the place of the i-th bytes, and these bytes."""
    found: list[bytes] = []

    def walk(part: Any) -> Any:
        """A part of the message, whose bytes are moved into the list."""
        if isinstance(part, bytes):
            found.append(part)
            return {"buffer": len(found) - 1}
        if isinstance(part, dict):
            return {name: walk(one) for name, one in part.items()}
        return [walk(one) for one in part] if isinstance(part, list | tuple) else part

    return walk(value), found


def module() -> str:
    """The widget's script, one ES module: the report's modules, the widget's, its HTML and its style."""
    shared = [part_of_page(f"{name}.js") for name in REPORT_SCRIPTS if name != "app"]
    own = [_part(f"{name}.js") for name in SCRIPTS]
    texts = {
        "BODY": part_of_page("body.html"),
        "OWN": _part("explorer.html"),
        "STYLE": part_of_page("style.css") + _part("explorer.css"),
    }
    constants = [f"const {name} = {_literal(text)};" for name, text in texts.items()]
    return "\n".join([*constants, *shared, *own])


def _literal(text: str) -> str:
    """A template literal of JavaScript, for the files of this package."""
    if any(mark in text for mark in ("`", "${", "\\")):
        raise ValueError("the page's HTML or style has a character that a template literal reads")
    return f"String.raw`{text}`"


def _part(name: str) -> str:
    return files("dlm_lens.viz.exploring").joinpath("page", name).read_text(encoding="ascii")
