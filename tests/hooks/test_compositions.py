"""Random compositions of hooks: `denoise` with and without patterns, a bridge, a trace, recordings, float64."""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.bridging import BridgeRecorder
from dlm_lens.recording import AttentionEntropy, ReceivedAttention, UpdateNorm, WeightedValue
from tests.hooks.composed import FAMILIES, MASK, Drawn, Network, built, draw, model_of

DRAWN, PARTS = 80, 4
"""Compositions in the long test, a quarter in each part: about 20 seconds on one core."""

SITES = ("v", "scores", "pattern")
REDUCERS = (ReceivedAttention(("all", "masked")), AttentionEntropy(), UpdateNorm(), WeightedValue())
CAUSAL_REDUCERS = (ReceivedAttention(("all", "prompt")), AttentionEntropy(), UpdateNorm(), WeightedValue())


class Looks:
    """A hook that needs the pattern or the scores, so that they exist, and changes nothing."""

    def __init__(self, site: str) -> None:
        self.site = site

    def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
        return tensor


@cache
def hosts_of(family: str) -> tuple[Any, Any, Any]:
    """A model, its bridge and its trace."""
    model = model_of(family)
    return model, dl.bridge(model), dl.DiffusionLM(model, check=False)


@dataclass
class Case:
    """A family, prompts, settings and hooks."""

    family: str
    prompts: list[list[int]]
    settings: dict[str, Any]
    drawn: list[Drawn]

    @classmethod
    def draw(cls, rng: random.Random) -> "Case":
        family = rng.choice(list(FAMILIES))
        causal = family == "causal"
        rows = rng.choice([[12, 9], [11], [10, 12]])
        mask = 64 if family == "smdm" else MASK
        prompts = [[rng.randrange(61) for _ in range(length)] for length in rows]
        if not causal and rng.random() < 0.4:
            for prompt in prompts:
                prompt[rng.randrange(len(prompt))] = mask
        settings: dict[str, Any] = {"gen_length": 4} if causal else {"gen_length": 6, "steps": 3}
        if not causal and family != "dream" and rng.random() < 0.4:
            settings["cfg_scale"] = rng.choice([0.7, 3.0])
        if rng.random() < 0.5:
            settings["temperature"] = 1.0
        if family == "smdm":
            settings["remasking"] = rng.choice(["greedy", "origin"])
        sinks = FAMILIES[family][1].get("num_sinks", 0)
        drawn = [draw(rng, sinks) for _ in range(rng.randint(1, 4))]
        # Hooks run in the order of their points, in which a trace has to apply them.
        return cls(family, prompts, settings, sorted(drawn, key=lambda one: SITES.index(one.site)))


def traced(lm: Any, case: Case, hooks: list[Any], **more: Any) -> Any:
    layers = lm.config.num_hidden_layers
    with lm.generate(case.prompts, **case.settings, **more) as tracer:
        for step in tracer.steps[:]:
            for layer in range(layers):
                for hook in hooks:
                    lm.layers[layer].attn.apply(hook, step)
        run = tracer.result.save()
    return run


def check(case: Case) -> bool:
    """Compare everything; False where a choice was so close that rounding decides it."""
    model, bridged, lm = hosts_of(case.family)
    hooks = [built(one) for one in case.drawn]
    reducers = CAUSAL_REDUCERS if case.family == "causal" else REDUCERS
    logits: list[Tensor] = []
    ours, looked, theirs = (
        dl.Recorder(model, reducers),
        dl.Recorder(model, reducers),
        BridgeRecorder(bridged, reducers),
    )
    run = dl.denoise(
        model,
        case.prompts,
        hooks=hooks,
        observers=ours,
        on_logits=lambda step, canvas, x: logits.append(x),
        **case.settings,
    )
    network = Network(model, case.drawn, run)
    random_columns = any(one.kind == "random" for one in case.drawn)
    kept = [] if random_columns else [network.step(step) for step in range(run.steps)]
    if network.margin < 3e-5 or tied(run, logits):
        return False
    for step, exact in enumerate(kept):
        same_logits(run, step, logits[step], exact["logits"])
    recorded = ours.recording(run)
    same_recording(recorded, network, kept)
    materialised = dl.denoise(
        model, case.prompts, hooks=[*hooks, Looks("scores"), Looks("pattern")], observers=looked, **case.settings
    )
    same_run(run, materialised, hooks)
    same_statistics(recorded, looked.recording(materialised))
    bridge_run = bridged.denoise(case.prompts, hooks=hooks, observers=theirs, **case.settings)
    same_run(run, bridge_run, hooks)
    same_statistics(recorded, theirs.recording(bridge_run))
    cache = {"use_cache": False} if case.family == "causal" else {}
    followed = dl.Recorder(model, reducers)
    trace_run = traced(lm, case, hooks, observers=followed, **cache)
    same_run(run, trace_run, [])
    same_statistics(recorded, followed.recording(trace_run))
    again = dl.replay(model, run, hooks)
    close("replayed", again.received_hooked.values, recorded.received, 1e-4)
    return True


