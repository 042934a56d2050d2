"""Metrics of a trained network: validation loss, exact match, sinks."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlm_lens.experiments.one_token import text_metrics
from dlm_lens.experiments.one_token.miniature import Miniature, trained
from dlm_lens.experiments.one_token.text_metrics import EPS, sink_numbers
from dlm_lens.experiments.one_token.toy_language import TASKS, tests, toy, validation
from dlm_lens.files.atomic_writes import write_file
from dlm_lens.files.locks import alone

SAMPLER: dict[str, Any] = {"gen_length": 32, "steps": 32}
"""One token per step, and the answer length of the language; other settings are the family's."""

MASKS = 4
"""Masks per sequence of the validation loss."""

GROUP = 16
"""Sequences of a group, whose mean loss is stored: enough groups for an interval over held-out text."""

VERSION = 2
"""Version of the stored metrics; those of another version are computed again."""


def measured(run: Miniature, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a run, which is trained and measured first where needed; a second process waits for it.

    They are stored in the run's directory, so that tables which share a network measure it once.
    """
    directory = Path(settings["trained"]) / run.name
    request = [VERSION, EPS, MASKS, SAMPLER, *(settings[name] for name in ("prompts", "watched", "validation"))]
    if run.text:
        request = text_metrics.requested(settings)
    digest = hashlib.sha256(json.dumps(request).encode()).hexdigest()[:8]
    path = directory / f"measured-{digest}.json"
    with alone(directory):
        if not path.is_file():
            checkpoint = trained(run, directory)
            found = text_metrics.measure(checkpoint, settings) if run.text else measure(checkpoint, settings)
            write_file(path, json.dumps(found))
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return held


def measure(checkpoint: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All metrics of one trained network, as JSON values."""
    import dlm_lens as dl
    from dlm_lens.training.checkpoints import read_run

    model = dl.load(checkpoint)
    rows = settings["corpus"]
    right = {task: graded(model, tests(task, settings["prompts"], rows)) for task in TASKS}
    watched = [one.prompt for one in tests("A", settings["watched"], rows)]
    losses = validation_losses(model, settings)
    return {
        "loss": sum(losses) / len(losses),
        "losses": [round(loss, 6) for loss in losses],
        "right": right,
        **sinks(model, watched, **SAMPLER),
        "training_seconds": round(read_run(checkpoint)["seconds"], 1),
    }


def validation_losses(model: Any, settings: Mapping[str, Any]) -> list[float]:
    """The objective's loss on groups of held-out sequences, in nats; all networks get the same sequences and masks.

    Group g of G has the sequences g, g + G, ..., so that each has the three tasks in the text's proportions.
    """
    from dlm_lens.training.losses import evaluation_loss
    from dlm_lens.training.sources import take
    from dlm_lens.training.trainer import EVALUATION_SEED

    text = validation(settings["validation"], settings["corpus"])
    examples = take(text, len(text))
    groups = max(1, len(examples) // GROUP)
    # The rows of a group share the trainer's spread of masks over a batch; each has `MASKS` of them.
    objective = replace(toy("train").DIFFUSION, logit_shift=None, low_discrepancy=True, group=MASKS)
    prepared = objective.for_model(model, settings["batch_size"])
    return [
        evaluation_loss(
            model,
            examples[group::groups],
            prepared,
            length=text.length,
            samples=MASKS,
            batch_size=64,
            seed=EVALUATION_SEED + group,
        )
        for group in range(groups)
    ]


def graded(model: Any, examples: Sequence[Any]) -> list[int]:
    """1 for each example with an exact final answer, else 0."""
    import dlm_lens as dl

    answers = dl.denoise(model, [one.prompt for one in examples], seed=0, **SAMPLER).answers
    is_correct = toy("language").is_correct
    return [int(is_correct(text, one.target)) for text, one in zip(answers, examples, strict=True)]


def sinks(model: Any, prompts: Sequence[Any], **sampler: Any) -> dict[str, Any]:
    """The `sink_numbers` of a run."""
    import dlm_lens as dl

    recording = dl.record(model, list(prompts), [dl.ReceivedAttention(), dl.ValueNorm()], seed=0, **sampler)
    return sink_numbers(recording)
