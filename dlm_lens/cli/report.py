"""`dlm-lens report`: a recording as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from dlm_lens.cli.options import DETECTOR, RECORDING
from dlm_lens.cli.recordings import load_recording, path_ends
from dlm_lens.files.paths import check_file
from dlm_lens.printable import echo


def report_command(
    recording: Annotated[Path, RECORDING],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    compare: Annotated[Path | None, typer.Option(help="Another recording, to show next to the first one.")] = None,
    detector: Annotated[str, DETECTOR] = "above-mean",
    row: Annotated[
        int | None,
        typer.Option(min=0, help="Only this sequence; by default all, at most 16, with a menu to choose one."),
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "",
) -> None:
    """Write one HTML file that shows the sinks of a recording step by step, in any browser, without a network."""
    from dlm_lens.recording.directories import check_recording
    from dlm_lens.sinks.detector_registry import parse_detector

    rule = parse_detector(detector)
    check_file(out, (".html", ".htm"))
    paths = [recording] if compare is None else [recording, compare]
    for path in paths:
        check_recording(path)

    from dlm_lens.viz import report

    names = path_ends(paths)
    first, *others = [load_recording(path) for path in paths]
    report(
        first,
        out,
        compare=others[0] if others else None,
        detector=rule.build(),
        row=row,
        title=title,
        progress=True,
        labels=None if compare is None else (names[0], names[1]),
    )
    echo(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
