"""Twins of the embedded models: equal networks and data, other seeds; trained in the run and stored.

Network 0 of a kind is the shipped model, network s its twin with the seed s of initial weights, order of the data
and masks. A twin is trained for `twin_steps` steps, fewer than the 10,000 of the shipped models. A kind that is
not shipped is trained too, its network 0 with the seed 0.
"""

import os
from pathlib import Path
from typing import Any

from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.results import Item, Settings

SETTINGS: dict[str, Any] = {"networks": 1, "twin_steps": 3000, "trained": "runs/twins"}
"""Networks of each embedded kind (1: the shipped model alone), steps of a twin, and where twins are stored."""


NOT_SHIPPED = ("toy-blocks", "toy-uniform")
"""Kinds of `experiments.toy` that the package does not hold: toy with block diffusion, and with uniform noise."""


def networks_of(model: str, settings: Settings) -> range:
    """The networks of a model: 0 is the model itself; only embedded models have twins.

    Raises:
        ValueError: `networks` is below 1.
    """
    from dlm_lens.adapters import embedded_models

    count = settings.get("networks", 1)
    if count < 1:
        raise ValueError(f"networks is {count}; it must be at least 1, the model itself")
    return range(count if model in embedded_models() else 1)


def twin_steps(settings: Settings, model: str) -> int:
    """The training steps of a model's twins."""
    steps: int = settings_of(settings, model)["twin_steps"]
    return steps


def model_of(item: Item, settings: Settings, bench: Any) -> Any:
    """The model of an item, its twin with the seed `item["network"]` where that is above 0 or it is not shipped."""
    number, name = item.get("network", 0), item["model"]
    return bench.model(str(trained_twin(name, number, settings)) if number or name in NOT_SHIPPED else name)


def trained_twin(model: str, seed: int, settings: Settings) -> Path:
    """The directory of a twin, which is trained (or its training resumed) where it is not complete.

    Raises:
        ValueError: several processes would train the twin.
    """
    from dlm_lens.experiments.one_token.toy_language import toy
    from dlm_lens.files.locks import alone

    directory = Path(settings["trained"]) / f"{model}-{settings['twin_steps']}steps-seed{seed}"
    if (directory / "model.safetensors").exists():
        return directory
    with alone(directory):
        if not (directory / "model.safetensors").exists():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError(
                    f"{directory} is not trained yet, and each process of an experiment computes other items; run "
                    "the command once in one process, then under torchrun"
                )
            train = toy("train")
            train.train(train.Settings(model, seed=seed, steps=settings["twin_steps"], compiled=False), directory)
    return directory
