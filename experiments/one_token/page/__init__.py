"""docs/results_one_token.md from the committed results: `python -m dlm_lens.experiments.one_token.page`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from dlm_lens.experiments.attention_sinks.twin_networks import networks_of
from dlm_lens.experiments.experiment import Experiment, list_experiments
from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.one_token import figure3, recorded_runs, tables
from dlm_lens.experiments.one_token.miniature import SCRATCH
from dlm_lens.experiments.one_token.page.abstract import abstract
from dlm_lens.experiments.one_token.text_corpus import LENGTH
from dlm_lens.experiments.one_token.toy_language import ROOT
from dlm_lens.experiments.pages.appendix import Entry, corrected, entries, entry, glance, on_correction, section
from dlm_lens.experiments.runner import render_experiment

RESULTS = Path(__file__).resolve().parents[1] / "results"

NAME = "one-token-"

ON_TEXT = "-text"
"""Ending of the directory of a table's results on real English, beside those on the synthetic language."""

PAGE = ROOT / "docs" / "results_one_token.md"

HEAD = """# Results: "One Token Is Enough"

Figures 1 and 3, Tables 1 to 5 and Eq. 17 to 22 of [2601.19657](https://arxiv.org/abs/2601.19657), each as the
claim, the picture, the number with its interval and null, the verdict and its rule, and the command. Figure 2 is a
drawing. `python -m dlm_lens.experiments.one_token.page` makes this page from `experiments/one_token/results`;
`pytest tests/experiments/test_one_token_claims.py` recomputes it from the stored lines. The other paper:
[results of "Attention Sinks in Diffusion Language Models"](results.md).
"""

SCALE = """**Scale.** The paper trains 0.5B and 1.5B parameters on 30 and 100 billion tokens and reports benchmark
accuracies, one run each. Here are networks of 0.8 million parameters on a synthetic language of 118 tokens, several
paired seeds, and validation losses. These results neither confirm nor refute a number of the paper: they show
whether the same comparison has the same sign in a miniature. No network of the paper's size has been trained here.
"""

PAIRS = """**Pairs.** Runs with one seed begin with the same weights, as far as they share them, and see the same
batches and masks. Intervals of differences are over seeds and held-out sequences together (over seeds alone in
results that hold no losses of groups of sequences); those of exact match are over prompts, which are the same for
every seed's network. All seeds of a conversion begin with the one AR model. A, L and F are the synthetic language's
arithmetic, list and look-up problems ([toy](toy.md)).
"""

TEXT = """## The English text

A secondary measurement of 20 November 2026, kept with its settings: short trainings, Tables 3 to 5 from scratch,
where the paper ablates the converted model. The rules above are applied to it as they are.

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
"""

TAIL = """## The paper's settings

Without `--small` a table trains the shipped configs of [the papers' settings](training.md#the-papers-settings)
and their variants, such as `qwen2.5-0.5b-end` in Table 3, and then evaluates every cell as
[evaluation](evaluation.md) says. GSM8K is evaluated after the fine-tuning, where `--set sft=FILE` names its
data.

```
dlm-lens experiment one-token-table2 --plan --device h100
dlm-lens experiment one-token-table2 --set 'overrides=["data.path=/data/slimpajama/*.jsonl"]'
```

The plan estimates the cost of the trainings, with the memory that `dlm-lens train CONFIG --dry-run` names for one
device. On several GPUs train with `accelerate launch ... -m dlm_lens.cli train` first; the experiment finds
finished trainings below `--set trained=DIR`. Nothing at that size has been tested, for lack of GPUs. The path
itself is tested with a tiny model (`pytest tests/experiments/test_one_token_real.py`).

Figures 1 and 3 and `one-token-noop` take any `--models` and a JSONL file of prompts (`--set task=FILE`). Without
`--small` they read `gsm8k.jsonl` in the current directory, also for `--plan`. It is not shipped: lines
`{"prompt": "..."}`, one per question of GSM8K's test set, as from `datasets`:

```
import json
from datasets import load_dataset

with open("gsm8k.jsonl", "w") as file:
    for row in load_dataset("openai/gsm8k", "main", split="test"):
        file.write(json.dumps({"prompt": row["question"]}) + "\\n")
```
"""


def rules() -> str:
    """The rules of the tables, as they were set."""
    return (
        "**Rules, set on 22 November 2026 before the networks of 1,500 steps were finished.** A comparison agrees "
        "or disagrees when its whole interval lies on one side of 0. Two networks are alike when the whole "
        f"interval lies within {tables.MARGIN} nats of 0, which is 1% of the perplexity of a masked token; "
        "conversions of 150 steps, known then, differed between seeds by 0.007 to 0.010 nats (standard deviation "
        "of a paired difference), so that five seeds can resolve such a margin and hardly a smaller one. All "
        "five planned seeds were trained, the last two on 23 November after the first three had been shown here, "
        "under the same rules; none was left out for its result. Where the "
        "interval of the sink token's own gain holds 0, nothing can be said relative to it: undecided. In Figure 3 "
        f'"substantially smaller" is a ratio below {figure3.MUCH} (Figure 1 prints 0.31 and 0.40), "a large share" '
        "more than any other key gets. Verdicts are corrected for their number below."
    )


