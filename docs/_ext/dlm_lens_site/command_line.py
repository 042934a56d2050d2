"""The page of the command line, from the commands themselves."""

import inspect
from typing import Any


def command_line_page() -> dict[str, str]:
    """One section per command of `dlm-lens`: its usage, arguments and options."""
    import typer.main

    from dlm_lens.cli.app import COMMANDS, app

    group: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "What `dlm-lens COMMAND --help` says; `dlm-lens --version` prints the version.",
        "",
    ]
    lines += ["| command | what it does |", "|---|---|"]
    for name in COMMANDS:
        summary = _text(group.commands[name].help).split("\n\n")[0].replace("\n", " ")
        lines.append(f"| [`dlm-lens {name}`](#dlm-lens-{name}) | {cell(summary)} |")
    for name in COMMANDS:
        lines += ["", f"## dlm-lens {name}", "", *_section(name, group.commands[name])]
    return {"command-line.md": "\n".join(lines) + "\n"}


def _section(name: str, command: Any) -> list[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    usage = " ".join(f"{one.name.upper()}{'...' if one.nargs == -1 else ''}" for one in arguments)
    lines = [
        "```console",
        f"$ dlm-lens {name} {usage} [OPTIONS]".replace("  ", " "),
        "```",
        "",
        _text(command.help),
        "",
    ]
    lines += ["| argument or option | default | meaning |", "|---|---|---|"]
    for one in arguments:
        lines.append(f"| `{one.name.upper()}` | {'' if one.required else _default(one)} | {cell(one.help or '')} |")
    for one in options:
        names = ", ".join(f"`{text}`" for text in (*one.opts, *one.secondary_opts))
        lines.append(f"| {names} | {_default(one)} | {cell(one.help or '')} |")
    return lines


def _text(help_text: str | None) -> str:
    return inspect.cleandoc(help_text or "").replace("\b", "")


def _default(one: Any) -> str:
    value = one.default
    return f"`{value}`" if isinstance(value, (str, int, float)) and value not in (False, "") else ""


def cell(text: str) -> str:
    """A text in a cell of a Markdown table, without markup but its single backticks."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
