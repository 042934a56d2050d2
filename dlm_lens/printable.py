"""Text from files and models that a terminal shows and does not obey."""

from typing import Any

NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
JOINERS = "\u200c\u200d"
"""Invisible, and part of a written character where they stand between two others."""


def escaped(character: str) -> str:
    r"""A character as its code: \n, \t, \r, or \u and four (\U and eight) hexadecimal digits."""
    code = ord(character)
    return NAMED.get(character) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def is_visible(text: str, index: int) -> bool:
    """Whether a character of a text shows as itself, and changes nothing of what stands around it."""
    character = text[index]
    if character in JOINERS and 0 < index < len(text) - 1:
        return all(beside.isprintable() and beside != " " for beside in (text[index - 1], text[index + 1]))
    return character.isprintable()


def printable(text: str) -> str:
    r"""Text of several words (a sentence, an answer, an error) with its spaces and line breaks, without commands.

    Control characters (ESC, BEL, NUL), marks that turn the direction of writing and lone surrogates are written as
    their codes, such as \u001b; line breaks and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or is_visible(text, i) else escaped(c) for i, c in enumerate(text))


def echo(text: object = "", *, err: bool = False, **style: Any) -> None:
    """Print a line for people, whatever it quotes: `printable`, in a colour of `typer.style` if there is one."""
    import typer

    typer.secho(printable(str(text)), err=err, **style)
