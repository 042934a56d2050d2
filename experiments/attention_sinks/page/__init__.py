"""docs/results.md, from the results in this folder: `python -m dlm_lens.experiments.attention_sinks.page`.

Tables, intervals and verdicts are computed from the stored results; no model runs. Writing needs the repository.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from dlm_lens.experiments.attention_sinks import (
    beyond_future,
    fig4_moving,
    hook_conditions,
    instruct_tables,
    masking_findings,
    table1,
)
from dlm_lens.experiments.attention_sinks.beyond_blocks import CAUSAL
from dlm_lens.experiments.attention_sinks.beyond_confidence import KINDS, flips, spared
from dlm_lens.experiments.attention_sinks.map_shares import models_with, part, share
from dlm_lens.experiments.attention_sinks.masking_conditions import BASE, READINGS
from dlm_lens.experiments.attention_sinks.page.abstract import abstract
from dlm_lens.experiments.attention_sinks.prompt_scores import answers, changes
from dlm_lens.experiments.attention_sinks.recorded_runs import per_prompt
from dlm_lens.experiments.experiment import Experiment, list_experiments
from dlm_lens.experiments.intervals import signed
from dlm_lens.experiments.pages.appendix import (
    Entry,
    corrected,
    entries,
    glance,
    on_correction,
    pictures,
    section,
)
from dlm_lens.experiments.results import Results
from dlm_lens.experiments.verdicts import is_below

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "results.md"

INTRODUCTION = """# Results: attention sinks in diffusion language models

Every figure and table of [2510.15731](https://arxiv.org/abs/2510.15731), measured on the embedded models (4 layers
of 4 heads, canvases of about 55 positions, the shipped word problems), on a real AR model of 135 million parameters
(`smollm2`, English prompts: [its own page](results_smollm2.md)), on its conversion, and on a block-diffusion twin
of toy. Figure 2 is a drawing. The other paper: [results of "One Token Is Enough"](results_one_token.md).
"""

RULES = """## How to read it

Each section has the picture in the paper's form, and a table: the paper's statement, the number measured here with
its 95% interval, the number without the effect (the null), and the verdict with its rule. The rules and bounds were
set before the numbers, with two exceptions: the bounds of Figure 8 (0.25 and 0.8) are those of the earlier edition,
put back after "above a random key" had called a ratio of 1.00 an agreement; and the interval of Figure 4 where no
pattern moves is Wilson's on patterns with a design effect, since one case per prompt gave [0, 0.11] for 0 of 8,640.
"undecided": the interval allows both. "no counterpart": nothing can be compared. The twins of toy-gated, and
those of toy-ar except in Table 1, were trained in float32, all other twins with bfloat16 products: toy-ar's were
trained again for the figures, whose AR rows had included the steps after their text ended. In Table 1 these steps
still enter the eps that toy-ar's rows with Eq. 3 mask by, and what its masks hide per map.

`python -m dlm_lens.experiments.attention_sinks.page` makes this page from `experiments/attention_sinks/results`;
`pytest tests/experiments/test_attention_sinks_page.py` checks that it is up to date.
"""

RUNNING = """## Running it

```bash
dlm-lens experiment list
dlm-lens experiment table1-masking --small                       # about a minute on a quiet core
python experiments/attention_sinks/table1.py --small             # the same: every experiment's file is a script
dlm-lens experiment beyond-instruct --small                      # two and a half, with training two models
dlm-lens experiment table1-masking --plan --device h100          # forward passes, time, memory; computes nothing
dlm-lens experiment table1-masking --models GSAI-ML/LLaDA-8B-Instruct --dtype bfloat16 --out runs/table1
dlm-lens experiment beyond-instruct --models GSAI-ML/LLaDA-8B-Base,GSAI-ML/LLaDA-8B-Instruct --out runs/pair
torchrun --nproc-per-node 4 --no-python dlm-lens experiment fig7-paths --out runs/fig7   # splits the items
dlm-lens experiment fig7-paths --render --out runs/fig7          # tables and figures of the stored results
```

