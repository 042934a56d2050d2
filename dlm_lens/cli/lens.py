"""`dlm-lens lens`: what the logit lens reads in each layer at sinks or positions of a recording."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from dlm_lens.cli.options import (
    DETECTOR,
    DEVICE,
    DTYPE,
    HOOKS,
    JSON,
    LAYERS,
    LEVEL,
    LOADING,
    OTHER_MODEL,
    QUERIES,
    RECORDING,
    SEED,
    STEPS,
    check_network,
    check_rule,
    loading_options,
)
from dlm_lens.cli.output import show_tables
from dlm_lens.cli.recordings import load_recording, network_of, sinks_of
from dlm_lens.option_values import whole_numbers
from dlm_lens.printable import shown

if TYPE_CHECKING:
    from dlm_lens.probes import LogitLens
    from dlm_lens.recording import Recording
    from dlm_lens.sinks import Sinks


LINES = typer.Option(
    min=0,
    help="How many positions to list, of the last layer that is read; 20 as text, all in JSON.",
    show_default=False,
)


def lens_command(
    recording: Annotated[Path, RECORDING],
    model: Annotated[str | None, OTHER_MODEL] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            help="Positions from the prompt's first token, such as 3,-1, or a class of them at each step: masked, "
            "visible, prompt or answer. Sinks by default."
        ),
    ] = None,
    detector: Annotated[str, DETECTOR] = "above-mean",
    level: Annotated[str, LEVEL] = "head",
    queries: Annotated[str, QUERIES] = "all",
    steps: Annotated[str | None, STEPS] = None,
    layers: Annotated[str | None, LAYERS] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the likeliest tokens to name.")] = 3,
    lines: Annotated[int | None, LINES] = None,
    tuned: Annotated[Path | None, typer.Option(help="A tuned lens of this model (train_tuned_lens).")] = None,
    hooks: Annotated[str, HOOKS] = "",
    device: Annotated[str | None, DEVICE] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    loading: Annotated[list[str] | None, LOADING] = None,
    seed: Annotated[int, SEED] = 0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Read every layer at the sinks of a recording, or at given positions, with the logit lens, step by step.

    With --hooks the tables also have what the interventions change; --hooks run takes those of the recording.
    """
    from dlm_lens.hooks.expressions import check_given, given_hooks

    check_network(model, dtype, device)
    chosen_model = loading_options(loading)
    check_given(hooks)
    if tuned is not None and not tuned.exists():
        raise FileNotFoundError(f"{tuned} does not exist; --tuned takes a file that TunedLens.save wrote")
    places = None if positions is None else _places(positions)
    texts = {"steps": steps, "layers": layers}
    given = {name: whole_numbers(f"--{name}", text) for name, text in texts.items() if text is not None}
    check_rule(recording, detector, level, queries)

    from dlm_lens.probes import TunedLens, logit_lens

    loaded = load_recording(recording)
    sinks = sinks_of(loaded, detector, level, queries) if positions is None else None
    where: Any = _on_canvas(loaded, places) if isinstance(places, list) else places or sinks
    interventions = given_hooks(hooks, loaded)
    network = network_of(loaded, model, device, dtype, chosen_model)
    lens = logit_lens(
        network,
        loaded.run,
        where,
        steps=given.get("steps"),
        layers=given.get("layers"),
        top=top,
        hooks=interventions,
        tuned=None if tuned is None else TunedLens.load(tuned, network),
        seed=seed,
        progress=True,
    )
    _show(lens, positions, sinks, lines, as_json=as_json)


def _show(
    lens: "LogitLens", positions: str | None, sinks: "Sinks | None", lines: int | None, *, as_json: bool
) -> None:
    """Print what a lens read at the positions that were given, or at the sinks.

    Raises:
        ValueError: these steps have none of them.
    """
    if not len(lens.step):
        if sinks is None:
            raise ValueError(
                f"--positions {positions}: there is none in these steps; give other steps or positions"
            )
        raise ValueError(f"there is no sink by {sinks.rule} in these steps; lower the threshold")
    rule = "positions" if sinks is None else sinks.rule
    about: dict[str, Any] = {"lens": lens.lens, "rule": rule, "hooks": list(lens.hooks)}
    tables = {"layers": lens.summary()}
    entries = lens.table(lens.layers[-1])
    listed = lines if lines is not None else len(entries) if as_json else 20
    if not as_json:
        about["entries"] = f"{min(listed, len(entries))} of {len(entries)}, of layer {lens.layers[-1]}"
    if listed or as_json:  # as text an empty table would say that there is none
        tables["entries"] = entries.head(listed)
    show_tables(as_json, about, tables)


def _places(text: str) -> list[int] | str:
    """Positions, or the name of a class of them.

    Raises:
        ValueError: neither.
    """
    if not text.strip()[:1].isalpha():
        return whole_numbers("--positions", text)
    from dlm_lens.hooks.positions import PositionClass

    known = get_args(PositionClass)
    if text not in known:
        names = ", ".join(known)
        raise ValueError(f"--positions is {shown(text)}; give whole numbers such as 3,-1, or one of {names}")
    return text


def _on_canvas(recording: "Recording", positions: list[int]) -> Any:
    """Positions that count from each row's first token (negative ones from the end), on the canvas: [row, key].

    Raises:
        ValueError: a position that no row has.
    """
    import torch

    rows, canvas = recording.run.tokens.shape
    chosen = torch.zeros(rows, canvas + recording.sinks, dtype=torch.bool)
    for row, padding in enumerate(recording.run.padding.tolist()):
        length = canvas - padding
        chosen[row, [p + (padding if p >= 0 else canvas) for p in positions if -length <= p < length]] = True
    longest = canvas - int(recording.run.padding.min())
    for position in positions:
        if not -longest <= position < longest:
            raise ValueError(
                f"--positions {position}: positions go from 0 to {longest - 1}, or from -{longest} to -1"
            )
    return chosen
