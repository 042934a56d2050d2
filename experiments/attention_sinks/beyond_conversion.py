"""From an AR model to a masked DLM, watched: sinks and value norms over the training of a conversion."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import conversion_training
from dlm_lens.experiments.attention_sinks.conversion_statistics import prompt_statistics, row_losses
from dlm_lens.experiments.attention_sinks.conversion_tables import render
from dlm_lens.experiments.attention_sinks.conversion_training import AR, LANGUAGE, LENGTH
from dlm_lens.experiments.experiment import Cost, Experiment, run_script
from dlm_lens.experiments.model_settings import OTHERS, settings_of
from dlm_lens.experiments.results import Item, Settings


def items(settings: Settings) -> Iterator[Item]:
    """Per start the AR parent, then the checkpoints of every variant and seed, in the order of training."""
    for start in settings["models"]:
        yield {"model": start, "variant": AR, "seed": 0, "steps": 0}
        own = settings_of(settings, start)
        for seed in range(settings["seeds"]):
            for variant in own["variants"]:
                for step in steps_of(own):
                    yield {"model": start, "variant": variant, "seed": seed, "steps": step}


def steps_of(settings: Settings) -> list[int]:
    """The steps after which a conversion is measured, ascending; the settings are those of its start.

    Raises:
        ValueError: no step, or one below 0.
    """
    found = sorted(set(settings["steps"]))
    if not found or found[0] < 0:
        raise ValueError(f"steps is {found}; give the numbers of optimiser steps, such as [0, 10, 100]")
    return [int(step) for step in found]


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: the statistics of the checkpoint's own denoising run, and the loss of the held-out sequence."""
    import dlm_lens as dl

    name = item["model"]
    if item["variant"] != AR:
        name = str(conversion_training.kept(name, item["variant"], item["seed"], item["steps"], settings))
    model = bench.model(name)
    found = conversion_training.material(model.tokenizer, settings)
    sampler = {"gen_length": settings["gen_length"]}
    if item["variant"] != AR:
        sampler["steps"] = settings["denoising_steps"]
    values: dict[str, Any] = {}
    for begin in range(0, len(found.prompts), settings["batch"]):
        prompts = found.prompts[begin : begin + settings["batch"]]
        recording = dl.record(model, prompts, [dl.ReceivedAttention(), dl.ValueNorm()], **sampler)
        for row in range(len(prompts)):
            for key, pair in prompt_statistics(recording, row, settings["eps"]).items():
                values.setdefault(key, []).append(pair)
    values["loss"] = [[loss, 1] for loss in row_losses(model, found, settings["masks"])]
    return {**values, "tokens": item["steps"] * settings["batch_size"] * found.length}


def cost(item: Item, settings: Settings) -> list[Cost]:
    """Training since the checkpoint before, and the denoising run and the loss of this one."""
    start = item["model"]
    length = LENGTH if settings["text"] == LANGUAGE else settings["length"]
    causal = item["variant"] == AR
    passes = settings["gen_length"] if causal else settings["denoising_steps"]
    positions = LENGTH if settings["text"] == LANGUAGE else settings["prompt_length"] + settings["gen_length"]
    rows = min(settings["batch"], settings["prompts"])
    batches = -(-settings["prompts"] // rows)
    found = [
        Cost(passes * batches, rows, positions, start),
        Cost(settings["prompts"], 1 if causal else settings["masks"], length, start),
    ]
    before = max((step for step in steps_of(settings) if step < item["steps"]), default=0)
    if not causal and item["steps"] > before:
        micro = settings["micro_batch_size"] or settings["batch_size"]
        count = (item["steps"] - before) * settings["batch_size"] // micro
        found.append(Cost(count, micro, length, start, backward=True, predicted=0.5))
    return found


SMALL: dict[str, Any] = {
    "models": ["toy-ar"], "variants": ["plain"], "seeds": 1, "length": 128, "corpus": 20_000,
    "steps": {OTHERS: [0, 10, 30, 100], "smollm2": [0, 10, 20, 30, 50, 100, 300, 1000, 3000, 10_000]},
    "text": {OTHERS: LANGUAGE, "smollm2": "kjv"}, "rate": {OTHERS: 1e-3, "smollm2": 1e-4},
    "warm_up": {OTHERS: 20, "smollm2": 10}, "batch_size": {OTHERS: 32, "smollm2": 8}, "micro_batch_size": 0,
    "precision": {OTHERS: "fp32", "smollm2": "bf16"}, "compile": False, "save_minutes": 10.0, "prompts": 32,
    "prompt_length": 24, "batch": 32, "gen_length": {OTHERS: 32, "smollm2": 16}, "denoising_steps": 16, "masks": 2,
    "eps": 3.0, "trained": "runs/conversion",
}  # fmt: skip
"""About a minute for toy-ar. A step of smollm2 takes 6 seconds of a core; its rate is that of 2601.19657, A.1."""

FULL: dict[str, Any] = {
    **SMALL, "models": ["smollm2"], "variants": ["plain", "sink", "gate"],
    "steps": [0, 1, 3, 10, 30, 100, 300, 1000, 1526], "text": "text", "length": 1024, "rate": 1e-4, "warm_up": 50,
    "batch_size": 64, "micro_batch_size": 16, "precision": "bf16", "compile": True, "prompts": 96,
    "prompt_length": 64, "batch": 32, "gen_length": 64, "denoising_steps": 64, "masks": 4,
}  # fmt: skip
"""100 million tokens (1,526 steps of 64 x 1,024) per variant, for a GPU; `text` is a file or folder of .txt."""

EXPERIMENT = Experiment(
    name="beyond-conversion",
    shows="beyond 2510.15731 and 2601.19657",
    title="sinks and value norms while an AR model is trained to a masked DLM",
    metric="received share of the first token, static and moving sinks on both scales, value-norm ratio, loss",
    small=SMALL,
    full=FULL,
    items=items,
    run=run,
    render=render,
    cost=cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
