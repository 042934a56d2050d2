"""Public calls, each as a function of a model and its family: on the CPU and the pretended GPU they are equal."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.hooks import (
    ablate,
    at_heads,
    at_layers,
    at_progress,
    at_steps,
    capture,
    freeze_sinks,
    keep_only,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_tokens,
    mask_top_sinks,
    mean_activations,
    patch_from,
    scale_attention,
    splice,
    steer,
    zero_value,
)
from dlm_lens.placement import input_device

Scene = Callable[[Any, str], Any]
"""From a model and its family to tensors and numbers."""

PROMPTS = [[5, 9, 13, 2, 7], [3, 8, 1, 4, 4, 11, 20]]
ALONE = [[5, 9, 13, 2, 7, 21, 30]]
LENGTH = 6

HOOKS: dict[str, Callable[[], Any]] = {
    "sinks": lambda: mask_sinks(dl.AboveMean(1.0)),
    "sinks of a layer": lambda: mask_sinks(dl.AboveMean(1.0), per="layer", top=2),
    "top": lambda: mask_top_sinks(2),
    "top after": lambda: mask_top_sinks(1, stage="after"),
    "top renormalised": lambda: mask_top_sinks(1, stage="after", renormalise=True),
    "previous": lambda: mask_sinks(dl.TopK(1), source="previous"),
    "previous of the model": lambda: mask_sinks(dl.TopK(1), per="model", source="previous"),
    "clean": lambda: mask_sinks(dl.TopK(1), source="clean"),
    "clean of the model": lambda: mask_sinks(dl.TopK(1), per="model", source="clean"),
    "frozen": lambda: freeze_sinks(dl.TopK(1), step=2),
    "frozen positions": lambda: freeze_sinks([1, 2], step=1),
    "positions": lambda: mask_positions(0, -1),
    "positions after": lambda: mask_positions(0, stage="after"),
    "masks": lambda: mask_tokens("mask"),
    "token": lambda: mask_tokens(9),
    "window": lambda: keep_only(2, window=4),
    # Position 3 is content and stays visible. Without it masks that no window joins to the text see equal contexts,
    # and the kernels' rounding decides which of them is unmasked first.
    "window ahead": lambda: keep_only((3,), window=3, ahead=2),
    "window after": lambda: keep_only((0,), window=3, stage="after"),
    "random": lambda: mask_random(2),
    "random like": lambda: mask_random(like=mask_top_sinks(1)),
    "random of the mass": lambda: mask_random(like=mask_top_sinks(1), match="mass"),
    "at steps": lambda: at_steps(mask_top_sinks(1), range(1, 4)),
    "at layers": lambda: at_layers(mask_top_sinks(1), [-1]),
    "at heads": lambda: at_heads(mask_top_sinks(1), [1]),
    "when": lambda: at_progress(mask_top_sinks(1), (0.2, 0.8)),
    "scaled": lambda: scale_attention("prompt", 0.5),
    "zero value": lambda: zero_value(0),
    "ablated": lambda: ablate("mlp_out", "masked"),
    "steered": lambda: steer(torch.linspace(-1, 1, 32), positions="masked"),
    "spliced": lambda: splice(torch.tanh, schedule=(0.2, 1.0)),
    "two": lambda: (mask_top_sinks(1), mask_positions(0, stage="after")),
}
"""Every kind of hook; those of one masked model's classes are tried where they have a meaning."""

REDUCERS: dict[str, Callable[[], Any]] = {
    "received": lambda: dl.ReceivedAttention(),
    "received by class": lambda: dl.ReceivedAttention(("all", "prompt")),
    "value norms": lambda: dl.ValueNorm("both"),
    "key norms": lambda: dl.recording.KeyNorm(),
    "weighted values": lambda: dl.recording.WeightedValue(),
    "residual norms": lambda: dl.recording.ResidualNorm(),
    "massive activations": lambda: dl.recording.MassiveActivations(),
    "entropy": lambda: dl.recording.AttentionEntropy(),
    "regions": lambda: dl.RegionMass(),
    "regions and sinks": lambda: dl.RegionMass(sinks=dl.AboveMean(1.0)),
    "update norms": lambda: dl.recording.UpdateNorm(),
    "top keys": lambda: dl.TopKeys(3),
    "mixing bound": lambda: probes.MixingBound(),
    "pattern similarity": lambda: probes.PatternSimilarity(),
}

DETECTORS = (
    dl.AboveMean(1.0),
    dl.AboveMean(0.03, literal=True),
    dl.AboveStd(1.0),
    dl.MeanReceived(0.2),
    dl.sinks.AttentionShare(0.2),
    dl.sinks.SoftSigmoid(),
    dl.TopK(2),
)


def told(run: dl.DenoisingRun) -> dict[str, Any]:
    """What is compared of a run; confidence is -inf where nothing was proposed."""
    hidden = {name: value for name, value in run.settings.items() if name in ("columns_hidden", "mass_hidden")}
    return {"tokens": run.tokens, "canvases": run.canvases, "confidence": run.confidence, **hidden}


def run(model: Any, family: str, *, prompts: Any = None, **settings: Any) -> dl.DenoisingRun:
    return dl.denoise(model, PROMPTS if prompts is None else prompts, gen_length=LENGTH, **settings)


def hooked(name: str, prompts: Any = None) -> Scene:
    def scene(model: Any, family: str) -> Any:
        hook = HOOKS[name]()
        return told(run(model, family, prompts=prompts, hooks=hook if isinstance(hook, tuple) else (hook,)))

    return scene


