"""Table 1: exact match with the strongest sinks hidden, for every reading of "top 1, 5 and 10"."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlm_lens.experiments.attention_sinks import twin_networks
from dlm_lens.experiments.attention_sinks.masking_conditions import (
    BASE,
    CLASSES,
    CONTROLS,
    VARIANTS,
    condition_cells,
    conditions,
    reading_of,
)
from dlm_lens.experiments.attention_sinks.masking_findings import (
    LOSS,
    accuracy,
    against_control,
    change,
    controls_of,
    findings,
    has,
    unmasked,
)
from dlm_lens.experiments.attention_sinks.problems import (
    chat,
    holds_problems,
    is_right,
    problems,
    problems_of,
    starts,
)
from dlm_lens.experiments.attention_sinks.prompt_scores import answers, mean_change, mean_match
from dlm_lens.experiments.attention_sinks.twin_networks import model_of, networks_of, twin_steps
from dlm_lens.experiments.experiment import Cost, Experiment, Rendering, Table, run_script
from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.results import Item, Results, Settings

if TYPE_CHECKING:
    from dlm_lens.sinks import Received


def items(settings: Settings) -> Iterator[Item]:
    """Items per model, network, condition and seed, with the same prompts for every condition."""
    own = holds_problems(settings["task"])
    first = starts(settings, graded=True) if own else range(0, settings["prompts"], settings["batch"])
    for model in settings["models"]:
        for network in networks_of(model, settings):
            for condition in conditions(settings):
                for seed in settings["seeds"]:
                    for start in first:
                        # Results stored before twins existed have no network.
                        number = {"network": network} if "networks" in settings else {}
                        yield {"model": model, **number, **condition, "seed": seed, "start": start}


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Whether each problem is answered correctly; per map, hidden columns, their attention, learned sinks."""
    from dlm_lens.experiments.attention_sinks.hidden_mass import HiddenMass

    model, mask = model_of(item, settings, bench), mask_of(item, settings, bench)
    measured = None if mask is None else HiddenMass(mask)
    if holds_problems(settings["task"]):
        correct = _answered(model, measured, item, settings)
    else:
        from dlm_lens.experiments.attention_sinks.harness_tasks import correct_documents

        correct = correct_documents(model, measured, item, settings)
    nothing = {"hidden": 0.0, "mass": 0.0, "learned": 0.0, "maps": 0.0}
    return {"correct": correct, "hook": repr(mask), **(nothing if measured is None else measured.totals())}


def mask_of(item: Item, settings: Settings, bench: Any) -> Any:
    """The condition's hook; None for the unmasked model."""
    from dlm_lens.hooks import mask_positions, mask_random, mask_sinks
    from dlm_lens.sinks import AboveMean, TopK

    if not item["columns"]:
        return None
    rest = {
        "per": item["per"],
        "source": item["source"],
        "stage": item["stage"],
        "relative": item["scale"] != "raw",
        "classes": CLASSES[item["classes"]] if item.get("classes") else None,
    }
    if item["choose"] == "first":
        return mask_positions(*range(item["columns"]), stage=item["stage"])
    if item["choose"] == "eps":
        eps = bench.once(
            ("eps", item["columns"]),
            lambda: eps_for(model_of(item, settings, bench), item["model"], item["columns"], settings),
        )
        return mask_sinks(AboveMean(eps), **rest)
    mask = mask_sinks(TopK(item["columns"]), **rest)
    if item["choose"] in CONTROLS:
        match: Any = "mass" if item["choose"] == "mass" else "columns"
        return mask_random(like=mask, seed=item["seed"], match=match)
    return mask


def eps_for(model: Any, name: str, columns: float, settings: Settings) -> float:
    """The eps of Eq. 3 with `columns` sinks per map on average, in unmasked runs of the task's first prompts."""
    import dlm_lens as dl

    if holds_problems(settings["task"]):
        prompts = chat(model, problems(settings["task"])[: settings["calibration"]], settings)
        return eps_of([dl.received_of(dl.record(model, prompts, **settings["sampler"]))], columns)
    from dlm_lens.experiments.attention_sinks.harness_tasks import received_in_documents

    return eps_of(received_in_documents(model, name, settings), columns)


MANY = 2**26
"""Scores of a run of which only those above the mean of the others are kept: a run of LLaDA-8B has 3e8."""


def eps_of(runs: Iterable["Received"], columns: float) -> float:
    """The eps of Eq. 3 above which `columns` keys per map lie, on average over the maps of these runs."""
    import torch

    from dlm_lens.sinks import AboveMean

    excesses, maps = [], 0
    for received in runs:
        scores = received.values.float()
        defined = ~scores.isnan()
        excess = (scores - AboveMean(0.0).thresholds(scores))[defined]
        excesses.append(excess[excess > 0] if len(excess) > MANY else excess)
        maps += int(defined.any(-1).sum())
    every = torch.cat(excesses).sort(descending=True).values
    rank = min(len(every) - 1, max(0, round(columns * maps)))
    # The first `rank` of the sorted excesses lie strictly above eps.
    return round(float(every[rank]), 4)


