"""`dlm-lens experiment`: list, plan, run and render the figures and tables of the papers."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_lens.cli.options import (
    DTYPE,
    LOADING,
    check_device,
    check_dtype,
    check_not_options,
    device_or_gpu,
    loading_options,
    quiet_transformers,
)
from dlm_lens.cli.output import one_sentence_of_a_stop, show_json
from dlm_lens.files.paths import check_directory
from dlm_lens.option_values import settings_of, words
from dlm_lens.printable import echo

NAME = typer.Argument(help="Name of an experiment, or list.")
SMALL = typer.Option("--small", help="Minutes on two cores, with the embedded models.")
MODELS = typer.Option(help="Embedded models, directories or hub names, separated by commas.")
OUT = typer.Option(help="Directory of the results; runs/NAME by default.")
SET = typer.Option("--set", help="A setting, such as prompts=64; repeatable.")
PLAN = typer.Option("--plan", help="Print what a run costs, and stop.")
RENDER = typer.Option("--render", help="Write tables and figures of the results so far; run nothing.")
PLANNED_DEVICE = typer.Option(help="Where models run; a GPU if there is one. With --plan also a100, h100, h200.")
LIST_AS_JSON = typer.Option("--json", help="Print the list as JSON.")


def experiment_command(
    context: typer.Context,
    name: Annotated[str, NAME],
    small: Annotated[bool, SMALL] = False,
    models: Annotated[str | None, MODELS] = None,
    out: Annotated[Path | None, OUT] = None,
    settings: Annotated[list[str] | None, SET] = None,
    plan: Annotated[bool, PLAN] = False,
    render: Annotated[bool, RENDER] = False,
    device: Annotated[str | None, PLANNED_DEVICE] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    loading: Annotated[list[str] | None, LOADING] = None,
    as_json: Annotated[bool, LIST_AS_JSON] = False,
) -> None:
    """Run an experiment of the papers, or list them; the same command continues an interrupted run.

    Under torchrun every process computes a part of the items; --render then merges their files. A table of several
    seeds goes on from its stored ones when it is started with more of them: --set seeds=5. --load is that of every
    model of the run.
    """
    if name == "list":
        _list_experiments(as_json)
        return
    if as_json:
        raise ValueError("--json goes with `dlm-lens experiment list`; the results of a run are files in --out")
    from dlm_lens.experiments.experiment import check_experiment

    check_experiment(name)
    of_weights = {"--dtype": dtype, "--load": loading}
    if render:
        unread = {"--models": models, "--set": settings, "--device": device, **of_weights}
        _refuse_unread(unread, "--render reads the settings that are stored in --out")
    if plan:
        _refuse_unread(of_weights, "--plan counts each model by its config.json, in the dtype that is there")
    else:  # a plan takes the names of GPUs
        check_device(device)
    check_dtype(dtype)
    chosen_model = loading_options(loading)
    directory = out or Path("runs") / (f"{name}-small" if small else name)
    check_directory(directory)
    chosen = {"small": small, **_chosen(models, settings)}

    from dlm_lens.experiments import find_experiment, plan_experiment, render_experiment, run_experiment

    quiet_transformers()
    experiment = find_experiment(name)
    check_not_options(context.command, "--set", (one for one in chosen["settings"] if one not in experiment.small))
    if plan:
        echo(plan_experiment(experiment, device=device or "cpu", **chosen))
        return
    if not render:
        with one_sentence_of_a_stop("; the same command continues"):
            given = _loading(device, dtype, automatic=not experiment.trains) | chosen_model
            results = run_experiment(experiment, directory, loading=given, **chosen)
        if results.missing:
            echo(f"{results.missing} items are left to other processes; merge with --render", err=True)
            return
    page = render_experiment(experiment, directory)
    echo(page.read_text(encoding="utf-8"))
    echo(f"results, tables and figures: {directory}", err=True)


def _chosen(models: str | None, settings: list[str] | None) -> dict[str, Any]:
    """The models and the settings of a run.

    Raises:
        ValueError: no name of a model, or models in both options.
    """
    from dlm_lens.adapters.model_names import check_model_name

    names = words("--models", models) if models else []
    for model in names:
        check_model_name(model)
    given = settings_of(settings or ())
    if names and "models" in given:
        raise ValueError("--models and --set both name the models; give one of them")
    return {"models": names, "settings": given}


def _refuse_unread(options: dict[str, Any], why: str) -> None:
    given = " and ".join(option for option, value in options.items() if value)
    if given:
        raise ValueError(f"{why}; leave out {given}")


def _list_experiments(as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from dlm_lens.experiments.experiment import declared_experiments

    experiments = declared_experiments()
    if as_json:
        names = ("name", "shows", "title")
        show_json([{name: getattr(experiment, name) for name in names} for experiment in experiments])
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True, min_width=max(len(each.name) for each in experiments))
    table.add_column("shows", overflow="fold")
    table.add_column("what it measures", overflow="fold")
    for experiment in experiments:
        table.add_row(experiment.name, experiment.shows, experiment.title)
    Console().print(table)


def _loading(device: str | None, dtype: str | None, automatic: bool) -> dict[str, Any]:
    """Arguments of `dlm_lens.load`; `automatic`: a GPU where no device is given."""
    chosen = (("device_map", device_or_gpu(device) if automatic else device), ("dtype", dtype))
    return {name: value for name, value in chosen if value is not None}
