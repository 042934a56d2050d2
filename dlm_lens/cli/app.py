"""The console script `dlm-lens`."""

import errno
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import dlm_lens
from dlm_lens.cli.evaluate import eval_command
from dlm_lens.cli.experiment import experiment_command
from dlm_lens.cli.paths import paths_command
from dlm_lens.cli.plot import plot
from dlm_lens.cli.record import record_prompts
from dlm_lens.cli.tables import lens_command, norms_command, sinks_command
from dlm_lens.cli.train import train
from dlm_lens.printable import echo, printable

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
    steps: Annotated[
        int | None, typer.Option(help="Denoising steps; one per token of the answer by default.")
    ] = None,
    gen_length: Annotated[
        int | None,
        typer.Option(help="Tokens of the answer; the model's own, 64 at most, by default."),
    ] = None,
) -> None:
    """Denoise a prompt, find its attention sinks at every step, and draw them."""
    from dlm_lens.adapters.model_names import check_model_name, embedded_models
    from dlm_lens.command_options import check_directory, check_least

    check_model_name(model)
    check_directory(out)
    check_least(1, steps=steps, gen_length=gen_length)
    if prompt is not None and not prompt.strip():
        raise ValueError("prompt 0 is empty: give --prompt a text")

    from dlm_lens.cli.demo import run_demo

    if model in embedded_models():
        _quiet_transformers()
    run_demo(prompt, model, out, steps=steps, gen_length=gen_length)


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


app.command("paths")(paths_command)


app.command("norms")(norms_command)


app.command("lens")(lens_command)


app.command()(train)


app.command()(plot)


@app.command()
def report(
    recording: Annotated[Path, typer.Argument(help="Directory of a recording (dlm-lens record).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    compare: Annotated[Path | None, typer.Option(help="Another recording, to show beside it.")] = None,
    detector: Annotated[str, typer.Option(help="above-mean[:EPS], above-std[:K] or top-k[:K].")] = "above-mean",
    eps: Annotated[float | None, typer.Option(help="Setting of above-mean; 3 by default.")] = None,
    k: Annotated[float | None, typer.Option(help="Setting of above-std (3 by default) and top-k (1).")] = None,
    row: Annotated[
        int | None, typer.Option(min=0, help="Only this sequence; all, at most 16, with a menu by default.")
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "",
) -> None:
    """Write one HTML file in which a recording's sinks can be followed step by step, in any browser, offline."""
    from dlm_lens.command_options import check_file
    from dlm_lens.recording.directories import check_recording
    from dlm_lens.sinks.detector_registry import parse_detector

    name, _, setting = detector.partition(":")
    known = ("above-mean", "above-std", "top-k")
    if name not in known:
        raise ValueError(f"--detector {name!r} is not one of {', '.join(known)}")
    if k is not None:
        if name == "above-mean" or setting:
            raise ValueError(f"--k {k:g} is for above-std and top-k, not for --detector {detector}")
        setting = f"{k:g}"
    default = {"top-k": "1"}.get(name, "")
    chosen = parse_detector(f"{name}:{setting or default}" if setting or default else name, eps)
    check_file(out)
    for path in filter(None, (recording, compare)):
        check_recording(path)

    from dlm_lens.viz import report as write

    parts = [dlm_lens.Recording.load(path) for path in [recording, *([] if compare is None else [compare])]]
    write(
        parts[0],
        out,
        compare=None if compare is None else parts[1],
        detector=chosen.build(),
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

    from dlm_lens.cli.doctor import findings

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


PHRASES = (
    (r"dlm_lens\.record\(\.\.\., to=\) writes (one|some)", r"dlm-lens record writes \1"),
    (r"ReceivedAttention\(queries='(\w+)'\)", r"--reducer received:\1"),
    (r"pass (the right )?(\w+_token_id)= to dlm_lens\.load", r"put \1\2 into its config.json"),
    (r"take a part, such as recording\.select\(.*\)$", "record fewer steps or shorter answers"),
    (r"pass revision= one of the cached commits \(", "give the directory of a cached commit ("),
)
"""Advice for Python -> advice for a command line."""

ALIASES = {"to": "out", "reducers": "reducer", "overrides": "override"}
"""Parameters in Python whose options have another name."""


def as_command_line(sentence: str, options: Mapping[str, str]) -> str:
    """An error's sentence in which the arguments of a command are named as its options: seed=3 is --seed 3.

    What stands in the brackets of a call, such as AboveMean(eps=3.0), stays as it is.

    Args:
        sentence: of the error.
        options: a parameter's name in Python -> its option.
    """
    for pattern, words in PHRASES:
        sentence = re.sub(pattern, words, sentence)
    if not options:
        return sentence
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    parts = re.split(r"([\w.]+\([^()]*\))", sentence)
    # Every second part is a call.
    parts[::2] = [_with_options(text, names, options) for text in parts[::2]]
    return "".join(parts)


def _with_options(text: str, names: str, options: Mapping[str, str]) -> str:
    def option(found: re.Match[str]) -> str:
        return options[found[1]]

    # seed=..., and seed= at the end of a clause; then seed=3; then a name that begins the sentence.
    text = re.sub(rf"(?<![\w.-])({names})=(?:\.\.\.)?(?=[\s,;:.)]|$)", option, text)
    text = re.sub(rf"(?<![\w.-])({names})=", lambda found: f"{options[found[1]]} ", text)
    text = re.sub(rf"^({names})(?= (?:is|must|has)\b)", option, text)
    # No word of a sentence has an underscore.
    return re.sub(rf"(?<![\w./-])({names})(?![\w./-])", lambda m: options[m[1]] if "_" in m[1] else m[1], text)


def _options(arguments: Sequence[str], commands: typer.Typer = app) -> dict[str, str]:
    """The options of the command that was given, by the names of their parameters."""
    group: Any = typer.main.get_command(commands)
    name = next((one for one in arguments if one in group.commands), None)
    if name is None:
        return {}
    found = {one.name: max(one.opts, key=len) for one in group.commands[name].params if one.opts[0][0] == "-"}
    return found | {name: found[own] for name, own in ALIASES.items() if own in found and name not in found}


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
        sentence = as_command_line(_sentence(error), _options(sys.argv[1:]))
        echo(f"dlm-lens: {sentence}", fg=typer.colors.RED, err=True)
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
