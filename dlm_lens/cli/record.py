"""`dlm-lens record`: statistics of many prompts from a file, one process or several."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_lens.cli.options import (
    DEVICE,
    DTYPE,
    HOOKS,
    LOADING,
    MODEL,
    RECORDED_LAYERS,
    SETTINGS,
    STORAGE,
    check_least,
    check_network,
    check_parallel,
    check_storage,
    device_or_gpu,
    loading_options,
    sampler_settings,
)
from dlm_lens.files.paths import check_directory
from dlm_lens.option_values import process_of_run, whole_numbers
from dlm_lens.printable import echo
from dlm_lens.recording.reducer_registry import REDUCERS_HELP, parse_reducers

if TYPE_CHECKING:
    from dlm_lens.recording import Reducer
    from dlm_lens.recording.record_runs import Batches
from dlm_lens.arguments import is_whole
from dlm_lens.files.json_objects import read_json_lines
from dlm_lens.printable import shown

PROMPTS = typer.Option(
    help='JSON lines, each {"prompt": "..."}, {"messages": [{"role": ..., "content": ...}]} or '
    '{"input_ids": [...]}.'
)
OUT = typer.Option(help="Directory of the recordings; the same command continues an interrupted run.")
STATISTICS = typer.Option(help=f"What to record: {REDUCERS_HELP}.")
BATCH_SIZE = typer.Option(help="Prompts in one run, and in one directory.")
DENOISING_STEPS = typer.Option(help="Denoising steps.")
GEN_LENGTH = typer.Option(help="Tokens of the answer; 0 fills in the prompts' masks alone.")
BLOCK_LENGTH = typer.Option(help="Tokens of a block.")
TEMPERATURE = typer.Option(help="0 takes the likeliest token.")
REMASKING = typer.Option(help="How the sampler chooses the positions of a step, such as low_confidence.")
CACHE = typer.Option(help="Approximate cache of bidirectional models: prefix or dual (Fast-dLLM).")
THRESHOLD = typer.Option(help="Unmask all positions of the block with this confidence or more.")
FACTOR = typer.Option(help="Unmask as many as the confidence allows (Fast-dLLM); or --threshold.")
ROW_SEED = typer.Option(help="Seed of every prompt.")


def record_command(
    context: typer.Context,
    model: Annotated[str, MODEL],
    prompts: Annotated[Path, PROMPTS],
    out: Annotated[Path, OUT],
    reducers: Annotated[str, STATISTICS] = "received",
    hooks: Annotated[str, HOOKS] = "",
    batch_size: Annotated[int, BATCH_SIZE] = 8,
    steps: Annotated[int | None, DENOISING_STEPS] = None,
    gen_length: Annotated[int | None, GEN_LENGTH] = None,
    block_length: Annotated[int | None, BLOCK_LENGTH] = None,
    temperature: Annotated[float | None, TEMPERATURE] = None,
    remasking: Annotated[str | None, REMASKING] = None,
    cache: Annotated[str | None, CACHE] = None,
    threshold: Annotated[float | None, THRESHOLD] = None,
    factor: Annotated[float | None, FACTOR] = None,
    settings: Annotated[list[str] | None, SETTINGS] = None,
    seed: Annotated[int, ROW_SEED] = 0,
    layers: Annotated[str | None, RECORDED_LAYERS] = None,
    device: Annotated[str | None, DEVICE] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    loading: Annotated[list[str] | None, LOADING] = None,
    storage: Annotated[str, STORAGE] = "float32",
) -> None:
    """Denoise prompts and record statistics of attention at every step, without patterns.

    Under torchrun each process takes its share of the batches. The same command continues a run that was killed.
    """
    from dlm_lens.hooks.expressions import check_expression

    check_network(model, dtype, device)
    chosen_model = loading_options(loading)
    check_directory(out)
    check_storage("--storage", storage)
    check_parallel(cache, threshold, factor)
    check_least(1, batch_size=batch_size, steps=steps, block_length=block_length)
    check_least(0, temperature=temperature, gen_length=gen_length)
    chosen = None if layers is None else whole_numbers("--layers", layers)
    statistics = parse_reducers(reducers)
    process = process_of_run()
    if hooks:
        check_expression(hooks)
    lines = read_prompts(prompts)
    with_option = {
        "steps": steps, "gen_length": gen_length, "block_length": block_length, "temperature": temperature,
        "remasking": remasking, "cache": cache, "threshold": threshold, "factor": factor,
    }  # fmt: skip
    given = sampler_settings(context.command, with_option, settings or ()) | {"layers": chosen, "dtype": storage}

    from dlm_lens.adapters import load
    from dlm_lens.recording.record_runs import Batches

    network = load(model, dtype=dtype, device_map=device_or_gpu(device), **chosen_model)
    batches = Batches(_ids(network, lines, prompts), (seed,) * len(lines), batch_size)
    built = [statistic.build() for statistic in statistics]
    _record(network, batches, built, hooks, prompts, process, to=out, **given)


def _record(
    network: Any,
    batches: "Batches",
    reducers: list["Reducer"],
    hooks: str,
    prompts: Path,
    process: tuple[int, int],
    **given: Any,
) -> None:
    """Record the share of this process (its rank, and how many there are) of the batches, and print its size.

    Raises:
        ValueError: a batch that cannot be recorded, with the place of its prompts in their file.
    """
    from dlm_lens.hooks.expressions import parse_hooks
    from dlm_lens.recording.record_runs import BatchError, record_batches

    rank, world = process
    shared: dict[str, Any] = {"progress": rank == 0, "rank": rank, "world": world}
    made = record_batches(network, batches, reducers, hooks=parse_hooks(hooks) if hooks else (), **shared, **given)
    try:
        count = sum(len(recording.rows) for recording in made)
    except BatchError as error:
        places = prompt_places(prompts)
        first, last = places[error.rows[0]], places[error.rows[-1]]
        named = first if first == last else f"{first} to {last}"
        raise ValueError(f"{error.sentence} ({named})") from None
    share = "" if world == 1 else f" (process {rank} of {world})"
    echo(f"{count} of {len(batches.ids)} prompts recorded in {given['to']}{share}")


def _ids(model: Any, lines: list[Any], path: Path) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt, one by one, since one file may hold texts, chats and ids.

    Raises:
        ValueError: a prompt that the model cannot read.
    """
    from dlm_lens.recording.record_runs import Batches

    found = []
    for number, line in enumerate(lines):
        try:
            found.append(Batches.of(model, [line], None, None).ids[0])
        except ValueError as error:
            # Its place names the prompt, which is number 0 of the one that was read.
            sentence = re.sub(r"^prompt 0\b", "the prompt", str(error))
            raise ValueError(f"{prompt_places(path)[number]}: {sentence}") from None
    return tuple(found)


