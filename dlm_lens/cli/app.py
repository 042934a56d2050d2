"""The console script `dlm-lens`."""

import atexit
import gc
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import dlm_lens
from dlm_lens.cli.clock import clock_command
from dlm_lens.cli.demo import demo_command
from dlm_lens.cli.doctor import doctor_command
from dlm_lens.cli.errors import ALIASES, as_command_line, sentence_of
from dlm_lens.cli.evaluate import eval_command
from dlm_lens.cli.experiment import experiment_command
from dlm_lens.cli.families import families_command
from dlm_lens.cli.insertion import insertion_command
from dlm_lens.cli.lens import lens_command
from dlm_lens.cli.norms import norms_command
from dlm_lens.cli.options import options_of, with_home
from dlm_lens.cli.paths import paths_command
from dlm_lens.cli.plan import plan_command
from dlm_lens.cli.plot import PlotCommand, plot_command
from dlm_lens.cli.record import record_command
from dlm_lens.cli.report import report_command
from dlm_lens.cli.sinks import sinks_command
from dlm_lens.cli.train import train_command
from dlm_lens.printable import echo, printable

app = typer.Typer(
    name="dlm-lens",
    help="Mechanistic interpretability of diffusion language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than all else of `--help`
)


@app.callback(invoke_without_command=True)
def version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Mechanistic interpretability of diffusion language models."""
    if version:
        echo(dlm_lens.__version__)
        raise typer.Exit


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo_command,
    "record": record_command,
    "sinks": sinks_command,
    "paths": paths_command,
    "norms": norms_command,
    "lens": lens_command,
    "clock": clock_command,
    "insertion": insertion_command,
    "plot": plot_command,
    "report": report_command,
    "eval": eval_command,
    "train": train_command,
    "experiment": experiment_command,
    "families": families_command,
    "plan": plan_command,
    "doctor": doctor_command,
}
"""Name of a command -> its function, in the order of `dlm-lens --help`."""

for _name, _command in COMMANDS.items():
    _sentence = (_command.__doc__ or "").partition("\n\n")[0]
    app.command(_name, cls=PlotCommand if _name == "plot" else None, short_help=_sentence)(with_home(_command))


def _options(arguments: Sequence[str], commands: typer.Typer = app) -> dict[str, str]:
    """Names of parameters -> options, for the command among the arguments."""
    group: Any = typer.main.get_command(commands)
    name = next((one for one in arguments if one in group.commands), None)
    if name is None:
        return {}
    found = options_of(group.commands[name])
    return found | {name: found[own] for name, own in ALIASES.items() if own in found and name not in found}


class _PrintableLines(logging.Formatter):
    """Log lines with control characters escaped, since they may quote files and weights."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


IMPORTED_OBJECTS = 10_000
"""New objects between two collections of cycles; importing torch and a class of transformers leaves 380,000."""


def _collect_less() -> None:
    """Spare a command the collections that free nothing: while it imports, and when Python exits.

    Without this Python looks through the modules of torch and transformers several times at its exit
    (`python -m benchmarks.command_line` has the seconds of both). Everything else at the exit is as it was.
    """
    gc.set_threshold(IMPORTED_OBJECTS, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning to the user as one sentence, without the line of code that raised it; others as Python has them."""
    if issubclass(category, UserWarning):
        return printable(f"dlm-lens: {message}\n")
    return _format_in_python(message, category, filename, lineno, line)


_format_in_python = warnings.formatwarning


def _escape_what_the_terminal_lacks() -> None:
    """Write characters that the terminal's encoding does not have as their codes; they would end the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


PROGRESS_IN_FILES = {
    "TQDM_DELAY": "5",
    "TQDM_MININTERVAL": "10",
    "TQDM_BAR_FORMAT": "{l_bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]\n",
}
"""Defaults of tqdm where no terminal shows its bars: of work of more than 5 seconds, a line every 10 seconds."""


def _progress_in_lines() -> None:
    """Let progress bars, transformers' and the hub's too, write what a file of a log can hold: few whole lines."""
    if not sys.stderr.isatty():
        for name, value in PROGRESS_IN_FILES.items():
            os.environ.setdefault(name, value)


def main() -> None:
    """Run the command line; an expected error is one sentence and exit status 1."""
    _collect_less()
    _escape_what_the_terminal_lacks()
    _progress_in_lines()
    warnings.formatwarning = _format_warning
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_PrintableLines("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger("huggingface_hub").propagate = False  # it prints its lines itself
    try:
        app()
    except (ValueError, OSError, ImportError, MemoryError) as error:
        # Ends the progress bars that the functions drew, so that the sentence begins a line.
        traceback.clear_frames(error.__traceback__)
        sentence = as_command_line(sentence_of(error), _options(sys.argv[1:]))
        echo(f"dlm-lens: {sentence}", fg=typer.colors.RED, err=True)
        sys.exit(1)
    except SystemExit as end:
        # Typer turns Ctrl-C into this exit and prints nothing.
        if end.code == 130:
            echo(
                "\ndlm-lens: interrupted; the same command continues record, eval --out and experiment, and train "
                "from its last checkpoint",
                err=True,
            )
        raise
    except KeyboardInterrupt:
        echo("\ndlm-lens: interrupted", err=True)
        sys.exit(130)
