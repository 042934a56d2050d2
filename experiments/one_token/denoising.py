"""What Figures 1 and 3 share: models denoise prompts, and received attention and value norms are recorded."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks.problems import chat, problems_of, starts
from dlm_lens.experiments.experiment import Cost
from dlm_lens.experiments.results import Item, Settings

SMALL: dict[str, Any] = {
    "task": "toy_arithmetic", "prompts": 16, "batch": 16, "chat": False, "sampler": {"gen_length": 32, "steps": 32},
}  # fmt: skip
"""A shipped task; else `task` is a JSONL file with `prompt`."""


def items(settings: Settings) -> Iterator[Item]:
    """Model by model, some prompts at a time."""
    for model in settings["models"]:
        for start in starts(settings):
            yield {"model": model, "start": start}


def recorded(item: Item, settings: Settings, bench: Any) -> tuple[Any, Any]:
    """The model of an item, and the Recording of its prompts."""
    import dlm_lens as dl

    model = bench.model(item["model"])
    prompts = chat(model, [problem.prompt for problem in problems_of(settings, item["start"])], settings)
    reducers = [dl.ReceivedAttention(), dl.ValueNorm()]
    return model, dl.record(model, prompts, reducers, seed=0, **settings["sampler"])


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step."""
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    steps = settings["sampler"]["steps"]
    return [Cost(steps, rows, 32 + settings["sampler"]["gen_length"], item["model"])]
