"""`sink_discount`: how much of a sink each position of a run's canvases is, as pruning discounts it."""

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from dlm_lens.arguments import checked_arguments, instance
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.denoising_run import check_run
from dlm_lens.viz.figures.labels import PLAIN, caption, step_ticks, token_labels
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_cells, many, own_colours
from dlm_lens.viz.selection import index_of, row_number


@checked_arguments(weights=instance(Tensor, "the weights of sink_weights, [step, batch, position]"))
@own_colours()
def sink_discount(
    weights: Float[Tensor, "step batch position"], run: DenoisingRun, *, row: int = 0, title: str = ""
) -> Figure:
    """The weights of `sink_weights` over steps (across) and positions (down), 0 to 1; dots are open positions.

    Args:
        weights: from `sink_weights`, of the run.
        run: the run.
        row: index of the sequence.
        title: the beginning of the caption, such as the model's name.

    Raises:
        ValueError: weights of another run, or a row that does not exist.
    """
    check_run(run)
    if weights.shape != run.unmasked.shape:
        raise ValueError(
            f"the weights have shape {list(weights.shape)}, the run {list(run.unmasked.shape)}; give the run of "
            "which sink_weights computed them, or compute those of this one"
        )
    index_of("row", row, range(weights.shape[1]))
    there = run.attention_mask[row].nonzero().flatten()
    steps, width = int(run.row_steps[row]), 6.4  # a row that has ended has no weights
    values = weights[:steps, row][:, there].T.double()
    figure = NotebookFigure(figsize=(width, min(12.0, max(2.6, 0.11 * len(there) + 1.0))), layout="constrained")
    axes = figure.add_subplot()
    mesh = draw_cells(axes, values.numpy(), cmap="viridis", vmin=0, vmax=1)
    dots = run.open[:steps, row][:, there].T.nonzero()
    axes.scatter(dots[:, 1] + 0.5, dots[:, 0] + 0.5, s=1.5, color="white", gid="open", rasterized=many(len(dots)))
    axes.invert_yaxis()
    skip = -(-len(there) // 40)
    labels = token_labels(run.tokens[row, there].tolist(), run.tokenizer)
    shown = torch.arange(0, len(there), skip).tolist()
    axes.set_yticks([place + 0.5 for place in shown], [labels[place] for place in shown], fontsize=6, **PLAIN)
    axes.set_xlabel("step", fontsize=8)
    step_ticks(axes, run.step_numbers[:steps])
    bar = figure.colorbar(mesh, ax=axes, pad=0.01)
    bar.set_label("discount of the position", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    mean = float(values.sum(0).mean())
    sentences = [
        *([title] if title else []),
        "How much of a sink each position is, over layers and heads",
        f"{mean:.2f} positions discounted per canvas; dots: open; n = 1 sequence (row {row_number(run, row)})",
    ]
    figure.suptitle(caption(sentences, width), fontsize=8, x=0.01, ha="left", **PLAIN)
    return figure
