"""`dlm-lens train`: from a config to checkpoints."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_lens.cli.output import one_sentence_of_a_stop
from dlm_lens.option_values import one_of
from dlm_lens.printable import echo

if TYPE_CHECKING:
    from dlm_lens.training.settings import TrainingSettings


def train_command(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a config of the package.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="A setting, such as optimisation.rate=2e-4; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what the run costs, and stop.")] = False,
    device: Annotated[
        str | None, typer.Option(help="For --dry-run: a100, h100 (the default), h200, l40s or rtx4090.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="For --dry-run: how many; by default as the batch divides, 8 at most."),
    ] = None,
    utilisation: Annotated[
        float | None,
        typer.Option(help="For --dry-run: share of the peak FLOP/s that the training reaches; by default 0.4."),
    ] = None,
) -> None:
    """Train a masked DLM; the same command continues an interrupted run."""
    from dlm_lens.training.config_files import read_settings
    from dlm_lens.training.gpus import DEVICES, UTILISATION

    if device is not None:
        one_of("--device", device, DEVICES)
    if utilisation is not None and not 0 < utilisation <= 1:
        raise ValueError(f"--utilisation is {utilisation}; it must be above 0 and at most 1")
    given = {"--device": device, "--devices": devices, "--utilisation": utilisation}
    unused = [f"{option} {value}" for option, value in given.items() if value is not None]
    if unused and not dry_run:
        raise ValueError(
            f"{' and '.join(unused)} apply to --dry-run alone; leave them out, or add --dry-run (a training uses "
            "the GPU that it finds, and all of them with torchrun or accelerate launch)"
        )
    settings = read_settings(config, overrides or ())
    if dry_run:
        _show_plan(settings, device or "h100", devices, UTILISATION if utilisation is None else utilisation)
        return
    from dlm_lens.training.trainer import end_processes, run_training

    with one_sentence_of_a_stop():
        path = run_training(settings)
    end_processes()
    logs = f"; logs: tensorboard --logdir {settings.output}" if "tensorboard" in settings.report_to else ""
    whole = path is not None and (path / "config.json").is_file()
    what = "dlm_lens.load opens it" if whole else "sharded weights, to resume; load opens a FULL_STATE_DICT"
    echo(f"trained: {path} ({what}){logs}")


def _show_plan(settings: "TrainingSettings", device: str, devices: int | None, utilisation: float) -> None:
    from dlm_lens.training.cost_estimate import plan

    found = plan(settings, device=device, devices=devices, utilisation=utilisation, rows=_rows(settings))
    for name, value in found.rows().items():
        echo(f"{name:<28}{value}")


def _rows(settings: "TrainingSettings") -> int | None:
    """The size of the dataset, where the budget is in epochs.

    Raises:
        ValueError: packed text, whose tokens are not counted here.
    """
    if settings.epochs is None:
        return None
    if settings.data.prompt_column is None:
        raise ValueError(
            f"epochs is {settings.epochs} of packed text, whose tokens only a run counts; give tokens or steps "
            "for --dry-run"
        )
    from dlm_lens.training.dataset_files import read_dataset

    dataset: Any = read_dataset(settings.data)
    return len(dataset) if hasattr(dataset, "__len__") else None