Every item (a model, a condition, some prompts) is on disk before the next begins. The same command resumes a killed
run; a command with other settings is refused. `--set name=value` replaces a setting, as in `--set prompts=64`;
`--set task=FILE.jsonl` uses your own prompts (lines with `prompt`, and for exact match `target`), and
`--set task=humaneval --set prompts=164 --set confirm_run_unsafe_code=true` Table 1's other task.
"""


def make_page(results: Path = RESULTS) -> tuple[str, list[Entry]]:
    """The page and its entries, in the order of the paper.

    Raises:
        FileNotFoundError: no experiment has results.
    """
    here = [one for one in list_experiments() if "2510.15731" in one.shows]
    found = entries(sorted(here, key=_order), results)
    held, after = {one.experiment.name: one.results for one in found}, corrected(found)
    parts = [INTRODUCTION + "\n## Abstract", *abstract(held), "## At a glance", *summary(held), glance(found),
             on_correction(found), RULES.rstrip(), RUNNING.rstrip()]  # fmt: skip
    for one in found:
        parts += section(one, pictures(one), after)
    return "\n\n".join(parts) + "\n", found


def _order(experiment: Experiment) -> tuple[int, int]:
    """Figures by number, then Table 1, then what the paper does not measure."""
    kind = next(place for place, name in enumerate(("fig", "table", "")) if experiment.name.startswith(name))
    number = re.search(r"\d+", experiment.name)
    return kind, int(number[0]) if number else 0


BLOCKS = "beyond-blocks"
UNDECIDED = ": undecided over its networks"

SUMMARISED = {
    "table1-masking",
    "beyond-confidence",
    "beyond-context",
    "beyond-future",
    "beyond-instruct",
    "fig4-moving",
}


def summary(held: Mapping[str, Results]) -> Iterator[str]:
    """The main results with their numbers; tests check the directions."""
    if set(held) >= SUMMARISED:
        parts = (
            _masked(held["table1-masking"]),
            _mechanism(held),
            _elsewhere(held),
            _tuned(held["beyond-instruct"]),
            *([_blocks(held[BLOCKS])] if BLOCKS in held else []),
        )
        yield "\n".join(parts)


def change_by_network(results: Results, model: str, columns: int, **changed: Any) -> list[float]:
    """The mean of `change` against the unmasked model in each network."""
    given = {"model": model, **BASE, **changed}
    found = changes(answers(results, columns=columns, **given), answers(results, columns=0, model=model, **BASE))
    return [mean(by_prompt.values()) for _, by_prompt in sorted(found.items())]


def _masked(found: Results) -> str:
    change = masking_findings.change
    one, layer = (change(found, "toy", 1, **reading) for reading in READINGS[:2])
    theirs, theirs_layer = (change(found, "toy-ar", 1, **reading) for reading in READINGS[:2])
    sinks, counted, weighed = (change(found, "toy", 5, choose=name) for name in ("top", "random", "mass"))
    baseline, baseline_weighed = (change(found, "toy-ar", 5, choose=name) for name in ("top", "mass"))
    more = change(found, "toy", 5, against={"columns": 5, "choose": "mass"})
    decided = is_below(more, 0.0).verdict == "agrees"
    learned = table1.mean(found, "learned", "toy-sink", {"columns": 1, **BASE})
    function, content = (change(found, "toy", 1, classes=name) for name in ("function", "content"))
    more_content = change(found, "toy", 1, classes="content", against={"columns": 1, "classes": "function"})
    by_content = is_below(more_content, 0.0).verdict == "agrees"
    theirs_function, robust = change(found, "toy-sink", 1, classes="function"), change(found, "toy-sink", 1)
    each = ", ".join(f"{lost:.2f}" for lost in change_by_network(found, "toy-sink", 1))
    return (
        f"- **The cost of one sink depends on its definition.** Hidden per head, toy loses {-one.value:.2f} of "
        f"its exact match and toy-ar {-theirs.value:.2f}; one per layer {-layer.value:.2f} and "
        f"{-theirs_layer.value:.2f}. The paper does not say which it uses.\n"
        f"- **In toy the cost is that of content{'' if by_content else UNDECIDED}.** Its "
        "strongest columns are often the digits and words that the problem needs: hidden only where they are "
        f"punctuation, special or mask tokens they cost {function}, only where they are digits or words {content} "
        f"(difference {more_content}). In toy-sink function tokens cost {theirs_function}.\n"
        f"- **In the DLM hiding sinks costs more than hiding as much attention elsewhere"
        f"{'' if decided else UNDECIDED}.** Five sinks per head change toy by {sinks}, five "
        f"random columns by {counted}, and random columns that receive as much as five sinks by {weighed} "
        f"(difference {more}). In toy-ar: {baseline} for five sinks, {baseline_weighed} for random columns that "
        "receive as much.\n"
        "- **A learned sink token does not make the DLM robust here"
        f"{'' if is_below(robust, masking_findings.LOSS).verdict == 'agrees' else UNDECIDED}.** One sink per head "
        f"changes toy-sink by {robust} ({each} in its networks, which answer all with nothing hidden); the "
        "learned one, which can be hidden like any other, is that sink in "
        f"{learned:.2f} of the maps."
    )


def _mechanism(held: Mapping[str, Results]) -> str:
    return f"- **Section 5.2, at equal confidence.** {_confidence(held['beyond-confidence'], 'toy')}"


def _confidence(results: Results, model: str) -> str:
    """One paragraph on a DLM: flips with a sink hidden, beside flips at equal confidence and under the control."""
    everywhere = flips(results, model, "sinks", "flipped", "open")
    first, before = (
        flips(results, model, "sinks", top, "first") for top in ("first_flipped", "plain_first_flipped")
    )
    less, control = (spared(results, model, kind) for kind in (KINDS[0], KINDS[2]))
    return (
        f"With a sink hidden, {everywhere} of {model}'s predictions in the block flip, {first} of the surest ones, "
        "which are written next. Sure predictions flip less under any mask: against open positions that were as "
        f"sure without it the difference is {signed(less)}, with random columns of the same mass hidden "
        f"{signed(control)}. Where the model would have written without the mask, {before} flip."
    )


def _blocks(results: Results) -> str:
    """The main numbers of the first block-diffusion model, as a line of the page's summary."""
    where = (results, models_with(results, CAUSAL)[0], "block")
    alone, chance = (part(*where, *pair).value for pair in (("mask alone", "maps"), ("chance", "sinks")))
    moved, by_chance = (
        per_prompt(*where[:2], ["block"], lambda one, to=to: (one["largest"][to], one["largest"][0]), bounds=(0, 1))
        for to in (2, 3)
    )
    return (
        f"- **A block-diffusion model has sinks too, and the largest move with the block** ({where[1]}). Under the "
        f"queries of the block {share(*where)} of the maps have a sink ({alone:.2f} under uniform attention); "
        f"{part(*where, 'prefix', 'sinks')} of the sinks are in the cached prefix, where keys drawn without a "
        f"preference would be in {chance:.2f}. Of the largest sinks of a block "
        f"{moved} are in the next block one step after it is finished "
        f"({by_chance.value:.2f} by chance)."
    )