def recorded(name: str) -> Scene:
    return lambda model, family: dict(dl.record(model, PROMPTS, [REDUCERS[name]()], gen_length=LENGTH).arrays)


def resumed(model: Any, family: str) -> Any:
    """A recording on disk that was killed after two steps, and goes on."""
    settings = {"gen_length": LENGTH, "temperature": 0.6, "seed": [1, 2], "to": tempfile.mkdtemp()}
    return dict(dl.record(model, PROMPTS, [dl.ReceivedAttention(), dl.recording.ResidualNorm()], **settings).arrays)


def prompts_in_every_form(model: Any, family: str) -> Any:
    device = input_device(model)
    ids = torch.tensor(PROMPTS[:1])
    forms: list[Any] = [ids[0], ids[0].to(device), {"input_ids": ids.to(device)}, [[torch.tensor(5), 9]], "w1 w2"]
    return [told(dl.denoise(model, form, gen_length=2)) for form in forms]


def detected(model: Any, family: str) -> Any:
    received = dl.received_over_steps(model, run(model, family))
    found = [dl.find_sinks(received, detector) for detector in DETECTORS]
    paths = dl.trajectories(found[0])
    return [received.values, *(sinks.is_sink for sinks in found), paths.main_score]


def forward(model: Any, family: str) -> Any:
    ids = torch.tensor([PROMPTS[1] * 2], device=input_device(model))
    with dl.record_forward(model, [dl.ReceivedAttention(), dl.recording.ResidualNorm()]) as seen, torch.no_grad():
        logits = model(input_ids=ids).logits
    return [seen.received, seen.residual_norm, logits]


def lens(model: Any, family: str) -> Any:
    found = dl.logit_lens(model, run(model, family))
    return [found.entropy, found.kl]


def traced(model: Any, family: str) -> Any:
    lm = dl.DiffusionLM(model)
    settings = {"use_cache": False} if family == "causal" else {}
    with lm.generate(PROMPTS, gen_length=LENGTH, **settings) as tracer:
        for step in tracer.steps:
            lm.layers[1].attn.apply(mask_top_sinks(1), step)
        result = tracer.result.save()
    return told(result)


def bridged(model: Any, family: str) -> Any:
    bridge = dl.bridge(model)
    found, cache = bridge.denoise_with_cache(
        PROMPTS, gen_length=2, hooks=[mask_top_sinks(1)], names_filter=lambda name: name.endswith("hook_pattern")
    )
    patterns = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern", 1] for layer in (0, 1)])
    return [told(found), patterns]


def captured(model: Any, family: str) -> Any:
    kept = capture(model, PROMPTS, ("resid", "z"), gen_length=LENGTH)
    patched = run(model, family, hooks=[patch_from(kept, 0, positions=[2])])
    means = mean_activations(model, PROMPTS, "resid", gen_length=2)
    return [told(patched), told(run(model, family, hooks=[ablate("resid", value=means)]))]


SCENES: dict[str, Scene] = {
    "denoise": lambda model, family: told(run(model, family)),
    "denoise at a temperature": lambda m, f: told(run(m, f, temperature=0.7, seed=[1, 2])),
    "all logits": lambda model, family: told(run(model, family, logits="all")),
    "logits edited": lambda m, f: told(run(m, f, on_logits=lambda step, canvas, logits: logits * 1.01)),
    "prompts in every form": prompts_in_every_form,
    **{f"hook: {name}": hooked(name) for name in HOOKS},
    "record to disk": resumed,
    "record in float16": lambda m, f: dl.record(m, PROMPTS, dtype="float16", gen_length=LENGTH).received,
    "record a forward pass": forward,
    "detectors and trajectories": detected,
    "key norms over steps": lambda m, f: dl.sinks.key_statistic_over_steps(m, run(m, f), "key norm").values,
    "compare": lambda m, f: told(dl.compare(m, PROMPTS, hooks=[mask_top_sinks(1)], gen_length=LENGTH).hooked),
    "likelihood": lambda m, f: dl.log_likelihood(m, PROMPTS, [[7, 8], [4, 6]], method="chain_rule").value,
    "greedy completion": lambda m, f: (
        dl.log_likelihood(m, PROMPTS, [[7, 8], [4, 6]], method="greedy_completion").value
    ),
    "logit lens": lens,
    "replay": lambda m, f: dl.replay(m, run(m, f), hooks=[mask_top_sinks(1)]).kl,
    "capture and patch": captured,
    "nnsight": traced,
    "TransformerLens": bridged,
}

MASKED_ONLY: dict[str, Scene] = {
    "guidance": lambda model, family: told(run(model, family, cfg_scale=1.5)),
    "reference quirks": lambda m, f: told(run(m, f, temperature=0.5, reference_quirks=True)),
    "reference quirks of a cache": lambda m, f: told(
        run(m, f, temperature=0.5, cache="prefix", reference_quirks=True)
    ),
    "canvas edited": lambda m, f: told(run(m, f, on_canvas=lambda step, canvas: canvas)),
    "Monte Carlo likelihood": lambda m, f: dl.log_likelihood(m, PROMPTS, [[7, 8], [4, 6]], samples=4).value,
    "position or token": lambda m, f: dl.sinks.position_or_token(m, run(m, f), seed=0).trials.iloc[:, -1].tolist(),
    "received from masks": lambda m, f: (
        dl.received_over_steps(
            m,
            run(m, f),
            queries="masked",
            min_viewers=1,  # of six masks and fewer
        ).values
    ),
    "sink mechanism": lambda m, f: probes.sink_mechanism(m, PROMPTS, dl.TopK(1), gen_length=4).dependence,
}
