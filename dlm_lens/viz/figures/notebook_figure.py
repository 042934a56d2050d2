"""`NotebookFigure`: a matplotlib figure that a notebook shows without `%matplotlib inline`, in its own colours.

Also what many figures draw in it: intervals of a line (`draw_band`) and maps (`draw_cells`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, cast

import numpy as np
from matplotlib import rc_context, rcParams, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

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


WIDTH = 5.0
"""Points across, of the bar of a point without neighbours."""


def draw_band(
    axes: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, *, colour: str, alpha: float = 0.2
) -> None:
    """Shade the intervals of a line: a band, and a bar where a point has no neighbour with an interval.

    A band has no width at a single point, such as the only step of a run, so that its interval could not be seen.

    Args:
        axes: to draw in.
        x: places of the points, in the order of the line.
        low: lower ends of the intervals; NaN where there is none.
        high: upper ends.
        colour: of the line.
        alpha: opacity of the shade.
    """
    at, below, above = (np.asarray(values, dtype=float) for values in (x, low, high))
    axes.fill_between(at, below, above, color=colour, alpha=alpha, linewidth=0)
    known = np.pad(np.isfinite(below) & np.isfinite(above), 1)
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    if alone.any():
        axes.vlines(
            at[alone], below[alone], above[alone], colors=colour, alpha=alpha, linewidth=WIDTH, gid="interval"
        )


MOST_VECTORS = 4096
"""Marks that a PDF or SVG file has as shapes. More are an image in it; 45,000 cells as shapes took 11 MB."""


def draw_cells(axes: Axes, *given: Any, **style: Any) -> QuadMesh:
    """`axes.pcolormesh`, in PDF and SVG an image where there are many cells; its resolution is `savefig(dpi=)`.

    Args:
        axes: to draw in.
        *given: the values [down, across], or the edges across and down before them.
        **style: of `pcolormesh`.
    """
    return axes.pcolormesh(*given, rasterized=many(np.size(given[-1])), **style)


def many(marks: int) -> bool:
    """Whether so many cells or marks are an image in a PDF or SVG file."""
    return marks > MOST_VECTORS
