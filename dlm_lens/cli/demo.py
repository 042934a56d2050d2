"""`dlm-lens demo`: denoise a prompt, find its attention sinks, draw them."""

import time
from pathlib import Path
from typing import Annotated

import typer

from dlm_lens.cli.options import (
    DEVICE,
    DTYPE,
    LOADING,
    MODEL,
    SEED,
    check_least,
    check_network,
    device_or_gpu,
    loading_options,
    quiet_transformers,
)
from dlm_lens.files.paths import check_directory


def demo_command(
    model: Annotated[str, MODEL] = "toy",
    prompt: Annotated[str | None, typer.Option(help="Text to continue; a word problem by default.")] = None,
    out: Annotated[
        Path, typer.Option(help="Directory of the figures and the numbers; those of an earlier demo are replaced.")
    ] = Path("dlm-lens-demo"),
    steps: Annotated[
        int | None, typer.Option(help="Denoising steps; one per token of the answer by default.")
    ] = None,
    gen_length: Annotated[
        int | None,
        typer.Option(help="Tokens of the answer; the model's own number, 64 at most, by default."),
    ] = None,
    device: Annotated[str | None, DEVICE] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    loading: Annotated[list[str] | None, LOADING] = None,
    seed: Annotated[int, SEED] = 0,
) -> None:
    """Denoise a prompt, find its attention sinks at every step, and draw them."""
    started = time.perf_counter()  # before the imports of torch and transformers
    from dlm_lens.adapters.model_names import embedded_models

    check_network(model, dtype, device)
    chosen_model = loading_options(loading)
    check_directory(out)
    check_least(1, steps=steps, gen_length=gen_length)
    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt is empty; give a text with a word in it, or leave it out")

    from dlm_lens.cli.demo_run import run_demo

    if model in embedded_models():
        quiet_transformers()
    chosen_model |= {"dtype": dtype, "device_map": device_or_gpu(device)}
    run_demo(
        prompt, model, out, steps=steps, gen_length=gen_length, seed=seed, loading=chosen_model, started=started
    )
