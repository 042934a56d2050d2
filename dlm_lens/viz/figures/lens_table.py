"""`lens_table`: the likeliest token of a lens in every layer, over the steps or over the positions."""

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from dlm_lens.arguments import checked_arguments, whole
from dlm_lens.probes import LogitLens, logit_lens
from dlm_lens.sampling import DenoisingRun, part_of_run
from dlm_lens.viz.figures.labels import PLAIN, captioned, token_labels
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, own_colours
from dlm_lens.viz.figures.positions import MASKED
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import row_number, step_places
from dlm_lens.viz.sink_tracks import row_blocks

MOST_COLUMNS = 20
RIGHT = "#b2182b"


@checked_arguments(step=whole(), position=whole(), row=whole())
@own_colours()
def lens_table(
    lens: LogitLens, *, position: int | None = None, step: int | None = None, row: int = 0, title: str = ""
) -> Figure:
    """Likeliest token by layer (up) and step or position (across), coloured by its probability.

    A red frame marks a cell whose likeliest token is the one finally decoded. Only columns where the model predicts
    a masked token (blue strip) can have one, since the loss does not train the logits at visible positions. A state
    of an AR model or of Dream predicts the next position, so that the strip is above the one before a mask. The
    labels below are the tokens of the step's canvas. At most 20 columns, evenly spread, are drawn; the caption
    gives the number of all.

    Args:
        lens: from `logit_lens`.
        position: a canvas position, to draw it over the steps; learned sink tokens follow the canvas. The figure
            counts positions from the prompt's first token.
        step: a step as in `lens.step`, to draw it over the positions, instead of `position`. The figure shows its
            number in the run.
        row: index of the sequence in the batch.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: not a `LogitLens`.
        ValueError: both or neither of position and step, or an entry that the lens has not read.
    """
    if not isinstance(lens, LogitLens):
        raise TypeError(f"the first argument is a {type(lens).__name__}; give the LogitLens of logit_lens")
    if (position is None) == (step is None):
        raise ValueError(
            f"position={position}, step={step}: give one of them, a position over steps or a step's positions"
        )
    here = lens.batch == row
    here = here & (lens.step == step if position is None else lens.position == position)
    entries = here.nonzero().flatten()
    across = lens.position if position is None else lens.step
    entries = entries[across[entries].argsort(stable=True)]
    padding = int(lens.run.padding[row]) if 0 <= row < len(lens.run.tokens) else 0
    shown = None if position is None else _shown(lens, position, padding)
    if not len(entries):
        what = f"step {step}" if position is None else str(shown)
        raise ValueError(f"the lens has read nothing at {what} of sequence {row}")
    count = len(entries)
    if count > MOST_COLUMNS:
        entries = entries[[round(i * (count - 1) / (MOST_COLUMNS - 1)) for i in range(MOST_COLUMNS)]]
    width = min(18.0, max(5.0, 0.52 * len(entries) + 1.8))
    figure = NotebookFigure(
        figsize=(width, min(12.0, max(2.8, 0.24 * len(lens.layers) + 1.9))), layout="constrained"
    )
    axes = figure.add_subplot()
    mesh = axes.pcolormesh(lens.top_probabilities[entries, :, 0].T.numpy(), cmap="viridis", vmin=0, vmax=1)
    _write_tokens(axes, lens, entries)
    _name_axes(axes, lens, entries, across, position is None, padding)
    bar = figure.colorbar(mesh, ax=axes, pad=0.01, fraction=0.03)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("probability of the\nlikeliest token", fontsize=8)
    frame = Line2D([], [], linestyle="", marker="s", markersize=7, mfc="none", mec=RIGHT, mew=1.4)
    frame.set_label("the token finally decoded")
    predicted = Patch(facecolor=MASKED, label=_strip_label(lens, entries))
    figure.legend(handles=[frame, predicted], loc="outside lower left", ncols=2, fontsize=7, frameon=False)
    many = "s" * (count > 1)
    where = f"{shown}, {count} step{many}"
    if step is not None:
        where = f"step {lens.run.step_numbers[step]}, {count} position{many}"
    if count > len(entries):
        where += f", {len(entries)} shown"
    hooks = [f"hooks: {', '.join(lens.hooks)}"] if lens.hooks else []
    return captioned(
        figure,
        title,
        lens.lens.capitalize() if lens.lens == "logit lens" else lens.lens,
        "scale: probability",
        "level: residual stream after each layer",
        *hooks,
        f"{where}, n = 1 sequence (row {row_number(lens.run, row)})",
        axes=axes,
        pad=12,
    )


