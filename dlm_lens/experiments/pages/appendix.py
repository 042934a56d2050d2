"""A results page in the form of a paper's appendix: per experiment picture, verdicts, command and numbers."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from dlm_lens.experiments.experiment import Experiment, Finding, Rendering
from dlm_lens.experiments.results import PATTERN, Results
from dlm_lens.experiments.runner import findings_table, load_results, markdown, number_tables, scale_of
from dlm_lens.experiments.verdicts import RATE, Verdict
from dlm_lens.files.atomic_writes import write_figure, write_file

DECIDED = ("agrees", "disagrees")

WHAT_TO_SEE = "What to see:"
"""How a note begins that belongs to the pictures."""


@dataclass(frozen=True)
class Entry:
    """The stored results of one experiment and what they render to.

    Args:
        experiment: the figure or table.
        directory: of the results.
        results: stored results.
        rendering: tables, figures and findings.
    """

    experiment: Experiment
    directory: Path
    results: Results
    rendering: Rendering


def entry(experiment: Experiment, directory: Path) -> Entry:
    """The entry of one results directory.

    Raises:
        FileNotFoundError: the directory holds no results.
        ValueError: the results are of another experiment, or no item is finished.
    """
    results = load_results(experiment, directory)
    return Entry(experiment, directory, results, experiment.render(results))


def entries(experiments: Iterable[Experiment], folder: Path) -> list[Entry]:
    """The entries of all experiments that have results in `folder`, each in the directory of its name.

    Raises:
        FileNotFoundError: no experiment has results.
    """
    found = [one for one in experiments if any((folder / one.name).glob(PATTERN))]
    if not found:
        raise FileNotFoundError(f"{folder} holds no results")
    return [entry(one, folder / one.name) for one in found]


def corrected(found: Sequence[Entry]) -> dict[Finding, float]:
    """Adjusted p-value (Benjamini and Hochberg) of every finding with a p-value, over all entries together."""
    tested = [one for part in found for one in part.rendering.findings if one.p is not None]
    return dict(zip(tested, adjusted([one.p for one in tested if one.p is not None]), strict=True))


def on_correction(found: Sequence[Entry]) -> str:
    """How many verdicts chance alone would give, and how many are left after the correction."""
    findings = [one for part in found for one in part.rendering.findings]
    tested, after = [one for one in findings if one.p is not None], corrected(found)
    decided = [one for one in tested if one.verdict in DECIDED]
    left = [one for one in decided if after[one] <= RATE]
    bare = sum(one.p is None and one.verdict in DECIDED for one in findings)
    text = (
        f"**Many comparisons.** {len(tested)} statements are compared with a bound or a null; {len(decided)} of "
        "the comparisons are decided by their 95% interval. If every true value were at its bound, "
        f"{expected_by_chance(len(tested)):.1f} would be decided for the paper by chance, and as many against it. "
        "After the correction of Benjamini and Hochberg over all of them (false discovery rate "
        f'{RATE}) {len(left)} remain; the others are marked "not after the correction".'
    )
    return text + (f" {bare} further verdicts are no comparison with a bound and have no p-value." if bare else "")


def glance(found: Sequence[Entry]) -> str:
    """The verdicts of every entry, counted."""
    kinds, after = get_args(Verdict), corrected(found)
    rows = []
    for one in found:
        findings = one.rendering.findings
        lost = sum(each.verdict in DECIDED and after.get(each, 0.0) > RATE for each in findings)
        counts = [str(sum(each.verdict == kind for each in findings)) for kind in kinds]
        name = one.experiment.name
        rows.append([f"[{name}](#{name})", one.experiment.shows, *counts, str(lost)])
    return markdown(["experiment", "shows", *kinds, "not after the correction"], rows)


def section(one: Entry, pictures: Mapping[str, str], after: Mapping[Finding, float]) -> Iterator[str]:
    """Paragraphs of one experiment.

    Args:
        one: the entry.
        pictures: path of each figure, relative to the page.
        after: adjusted p-values of all findings of the page, from `corrected`.
    """
    experiment, results, rendering = one.experiment, one.results, one.rendering
    yield f"## {experiment.name}"
    yield f"{experiment.shows}: {experiment.title}. Measured: {experiment.metric}."
    seen_first = [note for note in rendering.notes if note.startswith(WHAT_TO_SEE)]
    for name, path in pictures.items():
        seen = rendering.captions.get(name, "")
        yield f"![{experiment.name}: {name}]({path})" + (f"\n\n*{seen}*" if seen else "")
    yield from seen_first
    if results.unfinished:
        yield f"**{results.unfinished}**"
    if rendering.findings:
        yield findings_table(rendering.findings, after)
    yield f"```bash\n{command(experiment, results)}\n```"
    yield "<details><summary>All numbers</summary>"
    yield scale_of(results)
    yield from number_tables(experiment, rendering)
    yield "</details>"
    yield from (note for note in rendering.notes if note not in seen_first)


def command(experiment: Experiment, results: Results) -> str:
    """The command that computes these results: the settings that differ from the defaults of the models.

    With the options that say how the models are loaded, apart from the device.
    """
    small, models = bool(results.config["small"]), results.settings.get("models", ())
    defaults = experiment.config(small, models)["settings"]
    if models:
        defaults["models"] = experiment.config(small)["settings"]["models"]
    changed = {name: value for name, value in results.settings.items() if value != defaults.get(name)}
    parts = [f"dlm-lens experiment {experiment.name}" + (" --small" if small else "")]
    for name, value in changed.items():
        text = f"{name}={value!r}".replace("'", '"')
        parts.append(f"--set '{text}'" if any(sign in text for sign in ' ["{') else f"--set {text}")
    if results.config.get("dtype") is not None:
        parts.append(f"--dtype {results.config['dtype']}")
    parts += [f"--load {shlex.quote(f'{name}={value}')}" for name, value in results.config.get("load", {}).items()]
    return " ".join(parts)


def pictures(one: Entry) -> dict[str, str]:
    """Path of each figure of an entry in the repository's docs, relative to the page."""
    return {name: f"images/results/{one.experiment.name}-{name}.png" for name in one.rendering.figures}


def write_page(path: Path, page: str, found: Iterable[Entry]) -> None:
    """Write a page of the repository's docs, and beside it the pictures that it shows.

    Args:
        path: of the page.
        page: its text.
        found: its entries.

    Raises:
        FileNotFoundError: this is an installed package, without the repository's docs.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not there; run this in the repository")
    for one in found:
        for name, place in pictures(one).items():
            (path.parent / place).parent.mkdir(parents=True, exist_ok=True)
            write_figure(path.parent / place, one.rendering.figures[name], dpi=110)
    write_file(path, page)


def adjusted(ps: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's (1995) adjusted p-values: min over k >= rank of p_(k) m / k.

    Verdicts with an adjusted p-value of at most q have a false discovery rate of at most q, if the comparisons are
    independent or positively dependent.
    """
    order = sorted(range(len(ps)), key=ps.__getitem__, reverse=True)
    found, least = [1.0] * len(ps), 1.0
    for place, index in enumerate(order):
        least = min(least, ps[index] * len(ps) / (len(ps) - place))
        found[index] = least
    return found


def expected_by_chance(decided: int) -> float:
    """How many of so many comparisons would be decided for one given side if every true value were at its bound."""
    return decided * RATE / 2
