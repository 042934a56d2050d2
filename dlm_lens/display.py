"""`ShowsItself`: how results show themselves: HTML in a notebook, text with rich in a terminal, one line in a log.

A result says what to show in `_preview`, as cells and a table; this file draws it in both media. Everything is
escaped here, so that a token can be neither markup nor a command of a terminal.
"""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dlm_lens.printable import printable

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import RenderableType
    from rich.text import Text

Kind = Literal["plain", "new", "revised", "open", "end"]
"""What a cell is: text; decided, rewritten at this step; not decided yet; end of text or padding."""

ROWS, COLUMNS = 8, 10
"""Lines and columns of a table that are shown."""

RICH_STYLES: dict[Kind, str] = {
    "plain": "", "new": "bold green", "revised": "bold yellow", "open": "dim", "end": "dim",
}  # fmt: skip

# No colour is set for plain text and backgrounds: the page's own fit its theme, light or dark.
STYLE = (
    ".dlm-lens{font-size:90%}.dlm-lens table{border-collapse:collapse;margin:.4em 0}"
    ".dlm-lens td,.dlm-lens th{text-align:left;padding:.1em .8em .1em 0;vertical-align:top;background:none}"
    ".dlm-lens .num{text-align:right}.dlm-lens .cells{font-family:ui-monospace,monospace;word-break:break-word}"
    ".dlm-lens .new{color:#0a8754;font-weight:600}.dlm-lens .revised{color:#b07d00;font-weight:600}"
    ".dlm-lens .open,.dlm-lens .end,.dlm-lens .label,.dlm-lens .note{opacity:.6}"
    ".dlm-lens .label{white-space:nowrap}"
    ".dlm-lens svg{display:block;margin:.4em 0;max-width:100%}"
)

FILLS: dict[Kind, tuple[str, float]] = {
    "plain": ("currentColor", 0.35), "new": ("#0a8754", 1.0), "revised": ("#b07d00", 1.0),
    "open": ("currentColor", 0.06), "end": ("currentColor", 0.15),
}  # fmt: skip
"""Colour and opacity of a cell in a strip."""


@dataclass(frozen=True)
class Cell:
    """A piece of text of a line.

    Args:
        text: untrusted.
        kind: what it is.
    """

    text: str
    kind: Kind = "plain"


@dataclass(frozen=True)
class Line:
    """Cells with a label before them.

    Args:
        label: such as "step 3".
        cells: in order, separated by blanks.
    """

    label: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Preview:
    """What a result shows of itself, below its headline.

    Args:
        lines: of text.
        strip: one row of cell kinds per step, drawn as a small picture; rows are of equal length.
        table: its first lines are shown.
        total: lines of the whole table, where `table` holds only some of them.
        note: where the rest is, such as "all of it: .table()".
    """

    lines: Sequence[Line] = ()
    strip: Sequence[Sequence[Kind]] = ()
    table: "DataFrame | None" = None
    total: int | None = None
    note: str = ""


class ShowsItself:
    """A result with a headline (its repr) and a preview, in a notebook and in a terminal.

    `_preview` is the first lines of `table()` where a class has no other, and nothing where it has no table.
    """

    def _preview(self) -> Preview:
        table = getattr(self, "table", None)
        return Preview() if table is None else Preview(table=table(), note="all: .table()")

    def _repr_html_(self) -> str:
        """HTML for a notebook, without scripts; all text is escaped."""
        preview = self._preview()
        parts = [f"<div>{html.escape(printable(repr(self)))}</div>"]
        if preview.lines:
            parts.append(f"<table>{''.join(map(_html_line, preview.lines))}</table>")
        if preview.strip:
            parts.append(_svg(preview.strip))
        if preview.table is not None:
            parts.append(_html_table(preview.table))
        if text := _note(preview):
            parts.append(f'<div class="note">{html.escape(text)}</div>')
        return f'<div class="dlm-lens"><style>{STYLE}</style>{"".join(parts)}</div>'

    def __rich__(self) -> "RenderableType":
        """What `rich.print(result)` shows."""
        from rich.console import Group
        from rich.text import Text

        preview = self._preview()
        parts: list[Any] = [Text(printable(repr(self)))]
        parts += [_rich_line(line) for line in preview.lines]
        if preview.table is not None:
            parts.append(_rich_table(preview.table))
        if text := _note(preview):
            parts.append(Text(text, style="dim"))
        return Group(*parts)


