"""`sink_emergence`: sink statistics of a model during training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dlm_lens.arguments import checked_arguments
from dlm_lens.files.json_objects import read_object
from dlm_lens.files.paths import user_path
from dlm_lens.printable import shown
from dlm_lens.viz.figures.labels import PLAIN, caption
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, own_colours

LAYER = "sink_share/layer_"
SHARE, NORM, MOVES, LOSS = "share", "norm", "moves", "loss"
MEASURED = "sink/main_share"


@checked_arguments()
@own_colours()
def sink_emergence(history: Sequence[Mapping[str, Any]] | str | Path, *, title: str = "") -> Figure:
    """Sink statistics over the steps of a training run, measured on its fixed probe batch.

    Four panels. Share of the canvas's attention that the sink of each layer receives: the learned sink tokens
    together, or without them the key with the most attention. Ratio of the value norm of the main sink to that of
    other tokens in the same state (masked or not), and of the learned sinks to the canvas. Share of (row, layer,
    head) patterns whose main sink differs between the most and the least masked canvas, and between one probe and
    the next. The loss.

    Args:
        history: `trainer.state.log_history`, or the directory of a checkpoint.
        title: the beginning of the caption.

    Raises:
        FileNotFoundError: a directory without a training state.
        ValueError: no history of a training run, or one without a probe.
    """
    entries = _entries(history)
    probes = [entry for entry in entries if MEASURED in entry]
    if not probes:
        raise ValueError("the history holds no sink statistics; train with probe_steps above 0")
    learned = "sink/learned_share" in probes[0]
    figure = NotebookFigure(figsize=(9, 6), layout="constrained")
    axes = dict(zip((SHARE, NORM, MOVES, LOSS), figure.subplots(2, 2).flat, strict=True))
    _layers(figure, axes[SHARE], probes)
    axes[SHARE].set_title(f"Attention received by the {'learned sinks' if learned else 'largest key'}")
    axes[SHARE].set_ylabel("share of all attention")
    _line(axes[NORM], probes, "sink/value_norm_ratio", "main sink / others in the same state")
    _line(axes[NORM], probes, "sink/learned_norm_ratio", "learned sinks / canvas", linestyle="--")
    axes[NORM].axhline(1.0, color="0.6", linewidth=0.8, linestyle="--")
    axes[NORM].set_title("Value norm")
    axes[NORM].set_ylabel("ratio")
    _line(axes[MOVES], probes, "sink/moved", "between most and least masked")
    _line(axes[MOVES], probes[1:], "sink/changed", "between probes", linestyle="--")
    axes[MOVES].set_title("Main sinks that move")
    axes[MOVES].set_ylabel("share of maps")
    axes[MOVES].set_ylim(0, 1)
    _line(axes[LOSS], [e for e in entries if "loss" in e], "loss", "training", linewidth=0.8)
    _line(axes[LOSS], [e for e in entries if "eval_loss" in e], "eval_loss", "evaluation", marker="s", markersize=3)
    axes[LOSS].set_title("Loss")
    axes[LOSS].set_ylabel("nats")
    for axis in axes.values():
        axis.set_xlabel("optimiser step")
        axis.set_gid("emergence")
        if axis is not axes[SHARE] and axis.get_lines():
            axis.legend(fontsize=8, frameon=False)
    sentences = [
        *([title] if title else []),
        "Sinks during training",
        "probe batch: fixed sequences at falling masking levels",
        "mean over rows, levels and heads",
    ]
    figure.suptitle(caption(sentences, figure.get_figwidth()), fontsize=8, **PLAIN)
    return figure


def _entries(history: Sequence[Mapping[str, Any]] | str | Path) -> Sequence[Mapping[str, Any]]:
    if isinstance(history, str | Path):
        file = user_path(history) / "trainer_state.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; give the directory of a checkpoint of a training run")
        log: Any = read_object(file, str(file)).get("log_history")
        if not isinstance(log, list) or not all(isinstance(entry, dict) for entry in log):
            raise ValueError(f"{file} holds no log_history of a training run; give another checkpoint")
        return log
    if isinstance(history, list | tuple) and all(isinstance(entry, Mapping) for entry in history):
        return history
    raise ValueError(
        f"history is {shown(history)}; it must be trainer.state.log_history of a training run, or the directory of "
        "its checkpoint"
    )


def _line(axis: Axes, entries: Sequence[Mapping[str, Any]], name: str, label: str, **style: Any) -> None:
    points = [(entry["step"], entry[name]) for entry in entries if name in entry]
    if points:
        axis.plot(*np.array(points, dtype=float).T, label=label, **style)


def _layers(figure: Figure, axis: Axes, probes: Sequence[Mapping[str, Any]]) -> None:
    """A line per layer, from dark (the first layer) to bright (the last)."""
    names = sorted((name for name in probes[0] if name.startswith(LAYER)), key=lambda name: int(name[len(LAYER) :]))
    steps: npt.NDArray[np.float64] = np.array([probe["step"] for probe in probes], dtype=float)
    scale = Normalize(0, max(1, len(names) - 1))
    for layer, name in enumerate(names):
        shares = [probe[name] for probe in probes]
        axis.plot(steps, shares, color=colormaps["viridis"](scale(layer)), linewidth=1.0)
    axis.set_ylim(0, None)
    bar = figure.colorbar(ScalarMappable(scale, "viridis"), ax=axis, pad=0.01, fraction=0.04)
    bar.set_label("layer", fontsize=8)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar.ax.tick_params(labelsize=7)
