"""`dlm-lens doctor`: check the installation, or a checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_lens.cli.options import (
    DEVICE,
    DTYPE,
    JSON,
    LOADING,
    SEED,
    check_device,
    check_dtype,
    check_least,
    device_or_gpu,
    loading_options,
    quiet_transformers,
)
from dlm_lens.cli.output import show_json
from dlm_lens.files.paths import read_utf8

if TYPE_CHECKING:
    from dlm_lens.findings import Finding


def doctor_command(
    model: Annotated[
        str | None,
        typer.Argument(help="Directory or hub name of a checkpoint to check; the installation without one."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="Texts of the checkpoint's language, one in a line; English sentences without."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="A safetensors file of input_ids and logits, computed with the authors' code."),
    ] = None,
    gen_length: Annotated[int, typer.Option(help="Tokens to denoise.")] = 32,
    device: Annotated[str | None, DEVICE] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    loading: Annotated[list[str] | None, LOADING] = None,
    seed: Annotated[int, SEED] = 0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Check the installation (packages, GPUs, the embedded model in both hosts), or a checkpoint.

    Of a checkpoint: its special ids, its tokenizer, its patterns, whether it reads text, what it writes, and with
    --reference its logits beside those of another implementation. The exit status is 1 where something is wrong.
    """
    if model is None and (texts is not None or reference is not None or loading):
        raise ValueError("--texts, --reference and --load are of a checkpoint; name it: dlm-lens doctor MODEL")
    check_least(1, gen_length=gen_length)
    check_dtype(dtype)
    check_device(device)
    chosen_model = loading_options(loading)
    if texts is not None and not texts.is_file():
        raise FileNotFoundError(f"--texts {texts} does not exist; give a file with one text in a line")
    if reference is not None and not reference.is_file():
        raise FileNotFoundError(f"--reference {reference} does not exist; give a safetensors file")
    from rich.console import Console
    from rich.markup import escape

    from dlm_lens.printable import printable

    quiet_transformers()
    if model is None:
        from dlm_lens.cli.installation import findings

        source = findings()
    else:
        lines = None if texts is None else read_utf8(texts).splitlines()
        chosen_model |= {"dtype": dtype, "device_map": device_or_gpu(device)}
        source = _of_checkpoint(model, lines, reference, gen_length, chosen_model, seed)
    console, found = Console(), []
    for finding in source:
        found.append(finding)
        if not as_json:
            mark = {True: "[green]ok[/green]", False: "[red]bad[/red]", None: "[dim]--[/dim]"}[finding.good]
            console.print(f"{mark:>4}  {finding.subject:<18} {escape(printable(finding.found))}", soft_wrap=True)
    if as_json:
        show_json([asdict(finding) for finding in found])
    if any(finding.good is False for finding in found):
        raise typer.Exit(1)


def _of_checkpoint(
    model: str,
    lines: list[str] | None,
    reference: Path | None,
    gen_length: int,
    loading: Mapping[str, Any],
    seed: int,
) -> "Iterator[Finding]":
    """The findings of a checkpoint, which is loaded first."""
    from dlm_lens.adapters.model_names import check_model_name

    check_model_name(model)
    import dlm_lens
    from dlm_lens.evaluation import check_checkpoint

    loaded = dlm_lens.load(model, **loading)
    texts = None if lines is None else [line for line in lines if line.strip()]
    return check_checkpoint(loaded, texts, reference=reference, gen_length=gen_length, seed=seed)
