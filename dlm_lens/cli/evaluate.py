"""`dlm-lens eval`: tasks of lm-evaluation-harness, with interventions."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_lens.cli.options import (
    DEVICE,
    DTYPE,
    HOOKS,
    JSON,
    LOADING,
    MODEL,
    RECORDED_LAYERS,
    SEED,
    STORAGE,
    check_network,
    check_not_options,
    check_storage,
    device_or_gpu,
    loading_options,
)
from dlm_lens.cli.output import show_json, show_tables
from dlm_lens.files.paths import check_directory
from dlm_lens.option_values import settings_of, whole_numbers, words
from dlm_lens.printable import echo
from dlm_lens.recording.reducer_registry import parse_reducers

if TYPE_CHECKING:
    from dlm_lens.evaluation import Evaluation, Preset


TASKS = typer.Option(help="Tasks of the harness, separated by commas.")
PRESET = typer.Option(help="A cell of the papers' tables; --presets lists them.")
PRESETS = typer.Option("--presets", help="List the presets, and stop.")
LIMIT = typer.Option(help="Documents per task, or a share of them below 1.")
BATCH_SIZE = typer.Option(help="Canvases per forward pass, or auto.")
NUM_FEWSHOT = typer.Option(help="Worked examples before each document.")
CHAT = typer.Option("--chat", help="Put prompts into the chat template.")
ADD_BOS = typer.Option("--add-bos", help="Begin every text with the beginning-of-text token.")
MAX_LENGTH = typer.Option(help="Positions of a canvas; the model's by default.")
LIKELIHOOD = typer.Option(help="Settings, such as method=mc,samples=128,cfg_scale=0.5; repeatable.")
GENERATION = typer.Option(help='Settings, such as gen_length=256,options={"threshold":0.9}; repeatable.')
OUT = typer.Option(help="Directory of the results; the same command continues an interrupted evaluation.")
AGAINST = typer.Option(
    help="Directory of another evaluation of the same documents (its --out), such as a control: print the "
    "differences too, with paired standard errors."
)
RECORD = typer.Option(help="What to record of every request into --record-to, as in dlm-lens record --reducers.")
RECORD_TO = typer.Option(help="Directory of the recordings, TASK/DOCUMENT-REQUEST each.")
UNSAFE_CODE = typer.Option("--confirm-run-unsafe-code", help="Let tasks execute the code that the model wrote.")


def eval_command(
    context: typer.Context,
    model: Annotated[str, MODEL] = "toy",
    tasks: Annotated[str | None, TASKS] = None,
    preset: Annotated[str | None, PRESET] = None,
    presets: Annotated[bool, PRESETS] = False,
    hooks: Annotated[str, HOOKS] = "",
    limit: Annotated[float | None, LIMIT] = None,
    batch_size: Annotated[str, BATCH_SIZE] = "auto",
    num_fewshot: Annotated[int | None, NUM_FEWSHOT] = None,
    chat: Annotated[bool, CHAT] = False,
    add_bos: Annotated[bool, ADD_BOS] = False,
    max_length: Annotated[int | None, MAX_LENGTH] = None,
    likelihood: Annotated[list[str] | None, LIKELIHOOD] = None,
    generation: Annotated[list[str] | None, GENERATION] = None,
    seed: Annotated[int, SEED] = 0,
    dtype: Annotated[str | None, DTYPE] = None,
    device: Annotated[str | None, DEVICE] = None,
    loading: Annotated[list[str] | None, LOADING] = None,
    out: Annotated[Path | None, OUT] = None,
    against: Annotated[Path | None, AGAINST] = None,
    record: Annotated[str | None, RECORD] = None,
    record_to: Annotated[Path | None, RECORD_TO] = None,
    record_layers: Annotated[str | None, RECORDED_LAYERS] = None,
    record_storage: Annotated[str, STORAGE] = "float32",
    confirm_run_unsafe_code: Annotated[bool, UNSAFE_CODE] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Evaluate a model on tasks of lm-evaluation-harness, and on those that come with this package."""
    if presets:
        _print_presets(as_json)
        return
    _check(model, dtype, device, hooks, batch_size)
    chosen_model = loading_options(loading)
    for directory in filter(None, (out, record_to)):
        check_directory(directory)
    given = {
        "tasks": words("--tasks", tasks) if tasks else None, "chat": chat or None, "add_bos": add_bos or None,
        "max_length": max_length, "num_fewshot": num_fewshot,
    }  # fmt: skip
    pairs = _pairs(context.command, likelihood, generation)
    settings = _settings(preset, given, pairs) | chosen_model
    if record or record_to is not None or record_layers is not None:
        settings |= _recorded(record or "received", record_to, record_layers, record_storage)
    settings |= {"hooks": hooks or (), "limit": limit, "batch_size": batch_size, "seed": seed, "dtype": dtype}
    settings |= {"device": device_or_gpu(device) or "cpu", "confirm_run_unsafe_code": confirm_run_unsafe_code}
    if against is not None:
        _check_against(against, out)
    _show(_evaluated(model, settings, out), against, as_json)
    if out is not None:
        echo(f"\nresults: {out / 'results.json'}", err=True)
    if record_to is not None:
        echo(f"recordings: {record_to}; requests.jsonl lists the request of each", err=True)


def _check_against(against: Path, out: Path | None) -> None:
    """Raise unless a directory holds a saved evaluation that can be read and stays.

    Raises:
        ValueError: it does not, or it is that of this evaluation.
    """
    from dlm_lens.evaluation.score_differences import read_saved

    if out is not None and out.resolve() == against.resolve():
        raise ValueError(
            f"--against and --out are both {against}, whose results would be replaced; choose another --out"
        )
    read_saved(against)


