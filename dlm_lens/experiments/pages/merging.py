"""`merge_results`: the results of one experiment for further models, in one directory with those that are there."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dlm_lens.experiments.experiment import Experiment
from dlm_lens.experiments.model_settings import BY_MODEL, OTHERS, settings_of
from dlm_lens.experiments.results import Results, ResultsFile
from dlm_lens.experiments.runner import load_results


def merge_results(
    experiment: Experiment, directories: Sequence[str | Path], out: str | Path, *, replace: bool = False
) -> Results:
    """Write the results of several runs, each of other models, as if one run had computed them.

    An item's value depends on its model's settings and weights alone: the records are taken over as they are.

    Args:
        experiment: of all runs.
        directories: of the runs; their models are listed in this order.
        out: a directory without results.
        replace: take a model that is in several runs from the last of them, such as one that was run again with
            other settings; its place is that in the first.

    Raises:
        FileNotFoundError: a directory holds no results.
        ValueError: a model is in two runs, settings differ that cannot be given by model, or `out` has results.
    """
    runs = [load_results(experiment, Path(directory)) for directory in directories]
    config = _merged(experiment, runs, replace)
    holder = {model: number for number, run in enumerate(runs) for model in run.settings["models"]}
    if list(Path(out).glob("*.jsonl")):
        raise ValueError(f"{out} holds results already; choose another directory")
    # Model by model, in the order in which a run computes them; a session is noted before what it computed.
    for number, group in groupby(config["settings"]["models"], holder.__getitem__):
        run, models = runs[number], list(group)
        with ResultsFile(Path(out), config, run.sessions[-1]) as file:
            for name, digest in run.weights.items():
                if _model_of(name, run.settings["models"]) in (None, *models):
                    file.note_weights(name, digest, run.is_causal(name))
            for model in models:
                for record in run.where(model=model):
                    file.append(record)
    return load_results(experiment, Path(out))


def _model_of(weights: str, models: Sequence[str]) -> str | None:
    """The model of a run to which weights belong: itself, or trained from it (`runs/twins/MODEL-30steps-seed1`)."""
    owners = [model for model in models if re.search(rf"(^|/){re.escape(model)}([-+]|$)", weights)]
    return max(owners, key=len, default=None)


def _merged(experiment: Experiment, runs: Sequence[Results], replace: bool) -> dict[str, Any]:
    """The config whose items are those of all runs; of a model in several runs, those of the last."""
    models = [model for run in runs for model in run.settings["models"]]
    if len(set(models)) < len(models) and not replace:
        twice = next(model for model in models if models.count(model) > 1)
        raise ValueError(f"{twice} is in more than one of the runs; leave one of them out, or give replace=True")
    models = list(dict.fromkeys(models))
    first = runs[0].config
    for name in ("small", "dtype", "load"):
        if any(run.config.get(name) != first.get(name) for run in runs):
            raise ValueError(f"the runs have different {name}; compute them with the same options")
    own = {model: settings_of(run.settings, model) for run in runs for model in run.settings["models"]}
    given = {name: _shared(name, {model: mine[name] for model, mine in own.items()}) for name in own[models[0]]}
    config = experiment.config(bool(first["small"]), (), {**given, "models": models})
    files = _files(runs)
    # The files as the runs read them, whatever they hold now.
    config = {name: value for name, value in config.items() if name != "files"}
    load = {"load": first["load"]} if "load" in first else {}
    return {**config, **({"files": files} if files else {}), "dtype": first.get("dtype"), **load}


def _files(runs: Sequence[Results]) -> dict[str, str]:
    """The digests of the files that the runs read, such as prompts."""
    found: dict[str, str] = {}
    for run in runs:
        for name, digest in run.config.get("files", {}).items():
            if found.setdefault(name, digest) != digest:
                raise ValueError(f"the runs read different versions of {name}; compute them with the same file")
    return found


def _shared(name: str, values: Mapping[str, Any]) -> Any:
    """The value of all models, or a mapping that names those that differ from the first one's."""
    usual, *others = values.values()
    if name == "models" or all(value == usual for value in others):
        return usual
    if name not in BY_MODEL:
        raise ValueError(f"the runs have different {name}, which cannot be given by model: {dict(values)!r:.200}")
    return {OTHERS: usual, **{model: value for model, value in values.items() if value != usual}}
