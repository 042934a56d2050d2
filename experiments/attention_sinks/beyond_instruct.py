"""Section 8, Limitations: do instruct models have the sinks of their base models?"""

from collections.abc import Iterator, Sequence
from typing import Any

from dlm_lens.experiments.attention_sinks import instruct_sinks, recorded_runs, table1
from dlm_lens.experiments.attention_sinks.instruct_tables import render
from dlm_lens.experiments.attention_sinks.masking_conditions import conditions
from dlm_lens.experiments.attention_sinks.problems import holds_problems, starts
from dlm_lens.experiments.attention_sinks.twin_networks import FinetunedBench, base_and_tuning
from dlm_lens.experiments.experiment import Cost, Experiment, run_script
from dlm_lens.experiments.results import Item, Settings


def pairs(settings: Settings) -> list[tuple[str, str]]:
    """Pairs (base, instruct) of consecutive models of the settings.

    Raises:
        ValueError: an odd number of models.
    """
    models: Sequence[str] = settings["models"]
    if len(models) < 2 or len(models) % 2:
        raise ValueError(
            f"models is {list(models)}; give pairs, as in --models GSAI-ML/LLaDA-8B-Base,GSAI-ML/LLaDA-8B-Instruct"
        )
    return list(zip(models[::2], models[1::2], strict=True))


def items(settings: Settings) -> Iterator[Item]:
    """Every model under every mask, then the sinks of every pair; the same prompts for all."""
    found = pairs(settings)
    for model in dict.fromkeys(settings["models"]):
        for condition in conditions({**settings, "variants": ["mass"], "varied": []}):
            for start in _starts(settings):
                yield {"measure": "masking", "model": model, **condition, "seed": 0, "start": start}
    for base, instruct in found:
        for start in starts(settings):
            yield {"measure": "sinks", "base": base, "instruct": instruct, "start": start}


def _starts(settings: Settings) -> range:
    if holds_problems(settings["masked_task"]):
        masked = {**settings, "task": settings["masked_task"], "prompts": settings["masked_prompts"]}
        return starts(masked, graded=True)
    return range(0, settings["masked_prompts"], settings["batch"])


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """A condition of Table 1, or the sinks of a pair."""
    twins = FinetunedBench(bench, settings)
    if item["measure"] == "sinks":
        return instruct_sinks.compare(item, settings, twins)
    # No presets: both models get the same prompts.
    task = {"task": settings["masked_task"], "prompts": settings["masked_prompts"], "presets": False}
    return table1.run(item, {**settings, **task}, twins)


def cost(item: Item, settings: Settings) -> list[Cost]:
    """A pair costs a run of each model and one replay. A twin's training is counted once, with its base's size."""
    if item["measure"] == "masking":
        model, ending = base_and_tuning(item["model"])
        given = {**settings, "task": settings["masked_task"], "prompts": settings["masked_prompts"]}
        (one,) = table1.cost({**item, "model": model}, given)
        first = ending and not item["columns"] and not item["start"]
        training = Cost(settings["sft_steps"], settings["sft_batch"], 64, model, backward=True)
        return [one, training] if first else [one]
    base, instruct = (
        recorded_runs.cost({"model": base_and_tuning(item[name])[0], "start": item["start"]}, settings)[0]
        for name in ("base", "instruct")
    )
    return [base, Cost(2 * instruct.passes, instruct.rows, instruct.positions, instruct.model)]


TRAINING = {"trained": "runs/beyond-instruct", "sft_steps": 300, "sft_rate": 1e-3, "sft_batch": 32, "sft_seed": 0}
"""Settings of the twins' training; checkpoints do not use them."""

EXPERIMENT = Experiment(
    name="beyond-instruct",
    shows="2510.15731, Section 8",
    title="sinks of base models beside those of instruct models",
    metric="sinks per map, moves, kinds of tokens, Jaccard overlap of positions, exact match under masks",
    small={
        **recorded_runs.SMALL, **TRAINING, "models": ["toy", "toy+sft", "toy", "toy+pretraining"], "prompts": 8,
        "batch": 8, "masked_task": "toy_arithmetic", "masked_prompts": 16, "columns": [1],
        "confirm_run_unsafe_code": False,
    },
    full={
        **recorded_runs.FULL, **TRAINING,
        "models": ["GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Base-7B",
                   "Dream-org/Dream-v0-Instruct-7B"],
        "chat": False, "masked_task": "gsm8k", "masked_prompts": 200, "columns": [1, 5],
        "confirm_run_unsafe_code": False,
    },
    items=items,
    run=run,
    render=render,
    cost=cost,
    paired=True,
)  # fmt: skip

if __name__ == "__main__":
    run_script(EXPERIMENT)
