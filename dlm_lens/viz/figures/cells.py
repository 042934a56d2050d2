"""`draw_cells`: a map of cells whose files stay small in vector formats."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh

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