def _answered(model: Any, mask: Any, item: Item, settings: Settings) -> list[bool]:
    import dlm_lens as dl

    these = problems_of(settings, item["start"])
    hooks = [] if mask is None else [mask]
    prompts = chat(model, these, settings)
    answers: dict[int, str] = {}
    for rows in _together(model, prompts, mask):
        chosen = [prompts[row] for row in rows]
        done = dl.denoise(model, chosen, hooks=hooks, seed=item["seed"], **settings["sampler"])
        answers |= dict(zip(rows, done.answers, strict=True))
    return [is_right(settings["task"], answers[row], problem) for row, problem in enumerate(these)]


def _together(model: Any, prompts: Sequence[Any], mask: Any) -> list[list[int]]:
    """The rows that share a run: all of them, or those of equal length where padding would shift the mask."""
    from dlm_lens.sampling.prompts import read_prompts

    if mask is None or mask.padding_safe:
        return [list(range(len(prompts)))]
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(read_prompts(model, list(prompts)).attention_mask.sum(-1).tolist()):
        groups.setdefault(length, []).append(row)
    return list(groups.values())


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step; two for clean statistics. GSM8K's answers have 256 tokens, HumanEval's 512."""
    task = settings["task"]
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    answer = 32 if holds_problems(task) else 512 if "human" in task else 256
    prompt = 32 if holds_problems(task) else 900
    steps = int(settings["sampler"].get("steps", answer))
    return [Cost(steps * (2 if item["source"] == "clean" else 1), rows, prompt + answer, item["model"])]


def render(results: Results) -> Rendering:
    """Exact match of every condition, its difference to the unmasked model, and the paper's claims."""
    own = {model: settings_of(results.settings, model) for model in results.models}
    tasks = ", ".join(dict.fromkeys(one["task"] for one in own.values()))
    found = {
        model: [one for one in conditions(mine) if one["choose"] not in CONTROLS] for model, mine in own.items()
    }
    title = f"exact match of {tasks}, 95% intervals (Wilson; differences paired by prompt)"
    tables = [Table(title, HEAD, [row for model, sinks in found.items() for row in rows_of(results, model, sinks)])]
    controls = [row for model, sinks in found.items() for row in control_rows(results, model, sinks)]
    if controls:
        title = "controls: random columns, as many as the sinks or of the same mass; sinks minus these"
        tables.append(Table(title, CONTROL_HEAD, controls))
    return Rendering(tables, _figures(results), list(findings(results)), list(_notes(results)))


HEAD = [
    "model", "columns", "reading", "maps", "hidden per map", "attention on them", "exact match", "minus unmasked",
    "n",
]  # fmt: skip

CONTROL_HEAD = [
    "model", "columns", "reading",
    *(f"{name}: {what}" for name in ("as many", "same mass")
      for what in ("hidden per map", "attention", "exact match", "sinks minus it")),
]  # fmt: skip


