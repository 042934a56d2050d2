"""Table 1: how well models do with their strongest sinks hidden, over every reading of "top 1, 5 and 10"."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlm_lens.experiments.attention_sinks.problems import SHIPPED, asked, problems, starts
from dlm_lens.experiments.results import Results
from dlm_lens.experiments.spec import Cost, Experiment, Finding, Item, Rendering, Settings, Table
from dlm_lens.experiments.statistics import Interval, mean_over_prompts, paired_difference, wilson

BASE: dict[str, Any] = {
    "choose": "top", "per": "head", "source": "current", "stage": "before_softmax", "scale": "relative"
}  # fmt: skip
"""The reading that the others are set beside: the k strongest columns of every head, in this pass."""

VARIANTS: dict[str, dict[str, Any]] = {
    "random": {"choose": "random"},
    "eps": {"choose": "eps"},
    "layer": {"per": "layer"},
    "model": {"per": "model", "source": "previous"},
    "previous": {"source": "previous"},
    "clean": {"source": "clean"},
    "after": {"stage": "after"},
    "raw": {"scale": "raw"},
}
"""One change each: a control, Eq. 3 with eps lowered until so many go, level, source, stage, scale."""


def items(settings: Settings) -> Iterator[Item]:
    """Model by model, condition by condition, some prompts at a time; every condition has the same prompts."""
    first = (
        range(0, settings["prompts"], settings["batch"]) if settings["task"] not in SHIPPED else starts(settings)
    )
    for model in settings["models"]:
        for condition in conditions(settings):
            for seed in settings["seeds"]:
                for start in first:
                    yield {"model": model, **condition, "seed": seed, "start": start}


def conditions(settings: Settings) -> list[dict[str, Any]]:
    """Unmasked, the base reading with every number of columns, and the variants."""
    found = [{"columns": 0, **BASE}] + [{"columns": k, **BASE} for k in settings["columns"]]
    for variant in settings["variants"]:
        if variant not in VARIANTS:
            raise ValueError(f"variant {variant!r} is not there; there are {', '.join(VARIANTS)}")
        # The control stands beside every number of columns.
        numbers = settings["columns"] if variant == "random" else settings["varied"]
        found += [{"columns": k, **BASE, **VARIANTS[variant]} for k in numbers]
    return found


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Which problems were answered correctly, and how many columns went per map."""
    model = bench.model(item["model"])
    mask = mask_of(item, settings, bench)
    if settings["task"] in SHIPPED:
        return _answered(model, mask, item, settings)
    from dlm_lens.experiments.attention_sinks.harness import answered

    return answered(model, mask, item, settings)


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
    return mask_random(like=mask, seed=item["seed"]) if item["choose"] == "random" else mask


def eps_for(model: Any, columns: float, settings: Settings) -> float:
    """Eps of Eq. 3 at which `columns` sinks go per map on average, in unmasked runs of the first prompts."""
    import dlm_lens as dl
    from dlm_lens.sinks import AboveMean

    prompts = [problem.prompt for problem in _calibration(settings)]
    received = dl.received_of(dl.record(model, prompts, **settings["sampler"]))
    scores = received.values.float()
    defined = ~scores.isnan()
    excess = (scores - AboveMean(0.0).thresholds(scores))[defined]
    maps = int(defined.any(-1).sum())
    rank = min(len(excess) - 1, max(0, round(columns * maps)))
    # Strictly above eps are the first `rank` of the sorted excesses.
    return round(float(excess.sort(descending=True).values[rank]), 4)


def _calibration(settings: Settings) -> Sequence[Any]:
    task = settings["task"] if settings["task"] in SHIPPED else "toy_arithmetic"
    return problems(task)[: settings["calibration"]]


