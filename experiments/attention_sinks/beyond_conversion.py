"""From an AR model to a masked DLM, watched: sinks and value norms over the training of a conversion."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import conversion_training
from dlm_lens.experiments.attention_sinks.conversion_statistics import prompt_statistics, row_losses
from dlm_lens.experiments.attention_sinks.conversion_tables import render
from dlm_lens.experiments.attention_sinks.conversion_training import AR, LANGUAGE, LENGTH, settings_of
from dlm_lens.experiments.experiment import Cost, Experiment, run_script
from dlm_lens.experiments.results import Item, Settings


def items(settings: Settings) -> Iterator[Item]:
    """Per start the AR parent, then the checkpoints of every variant and seed, in the order of training."""
    for start in settings["models"]:
        yield {"model": start, "variant": AR, "seed": 0, "steps": 0}
        for seed in range(settings["seeds"]):
            for variant in settings["variants"]:
                for step in steps_of(start, settings):
                    yield {"model": start, "variant": variant, "seed": seed, "steps": step}


def steps_of(start: str, settings: Settings) -> list[int]:
    """The steps after which the start's conversion is measured, ascending.

    Raises:
        ValueError: no step, or one below 0.
    """
    found = sorted(set(settings_of(start, settings)["steps"]))
    if not found or found[0] < 0:
        raise ValueError(f"steps is {found}; give the numbers of optimiser steps, such as [0, 10, 100]")
    return [int(step) for step in found]


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: the statistics of the checkpoint's own denoising run, and the loss of the held-out sequence."""
    import dlm_lens as dl

    own = settings_of(item["model"], settings)
    name = item["model"]
    if item["variant"] != AR:
        name = str(conversion_training.kept(name, item["variant"], item["seed"], item["steps"], settings))
    model = bench.model(name)
    found = conversion_training.material(model.tokenizer, own)
    sampler = {"gen_length": own["gen_length"]}
    if item["variant"] != AR:
        sampler["steps"] = own["denoising_steps"]
    values: dict[str, Any] = {}
    for begin in range(0, len(found.prompts), own["batch"]):
        prompts = found.prompts[begin : begin + own["batch"]]
        recording = dl.record(model, prompts, [dl.ReceivedAttention(), dl.ValueNorm()], **sampler)
        for row in range(len(prompts)):
            for key, pair in prompt_statistics(recording, row, own["eps"]).items():
                values.setdefault(key, []).append(pair)
    values["loss"] = [[loss, 1] for loss in row_losses(model, found, own["masks"])]
    return {**values, "tokens": item["steps"] * own["batch_size"] * found.length}


def cost(item: Item, settings: Settings) -> list[Cost]:
    """Training since the checkpoint before, and the denoising run and the loss of this one."""
    own, start = settings_of(item["model"], settings), item["model"]
    length = LENGTH if own["text"] == LANGUAGE else own["length"]
    causal = item["variant"] == AR
    passes = own["gen_length"] if causal else own["denoising_steps"]
    positions = LENGTH if own["text"] == LANGUAGE else own["prompt_length"] + own["gen_length"]
    rows = min(own["batch"], own["prompts"])
    batches = -(-own["prompts"] // rows)
    found = [
        Cost(passes * batches, rows, positions, start),
        Cost(own["prompts"], 1 if causal else own["masks"], length, start),
    ]
    before = max((step for step in steps_of(start, settings) if step < item["steps"]), default=0)
    if not causal and item["steps"] > before:
        micro = own["micro_batch_size"] or own["batch_size"]
        count = (item["steps"] - before) * own["batch_size"] // micro
        found.append(Cost(count, micro, length, start, backward=True))
    return found


SMALL: dict[str, Any] = {
    "models": ["toy-ar"], "variants": ["plain"], "seeds": 1, "steps": [0, 10, 30, 100], "text": LANGUAGE,
    "length": 128, "corpus": 20_000, "rate": 1e-3, "warm_up": 20, "batch_size": 32, "micro_batch_size": 0,
    "precision": "fp32", "compile": False, "save_minutes": 10.0, "prompts": 32, "prompt_length": 32, "batch": 16,
    "gen_length": 32, "denoising_steps": 16, "masks": 2, "eps": 3.0, "trained": "runs/conversion",
    "own": {
        "smollm2": {
            "steps": [0, 10, 30, 100, 300, 1000, 3000, 10_000], "text": "kjv", "rate": 1e-4, "warm_up": 10,
            "batch_size": 8, "precision": "bf16", "prompt_length": 24, "batch": 32, "gen_length": 16,
        },
    },
}  # fmt: skip
"""About a minute. `own` holds settings of one start in place of the shared ones."""

FULL: dict[str, Any] = {
    **SMALL, "models": ["smollm2"], "variants": ["plain", "sink", "gate"],
    "steps": [0, 1, 3, 10, 30, 100, 300, 1000, 1526], "text": "text", "length": 1024, "rate": 1e-4, "warm_up": 50,
    "batch_size": 64, "micro_batch_size": 16, "precision": "bf16", "compile": True, "prompts": 96,
    "prompt_length": 64, "batch": 32, "gen_length": 64, "denoising_steps": 64, "masks": 4, "own": {},
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
