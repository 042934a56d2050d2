"""`early_recall`: how well a block's first attention predicts its later steps, beside nulls."""

from matplotlib.figure import Figure

from dlm_lens.arguments import checked_arguments
from dlm_lens.printable import counted
from dlm_lens.probes import EarlyAttention
from dlm_lens.statistics import estimate, mean_of
from dlm_lens.viz.figures.labels import captioned, whole_ticks
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, own_colours

STYLES: dict[str, tuple[str, str, str]] = {
    "first steps": ("#2166ac", "-", "o"),
    "step before": ("#4d4d4d", "--", "s"),
    "other block": ("#e08214", "-.", "^"),
    "other prompt": ("#b2182b", ":", "v"),
}
"""Colour, dashes and marks of a predictor."""

LABELS = {"recall": "recall of the largest keys", "correlation": "rank correlation", "kept": "attention kept"}


@checked_arguments()
@own_colours()
def early_recall(early: EarlyAttention, measure: str = "recall", *, title: str = "") -> Figure:
    """A measure of `EarlyAttention` by the steps since the block began (left) and by layer (right).

    On the right with 95% intervals over prompts; the thin grey line is recall by chance.

    Args:
        early: from `early_attention`.
        measure: "correlation", "recall" or "kept".
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: another type.
        ValueError: another measure.
    """
    if not isinstance(early, EarlyAttention):
        raise TypeError(f"the first argument is a {type(early).__name__}; give an EarlyAttention (early_attention)")
    lags, width = early.lags(measure), 7.6
    figure = NotebookFigure(figsize=(width, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for number, (name, (colour, dashes, mark)) in enumerate(STYLES.items()):
        style = {"color": colour, "linestyle": dashes, "marker": mark, "markersize": 4, "linewidth": 1.2}
        left.plot(lags["lag"], lags[name], label=name, gid=name, **style)
        found = [early.mean(measure, name, layer) for layer in early.layers]
        places = [place + 0.08 * (number - 1.5) for place in range(len(found))]
        values = [one.value for one in found]
        spread = [[one.value - one.low for one in found], [one.high - one.value for one in found]]
        right.errorbar(places, values, yerr=spread, capsize=2, gid=name, **style)
    if measure == "recall":
        chance = estimate(early.chance.numpy(), mean_of).value
        for axes in (left, right):
            axes.axhline(chance, color="0.6", linewidth=0.8, gid="chance")
    left.set_xlabel("steps since the block began", fontsize=8)
    left.set_ylabel(LABELS[measure], fontsize=8)
    whole_ticks(left.xaxis)
    skip = -(-len(early.layers) // 16)
    right.set_xticks(range(0, len(early.layers), skip), [str(one) for one in early.layers[::skip]])
    right.set_xlabel("layer", fontsize=8)
    left.legend(fontsize=7, frameon=False, ncols=2)
    for axes in (left, right):
        axes.tick_params(labelsize=7)
    prompts = int((early.chance[:, 1] > 0).sum())  # the others have no block that is compared
    return captioned(
        figure,
        title,
        "Attention from a block: first steps as a predictor of later ones",
        f"keys: {early.keys}; top {early.share:.0%}; first {counted(early.first, 'step')}",
        f"n = {counted(prompts, 'prompt')}",
    )
