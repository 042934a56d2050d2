"""Options that several commands share, and checks of their values; nothing here imports torch."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from dlm_lens.arguments import near_name
from dlm_lens.files.paths import user_path
from dlm_lens.option_values import one_of, settings_of
from dlm_lens.recording.query_classes import OTHER_NAMES, QUERY_CLASSES
from dlm_lens.sinks.detector_registry import DETECTORS, parse_detector
from dlm_lens.viz.plot_options import LEVELS

STORAGES = ("float32", "float16")
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float", "float64", "double")
"""Dtypes of a model's weights (`dlm_lens.load`)."""

LOADING_TEXTS = ("adapter", "attn_implementation", "family", "revision", "sampler", "size")
LOADING_NAMES = ("check", "eos_token_id", "eot_token_id", "mask_token_id", *LOADING_TEXTS)
"""The arguments of `dlm_lens.load` that `--load` takes, and those of them that are text."""

MODEL = typer.Argument(help="Embedded model (toy, toy-ar, ...), directory or hub name.")
OTHER_MODEL = typer.Option(help="The recording's model; the one that it names by default.")
RECORDING = typer.Argument(help="Directory of a recording (dlm-lens record, or record(..., to=)).")
DETECTOR = typer.Option(
    help="The rule that finds sinks, with its setting after a colon, such as above-mean:3 (2510.15731, Eq. 3). "
    f"Rules: {', '.join(f'{name}[:{one.setting.upper()}]' for name, one in DETECTORS.items())}."
)
LEVEL = typer.Option(help="Which patterns are judged: head, layer (mean over heads) or model.")
LAYER = typer.Option(help="Only this layer; with --head only that head of it.")
HEAD = typer.Option(min=0, help="Only this head, of --layer or of every layer.")
LAYERS = typer.Option(help="Layers, such as 0,5,-1; all by default.")
STEPS = typer.Option(help="Steps, such as 0,16,-1; all by default.")
QUERIES = typer.Option(help="Which queries count: all, masked, unmasked, prompt or block, as recorded.")
HOOKS = typer.Option(help='Interventions, such as "mask_sinks(above_mean(3), top=5)"; parsed, never executed.')
SEED = typer.Option(help="Seed of all random numbers.")
DEVICE = typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps or auto; a CUDA GPU by default, if any.")
DTYPE = typer.Option(help="Dtype of the weights: bfloat16, float32, ...; the checkpoint's own by default.")
SETTINGS = typer.Option(
    "--set", help="Another setting of the model's sampler, such as cfg_scale=1.5 or top_p=0.9; repeatable."
)
LOADING = typer.Option(
    "--load",
    help="Another argument of dlm_lens.load, such as sampler=dmax or mask_token_id=126336; repeatable.",
)
JSON = typer.Option("--json", help="Print JSON.")
RECORDED_LAYERS = typer.Option(help="Layers to record, such as 0,5,-1; all by default.")
STORAGE = typer.Option(help="Dtype of the recorded statistics: float32, or float16 in half the space.")


def with_home(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose paths may begin with "~": in options such as `--out=~/run` no shell replaces it.

    The name of a user who does not exist stays, since a file may be called ~draft.html; the checks of the command
    refuse it where it is a directory.
    """

    def expanded(value: Any) -> Any:
        """The value of an option or an argument, a list of them too."""
        if isinstance(value, list):
            return [expanded(one) for one in value]
        if isinstance(value, Path):
            with suppress(FileNotFoundError):
                return user_path(value)
        return value

    @wraps(command)
    def with_paths(**given: Any) -> None:
        command(**{name: expanded(value) for name, value in given.items()})

    return with_paths


def check_least(least: float, **values: float | None) -> None:
    """Raise unless the given options are at least `least`; None is an option that was not given.

    Raises:
        ValueError: one is less.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}; it must be at least {least:g}")


def check_parallel(cache: str | None, threshold: float | None, factor: float | None) -> None:
    """Raise unless the options of caches and parallel decoding can be; what else a family asks it checks itself.

    Raises:
        ValueError: another cache, a threshold that is no probability, or a threshold and a factor.
    """
    if cache is not None:
        one_of("--cache", cache, ("prefix", "dual"))
    check_least(0, threshold=threshold, factor=factor)
    if threshold is not None and threshold > 1:
        raise ValueError(f"threshold is {threshold:g}; it is a probability, at most 1")
    if threshold is not None and factor is not None:
        raise ValueError("--threshold and --factor both say how many positions a step unmasks; give one of them")


def check_csv(table: str | None, tables: Iterable[str], as_json: bool) -> None:
    """Raise where `--csv` names no table of the command, or is given with `--json`.

    Raises:
        ValueError: it does, or is.
    """
    if table is not None:
        one_of("--csv", table, tables)
        if as_json:
            raise ValueError("--json and --csv: give one of the two")


def options_of(command: Any) -> dict[str, str]:
    """Names of a command's parameters -> options."""
    return {one.name: max(one.opts, key=len) for one in command.params if one.opts[0][0] == "-"}


