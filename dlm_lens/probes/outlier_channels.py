"""`channel_removal`: channels of the residual stream far above the others, and what their removal does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import checked_arguments, chosen_indices, whole
from dlm_lens.attention import exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.hooks import ablate
from dlm_lens.printable import shown
from dlm_lens.probes.replays import Replay, replay
from dlm_lens.recording import ChannelActivations, rerun
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import AboveMean, Detector, find_sinks
from dlm_lens.statistics import (
    CORRELATION_BOUNDS,
    POSITIVE_BOUNDS,
    SHARE_BOUNDS,
    Estimate,
    difference_of,
    estimate,
    mean_of,
)

MEASURES = ("kl", "changed", "sinks gone")
"""KL in nats and share of changed predictions, over predicted positions; share of sinks that are none any more."""


@dataclass(frozen=True, eq=False)
class ChannelRemoval(ShowsItself):
    """The largest channels of the residual stream, and the effect of setting them to 0 after every block.

    The magnitude of channel c in layer l is m_lc = mean over steps and prompts of the mean over positions of |h_jc|
    of the stream that enters the layer, so that every step of a prompt counts the same, whatever its length
    (2605.06366 ranks channels by the mean over positions, at the input of the projections); `ratio` is m_lc over
    the median of the layer's channels. We know of no threshold in that paper: the ratio is ours. The control sets
    as many other channels to 0, drawn at random, several times.

    Args:
        channels: those that were removed.
        random: the channels of every control.
        ratio: of every layer and channel.
        magnitude: m_lc.
        sums: per kind (outliers, random), prompt (by its number in `DenoisingRun.row_prompts`) and measure of
            `MEASURES`: the sum over entries, and their number.
        layers: index of each layer in the model.
        detector: the rule for sinks.
        seed: of the controls and the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    channels: tuple[int, ...]
    random: tuple[tuple[int, ...], ...]
    ratio: Float[Tensor, "layer channel"]
    magnitude: Float[Tensor, "layer channel"]
    sums: Float[Tensor, "kind prompt measure 2"]
    layers: tuple[int, ...]
    detector: Detector
    seed: int = 0

    def __post_init__(self) -> None:
        check_shapes(self, layer=len(self.layers), kind=2, measure=len(MEASURES))

    def __repr__(self) -> str:
        return (
            f"ChannelRemoval(channels {list(self.channels)}, up to {float(self.ratio[:, self.channels].max()):.3g} "
            f"times the median channel: KL {self.mean('kl')}, random channels {self.mean('kl', random=True)})"
        )

    def mean(self, measure: str, *, random: bool = False) -> Estimate:
        """A measure over all entries, with the interval over prompts.

        Args:
            measure: of `MEASURES`.
            random: of the controls.

        Raises:
            ValueError: another measure.
        """
        bounds = POSITIVE_BOUNDS if measure == "kl" else SHARE_BOUNDS
        return estimate(self._sums(measure)[int(random)].numpy(), mean_of, bounds=bounds, seed=self.seed)

    def excess(self, measure: str) -> Estimate:
        """The measure with the channels removed minus that with random ones, prompt by prompt.

        Raises:
            ValueError: another measure.
        """
        bounds = None if measure == "kl" else CORRELATION_BOUNDS
        sums = self._sums(measure).transpose(0, 1).flatten(1).numpy()
        return estimate(sums, difference_of, bounds=bounds, seed=self.seed)

    def table(self) -> pd.DataFrame:
        """One line per measure: with the channels removed, with random ones, and the difference."""
        lines = []
        for name in MEASURES:
            line: dict[str, Any] = {"measure": name, **self.mean(name).columns("removed")}
            line |= self.mean(name, random=True).columns("random")
            lines.append(line | self.excess(name).columns("excess"))
        return pd.DataFrame(lines)

    @checked_arguments(top=whole(least=1))
    def by_layer(self, top: int = 5) -> pd.DataFrame:
        """The `top` largest channels of every layer: magnitude, and ratio to the median channel.

        Raises:
            ValueError: `top` is below 1, or no whole number.
        """
        return pd.DataFrame(
            [
                {
                    "layer": layer,
                    "channel": channel,
                    "magnitude": float(self.magnitude[place, channel]),
                    "ratio": float(self.ratio[place, channel]),
                    "removed": channel in self.channels,
                }
                for place, layer in enumerate(self.layers)
                for channel in self.ratio[place].topk(min(top, self.ratio.shape[1])).indices.tolist()
            ]
        )

    def _sums(self, measure: str) -> Float[Tensor, "kind prompt 2"]:
        if measure not in MEASURES:
            raise ValueError(f"measure is {shown(measure)}; it must be one of {', '.join(MEASURES)}")
        return self.sums[:, :, MEASURES.index(measure)]


