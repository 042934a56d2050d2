"""`sink_causes`: what the sinks of every layer need, norms or angles, and which survive without a part."""

from matplotlib.figure import Figure

from dlm_lens.arguments import checked_arguments
from dlm_lens.printable import counted
from dlm_lens.probes import SinkAnatomy
from dlm_lens.viz.figures.labels import captioned
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, own_colours

COLOURS = {"norms": "#b2182b", "angles": "#2166ac", "either": "#7fbf7b", "together": "#d9d9d9"}
HATCHES = {"norms": "//", "angles": "", "either": "..", "together": ""}


@checked_arguments()
@own_colours()
def sink_causes(anatomy: SinkAnatomy, *, title: str = "") -> Figure:
    """Causes of the sinks of every layer (left), and the share of sinks that survives in each pattern (right).

    A short line at each bar on the right is the share that would survive by chance; bars have 95% intervals over
    prompts.

    Args:
        anatomy: from `sink_anatomy`.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: another type.
    """
    if not isinstance(anatomy, SinkAnatomy):
        raise TypeError(f"the first argument is a {type(anatomy).__name__}; give a SinkAnatomy (sink_anatomy)")
    width = 7.6
    figure = NotebookFigure(figsize=(width, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    layers = anatomy.by_layer()
    base = [0.0] * len(layers)
    for cause, colour in COLOURS.items():
        heights = layers[cause].fillna(0.0).tolist()
        left.bar(
            range(len(layers)), heights, bottom=base, color=colour, edgecolor="white", hatch=HATCHES[cause],
            label=cause, gid=cause,
        )  # fmt: skip
        base = [one + more for one, more in zip(base, heights, strict=True)]
    for place, count in enumerate(layers["sinks"]):
        left.text(place, 1.02, str(count), ha="center", fontsize=6.5, gid="count")
    skip = -(-len(layers) // 16)
    left.set_xticks(range(0, len(layers), skip), [str(one) for one in layers["layer"][::skip]])
    left.set_xlabel("layer (above each bar: number of sinks)", fontsize=8)
    left.set_ylabel("share of sinks", fontsize=8)
    left.set_ylim(0, 1.12)
    figure.legend(fontsize=7, ncols=4, frameon=False, loc="outside lower left")
    survival = anatomy.survival()
    for place, (_, line) in enumerate(survival.iterrows()):
        right.barh(place, line["survive"], color="#4d4d4d", height=0.6, gid=line["pattern"])
        right.plot([line["survive_low"], line["survive_high"]], [place, place], color="black", linewidth=1.2)
        right.plot([line["chance"]] * 2, [place - 0.4, place + 0.4], color="#e08214", linewidth=2, gid="chance")
    right.set_yticks(range(len(survival)), survival["pattern"].tolist(), fontsize=7.5)
    right.invert_yaxis()
    right.set_xlim(0, 1)
    right.set_xlabel("share of sinks that survive (line: by chance)", fontsize=8)
    for axes in (left, right):
        axes.tick_params(labelsize=7)
    prompts = len(anatomy.is_sink[..., 0].nonzero()[:, 1].unique())
    return captioned(
        figure,
        title,
        "What sinks need: norms of keys or angles",
        f"rule: {anatomy.detector}; scale: {anatomy.received.scale}",
        f"level: head; queries: {anatomy.received.queries}",
        f"n = {counted(anatomy.sinks, 'sink')} in {counted(prompts, 'prompt')}",
    )
