"""Exact match under hook expressions: what the experiments beyond the paper share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dlm_lens.experiments.attention_sinks.problems import chat, is_right, problems_of, starts
from dlm_lens.experiments.attention_sinks.prompt_scores import correct_by_prompt, exact_match
from dlm_lens.experiments.attention_sinks.prompt_scores import difference as paired
from dlm_lens.experiments.experiment import Bench, Cost, Experiment, Rendering, Table
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


def runner(conditions: Conditions) -> Callable[[Item, Settings, Bench], Mapping[str, Any]]:
    """The function that computes an item: whether each problem is answered correctly.

    It raises a ValueError at a model's first item where any of the model's conditions cannot run, before the
    conditions that can are computed.
    """

    def run(item: Item, settings: Settings, bench: Bench) -> dict[str, Any]:
        """Denoise the problems of an item under its hooks, after a check of all conditions of its model."""
        import dlm_lens as dl
        from dlm_lens.hooks import parse_hooks

        model, these = bench.model(item["model"]), problems_of(settings, item["start"])
        prompts = chat(model, these, settings)
        every = conditions(settings, item["model"])
        bench.once(("checked", item["model"]), lambda: _check(model, prompts, every, settings))
        hooks = parse_hooks(item["hook"]) if item["hook"] else ()
        done = dl.denoise(model, prompts, hooks=hooks, **settings["sampler"])
        return {
            "correct": [
                is_right(settings["task"], text, problem) for text, problem in zip(done.answers, these, strict=True)
            ]
        }

    return run


def _check(model: Any, prompts: Sequence[Any], conditions: Mapping[str, str], settings: Settings) -> None:
    """Raise where a condition cannot run.

    Raises:
        ValueError: a hook needs a step or a layer that the run or the model does not have.
    """
    from dlm_lens.hooks import parse_hooks
    from dlm_lens.sampling.denoising import check_recorded_run

    for name, hook in conditions.items():
        try:
            check_recorded_run(model, prompts, parse_hooks(hook) if hook else (), **settings["sampler"])
        except ValueError as error:
            own = ", ".join(f"{one}={value!r}" for one, value in settings.items() if one not in SMALL)
            raise ValueError(f"the condition {name!r} of the settings {own} cannot run: {error}") from error


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
        run=runner(conditions),
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
