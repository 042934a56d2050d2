"""Text in figures: tokens as labels without markup, and captions that name scale, level and rule."""

import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from dlm_lens.printable import counted, escaped, printable
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.token_text import MORE, TokenTexts
from dlm_lens.sinks import Level, Scale

Drawn = TypeVar("Drawn", bound=Figure)

PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}
"""Keyword arguments of every text that may hold a token, so that $ and \\ in it are no markup."""

OPEN_WORDS: Mapping[str, str] = {"masked": "open", "unmasked": "decided"}
"""Names of regions and classes of queries -> those for models without a mask token."""

SCALE_LABELS: dict[Scale, str] = {
    "relative to uniform": "received attention\nrelative to uniform (1 = uniform)",
    "column sum": "received attention\ncolumn sum (in queries)",
    "share of attention": "share of attention\n(of all counted queries', 0 to 1)",
}


def open_label(*uniform_noise: bool) -> str:
    """The legend of open positions: masked, or open where they hold random tokens in one of the models."""
    return "open (not decided yet)" if any(uniform_noise) else "masked (not decoded yet)"


def region_words(run: DenoisingRun) -> Mapping[str, str]:
    """Other names of regions and classes of queries for a run."""
    return OPEN_WORDS if run.uniform_noise else {}


def token_labels(ids: Sequence[int], tokenizer: Any = None, length: int = 12) -> list[str]:
    """Token ids as labels of a figure: the token's text, or the id where there is no tokenizer.

    Texts are as in `token_text.shown`, with characters that the font does not have as their codes.
    The negative ids -1, -2, ... are a model's learned sink tokens: sink(0), sink(1), ....
    """
    texts = TokenTexts(tokenizer)
    labels = {i: _drawn(texts.label(i, length), length) for i in set(ids)}
    return [labels[i] for i in ids]


def _drawn(label: str, length: int) -> str:
    drawn = _in_font(label)
    return drawn if len(drawn) <= length else drawn[: length - 1] + MORE


def _in_font(text: str) -> str:
    """A text with codes for the characters that no font of the figure has: boxes, and a warning for each."""
    properties = font_manager.FontProperties
    fonts = [font_manager.findfont(properties(family=[one])) for one in properties().get_family()]
    return "".join(c if c in "\n\t" or any(_drawable(c, font) for font in fonts) else escaped(c) for c in text)


@cache
def _drawable(character: str, font: str) -> bool:
    return font_manager.get_font(font).get_char_index(ord(character)) != 0


def counted_keys(keys: int, sinks: int, key: str = "position") -> str:
    """The numbers of positions (or what else keys are) and of learned sink tokens among the keys, for captions."""
    learned = f" and {counted(sinks, 'learned sink token')}" if sinks else ""
    return f"{counted(keys - sinks, key)}{learned}"


def numbered(name: Literal["layer", "head"], numbers: Sequence[int]) -> str:
    """Some layers or heads by their numbers, "layers 0 to 3" or "heads 1, 3"; "layers" where they are not known.

    No caption says that layers are all of the model's: a recording does not hold how many the model has.
    """
    first, last = (numbers[0], numbers[-1]) if numbers else (0, 0)
    several = len(numbers) > 2 and list(numbers) == list(range(first, last + 1))
    listed = f"{first} to {last}" if several else ", ".join(map(str, numbers))
    return f"{name}{'' if len(numbers) == 1 else 's'} {listed}".rstrip()


def level_label(
    level: Level, layer: int | None, head: int | None, layers: Sequence[int] = (), heads: Sequence[int] = ()
) -> str:
    """The level with its layer and head, for captions.

    Args:
        level: whose pattern it is.
        layer: index of the layer; None for a mean.
        head: index of the head; None for a mean.
        layers: the layers that a mean is over; empty where they are not known.
        heads: the heads that a mean is over, where they are not all of the model's; empty for all.
    """
    some_layers, some_heads = numbered("layer", layers), numbered("head", heads)
    return {
        "head": f"level: head (layer {layer}, head {head})",
        "layer": f"level: layer ({f'mean of {some_heads}' if heads else 'head mean'} of layer {layer})",
        "model": f"level: model (mean over {some_layers} and {some_heads})",
    }[level]


def step_ticks(axes: Axes, steps: Sequence[int]) -> None:
    """Number the columns of a map with a column per step, in the middle of each; at most 16 have a number."""
    shown = range(0, len(steps), max(1, -(-len(steps) // 16)))
    axes.set_xticks([place + 0.5 for place in shown], [str(steps[place]) for place in shown], fontsize=7)


def whole_ticks(axis: Axis, most: int | Literal["auto"] = "auto") -> None:
    """Number an axis of steps, layers or positions at whole numbers alone, also where it shows a single one."""
    axis.set_major_locator(MaxNLocator(most, integer=True, min_n_ticks=1))


class LogShares(LogFormatter):
    """Numbers a logarithmic axis of shares in percent, also between powers of ten where it shows one of them."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The label; empty for ticks that matplotlib gives none."""
        return f"{100 * x:g}%" if super().__call__(x, pos) else ""


def note(axes: Axes, text: str, height: float = 0.5) -> None:
    """Write a note into axes that show nothing, at a share of their height."""
    box = {"facecolor": "white", "edgecolor": "0.8", "alpha": 0.85, "pad": 3.0}
    axes.text(
        0.5, height, text, transform=axes.transAxes, ha="center", va="center", fontsize=7.5, color="0.35",
        gid="note", bbox=box, zorder=6, **PLAIN,
    )  # fmt: skip


def caption(parts: Sequence[str], width: float) -> str:
    """A caption of 8 points in lines of `width` inches, which breaks between its parts where they fit.

    Control characters, such as the name of a model may hold, are written as their codes: an SVG file has none. So
    are characters that the font does not have.
    """
    room = max(40, int(width * 14))
    lines: list[str] = []
    for part in (_in_font(printable(part)) for part in parts):
        if lines and len(lines[-1]) + len(part) + 3 <= room:
            lines[-1] += f" · {part}"
        else:
            lines += textwrap.wrap(part, width=room)
    return "\n".join(lines)


def captioned(
    figure: Drawn,
    title: str,
    *parts: str,
    axes: Axes | None = None,
    fontsize: float = 8,
    pad: float | None = None,
) -> Drawn:
    """The figure with a caption across it: the user's title and these parts, without those that are empty.

    Args:
        figure: the figure.
        title: the beginning of the caption.
        *parts: what follows it.
        axes: to write the caption above, instead of above the figure.
        fontsize: of the caption.
        pad: points between the caption and `axes`; None for matplotlib's.
    """
    text = caption([part for part in (title, *parts) if part], figure.get_figwidth())
    if axes is None:
        figure.suptitle(text, fontsize=fontsize, x=0.01, ha="left", **PLAIN)
    else:
        axes.set_title(text, loc="left", fontsize=fontsize, pad=pad, **PLAIN)
    return figure
