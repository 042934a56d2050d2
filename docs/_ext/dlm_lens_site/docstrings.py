"""Docstrings as reStructuredText: they are plain text with names in single backticks."""

import re
from typing import Any

_CODE = re.compile(r"(``.+?``|:[\w:]+:`[^`]+`|`[^`]+`)")
_FIELD = re.compile(r"^(\s*:(?:param|type|raises|returns|rtype|Yields|ivar|vartype)\b[^:]*:)(.*)$")


_COLON = "\ufdd0"
"""Stands for a colon while napoleon reads the docstring of a property, where it takes "text: more" for a type."""


def hide_colons(_app: Any, what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Before napoleon: a property's first line is a sentence, and its colon no end of a type."""
    if what in ("property", "attribute", "data") and lines:
        lines[0] = lines[0].replace(":", _COLON)


def as_restructured_text(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Escape, after napoleon, what reStructuredText would read as markup; single backticks are code."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]
    code = False
    for number, line in enumerate(lines):
        literal = code and (not line.strip() or line.startswith("    "))
        code = literal or line.rstrip().endswith("::")
        if not literal and not line.lstrip().startswith(".. "):
            field = _FIELD.match(line)
            lines[number] = field[1] + escaped(field[2]) if field else escaped(line)


def escaped(text: str) -> str:
    """Text whose stars, bars and trailing underscores are no markup, and whose backticks are code."""
    parts = _CODE.split(text)
    for number, part in enumerate(parts):
        if number % 2 == 0:
            plain = re.sub(r"(?<!\\)([*|])", r"\\\1", part)
            parts[number] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", plain)
        elif part.startswith("`") and not part.startswith("``"):
            parts[number] = f"`{part}`"
    return "".join(parts)
