"""`dlm-lens doctor`: check the installation."""

from dataclasses import asdict
from typing import Annotated

import typer

from dlm_lens.cli.options import JSON, quiet_transformers
from dlm_lens.cli.output import show_json


def doctor_command(as_json: Annotated[bool, JSON] = False) -> None:
    """Check the installation: packages, GPUs, and the embedded model in nnsight and TransformerLens.

    The exit status is 1 where something is wrong.
    """
    from rich.console import Console
    from rich.markup import escape

    from dlm_lens.cli.installation import findings

    quiet_transformers()
    console, found = Console(), []
    for finding in findings():
        found.append(finding)
        if not as_json:
            mark = {True: "[green]ok[/green]", False: "[red]bad[/red]", None: "[dim]--[/dim]"}[finding.good]
            console.print(f"{mark:>4}  {finding.subject:<18} {escape(finding.found)}")
    if as_json:
        show_json([asdict(finding) for finding in found])
    if any(finding.good is False for finding in found):
        raise typer.Exit(1)
