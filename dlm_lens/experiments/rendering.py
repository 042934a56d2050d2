"""Markdown tables and figures from stored results; no model runs here."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlm_lens.experiments.experiment import Experiment, Finding, Rendering
from dlm_lens.experiments.results import Item, Results, read_results
from dlm_lens.experiments.runner import list_items
from dlm_lens.files.atomic_writes import write_file


def render_experiment(experiment: Experiment, out: str | Path) -> Path:
    """Write the tables (`NAME.md`) and figures (`NAME-FIGURE.png`) of a run into its directory; return the page.

    Raises:
        FileNotFoundError: the directory holds no results.
        ValueError: the results are of another experiment, or no item is finished.
    """
    directory = Path(out)
    results = load_results(experiment, directory)
    rendering = experiment.render(results)
    for name, figure in rendering.figures.items():
        figure.savefig(directory / f"{experiment.name}-{name}.png", bbox_inches="tight", dpi=150)
    page = directory / f"{experiment.name}.md"
    pictures = [f"![{experiment.name}, {name}]({experiment.name}-{name}.png)" for name in rendering.figures]
    text = [f"# {experiment.shows}: {experiment.title}", *describe(experiment, results, rendering), *pictures]
    return write_file(page, "\n\n".join(text) + "\n")


def load_results(experiment: Experiment, directory: Path) -> Results:
    """The results of a run, in the order of its items.

    Raises:
        FileNotFoundError: the directory holds no results.
        ValueError: the results are of another experiment, or no item is finished.
    """
    found = read_results(directory, lambda config: _items(experiment, config, directory))
    if not found.records:
        raise ValueError(f"{directory} holds no finished item of {experiment.name} yet")
    return found


def _items(experiment: Experiment, config: Mapping[str, Any], directory: Path) -> list[Item]:
    if config["experiment"] != experiment.name:
        raise ValueError(f"{directory} holds results of {config['experiment']}, not of {experiment.name}")
    return list_items(experiment, config)


def describe(experiment: Experiment, results: Results, rendering: Rendering) -> Iterable[str]:
    """Paragraphs of the page: scale, the paper's tables, the measured tables, findings, notes."""
    scale = "small" if results.config["small"] else "full"
    settings = ", ".join(f"{name}={value!r}" for name, value in results.settings.items())
    yield f"Metric: {experiment.metric}. Scale: {scale} ({settings})."
    if results.missing:
        yield f"**Unfinished: {results.missing} of {len(results.records) + results.missing} items are missing.**"
    for table in experiment.paper:
        yield f"In the paper, {table.title}:"
        yield markdown(table.head, table.rows)
    for table in rendering.tables:
        yield f"Here, {table.title}:"
        yield markdown(table.head, table.rows)
    if rendering.findings:
        yield markdown(["the paper", "here", "null", "", "rule"], [_row(finding) for finding in rendering.findings])
    yield from rendering.notes


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; bars in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())


def _row(finding: Finding) -> list[str]:
    return [finding.paper, finding.here, finding.null, f"**{finding.verdict}**", finding.why]
