"""Runs with their received attention, which all figures are made of."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlm_lens.experiments.attention_sinks.problems import chat, problems_of, starts
from dlm_lens.experiments.experiment import Cost
from dlm_lens.experiments.results import Item, Settings

SMALL: dict[str, Any] = {
    "models": ["toy", "toy-sink", "toy-ar"], "task": "toy_arithmetic", "prompts": 4, "batch": 4, "sampler": {},
    "eps": 3.0, "chat": False, "keep": None,
}  # fmt: skip
"""Settings that all figures share, with the embedded models."""

FULL: dict[str, Any] = {
    **SMALL,
    "models": ["GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B", "Gen-Verse/MMaDA-8B-MixCoT",
               "meta-llama/Llama-3.1-8B-Instruct"],
    "prompts": 32, "batch": 4, "sampler": {"gen_length": 128}, "chat": True,
}  # fmt: skip
"""With the paper's models. The paper says neither which prompts its figures show nor how many."""


class Watched(NamedTuple):
    """One prompt's run: received attention with one row, and which row of which run it is."""

    run: Any
    row: int
    received: dict[str, Any]


def items(settings: Settings) -> Iterator[Item]:
    """Model by model, some prompts at a time."""
    for model in settings["models"]:
        for start in starts(settings):
            yield {"model": model, "start": start}


def watch(item: Item, settings: Settings, bench: Any, queries: Sequence[str] = ("all",)) -> list[Watched]:
    """Denoise the item's prompts and take what every key receives, per class of queries.

    With `keep`, a directory, recordings are kept in it: another figure with the same settings reads them.
    """
    import dlm_lens as dl

    model = bench.model(item["model"])
    texts = chat(model, [problem.prompt for problem in problems_of(settings, item["start"])], settings)
    reducers = [dl.ReceivedAttention(queries=kind) for kind in queries]  # type: ignore[arg-type]
    to = None
    if settings["keep"]:
        name = item["model"].replace("/", "--")
        to = Path(settings["keep"]) / f"{name}-{item['start']}-{'-'.join(queries)}"
    recording = dl.record(model, texts, reducers, to=to, **settings["sampler"])
    found = {kind: dl.received_of(recording, kind) for kind in queries}  # type: ignore[arg-type]
    return [
        Watched(recording.run, row, {kind: one.part(rows=slice(row, row + 1)) for kind, one in found.items()})
        for row in range(len(texts))
    ]


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step."""
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    answer = int(settings["sampler"].get("gen_length", 32))
    prompt = 32 if not settings["chat"] else 128
    return [Cost(int(settings["sampler"].get("steps", answer)), rows, prompt + answer, item["model"])]


def rule(settings: Settings) -> Any:
    """Eq. 3 with the settings' eps, on received attention relative to uniform."""
    from dlm_lens.sinks import AboveMean

    return AboveMean(settings["eps"])


def numbers(values: Any, digits: int = 4) -> Any:
    """Tensors, arrays and numbers as JSON, rounded; NaN and infinities as None."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [numbers(value, digits) for value in values]
    if isinstance(values, float):
        return round(values, digits) if abs(values) < float("inf") else None
    return values
