"""Twins of the embedded models: equal networks and data, other seeds; trained in the run and stored.

Network 0 of a kind is the shipped model, network s its twin with the seed s of initial weights, order of the data
and masks. A twin is trained for `twin_steps` steps, fewer than the 10,000 of the shipped models. A kind that is
not shipped is trained too, its network 0 with the seed 0.

Further-trained twins stand in place of instruct models. "toy+sft" is `toy` after supervised fine-tuning by
`dlm_lens.training`: the prompt is kept, the answer is masked. "toy+pretraining" is the control: `toy` after as many
further steps of its original objective. Both see the text that `toy` was trained on.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.results import Item, Settings
from dlm_lens.option_values import process_of_run

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
            _check_alone(directory)
            train = toy("train")
            train.train(train.Settings(model, seed=seed, steps=settings["twin_steps"], compiled=False), directory)
    return directory


OBJECTIVES: dict[str, dict[str, Any]] = {"+sft": {"whole_share": 0.0}, "+pretraining": {}}
"""Changes to the objective of `experiments/toy`, which masks the prompt too in 30% of its rows."""

ROWS = 20_000
"""Sequences of the training text."""


def base_and_tuning(name: str) -> tuple[str, str]:
    """The base model of a name, and the suffix of its twin ("" for none)."""
    for ending in OBJECTIVES:
        if name.endswith(ending):
            return name.removesuffix(ending), ending
    return name, ""


class FinetunedBench:
    """A `Bench` that also loads twins, and trains a twin first where it is not stored.

    Args:
        bench: of the run.
        settings: `trained` (directory), `sft_steps`, `sft_rate`, `sft_batch`, `sft_seed`.
    """

    def __init__(self, bench: Any, settings: Settings) -> None:
        self.bench, self.settings = bench, settings

    def model(self, name: str) -> Any:
        """The model of that name, or the twin of that name."""
        base, ending = base_and_tuning(name)
        return self.bench.model(str(trained(base, ending, self.settings)) if ending else name)

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """As `Bench.once`."""
        return self.bench.once(key, compute)


def trained(base: str, ending: str, settings: Settings) -> Path:
    """The last checkpoint of a twin, which is trained (or its training resumed) where it is not complete.

    Raises:
        ValueError: the base is not an embedded DLM, or several processes would train the twin.
    """
    from dlm_lens.experiments.one_token.toy_language import toy, training_text
    from dlm_lens.files.locks import alone
    from dlm_lens.training import MaskedDiffusionTrainer
    from dlm_lens.training.checkpoints import last_checkpoint, step_of

    _check_base(base, ending)
    directory = Path(settings["trained"]) / _name(base, ending, settings)
    with alone(directory):
        found = last_checkpoint(directory)
        if found is None or step_of(found) < settings["sft_steps"]:
            _check_alone(base + ending)
            import dlm_lens as dl

            corpus, _ = training_text(ROWS)
            trainer = MaskedDiffusionTrainer(
                dl.load(base), training_settings(ending, settings, directory), corpus,
                tokenizer=toy("tokenizer").build_tokenizer(),
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=True)
            found = trainer.last_checkpoint
    if found is None or step_of(found) < settings["sft_steps"]:
        raise RuntimeError(f"{directory} ended before step {settings['sft_steps']}; start the same command again")
    return found


def training_settings(ending: str, settings: Settings, directory: Path) -> Any:
    """The trainer's settings of a twin."""
    from dlm_lens.experiments.one_token.toy_language import toy
    from dlm_lens.training import DataSettings, Optimisation, TrainingSettings

    rate = settings["sft_rate"]
    return TrainingSettings(
        output=str(directory),
        data=DataSettings(length=toy("tokenizer").SEQUENCE_LENGTH),
        objective=replace(toy("train").DIFFUSION, **OBJECTIVES[ending]),
        optimisation=Optimisation(
            optimizer="muon", rate=rate, min_rate=rate / 10, warm_up=0.05, betas=(0.9, 0.98), weight_decay=0.1,
            other_weight_decay=0.01,
        ),
        batch_size=settings["sft_batch"],
        micro_batch_size=settings["sft_batch"],
        steps=settings["sft_steps"],
        seed=settings["sft_seed"],
        precision="fp32",
        save_steps=100,
        save_minutes=1.0,
        keep=1,
        log_steps=50,
        report_to=(),
    )  # fmt: skip


def _name(base: str, ending: str, settings: Mapping[str, Any]) -> str:
    values = {name: settings[name] for name in ("sft_steps", "sft_rate", "sft_batch", "sft_seed")}
    digest = hashlib.sha256(json.dumps({**values, "rows": ROWS}, sort_keys=True).encode()).hexdigest()[:8]
    return f"{base}{ending}-{settings['sft_steps']}steps-{digest}"


def _check_base(base: str, ending: str) -> None:
    from dlm_lens.adapters import embedded_models

    if base not in embedded_models() or base.endswith("-ar"):
        raise ValueError(
            f"{base}{ending}: only embedded DLMs have twins, trained on their language; name a checkpoint of "
            "the instruct model instead, as in --models BASE,INSTRUCT"
        )


def _check_alone(network: str | Path) -> None:
    if process_of_run()[1] > 1:
        raise ValueError(
            f"{network} is not trained yet, and each process of an experiment computes other items; run "
            "the command once in one process, then under torchrun"
        )
