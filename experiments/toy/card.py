"""Model cards of the embedded checkpoints, written from measured numbers (`results/*.json`) alone."""

from collections.abc import Mapping
from typing import Any

from experiments.toy import claims, sink_tables
from experiments.toy.corpus import CORPUS_SEED, TEST_SEED
from experiments.toy.language import COLOURS
from experiments.toy.model import VARIANTS
from experiments.toy.statistics import interval, markdown_table

Result = Mapping[str, Any]

TASKS = {
    "A": "A, word problems of 1 to 4 steps with a chain of thought",
    "L": "L, sort, reverse or copy 4 to 7 digits",
    "F": "F, look up one of three animals",
}
DESCRIPTIONS = {
    "toy": "A masked diffusion language model: Qwen2 layers with bidirectional attention, from scratch.",
    "toy-sink": "`toy` with one learned sink token before the canvas.",
    "toy-gated": "`toy` with gated attention.",
    "toy-ar": "The autoregressive baseline of `toy`: the same layers with causal attention, data and budget.",
}
LABELS = {
    "toy": "DLM, Muon (`toy`)",
    "toy-adamw": "DLM, AdamW (twin, not shipped)",
    "toy-sink": "DLM + sink token, Muon (`toy-sink`)",
    "toy-gated": "DLM, gated, Muon (`toy-gated`)",
    "toy-ar": "AR, Muon (`toy-ar`)",
}
OPTIMIZERS = {"muon": "Muon on the 2-D layer weights, AdamW on the rest", "adamw": "AdamW"}
# Three facts with values drawn independently: a right one is named by chance or because two values are equal.
CHANCE_ON_LOOKUPS = 1 / 3 + 2 / 3 / len(COLOURS)
HEADER = """---
library_name: dlm_lens
license: apache-2.0
language: en
---
"""


def write_card(name: str, results: Mapping[str, Result]) -> str:
    """The README.md of a shipped checkpoint; `results` holds every measured run by its name."""
    result = results[name]
    compared = {label: results[key] for key, label in LABELS.items() if key in results}
    sections = [
        HEADER + f"# {name}\n\n{DESCRIPTIONS[name]} {_size(result)} It is a specimen for tools and tests, small "
        "enough to ship with `dlm_lens`, and speaks one synthetic language; it is no model of English.",
        _usage(name),
        "## Accuracy\n\n" + _accuracy(result),
        "## Training\n\n" + _training(name, result, results),
        "## Attention sinks\n\n" + sink_tables.all_models(compared),
        *sink_tables.learned(result),
        "## Which phenomena of the two papers show here\n\n" + claims.table(compared, LABELS),
        "Numbers and card: `python -m experiments.toy.release`. Every number above is one training run.",
    ]
    return "\n\n".join(sections) + "\n"


def _size(result: Result) -> str:
    return f"{result['parameters']:,} parameters, {result['weights_bytes'] / 1e6:.2f} MB in float16."


def _usage(name: str) -> str:
    return (
        "```python\nimport dlm_lens\n\n"
        f'model = dlm_lens.load("{name}")\n'
        'run = dlm_lens.denoise(model, "tom has 5 apples . tom buys 4 more . how many apples ? :")\n'
        "run.answers\n```\n\n"
        "Prompts are words with numbers from 0 to 30 and end with a colon; unknown words become `<unk>`. "
        "Prompt and answer together have 64 positions."
    )


def _accuracy(result: Result) -> str:
    rows = [
        [TASKS[entry["task"]], entry["decoding"], interval(entry["correct"], 3), str(entry["correct"]["n"])]
        for entry in result["accuracy"]
    ]
    removed = ", ".join(
        f"{task} {test['seen_in_training']} (and {test['repeated']} repeated)"
        for task, test in result["tests"].items()
    )
    failures = [
        f"- `{prompt}` gave `{answer}`, expected {target}"
        for entry in result["accuracy"]
        for prompt, answer, target in entry["failures"][:1]
    ]
    text = (
        f"Exact match of the final answer, greedy, with 95% Wilson intervals.\n\n"
        f"{markdown_table(['task', 'decoding', 'exact match', 'n'], rows)}\n\n"
        f"Test prompts come from seeds of their own (seed {TEST_SEED}, training {CORPUS_SEED}); candidates "
        f"removed because their prompt string occurs in the training text: {removed}. Naming one of three "
        f"values at random would score {CHANCE_ON_LOOKUPS:.3f} on F{_lookup_verdict(result)}."
    )
    return text + ("\n\nWhat a mistake looks like:\n\n" + "\n".join(dict.fromkeys(failures)) if failures else "")


def _lookup_verdict(result: Result) -> str:
    scores = [entry["correct"] for entry in result["accuracy"] if entry["task"] == "F"]
    guessing = all(score["low"] <= CHANCE_ON_LOOKUPS for score in scores)
    return ": this model has not learned to look up and guesses among the three" if guessing else ""


def _training(name: str, result: Result, results: Mapping[str, Result]) -> str:
    settings, progress = result["training"]["settings"], result["training"]["progress"]
    curve = progress["loss_curve"]
    points = [curve[round(share * (len(curve) - 1))] for share in (0, 0.05, 0.1, 0.25, 0.5, 0.75, 1)]
    objective = (
        "next-token cross entropy" if VARIANTS[name].causal else "masked cross entropy divided by the masking ratio"
    )
    machine = result["training"]["machine"]
    plain = results.get("toy", {}).get("training", {}).get("progress", {}).get("loss_curve")
    lines = [["loss", *(f"{v:.3f}" for _, v in points)]]
    if name in ("toy-sink", "toy-gated") and plain:
        at = dict(plain)
        lines.append(["loss of `toy`, same seed", *(f"{at[step]:.3f}" for step, _ in points)])
    return (
        f"{OPTIMIZERS[settings['optimizer']]}, seed {settings['seed']}, "
        f"{settings['steps']:,} steps of {settings['batch_size']} sequences of 64 tokens, drawn from "
        f"{settings['corpus_size']:,} sequences; {objective}, nats per token, `<eos>` tail included. "
        f"{progress['seconds'] / 60:.0f} minutes on {machine['threads']} thread of a shared CPU "
        f"({'compiled' if machine['compiled'] else 'not compiled'}, torch {machine['torch']}).\n\n"
        + markdown_table(["step", *(f"{step:,}" for step, _ in points)], lines)
        + "\n\n(means of 50 steps)"
        + _seeds(name, results)
    )


def _seeds(name: str, results: Mapping[str, Result]) -> str:
    """All measured runs of this variant and optimiser, because the shipped one is the best of them."""
    chosen = results[name]["training"]["settings"]
    alike = {
        run: r
        for run, r in results.items()
        if r["training"]["settings"]["model"] == chosen["model"]
        and r["training"]["settings"]["optimizer"] == chosen["optimizer"]
    }
    if len(alike) == 1:
        return "\n\nOne seed was trained to the end."
    rows = []
    for run, r in alike.items():
        cells = [f"{e['task']} {e['decoding']}: {e['correct']['value']:.3f}" for e in r["accuracy"]]
        steps, seed = r["training"]["settings"]["steps"], r["training"]["settings"]["seed"]
        rows.append([f"{seed}{' (shipped)' if run == name else ''}", f"{steps:,}", "; ".join(cells)])
    return (
        "\n\nThe shipped run is the best of those below, chosen by these very test prompts, so its accuracy "
        "is slightly flattered.\n\n" + markdown_table(["seed", "steps", "exact match"], rows)
    )
