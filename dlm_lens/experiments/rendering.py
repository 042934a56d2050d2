"""Markdown tables and figures from stored results; no model runs here."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlm_lens.experiments.experiment import Experiment, Finding, Rendering
from dlm_lens.experiments.results import Item, Results, read_results
from dlm_lens.experiments.runner import list_items
from dlm_lens.experiments.verdicts import RATE
from dlm_lens.files.atomic_writes import write_figure, write_file
from dlm_lens.files.paths import user_path
from dlm_lens.files.sealed_json import naming

REMEDY = "move its files away, or choose another --out"


def render_experiment(experiment: Experiment, out: str | Path) -> Path:
    """Write the tables (`NAME.md`) and figures (`NAME-FIGURE.png`) of a run into its directory; return the page.

    Raises:
        FileNotFoundError: the directory holds no results.
        ValueError: the results are of another experiment, or no item is finished.
    """
    directory = user_path(out)
    results = load_results(experiment, directory)
    with naming(directory, REMEDY):
        rendering = experiment.render(results)
    for name, figure in rendering.figures.items():
        write_figure(directory / f"{experiment.name}-{name}.png", figure)
    page = directory / f"{experiment.name}.md"
    pictures = [f"![{experiment.name}, {name}]({experiment.name}-{name}.png)" for name in rendering.figures]
    text = [f"# {experiment.shows}: {experiment.title}", *describe(experiment, results, rendering), *pictures]
    return write_file(page, "\n\n".join(text) + "\n")


def load_results(experiment: Experiment, directory: Path) -> Results:
    """The results of a run, in the order of its items; of an unfinished run those with shared prompts.

    Raises:
        FileNotFoundError: the directory holds no results.
        ValueError: the results are of another experiment, no item is finished, or no prompt is shared.
    """
    found = read_results(directory, lambda config: _items(experiment, config, directory))
    if not found.records:
        raise ValueError(f"{directory} holds no finished item of {experiment.name} yet")
    if not found.missing:
        return found
    shared = found.with_shared_prompts(_items(experiment, found.config, directory))
    if not shared.records:
        raise ValueError(
            f"{directory} holds {len(found.records)} finished items of {experiment.name}, and no prompt that all "
            f"networks and conditions of a model have; let the run go on, {found.missing} items are missing"
        )
    return shared


def _items(experiment: Experiment, config: Mapping[str, Any], directory: Path) -> list[Item]:
    if config["experiment"] != experiment.name:
        raise ValueError(f"{directory} holds results of {config['experiment']}, not of {experiment.name}")
    with naming(directory, REMEDY):
        return list_items(experiment, config)


def describe(experiment: Experiment, results: Results, rendering: Rendering) -> Iterable[str]:
    """Paragraphs of a run's own page: metric, scale, verdicts, measured tables, the paper's tables, notes."""
    yield f"Metric: {experiment.metric}. {scale_of(results)}"
    if results.unfinished:
        yield f"**{results.unfinished}**"
    if rendering.findings:
        yield findings_table(rendering.findings)
    yield from number_tables(experiment, rendering)
    yield from rendering.notes


def scale_of(results: Results) -> str:
    """Scale and settings of a run, and how its models were loaded where that was given, in a sentence."""
    scale = "small" if results.config["small"] else "full"
    loaded = {name: results.config[name] for name in ("dtype", "load") if results.config.get(name) is not None}
    shown = {**results.settings, **loaded}
    return f"Scale: {scale} ({', '.join(f'{name}={value!r}' for name, value in shown.items())})."


def number_tables(experiment: Experiment, rendering: Rendering) -> Iterable[str]:
    """The measured tables, then the paper's."""
    for said, tables in (("Here", rendering.tables), ("In the paper", experiment.paper)):
        for table in tables:
            yield f"{said}, {table.title}:"
            yield markdown(table.head, table.rows)


def findings_table(findings: Sequence[Finding], after: Mapping[Finding, float] | None = None) -> str:
    """Claims, measurements, nulls, verdicts and rules.

    Args:
        findings: the rows.
        after: p-values after a correction for many comparisons; a verdict above the error rate is marked.
    """
    rows = [
        [one.paper, one.here, one.null, f"**{one.verdict}**{_lost(one, after or {})}", one.why] for one in findings
    ]
    return markdown(["the paper", "here", "null", "verdict", "rule"], rows)


def _lost(finding: Finding, after: Mapping[Finding, float]) -> str:
    lost = finding.verdict in ("agrees", "disagrees") and after.get(finding, 0.0) > RATE
    return " (not after the correction)" if lost else ""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; bars in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())
