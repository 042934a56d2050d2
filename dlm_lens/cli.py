"""The console script `dlm-lens`."""

import errno
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

import dlm_lens
from dlm_lens.evaluation.command import eval_command
from dlm_lens.experiments.command import experiment_command
from dlm_lens.printable import echo, printable
from dlm_lens.probes.command import lens_command, norms_command, sinks_command
from dlm_lens.recording.command import record_prompts
from dlm_lens.training.command import train
from dlm_lens.viz.command import plot

app = typer.Typer(
    name="dlm-lens",
    help="Mechanistic interpretability of diffusion language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Mechanistic interpretability of diffusion language models."""
    if version:
        echo(dlm_lens.__version__)
        raise typer.Exit


@app.command()
def demo(
    prompt: Annotated[str | None, typer.Option(help="What to continue; a word problem by default.")] = None,
    model: Annotated[str, typer.Option(help="Embedded model (toy, toy-ar), directory or hub name.")] = "toy",
    out: Annotated[Path, typer.Option(help="Directory for the figures and the numbers.")] = Path("dlm-lens-demo"),
) -> None:
    """Denoise a prompt, find its attention sinks at every step, and draw them."""
    from dlm_lens.demo import PROMPT, run_demo

    _quiet_transformers()
    run_demo(PROMPT if prompt is None else prompt, model, out)


@app.command()
def families() -> None:
    """List the model families, their checkpoints, special token ids and samplers."""
    from rich.console import Console
    from rich.table import Table

    from dlm_lens.adapters import embedded_models

    console = Console()
    for family in dlm_lens.families():
        ids = [
            ", ".join(f"{name} {value}" for name, value in held.items()) + f" (vocabulary of {vocabulary})"
            for vocabulary, held in family.special_ids.items()
        ]
        samplers = [
            f"{sampler}: {', '.join(f'{name}={value}' for name, value in defaults.items())}"
            for sampler, defaults in family.samplers.items()
        ]
        rows = {
            "model_type": ", ".join(family.layouts),
            "checkpoints": "\n".join(family.hub_names) or "your own",
            "special ids": "\n".join(ids) or "from config.json",
            "sampler": "\n".join(samplers),
        }
        grid = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            grid.add_row(f"  {name}", value)
        console.print(f"[bold]{family.name}[/bold]")
        console.print(grid)
    console.print(f"[bold]embedded models[/bold]: {', '.join(embedded_models())}")


app.command("eval")(eval_command)


app.command("experiment")(experiment_command)


app.command("record")(record_prompts)


app.command("sinks")(sinks_command)


app.command("norms")(norms_command)


app.command("lens")(lens_command)


app.command()(train)


app.command()(plot)


@app.command()
def report(
    recording: Annotated[Path, typer.Argument(help="Directory of a recording (dlm-lens record).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    compare: Annotated[Path | None, typer.Option(help="Another recording, to show beside it.")] = None,
    detector: Annotated[str, typer.Option(help="above-mean, above-std or top-k.")] = "above-mean",
    eps: Annotated[float, typer.Option(help="Setting of above-mean.")] = 3.0,
    k: Annotated[float | None, typer.Option(help="Setting of above-std (3 by default) and top-k (1).")] = None,
    row: Annotated[int, typer.Option(help="Which sequence of the recording.")] = 0,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "",
) -> None:
    """Write one HTML file in which a recording's sinks can be followed step by step, in any browser, offline."""
    from dlm_lens.sinks import AboveMean, AboveStd, Detector, TopK
    from dlm_lens.viz import report as write

    rules: dict[str, Detector] = {
        "above-mean": AboveMean(eps),
        "above-std": AboveStd(3.0 if k is None else k),
        "top-k": TopK(1 if k is None else int(k)),
    }
    if detector not in rules:
        raise ValueError(f"the detector {detector!r} is not one of {', '.join(rules)}")
    parts = [dlm_lens.Recording.load(path) for path in [recording, *([] if compare is None else [compare])]]
    write(
        parts[0],
        out,
        compare=None if compare is None else parts[1],
        detector=rules[detector],
        row=row,
        title=title,
        labels=None if compare is None else (recording.resolve().name, compare.resolve().name),
    )
    echo(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


@app.command()
def doctor() -> None:
    """Check the installation: packages, devices, and the embedded model through every host."""
    from rich.console import Console
    from rich.markup import escape

    from dlm_lens.doctor import findings

    _quiet_transformers()
    console, bad = Console(), 0
    for finding in findings():
        mark = {True: "[green]ok[/green]", False: "[red]bad[/red]", None: "[dim]--[/dim]"}[finding.good]
        console.print(f"{mark:>4}  {finding.subject:<18} {escape(finding.found)}")
        bad += finding.good is False
    if bad:
        raise typer.Exit(1)


def _quiet_transformers() -> None:
    """One model of a megabyte needs no progress bar of its weights."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _sentence(error: Exception) -> str:
    """What to print: the error's own sentence, or one for what the system and the hub say in a few words."""
    # The OSErrors that this package raises have a sentence and no number.
    number, path = getattr(error, "errno", None), getattr(error, "filename", None)
    remedies = {
        errno.EEXIST: "is a file already; give another directory",
        errno.ENOTDIR: "lies below a file, not below a directory; give another path",
        errno.EISDIR: "is a directory; give the name of a file in it",
        errno.ENOENT: "is not there; make its directory first, or give another path",
        errno.EACCES: "may not be written or read by you; give another path",
        errno.EPERM: "may not be written or read by you; give another path",
        errno.EROFS: "is on a disk that cannot be written; give another path",
        errno.ENOSPC: "does not fit on its disk; make room, and give the same command again",
    }
    if number in remedies and path:
        return f"{path} {remedies[number]}"
    if isinstance(error, ConnectionError):
        return f"{error}; try again with a connection: what was fetched once is kept"
    return str(error) or type(error).__name__


class _PrintableLines(logging.Formatter):
    """Log lines may quote files and weights."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def main() -> None:
    """Run the command line; an expected error is one sentence and exit status 1."""
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_PrintableLines("%(levelname)s %(name)s: %(message)s"))
    try:
        app()
    except (ValueError, OSError, ImportError, MemoryError) as error:
        echo(f"dlm-lens: {_sentence(error)}", fg=typer.colors.RED, err=True)
        sys.exit(1)
    except SystemExit as end:
        # Typer turns Ctrl-C into this exit without a word.
        if end.code == 130:
            echo(
                "\ndlm-lens: interrupted; the same command goes on where record, eval --out and experiment were, "
                "and behind the last checkpoint of train",
                err=True,
            )
        raise
    except KeyboardInterrupt:
        echo("\ndlm-lens: interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
