"""`dlm-lens plot`: one picture of a recording, in a file."""

from pathlib import Path
from typing import Annotated

import typer

from dlm_lens.command_options import index_or_mean, one_of
from dlm_lens.printable import echo


def plot(
    kind: Annotated[str, typer.Argument(help="What to draw; `dlm-lens plot list` names the kinds.")],
    recording: Annotated[
        list[Path] | None,
        typer.Argument(help="Directory of a recording (dlm-lens record); sink-positions takes several."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write: png, pdf, svg, or html for circuitsvis.")
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Index of the layer, or mean; without it, see the docs.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Index of the head, or mean.")] = None,
    pick: Annotated[
        str | None,
        typer.Option(help="Which head without --layer and --head: the strongest, or the one that is moving most."),
    ] = None,
    row: Annotated[int | None, typer.Option(min=0, help="Which sequence of the recording; 0 by default.")] = None,
    step: Annotated[list[int] | None, typer.Option(help="A step; repeatable.")] = None,
    position: Annotated[
        int | None, typer.Option(help="A position from the prompt's first token, for lens-table.")
    ] = None,
    eps: Annotated[float | None, typer.Option(help="Threshold of Eq. 3; 3 by default.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, for pictures that run it; the recording's by default.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="In front of the caption; the model's name by default.")] = None,
) -> None:
    """Draw one picture of a recording, or `list` the kinds.

    Pictures of one head take the layer and head whose main sink scores highest on average, unless told otherwise.
    """
    if kind == "list":
        _list_kinds()
        return
    from dlm_lens.adapters.model_names import check_model_name
    from dlm_lens.recording.directories import check_recording
    from dlm_lens.sinks.detector_registry import parse_detector
    from dlm_lens.viz.plot_registry import KINDS, check_options

    if kind not in KINDS:
        raise ValueError(f"there is no picture {kind!r}; there are {', '.join(KINDS)}")
    if not recording:
        raise ValueError(f"plot {kind} needs the directory of a recording; dlm-lens record makes one")
    settings = {
        "layer": index_or_mean("--layer", layer), "head": index_or_mean("--head", head),
        "row": row, "position": position,
        "steps": tuple(step) if step else None, "eps": eps,
        "pick": pick, "model": model,
    }  # fmt: skip
    chosen = {name: value for name, value in settings.items() if value is not None}
    given = frozenset("step" if name == "steps" else name for name in chosen) | (
        frozenset({"recordings"}) if len(recording) > 1 else frozenset()
    )
    if pick is not None:
        one_of("--pick", pick, ("strongest", "moving"))
    if eps is not None:
        parse_detector("above-mean", eps)
    if model is not None:
        check_model_name(model)
    file = out or Path(kind + KINDS[kind].suffixes[0])
    check_options(kind, given, file)
    for path in recording:
        check_recording(path)

    from dlm_lens.recording import Recording
    from dlm_lens.viz.plot_options import PlotOptions
    from dlm_lens.viz.plot_registry import draw

    loaded: dict[str, Recording] = {}
    for path in recording:
        part = Recording.load(path)
        name = Path(part.model).name or path.name
        loaded[name if name not in loaded else f"{name} ({path.name})"] = part
    options = PlotOptions(recordings=loaded, title=title, **chosen)  # type: ignore[arg-type]
    echo(str(draw(kind, options, file, given)))


def _list_kinds() -> None:
    from rich.console import Console
    from rich.table import Table

    from dlm_lens.viz.plot_registry import KINDS

    table = Table.grid(padding=(0, 2))
    for name, kind in KINDS.items():
        table.add_row(name, kind.about, kind.needs and f"needs {kind.needs}", " ".join(kind.suffixes))
    Console(width=None if Console().is_terminal else 160).print(table)