def _note(preview: Preview) -> str:
    """The note, after how much of the table is not shown."""
    if preview.table is None:
        return printable(preview.note)
    total, columns = preview.total or len(preview.table), len(preview.table.columns)
    shown = []
    if total > ROWS:
        shown.append(f"{ROWS} of {total:,} lines")
    if columns > COLUMNS:
        shown.append(f"{COLUMNS} of {columns} columns")
    parts = [" and ".join(shown)] if shown else []
    return "; ".join([*parts, printable(preview.note)] if preview.note else parts)


def _cells(table: "DataFrame") -> Iterator[list[tuple[str, bool]]]:
    """The shown part of a table: the heads, then its lines; each cell as text, and whether it is a number."""
    part = table.iloc[:ROWS, :COLUMNS]
    numeric = [kind.kind in "iuf" if hasattr(kind, "kind") else False for kind in part.dtypes]
    yield [(printable(str(name)), number) for name, number in zip(part.columns, numeric, strict=True)]
    for row in part.itertuples(index=False):
        yield [(_value(value), number) for value, number in zip(row, numeric, strict=True)]


def _value(value: Any) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"  # NaN: not defined
    return printable(str(value))


def _html_line(line: Line) -> str:
    cells = " ".join(
        f'<span class="{cell.kind}">{html.escape(printable(cell.text))}</span>'
        if cell.kind != "plain"
        else html.escape(printable(cell.text))
        for cell in line.cells
    )
    return f'<tr><td class="label">{html.escape(printable(line.label))}</td><td class="cells">{cells}</td></tr>'


def _html_table(table: "DataFrame") -> str:
    heads, *lines = _cells(table)

    def row(cells: Sequence[tuple[str, bool]], tag: str) -> str:
        start = {number: f'<{tag} class="num">' if number else f"<{tag}>" for number in (False, True)}
        return "".join(f"{start[number]}{html.escape(text)}</{tag}>" for text, number in cells)

    body = "".join(f"<tr>{row(line, 'td')}</tr>" for line in lines)
    return f"<table><thead><tr>{row(heads, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _svg(strip: Sequence[Sequence[Kind]], side: int = 6) -> str:
    """Steps from top to bottom, positions from left to right; equal neighbours of a row are one rectangle."""
    found = []
    for step, kinds in enumerate(strip):
        start = 0
        for place in range(1, len(kinds) + 1):
            if place == len(kinds) or kinds[place] != kinds[start]:
                fill, opacity = FILLS[kinds[start]]
                found.append(
                    f'<rect x="{start * side}" y="{step * side}" width="{(place - start) * side}" height="{side}" '
                    f'fill="{fill}" fill-opacity="{opacity:g}"/>'
                )
                start = place
    width, height = len(strip[0]) * side, len(strip) * side
    label = f"{len(strip)} steps from top to bottom, {len(strip[0])} positions from left to right"
    return (
        f'<svg role="img" aria-label="{label}" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<title>{label}: decided at the step green, rewritten yellow</title>{''.join(found)}</svg>"
    )


def _rich_line(line: Line) -> "Text":
    from rich.text import Text

    cells = (Text(printable(cell.text), style=RICH_STYLES[cell.kind]) for cell in line.cells)
    return Text.assemble((f"{printable(line.label)}  ", "dim"), Text(" ").join(cells))


def _rich_table(table: "DataFrame") -> Any:
    from rich.table import Table
    from rich.text import Text

    heads, *lines = _cells(table)
    found = Table(box=None, pad_edge=False)
    for name, number in heads:
        found.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for line in lines:
        found.add_row(*(Text(text) for text, _ in line))
    return found
