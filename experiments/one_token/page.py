"""docs/results_one_token.md from the committed results: `python -m dlm_lens.experiments.one_token.page`."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from dlm_lens.experiments.experiment import Experiment, Verdict, list_experiments
from dlm_lens.experiments.one_token.toy_language import ROOT
from dlm_lens.experiments.rendering import describe, load_results, markdown, render_experiment
from dlm_lens.experiments.results import Results

RESULTS = Path(__file__).parent / "results"

ON_TEXT = "-text"
"""Ending of the directory of a table's results on real English, beside those on the synthetic language."""

PAGE = ROOT / "docs" / "results_one_token.md"

HEAD = """# Results: "One Token Is Enough"

Figures 1 and 3 and Tables 1 to 5 of 2601.19657, each with the paper's numbers, ours, and the command. Rendered by
`python -m dlm_lens.experiments.one_token.page` from the results in `experiments/one_token/results`;
`pytest tests/experiments/test_one_token_claims.py` recomputes the claims from them.

**Scale.** The paper trains 0.5B and 1.5B parameters on 30 and 100 billion tokens and reports benchmark accuracies,
one run each. Here are networks of 0.8 million parameters, a synthetic language of 118 tokens, some hundred
optimiser steps, several paired seeds, and validation losses; Tables 1 to 5 also as a larger setting, with 2.2
million parameters on [real English](#the-english-text); the figures use the embedded models (10,000 steps, one
seed). These results neither confirm nor refute a number of the paper: they show whether the same comparison has the
same sign in a miniature, and that the code works. No network of the paper's size has been trained here.

**Pairs.** Runs with one seed begin with the same weights, as far as they share them, and see the same batches and
masks. Intervals of losses and their differences are Student's t over seeds; those of exact match are over prompts,
which are the same for every seed's network. A, L and F are the synthetic language's arithmetic, list and
look-up problems ([toy.md](toy.md)). Verdicts follow rules on the numbers: a comparison agrees or disagrees when its
whole interval lies on one side of zero; two networks are alike when the whole interval lies within half of the sink
token's own change (Table 4 has a one-sided rule, stated there); otherwise it is undecided. The rules were written
for the synthetic language and are the same for English, which came later.

On English everything is undecided: 500 steps leave the networks from scratch near the frequencies of the tokens
(5.7 nats). One seed at 1,500 steps, not in the tables, came to 4.31 nats plain, 4.54 with a sink token and 4.32
with the gate.

An earlier sweep in `experiments/toy` (five seeds, 500 steps of 64 sequences) went through another training loop,
with other masks and another order of the data, and has no validation loss: it is in
[toy.md](toy.md#five-paired-seeds) and not part of these results.
"""

TEXT = """## The English text

The King James Version of 1611, from Debian's package `bible-kjv` (the text is in `bible-kjv-text`): 1,189 chapters,
31,102 verses, 4.1 MB. The package's copyright file says that the text's copyright has expired; the program that
prints it is GPL-2+ (in the United Kingdom printing the text is a privilege of the Crown). Neither text nor
tokenizer is in this repository: the code calls the installed program.

```
apt-get install bible-kjv
dlm-lens experiment one-token-table2 --small --set text=kjv --plan
```

Any other text works as well: a `.txt` file or a folder of them in UTF-8, whose documents end at empty lines.

```
dlm-lens experiment one-token-table2 --small --set text=books/ --set steps=500
```

- **Parts.** The chapters in their order are cut into 40 stretches of about equal bytes; the 6th, 16th, 26th and
  36th are held out: 1,093 chapters (3.7 MB) for training, 96 (0.41 MB) for validation, none in both. 1.3% of the
  held-out verses are in the training part too, word for word: the text repeats itself.
- **Tokens.** A byte-level BPE of 1,024 tokens, learned from the training part; 3.07 bytes a token on the
  held-out part. Chapters end with `<eos>` and have no first token, because a constant first token without
  content could become a sink. Rows are 64 tokens long: 19,091 for training, so that 500 steps of 16 see 42% of
  them.
- **Networks.** Qwen2's layers, 4 of width 192 with 4 heads; Muon. The learning rate (6e-3) and the length of a row
  were chosen by training losses of plain networks with seed 100, before any variant was trained.
- **One AR model.** Table 1 converts one AR model of the same text, which all seeds share: the paper converts one
  published checkpoint too, and one per seed would cost twice as much as the three conversions that begin with it.
  So the intervals of Table 1 cover the order of the data, the masks and the new weights, and not the AR model.
- **Validation loss** in nats per token, a bound on the likelihood (Eq. 3 and 4), of 256 held-out rows under 4 masks
  each, the same for all networks; per byte it does not depend on the tokenizer. Token frequencies alone give 5.713
  nats per token (1.854 per byte) on these rows: the loss of a network that has learned nothing else.
- **Sinks** are measured on 16 held-out rows, each as 16 canvases with 64, 60, ..., 4 masks, with the text
  itself at the other positions: a network of this size would generate the same few words again and again, whose
  sinks are of little interest.
- **Exact match** has no meaning here and is left out.
- **Cost.** The budget, set before the start: 29 to 47 minutes of one core for 30 networks of 500 steps, 15 of 250
  and one AR model of 1,500. The machine was busy with other work, so Table 1 was cut to 150 steps (AR: 900) before
  any of it was trained, and the ablations went in a second process: 70 minutes of training, 49 to 204 s per network
  of 500 steps, which takes 49 s on a core of its own.

**What came out.** From scratch every comparison with the paper (Tables 2 to 5) is undecided: the plain
networks' five seeds span 0.25 nats, more than any two variants differ in the mean. By the training logs (not
kept here) a plain network passes 5.6 nats, just below the token frequencies, between steps 200 and 350,
depending on the seed, and the later loss depends on that. With five seeds a sink token's effect below 0.158
nats cannot be seen, and Tables 3 to 5 have three. The conversions of Table 1 vary far less, and there the sink
token neither helps nor harms by more than 0.011 nats. By Eq. 3 there are sinks on this text, unlike on the
synthetic language: 1.2 per pattern in the plain networks from scratch and 1.6 in the converted ones, and in 98%
and 99% of the maps the main sink differs between the last canvas and the first, which is all masks: sinks move,
as the paper says. Unlike in the paper (Figure 1), the values of these sinks are longer than the others', and
the learned token gets 0.6 to 0.8% of the attention, less than an even share: these networks do not use it.
(With its value forced to zero, Table 5, it gets 3.2%.)

These results can show whether a variant learns faster or slower than the plain network in the first steps, on
natural text, and whether it has sinks there. They cannot show the converged networks (the paper's saw 100,000
times the tokens and more), or benchmark accuracies.
"""

