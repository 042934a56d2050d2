"""`emerging_lines`: the answer after each step, for a terminal."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from dlm_lens.display import RICH_STYLES
from dlm_lens.sampling.emerging_text import emerging_cells
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.viz.selection import index_of, step_places


def emerging_lines(run: RunLike, *, row: int = 0, steps: Sequence[int] | None = None) -> Iterator[Text]:
    """One line per step with the answer after it: new tokens in green, rewritten ones in yellow, open as ▢.

    Control characters in tokens are escaped (`token_text.shown`), so that no text can control the terminal.
    End-of-text is a dim ∎, and a tail of equal tokens is shown once with its count.

    Args:
        run: from `denoise`.
        row: index of the sequence in the batch.
        steps: the steps of the run to show; None for all that the row ran.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a row or a step that the run does not have.
    """
    run = as_run(run)
    index_of("row", row, range(len(run.tokens)))
    for step in range(int(run.row_steps[row])) if steps is None else step_places(steps, run.step_numbers):
        cells = emerging_cells(run, row, step)
        yield Text(" ").join(Text(cell.text, style=RICH_STYLES[cell.kind]) for cell in cells)
