"""`dlm-lens sinks`, `norms` and `lens`: tables of a recording, as text or JSON."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_lens.command_options import CLASSES, LEVELS, check_device, check_dtype, one_of, whole_numbers
from dlm_lens.printable import echo, printable

if TYPE_CHECKING:
    import pandas as pd

    from dlm_lens.recording import Recording
    from dlm_lens.sinks import Sinks

logger = logging.getLogger(__name__)

RECORDING = typer.Argument(help="Directory of a recording (dlm-lens record, or record(..., to=)).")
DETECTOR = typer.Option(
    help="above-mean[:EPS], above-std[:K], share[:X], mean-attention[:X], soft-sigmoid[:ALPHA], top-k[:K], "
    "above-median[:TIMES], low-key-norm[:BELOW]."
)
EPS = typer.Option(help="eps of above-mean (2510.15731, Eq. 3); the same as above-mean:EPS.")
LEVEL = typer.Option(help="head, layer (mean pattern over heads) or model.")
LAYER = typer.Option(help="Only this layer; with --head only that head of it.")
HEAD = typer.Option(min=0, help="Only this head, of --layer or of every layer.")
QUERIES = typer.Option(help="all, masked, unmasked, prompt or block, as recorded.")
JSON = typer.Option("--json", help="Print JSON instead of tables.")


def sinks_command(
    recording: Annotated[Path, RECORDING],
    detector: Annotated[str, DETECTOR] = "above-mean",
    eps: Annotated[float | None, EPS] = None,
    level: Annotated[str, LEVEL] = "head",
    queries: Annotated[str, QUERIES] = "all",
    layer: Annotated[int | None, LAYER] = None,
    head: Annotated[int | None, HEAD] = None,
    top: Annotated[
        int, typer.Option(min=0, help="How many sinks to list, each at its strongest step, strongest first.")
    ] = 20,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Find the attention sinks of a recording: how many per layer, and the strongest ones."""
    check_place(layer, head, level)
    check_rule(recording, detector, eps, level, queries)
    found = sinks_of(read(recording), detector, eps, level, queries)
    # Which sinks are listed does not depend on how many: all of them, then those of the place.
    listed = only_place(found.table(int(found.is_sink.sum())), layer, head, of=found).head(top)
    about = {"rule": found.rule, "found": repr(found), **named_place(layer, head)}
    show(as_json, about, {"layers": per_layer(found, layer, head), "sinks": listed})


