"""`report`: the HTML page with the data of a recording."""

import base64
import hashlib
import html
import json
import logging
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dlm_lens.arguments import meant
from dlm_lens.files.atomic_writes import write_file
from dlm_lens.files.paths import check_file
from dlm_lens.placement import plain_defaults
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sinks import Detector
from dlm_lens.sinks.detectors.base import as_detector
from dlm_lens.viz.reporting.data import BUDGET, MOST_PROMPTS, START, Source, Subject, content_of
from dlm_lens.viz.reporting.rules import rule_of

logger = logging.getLogger(__name__)

SCRIPTS = ("unpack", "rules", "colour", "text", "cells", "grid", "head", "tables", "facts", "pane", "page", "app")
"""The scripts, in the order in which they are joined into one module."""


@plain_defaults()
def report(
    source: Source,
    path: str | Path,
    *,
    compare: Source | None = None,
    detector: Detector | str | None = None,
    queries: QueryClass = "all",
    row: int | None = None,
    title: str = "",
    labels: tuple[str, str] | None = None,
    progress: bool = False,
) -> Path:
    """Write one HTML file that shows the sinks of a run step by step, in any browser, without a network.

    The file holds the canvases, and all scores of a source exactly where they fit into 5 MB. Otherwise it holds the
    highest scores of every (step, layer, head) and of the means exactly, and of the other scores the bin of their
    colour: 64 steps of 32 layers of 32 heads of 128 keys fit this way. The page states what is exact, and finds the
    sinks that `find_sinks` finds.

    Args:
        source: a `Recording` with received attention of `queries`, or a `Received` and its `DenoisingRun` as a
            tuple.
        path: the .html or .htm file to write; an existing one is replaced.
        compare: another source, to show next to the first one; the file then holds up to 5 MB of each.
        detector: the rule with which the page starts, or its text, such as "attention-share:0.1";
            `AboveMean(3.0)` by default. The page computes the sinks by `AboveMean(eps)`, `AboveStd(k)`,
            `SoftSigmoid(alpha)` and `TopK(k)` for any setting. By other rules it holds the sinks that `find_sinks`
            finds with the given or the default setting, where the recording has the statistic that the rule reads.
        queries: which queries count, of recordings; a `Received` has its own.
        row: index of the sequence; None for all, at most the first 16, with a menu in the page. They share the 5 MB
            of one, so that fewer scores of each may be exact.
        title: heading of the page.
        labels: names of the two sources; those of the models by default, with A and B where they are the same.
        progress: show a progress bar over the rows.

    Returns:
        The path.

    Raises:
        TypeError: a source of another type.
        ValueError: a row that the run does not have, a statistic for `detector` or a class of queries that was not
            recorded, a class of queries for a `Received` of another one, too many scores, or
            a path that does not end in .html or .htm.
        IsADirectoryError: `path` is a directory.
        FileNotFoundError: its directory does not exist.
    """
    check_file(Path(path), (".html", ".htm"))
    rule = START if detector is None else as_detector(detector)
    sources = [meant(one) for one in ([source] if compare is None else [source, compare])]
    rows = range(shown_rows(sources)) if row is None else [row]
    prompts = [[Subject.of(given, one, queries) for given in sources] for one in rows]
    subjects = prompts[0]
    models = [subject.model for subject in subjects]
    alike = models[0] == models[-1] != "" and compare is not None
    names = labels or tuple(
        f"{model} ({letter})" if alike else model or letter for model, letter in zip(models, "AB", strict=False)
    )
    data: dict[str, Any] = {
        "title": title or " and ".join(dict.fromkeys(names if compare is not None else [subjects[0].model])),
        "rule": rule_of(rule),
    }
    room = BUDGET // len(prompts)
    rows_of_page = tqdm(prompts, desc="report", unit="row", disable=not progress)
    contents = [[content_of(subject, room, rule=rule) for subject in pair] for pair in rows_of_page]
    first = [{"label": label, **content} for label, content in zip(names, contents[0], strict=False)]
    data |= {"recordings": first, "others": contents[1:]}
    return write_file(path, page_of(data))


def shown_rows(sources: Sequence[Any]) -> int:
    """The number of prompts in the menu of the page: the rows that all sources have, at most `MOST_PROMPTS`."""
    runs = [source.run if isinstance(source, Recording) else source[-1] for source in sources if _is_source(source)]
    count = min((len(run.tokens) for run in runs), default=1)
    if count > MOST_PROMPTS:
        logger.warning("the report shows the first %d of %d prompts; give row= for another", MOST_PROMPTS, count)
    return min(count, MOST_PROMPTS)


def _is_source(source: Any) -> bool:
    """Whether it has a run; `Subject.of` raises for other faults."""
    return isinstance(source, Recording) or (
        isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], DenoisingRun)
    )


def page_of(data: dict[str, Any]) -> str:
    """The whole page, in ASCII."""
    style, script = part_of_page("style.css"), "\n".join(part_of_page(f"{name}.js") for name in SCRIPTS)
    parts = {
        "POLICY": (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "TITLE": html.escape(data["title"] or "Attention sinks")
        .encode("ascii", "xmlcharrefreplace")
        .decode("ascii"),
        "STYLE": style,
        "BODY": part_of_page("body.html").strip(),
        "SCRIPT": script,
        "DATA": embedded(data),
    }
    page = part_of_page("page.html")
    pieces = page.split("%%")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def embedded(data: Any) -> str:
    """JSON for a script element: in ASCII, with <, > and & escaped, whatever the tokens contain."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def part_of_page(name: str) -> str:
    """A file of the page."""
    return files("dlm_lens.viz.reporting").joinpath("page", name).read_text(encoding="ascii")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("ascii")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
