"""`region_flow`: attention between regions of queries and of keys, over the steps of a run."""

from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.arguments import ONE_SEED, checked_arguments, place_of_layer
from dlm_lens.display import ShowsItself
from dlm_lens.recording import Recording
from dlm_lens.recording.recording import as_recording
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import SHARE_BOUNDS, estimate, mean_of, prompts_or_rows, summed


@dataclass(frozen=True, eq=False)
class RegionFlow(ShowsItself):
    """Share of its attention that a query of one region puts on each region of keys, at every step.

    Args:
        mass: mean over the queries of a region and over heads; NaN where a region has no queries.
        steps: index of each step in the run.
        layers: index of each layer in the model.
        query_regions: names of the regions of queries.
        key_regions: names of the regions of keys; they overlap, except self, past, future and learned sinks.
        seed: of the intervals.
        prompt: the number of each row's prompt (`DenoisingRun.row_prompts`); None: every row is one of its own.

    Raises:
        ValueError: the shapes contradict each other.
    """

    mass: Float[Tensor, "step batch layer query_region key_region"]
    steps: tuple[int, ...]
    layers: tuple[int, ...]
    query_regions: tuple[str, ...]
    key_regions: tuple[str, ...]
    seed: int = 0
    prompt: Int[Tensor, "batch"] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_shapes(
            self,
            step=len(self.steps),
            layer=len(self.layers),
            query_region=len(self.query_regions),
            key_region=len(self.key_regions),
        )

    def __repr__(self) -> str:
        return (
            f"RegionFlow({len(self.steps)} steps, {len(self.layers)} layers; from {', '.join(self.query_regions)})"
        )

    def table(self, layer: int | None = None) -> pd.DataFrame:
        """One line per step and pair of regions: mean over layers and prompts, with its interval over prompts.

        Args:
            layer: the only layer to average over; None for all.

        Raises:
            ValueError: the layer was not recorded.
        """
        kept = slice(None) if layer is None else [place_of_layer(layer, self.layers, "recorded")]
        mass = self.mass[:, :, kept].double().nanmean(2)
        lines, prompt = [], prompts_or_rows(self.prompt, mass.shape[1])
        for place, step in enumerate(self.steps):
            for i, query in enumerate(self.query_regions):
                for j, key in enumerate(self.key_regions):
                    values = mass[place, :, i, j]
                    known = values.isfinite()
                    if not bool(known.any()):
                        continue
                    pairs = torch.stack([values.nan_to_num(), known.double()], -1)
                    of_prompts = summed(pairs, prompt, len(prompt))
                    e = estimate(of_prompts, mean_of, bounds=SHARE_BOUNDS, seed=self.seed)
                    line = {"step": step, "queries": query, "keys": key}
                    lines.append({**line, "mass": e.value, "low": e.low, "high": e.high, "prompts": e.prompts})
        return pd.DataFrame(lines)


@checked_arguments(seed=ONE_SEED)
def region_flow(recording: Recording, *, seed: int = 0) -> RegionFlow:
    """Attention between regions at every step, from a recording with RegionMass; mean over heads.

    Raises:
        TypeError: no `Recording`.
        ValueError: RegionMass was not recorded.
    """
    recording = as_recording(recording)
    if "region_mass" not in recording.specs:
        raise ValueError(
            "this recording has no region_mass; record with RegionMass(), or RegionMass(sinks=detector)"
        )
    labels = recording.specs["region_mass"].labels
    return RegionFlow(
        mass=recording.region_mass.mean(3),
        steps=recording.steps,
        layers=recording.layers,
        query_regions=tuple(labels["query_region"]),
        key_regions=tuple(labels["key_region"]),
        seed=seed,
        prompt=recording.run.row_prompts,
    )
