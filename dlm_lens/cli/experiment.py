"""`dlm-lens experiment`: list, plan, run and render the figures and tables of the papers."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_lens.printable import echo


def experiment_command(
    name: Annotated[str, typer.Argument(help="An experiment's name, or `list`.")],
    small: Annotated[bool, typer.Option("--small", help="Minutes on two cores, with the embedded models.")] = False,
    model: Annotated[
        list[str] | None, typer.Option(help="Embedded model, directory or hub name; again for more than one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the results; runs/NAME by default.")] = None,
    given: Annotated[
        list[str] | None, typer.Option("--set", help="A setting as name=value, such as prompts=64.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what a run costs, and stop.")] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Tables and figures of the results so far; run nothing.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Where models go; with --plan also a100, h100, h200.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights; the checkpoint's own by default.")] = None,
) -> None:
    """Run a figure or table of the papers; the same command goes on where it was killed.

    Under torchrun every process computes a part of the items; --render then merges their files.
    """
    if name == "list":
        list_command()
        return
    from dlm_lens.adapters.model_names import check_model_name
    from dlm_lens.command_options import check_device, check_directory, check_dtype
    from dlm_lens.experiments.experiment import check_experiment, read_setting

    check_experiment(name)
    for one in model or ():
        check_model_name(one)
    check_device(device)
    check_dtype(dtype)
    directory = out or Path("runs") / (f"{name}-small" if small else name)
    check_directory(directory)
    settings = dict(read_setting(text) for text in given or ())

    from transformers.utils import logging as transformers_logging

    from dlm_lens.experiments import find_experiment, plan_experiment, render_experiment, run_experiment

    # Loading a model of a megabyte needs no bar beside that of the items.
    transformers_logging.disable_progress_bar()
    experiment = find_experiment(name)
    chosen: dict[str, Any] = {"small": small, "models": model or (), "settings": settings}
    if plan:
        echo(plan_experiment(experiment, device=device or "cpu", **chosen))
        return
    if not render:
        results = run_experiment(experiment, directory, loading=_loading(device, dtype), **chosen)
        if results.missing:
            echo(f"{results.missing} items are left to other processes; merge with --render", err=True)
            return
    page = render_experiment(experiment, directory)
    echo(page.read_text(encoding="utf-8"))
    echo(f"results, tables and figures: {directory}", err=True)


def list_command() -> None:
    """Name, source and question of every experiment."""
    from rich.console import Console
    from rich.table import Table

    from dlm_lens.experiments.experiment import declared_experiments

    table = Table("name", "shows", "what it measures", box=None, pad_edge=False)
    for experiment in declared_experiments():
        table.add_row(experiment.name, experiment.shows, experiment.title)
    Console().print(table)


def _loading(device: str | None, dtype: str | None) -> dict[str, Any]:
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else None)
    return {name: value for name, value in (("device_map", chosen), ("dtype", dtype)) if value is not None}
