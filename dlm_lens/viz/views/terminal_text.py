"""`emerging_lines`: the answer after each step, for a terminal."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.token_text import TokenTexts

MASK, END = "▢", "∎"
NEW, REVISED = "bold green", "bold yellow"


def emerging_lines(run: DenoisingRun, *, row: int = 0, steps: Sequence[int] | None = None) -> Iterator[Text]:
    """One line per step with the answer after it: new tokens in green, rewritten ones in yellow, open as ▢.

    Control characters in tokens are escaped (`token_text.shown`), so that no text can control the terminal.
    End-of-text is a dim ∎, and a tail of equal tokens is shown once with its count.

    Args:
        run: from `denoise`.
        row: index of the sequence in the batch.
        steps: the steps to show; None for all that the row ran.

    Raises:
        ValueError: a row or a step that the run does not have.
    """
    if not 0 <= row < len(run.tokens):
        raise ValueError(f"row {row} of {len(run.tokens)}: rows go from 0")
    for step in range(int(run.row_steps[row])) if steps is None else steps:
        if not 0 <= step < run.steps:
            raise ValueError(f"step {step} of {run.steps}: steps go from 0")
        yield _line(run, row, step)


def _line(run: DenoisingRun, row: int, step: int) -> Text:
    shown = run.attention_mask[row].clone()
    shown[: run.prompt_length] &= run.masked[0, row, : run.prompt_length]
    ids = run.canvases[step + 1, row, shown].tolist()
    texts = TokenTexts(run.tokenizer)
    names = [texts.label(i, 24) for i in ids]
    labels = [END if i in run.eos_token_ids else name for i, name in zip(ids, names, strict=True)]
    masked = run.masked[step + 1, row, shown].tolist()
    new, again = run.unmasked[step, row, shown].tolist(), run.revised[step, row, shown].tolist()
    styles = [NEW if fresh else REVISED if edited else "" for fresh, edited in zip(new, again, strict=True)]
    cells = [
        (MASK, REVISED if style == REVISED else "dim") if hidden else (label, style)
        for label, hidden, style in zip(labels, masked, styles, strict=True)
    ]
    return Text(" ").join(_collapsed(cells))


def _collapsed(cells: list[tuple[str, str]]) -> Iterator[Text]:
    """The cells, where four or more equal labels at the end become one with their number."""
    tail = 0
    while tail < len(cells) and cells[-1 - tail][0] == cells[-1][0]:
        tail += 1
    kept = cells if tail < 4 else cells[: len(cells) - tail]
    for label, style in kept:
        yield Text(label, style=style)
    if len(kept) < len(cells):
        styles = [style for _, style in cells[len(kept) :]]
        style = next((one for one in (NEW, REVISED) if one in styles), "dim")
        yield Text(f"{cells[-1][0]} ×{tail}", style=style)
