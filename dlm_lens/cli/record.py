"""`dlm-lens record`: statistics of many prompts from a file, one process or several."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_lens.cli.reducers import check_reducer, read_lines, reducer_of
from dlm_lens.command_options import (
    check_device,
    check_directory,
    check_dtype,
    check_least,
    check_storage,
    whole_numbers,
)
from dlm_lens.printable import echo


def record_prompts(
    model: Annotated[str, typer.Argument(help="Embedded model (toy, toy-ar), directory or hub name.")],
    prompts: Annotated[
        Path,
        typer.Option(help='JSON lines, each {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}]}.'),
    ],
    out: Annotated[Path, typer.Option(help="Directory; the same command goes on with what is there.")],
    reducer: Annotated[
        list[str] | None,
        typer.Option(
            help="received[:CLASS,...], value-norm, key-norm, weighted-value, residual-norm, massive, entropy, "
            "region-mass, update-norm, top-keys[:K]; repeatable. CLASS is all, masked, unmasked, prompt or block."
        ),
    ] = None,
    hooks: Annotated[
        str,
        typer.Option(
            help='Interventions during the run, such as "mask_sinks(above_mean(3), top=5)"; parsed, never executed.'
        ),
    ] = "",
    batch_size: Annotated[int, typer.Option(help="Prompts in one run, and in one directory.")] = 8,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    gen_length: Annotated[int | None, typer.Option(help="Tokens of the answer.")] = None,
    block_length: Annotated[int | None, typer.Option(help="Length of a block.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the most likely token.")] = None,
    remasking: Annotated[str | None, typer.Option(help="The family's rule of what is written.")] = None,
    seed: Annotated[int, typer.Option(help="Of every prompt.")] = 0,
    layers: Annotated[str | None, typer.Option(help="Indices such as 0,5,-1; all by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, auto, cpu; a free GPU by default.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the model: bfloat16, float32, ...; its own by default.")
    ] = None,
    storage: Annotated[
        str, typer.Option(help="Of the statistics: float32, or float16 in half the space.")
    ] = "float32",
) -> None:
    """Denoise prompts and record statistics of attention at every step, without patterns.

    Under torchrun each process takes its share of the batches. A killed run goes on where it was.
    """
    from dlm_lens.adapters.model_names import check_model_name
    from dlm_lens.hooks.expressions import check_expression, parse_hooks

    check_model_name(model)
    check_directory(out)
    check_dtype(dtype)
    check_device(device)
    check_storage("--storage", storage)
    check_least(1, batch_size=batch_size, steps=steps, gen_length=gen_length, block_length=block_length)
    check_least(0, temperature=temperature)
    chosen = whole_numbers("--layers", layers)
    for text in reducer or ():
        check_reducer(text)
    if hooks:
        check_expression(hooks)
    lines = read_lines(prompts)

    from dlm_lens.adapters import load
    from dlm_lens.recording.record_runs import Batches, record_batches

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    given: dict[str, Any] = {
        "steps": steps,
        "gen_length": gen_length,
        "block_length": block_length,
        "temperature": temperature,
        "remasking": remasking,
    }
    reducers = [reducer_of(text) for text in reducer or ["received"]]
    interventions = parse_hooks(hooks) if hooks else ()
    network = load(model, dtype=dtype, device_map=_device(device))
    batches = Batches(_ids(network, lines, prompts), (seed,) * len(lines), batch_size)
    made = record_batches(
        network,
        batches,
        reducers,
        hooks=interventions,
        to=out,
        layers=chosen,
        dtype=storage,  # type: ignore[arg-type]
        progress=rank == 0,
        rank=rank,
        world=world,
        **{name: value for name, value in given.items() if value is not None},
    )
    count = sum(len(recording.rows) for recording in made)
    share = "" if world == 1 else f" (process {rank} of {world})"
    echo(f"{count} of {len(lines)} prompts recorded in {out}{share}")


def _ids(model: Any, lines: list[Any], path: Path) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt, one by one: texts and chats may stand in one file."""
    from dlm_lens.recording.record_runs import Batches

    found = []
    for number, line in enumerate(lines):
        try:
            found.append(Batches.of(model, [line], None, None).ids[0])
        except ValueError as error:
            raise ValueError(f"{path}, prompt {number}: {error}") from None
    return tuple(found)


def _device(given: str | None) -> str | None:
    import torch

    if given is not None:
        return given
    if not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
