"""`dlm-lens clock`: how well denoising time is read from every layer of a recorded run's model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_lens.cli.options import (
    DEVICE,
    DTYPE,
    JSON,
    LAYERS,
    LOADING,
    OTHER_MODEL,
    RECORDING,
    SEED,
    check_network,
    loading_options,
)
from dlm_lens.cli.output import show_tables
from dlm_lens.cli.recordings import load_recording, network_of
from dlm_lens.option_values import one_of, whole_numbers, words


def clock_command(
    recording: Annotated[Path, RECORDING],
    model: Annotated[str | None, OTHER_MODEL] = None,
    layers: Annotated[str | None, LAYERS] = None,
    positions: Annotated[
        str, typer.Option(help="Classes of positions: open, written, prompt.")
    ] = "open,written,prompt",
    target: Annotated[str, typer.Option(help="time (t / T) or progress (the decided share).")] = "time",
    shuffles: Annotated[int, typer.Option(min=1, help="How many probes of permuted labels to fit.")] = 8,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Read the model with permuted weights too: the null that counts.")
    ] = False,
    device: Annotated[str | None, DEVICE] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    loading: Annotated[list[str] | None, LOADING] = None,
    seed: Annotated[int, SEED] = 0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Read denoising time from the residual stream with linear probes, on held-out prompts of a recording."""
    check_network(model, dtype, device)
    chosen_model = loading_options(loading)
    one_of("--target", target, ("time", "progress"))
    chosen = words("--positions", positions)
    for name in chosen:
        one_of("--positions", name, ("open", "written", "prompt"))
    settings: dict[str, Any] = {"positions": chosen, "target": target, "shuffles": shuffles, "seed": seed}
    if layers is not None:
        settings["layers"] = whole_numbers("--layers", layers)

    from dlm_lens.probes import denoising_clock, untrained_twin

    loaded = load_recording(recording)
    network = network_of(loaded, model, device, dtype, chosen_model)
    clock = denoising_clock(network, loaded.run, progress=True, **settings)
    tables = {"layers": clock.table()}
    if untrained:
        twin = denoising_clock(untrained_twin(network, seed=seed), loaded.run, progress=True, **settings)
        tables["untrained"] = twin.table()
    show_tables(as_json, {"target": target, "fitted to": clock.prompts, "seed": seed}, tables)
