"""Exact match under hook expressions: what the experiments beyond the paper share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dlm_lens.experiments.attention_sinks.problems import chat, is_right, problems_of, starts
from dlm_lens.experiments.attention_sinks.prompt_scores import correct_by_prompt, exact_match
from dlm_lens.experiments.attention_sinks.prompt_scores import difference as paired
from dlm_lens.experiments.experiment import Cost, Experiment, Rendering, Table
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings

SMALL: dict[str, Any] = {
    "models": ["toy"], "task": "toy_arithmetic", "prompts": 8, "batch": 8, "sampler": {}, "columns": 1
}  # fmt: skip
"""Settings with an embedded model."""

FULL: dict[str, Any] = {
    **SMALL, "models": ["GSAI-ML/LLaDA-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"],
    "prompts": 100, "batch": 16,
    "columns": 5,
}  # fmt: skip
"""Settings with real checkpoints, on the shipped word problems (table1-masking has GSM8K)."""

Conditions = Callable[[Settings, str], Mapping[str, str]]
"""(settings, model) -> hook expression by the name of the condition; "" for no hook."""


def items(conditions: Conditions) -> Callable[[Settings], Iterator[Item]]:
    """Items per model and condition, with the same prompts for all."""

    def listed(settings: Settings) -> Iterator[Item]:
        for model in settings["models"]:
            for name, hook in conditions(settings, model).items():
                for start in starts(settings, graded=True):
                    yield {"model": model, "condition": name, "hook": hook, "start": start}

    return listed


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Whether each problem is answered correctly.

    Raises:
        ValueError: the setting `layers` names one that the model does not have.
    """
    import dlm_lens as dl
    from dlm_lens.attention import attention_blocks
    from dlm_lens.hooks import parse_hooks

    model, these = bench.model(item["model"]), problems_of(settings, item["start"])
    # At the first item: the hook itself is refused after the conditions of all layers before it.
    depth = len(attention_blocks(model))
    if any(not -depth <= layer < depth for layer in settings.get("layers", ())):
        raise ValueError(f"layers is {settings['layers']}; {item['model']} has layers 0 to {depth - 1}")
    hooks = parse_hooks(item["hook"]) if item["hook"] else ()
    done = dl.denoise(model, chat(model, these, settings), hooks=hooks, **settings["sampler"])
    return {
        "correct": [
            is_right(settings["task"], text, problem) for text, problem in zip(done.answers, these, strict=True)
        ]
    }


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step."""
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    steps = int(settings["sampler"].get("steps", settings["sampler"].get("gen_length", 32)))
    return [Cost(steps, rows, 32 + int(settings["sampler"].get("gen_length", 32)), item["model"])]


def experiment(
    *,
    name: str,
    shows: str,
    title: str,
    metric: str,
    conditions: Conditions,
    render: Callable[[Results], Rendering],
    small: Settings | None = None,
    full: Settings | None = None,
) -> Experiment:
    """An `Experiment` on hook conditions; `small` and `full` replace or add to the shared settings."""
    return Experiment(
        name=name,
        shows=shows,
        title=title,
        metric=metric,
        small={**SMALL, **(small or {})},
        full={**FULL, **(full or {})},
        items=items(conditions),
        run=run,
        render=render,
        cost=cost,
    )


def names(results: Results, model: str) -> list[str]:
    """The conditions of a model, in order."""
    return list(dict.fromkeys(record.item["condition"] for record in results.where(model=model)))


def accuracy(results: Results, model: str, condition: str) -> Interval:
    """Exact match with Wilson's interval."""
    return exact_match(correct_by_prompt(results, model=model, condition=condition))


def difference(results: Results, model: str, one: str, other: str) -> Interval:
    """Exact match under one condition minus that under another, paired by prompt."""
    first, second = (correct_by_prompt(results, model=model, condition=name) for name in (one, other))
    return paired(first, second)


def table(results: Results, title: str, plain: str = "unmasked") -> Table:
    """One row per model and condition."""
    rows = []
    for model in results.models:
        for name in names(results, model):
            (hook,) = {record.item["hook"] for record in results.where(model=model, condition=name)}
            lost = "-" if name == plain else str(difference(results, model, name, plain))
            found = accuracy(results, model, name)
            rows.append([model, name, f"`{hook}`" if hook else "", str(found), lost, str(found.n)])
    head: Sequence[str] = ["model", "condition", "hook", "exact match", f"minus {plain}", "n"]
    return Table(title, head, rows)