FORM = '{"prompt": "..."}, {"messages": [...]} or {"input_ids": [...]}'
"""Of a line."""


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file: texts, chats and token ids.

    Raises:
        FileNotFoundError: the file does not exist, or is a directory or a pipe.
        ValueError: a file that is not UTF-8, a line that is no prompt, or no line at all.
    """
    if not path.is_file():
        other = "is a pipe or a device, which cannot be read twice" if path.exists() else "does not exist"
        what = "is a directory" if path.is_dir() else other
        raise FileNotFoundError(f"{path} {what}; --prompts takes a file of JSON lines")
    found = [_prompt(line, text, where) for where, text, line in read_json_lines(path, "a prompt", FORM)]
    if not found:
        raise ValueError(f"{path} holds no prompts")
    return found


def prompt_places(path: Path) -> list[str]:
    """Where each prompt of a file is: FILE line N."""
    return [where for where, _, _ in read_json_lines(path, "a prompt", FORM)]


def _prompt(line: Any, text: str, where: str) -> Any:
    if isinstance(line, dict) and isinstance(line.get("prompt"), str):
        return line["prompt"]
    if isinstance(line, dict) and isinstance(line.get("messages"), list) and line["messages"]:
        return line["messages"]
    if isinstance(line, dict) and isinstance(ids := line.get("input_ids"), list) and all(map(is_whole, ids)):
        return ids
    raise ValueError(f"{where} is {shown(text)}; a line is {FORM}")
