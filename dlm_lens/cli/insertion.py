"""`dlm-lens insertion`: what predictions lose when a sparse autoencoder's reconstruction is inserted."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_lens.cli.options import (
    DEVICE,
    DTYPE,
    JSON,
    LOADING,
    OTHER_MODEL,
    RECORDING,
    SEED,
    STEPS,
    check_network,
    loading_options,
)
from dlm_lens.cli.output import show_tables
from dlm_lens.cli.recordings import load_recording, network_of
from dlm_lens.option_values import one_of, whole_numbers, words


def insertion_command(
    recording: Annotated[Path, RECORDING],
    sae: Annotated[str, typer.Option(help="Directories of sparse autoencoders, separated by commas.")],
    model: Annotated[str | None, OTHER_MODEL] = None,
    steps: Annotated[str | None, STEPS] = None,
    places: Annotated[
        str, typer.Option(help="Where the activation is replaced: all, open, decided.")
    ] = "all,open,decided",
    by_step: Annotated[bool, typer.Option("--by-step", help="Also a table by step.")] = False,
    device: Annotated[str | None, DEVICE] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    loading: Annotated[list[str] | None, LOADING] = None,
    seed: Annotated[int, SEED] = 0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Insert sparse autoencoders on every canvas of a recorded run: added loss beside zero, mean and two nulls."""
    check_network(model, dtype, device)
    chosen_model = loading_options(loading)
    chosen = words("--places", places)
    for name in chosen:
        one_of("--places", name, ("all", "open", "decided"))
    given: dict[str, Any] = {} if steps is None else {"steps": whole_numbers("--steps", steps)}
    directories = words("--sae", sae)
    for directory in directories:
        if not Path(directory).is_dir():
            raise FileNotFoundError(f"{directory} is no directory; --sae takes directories of autoencoders")

    from dlm_lens.features import load_sae
    from dlm_lens.probes import insertion_loss

    loaded = load_recording(recording)
    network = network_of(loaded, model, device, dtype, chosen_model)
    saes = [load_sae(directory, network) for directory in directories]
    loss = insertion_loss(network, loaded.run, saes, places=chosen, seed=seed, progress=True, **given)
    tables = {"insertions": loss.table(), **({"steps": loss.by_step()} if by_step else {})}
    show_tables(as_json, {"autoencoders": [str(one) for one in saes], "seed": seed}, tables)