TAIL = """## The paper's settings

Without `--small` a table trains the shipped configs of [training.md](training.md#the-papers-settings) and, for
Tables 3 to 5, those in `experiments/one_token/configs`, and then evaluates every cell as
[evaluation.md](evaluation.md) says. GSM8K is evaluated after the fine-tuning, where `--set sft=FILE` names its
data.

```
dlm-lens experiment one-token-table2 --plan --device h100
dlm-lens experiment one-token-table2 --set 'overrides=["data.path=/data/slimpajama/*.jsonl"]'
```

The plan estimates the cost (with the memory of evaluation; `dlm-lens train CONFIG --dry-run` has that of
training). On several GPUs train with `accelerate launch ... -m dlm_lens.cli train` first; the experiment finds
finished trainings below `--set trained=DIR`. Nothing at that size has been tested, for lack of GPUs. The path
itself is tested with a tiny model (`pytest tests/experiments/test_one_token_real.py`).

Figures 1 and 3 take any `--models` and a JSONL file of prompts (`--set task=FILE`).
"""


def page() -> str:
    """The whole page, from results alone."""
    there = committed()
    return "\n".join([HEAD, summary(there), *(section(one, RESULTS / one.name) for one in there), TEXT, TAIL])


def committed() -> list[Experiment]:
    """The experiments of this paper whose results are in the repository."""
    mine = (one for one in list_experiments() if one.name.startswith("one-token-"))
    return [one for one in mine if (RESULTS / one.name).is_dir()]


def directories(experiment: Experiment) -> Iterator[tuple[str, Path]]:
    """The suffix of a figure's or table's heading, and the directory of its results."""
    for ending, said in (("", ""), (ON_TEXT, ", English text")):
        directory = RESULTS / (experiment.name + ending)
        if directory.is_dir():
            yield said, directory


def summary(experiments: Sequence[Experiment]) -> str:
    """How many of the paper's statements agree, by figure and table."""
    kinds = get_args(Verdict)
    rows = []
    for experiment in experiments:
        for said, directory in directories(experiment):
            findings = experiment.render(load_results(experiment, directory)).findings
            counts = [str(sum(one.verdict == kind for one in findings)) for kind in kinds]
            rows.append([experiment.shows.split(", ")[1] + said, *counts])
    return "## What agrees\n\n" + markdown(["", *kinds], rows) + "\n"


def section(experiment: Experiment, directory: Path) -> str:
    """One figure or table: heading, command, numbers, pictures; then the same on real English."""
    lines = list(part(experiment, directory))
    for said, other in directories(experiment):
        if said:
            lines += ["### On English text", *part(replace(experiment, paper=()), other)]
    title = experiment.shows.split(", ")[1]
    return "\n\n".join([f"## {title}: {experiment.title}", *lines]) + "\n"


def part(experiment: Experiment, directory: Path) -> Iterator[str]:
    """Command, numbers and pictures of the results in a directory."""
    results = load_results(experiment, directory)
    rendering = experiment.render(results)
    title = experiment.shows.split(", ")[1]
    pictures = [
        f"![{title}, {name}](../experiments/one_token/results/{directory.name}/{experiment.name}-{name}.png)"
        for name in rendering.figures
    ]
    yield f"```\n{command(experiment, results)}\n```"
    yield from describe(experiment, results, rendering)
    yield from pictures


def command(experiment: Experiment, results: Results) -> str:
    """The command that computes the results: `--small` with the settings that differ from it."""
    small = experiment.config(True)["settings"]
    given = [f"--set {name}={value!r}" for name, value in results.settings.items() if small[name] != value]
    return " ".join(["dlm-lens experiment", experiment.name, "--small", *given])


def main() -> None:
    """Draw the figures anew and write the page."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for experiment in committed():
        for _, directory in directories(experiment):
            render_experiment(experiment, directory)
    PAGE.write_text(page(), encoding="utf-8")
    logging.info("%s", PAGE)


if __name__ == "__main__":
    main()
