"""Table 1 on generative tasks of lm-evaluation-harness, such as GSM8K and HumanEval."""

import logging
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dlm_lens.experiments.results import Item, Settings
from dlm_lens.recording import ReceivedAttention, RecordingSet
from dlm_lens.sinks import Received, received_of

logger = logging.getLogger(__name__)


def correct_documents(model: Any, mask: Any, item: Item, settings: Settings) -> list[bool]:
    """Which documents were answered correctly, by the task's own metric.

    The preset of Table 1 for the item's model is used where there is one, unless the setting `presets` is False.
    The setting `sampler` overrides the preset.

    Raises:
        ImportError: lm-evaluation-harness is not installed.
        ValueError: an unknown task, a task that executes code without permission, fewer documents than `prompts`,
            or a task without a metric per document.
    """
    stop = min(item["start"] + settings["batch"], settings["prompts"])
    hooks = () if mask is None else (mask,)
    preset = preset_of_run(item["model"], settings)
    samples = _answered(model, preset, range(item["start"], stop), settings, hooks=hooks, seed=item["seed"])
    return read_correct(samples, preset.metric if preset else "")


def received_in_documents(model: Any, name: str, settings: Settings) -> Iterator[Received]:
    """Received attention in unmasked runs of the first `calibration` documents, one after the other.

    Raises:
        ImportError: lm-evaluation-harness is not installed.
        ValueError: as `correct_documents`.
    """
    preset = preset_of_run(name, settings)
    documents = range(min(settings["calibration"], settings["prompts"]))
    with TemporaryDirectory() as folder:
        _answered(model, preset, documents, settings, record=ReceivedAttention(), record_to=folder)
        (task,) = filter(Path.is_dir, Path(folder).iterdir())
        yield from map(received_of, RecordingSet(task))


def preset_of_run(model: str, settings: Settings) -> Any:
    """The preset of Table 1 for a model of a run; None if there is none, or the run wants none."""
    if not settings.get("presets", True):
        return None
    preset = preset_of(model, settings["task"])
    if preset is None:
        logger.warning(
            "%s has no preset of Table 1 for %s (presets go by the hub name): no chat template, the task's own "
            "worked examples, and the sampler of the settings", model, settings["task"],
        )  # fmt: skip
    return preset


def _answered(
    model: Any, preset: Any, documents: range, settings: Settings, **options: Any
) -> list[dict[str, Any]]:
    """The harness's samples of some documents; `options` are those of `HarnessLM`."""
    from lm_eval.evaluator import simple_evaluate

    from dlm_lens.evaluation.evaluation import check_code, find_tasks
    from dlm_lens.evaluation.harness import HarnessLM

    task = preset.task if preset else settings["task"]
    manager = find_tasks([task])
    check_code(manager, [task], settings["confirm_run_unsafe_code"])
    # At the first item: the harness would stop at the first document that is not there, after hours.
    count = _documents(task)
    if settings["prompts"] > count:
        raise ValueError(f"prompts is {settings['prompts']}; {task} has 1 to {count}")
    generation = {**(asdict(preset.generation) if preset else {}), **settings["sampler"]}
    lm = HarnessLM(
        model, generation=generation or None, add_bos=bool(preset and preset.add_bos),
        max_length=preset.max_length if preset else None, **options,
    )  # fmt: skip
    results = simple_evaluate(
        model=lm, tasks=[task], task_manager=manager, samples={task: list(documents)},
        num_fewshot=preset.num_fewshot if preset else None, apply_chat_template=bool(preset and preset.chat),
        fewshot_as_multiturn=not preset or preset.multiturn, bootstrap_iters=0,
        confirm_run_unsafe_code=settings["confirm_run_unsafe_code"],
    )  # fmt: skip
    samples: list[dict[str, Any]] = (results or {})["samples"][task]
    return samples


@cache
def _documents(task: str) -> int:
    from dlm_lens.evaluation.evaluation import find_tasks

    (found,) = find_tasks([task]).load(task)["tasks"].values()
    return len(found.eval_docs)


def preset_of(model: str, task: str) -> Any:
    """The preset of Table 1 for this checkpoint and task; None if there is none."""
    from dlm_lens.evaluation import list_presets

    for preset in list_presets("attention-sinks/table1/"):
        if preset.model == model and preset.name.endswith(f"/{task}"):
            return preset
    return None


def read_correct(samples: list[dict[str, Any]], metric: str) -> list[bool]:
    """Right or wrong per document, in the order of the documents.

    Args:
        samples: of the harness, one per document and filter.
        metric: "name (filter)", or empty for the task's first.

    Raises:
        ValueError: the samples do not have that metric.
    """
    name, _, kept = metric.partition(" (")
    kept = kept.rstrip(")")
    name = name or str(samples[0]["metrics"][0])
    mine = [sample for sample in samples if not kept or sample.get("filter") == kept]
    mine = [sample for sample in mine if sample.get("filter") == mine[0].get("filter")] if mine else []
    if not mine or name not in mine[0]:
        raise ValueError(f"the harness's samples have no {metric or name!r}; they have {', '.join(samples[0])}")
    return [bool(sample[name]) for sample in sorted(mine, key=lambda sample: int(sample["doc_id"]))]