def norms_command(
    recording: Annotated[Path, RECORDING],
    detector: Annotated[str, DETECTOR] = "above-mean",
    eps: Annotated[float | None, EPS] = None,
    level: Annotated[str, typer.Option(help="head (2601.19657, Eq. 15) or layer (Eq. 16).")] = "head",
    learned: Annotated[bool, typer.Option(help="Judge the learned sink tokens instead of detected sinks.")] = False,
    match: Annotated[str, typer.Option(help="any, or masked: compare with tokens masked as the sink is.")] = "any",
    samples: Annotated[int, typer.Option(min=1, help="Pairs of a sink and another token.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Do sinks have short values? Needs a recording with --reducer value-norm, and received for shares."""
    one_of("--level", level, ("head", "layer"))
    one_of("--match", match, ("any", "masked"))
    check_rule(recording, detector, eps, level, "all")
    from dlm_lens.probes.norms import value_norms

    rec = read(recording)
    sinks: Any = "learned" if learned else sinks_of(rec, detector, eps, level, "all")
    norms = value_norms(rec, sinks, samples=samples, match=match, seed=seed)  # type: ignore[arg-type]
    about = {"rule": norms.rule, "norm": norms.formula, "pairs": len(norms.sink), "found": norms.found}
    show(as_json, {**about, "match": match, "seed": seed}, {"measures": norms.table(), "layers": norms.profile})


def lens_command(
    recording: Annotated[Path, RECORDING],
    model: Annotated[
        str | None, typer.Option(help="The recording's model; the one that it names by default.")
    ] = None,
    positions: Annotated[
        str | None, typer.Option(help="Positions from the prompt's first token such as 3,-1; the sinks by default.")
    ] = None,
    detector: Annotated[str, DETECTOR] = "above-mean",
    eps: Annotated[float | None, EPS] = None,
    level: Annotated[str, LEVEL] = "head",
    steps: Annotated[str | None, typer.Option(help="Steps such as 0,16,-1; all by default.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers such as 0,5,-1; all by default.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many tokens to name.")] = 3,
    lines: Annotated[int, typer.Option(min=0, help="How many positions to list, of the last layer read.")] = 20,
    tuned: Annotated[Path | None, typer.Option(help="A tuned lens of this model (train_tuned_lens).")] = None,
    hooks: Annotated[
        str, typer.Option(help='Say what hooks change, such as "mask_sinks(above_mean(3), top=5)".')
    ] = "",
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, auto, cpu.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the model: bfloat16, float32, ...; its own by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the controls beside the sinks.")] = 0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Read what each layer says at the sinks (or at positions) of a recording: the logit lens, step by step."""
    from dlm_lens.adapters.model_names import check_model_name
    from dlm_lens.hooks.expressions import check_expression, parse_hooks

    if model is not None:
        check_model_name(model)
    check_dtype(dtype)
    check_device(device)
    if hooks:
        check_expression(hooks)
    if tuned is not None and not tuned.exists():
        raise FileNotFoundError(f"{tuned} is not there; --tuned takes what TunedLens.save wrote")
    chosen_steps, chosen_layers = whole_numbers("--steps", steps), whole_numbers("--layers", layers)
    given = whole_numbers("--positions", positions)
    check_rule(recording, detector, eps, level, "all")

    from dlm_lens.adapters import load
    from dlm_lens.probes.lens import logit_lens
    from dlm_lens.probes.tuned_lens import TunedLens
    from dlm_lens.recording.provenance import name_of

    rec = read(recording)
    sinks = sinks_of(rec, detector, eps, level, "all") if positions is None else None
    wanted = sinks if sinks is not None else _in_rows(rec, given or [])
    chosen: dict[str, Any] = {"steps": chosen_steps, "layers": chosen_layers}
    parsed = parse_hooks(hooks) if hooks else ()
    network = load(model or rec.model, dtype=dtype, device_map=device)
    if Path(name_of(network)).name != Path(rec.model).name:
        logger.warning("the recording is of %s, and %s reads it", rec.model, name_of(network))
    lens = logit_lens(
        network,
        rec.run,
        wanted,
        **chosen,
        top=top,
        hooks=parsed,
        tuned=None if tuned is None else TunedLens.load(tuned, network),
        seed=seed,
    )
    if not len(lens.step):
        raise ValueError("there is nothing to read: no such sink or position in these steps; lower the threshold")
    listed = lens.table(lens.layers[-1]).head(lines)
    about = {"lens": lens.lens, "rule": "positions" if sinks is None else sinks.rule, "hooks": list(lens.hooks)}
    show(as_json, about, {"layers": lens.summary(), "entries": listed})


def read(path: Path) -> "Recording":
    """A recording, whose tokens have the texts that it stores."""
    from dlm_lens.recording import Recording

    return Recording.load(path)


def _in_rows(rec: "Recording", positions: list[int]) -> Any:
    """Positions that count from each row's first token (negative ones from the end), on the canvas: [row, key]."""
    import torch

    rows, canvas = rec.run.tokens.shape
    chosen = torch.zeros(rows, canvas + rec.sinks, dtype=torch.bool)
    for row, padding in enumerate(rec.run.padding.tolist()):
        there = [p + (padding if p >= 0 else canvas) for p in positions if padding - canvas <= p < canvas - padding]
        chosen[row, there] = True
    most = canvas - int(rec.run.padding.min())
    for position in positions:
        if not -most <= position < most:
            raise ValueError(f"--positions {position}: positions go from 0 to {most - 1}, or from -{most} to -1")
    return chosen


def sinks_of(rec: "Recording", detector: str, eps: float | None, level: str, queries: str) -> "Sinks":
    """What the options say."""
    from dlm_lens.sinks import find_sinks, received_of

    rule = detector_of(detector, eps)
    if rule.reads_hidden_states:
        return find_sinks(rec, rule, level=level)  # type: ignore[arg-type]
    return find_sinks(received_of(rec, queries), rule, level=level)  # type: ignore[arg-type]


def detector_of(text: str, eps: float | None = None) -> Any:
    """The detector that an option names.

    Raises:
        ValueError: no such detector, or a setting that it does not take.
    """
    from dlm_lens.sinks.detector_registry import parse_detector

    return parse_detector(text, eps).build()


def check_rule(recording: Path, detector: str, eps: float | None, level: str, queries: str) -> None:
    """Raise where the options of a command on a recording are wrong, before torch is imported.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: an option that cannot be.
    """
    from dlm_lens.recording.directories import check_recording
    from dlm_lens.sinks.detector_registry import parse_detector

    parse_detector(detector, eps)
    one_of("--level", level, LEVELS)
    one_of("--queries", queries, CLASSES)
    check_recording(recording)


def check_place(layer: int | None, head: int | None, level: str) -> None:
    """Raise where a layer or a head is chosen that the level averages over.

    Raises:
        ValueError: it is.
    """
    if head is not None and level != "head":
        raise ValueError(f"--head {head}: at --level {level} there are no heads; leave one of the two out")
    if layer is not None and level == "model":
        raise ValueError(f"--layer {layer}: at --level model there are no layers; leave one of the two out")


def named_place(layer: int | None, head: int | None) -> dict[str, int]:
    """What was chosen, for the lines above the tables."""
    return {name: value for name, value in (("layer", layer), ("head", head)) if value is not None}


def only_place(table: "pd.DataFrame", layer: int | None, head: int | None, of: Any) -> "pd.DataFrame":
    """The lines of a layer and a head.

    Args:
        table: with columns layer and head.
        layer: index; None for all.
        head: index; None for all.
        of: `Sinks` or `Trajectories`, whose layers and heads there are.

    Raises:
        ValueError: a layer or a head that is not there.
    """
    for name, value, there in (("layer", layer, of.layers), ("head", head, range(_heads(of)))):
        if value is None:
            continue
        if value not in there:
            known = ", ".join(map(str, there)) or "(none)"
            raise ValueError(f"--{name} {value}: the recording has {name}s {known}")
        table = table[table[name] == value]
    return table


def _heads(of: Any) -> int:
    """How many heads `Sinks` or `Trajectories` tell apart."""
    if "head" not in of.dims:
        return 0
    scores = getattr(of, "is_sink", None)
    return int(of.main.shape[-1] if scores is None else scores.shape[of.dims.index("head")])


def per_layer(found: "Sinks", layer: int | None = None, head: int | None = None) -> "pd.DataFrame":
    """Per layer: sinks in a pattern, share of patterns with one, how often the next step keeps the main one.

    Args:
        found: the sinks.
        layer: only this one.
        head: only this head of every layer.
    """
    if head is not None:
        axis = found.dims.index("head")
        parts = {name: getattr(found, name).narrow(axis, head, 1) for name in ("is_sink", "scores", "threshold")}
        found = replace(found, **parts)
    table = _per_layer(found)
    return table if layer is None else table[table["layer"] == layer]


def _per_layer(found: "Sinks") -> "pd.DataFrame":
    import pandas as pd

    defined = ~found.scores.isnan().all(-1)
    if "layer" not in found.dims:
        return pd.DataFrame([{"layer": "all", **_counts(found.is_sink, defined, found.main(), found.dims)}])
    axis = found.dims.index("layer")
    main, dims = found.main(), tuple(name for name in found.dims if name != "layer")
    lines = [
        {
            "layer": layer,
            **_counts(found.is_sink.select(axis, i), defined.select(axis, i), main.select(axis, i), dims),
        }
        for i, layer in enumerate(found.layers)
    ]
    return pd.DataFrame(lines)


def _counts(is_sink: Any, defined: Any, main: Any, dims: tuple[str, ...]) -> dict[str, float | int]:
    """Means over the patterns with any score: a row that has ended has none at later steps."""
    line: dict[str, float | int] = {
        "sinks": int(is_sink.sum()),
        "sinks_per_pattern": float(is_sink.sum(-1)[defined].float().mean()),
    }
    line["patterns_with_sink"] = float(is_sink.any(-1)[defined].float().mean())
    if dims[0] == "step" and len(main) > 1:
        both = (main[1:] >= 0) & (main[:-1] >= 0)
        line["main_sink_stays"] = (
            float((main[1:] == main[:-1])[both].float().mean()) if bool(both.any()) else float("nan")
        )
    return line


def show(as_json: bool, about: Mapping[str, Any], tables: Mapping[str, "pd.DataFrame"]) -> None:
    """Print everything, as JSON without NaN or as text."""
    if as_json:
        found = {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}
        text = json.dumps({**about, **found}, ensure_ascii=False, indent=1)
        echo(text if printable(text) == text else json.dumps({**about, **found}, indent=1))
        return
    for name, value in about.items():
        echo(f"{name}: {value}")
    for name, table in tables.items():
        echo(f"\n{name}")
        if table.empty:
            echo("(none)")
            continue
        echo(_unmeasured(table).to_string(index=False, float_format=lambda x: f"{x:.4g}"))


def _unmeasured(table: "pd.DataFrame") -> "pd.DataFrame":
    """Without columns in which nothing is known, and without those that say what stands elsewhere."""
    repeated = [name for name in ("scale", "level") if name in table]
    return table.dropna(axis=1, how="all").drop(columns=repeated, errors="ignore")
