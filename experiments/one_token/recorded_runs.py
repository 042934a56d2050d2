"""Denoising runs with received attention and value norms: what Figures 1 and 3 are computed from."""

from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs as attention_sinks
from dlm_lens.experiments.attention_sinks.problems import chat, problems_of
from dlm_lens.experiments.experiment import Cost
from dlm_lens.experiments.results import Item, Settings

SMALL: dict[str, Any] = {
    "task": "toy_arithmetic", "prompts": 16, "batch": 16, "chat": False, "sampler": {"gen_length": 32, "steps": 32},
}  # fmt: skip
"""Settings that both figures share. `task` is a shipped task, or a JSONL file with the field `prompt`."""

OWN: dict[str, dict[str, Any]] = {
    "smollm2": {**attention_sinks.OWN["smollm2"], "sampler": {"gen_length": 16, "steps": 16}}
}
"""A model that reads English answers English prompts, in its chat template."""


def record_prompts(item: Item, settings: Settings, bench: Any) -> tuple[Any, Any]:
    """The model of an item, and the `Recording` of its prompts."""
    import dlm_lens as dl

    model = bench.model(item["model"])
    prompts = chat(model, problems_of(settings, item["start"]), settings)
    reducers = [dl.ReceivedAttention(), dl.ValueNorm()]
    return model, dl.record(model, prompts, reducers, seed=0, **settings["sampler"])


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step."""
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    steps = settings["sampler"]["steps"]
    return [Cost(steps, rows, 32 + settings["sampler"]["gen_length"], item["model"])]
