"""Text in figures: tokens as labels that cannot break a picture, captions that name scale, level and rule."""

import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

from matplotlib import font_manager

from dlm_lens.sinks import Level, Scale

PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}
"""For every text that may hold a token: nothing in it is markup ($ would start a formula, \\ a TeX command)."""

WRITTEN_LATER = "masked (not yet written)"

SCALE_LABELS: dict[Scale, str] = {
    "relative to uniform": "received attention\nrelative to uniform (1 = even)",
    "column sum": "received attention\ncolumn sum (in queries)",
    "share of attention": "share of attention\n(of all counted queries', 0 to 1)",
}


def token_labels(ids: Sequence[int], tokenizer: Any = None, length: int = 12) -> list[str]:
    """Token ids as short printable labels: the token's text, or the id where there is no tokenizer.

    The negative ids -1, -2, ... are a model's learned sink tokens: sink(0), sink(1), ....
    """
    if tokenizer is None:
        return [str(i) if i >= 0 else f"sink({-1 - i})" for i in ids]
    texts = {i: token_label(str(tokenizer.decode([i])), length) for i in set(ids) if i >= 0}
    texts |= {i: f"sink({-1 - i})" for i in set(ids) if i < 0}
    return [texts[i] for i in ids]


def printable(text: str) -> str:
    """The text with everything but line breaks that could command a terminal written as its escape."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def token_label(text: str, length: int = 12) -> str:
    r"""One token's text in at most `length` characters, all of them visible and in the font.

    A space is shown as ␣ (left out in front of a word), what cannot be printed or drawn as its escape (\n,
    \u4f60); longer text ends in ….
    """
    if text[:1] == " " and text.strip():
        text = text[1:]
    shown = "".join(_visible(character) for character in text) or "∅"
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def _visible(character: str) -> str:
    if character == " ":
        return "␣"
    if character.isprintable() and _drawable(character):
        return character
    return character.encode("unicode_escape").decode("ascii")


@cache
def _drawable(character: str) -> bool:
    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    return font.get_char_index(ord(character)) != 0


def counted_keys(keys: int, sinks: int) -> str:
    """How many positions, and learned sink tokens among the keys, for captions."""
    learned = f" and {sinks} learned sink token{'s' * (sinks > 1)}" if sinks else ""
    return f"{keys - sinks} positions{learned}"


def level_label(level: Level, layer: int | None, head: int | None) -> str:
    """The level and what it was taken of, for captions."""
    return {
        "head": f"level: head (layer {layer}, head {head})",
        "layer": f"level: layer (head mean of layer {layer})",
        "model": "level: model (mean over layers and heads)",
    }[level]


def caption(parts: Sequence[str], width: float) -> str:
    """The parts of a caption on as many lines as fit `width` inches in 8 point; no part is broken if it fits."""
    room = max(40, int(width * 14))
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= room:
            lines[-1] += f" · {part}"
        else:
            lines += textwrap.wrap(part, width=room)
    return "\n".join(lines)
