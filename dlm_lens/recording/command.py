"""`dlm-lens record`: statistics of many prompts from a file, one process or several."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_lens.arguments import shown
from dlm_lens.command_options import (
    CLASSES,
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
    from dlm_lens.adapters.names import check_model_name
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
    from dlm_lens.recording.running import Batches, record_batches

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


HEADS = ("each", "mean", "both")
REDUCERS: Mapping[str, tuple[str, ...]] = {
    "received": CLASSES,
    "value-norm": HEADS,
    "key-norm": HEADS,
    "weighted-value": CLASSES,
    "top-keys": ("K",),
    "residual-norm": (),
    "massive": (),
    "entropy": (),
    "region-mass": (),
    "update-norm": (),
}
"""Reducers by their names here, and what may follow a colon."""


def check_reducer(text: str, option: str = "--reducer") -> None:
    """Raise unless an option names a reducer, with an argument that it takes.

    Raises:
        ValueError: no such reducer, or an argument that it does not take.
    """
    name, colon, given = text.partition(":")
    if name not in REDUCERS:
        raise ValueError(f"{option} {text!r}: there are {', '.join(REDUCERS)}")
    taken = REDUCERS[name]
    if colon and not taken:
        raise ValueError(f"{option} {text!r}: {name} takes nothing behind a colon")
    if name == "top-keys":
        if given and _integer(given, f"{option} top-keys") < 1:
            raise ValueError(f"{option} {text!r}: K is at least 1")
        return
    for word in given.split(",") if given and name == "received" else [given] if given else []:
        if word not in taken:
            what = "the classes of queries are" if taken == CLASSES else "it is one of"
            raise ValueError(f"{option} {text!r}: {what} {', '.join(taken)}")


def reducer_of(text: str, option: str = "--reducer") -> Any:
    """The reducer that an option names.

    Raises:
        ValueError: no such reducer, or an argument that it does not take.
    """
    check_reducer(text, option)
    from dlm_lens import recording as r

    known: Mapping[str, Callable[[str], Any]] = {
        "received": lambda given: r.ReceivedAttention(given.split(",") if given else "all"),  # type: ignore[arg-type]
        "value-norm": lambda given: r.ValueNorm(given or "each"),  # type: ignore[arg-type]
        "key-norm": lambda given: r.KeyNorm(given or "each"),  # type: ignore[arg-type]
        "weighted-value": lambda given: r.WeightedValue(given or "all"),  # type: ignore[arg-type]
        "top-keys": lambda given: r.TopKeys(int(given) if given else 5),
        "residual-norm": lambda given: r.ResidualNorm(),
        "massive": lambda given: r.MassiveActivations(),
        "entropy": lambda given: r.AttentionEntropy(),
        "region-mass": lambda given: r.RegionMass(),
        "update-norm": lambda given: r.UpdateNorm(),
    }
    name, _, given = text.partition(":")
    return known[name](given)


def read_lines(path: Path) -> list[Any]:
    r"""The prompts of a file: texts and chats.

    A line ends with \n alone (jsonlines.org): U+2028 and its like, at which `str.splitlines` cuts, are characters
    of a text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file that is no UTF-8, a line that is no prompt, or no line at all.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; --prompts takes a file of JSON lines")
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 (byte {error.start}); JSON lines are") from None
    found = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            found.append(_prompt(text, f"{path} line {number}"))
    if not found:
        raise ValueError(f"{path} holds no prompts")
    return found


def _prompt(text: str, where: str) -> Any:
    try:
        line = json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be a prompt") from None
    except ValueError as error:
        raise ValueError(f"{where} is no JSON ({error})") from None
    if isinstance(line, dict) and isinstance(line.get("prompt"), str):
        return line["prompt"]
    if isinstance(line, dict) and isinstance(line.get("messages"), list) and line["messages"]:
        return line["messages"]
    raise ValueError(f'{where} is {shown(text)}; a line is {{"prompt": "..."}} or {{"messages": [...]}}')


def _ids(model: Any, lines: list[Any], path: Path) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt, one by one: texts and chats may stand in one file."""
    from dlm_lens.recording.running import Batches

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


def _integer(text: str, owner: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{owner} takes whole numbers, got {text!r}") from None