def _answered(model: Any, mask: Any, item: Item, settings: Settings) -> dict[str, Any]:
    import dlm_lens as dl
    from dlm_lens.evaluation.tasks.toy import final_answer

    these = asked(settings, item["start"])
    hooks = [] if mask is None else [mask]
    done = dl.denoise(
        model, [problem.prompt for problem in these], hooks=hooks, seed=item["seed"], **settings["sampler"]
    )
    hidden = done.settings.get("columns_hidden", (0.0,))[0]
    return {
        "correct": [
            final_answer(text) == problem.target for text, problem in zip(done.answers, these, strict=True)
        ],
        "hook": repr(mask),
        "hidden": round(hidden or 0.0, 4),
    }


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step; two for clean statistics. GSM8K's answers have 256 tokens, HumanEval's 512."""
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    answer = 32 if settings["task"] in SHIPPED else 512 if "human" in settings["task"] else 256
    prompt = 32 if settings["task"] in SHIPPED else 900
    steps = int(settings["sampler"].get("steps", answer))
    return [Cost(steps * (2 if item["source"] == "clean" else 1), rows, prompt + answer, item["model"])]


def render(results: Results) -> Rendering:
    """Accuracy of every condition, its distance to the unmasked model, and the paper's claims."""
    rows = []
    for model in results.models:
        plain = results.listed("correct", model=model, columns=0)
        for condition in conditions(results.settings):
            correct = results.listed("correct", model=model, **condition)
            if correct:
                lost = paired_difference(correct, plain) if len(correct) == len(plain) else None
                rows.append([model, *_names(condition), _hidden(results, model, condition), str(wilson(correct)),
                             "-" if lost is None or not condition["columns"] else str(lost),
                             str(len(correct))])  # fmt: skip
    head = ["model", "columns", "reading", "hidden per map", "exact match", "minus unmasked", "n"]
    table = Table(f"exact match of {results.settings['task']}, 95% intervals (Wilson; differences: bootstrap)",
                  head, rows)  # fmt: skip
    return Rendering([table], {"accuracy": _figure(results)}, list(_findings(results)))


def accuracy(results: Results, model: str, columns: int, **changes: Any) -> Interval:
    """Exact match of a condition: the base reading with some changes."""
    return wilson(results.listed("correct", model=model, columns=columns, **{**BASE, **changes}))


def change(
    results: Results, model: str, columns: int, against: Mapping[str, Any] | None = None, **changes: Any
) -> Interval:
    """Exact match of a condition minus that of another (the unmasked model's), paired by prompt."""
    one = results.listed("correct", model=model, columns=columns, **{**BASE, **changes})
    other = results.listed("correct", model=model, **({"columns": 0, **BASE} if against is None else dict(against)))
    return paired_difference(one, other)


def is_causal(name: str) -> bool:
    """Whether a model of the tables here is an AR baseline, by its name."""
    return name.endswith("-ar") or "llama" in name.lower()


READINGS: tuple[dict[str, Any], ...] = ({}, VARIANTS["layer"], VARIANTS["model"])
"""Readings of "one sink" that the verdicts are given for; the paper does not say which is its own."""


def _findings(results: Results) -> Iterator[Finding]:
    ours = [model for model in results.models if _has(results, model, 0)]
    for model in ours:
        yield from _of_baseline(results, model) if is_causal(model) else _of_diffusion(results, model)
    for model in ours:
        yield from (
            _against(results, model, other, reading)
            for other in ours
            for reading in READINGS
            if is_causal(other) and not is_causal(model) and _has(results, model, 1, **reading)
        )
    yield from _of_controls(results, ours)


def _of_diffusion(results: Results, model: str) -> Iterator[Finding]:
    for reading in (one for one in READINGS if _has(results, model, 1, **one)):
        lost = change(results, model, 1, **reading)
        yield Finding(
            'masking one sink costs a DLM "less than 1%" (text); Table 1: 0 to 0.03 on GSM8K',
            f"{model}: {lost} (one sink {_reading(reading)})",
            "agrees" if lost.low > -0.05 else "disagrees" if lost.high < -0.05 else "undecided",
            "agreement is taken as a loss below 0.05",
        )
    if _has(results, model, 10):
        lost = change(results, model, 10)
        yield Finding(
            "ten sinks cost 0.07 (Dream) to 0.21 (LLaDA) on GSM8K",
            f"{model}: {lost} (ten sinks per head)",
            "disagrees" if lost.high < -0.25 or lost.low > 0 else "agrees" if lost.high < 0 else "undecided",
            "ten columns are about a fifth of these canvases of 48 to 58 positions, and at most 4% of the paper's, "
            "whose answers alone have 256",
        )


