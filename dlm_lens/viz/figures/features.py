"""`feature_rates` and `insertion_by_step`: features of a sparse autoencoder over the steps of runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dlm_lens.arguments import WORDS, checked_arguments, chosen_indices, instance
from dlm_lens.printable import counted
from dlm_lens.probes import InsertionLoss
from dlm_lens.recording import POSITION_CLASSES, Recording
from dlm_lens.recording.recording import as_recording
from dlm_lens.viz.figures.labels import captioned, note, whole_ticks
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_band, own_colours

NAMES = {
    "sae": "autoencoder",
    "zero": "zero",
    "mean": "mean",
    "untrained": "untrained (null)",
    "random_decoder": "random decoder (null)",
}
COLOURS = {"sae": "C0", "zero": "C3", "mean": "C1", "untrained": "0.35", "random_decoder": "0.6"}
STYLES = ("o-", "s--", "^-.", "v:", "D-", "P--")
"""Marks and dashes of lines, which colours alone do not tell apart in grey."""
THIN: dict[str, Any] = {"markersize": 3, "linewidth": 1.2}
MOST = 6


@checked_arguments()
@own_colours()
def feature_rates(recording: Recording, features: Sequence[int] | None = None, *, title: str = "") -> Figure:
    """The share of positions at which features are active, step by step, for open and for decided positions.

    Args:
        recording: with `FeatureActivations`.
        features: which; None for the six whose rate at open positions changes most over the steps; at decided
            positions where a model, such as an AR model, has no open ones.
        title: the beginning of the caption.

    Raises:
        TypeError: no `Recording`.
        ValueError: a recording without features, or a feature that does not exist.
    """
    recording = as_recording(recording)
    if "feature_count" not in recording.arrays:
        raise ValueError("the recording has no features; record FeatureActivations(sae)")
    count = recording.feature_count[:, :, 0].clamp(min=0).double().sum(1)  # [step, position_class, feature]
    known = recording.feature_positions[:, :, 0].clamp(min=0).double().sum(1)
    shown = ("open", "decided")
    rate = (count / known[..., None]).numpy()  # NaN where a step has no position of the class
    if features is None:
        classes = (rate[:, POSITION_CLASSES.index(name)] for name in shown)
        rates = next((one[there] for one in classes if (there := np.isfinite(one).all(1)).any()), rate[:1, 0])
        features = np.argsort(-np.nan_to_num(np.ptp(rates, axis=0)), kind="stable")[:MOST].tolist()
    figure = NotebookFigure(figsize=(7.2, 3.3), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), shown, strict=True):
        for number, feature in enumerate(chosen_indices("feature", features, rate.shape[2])):
            values, line = rate[:, POSITION_CLASSES.index(name), feature], STYLES[number % len(STYLES)]
            axes.plot(recording.steps, values, line, label=f"feature {feature}", gid=f"{name} {feature}", **THIN)
        if not bool((known[:, POSITION_CLASSES.index(name)] > 0).any()):
            note(axes, f"no {name} positions")
        axes.tick_params(labelsize=7)
        axes.set_title(f"{name} positions", fontsize=8)
        axes.set_xlabel("step", fontsize=8)
        whole_ticks(axes.xaxis)
    figure.axes[0].set_ylabel("share of positions with f > 0", fontsize=8)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=7, frameon=False
    )
    inside = recording.feature_positions[:, :, 0, [POSITION_CLASSES.index(name) for name in shown]] > 0
    prompts = counted(int(inside.any(-1).any(0).sum()), "prompt")
    return captioned(figure, title, "Features at every step", f"layer {recording.layers[0]}", f"n = {prompts}")


@checked_arguments(
    place=instance(str, "a place, as a text"),
    loss=instance(InsertionLoss, "the InsertionLoss of insertion_loss"),
    insertions=WORDS,
)
@own_colours()
def insertion_by_step(
    loss: InsertionLoss,
    layer: int | None = None,
    place: str = "",
    *,
    insertions: Sequence[str] = (),
    title: str = "",
) -> Figure:
    """What an inserted autoencoder adds to the loss at every step, with 95% intervals over prompts.

    Args:
        loss: from `insertion_loss`.
        layer: of the autoencoder; None for the first.
        place: where the activation was replaced; "" for the first.
        insertions: which lines; () for all.
        title: the beginning of the caption.

    Raises:
        ValueError: what was not measured.
    """
    layer, place = loss.layers[0] if layer is None else layer, place or loss.places[0]
    figure = NotebookFigure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    numbers = [loss.run.step_numbers[step] for step in loss.steps]
    for name in insertions or loss.insertions:
        found = [loss.added(layer, name, place, [step]) for step in loss.steps]
        values = [one.value for one in found]
        style = STYLES[list(COLOURS).index(name)]
        axes.plot(numbers, values, style, color=COLOURS[name], label=NAMES[name], gid=name, **THIN)
        low, high = [one.low for one in found], [one.high for one in found]
        draw_band(axes, numbers, low, high, colour=COLOURS[name])
    axes.axhline(0.0, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_xlabel("step", fontsize=8)
    whole_ticks(axes.xaxis)
    axes.tick_params(labelsize=7)
    axes.set_ylabel("added loss, nats", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    prompts = int((loss.positions > 0).any(0).sum())
    return captioned(
        figure,
        title,
        "Loss at open positions with the activation replaced",
        f"layer {layer}, at {place} positions",
        f"n = {counted(prompts, 'prompt')}",
        "band: 95% interval" * (prompts > 1),
        axes=axes,
    )
