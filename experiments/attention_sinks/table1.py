"""Table 1: exact match with the strongest sinks hidden, for every reading of "top 1, 5 and 10"."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlm_lens.experiments.attention_sinks.masking_conditions import CONTROLS, VARIANTS, condition_cells, conditions
from dlm_lens.experiments.attention_sinks.masking_findings import accuracy, findings, has
from dlm_lens.experiments.attention_sinks.problems import SHIPPED, chat, is_right, problems, problems_of, starts
from dlm_lens.experiments.attention_sinks.prompt_scores import correct_by_prompt, difference, exact_match
from dlm_lens.experiments.experiment import Cost, Experiment, Rendering, Table, run_script
from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.results import Item, Results, Settings


def items(settings: Settings) -> Iterator[Item]:
    """Items per model, condition and seed, with the same prompts for every condition."""
    first = (
        range(0, settings["prompts"], settings["batch"]) if settings["task"] not in SHIPPED else starts(settings)
    )
    for model in settings["models"]:
        for condition in conditions(settings):
            for seed in settings["seeds"]:
                for start in first:
                    yield {"model": model, **condition, "seed": seed, "start": start}


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Whether each problem is answered correctly; per map, hidden columns, their attention, learned sinks."""
    from dlm_lens.experiments.attention_sinks.hidden_mass import HiddenMass

    model, mask = bench.model(item["model"]), mask_of(item, settings, bench)
    measured = None if mask is None else HiddenMass(mask)
    if settings["task"] in SHIPPED:
        correct = _answered(model, measured, item, settings)
    else:
        from dlm_lens.experiments.attention_sinks.harness_tasks import correct_documents

        correct = correct_documents(model, measured, item, settings)
    nothing = {"hidden": 0.0, "mass": 0.0, "learned": 0.0}
    return {"correct": correct, "hook": repr(mask), **(nothing if measured is None else measured.totals())}


def mask_of(item: Item, settings: Settings, bench: Any) -> Any:
    """The condition's hook; None for the unmasked model."""
    from dlm_lens.hooks import mask_random, mask_sinks
    from dlm_lens.sinks import AboveMean, TopK

    if not item["columns"]:
        return None
    rest = {
        "per": item["per"],
        "source": item["source"],
        "stage": item["stage"],
        "relative": item["scale"] != "raw",
    }
    if item["choose"] == "eps":
        eps = bench.once(
            ("eps", item["columns"]), lambda: eps_for(bench.model(item["model"]), item["columns"], settings)
        )
        return mask_sinks(AboveMean(eps), **rest)
    mask = mask_sinks(TopK(item["columns"]), **rest)
    if item["choose"] in CONTROLS:
        match: Any = "mass" if item["choose"] == "mass" else "columns"
        return mask_random(like=mask, seed=item["seed"], match=match)
    return mask


def eps_for(model: Any, columns: float, settings: Settings) -> float:
    """The eps of Eq. 3 with `columns` sinks per map on average, in unmasked runs of the first prompts.

    For a task of the harness the prompts are those of the shipped toy_arithmetic.
    """
    import dlm_lens as dl
    from dlm_lens.sinks import AboveMean

    prompts = chat(model, _calibration(settings), settings)
    received = dl.received_of(dl.record(model, prompts, **settings["sampler"]))
    scores = received.values.float()
    defined = ~scores.isnan()
    excess = (scores - AboveMean(0.0).thresholds(scores))[defined]
    maps = int(defined.any(-1).sum())
    rank = min(len(excess) - 1, max(0, round(columns * maps)))
    # The first `rank` of the sorted excesses lie strictly above eps.
    return round(float(excess.sort(descending=True).values[rank]), 4)


def _calibration(settings: Settings) -> Sequence[Any]:
    task = settings["task"] if settings["task"] in SHIPPED else "toy_arithmetic"
    return problems(task)[: settings["calibration"]]


def _answered(model: Any, mask: Any, item: Item, settings: Settings) -> list[bool]:
    import dlm_lens as dl

    these = problems_of(settings, item["start"])
    hooks = [] if mask is None else [mask]
    prompts = chat(model, these, settings)
    done = dl.denoise(model, prompts, hooks=hooks, seed=item["seed"], **settings["sampler"])
    task = settings["task"]
    return [is_right(task, text, problem) for text, problem in zip(done.answers, these, strict=True)]


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step; two for clean statistics. GSM8K's answers have 256 tokens, HumanEval's 512."""
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    answer = 32 if settings["task"] in SHIPPED else 512 if "human" in settings["task"] else 256
    prompt = 32 if settings["task"] in SHIPPED else 900
    steps = int(settings["sampler"].get("steps", answer))
    return [Cost(steps * (2 if item["source"] == "clean" else 1), rows, prompt + answer, item["model"])]


def render(results: Results) -> Rendering:
    """Exact match of every condition, its difference to the unmasked model, and the paper's claims."""
    own = {model: settings_of(results.settings, model) for model in results.models}
    tasks = ", ".join(dict.fromkeys(one["task"] for one in own.values()))
    title = f"exact match of {tasks}, 95% intervals (Wilson; differences paired by prompt)"
    rows = [row for model in results.models for row in rows_of(results, model, conditions(own[model]))]
    notes = list(_notes(results))
    return Rendering([Table(title, HEAD, rows)], {"accuracy": _figure(results)}, list(findings(results)), notes)


HEAD = ["model", "columns", "reading", "hidden per map", "attention on them", "exact match", "minus unmasked", "n"]