@plot(
    "lens-table",
    "the likeliest token of the logit lens in each layer, of a position or a step; runs the model",
    options=("row", "steps", "position", "model"),
)
def _draw(options: PlotOptions) -> Figure:
    position = options.canvas_position()
    if position is not None:
        steps = step_places(options.steps, options.run.step_numbers) if options.steps else None
        lens = logit_lens(options.network, _of_row(options), [position], steps=steps, progress=True)
        return lens_table(lens, position=position, title=options.name)
    (step,) = step_places([options.step()], options.run.step_numbers)
    block = range(*row_blocks(options.run, options.row)[step]) or range(*options.run.spans[step])
    # Where states predict the next position, the one before the block predicts its first token.
    before = int(options.run.predicts_next(step, options.network.config))
    positions = range(max(0, block.start - before), block.stop)
    lens = logit_lens(options.network, _of_row(options), positions, steps=[step], progress=True)
    return lens_table(lens, step=step, title=options.name)


def _of_row(options: PlotOptions) -> DenoisingRun:
    """The run of the drawn row alone: a pass over the others would be for nothing."""
    return part_of_run(options.run, None, [options.row])


def _strip_label(lens: LogitLens, entries: Tensor) -> str:
    """What a strip above a column says of the column's position, or of the next one, which its state predicts."""
    predicted = entries[lens.predicted[entries]]
    if bool((lens.predicts[predicted] != lens.position[predicted]).any()):
        return f"predicts the next position, which is {'in the answer' if lens.run.uniform_noise else 'masked'}"
    which = "position of the answer" if lens.run.uniform_noise else "masked position"
    return f"{which}, which the model predicts"


def _shown(lens: LogitLens, position: int, padding: int) -> str:
    canvas = lens.run.tokens.shape[1]
    return f"position {position - padding}" if position < canvas else f"sink({position - canvas})"


def _write_tokens(axes: Axes, lens: LogitLens, entries: Tensor) -> None:
    """Write the tokens into their cells; draw red frames, and a strip above the columns of masked positions."""
    viridis = colormaps["viridis"]
    layers, written = len(lens.layers), lens.written()
    for column, entry in enumerate(entries.tolist()):
        names = token_labels(lens.top_tokens[entry, :, 0].tolist(), lens.run.tokenizer, length=7)
        predicted = bool(lens.predicted[entry])
        for layer, name in enumerate(names):
            probability = float(lens.top_probabilities[entry, layer, 0])
            red, green, blue, _ = viridis(probability)
            colour = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
            axes.text(
                column + 0.5, layer + 0.5, name, ha="center", va="center", fontsize=6, color=colour, clip_on=True,
                **PLAIN,
            )  # fmt: skip
            # A rank leaves [MASK] out, which may be the likeliest token that the cell shows.
            right = int(lens.top_tokens[entry, layer, 0]) == int(written[entry])
            if predicted and right and int(lens.rank[entry, layer]) == 0:
                corner = (column + 0.04, layer + 0.06)
                axes.add_patch(
                    Rectangle(corner, 0.92, 0.88, fill=False, edgecolor=RIGHT, linewidth=1.4, gid="right")
                )
        if predicted:
            axes.add_patch(
                Rectangle((column, layers + 0.08), 1, 0.25, facecolor=MASKED, edgecolor="none", gid="predicted")
            )
    axes.set_ylim(0, layers + 0.4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _name_axes(axes: Axes, lens: LogitLens, entries: Tensor, across: Tensor, positions: bool, padding: int) -> None:
    layers = len(lens.layers)
    every = -(-layers // 40)
    axes.set_yticks(
        [i + 0.5 for i in range(0, layers, every)],
        [str(lens.layers[i]) for i in range(0, layers, every)],
        fontsize=7,
    )
    axes.set_ylabel("layer", fontsize=8)
    canvas = lens.run.tokens.shape[1]
    seen = token_labels(lens.tokens()[entries].tolist(), lens.run.tokenizer, length=8)
    numbers = across[entries].tolist()
    if positions:
        numbers = ["" if number >= canvas else number - padding for number in numbers]
    else:
        numbers = [lens.run.step_numbers[step] for step in numbers]
    labels = [f"{number}\n{token}" for number, token in zip(numbers, seen, strict=True)]
    axes.set_xticks([i + 0.5 for i in range(len(labels))], labels, fontsize=6, **PLAIN)
    if len(labels) > 12 or max(map(len, seen)) > 6:
        for label in axes.get_xticklabels():
            label.set_rotation(90)
    axes.set_xlabel(f"{'position' if positions else 'step'}, and its token on the canvas", fontsize=8)
