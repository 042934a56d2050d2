"""`dlm-lens record`: statistics of many prompts from a file, one process or several."""

import re
from pathlib import Path
from typing import Annotated, Any

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
from dlm_lens.cli.prompts import prompt_places, read_prompts
from dlm_lens.files.paths import check_directory
from dlm_lens.option_values import process_of_run, whole_numbers
from dlm_lens.printable import echo
from dlm_lens.recording.reducer_registry import REDUCERS_HELP, parse_reducers


def record_command(
    context: typer.Context,
    model: Annotated[str, MODEL],
    prompts: Annotated[
        Path,
        typer.Option(
            help='JSON lines, each {"prompt": "..."}, {"messages": [{"role": ..., "content": ...}]} or '
            '{"input_ids": [...]}.'
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Directory of the recordings; the same command continues an interrupted run.")
    ],
    reducers: Annotated[str, typer.Option(help=f"What to record: {REDUCERS_HELP}.")] = "received",
    hooks: Annotated[str, HOOKS] = "",
    batch_size: Annotated[int, typer.Option(help="Prompts in one run, and in one directory.")] = 8,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    gen_length: Annotated[int | None, typer.Option(help="Tokens of the answer.")] = None,
    block_length: Annotated[int | None, typer.Option(help="Tokens of a block.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    remasking: Annotated[
        str | None, typer.Option(help="How the sampler chooses the positions of a step, such as low_confidence.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Approximate cache of bidirectional models: prefix or dual (Fast-dLLM).")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Unmask all positions of the block with this confidence or more.")
    ] = None,
    factor: Annotated[
        float | None, typer.Option(help="Unmask as many as the confidence allows (Fast-dLLM); or --threshold.")
    ] = None,
    settings: Annotated[list[str] | None, SETTINGS] = None,
    seed: Annotated[int, typer.Option(help="Seed of every prompt.")] = 0,
    layers: Annotated[str | None, RECORDED_LAYERS] = None,
    device: Annotated[str | None, DEVICE] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    loading: Annotated[list[str] | None, LOADING] = None,
    storage: Annotated[str, STORAGE] = "float32",
) -> None:
    """Denoise prompts and record statistics of attention at every step, without patterns.

    Under torchrun each process takes its share of the batches. The same command continues a run that was killed.
    """
    from dlm_lens.hooks.expressions import check_expression, parse_hooks

    check_network(model, dtype, device)
    chosen_model = loading_options(loading)
    check_directory(out)
    check_storage("--storage", storage)
    check_parallel(cache, threshold, factor)
    check_least(1, batch_size=batch_size, steps=steps, gen_length=gen_length, block_length=block_length)
    check_least(0, temperature=temperature)
    chosen = None if layers is None else whole_numbers("--layers", layers)
    statistics = parse_reducers(reducers)
    rank, world = process_of_run()
    if hooks:
        check_expression(hooks)
    lines = read_prompts(prompts)
    given = sampler_settings(
        context.command,
        {
            "steps": steps, "gen_length": gen_length, "block_length": block_length, "temperature": temperature,
            "remasking": remasking, "cache": cache, "threshold": threshold, "factor": factor,
        },
        settings or (),
    )  # fmt: skip

    from dlm_lens.adapters import load
    from dlm_lens.recording.record_runs import BatchError, Batches, record_batches

    network = load(model, dtype=dtype, device_map=device_or_gpu(device), **chosen_model)
    batches = Batches(_ids(network, lines, prompts), (seed,) * len(lines), batch_size)
    made = record_batches(
        network,
        batches,
        [statistic.build() for statistic in statistics],
        hooks=parse_hooks(hooks) if hooks else (),
        to=out,
        layers=chosen,
        dtype=storage,  # type: ignore[arg-type]
        progress=rank == 0,
        rank=rank,
        world=world,
        **given,
    )
    try:
        count = sum(len(recording.rows) for recording in made)
    except BatchError as error:
        places = prompt_places(prompts)
        first, last = places[error.rows[0]], places[error.rows[-1]]
        named = first if first == last else f"{first} to {last}"
        raise ValueError(f"{error.sentence} ({named})") from None
    share = "" if world == 1 else f" (process {rank} of {world})"
    echo(f"{count} of {len(lines)} prompts recorded in {out}{share}")


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