def rows_of(results: Results, model: str, found: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """One row per condition that has results."""
    plain = correct_by_prompt(results, model=model, columns=0)
    for condition in found:
        correct = correct_by_prompt(results, model=model, **condition)
        if correct:
            lost = str(difference(correct, plain)) if condition["columns"] else "-"
            totals = _totals(results, model, condition)
            yield [model, *condition_cells(condition), *totals, str(exact_match(correct)), lost, str(len(correct))]


def _totals(results: Results, model: str, condition: Mapping[str, Any]) -> tuple[str, str]:
    """Columns hidden per map, learned sink tokens among them, and their share of the attention."""
    hidden, mass, learned = (mean(results, name, model, condition) for name in ("hidden", "mass", "learned"))
    return f"{hidden:.2f}" + (f" ({learned:.2f} learned)" if learned else ""), f"{mass:.3f}"


def mean(results: Results, name: str, model: str, condition: Mapping[str, Any]) -> float:
    """One of the totals of `HiddenMass`, averaged over the prompts of a condition."""
    records = results.where(model=model, **condition)
    found = [(record.value[name], len(record.value["correct"])) for record in records]
    return float(sum(value * count for value, count in found) / sum(count for _, count in found))


def _notes(results: Results) -> Iterator[str]:
    yield (
        "Attention on them: share of the attention of a map (one head of one layer at one step) that the hidden "
        "columns receive before they are hidden, in the runs of the condition itself. The control of the same "
        'mass takes random columns, never the sinks, until they receive as much (`mask_random(match="mass")`). It '
        "has to hide more of them, and where all other columns together receive less, it hides less. Its columns "
        "differ between heads, so that other heads still see a column that one head lost; the sinks of two heads "
        "may coincide."
    )
    learned = [
        model for model in results.models if any(record.value["learned"] for record in results.where(model=model))
    ]
    for model in learned:
        yield (
            f"The learned sink token of {model} can be hidden like any other key, and is hidden where it is among "
            'the strongest ("learned" in the table); its own query still sees it. Controls never choose it.'
        )


def _figure(results: Results) -> Any:
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    curves, styles = {}, {}
    for colour, model in enumerate(results.models):
        for line, (choose, name) in enumerate({"top": "strongest columns", **CONTROLS}.items()):
            points = [
                (k, accuracy(results, model, k, **({"choose": choose} if k else {})))
                for k in (0, *results.settings["columns"])
                if has(results, model, k, **({"choose": choose} if k else {}))
            ]
            if len(points) > 1:
                curves[f"{model}, {name}"], styles[f"{model}, {name}"] = points, (colour, line)
    return line_chart(curves, x="sinks hidden per head, or matched", y="exact match", styles=styles)


PAPER = (
    Table(
        "Table 1 (standard errors as printed)",
        ["task", "masked", "Dream-7B", "LLaDA-8B", "MMaDA-8B", "Llama-3.1-8B"],
        [
            ["GSM8K", "0", "0.82 ± 0.01", "0.76 ± 0.01", "0.54 ± 0.01", "0.85 ± 0.01"],
            ["GSM8K", "top 1", "0.79 ± 0.01", "0.75 ± 0.01", "0.53 ± 0.01", "0.02 ± 0.00"],
            ["GSM8K", "top 5", "0.78 ± 0.01", "0.73 ± 0.01", "0.54 ± 0.01", "0.02 ± 0.00"],
            ["GSM8K", "top 10", "0.75 ± 0.01", "0.55 ± 0.01", "0.37 ± 0.01", "0.01 ± 0.03"],
            ["HumanEval", "0", "0.60 ± 0.03", "0.37 ± 0.03", "0.16 ± 0.02", "0.66 ± 0.04"],
            ["HumanEval", "top 1", "0.64 ± 0.03", "0.37 ± 0.03", "0.16 ± 0.03", "0.00 ± 0.00"],
            ["HumanEval", "top 5", "0.61 ± 0.03", "0.39 ± 0.03", "0.18 ± 0.03", "0.00 ± 0.00"],
            ["HumanEval", "top 10", "0.57 ± 0.03", "0.35 ± 0.03", "0.09 ± 0.02", "0.00 ± 0.00"],
        ],
    ),
)

OWN = {
    "smollm2": {"task": "english_arithmetic", "sampler": {"gen_length": 3}, "batch": 36},
}  # fmt: skip
"""A model that reads English answers English word problems, as plain text (in its chat template it answers as many,
with twice the tokens)."""

EXPERIMENT = Experiment(
    name="table1-masking",
    shows="2510.15731, Table 1",
    title="accuracy with the strongest attention sinks hidden",
    metric="exact match of the final answer",
    small={
        "models": ["toy", "toy-sink", "toy-ar"], "task": "toy_arithmetic", "prompts": 8, "batch": 8,
        "columns": [1, 5, 10], "varied": [1], "variants": ["random", "mass", "eps", "raw"], "seeds": [0],
        "calibration": 4, "sampler": {}, "chat": False,
        "confirm_run_unsafe_code": False,
    },
    full={
        "models": ["Dream-org/Dream-v0-Instruct-7B", "GSAI-ML/LLaDA-8B-Instruct", "Gen-Verse/MMaDA-8B-MixCoT",
                   "meta-llama/Llama-3.1-8B-Instruct"],
        "task": "gsm8k", "prompts": 1319, "batch": 64, "columns": [1, 5, 10], "varied": [1, 5, 10],
        "variants": list(VARIANTS), "seeds": [0], "calibration": 8, "sampler": {}, "chat": False,
        "confirm_run_unsafe_code": False,
    },
    items=items,
    run=run,
    render=render,
    cost=cost,
    paper=PAPER,
    own=OWN,
)  # fmt: skip

if __name__ == "__main__":
    run_script(EXPERIMENT)
