"""What is measured at a trained network: validation loss, exact match, sinks."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlm_lens.experiments.one_token.language import TASKS, tests, toy, validation
from dlm_lens.experiments.one_token.training import Miniature, alone, trained

EPS = 3.0
"""Of Eq. 3 of 2510.15731: a sink receives this much more than the mean of the others, relative to uniform."""

SAMPLER: dict[str, Any] = {"gen_length": 32, "steps": 32}
"""One token per step, the length that the language needs; the rest is the family's own."""

MASKS = 4
"""Per sequence of the validation loss."""


VERSION = 1
"""Of this file's numbers; stored ones of another version are measured again."""


def measured(run: Miniature, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a run, which is trained and measured unless it is already; a second process waits for it.

    They are kept beside the checkpoint, so that tables which share a network measure it once.
    """
    directory = Path(settings["trained"]) / run.name
    asked = [VERSION, EPS, MASKS, SAMPLER, *(settings[name] for name in ("prompts", "watched", "validation"))]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]
    path = directory / f"measured-{digest}.json"
    with alone(directory):
        if not path.is_file():
            found = measure(trained(run, directory), settings)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(found), encoding="utf-8")
            os.replace(partial, path)
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return held


def measure(checkpoint: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers of one trained network, as JSON."""
    import dlm_lens as dl
    from dlm_lens.training.checkpoints import read_run

    model = dl.load(checkpoint)
    rows = settings["corpus"]
    right = {task: graded(model, tests(task, settings["prompts"], rows)) for task in TASKS}
    watched = [one.prompt for one in tests("A", settings["watched"], rows)]
    return {
        "loss": validation_loss(model, settings),
        "right": right,
        **sinks(model, watched, **SAMPLER),
        "training_seconds": round(read_run(checkpoint)["seconds"], 1),
    }


def validation_loss(model: Any, settings: Mapping[str, Any]) -> float:
    """The objective's loss on held-out text, in nats; the same sequences and masks for every network."""
    from dlm_lens.training.monitoring import evaluation_loss
    from dlm_lens.training.sources import take
    from dlm_lens.training.trainer import EVALUATION_SEED

    text = validation(settings["validation"], settings["corpus"])
    asked = replace(toy("train").DIFFUSION, logit_shift=None, low_discrepancy=True, group=MASKS)
    return evaluation_loss(
        model,
        take(text, len(text)),
        asked.for_model(model, settings["batch_size"]),
        length=text.length,
        samples=MASKS,
        batch_size=64,
        seed=EVALUATION_SEED,
    )


def graded(model: Any, examples: Sequence[Any]) -> list[int]:
    """1 for every example whose final answer is exact."""
    import dlm_lens as dl

    answers = dl.denoise(model, [one.prompt for one in examples], seed=0, **SAMPLER).answers
    is_correct = toy("language").is_correct
    return [int(is_correct(text, one.target)) for text, one in zip(answers, examples, strict=True)]


def sinks(model: Any, prompts: Sequence[Any], **sampler: Any) -> dict[str, Any]:
    """Value norms and shares of sinks, learned and found, over all steps of a run.

    Returns:
        moved, share of (prompt, layer, head) whose key with most attention is another at the last step than at the
        first (canvas and learned sinks); found, sinks by Eq. 3 per pattern; found_norm and found_other, mean value
        norm of those sinks and of others in the same state (masked or not); with learned sinks also norm, other and
        share, lists over layers.
    """
    import dlm_lens as dl
    from dlm_lens.probes import value_norms

    recording = dl.record(model, list(prompts), [dl.ReceivedAttention(), dl.ValueNorm()], seed=0, **sampler)
    found = dl.find_sinks(recording, dl.AboveMean(EPS))
    result: dict[str, Any] = {"moved": moved(found.scores), "found": float(found.is_sink.sum(-1).float().mean())}
    result |= {"found_norm": None, "found_other": None, "found_percentile": None}
    if bool(found.is_sink.any()):
        norms = value_norms(recording, found, alike="masked")
        if len(norms.sink):
            result["found_norm"], result["found_other"] = float(norms.sink.mean()), float(norms.other.mean())
            result["found_percentile"] = float(norms.percentile.mean())
    if recording.sinks:
        profile = value_norms(recording, "learned").profile
        for name, column in (("norm", "norm_sink"), ("other", "norm_other"), ("share", "share")):
            result[name] = [round(value, 5) for value in profile[column]]
    return result


def moved(scores: Any) -> float:
    """Share of (prompt, layer, head) whose largest key differs between the first and the last step."""
    main = scores.nan_to_num(nan=-1.0).argmax(-1)
    return float((main[0] != main[-1]).double().mean())
