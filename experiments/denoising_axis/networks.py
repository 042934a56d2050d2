"""The items of the scripts here, and the network that a model's name stands for: loaded, or a conversion."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks.problems import starts
from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.results import Item, Results, Settings

CONVERTED = "-converted"
"""After the name of an AR model: its plain conversion (`beyond-conversion`) after `conversion_steps` steps."""

SETTINGS: dict[str, Any] = {"conversions": "runs/conversion", "conversion_steps": 300}
"""Where conversions are kept, or trained where they are not there; and their steps."""


def items(settings: Settings) -> Iterator[Item]:
    """Each model, a batch of prompts at a time."""
    for model in settings["models"]:
        for start in starts(settings_of(settings, model)):
            yield {"model": model, "start": start}


def prompts_of(results: Results, model: str, name: str) -> list[Any]:
    """A value of every prompt of a model, over its items."""
    return [one for record in results.records if record.item["model"] == model for one in record.value[name]]


def model_named(name: str, settings: Settings, bench: Any) -> Any:
    """The model; "toy-ar-converted" is trained, or its training goes on, where its weights are not kept yet.

    Args:
        name: of the settings' models.
        settings: of the model, with `SETTINGS`.
        bench: loads it.
    """
    if not name.endswith(CONVERTED):
        return bench.model(name)
    return converted(name.removesuffix(CONVERTED), settings["conversion_steps"], settings, bench)


def converted(parent: str, steps: int, settings: Settings, bench: Any) -> Any:
    """The plain conversion of an AR model after a number of steps, as `beyond-conversion` trains it."""
    from dlm_lens.experiments.attention_sinks import beyond_conversion, conversion_training

    own = {**settings_of(beyond_conversion.SMALL, parent), "trained": settings["conversions"]}
    return bench.model(str(conversion_training.kept(parent, "plain", 0, steps, own)))
