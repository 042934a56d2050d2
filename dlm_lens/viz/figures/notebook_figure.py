"""`NotebookFigure`: a matplotlib figure that a notebook shows without `%matplotlib inline`, in its own colours."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, cast

from matplotlib import rc_context, rcParams, rcParamsDefault
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure

DPI = 110

COLOURS = (
    "axes.edgecolor", "axes.facecolor", "axes.grid", "axes.labelcolor", "axes.prop_cycle", "axes.titlecolor",
    "figure.edgecolor", "figure.facecolor", "grid.color", "hatch.color", "legend.edgecolor", "legend.facecolor",
    "legend.labelcolor", "lines.color", "patch.edgecolor", "patch.facecolor", "savefig.edgecolor",
    "savefig.facecolor", "text.color", "xtick.color", "xtick.labelcolor", "ytick.color", "ytick.labelcolor",
)  # fmt: skip
"""The parts of a matplotlib style that figures do not take over; fonts, for example, are the user's."""


@contextmanager
def own_colours() -> Iterator[None]:
    """A block, or with @ a function, in which figures have matplotlib's default colours.

    Figures set the colours of lines and marks for a white page: under a dark style black lines were on black.
    """
    current, default = cast(dict[str, Any], rcParams), cast(dict[str, Any], rcParamsDefault)
    own: Any = {name: default[name] for name in COLOURS}
    if all(current[name] == value for name, value in own.items()):
        yield  # nothing is set, so that figures can be made in threads
    else:
        with rc_context(own):
            yield


class NotebookFigure(Figure):
    """A figure made without pyplot, which a notebook shows as the value of a cell.

    IPython calls `_repr_png_`. Figures of matplotlib have a PNG formatter only after `%matplotlib inline`; with it,
    IPython uses that formatter for this class too, and shows the figure once.
    """

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight")
        return buffer.getvalue()

    @own_colours()
    def draw(self, renderer: RendererBase) -> None:
        """Draw; ticks are made now, in the colours of the style that is set."""
        super().draw(renderer)

    @own_colours()
    def savefig(self, *args: Any, **settings: Any) -> None:
        """Write a file, as a `Figure` does."""
        super().savefig(*args, **settings)
