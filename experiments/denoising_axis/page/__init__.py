"""docs/results_axis.md from the committed results: `python -m dlm_lens.experiments.denoising_axis.page`."""

from pathlib import Path

from dlm_lens.experiments.experiment import Experiment, list_experiments
from dlm_lens.experiments.pages.appendix import (
    Entry,
    corrected,
    entries,
    glance,
    on_correction,
    pictures,
    section,
)

NAME = "axis-"
"""How the experiments of this page begin."""

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "results_axis.md"

HEAD = """# Results along the denoising axis

Questions of papers of 2026 about diffusion language models, answered for the embedded models: networks of 0.8
million parameters, canvases of about 55 positions, the shipped word problems. [What you can ask of a denoising
run](questions.md) explains each tool. These numbers neither confirm nor refute what the papers measure on models of
billions of parameters; they show what the tools find, and how sure one can be. Each verdict has a null, an interval
of 95% over prompts (or what the table names), and a rule that was set before the numbers; where a
rule or a bound was set after numbers were seen, the experiment's findings or notes say so.

`python -m dlm_lens.experiments.denoising_axis.page` makes this page from `experiments/denoising_axis/results`;
`pytest tests/experiments/test_axis_page.py` checks that it is up to date.
"""


def experiments() -> list[Experiment]:
    """The experiments of this page, by name."""
    return sorted((one for one in list_experiments() if one.name.startswith(NAME)), key=lambda one: one.name)


def make_page(results: Path = RESULTS) -> tuple[str, list[Entry]]:
    """The page and its entries.

    Raises:
        FileNotFoundError: no experiment has results.
    """
    found = entries(experiments(), results)
    after = corrected(found)
    parts = [HEAD.rstrip(), "## At a glance", glance(found), on_correction(found)]
    for one in found:
        parts += section(one, pictures(one), after)
    return "\n\n".join(parts) + "\n", found
