"""Questions to a run (attribution, clock, features, ...) as scenes, made on a few families."""

from typing import Any

import pandas as pd
import torch

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.features import SparseAutoencoder
from dlm_lens.recording import FeatureActivations
from tests.pretend_gpu.scenes import ALONE, LENGTH, PROMPTS, Scene, run

FAMILIES = ("llada", "dream", "sink_llama", "causal", "diffusion_gemma")
"""Their passes differ: a logit shift, sinks beside the canvas, prefixes, an encoder. The tools are one for all."""

OTHER = [[5, 9, 14, 2, 8, 21, 30]]
"""ALONE with two other tokens: the corrupted prompt of attribution."""
MANY = [[5 + i, 9, 13 - i, 2, 7, 20 + i] for i in range(6)]


def numbers(table: pd.DataFrame) -> dict[str, list[float]]:
    """The columns of a table that hold numbers, as lists."""
    return {str(name): column.tolist() for name, column in table.select_dtypes("number").items()}


def precise(scene: Scene) -> Scene:
    """The scene in float64 for a family whose self-conditioning carries rounding from step to step.

    In float32, weights that differ by one unit in the last place change the effects of its last step by up to 7e-4
    (of up to 3.3), and so does another processor's product; no tolerance of a kernel would find anything there.
    """

    def scene_in_float64(model: Any, family: str) -> Any:
        if family != "diffusion_gemma":
            return scene(model, family)
        try:
            return scene(model.double(), family)
        finally:
            model.float()  # the same weights again, for the next scene

    return scene_in_float64


def patched(site: str) -> Scene:
    return lambda m, f: probes.activation_patching(m, run(m, f, prompts=ALONE), OTHER, site=site).effects  # type: ignore[arg-type]


def attributed(model: Any, family: str) -> Any:
    return probes.attribution_patching(model, run(model, family, prompts=ALONE), OTHER).effects


def edges(model: Any, family: str) -> Any:
    return numbers(probes.edge_attribution(model, run(model, family, prompts=ALONE), OTHER, integration=2).table())


def columns(model: Any, family: str) -> Any:
    found = probes.column_attribution(model, run(model, family, prompts=ALONE))
    return [found.log_scale, found.hidden, found.base]


def clock(model: Any, family: str) -> Any:
    """The probes of every layer, and what a shift of the clock does to a run."""
    many = run(model, family, prompts=MANY)
    found = probes.denoising_clock(model, many, shuffles=2)
    steered = probes.clock_steering(model, many, found, by=(0.25,), controls=1)
    return [numbers(found.table()), numbers(steered.table())]


def anatomy(model: Any, family: str) -> Any:
    position = family != "diffusion_gemma"  # the encoder's keys are known after rotation only
    found = probes.sink_anatomy(model, run(model, family), dl.AboveMean(1.0), min_viewers=4, position=position)
    return [numbers(found.causes()), numbers(found.survival())]


def sae_of(model: Any) -> SparseAutoencoder:
    """Random directions with features, on the stream after the last layer."""
    made = torch.Generator().manual_seed(1)
    width = model.config.get_text_config().hidden_size
    directions = torch.nn.functional.normalize(torch.randn(64, width, generator=made), dim=-1)
    layer = model.config.get_text_config().num_hidden_layers - 1
    return SparseAutoencoder(directions.T, torch.zeros(64), directions, torch.zeros(width), k=4, layer=layer)


def features(model: Any, family: str) -> Any:
    sae = sae_of(model)
    recording = dl.record(model, PROMPTS, [FeatureActivations(sae)], layers=[sae.layer], gen_length=LENGTH)
    return dict(recording.arrays)


def insertion(model: Any, family: str) -> Any:
    return numbers(probes.insertion_loss(model, run(model, family), sae_of(model)).table())


def commitment(model: Any, family: str) -> Any:
    found = probes.commitment(model, run(model, family))
    return [found.token, found.confidence, found.entropy, found.committed_at]


def pruning(model: Any, family: str) -> Any:
    norms = probes.input_norms(model, run(model, family))
    with probes.pruned(model, 0.25, norms):
        return run(model, family).tokens


def sinks_in_the_stream(model: Any, family: str) -> Any:
    recording = dl.record(
        model, PROMPTS, [dl.ReceivedAttention(), dl.ValueNorm(), dl.RegionMass()], gen_length=LENGTH
    )
    sinks = dl.find_sinks(recording, dl.AboveMean(0.5))
    return [
        numbers(dl.value_norms(recording, sinks).profile),
        numbers(probes.sink_updates(model, recording.run, sinks, attends=0.2).table()),
        numbers(probes.region_flow(recording).table()),
    ]


PRECISE: dict[str, Scene] = {
    "activation patching": precise(patched("z")),
    "activation patching of keys": precise(patched("k")),
    "attribution patching": precise(attributed),
    "edge attribution": precise(edges),
    "column attribution": precise(columns),
}
"""Left out for that family where a device has no float64."""

PROBES: dict[str, Scene] = {
    **PRECISE,
    "commitment": commitment,
    "clock": clock,
    "anatomy": anatomy,
    "copying heads": lambda m, f: numbers(probes.retrieval_heads(m, run(m, f)).table()),
    "outlier channels": lambda m, f: numbers(probes.channel_removal(m, run(m, f), controls=1).table()),
    "features": features,
    "inserted features": insertion,
    "pruning": pruning,
    "norms, updates and regions": sinks_in_the_stream,
    "smearing": lambda m, f: numbers(probes.token_smearing(m, run(m, f)).table()),
    "remasking": lambda m, f: numbers(probes.remask(m, PROMPTS, gen_length=LENGTH).table()),
}
