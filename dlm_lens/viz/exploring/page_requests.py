"""Messages between an explorer and its page: a run, a step, a path over the steps, a lens, a pattern.

They are JSON, with the bytes of arrays beside it.
"""

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.viz.exploring.exploration import Exploration
from dlm_lens.viz.exploring.sides import Side, decoded
from dlm_lens.viz.reporting.packing import plain
from dlm_lens.viz.reporting.page import SCRIPTS as REPORT_SCRIPTS
from dlm_lens.viz.reporting.page import part_of_page
from dlm_lens.viz.reporting.rules import rule_of

SCRIPTS = ("live", "readings", "explorer")
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


class StaleError(Exception):
    """A request about a run that is no longer shown."""


Request = Mapping[str, Any]
"""A message of the page: `kind` says what it asks; most name a `side` ("run" or "twin") and its `version`."""


def _run(exploration: Exploration, request: Request) -> dict[str, Any]:
    side = _side(exploration, request)
    own: dict[str, Any] = {"first_step": side.at_step(0), "rule": rule_of(exploration.rule)}
    if exploration.rows > 1:
        # The row was run alone; the page names it as its menu does.
        own |= {"row": exploration.row, "rows": exploration.rows, "some_rows": False}
    return {"content": {**side.content, **own}}


def _step(exploration: Exploration, request: Request) -> dict[str, Any]:
    return _side(exploration, request).at_step(int(request["step"]))


def _path(exploration: Exploration, request: Request) -> dict[str, Any]:
    level: Any = request["level"]
    return _side(exploration, request).over_steps(level, int(request["layer"]), int(request["head"]))


def _lens(exploration: Exploration, request: Request) -> dict[str, Any]:
    name, position = str(request["side"]), decoded(int(request["position"]))
    _side(exploration, request)
    found = exploration.lens(name, int(request["step"]), position)
    if not len(found.step):
        return {"layers": [], "predicts": None}
    text = TokenTexts(found.run.tokenizer)
    predicts, written = int(found.predicts[0]), int(found.written()[0])
    return {
        "layers": list(found.layers),
        "predicts": predicts if predicts >= 0 else None,
        "predicted": bool(found.predicted[0]),
        "tokens": [[str(text.label(i)) for i in row] for row in found.top_tokens[0].tolist()],
        "probabilities": found.top_probabilities[0].tolist(),
        "entropy": found.entropy[0].tolist(),
        "rank": found.rank[0].tolist(),
        "written": "" if written < 0 else str(text.label(written)),
    }


def _pattern(exploration: Exploration, request: Request) -> dict[str, Any]:
    _side(exploration, request)
    given = (str(request["side"]), int(request["step"]), int(request["layer"]), int(request["head"]))
    found = exploration.pattern(*given).numpy()
    return {"queries": found.shape[0], "keys": found.shape[1], "values": plain(found)}


def _side(exploration: Exploration, request: Request) -> Side:
    """The side that the page means.

    Raises:
        StaleError: it is no longer shown.
    """
    side = exploration.sides.get(str(request["side"]))
    if side is None or side.version != request.get("version"):
        raise StaleError
    return side


ANSWERS: dict[str, Callable[[Exploration, Request], dict[str, Any]]] = {
    "run": _run,
    "step": _step,
    "path": _path,
    "lens": _lens,
    "pattern": _pattern,
}
"""Kinds of requests that change nothing, with what answers them."""


def problem_of(error: BaseException) -> str:
    """An error as the sentence that the page shows."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted; nothing was changed."
    text = str(error).strip().splitlines()
    said = text[0] if text else type(error).__name__
    if isinstance(error, ValueError | TypeError | MemoryError):
        return said
    return f"{type(error).__name__}: {said} (explorer.error has the traceback)"