def settings_line(found: Sequence[Entry]) -> str:
    """How the networks of the tables were trained, from the stored settings."""
    said: dict[str, list[str]] = {}
    for one in found:
        given = one.results.settings
        if "variants" in given and not given["configs"]:
            source = "from scratch" if given["start"] == SCRATCH else f"converted from {given['start']}"
            text = f"{source}, {given['steps']:,} steps of {given['batch_size']} sequences, {given['seeds']} seeds"
            said.setdefault(text, []).append(one.experiment.shows.split(", ")[1])
    lines = "; ".join(f"{', '.join(names)}: {text}" for text, names in said.items())
    real = sorted({model for one in found for model in one.results.models if model in recorded_runs.OWN})
    named = f" {', '.join(real)} is a real AR model, on English prompts." if real else ""
    return f"**Networks.** {lines}. The figures and the no-op bound name their networks.{twins_line(found)}{named}"


def twins_line(found: Sequence[Entry]) -> str:
    """How many networks of each embedded model there are, where there are several, and their training steps."""
    groups: dict[tuple[int, int], set[str]] = {}
    for one in found:
        for model in one.results.models if "twin_steps" in one.results.settings else ():
            given = settings_of(one.results.settings, model)
            count = 0 if model.startswith(recorded_runs.CONVERTED) else len(networks_of(model, given))
            if count > 1:
                groups.setdefault((count, given["twin_steps"]), set()).add(model)
    return "".join(
        f" Of {', '.join(sorted(models))} there are {count}: the shipped one of 10,000 steps, and twins of other "
        f"seeds with {steps:,} steps, trained in float32."
        for (count, steps), models in sorted(groups.items())
    )


def page() -> str:
    """The whole page, from results alone."""
    found, texts = committed(), on_text()
    after = corrected([*found, *texts])
    parts = [
        HEAD,
        *abstract(found, NAME),
        SCALE,
        settings_line(found),
        PAIRS,
        rules(),
        "## At a glance",
        glance(found),
    ]
    parts.append(on_correction([*found, *texts]))
    for one in found:
        parts += section(one, pictures(one), after)
    if texts:
        parts += [TEXT, english(texts), english_glance(texts)]
        for one in texts:
            _, *rest = section(one, pictures(one), after)
            parts += [f"### {one.experiment.name}, English text", *rest]
    return "\n\n".join(part.strip("\n") for part in [*parts, TAIL]) + "\n"


ORDER = ("figure1", "figure3", "noop", "table1", "table2", "table3", "table4", "table5")
"""Of the sections."""


def experiments() -> list[Experiment]:
    """The experiments of this paper, in the order of the page."""
    mine = {one.name.removeprefix(NAME): one for one in list_experiments() if one.name.startswith(NAME)}
    return [mine[name] for name in ORDER]


def committed() -> list[Entry]:
    """The results in the repository."""
    return entries(experiments(), RESULTS)


def on_text() -> list[Entry]:
    """The tables' results on real English."""
    tables_ = [one for one in experiments() if (RESULTS / f"{one.name}{ON_TEXT}").is_dir()]
    return [entry(replace(one, paper=()), RESULTS / f"{one.name}{ON_TEXT}") for one in tables_]


def pictures(one: Entry) -> dict[str, str]:
    """Path of every figure, relative to the page."""
    folder = f"../experiments/one_token/results/{one.directory.name}"
    return {name: f"{folder}/{one.experiment.name}-{name}.png" for name in one.rendering.figures}


def english_glance(texts: Sequence[Entry]) -> str:
    """The verdicts on English text, counted."""
    table = glance(texts)
    for one in texts:
        name = one.experiment.name
        table = table.replace(f"[{name}](#{name})", f"[{name}](#{name}-english-text)")
    return table


def english(texts: Sequence[Entry]) -> str:
    """What came out on English text, from its numbers."""
    held = {one.experiment.name.removeprefix(NAME): one.results for one in texts}
    verdicts = [each.verdict for one in texts for each in one.rendering.findings]
    plain = list(tables.losses(held["table2"], "plain").values())
    scratch, converted_ = (tables.difference(held[name], "sink", "plain") for name in ("table2", "table1"))
    picked = {"found": ("plain", _found), "moved": ("plain", _moved), "share": ("sink", tables.share)}
    found, moved, share = (
        {name: mean(tables.number(held[name], variant, pick)) for name in ("table1", "table2")}
        for variant, pick in picked.values()
    )
    most = max(abs(converted_.low), abs(converted_.high))
    return (
        f"**What came out.** Of {len(verdicts)} verdicts {verdicts.count('undecided')} are undecided, "
        f"{verdicts.count('agrees')} agree and {verdicts.count('disagrees')} disagree. From scratch the plain "
        f"networks' {len(plain)} seeds span {max(plain) - min(plain):.2f} nats, and a sink token's effect below "
        f"{scratch.high - scratch.value:.3f} nats cannot be seen. In the conversions of Table 1 the sink token "
        f"neither helps nor harms by more than {most:.3f} nats. By Eq. 3 there are {found['table2']:.1f} sinks per "
        f"pattern in the plain networks from scratch and {found['table1']:.1f} in the converted ones; in "
        f"{100 * moved['table2']:.0f}% and {100 * moved['table1']:.0f}% of the maps the main sink differs between "
        f"the last canvas and the first, which is all masks. The learned token gets {100 * share['table2']:.1f}% "
        f"and {100 * share['table1']:.1f}% of the attention; an even share is {100 / (LENGTH + 1):.1f}%."
    )


def _found(value: Mapping[str, Any]) -> float:
    return float(value["found"])


def _moved(value: Mapping[str, Any]) -> float:
    return float(value["moved"])


def main() -> None:
    """Draw the figures anew and write the page."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for one in [*committed(), *on_text()]:
        render_experiment(one.experiment, one.directory)
    PAGE.write_text(page(), encoding="utf-8")
    logging.info("%s", PAGE)
