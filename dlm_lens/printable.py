"""Text and values of others (files, models, callers) in a message: one line, escaped, and of bounded length."""

from typing import Any

NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
JOINERS = "\u200c\u200d"
"""Invisible, and part of a written character where they are between two others."""

LONGEST_VALUE, LONGEST_NAME, LONGEST_MESSAGE = 80, 120, 400
"""Characters of a value, of a name and of another error's message in a message."""


def escaped(character: str) -> str:
    r"""A character as its code: \n, \t, \r, or \u and four (\U and eight) hexadecimal digits."""
    code = ord(character)
    return NAMED.get(character) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def is_visible(text: str, index: int) -> bool:
    """Whether a character of a text is drawn as itself, and changes nothing of its neighbours."""
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


def printable_name(name: str, most: int = LONGEST_NAME) -> str:
    """A name from a file in a message: escaped where a terminal would act on it, in at most `most` characters."""
    text = name if name.isprintable() else repr(name)[1:-1]
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: Any) -> str:
    """A value in a message: one line of at most 80 characters, whatever its repr does."""
    if isinstance(value, str | list) and len(value) > LONGEST_VALUE:
        value = value[:LONGEST_VALUE]
    if isinstance(value, dict) and len(value) > LONGEST_VALUE:
        return f"an object of {len(value)} fields"
    if is_array(value):
        return f"a {type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr of the caller's own may do anything, and Python writes no number of 5000 digits
        text = "a whole number of thousands of digits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def counted(count: int, one: str) -> str:
    """`1 step`, `3 steps`: a number with its noun, whose plural ends in s."""
    return f"{count} {one}{'' if count == 1 else 's'}"


def is_array(value: Any) -> bool:
    """Whether this is a tensor or an array, without an import of torch or numpy."""
    return all(hasattr(value, name) for name in ("dtype", "shape", "tolist")) and not is_numpy_scalar(value)


def is_numpy_scalar(value: Any) -> bool:
    """Whether this is a single number or truth value of numpy's."""
    return type(value).__module__ == "numpy" and hasattr(value, "item") and type(value).__name__ != "ndarray"


def one_line(error: BaseException) -> str:
    """The message of an exception as a part of a sentence, of at most 400 characters; else its class."""
    text = " ".join(str(error).split()) or type(error).__name__
    return printable_name(text, LONGEST_MESSAGE)


def echo(text: object = "", *, err: bool = False, **style: Any) -> None:
    """Print a line on the terminal, `printable` whatever it quotes, in a style of `typer.style` if one is given."""
    import typer

    typer.secho(printable(str(text)), err=err, **style)