def check_not_options(command: Any, group: str, names: Iterable[str]) -> None:
    """Raise where a setting of a group such as `--set` is an option of the command itself.

    Raises:
        ValueError: one is.
    """
    options = options_of(command)
    for name in names:
        if name in options:
            raise ValueError(f"give {options[name]} in place of {group}")


def sampler_settings(command: Any, own: Mapping[str, Any], others: Iterable[str]) -> dict[str, Any]:
    """The settings of a run: those that have an option and were given, and those of `--set`.

    Args:
        command: that was called.
        own: settings that have an option; None for one that was not given.
        others: name=value.

    Raises:
        ValueError: no setting of any sampler, one that is given twice, or one that has an option.
    """
    given = {name: value for name, value in own.items() if value is not None}
    read = settings_of(others, "top_p=0.9")
    check_not_options(command, "--set", read)
    if read:
        from dlm_lens.sampling.algorithm_registry import algorithms
        from dlm_lens.sampling.settings import ELSEWHERE

        known = {field.name for algorithm in algorithms().values() for field in fields(algorithm.settings)}
        elsewhere = {old: " or ".join(several) for old, several in ELSEWHERE.items()}
        for name in read:
            if name not in known | {"reference_quirks"}:
                raise ValueError(
                    f"--set {name}: no sampler has such a setting{near_name(name, sorted(known), elsewhere)}; "
                    "`dlm-lens families FAMILY` prints those of a family"
                )
    return given | read


def loading_options(texts: Iterable[str] | None) -> dict[str, Any]:
    """The arguments of `dlm_lens.load` that `--load` gives as name=value.

    Raises:
        ValueError: no argument of `dlm_lens.load`, one that is given twice, or one that has an option.
    """
    given = list(texts or ())
    read = settings_of(given, "sampler=dmax")
    plain = {name.strip(): value.strip() for name, _, value in (text.partition("=") for text in given)}
    read |= {name: value for name, value in plain.items() if name in LOADING_TEXTS}
    for name in read:
        if name in ("dtype", "device", "device_map"):
            raise ValueError(f"give --{name.removesuffix('_map')} in place of --load {name}=")
        if name not in LOADING_NAMES:
            known = sorted(LOADING_NAMES)
            raise ValueError(
                f"--load has no argument {name!r}{near_name(name, known, {})}; it has {', '.join(known)}"
            )
    return read


def check_storage(option: str, value: str) -> None:
    """Raise unless the value is a dtype in which statistics are stored.

    Raises:
        ValueError: it is not.
    """
    if value not in STORAGES:
        raise ValueError(f"{option} is {value!r}; it must be {' or '.join(map(repr, STORAGES))}")


def check_network(model: str | None, dtype: str | None, device: str | None) -> None:
    """Raise unless a command can load a model: checks its name, which None leaves to a recording, dtype and device.

    Raises:
        ValueError: a name, a dtype or a device that cannot be.
    """
    from dlm_lens.adapters.model_names import check_model_name

    if model is not None:
        check_model_name(model)
    check_dtype(dtype)
    check_device(device)


def check_dtype(text: str | None) -> None:
    """Raise unless the value is a floating dtype of a model's weights.

    Raises:
        ValueError: it is not.
    """
    if text is not None:
        one_of("--dtype", text.removeprefix("torch."), DTYPES)


def check_device(text: str | None) -> None:
    """Raise unless the value looks like a device.

    Raises:
        ValueError: it does not.
    """
    if text is not None and not re.fullmatch(r"[a-z_]+(:[0-9]+)?", text):
        raise ValueError(f"--device is {text!r}; it is cpu, cuda, cuda:1, mps or auto")


def check_rule(recording: Path, detector: str, level: str = "head", queries: str = "all") -> None:
    """Raise unless a command can find sinks in a recording: checks rule, level, class of queries and directory.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: an unknown rule, setting, level or class of queries.
    """
    from dlm_lens.recording.directories import check_recording

    parse_detector(detector)
    one_of("--level", level, LEVELS)
    one_of("--queries", queries, (*QUERY_CLASSES, *OTHER_NAMES))
    check_recording(recording)


def check_place(layer: int | str | None, head: int | str | None, level: str) -> None:
    """Raise where a layer or a head is chosen that the level averages over.

    Raises:
        ValueError: it is.
    """
    if head is not None and level != "head":
        raise ValueError(f"--head {head}: at --level {level} there are no heads; leave one of the two out")
    if layer is not None and level == "model":
        raise ValueError(f"--layer {layer}: at --level model there are no layers; leave one of the two out")


def quiet_transformers() -> None:
    """Turn off transformers' progress bar of loading weights, for models of a megabyte."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def device_or_gpu(given: str | None) -> str | None:
    """The given device, or a GPU where there is one (under torchrun this process's); None for the CPU.

    Raises:
        ValueError: a CUDA device that this machine lacks.
    """
    import torch

    if given is not None:
        kind, _, index = given.partition(":")
        if kind == "cuda" and int(index or 0) >= (count := torch.cuda.device_count()):
            raise ValueError(
                f"--device is {given}, and this machine has {count} CUDA devices; leave --device out for "
                f"{'a GPU' if count else 'the CPU'}"
            )
        return given
    if not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
