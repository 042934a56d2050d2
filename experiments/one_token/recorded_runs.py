"""Denoising runs with received attention and value norms, of embedded, converted and other models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dlm_lens.experiments.attention_sinks import recorded_runs as attention_sinks
from dlm_lens.experiments.attention_sinks import twin_networks
from dlm_lens.experiments.attention_sinks.problems import chat, problems_of
from dlm_lens.experiments.experiment import Cost
from dlm_lens.experiments.intervals import Interval, over_networks
from dlm_lens.experiments.one_token.miniature import VARIANTS, Miniature, trained
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.files.locks import alone

SMALL: dict[str, Any] = {
    "task": "toy_arithmetic", "prompts": 16, "batch": 16, "chat": False, "sampler": {"gen_length": 32, "steps": 32},
    **twin_networks.SETTINGS,
    "conversions": {"steps": 150, "batch_size": 16, "kept": "runs/one-token"},
}  # fmt: skip
"""Settings that all share. `task` is a shipped task, or a JSONL file with the field `prompt`. `conversions` says
how the networks of a `CONVERTED` model are trained and where they are kept; `networks` is how many there are."""

OWN: dict[str, dict[str, Any]] = {
    "smollm2": {**attention_sinks.OWN["smollm2"], "sampler": {"gen_length": 16, "steps": 16}}
}
"""A model that reads English answers English prompts, in its chat template."""

CONVERTED = "converted-"
"""Models of this name and a variant of `miniature` are toy-ar, converted and trained as in Tables 1 and 3 to 5."""


def items(settings: Settings) -> Iterator[Item]:
    """As in `attention_sinks.recorded_runs`, with the seeds of converted models as networks."""
    return attention_sinks.items(settings, networks_of)


def networks_of(model: str, settings: Settings) -> range:
    """The networks of a model; those of a converted one are its seeds.

    Raises:
        ValueError: a number of networks below 1.
    """
    if not model.startswith(CONVERTED):
        return twin_networks.networks_of(model, settings)
    if settings["networks"] < 1:
        raise ValueError(f"networks is {settings['networks']}; it must be at least 1")
    return range(settings["networks"])


def model_of(item: Item, settings: Settings, bench: Any) -> Any:
    """The network of an item, trained first where it is a conversion that is not there yet."""
    if not item["model"].startswith(CONVERTED):
        return twin_networks.model_of(item, settings, bench)
    run = conversion(item, settings)
    directory = Path(settings["conversions"]["kept"]) / run.name
    with alone(directory):
        return bench.model(str(trained(run, directory)))


def conversion(item: Item, settings: Settings) -> Miniature:
    """The settings of a converted network; those of the tables, which train it too."""
    given = settings["conversions"]
    variant = item["model"].removeprefix(CONVERTED)
    return Miniature(variant, item["network"], "toy-ar", given["steps"], given["batch_size"])


def record_prompts(item: Item, settings: Settings, bench: Any) -> tuple[Any, Any]:
    """The model of an item, and the `Recording` of its prompts."""
    import dlm_lens as dl

    model = model_of(item, settings, bench)
    prompts = chat(model, problems_of(settings, item["start"]), settings)
    reducers = [dl.ReceivedAttention(), dl.ValueNorm()]
    return model, dl.record(model, prompts, reducers, seed=0, **settings["sampler"])


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step; the first item of a converted network includes its training."""
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    steps, positions = settings["sampler"]["steps"], 32 + settings["sampler"]["gen_length"]
    if not item["model"].startswith(CONVERTED):
        return [Cost(steps, rows, positions, item["model"])]
    given = settings["conversions"]
    training = [Cost(given["steps"], given["batch_size"], 64, "toy-ar", backward=True)] if not item["start"] else []
    return [Cost(steps, rows, positions, "toy-ar"), *training]


def title(model: str) -> str:
    """A model as tables and figures name it."""
    if model.startswith(CONVERTED):
        return f"converted toy-ar, {VARIANTS[model.removeprefix(CONVERTED)].label}"
    return model


def by_network(results: Results, model: str, name: str) -> Float[np.ndarray, "network prompt *axes"]:
    """One value of every prompt of every network, None as NaN."""
    return np.asarray(attention_sinks.per_network(results, name, model=model), dtype=float)


def over(top: Float[np.ndarray, "network prompt"], bottom: Any = 1.0, *, bounds: tuple[float, float]) -> Interval:
    """Ratio of sums over prompts, mean over networks; prompts where either is not known are left out."""
    both = np.broadcast_arrays(top, np.asarray(bottom, float))
    known = np.isfinite(both[0]) & np.isfinite(both[1])
    tops, bottoms = (np.where(known, values, 0.0) for values in both)
    return over_networks(list(zip(tops.tolist(), bottoms.tolist(), strict=True)), bounds=bounds)


def inner(values: Float[np.ndarray, "network prompt layer"]) -> Float[np.ndarray, "network prompt"]:
    """Mean over the layers between the first and the last, as the paper's Figure 3 counts them."""
    return values[..., 1:-1].mean(-1)


def on_scale(results: Results) -> list[str]:
    """A note where AR models are beside diffusion models."""
    names = [model for model in results.models if results.causal.get(model)]
    if not names:
        return []
    return [
        f"{', '.join(names)}: an AR model. Its sinks are found on the scale relative to uniform, as those of the "
        "others, unless column sums are named; on column sums an AR model has other sinks "
        "([results](results.md) has both scales), so that nothing here compares AR with diffusion models."
    ]
