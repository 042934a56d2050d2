"""The paper's settings: train a config with `dlm_lens.training`, evaluate it as the table's cells say."""

import math
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dlm_lens.experiments.experiment import Cost, Table
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.option_values import process_of_run

SFT = "sft-gsm8k"


def items(settings: Settings) -> Iterator[Item]:
    """Per config and seed: the training, then every cell; GSM8K after the fine-tuning, if there is data for it."""
    for seed in range(settings["seeds"]):
        for config in settings["configs"]:
            yield {"config": config, "seed": seed, "task": "train"}
            yield from ({"config": config, "seed": seed, "task": task} for task in settings["tasks"])
            if settings["sft"]:
                yield {"config": config, "seed": seed, "task": SFT}
                yield {"config": config, "seed": seed, "task": f"{_table(settings)}/gsm8k"}


def run(item: Item, settings: Settings) -> dict[str, Any]:
    """One training, or one cell.

    Raises:
        ValueError: a training among several processes; give those to `dlm-lens train` first.
    """
    if item["task"] in ("train", SFT):
        return {"checkpoint": str(_trained(item, settings, fine_tuned=item["task"] == SFT))}
    from dlm_lens.evaluation import evaluate, find_preset

    preset = find_preset(item["task"])
    checkpoint = _trained(item, settings, fine_tuned=item["task"].endswith("/gsm8k"))
    result = evaluate(str(checkpoint), limit=settings["limit"], **preset.settings())
    wanted = (score for score in result.scores if (score.task, score.name) == (preset.task, preset.metric))
    score = next(wanted, result[preset.task])
    error = None if math.isnan(score.standard_error) else score.standard_error
    return {"metric": score.name, "value": score.value, "stderr": error, "n": score.n}


def training_settings(item: Item, settings: Settings, *, fine_tuned: bool = False) -> Any:
    """The settings of a training, with its own output below `trained`."""
    from dlm_lens.training.config_files import read_settings

    config, given = _config(item, settings)
    first = read_settings(config, given)
    if not fine_tuned:
        return first
    checkpoint = f"{first.output}/checkpoint-{first.total_steps()}"
    given = [f"output={first.output}-sft", f"model.start={checkpoint}", f"data.path={settings['sft']}"]
    return read_settings(SFT, [f"seed={item['seed']}", *given])


def _config(item: Item, settings: Settings) -> tuple[str, list[str]]:
    """The config of a training, and the settings in which it differs."""
    output = f"{settings['trained']}/{item['config']}-seed{item['seed']}"
    given = [f"seed={item['seed']}", *settings["overrides"], f"output={output}"]
    return item["config"], given


def _trained(item: Item, settings: Settings, *, fine_tuned: bool) -> Path:
    from dlm_lens.training.checkpoints import last_checkpoint
    from dlm_lens.training.trainer import run_training

    wanted = training_settings(item, settings, fine_tuned=fine_tuned)
    found = last_checkpoint(wanted.output)
    if found is not None and _finished(found, wanted, fine_tuned):
        return found
    if process_of_run()[1] > 1:
        config, given = _config(item, settings)
        command = " --set ".join([f"accelerate launch ... -m dlm_lens.cli train {config}", *given])
        raise ValueError(
            f"{wanted.output} holds no finished training, and the processes of an experiment take an item each; "
            f"train with `{command}`, then start this command again"
        )
    made = run_training(wanted)
    if made is None:
        raise RuntimeError(f"{wanted.output} holds no checkpoint after training; start the same command again")
    return made


def _finished(checkpoint: Path, wanted: Any, fine_tuned: bool) -> bool:
    """Whether no step is left; how many epochs have, the checkpoint says, and one that does not is gone on with.

    Raises:
        ValueError: no step is left of a training with other settings or data; of an unfinished one the trainer says
            it.
    """
    from dlm_lens.training.checkpoints import read_run, step_of

    record = read_run(checkpoint)
    steps = wanted.total_steps() if wanted.epochs is None else record["total_steps"]
    if steps is None or step_of(checkpoint) < steps:
        return False
    changed = wanted.changes(record["settings"]) if record["settings"] else []
    changed = changed or _changes_of_data(record["data"], wanted)
    # A fine-tuning begins with the checkpoint beside it, wherever `trained` was then.
    if changed := [one for one in changed if not (fine_tuned and one.startswith("model.start "))]:
        raise ValueError(
            f"{checkpoint} was trained with other settings: {'; '.join(changed)}. Give the old ones, or another "
            "directory with --set trained=DIR"
        )
    return True


def _changes_of_data(before: Mapping[str, Any], wanted: Any) -> list[str]:
    """In what the training files differ from those of a checkpoint; nothing where either are not known."""
    from dlm_lens.training.data import data_record
    from dlm_lens.training.dataset_files import files_of, read_dataset
    from dlm_lens.training.settings import differences

    if not before or not files_of(os.path.expanduser(wanted.data.path)):
        return []
    return differences(before, data_record(read_dataset(wanted.data), wanted.data), "data")


def cost(item: Item, settings: Settings) -> list[Cost]:
    """Of a training; evaluation is small beside it and not counted."""
    if item["task"] != "train":
        return []

    wanted = training_settings(item, settings)
    passes = wanted.total_steps() * wanted.batch_size // wanted.micro_batch_size
    predicted = wanted.objective.predicted_share
    return [Cost(passes, wanted.micro_batch_size, wanted.data.length, wanted.model.start, True, predicted)]


@cache
def _names() -> Mapping[str, str]:
    return {
        "arc_easy": "ARC-e", "arc_challenge": "ARC-c", "hellaswag": "HellaSwag", "piqa": "PIQA", "race": "RACE",
        "social_iqa": "SIQA", "lambada_standard": "LAMBADA", "gsm8k": "GSM8K",
    }  # fmt: skip


def cells(table: str, benchmarks: tuple[str, ...]) -> list[str]:
    """Presets of a table's columns, without GSM8K, which needs the fine-tuning."""
    tasks = {name: task for task, name in _names().items()}
    return [f"one-token/{table}/{tasks[name]}" for name in benchmarks if name != "GSM8K"]


def table(results: Results) -> Table:
    """The evaluated cells, in the form of the paper's table."""
    tasks = list(results.settings["tasks"])
    tasks += [f"{_table(results.settings)}/gsm8k"] if results.settings["sft"] else []
    rows = []
    for config in results.settings["configs"]:
        for seed in range(results.settings["seeds"]):
            found = {record.item["task"]: record.value for record in results.where(config=config, seed=seed)}
            rows.append([f"{config}, seed {seed}", *(_cell(found.get(task)) for task in tasks)])
    return Table("percent, with standard errors", ["", *(_names()[task.rsplit("/", 1)[1]] for task in tasks)], rows)


def _cell(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "-"
    error = "" if value["stderr"] is None else f" ({100 * value['stderr']:.2f})"
    return f"{100 * value['value']:.2f}{error}"


def _table(settings: Settings) -> str:
    return str(settings["tasks"][0]).rsplit("/", 1)[0]