def _against(results: Results, model: str, other: str, reading: Mapping[str, Any]) -> Finding:
    ours, theirs = change(results, model, 1, **reading), change(results, other, 1, **reading)
    return Finding(
        "DLMs lose less than an AR model: 0 to 0.03 against 0.83 on GSM8K",
        f"one sink {_reading(reading)}: {model} {ours}, {other} {theirs}",
        "agrees" if ours.low > theirs.high else "disagrees" if ours.high < theirs.low else "undecided",
        "agreement is taken as intervals that do not touch",
    )


def _reading(reading: Mapping[str, Any]) -> str:
    return f"per {reading.get('per', 'head')}"


def _of_baseline(results: Results, model: str) -> Iterator[Finding]:
    for scale in ("raw", "relative"):
        for k in (1, 5):
            if _has(results, model, k, scale=scale):
                left = accuracy(results, model, k, scale=scale)
                yield Finding(
                    "one masked sink destroys the AR baseline: 0.85 to 0.02",
                    f"{model}: {accuracy(results, model, 0)} to {left} (top {k}, {scale} column sums)",
                    "agrees" if left.high < 0.5 else "disagrees" if left.low > 0.5 else "undecided",
                    "agreement is taken as less than half left"
                    + ("; relative sums leave out what the causal mask alone gives to the first token"
                       if scale == "relative" else ""),
                )  # fmt: skip
                break


def _of_controls(results: Results, models: Sequence[str]) -> Iterator[Finding]:
    for model in models:
        for k in results.settings["columns"]:
            if _has(results, model, k) and _has(results, model, k, choose="random"):
                more = change(results, model, k, {"columns": k, **BASE, "choose": "random"})
                yield Finding(
                    "no control in the paper",
                    f"{model}: top {k} minus {k} random columns: {more}",
                    "no counterpart",
                    "below 0: sinks matter more than other columns" if more.high < 0 else "",
                )


def _has(results: Results, model: str, columns: int, **changes: Any) -> bool:
    return bool(results.where(model=model, columns=columns, **{**BASE, **changes}))


def _names(condition: Mapping[str, Any]) -> list[str]:
    changed = [f"{name} {value}" for name, value in condition.items() if name != "columns" and value != BASE[name]]
    if not condition["columns"]:
        return ["0", "unmasked"]
    return [str(condition["columns"]), ", ".join(changed) or "top k of every head, this pass, before the softmax"]


def _hidden(results: Results, model: str, condition: Mapping[str, Any]) -> str:
    found = [record.value["hidden"] for record in results.where(model=model, **condition)]
    return f"{mean_over_prompts(found).value:.2f}"


def _figure(results: Results) -> Any:
    from dlm_lens.experiments.attention_sinks.drawing import lines

    curves = {}
    for model in results.models:
        for choose in ("top", "random"):
            points = [
                (k, accuracy(results, model, k, **({"choose": choose} if k else {})))
                for k in (0, *results.settings["columns"])
                if _has(results, model, k, **({"choose": choose} if k else {}))
            ]
            if len(points) > 1:
                curves[f"{model}, {'strongest' if choose == 'top' else 'random'} columns"] = points
    return lines(curves, x="columns hidden per head", y=f"exact match, {results.settings['task']}")


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

EXPERIMENT = Experiment(
    name="table1-masking",
    shows="2510.15731, Table 1",
    title="accuracy with the strongest attention sinks hidden",
    metric="exact match of the final answer",
    small={
        "models": ["toy", "toy-ar"], "task": "toy_arithmetic", "prompts": 8, "batch": 8, "columns": [1, 5, 10],
        "varied": [1], "variants": ["random", "eps", "raw"], "seeds": [0], "calibration": 4, "sampler": {},
        "confirm_run_unsafe_code": False,
    },
    full={
        "models": ["Dream-org/Dream-v0-Instruct-7B", "GSAI-ML/LLaDA-8B-Instruct", "Gen-Verse/MMaDA-8B-MixCoT",
                   "meta-llama/Llama-3.1-8B-Instruct"],
        "task": "gsm8k", "prompts": 1319, "batch": 64, "columns": [1, 5, 10], "varied": [1, 5, 10],
        "variants": list(VARIANTS), "seeds": [0], "calibration": 8, "sampler": {}, "confirm_run_unsafe_code": False,
    },
    items=items,
    run=run,
    render=render,
    cost=cost,
    paper=PAPER,
)  # fmt: skip
