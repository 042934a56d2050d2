"""Settings that differ between the models of a run: a mapping model -> value, with "" for all other models.

`{"": "toy_arithmetic", "smollm2": "english_arithmetic"}` gives smollm2 English problems and the rest the toy
language's. Items, runs and costs see the plain value of their own model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dlm_lens.experiments.results import Item, Settings

OTHERS = ""
"""The key of all models that a mapping does not name."""

BY_MODEL = (
    "task", "chat", "sampler", "prompts", "batch", "calibration", "variants", "columns", "networks", "keep",
    "twin_steps", "steps", "text", "length", "rate", "warm_up", "batch_size", "micro_batch_size", "precision",
    "prompt_length", "gen_length", "denoising_steps", "conversion_steps",
)  # fmt: skip
"""The settings that may be such a mapping."""


def is_by_model(name: str, value: Any) -> bool:
    """Whether a setting's value is a mapping from models to values."""
    return name in BY_MODEL and isinstance(value, Mapping) and OTHERS in value


def settings_of(settings: Settings, model: str) -> dict[str, Any]:
    """The settings of one model: every mapping is replaced by the model's value."""
    return {
        name: value.get(model, value[OTHERS]) if is_by_model(name, value) else value
        for name, value in settings.items()
    }


def settings_of_item(settings: Settings, item: Item) -> Settings:
    """The settings of an item's model."""
    return settings_of(settings, item["model"]) if "model" in item else settings


def with_own(
    settings: Settings, own: Mapping[str, Settings], given: Sequence[str], models: Sequence[str]
) -> dict[str, Any]:
    """Settings in which models have their own defaults.

    Args:
        settings: by name, some of them mappings.
        own: model -> its own default of some settings.
        given: the settings that the user gave; they are kept.
        models: of the run; a default of another model is left out.
    """
    found = dict(settings)
    for name in set(settings) - set(given):
        theirs = {model: own[model][name] for model in models if name in own.get(model, ())}
        theirs = {model: value for model, value in theirs.items() if value != settings[name]}
        if theirs:
            found[name] = {OTHERS: settings[name], **theirs}
    return found


def check_models(name: str, value: Mapping[str, Any], models: Sequence[str]) -> None:
    """Refuse a mapping that names a model outside the run.

    Raises:
        ValueError: naming the model.
    """
    for model in value:
        if model != OTHERS and model not in models:
            raise ValueError(
                f"{name} has a value for {model!r}, which is not one of the models ({', '.join(models)}); "
                'leave it out, or add it to models ("" stands for all models that are not named)'
            )
