"""docs/results_one_token.md from the committed results: `python -m dlm_lens.experiments.one_token.page`."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from dlm_lens.experiments.catalogue import list_experiments
from dlm_lens.experiments.one_token.language import ROOT
from dlm_lens.experiments.rendering import describe, load_results, markdown, render_experiment
from dlm_lens.experiments.results import Results
from dlm_lens.experiments.spec import Experiment, Verdict

RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "results_one_token.md"

HEAD = """# Results: "One Token Is Enough"

Figures 1 and 3 and Tables 1 to 5 of 2601.19657, each with the paper's numbers, ours, and the command. Rendered by
`python -m dlm_lens.experiments.one_token.page` from the results in `experiments/one_token/results`;
`pytest tests/experiments/test_one_token_claims.py` recomputes the claims from them.

**Scale.** The paper trains 0.5B and 1.5B parameters on 30 and 100 billion tokens and reports benchmark accuracies,
one run each. Here are networks of 0.8 million parameters, a synthetic language of 118 tokens, some hundred
optimiser steps, several paired seeds, and validation losses; the figures use the embedded models (10,000 steps, one
seed). Nothing here confirms or refutes a number of the paper: it shows whether the same comparison has the same
sign in a miniature, and that the code which makes it works. No network of the paper's size has been trained here.

**Pairs.** Runs with one seed begin with the same weights, as far as they share them, and see the same batches and
masks. Intervals of losses and their differences are Student's t over seeds. Verdicts follow rules on the numbers: a
comparison agrees or disagrees when its whole interval lies on one side of zero; two networks are alike when the
whole interval lies within half of the sink token's own change (Table 4 has a one-sided rule, stated there);
otherwise it is undecided.

An earlier sweep in `experiments/toy` (five seeds, 500 steps of 64 sequences) went through another training loop,
with other masks and another order of the data, and has no validation loss: [toy.md](toy.md#five-paired-seeds) keeps
it, and it is not mixed with these results.
"""

TAIL = """## The paper's settings

Without `--small` a table trains the shipped configs of [training.md](training.md#the-papers-settings) and, for
Tables 3 to 5, those in `experiments/one_token/configs`, and then evaluates every cell as
[evaluation.md](evaluation.md) says. GSM8K is asked after the fine-tuning, when `--set sft=FILE` names its data.

```
dlm-lens experiment one-token-table2 --plan --device h100
dlm-lens experiment one-token-table2 --set 'overrides=["data.path=/data/slimpajama/*.jsonl"]'
```

The plan says what that costs (memory: of evaluation; `dlm-lens train CONFIG --dry-run` has that of training). On
several GPUs train with `accelerate launch ... -m dlm_lens.cli train` first; the experiment finds finished trainings
below `--set trained=DIR`. Untested for want of GPUs: everything at that size. The path itself is tested with a tiny
model (`pytest tests/experiments/test_one_token_real.py`).

Figures 1 and 3 take any `--model` and a JSONL file of prompts (`--set task=FILE`).
"""


def page() -> str:
    """The whole page, from results alone."""
    there = committed()
    return "\n".join([HEAD, summary(there), *(section(one, RESULTS / one.name) for one in there), TAIL])


def committed() -> list[Experiment]:
    """The experiments of this paper whose results are in the repository."""
    mine = (one for one in list_experiments() if one.name.startswith("one-token-"))
    return [one for one in mine if (RESULTS / one.name).is_dir()]


def summary(experiments: Sequence[Experiment]) -> str:
    """How many of the paper's statements agree, by figure and table."""
    kinds = get_args(Verdict)
    rows = []
    for experiment in experiments:
        findings = experiment.render(load_results(experiment, RESULTS / experiment.name)).findings
        counts = [str(sum(one.verdict == kind for one in findings)) for kind in kinds]
        rows.append([experiment.shows.split(", ")[1], *counts])
    return "## What agrees\n\n" + markdown(["", *kinds], rows) + "\n"


def section(experiment: Experiment, directory: Path) -> str:
    """One figure or table: heading, command, numbers, pictures."""
    results = load_results(experiment, directory)
    rendering = experiment.render(results)
    title = experiment.shows.split(", ")[1]
    pictures = [
        f"![{title}, {name}](../experiments/one_token/results/{experiment.name}/{experiment.name}-{name}.png)"
        for name in rendering.figures
    ]
    lines = [f"## {title}: {experiment.title}", f"```\n{command(experiment, results)}\n```"]
    return "\n\n".join([*lines, *describe(experiment, results, rendering), *pictures]) + "\n"


def command(experiment: Experiment, results: Results) -> str:
    """The command that made the results; what is set differs from `--small`."""
    small = experiment.config(True)["settings"]
    given = [f"--set {name}={value!r}" for name, value in results.settings.items() if small[name] != value]
    return " ".join(["dlm-lens experiment", experiment.name, "--small", *given])


def main() -> None:
    """Draw the figures anew and write the page."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for experiment in committed():
        render_experiment(experiment, RESULTS / experiment.name)
    PAGE.write_text(page(), encoding="utf-8")
    logging.info("%s", PAGE)


if __name__ == "__main__":
    main()
