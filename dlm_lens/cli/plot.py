"""`dlm-lens plot`: one picture of a recording, in a file."""

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from dlm_lens.cli.options import (
    DEVICE,
    DTYPE,
    JSON,
    LOADING,
    check_network,
    check_place,
    device_or_gpu,
    loading_options,
)
from dlm_lens.cli.output import show_json
from dlm_lens.cli.recordings import path_ends
from dlm_lens.printable import echo
from dlm_lens.viz.plot_options import PLOT_OPTIONS


class PlotCommand(TyperCommand):
    """A command whose help ends with the list of pictures, read when help is requested."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from dlm_lens.viz.plot_registry import plots

        self.epilog = f"Pictures: {', '.join(plots())}."
        super().format_help(ctx, formatter)


def plot_command(
    name: Annotated[str, typer.Argument(help="Name of a picture, or list.")],
    recordings: Annotated[
        list[Path] | None,
        typer.Argument(help="Directory of a recording (dlm-lens record); sink-positions takes several."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write: png, pdf or svg; html for circuitsvis.")
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Beginning of the caption; the model's name by default.")
    ] = None,
    device: Annotated[str | None, DEVICE] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    loading: Annotated[list[str] | None, LOADING] = None,
    as_json: Annotated[bool, JSON] = False,
    **given: str | None,
) -> None:
    """Draw one picture of a recording, or list the pictures.

    A picture of one head shows the head whose main sink scores highest in the row, on average over steps, unless
    --layer and --head or --pick choose another one.
    """
    if name == "list":
        _list_plots(as_json)
        return
    from dlm_lens.recording.directories import check_recording
    from dlm_lens.viz.plot_options import read_options
    from dlm_lens.viz.plot_registry import check_plot, find_plot

    formats = find_plot(name).formats
    if not recordings:
        raise ValueError(f"plot {name} needs the directory of a recording; dlm-lens record makes one")
    file = out or Path(name + formats[0])
    options = read_options({option: text for option, text in given.items() if text is not None})
    check_network(None, dtype, device)
    arguments = loading_options(loading)
    if (device or dtype or arguments) and "model" not in find_plot(name).options:
        raise ValueError(f"{name} runs no model; leave --device, --dtype and --load out")
    check_plot(name, frozenset(options), len(recordings), file)
    check_place(options.get("layer"), options.get("head"), options.get("level", "head"))
    for path in recordings:
        check_recording(path)

    from dlm_lens.recording import Recording
    from dlm_lens.viz.plot_options import PlotOptions
    from dlm_lens.viz.plot_registry import write_plot

    parts = [Recording.load(path) for path in recordings]
    loaded = dict(zip(labels_of([part.model for part in parts], recordings), parts, strict=True))
    arguments |= {"dtype": dtype, "device_map": device_or_gpu(device)}
    written = write_plot(name, PlotOptions(loaded, title, **options, loading=arguments), file)
    if as_json:
        show_json({"file": str(written)})
    else:
        echo(str(written))


def labels_of(models: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """A label for every recording, all different: its model, as much of its path as that needs, and a number."""
    names = [Path(model).name or path.name for model, path in zip(models, paths, strict=True)]
    if len(set(names)) == len(names):
        return names
    labels = [f"{name} ({end})" for name, end in zip(names, path_ends(paths), strict=True)]
    return [
        label if labels.count(label) == 1 else f"{label} {labels[:place].count(label) + 1}"
        for place, label in enumerate(labels)
    ]


def _declare_options(command: Any) -> None:
    """Give the command an option per field of `PlotOptions`, in place of `**given`."""
    signature = inspect.signature(command)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(
            option,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(f"--{option}", help=text)],
        )
        for option, text in PLOT_OPTIONS.items()
    ]
    command.__signature__ = signature.replace(parameters=[*own, *added])
    command.__annotations__ |= {one.name: one.annotation for one in added}


_declare_options(plot_command)


def _list_plots(as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from dlm_lens.viz.plot_registry import plots

    if as_json:
        show_json([asdict(one) for one in plots().values()])
        return
    table = Table.grid(padding=(0, 2))
    for one in plots().values():
        table.add_row(one.name, one.about, one.needs and f"needs {one.needs}", " ".join(one.formats))
    Console(width=None if Console().is_terminal else 160).print(table)
