"""`NotebookFigure`: a matplotlib figure that a notebook shows without a magic."""

from io import BytesIO

from matplotlib.figure import Figure

DPI = 110


class NotebookFigure(Figure):
    """A figure without pyplot, shown where it is the value of a cell.

    IPython asks a value for its PNG; matplotlib's own figures have one only after `%matplotlib inline`, which then
    draws this one too, in its way and once.
    """

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight")
        return buffer.getvalue()
