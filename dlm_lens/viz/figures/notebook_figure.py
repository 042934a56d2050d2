"""`NotebookFigure`: a matplotlib figure that a notebook shows without `%matplotlib inline`."""

from io import BytesIO

from matplotlib.figure import Figure

DPI = 110


class NotebookFigure(Figure):
    """A figure made without pyplot, which a notebook shows as the value of a cell.

    IPython calls `_repr_png_`. Figures of matplotlib have a PNG formatter only after `%matplotlib inline`; with it,
    IPython uses that formatter for this class too, and shows the figure once.
    """

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight")
        return buffer.getvalue()