def _evaluated(model: str, settings: dict[str, Any], out: Path | None) -> "Evaluation":
    """The evaluation of a model, whose answers and results are in the directory `out`."""
    from dlm_lens.evaluation import evaluate

    if out is not None:
        settings = settings | {"responses": out / "responses.jsonl"}
    # Some tasks of the harness print, and standard output may be JSON.
    with redirect_stdout(sys.stderr):
        result = evaluate(model, **settings)
    # Saved before anything is printed: the reader of the output may be gone.
    if out is not None:
        result.save(out)
    return result


def _check(model: str, dtype: str | None, device: str | None, hooks: str, batch_size: str) -> None:
    """Raise for arguments that can be checked before anything heavy is imported."""
    from dlm_lens.hooks.expressions import check_expression

    check_network(model, dtype, device)
    if hooks:
        check_expression(hooks)
    if not batch_size.isdigit() and not batch_size.startswith("auto"):
        raise ValueError(f"--batch-size is {batch_size!r}; give a whole number, or auto")


def _show(result: "Evaluation", against: Path | None, as_json: bool) -> None:
    """Print the scores of an `Evaluation`, and their differences from those of a saved one."""
    from dlm_lens.evaluation.score_differences import score_differences

    if not as_json:
        echo(result.markdown())
    tables = {}
    if against is not None and result.scores:  # one of several processes has them
        tables["differences"] = score_differences(result, against)
    if as_json:
        from dlm_lens.evaluation.evaluation import json_of

        show_tables(True, {"scores": json_of(result.scores), "settings": dict(result.settings)}, tables)
    else:
        show_tables(False, {}, tables)


def _settings(preset: str | None, given: dict[str, Any], pairs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings of a preset, with those of the command in their place.

    Args:
        preset: its name.
        given: settings; None for those that were not given.
        pairs: groups of settings.

    Raises:
        ValueError: an unknown preset, or no task.
    """
    from dlm_lens.evaluation import find_preset

    settings: dict[str, Any] = {} if preset is None else find_preset(preset).settings()
    settings |= {name: value for name, value in given.items() if value is not None}
    if "tasks" not in settings:
        raise ValueError("no task given; pass --tasks, such as --tasks toy_problems, or --preset")
    return settings | {name: _with(settings.get(name), own) for name, own in pairs.items() if own}


def _pairs(command: Any, likelihood: list[str] | None, generation: list[str] | None) -> dict[str, dict[str, Any]]:
    """The settings of `--likelihood` and `--generation`; an option of the command among them is refused."""
    pairs = {
        "likelihood": read_pairs(likelihood or (), "samples=128"),
        "generation": read_pairs(generation or (), "gen_length=256"),
    }
    for group, settings in pairs.items():
        check_not_options(command, f"--{group}", settings)
    return pairs


def read_pairs(texts: Iterable[str], example: str = "samples=128") -> dict[str, Any]:
    """Settings written as name=value, separated by commas; values are JSON, Python literals or plain text.

    Commas within braces and brackets belong to a value: options={"threshold": 0.9, "cache": "dual"}.

    Args:
        texts: one of each use of the option.
        example: a setting, for the errors.

    Raises:
        ValueError: a part without "=", or a setting that is given twice.
    """
    return settings_of([part for text in texts for part in _parts(text)], example)


def _parts(text: str) -> list[str]:
    """The text between commas outside of braces and brackets."""
    parts: list[str] = []
    for piece in text.split(","):
        if parts and sum(map(parts[-1].count, "{[")) > sum(map(parts[-1].count, "}]")):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return [part for part in parts if part]


def _recorded(names: str, to: Path | None, layers: str | None, storage: str) -> dict[str, Any]:
    if to is None:
        raise ValueError("--record and --record-layers need --record-to, the directory of the recordings")
    reducers = parse_reducers(names, option="--record")
    check_storage("--record-storage", storage)
    chosen = None if layers is None else whole_numbers("--record-layers", layers)
    record = {"reducers": [reducer.build() for reducer in reducers], "layers": chosen, "dtype": storage}
    return {"record": record, "record_to": to}


def _with(settings: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a preset, some of them replaced; of `options` those that are given."""
    own = vars(settings) if settings is not None else {}
    options = given.get("options")
    merged = {"options": {**own.get("options", {}), **options}} if isinstance(options, dict) else {}
    return {**own, **given, **merged}


def _print_presets(as_json: bool) -> None:
    from dlm_lens.evaluation import list_presets

    if as_json:
        show_json([asdict(preset) for preset in list_presets()])
        return
    for preset in list_presets():
        echo(describe(preset))


def describe(preset: "Preset") -> str:
    """A preset in a few lines of text."""
    settings = {**_differs(preset.likelihood), **_differs(preset.generation)}
    lines = [
        preset.name,
        f"  {preset.task}: {preset.metric}, a {preset.kind}; for {preset.model}",
        f"  settings: {', '.join(f'{name}={value}' for name, value in settings.items()) or 'the defaults'}"
        + (", chat template" if preset.chat else "")
        + (", worked examples in one text" if preset.chat and not preset.multiturn else "")
        + (", beginning-of-text token" if preset.add_bos else "")
        + (f", {preset.max_length} positions at most" if preset.max_length is not None else "")
        + (f", {preset.num_fewshot} worked examples" if preset.num_fewshot is not None else ""),
        f"  source: {preset.source}",
    ]
    return "\n".join([*lines, *(f"  assumed: {one}" for one in preset.assumptions)])


def _differs(settings: Any) -> dict[str, Any]:
    from dlm_lens.evaluation.settings import changed

    return changed(settings)
