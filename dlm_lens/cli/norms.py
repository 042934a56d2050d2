"""`dlm-lens norms`: value norms of the sinks of a recording beside those of other tokens."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_lens.cli.options import DETECTOR, JSON, QUERIES, RECORDING, SEED, check_rule
from dlm_lens.cli.output import show_tables
from dlm_lens.cli.recordings import load_recording, sinks_of
from dlm_lens.option_values import one_of


def norms_command(
    recording: Annotated[Path, RECORDING],
    detector: Annotated[str | None, DETECTOR] = None,
    level: Annotated[
        str | None, typer.Option(help="head (2601.19657, Eq. 15; the default) or layer (Eq. 16).")
    ] = None,
    queries: Annotated[str | None, QUERIES] = None,
    learned: Annotated[
        bool, typer.Option("--learned", help="Measure the learned sink tokens instead of detected sinks.")
    ] = False,
    match: Annotated[
        str, typer.Option(help="Tokens to compare with: any, or masked (only those in the same state as the sink).")
    ] = "any",
    samples: Annotated[int, typer.Option(min=1, help="How many pairs of a sink and another token.")] = 10_000,
    seed: Annotated[int, SEED] = 0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Compare value norms of sinks with those of other tokens.

    The recording needs the reducer value-norm, and received for shares of attention.
    """
    chosen = {"--detector": detector, "--level": level, "--queries": queries}
    if learned and (unused := [f"{option} {value}" for option, value in chosen.items() if value is not None]):
        raise ValueError(
            f"--learned measures the learned sink tokens; leave out {' and '.join(unused)}, or --learned"
        )
    detector, level, queries = detector or "above-mean", level or "head", queries or "all"
    one_of("--level", level, ("head", "layer"))
    one_of("--match", match, ("any", "masked"))
    check_rule(recording, detector, level, queries)
    from dlm_lens.probes import value_norms

    loaded = load_recording(recording)
    sinks: Any = "learned" if learned else sinks_of(loaded, detector, level, queries)
    norms = value_norms(loaded, sinks, samples=samples, match=match, seed=seed)  # type: ignore[arg-type]
    about = {"rule": norms.rule, "norm": norms.formula, "pairs": len(norms.sink), "found": norms.found}
    show_tables(
        as_json, {**about, "match": match, "seed": seed}, {"measures": norms.table(), "layers": norms.profile}
    )
