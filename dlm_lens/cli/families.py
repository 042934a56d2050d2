"""`dlm-lens families`: the model families with their checkpoints, special token ids and samplers."""

from typing import TYPE_CHECKING, Annotated, Any

from dlm_lens.cli.options import JSON
from dlm_lens.cli.output import show_json

if TYPE_CHECKING:
    from dlm_lens.adapters.registry import Family


def families_command(as_json: Annotated[bool, JSON] = False) -> None:
    """List the model families, their checkpoints, special token ids and samplers."""
    from rich.console import Console
    from rich.table import Table

    from dlm_lens.adapters import embedded_models
    from dlm_lens.adapters.registry import families

    if as_json:
        listed = [_as_json(family) for family in families()]
        show_json({"families": listed, "embedded models": list(embedded_models())})
        return
    console = Console()
    with console:  # one write: a reader such as head closes the pipe after the lines that it wants
        for family in families():
            grid = Table.grid(padding=(0, 2))
            for name, value in _rows(family).items():
                grid.add_row(f"  {name}", value)
            console.print(f"[bold]{family.name}[/bold]")
            console.print(grid)
        console.print(f"[bold]embedded models[/bold]: {', '.join(embedded_models())}")


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