def tied(run: Any, logits: list[Tensor]) -> bool:
    """Whether rounding decides which token is written, or where."""
    for step, each in enumerate(logits):
        where = run.masked[step] if each.ndim == 3 else slice(None)
        best = each[where].topk(2, -1).values
        if not run.settings.get("temperature") and bool((best[:, 0] - best[:, 1] < 1e-3).any()):
            return True
        sure = run.confidence[step]
        for row in sure:
            finite = row[torch.isfinite(row)].sort().values
            if len(finite) > 1 and bool((finite.diff() < 1e-4).any()):
                return True
    return False


def close(what: str, one: Tensor, other: Tensor, tolerance: float) -> None:
    """Equal up to float32 sums in another order, at what is a number in both."""
    assert one.shape == other.shape, what
    assert one.isnan().equal(other.isnan()), f"{what}: undefined in different places"
    gap = (one.double() - other.double()).abs() / (1 + other.double().abs())
    assert float(gap.nan_to_num().max()) < tolerance, f"{what}: {float(gap.nan_to_num().max())}"


def same_logits(run: Any, step: int, one: Tensor, exact: Tensor) -> None:
    where = run.attention_mask if one.ndim == 3 else slice(None)
    close(f"logits of step {step}", one[where].double(), exact[where], 2e-4)


def same_run(run: Any, other: Any, hooks: list[Any]) -> None:
    assert run.canvases.equal(other.canvases)
    close("confidence", run.confidence.nan_to_num(neginf=0), other.confidence.nan_to_num(neginf=0), 5e-5)
    for name in ("columns_hidden", "mass_hidden"):
        for one, theirs in zip(run.settings.get(name, ()), other.settings.get(name, ()), strict=False):
            if hooks:
                assert one == (None if theirs is None else pytest.approx(theirs, rel=1e-3, abs=1e-5)), name


def same_statistics(one: Any, other: Any) -> None:
    for name in one.arrays:
        close(name, one.arrays[name], other.arrays[name], 1e-4)


def same_recording(recorded: Any, network: Network, kept: list[dict[str, Tensor]]) -> None:
    """Column sums, entropies and norms against the float64 patterns."""
    run, count = recorded.run, network.sinks
    for step, exact in enumerate(kept):
        rows = len(run.tokens)
        length = exact["pattern0"].shape[-1] - count
        canvas = slice(count, count + length) if network.front else slice(0, length)
        sinks = slice(0, count) if network.front else slice(length, length + count)
        content = run.attention_mask[:, :length]
        for layer in range(2):
            pattern = exact[f"pattern{layer}"][:rows, :, canvas]
            pattern = torch.cat([pattern[..., canvas], pattern[..., sinks]], -1)
            sums = torch.einsum("bq,bhqk->bhk", content.double(), pattern)
            whole = recorded.received_sums()[step, :, layer].nan_to_num().double()
            received = torch.cat([whole[..., :length], whole[..., whole.shape[-1] - count :]], -1)
            defined = torch.cat([content, torch.ones(rows, count, dtype=torch.bool)], -1)[:, None]
            if network.causal:
                # The last keys have too few viewers for a score.
                later = content.flip(-1).cumsum(-1).flip(-1)
                defined = defined & (later >= 8)[:, None]
            close("received", (sums * defined), (received * defined), 1e-4)
            entropy = torch.special.entr(pattern).sum(-1)
            found = recorded.entropy[step, :, layer, :, :length].double()
            close("entropy", (entropy * content[:, None]), found.nan_to_num(), 1e-4)
            added = exact[f"attn_out{layer}"][:rows, canvas].norm(dim=-1)
            found = recorded.update_norm[step, :, layer, :length].double()
            close("update_norm", added * content, found.nan_to_num(), 2e-4)


