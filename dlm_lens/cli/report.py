"""`dlm-lens report`: a recording as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from dlm_lens.cli.options import DETECTOR, QUERIES, RECORDING, check_rule
from dlm_lens.cli.recordings import detector_of, load_recording, path_ends
from dlm_lens.files.paths import check_file
from dlm_lens.printable import echo


def report_command(
    recording: Annotated[Path, RECORDING],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    compare: Annotated[Path | None, typer.Option(help="Another recording, to show next to the first one.")] = None,
    detector: Annotated[str, DETECTOR] = "above-mean",
    queries: Annotated[str, QUERIES] = "all",
    row: Annotated[
        int | None,
        typer.Option(min=0, help="Only this sequence; by default all, at most 16, with a menu to choose one."),
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "",
) -> None:
    """Write one HTML file that shows the sinks of a recording step by step, in any browser, without a network."""
    check_file(out, (".html", ".htm"))
    paths = [recording] if compare is None else [recording, compare]
    for path in paths:
        check_rule(path, detector, queries=queries)

    from dlm_lens.viz import report

    names = path_ends(paths)
    first, *others = [load_recording(path) for path in paths]
    report(
        first,
        out,
        compare=others[0] if others else None,
        detector=detector_of(detector),
        queries=queries,  # type: ignore[arg-type]
        row=row,
        title=title,
        progress=True,
        labels=None if compare is None else (names[0], names[1]),
    )
    echo(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