@checked_arguments(top=whole(least=1), controls=whole(least=1), seed=whole(least=0))
@torch.no_grad()
@exclusive
def channel_removal(
    model: Any,
    run: RunLike,
    *,
    channels: Sequence[int] | None = None,
    top: int = 1,
    controls: int = 3,
    detector: Detector | None = None,
    seed: int = 0,
    progress: bool = False,
) -> ChannelRemoval:
    """Set the largest channels of the residual stream to 0, and compare predictions and sinks with random channels.

    The canvases are those of the run (`replay`): step t shows the effect at step t alone. A channel is 0 after
    every block, so that no later layer and no head reads it.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`.
        channels: which ones; None for the `top` channels with the largest mean ratio over layers after the first
            block.
        top: how many, if `channels` is None.
        controls: how many times as many random channels are removed.
        detector: the rule for sinks; `AboveMean(3.0)` by default.
        seed: of the controls and the intervals.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a channel that does not exist, no channel that a control could take, or what `replay` refuses.
    """
    run = as_run(run)
    detector = AboveMean(3.0) if detector is None else detector
    rec = rerun(model, run, [ChannelActivations()])
    magnitude = rec.channel_mean.double().nanmean((0, 1))
    ratio = magnitude / magnitude.quantile(0.5, -1, keepdim=True)
    width = ratio.shape[1]
    # The stream that enters the first layer has not been through a block: "resid" hooks do not reach it.
    ranked = ratio[1:] if len(ratio) > 1 else ratio
    chosen = (
        tuple(sorted(ranked.mean(0).topk(min(top, width)).indices.tolist()))
        if channels is None
        else chosen_indices("channel", channels, width, "channel_removal: ")
    )
    others = torch.tensor([channel for channel in range(width) if channel not in chosen])
    if len(others) < len(chosen):
        raise ValueError(
            f"channel_removal: {len(chosen)} of {width} channels leave too few for the control; give at most "
            f"{width // 2}"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = tuple(
        tuple(sorted(others[torch.randperm(len(others), generator=generator)[: len(chosen)]].tolist()))
        for _ in range(controls)
    )
    sums = torch.zeros(2, len(run.tokens), len(MEASURES), 2, dtype=torch.float64)
    for place, removed in enumerate(tqdm([chosen, *drawn], desc="removing", unit="set", disable=not progress)):
        sums[int(place > 0)] += _effects(replay(model, run, [ablate("resid", dims=removed)]), detector)
    return ChannelRemoval(
        channels=chosen,
        random=drawn,
        ratio=ratio.float(),
        magnitude=magnitude.float(),
        sums=torch.zeros_like(sums).index_add_(1, run.row_prompts, sums),
        layers=rec.layers,
        detector=detector,
        seed=seed,
    )


def _effects(found: Replay, detector: Detector) -> Float[Tensor, "batch measure 2"]:
    """Sum and number of entries of every measure, per row."""
    assert found.received is not None
    assert found.received_hooked is not None
    predicted = found.predicted
    plain, hooked = (find_sinks(one, detector).is_sink for one in (found.received, found.received_hooked))
    pairs = (
        (found.kl.double().where(predicted, 0.0), predicted),
        (found.flipped, predicted),
        (plain & ~hooked, plain),
    )
    return torch.stack(
        [torch.stack([one.double().transpose(0, 1).flatten(1).sum(-1) for one in pair], -1) for pair in pairs], 1
    )
