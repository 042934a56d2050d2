"""`attribution_map`: the effect of every head (or layer) at every step of a run."""

import numpy as np
from matplotlib.figure import Figure

from dlm_lens.arguments import checked_arguments
from dlm_lens.probes.attribution.node_effects import NodeEffects
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.emerging_text import canvas_after, changed_by
from dlm_lens.viz.figures.labels import PLAIN, captioned, token_labels
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_cells, own_colours
from dlm_lens.viz.selection import index_of, row_number

MOST_TOKENS = 2
"""Tokens of a step's label; a step that decides more ends with an ellipsis."""

MOST_STEPS = 80
"""Steps that have a label; of more every second, third, ... has one, since labels would overlap."""

MOST_NUMBERED = 48
"""Heads of all layers that have their numbers beside them; more would overlap."""


@checked_arguments()
@own_colours()
def attribution_map(found: NodeEffects, *, row: int = 0, title: str = "") -> Figure:
    """A heat map of effects: layers and heads down, steps across, labelled with the tokens that each step decides.

    Positions are summed. Red raises the target, blue lowers it.

    Args:
        found: from `probes.activation_patching` or `probes.attribution_patching`.
        row: index of the sequence.
        title: the beginning of the caption.

    Raises:
        TypeError: no `NodeEffects`.
        ValueError: a row that the run does not have.
    """
    if not isinstance(found, NodeEffects):
        raise TypeError(f"this is a {type(found).__name__}; give NodeEffects of probes.activation_patching")
    run = found.run
    index_of("row", row, range(len(run.tokens)))
    effects = found.effects[:, row].nansum(-1).flatten(1).numpy()  # [step, node]
    heads = found.effects.shape[3]
    width = min(13.0, max(5.0, 0.42 * len(found.steps) + 2.6))
    figure = NotebookFigure(
        figsize=(width, min(9.0, max(2.6, 0.16 * effects.shape[1] + 1.7))), layout="constrained"
    )
    axes = figure.add_subplot()
    largest = float(np.abs(effects).max()) or 1.0
    mesh = draw_cells(axes, effects.T, cmap="RdBu_r", vmin=-largest, vmax=largest, gid="effects")
    axes.invert_yaxis()
    for line in range(1, len(found.layers)):
        axes.axhline(line * heads, color="0.4", linewidth=0.6)
    middle = [(place + 0.5) * heads for place in range(len(found.layers))]
    axes.set_yticks(middle, [f"layer {layer}" for layer in found.layers], fontsize=7)
    if heads > 1 and effects.shape[1] <= MOST_NUMBERED:
        axes.tick_params(axis="y", which="major", length=0, pad=16)
        nodes = range(effects.shape[1])
        numbers = [str(node % heads) for node in nodes]
        axes.set_yticks([node + 0.5 for node in nodes], numbers, minor=True, fontsize=5)
    places = range(0, len(found.steps), -(-len(found.steps) // MOST_STEPS))
    labels = [_step_label(run, found.steps[place], row) for place in places]
    axes.set_xticks([place + 0.5 for place in places], labels, fontsize=7, rotation=90, **PLAIN)
    axes.set_xlabel("step, and what it decides", fontsize=8)
    bar = figure.colorbar(mesh, ax=axes)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("change of the target", fontsize=8)
    kind = f"{found.site} of {heads} heads a layer" if heads > 1 else found.site
    return captioned(
        figure,
        title,
        f"Effect of each node ({kind}): {found.contract.method}",
        f"target: {found.contract.score}",
        f"values from {found.contract.baseline}",
        f"n = 1 sequence (row {row_number(run, row)})",
        axes=axes,
        fontsize=7,
    )


def _step_label(run: DenoisingRun, step: int, row: int) -> str:
    # A sampler may open or rewrite the position later: what the step wrote is not always the final token.
    wrote = run.proposals[step, row] if run.origins is None else canvas_after(run, row, step)[0]
    decided = wrote[changed_by(run, row, step)[0]].tolist()
    more = " …" if len(decided) > MOST_TOKENS else ""
    tokens = " ".join(token_labels(decided[:MOST_TOKENS], run.tokenizer))
    return f"{run.step_numbers[step]}  {tokens}{more}"