def rows_of(results: Results, model: str, found: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """One row per condition that has results."""
    plain = answers(results, model=model, columns=0)
    for condition in found:
        correct = answers(results, model=model, **{**BASE, **condition})
        if correct:
            hides = bool(condition["columns"])
            lost = str(mean_change(correct, plain)) if hides else "-"
            prompts = str(max(map(len, correct.values())))
            totals = _totals(results, model, condition)
            yield [model, *condition_cells(condition), *totals, str(mean_match(correct)), lost, prompts]


def control_rows(results: Results, model: str, found: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """One row per condition that has a control: both controls, and the condition minus each."""
    for condition in found:
        k, reading = condition["columns"], reading_of(condition)
        held = controls_of(results, model, k, reading) if k and condition["choose"] == BASE["choose"] else []
        cells = [model, *condition_cells(condition)]
        for choose in CONTROLS:
            if choose in held:
                _, hidden, mass = _totals(results, model, {**condition, "choose": choose})
                right = accuracy(results, model, k, **{**reading, "choose": choose})
                less = (
                    against_control(results, model, k, choose, **reading)
                    if has(results, model, k, **reading)
                    else "-"
                )
                cells += [hidden, mass, str(right), str(less)]
            else:
                cells += ["-"] * 4
        if held:
            yield cells


def _totals(results: Results, model: str, condition: Mapping[str, Any]) -> tuple[str, str, str]:
    """Share of maps with a hidden column; columns per map, learned sink tokens among them; their attention."""
    maps, hidden, mass, learned = (
        mean(results, name, model, condition) for name in ("maps", "hidden", "mass", "learned")
    )
    share = "-" if maps != maps else f"{maps:.2f}"
    return share, f"{hidden:.2f}" + (f" ({learned:.2f} learned)" if learned else ""), f"{mass:.3f}"


def mean(results: Results, name: str, model: str, condition: Mapping[str, Any]) -> float:
    """One of the totals of `HiddenMass`, averaged over the prompts of a condition; NaN if it was not stored."""
    records = results.where(model=model, **{**BASE, **condition})
    found = [(record.value[name], len(record.value["correct"])) for record in records if name in record.value]
    count = sum(prompts for _, prompts in found)
    return float(sum(value * prompts for value, prompts in found) / count) if count else float("nan")


def _notes(results: Results) -> Iterator[str]:
    yield (
        "Maps: share of the maps (one head of one layer at one step) in which something was hidden. Attention on "
        "them: share of the attention of a map that the hidden columns receive before they are hidden, in the runs "
        "of the condition itself."
    )
    for model in results.models:
        if told := unmasked(results, model):
            steps = twin_steps(results.settings, model)
            trained = (
                "the shipped one and its twins were trained for 10,000 steps"
                if steps == 10_000
                else f"the shipped one was trained for 10,000 steps, its twins for {steps:,}"
            )
            yield (
                f"The networks of {model} answer {told} of the prompts with nothing hidden: {trained}. A network "
                "that answers less can lose less, which widens the intervals over networks."
            )
    if any(record.item.get("classes") for record in results.records):
        told = "; ".join(f"{name}: {', '.join(classes)}" for name, classes in CLASSES.items())
        yield (
            f"Classes of tokens ({told}): of the strongest columns, only those are hidden whose token belongs to "
            "the class at the step; where the strongest column belongs to another class, nothing is hidden in its "
            "place. Hiding content also takes away numbers and words that the problem needs, so that only the "
            "function tokens show what sinks do."
        )
    if any(record.item.get("choose") in CONTROLS for record in results.records):
        yield (
            "Controls hide random columns, never those of the condition: as many in every map, or until they "
            'receive as much (`mask_random(match="mass")`). The second has to hide more of them; where all other '
            "columns together receive less, it hides less. Its columns differ between heads, so that other heads "
            "still see a column that one head lost; the sinks of two heads may coincide."
        )
    for model in results.models:
        if any(record.value["learned"] for record in results.where(model=model)):
            yield (
                f"The learned sink token of {model} can be hidden like any other key, and is hidden where it is "
                'among the strongest ("learned" in the table); its own query still sees it. It belongs to neither '
                "class, and controls never choose it."
            )


def _figures(results: Results) -> dict[str, Any]:
    """Exact match over the number of columns, and what one column per head changes by classes of tokens."""
    from dlm_lens.experiments.attention_sinks.charts import forest_plot

    rows = {}
    for model in results.models:
        for reading, name in (({}, "strongest column"), *(({"classes": one}, f"{one} only") for one in CLASSES)):
            for choose, of in ((BASE["choose"], ""), *((one, f": {text}") for one, text in CONTROLS.items())):
                kind = {**reading, "choose": choose}
                if has(results, model, 1, **kind) and has(results, model, 0):
                    rows[f"{model}, {name}{of}"] = change(results, model, 1, **kind)
    figures = {"accuracy": _figure(results)}
    if rows:
        x = "change of exact match by hiding one column per head, or the control's columns"
        figures["classes"] = forest_plot(rows, x=x, shaded=(LOSS, -LOSS))
    return figures


def _figure(results: Results) -> Any:
    from dlm_lens.experiments.attention_sinks.charts import line_panels

    kinds: dict[str, dict[str, Any]] = {
        "strongest columns": {}, **{f"of these, {name} tokens only": {"classes": name} for name in CLASSES},
        **{name: {"choose": choose} for choose, name in CONTROLS.items()},
    }  # fmt: skip
    panels = {}
    for model in results.models:
        curves = {
            name: [
                (k, accuracy(results, model, k, **(kind if k else {})))
                for k in (0, *settings_of(results.settings, model)["columns"])
                if has(results, model, k, **(kind if k else {}))
            ]
            for name, kind in kinds.items()
        }
        panels[model] = {name: points for name, points in curves.items() if len(points) > 1}
    return line_panels(panels, x="sinks hidden per head, or matched", y="exact match")


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
        "models": ["toy", "toy-sink", "toy-ar", "toy-gated"], "task": "toy_arithmetic", "prompts": 8, "batch": 8,
        "columns": [1, 5, 10], "varied": [1],
        "variants": ["random", "mass", "eps", "raw", "function", "content"], "seeds": [0],
        "calibration": 4, "sampler": {}, "chat": False, **twin_networks.SETTINGS,
        "confirm_run_unsafe_code": False,
    },
    full={
        "models": ["Dream-org/Dream-v0-Instruct-7B", "GSAI-ML/LLaDA-8B-Instruct", "Gen-Verse/MMaDA-8B-MixCoT",
                   "meta-llama/Llama-3.1-8B-Instruct"],
        "task": "gsm8k", "prompts": 1319, "batch": 64, "columns": [1, 5, 10], "varied": [1, 5, 10],
        "variants": list(VARIANTS), "seeds": [0], "calibration": 8, "sampler": {}, "chat": False,
        **twin_networks.SETTINGS, "confirm_run_unsafe_code": False,
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
