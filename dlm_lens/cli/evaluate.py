"""`dlm-lens eval`: lm-evaluation-harness on the command line, under interventions."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_lens.printable import echo

if TYPE_CHECKING:
    from dlm_lens.evaluation import Preset


def eval_command(
    model: Annotated[str, typer.Option(help="Embedded model (toy, toy-ar, ...), directory or hub name.")] = "toy",
    tasks: Annotated[str | None, typer.Option(help="Tasks of the harness, separated by commas.")] = None,
    preset: Annotated[str | None, typer.Option(help="A cell of the papers' tables; --presets lists them.")] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List the presets, and stop.")] = False,
    hooks: Annotated[
        str, typer.Option(help='Interventions, such as "mask_sinks(above_mean(3), top=5)"; parsed, never executed.')
    ] = "",
    limit: Annotated[float | None, typer.Option(help="Documents per task, or a share of them below 1.")] = None,
    batch_size: Annotated[str, typer.Option(help="Canvases per forward, or auto.")] = "auto",
    num_fewshot: Annotated[int | None, typer.Option(help="Worked examples in front of each document.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the chat template.")] = False,
    add_bos: Annotated[
        bool, typer.Option("--add-bos", help="Put the beginning-of-text token in front of every text.")
    ] = False,
    max_length: Annotated[int | None, typer.Option(help="Positions of a canvas; the model's by default.")] = None,
    likelihood: Annotated[str, typer.Option(help="Settings, such as method=mc,samples=128,cfg_scale=0.5.")] = "",
    generation: Annotated[str, typer.Option(help="Settings, such as gen_length=256,block_length=32.")] = "",
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="Of the weights; the checkpoint's own by default.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the model goes; a GPU if there is one.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the results; the same command goes on where it was killed.")
    ] = None,
    record: Annotated[
        list[str] | None,
        typer.Option(
            help="What to record of every request into --record-to, as `dlm-lens record --reducer` takes it "
            "(received, value-norm, top-keys:5, ...); repeatable, received by default."
        ),
    ] = None,
    record_to: Annotated[
        Path | None,
        typer.Option(help="Directory of the recordings, TASK/DOCUMENT-REQUEST each; the same command goes on."),
    ] = None,
    record_layers: Annotated[str | None, typer.Option(help="Indices such as 0,5,-1; all by default.")] = None,
    record_storage: Annotated[
        str, typer.Option(help="Of the recorded statistics: float32, or float16 in half the space.")
    ] = "float32",
    confirm_run_unsafe_code: Annotated[
        bool, typer.Option("--confirm-run-unsafe-code", help="Let tasks execute the code that the model wrote.")
    ] = False,
) -> None:
    """Evaluate a model on tasks of lm-evaluation-harness, and on those shipped here."""
    from dlm_lens.adapters.model_names import check_model_name
    from dlm_lens.command_options import check_device, check_directory, check_dtype
    from dlm_lens.evaluation import find_preset
    from dlm_lens.hooks.expressions import check_expression

    if presets:
        _print_presets()
        return
    check_model_name(model)
    check_dtype(dtype)
    check_device(device)
    if hooks:
        check_expression(hooks)
    if not batch_size.isdigit() and not batch_size.startswith("auto"):
        raise ValueError(f"--batch-size is {batch_size!r}; give a whole number, or auto")
    for directory in filter(None, (out, record_to)):
        check_directory(directory)
    settings: dict[str, Any] = {} if preset is None else find_preset(preset).settings()
    settings |= {"tasks": tasks.split(",")} if tasks else {}
    if "tasks" not in settings:
        raise ValueError("no task given; pass --tasks, such as --tasks toy_problems, or --preset")
    settings |= {"chat": True} if chat else {}
    settings |= {"add_bos": True} if add_bos else {}
    settings |= {} if max_length is None else {"max_length": max_length}
    settings |= {} if num_fewshot is None else {"num_fewshot": num_fewshot}
    for name, text in (("likelihood", likelihood), ("generation", generation)):
        settings |= {name: _with(settings.get(name), read_pairs(text))} if text else {}
    if record or record_to is not None or record_layers is not None:
        settings |= _recorded(record or ["received"], record_to, record_layers, record_storage)
    from dlm_lens.evaluation import evaluate

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        settings["responses"] = out / "responses.jsonl"
    result = evaluate(
        model,
        hooks=hooks or (),
        limit=limit if limit is None or limit < 1 else int(limit),
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
        device=device or _fastest(),
        confirm_run_unsafe_code=confirm_run_unsafe_code,
        **settings,
    )
    echo(result.markdown())
    if out is not None:
        result.save(out)
        echo(f"\nresults: {out / 'results.json'}", err=True)
    if record_to is not None:
        echo(f"recordings: {record_to}, and what each is of in requests.jsonl", err=True)


def read_pairs(text: str) -> dict[str, Any]:
    """Settings written as name=value, separated by commas; values are JSON, or else plain text.

    Raises:
        ValueError: a part without "=".
    """
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is no setting; write name=value, separated by commas")
        try:
            found[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            found[name.strip()] = {"True": True, "False": False, "None": None}.get(value.strip(), value.strip())
    return found


def _recorded(names: list[str], to: Path | None, layers: str | None, storage: str) -> dict[str, Any]:
    """What to record, as `HarnessLM` takes it."""
    from dlm_lens.cli.reducers import check_reducer, reducer_of
    from dlm_lens.command_options import check_storage, whole_numbers

    if to is None:
        raise ValueError("--record and --record-layers need --record-to, the directory of the recordings")
    for name in names:
        check_reducer(name, "--record")
    check_storage("--record-storage", storage)
    chosen = whole_numbers("--record-layers", layers)
    record = {"reducers": [reducer_of(name, "--record") for name in names], "layers": chosen, "dtype": storage}
    return {"record": record, "record_to": to}


def _with(settings: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A preset's settings with some replaced."""
    return {**(vars(settings) if settings is not None else {}), **given}


def _fastest() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _print_presets() -> None:
    from dlm_lens.evaluation import list_presets

    for preset in list_presets():
        echo(describe(preset))


def describe(preset: "Preset") -> str:
    """A preset in a few lines."""
    asked = {**_differs(preset.likelihood), **_differs(preset.generation)}
    lines = [
        preset.name,
        f"  {preset.task}: {preset.metric}, a {preset.kind}; for {preset.model}",
        f"  settings: {', '.join(f'{name}={value}' for name, value in asked.items()) or 'the defaults'}"
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
