"""`dlm-lens families`: the model families with their checkpoints, special token ids and samplers."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_lens.cli.options import JSON
from dlm_lens.cli.output import show_json
from dlm_lens.printable import echo

if TYPE_CHECKING:
    from dlm_lens.adapters.registry import Family
    from dlm_lens.sampling.setting_meanings import SamplerSettings


def families_command(
    name: Annotated[
        str | None, typer.Argument(help="One family, with the settings of its samplers and what they mean.")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """List the model families, their checkpoints, special token ids and samplers."""
    from rich.console import Console
    from rich.table import Table

    from dlm_lens.adapters import embedded_models
    from dlm_lens.adapters.registry import families, family_named

    chosen = families() if name is None else (family_named(name),)
    explained = [] if name is None else _explained(chosen[0])
    if as_json:
        listed = [_as_json(family) for family in chosen]
        others = {"embedded models": list(embedded_models())} if name is None else {}
        own = {"sampler_settings": [asdict(sampler) for sampler in explained]} if explained else {}
        show_json({"families": listed, **others, **own})
        return
    console = Console()
    with console:  # one write: a reader such as head closes the pipe after the lines that it wants
        for family in chosen:
            grid = Table.grid(padding=(0, 2))
            for what, value in _rows(family).items():
                grid.add_row(f"  {what}", value)
            console.print(f"[bold]{family.name}[/bold]")
            console.print(grid)
        if name is None:
            console.print(f"[bold]embedded models[/bold]: {', '.join(embedded_models())}")
    for sampler in explained:
        echo(f"sampler {sampler}")


def _explained(family: "Family") -> Sequence["SamplerSettings"]:
    from dlm_lens.sampling.algorithm_registry import algorithms
    from dlm_lens.sampling.setting_meanings import settings_of_sampler

    return [settings_of_sampler(algorithms()[name], defaults) for name, defaults in family.samplers.items()]


def _rows(family: "Family") -> dict[str, str]:
    ids = [
        ", ".join(f"{name} {value}" for name, value in of_vocabulary.items())
        + f" ({f'{model_type}, ' if model_type else ''}vocabulary of {vocabulary})"
        for model_type, known in {"": family.special_ids, **family.special_ids_of_types}.items()
        for vocabulary, of_vocabulary in known.items()
    ]
    samplers = [
        f"{sampler}: {', '.join(f'{name}={value}' for name, value in defaults.items())}"
        for sampler, defaults in family.samplers.items()
    ]
    return {
        "model_type": ", ".join(family.layouts),
        "checkpoints": "\n".join(family.hub_names) or "your own",
        "special ids": "\n".join(ids) or "from config.json",
        "sampler": "\n".join(samplers),
    }


def _as_json(family: "Family") -> dict[str, Any]:
    return {
        "name": family.name,
        "model_types": list(family.layouts),
        "checkpoints": list(family.hub_names),
        "special_ids": {str(vocabulary): dict(ids) for vocabulary, ids in family.special_ids.items()},
        "special_ids_of_types": {
            model_type: {str(vocabulary): dict(ids) for vocabulary, ids in known.items()}
            for model_type, known in family.special_ids_of_types.items()
        },
        "samplers": {sampler: dict(defaults) for sampler, defaults in family.samplers.items()},
    }