def _elsewhere(held: Mapping[str, Results]) -> str:
    future = beyond_future.share_on_masks(held["beyond-future"], "toy")
    lost, kept = (
        hook_conditions.difference(held["beyond-context"], "toy", f"window 8{more}", "unmasked")
        for more in ("", " and sinks")
    )
    return (
        f"- **Future sinks are rare here**: {future[0]:.2f} of toy's sinks are on masked positions, which are "
        f"{future[1]:.2f} of the keys.\n"
        f"- **Past context is not dispensable** for these problems: with a window of 8 toy changes by {lost}; with "
        f"the four strongest sinks kept by {kept}.\n{_moving(held['fig4-moving'])}"
    )


def _moving(found: Results) -> str:
    """The share of moving patterns in toy and in toy-ar; the headline follows from the differences' intervals."""
    scales = ("sums", "relative")
    shares = {
        scale: [fig4_moving.share(found, model, "moving", scale) for model in ("toy", "toy-ar")] for scale in scales
    }
    apart = {scale: fig4_moving.apart(found, "toy", "toy-ar", scale) for scale in scales}
    headlines = {
        0: "That moving sinks distinguish toy from the AR model is not shown here.",
        1: "Moving sinks distinguish toy from the AR model on one of the two scales.",
        2: "Moving sinks distinguish toy from the AR model, on both scales.",
    }
    other = {scale: fig4_moving.apart(found, "toy-sink", "toy-ar", scale) for scale in scales}
    names = {"sums": "column sums", "relative": "the relative scale"}
    undecided = " and on ".join(names[scale] for scale, each in other.items() if each.low <= 0 <= each.high)
    return (
        f"- **{headlines[sum(difference.low > 0 for difference in apart.values())]}** On column sums, which the "
        f"paper plots, {shares['sums'][0]} of toy's patterns move and {shares['sums'][1]} of toy-ar's, a "
        f"difference of {apart['sums']}. {fig4_moving.share(found, 'toy-ar', 'static', 'sums')} of toy-ar's "
        "patterns are static; the causal mask alone gives that (uniform attention: "
        f"{fig4_moving.uniform(found, 'toy-ar', 'sums')}). Relative to uniform attention "
        f"{shares['relative'][0]} of toy's patterns move and {shares['relative'][1]} of toy-ar's, a difference of "
        f"{apart['relative']}. Of toy-sink, a DLM with a learned sink token, the differences are "
        f"{other['sums']} and {other['relative']}{undecided and f', undecided on {undecided}'}."
    )


def _tuned(found: Results) -> str:
    """Sentences on the twins, the first and second pair of the small settings."""
    sft, more = instruct_tables.pairs_of(found)[:2]
    same, same_more = (instruct_tables.jaccard(found, pair, "same") for pair in (sft, more))
    chance = instruct_tables.jaccard(found, sft, "other head")
    cost = instruct_tables.apart(found, sft, {"columns": 1, **BASE})
    return (
        "- **Further training moves a part of the sinks** (twins of toy, no instruct models). Of the positions "
        f"that are sinks before or after fine-tuning {same} are both, on the same canvases; {same_more} after as "
        f"many steps of the old objective; {chance} between neighbouring heads. What one hidden sink per head "
        f"changes differs by {cost} between toy and the fine-tuned twin."
    )
