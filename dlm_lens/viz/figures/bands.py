"""`draw_band`: the intervals of a line's points."""

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

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
