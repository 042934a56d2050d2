"""`sink_profile`: score of the main sink in every head, and number of sinks in every layer (Figure 5)."""

from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import checked_arguments
from dlm_lens.display import ShowsItself
from dlm_lens.recording import Recording
from dlm_lens.sinks.detectors.above_mean import AboveMean
from dlm_lens.sinks.detectors.base import Detector, as_detector
from dlm_lens.sinks.from_recording import received_in
from dlm_lens.sinks.received import Received, Scale

Main = Literal["head", "model"]


@dataclass(frozen=True, eq=False)
class SinkProfile(ShowsItself):
    """Sinks over depth, averaged over steps and sequences.

    Args:
        score: score of the main sink per layer and head, NaN where there is no score.
        sinks: how many sinks one head's pattern has.
        positions: how many positions of a layer are a sink in at least one of its heads.
        sinks_of_mean: how many sinks the head-mean pattern of a layer has.
        main: the main sink of `score`: that of each "head", or that of the "model" mean in all heads.
        scale: unit of `score`.
        queries: the class of queries that count.
        detector: the rule.
        layers: index of each layer in the model.
        heads: likewise, of each head.
        steps: how many steps, and
        sequences: how many sequences were averaged over: those that have a score at any of the steps.
    """

    score: Float[Tensor, "layer head"]
    sinks: Float[Tensor, "layer head"]
    positions: Float[Tensor, "layer"]
    sinks_of_mean: Float[Tensor, "layer"]
    main: Main
    scale: Scale
    queries: str
    detector: Detector
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    steps: int
    sequences: int

    def __repr__(self) -> str:
        layers, heads = self.score.shape
        return (
            f"SinkProfile({layers} layers x {heads} heads, mean over {self.steps} steps and {self.sequences} "
            f"sequences; main sink of the {self.main}; {self.detector}; scale: {self.scale}; queries: "
            f"{self.queries})"
        )

    def table(self) -> pd.DataFrame:
        """One line per layer: mean and largest score of its heads, sinks per head, positions, sinks of the mean."""
        scores = self.score.nan_to_num(nan=-torch.inf).amax(-1)
        return pd.DataFrame(
            {
                "layer": list(self.layers),
                "score": self.score.nanmean(-1).tolist(),
                "highest_score": scores.masked_fill(scores.isinf(), torch.nan).tolist(),
                "sinks_per_head": self.sinks.nanmean(-1).tolist(),
                "positions": self.positions.tolist(),
                "sinks_of_mean": self.sinks_of_mean.tolist(),
            }
        )


@checked_arguments()
def sink_profile(
    received: Received | Recording, detector: Detector | None = None, *, main: Main = "head"
) -> SinkProfile:
    """Score of the main sink in every head, averaged over steps, and the sinks per layer (2510.15731, Figure 5).

    The paper shows "the model's main sink token across heads and layers, averaged through time" and does not state
    whether each head has its own. With main="head" score[l, h] is the mean over steps of max_j score_j, whether or
    not this key is a sink by the rule; with main="model" one key is followed in all heads, at each step the one
    that receives most in the mean pattern over layers and heads.

    Args:
        received: at the "head" level; it is read layer by layer. Of a `Recording` that of all queries.
        detector: the rule that counts sinks; `AboveMean(3.0)` by default.
        main: "head" or "model".

    Raises:
        ValueError: no layer and head axes, or an unknown main.
    """
    received = received_in(received, "received")
    if main not in ("head", "model"):
        raise ValueError(f"main is {main!r}; it must be 'head' or 'model'")
    if received.level != "head" or not {"layer", "head"} <= set(received.dims):
        raise ValueError(f"a profile needs scores of every layer and head, not the axes {received.dims}")
    rule = AboveMean(3.0) if detector is None else as_detector(detector)
    followed = None
    if main == "model":
        of_model = received.at_level("model").values[:, :, 0, 0]
        # [step, batch, key], one-hot: the key that receives most.
        followed = (
            torch.zeros_like(of_model)
            .scatter_(-1, of_model.nan_to_num(nan=-torch.inf).argmax(-1, keepdim=True), 1.0)
            .bool()
            & ~of_model.isnan()
        )
    parts = [_of_layer(received, rule, layer, followed) for layer in range(received.values.shape[2])]
    score, sinks, positions, of_mean = (torch.stack(values) for values in zip(*parts, strict=True))
    steps = len(received.values)
    scored = torch.stack([layer.isfinite().any(-1).any(-1).any(0) for layer in received.values.unbind(2)]).any(0)
    layers = received.layers or tuple(range(len(score)))
    scale = received.part(slice(0, 0)).read(rule.quantity)[1]
    return SinkProfile(
        score=score,
        sinks=sinks,
        positions=positions,
        sinks_of_mean=of_mean,
        main=main,
        scale=scale,
        queries=received.queries,
        detector=rule,
        layers=layers,
        heads=received.head_numbers,
        steps=steps,
        sequences=int(scored.sum()),
    )


def _of_layer(
    received: Received, rule: Detector, layer: int, followed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    part = received.part(layers=slice(layer, layer + 1))
    scores = part.read(rule.quantity)[0].float()[:, :, 0]
    defined = ~scores.isnan()
    patterns = defined.any(-1)
    candidates = defined if followed is None else defined & followed[:, :, None]
    best = scores.masked_fill(~candidates, -torch.inf).amax(-1)
    best = best.masked_fill(best.isinf(), torch.nan).flatten(0, 1)
    found = rule.detect(scores)
    counts = found.sum(-1).double().masked_fill(~patterns, torch.nan).flatten(0, 1)
    anywhere = patterns.any(-1)
    positions = found.any(-2).sum(-1).double().masked_fill(~anywhere, torch.nan)
    mean = part.at_level("layer").read(rule.quantity)[0].float()[:, :, 0, 0]
    of_mean = rule.detect(mean).sum(-1).double().masked_fill(mean.isnan().all(-1), torch.nan)
    return best.nanmean(0), counts.nanmean(0), positions.nanmean(), of_mean.nanmean()