PROMPTS = [[3, 41, 7, 7, 19, 28, 55, 2, 33, 14, 9, 50], [12, 8, 44, 31, 5, 26, 17, 40, 22]]
HOLES = [[3, 41, 64, 7, 19, 28, 55, 2, 33, 14, 9, 50], [12, 8, 44, 31, 64, 26, 17, 40, 22]]
# With noise: under a window masks far from the prompt are alike, and rounding would decide between them.
RUN: dict[str, Any] = {"gen_length": 6, "steps": 3, "temperature": 1.0}
GUIDED: dict[str, Any] = {**RUN, "remasking": "greedy", "cfg_scale": 3.0}
WINDOW = Drawn("keep", k=1, window=3, ahead=0)
KEPT = Drawn("keep", "after", k=1, window=3, ahead=2)
BEFORE = Drawn("sinks", "after", source="previous")
FROZEN = Drawn("freeze", "after", step=0)
ONE_HEAD = (("heads", (1,)),)


def in_heads(drawn: Drawn) -> list[Drawn]:
    """The same hook in head 0, and once more in head 1."""
    return [replace(drawn, wraps=(("heads", (head,)),)) for head in (0, 1)]


CASES: dict[str, Case] = {
    "a window, then sinks": Case("llada", PROMPTS, RUN, [WINDOW, Drawn("sinks", "after", detector=("mean", 0.5))]),
    "a window, then the top": Case("llada", PROMPTS, RUN, [WINDOW, Drawn("sinks", "after")]),
    "a window, then the last step's": Case("llada", PROMPTS, RUN, [WINDOW, BEFORE]),
    "two after the softmax": Case("dream", PROMPTS, RUN, [KEPT, Drawn("sinks", "after", detector=("mean", 0.3))]),
    "a window after sinks at the front": Case("qwen front", PROMPTS, RUN, [KEPT]),
    "a window before a sink at the end": Case("qwen end", PROMPTS, RUN, [KEPT]),
    "clean, guided, holes": Case("smdm", HOLES, GUIDED, [Drawn("sinks", source="clean")]),
    "off by one": Case("off by one", PROMPTS, RUN, [Drawn("sinks", detector=("share", 0.1))]),
    "sink logits": Case("sink logits", PROMPTS, RUN, [Drawn("sinks"), Drawn("sinks", "after", source="clean")]),
    "renormalised in one head": Case(
        "sink logits", PROMPTS, RUN, [Drawn("sinks", "after", renormalise=True, wraps=ONE_HEAD)]
    ),
    "the own position hidden before": Case(
        "llada",
        PROMPTS,
        RUN,
        [
            Drawn("positions", positions=(2, -1)),
            Drawn("tokens", classes=("prompt", "mask"), keep_self=True, wraps=(("layers", (0,)),)),
        ],
    ),
    "equal hooks": Case("llada", PROMPTS, RUN, [BEFORE, BEFORE]),
    "equal hooks inside": Case("llada", PROMPTS, RUN, [*in_heads(FROZEN), *in_heads(BEFORE)]),
}


@pytest.mark.parametrize("name", CASES)
def test_every_host_is_the_float64_network(name: str) -> None:
    assert check(CASES[name])  # no choice is so close that rounding decides it


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("part", range(PARTS))
def test_every_host_is_the_float64_network_under_any_composition(part: int) -> None:
    rng = random.Random(16)
    cases = [Case.draw(rng) for _ in range(DRAWN)][part::PARTS]
    compared = sum(check(case) for case in cases)
    assert compared > len(cases) * 0.7  # the others are decided by rounding
