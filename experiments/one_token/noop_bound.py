"""Appendix A.3.3 (Eq. 17 to 22): does attention to sinks contribute little to a head's output and to the update?"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.experiments.attention_sinks.recorded_runs import rounded
from dlm_lens.experiments.experiment import Cost, Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.one_token import recorded_runs
from dlm_lens.experiments.one_token.recorded_runs import by_network, items, over, title
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_below, only_with
from dlm_lens.printable import counted
from dlm_lens.recording import LayerStep, PatternReducer
from dlm_lens.statistics import CORRELATION_BOUNDS, POSITIVE_BOUNDS

SMALL: dict[str, Any] = {
    "models": ["toy", "toy-sink", "toy-gated"], **recorded_runs.SMALL, "prompts": 8, "batch": 8, "eps": 3.0,
}  # fmt: skip
FULL: dict[str, Any] = {
    **SMALL, "models": ["GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B"], "task": "gsm8k.jsonl",
    "prompts": 32, "batch": 2, "chat": True, "sampler": {"gen_length": 128, "steps": 128},
}  # fmt: skip

SETS = ("sinks", "mass", "count")
"""Keys of a pattern: its sinks; random other keys that receive as much attention together; as many random keys."""

PARTS = ("mass", "bound", "output")
"""Of the keys S of a set, per query: sum_S A_ij, sum_S A_ij ||v_j||, and || sum_S A_ij v_j ||."""

ROUNDING = 1e-4
"""Relative excess of ||o_i|| over its bound that counts as rounding in float32."""


@dataclass(frozen=True, eq=False)
class Contribution(PatternReducer):
    """What a set of keys contributes to every query's head output (2601.19657, Eq. 17 and 20).

    Args:
        keys: the set per step, prompt, layer and head; of a canvas with learned sinks last, as in `Sinks`.
        of: name of the set.
        part: one of `PARTS`.
    """

    keys: Bool[Tensor, "step batch layer head key"]
    of: str
    part: str

    dims = ("step", "batch", "layer", "head", "query")
    unit = "share of attention, or norm of a value"
    formula = "sum_S A_ij, sum_S A_ij ||v_j||_2 or ||sum_S A_ij v_j||_2 (2601.19657, Eq. 17 and 20)"

    @property
    def name(self) -> str:
        """The array: set and part."""
        return f"{self.of}_{self.part}"

    def start(self, layer: LayerStep) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The keys of this step and layer, what they are weighed with, and no tile yet."""
        import torch

        keys, learned = layer.inputs.k.shape[2], layer.facts.sinks
        here = self.keys[layer.run.step, :, layer.index]
        # An AR step has fewer keys than the run.
        chosen = torch.cat([here[..., : keys - learned], here[..., here.shape[-1] - learned :]], -1)
        values = layer.inputs.v.float()
        values = values.repeat_interleave(layer.inputs.q.shape[1] // values.shape[1], 1)
        weighed = {"mass": values.new_ones(*values.shape[:-1], 1), "bound": values.norm(dim=-1, keepdim=True)}
        return chosen.to(values.device), weighed.get(self.part, values), []

    def tile(self, state: Any, layer: LayerStep, rows: slice, pattern: Tensor) -> Any:
        """Add the queries of a tile."""
        chosen, weighed, parts = state
        return chosen, weighed, [*parts, ((pattern * chosen[:, :, None]) @ weighed).norm(dim=-1)]

    def finish(self, state: Any, layer: LayerStep) -> Float[Tensor, "batch head query"]:
        """The values of all queries, NaN at padding."""
        import torch

        return layer.only_queries(torch.cat(state[2], -1))


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt and layer: sums over patterns with sinks; per layer and head: both sides of Eq. 20."""
    import dlm_lens as dl
    from dlm_lens.recording import ResidualNorm, UpdateNorm, rerun

    model, recording = recorded_runs.record_prompts(item, settings, bench)
    sinks = dl.find_sinks(recording, dl.AboveMean(settings["eps"]))
    sets = key_sets(recording, sinks, seed=item["start"])
    reducers = [Contribution(keys, of, part) for of, keys in sets.items() for part in PARTS]
    everything = sinks.is_sink.new_ones(sinks.is_sink.shape)
    whole = Contribution(everything, "all", "bound")
    found = rerun(model, recording.run, [*reducers, whole, UpdateNorm(), ResidualNorm()])
    return {name: rounded(value, 5) for name, value in summarised(found, sets["sinks"]).items()}


def key_sets(recording: Any, sinks: Any, seed: int = 0) -> dict[str, Any]:
    """The sinks of every pattern, and random other keys: with their attention, and as many.

    The keys with equal attention are drawn in a random order until they receive what the sinks receive; the last
    one is left out where that is nearer. Where sinks get more than all others together, they are all others.
    Learned sink tokens and undefined keys are never drawn.

    Args:
        recording: with ReceivedAttention.
        sinks: of this recording, at the level of heads.
        seed: of the draw.
    """
    import torch

    received = recording.received_sums().nan_to_num()
    chosen = sinks.is_sink
    canvas = recording.run.tokens.shape[1]
    free = ~chosen & ~sinks.scores.isnan()
    free[..., canvas:] = False
    order = torch.rand(free.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(~free, 2).argsort(-1)
    given, open_ = received.gather(-1, order), free.gather(-1, order)
    total = (given * open_).cumsum(-1)
    wanted = (received * chosen).sum(-1, keepdim=True)
    # A key is drawn if with it the sum is nearer to the wanted one than without it.
    drawn = open_ & (total - given / 2 < wanted)
    ranks = torch.arange(order.shape[-1]).expand_as(order)
    many = open_ & (ranks < chosen.sum(-1, keepdim=True))
    blank = torch.zeros_like(chosen)
    return {
        "sinks": chosen,
        "mass": blank.scatter(-1, order, drawn),
        "count": blank.scatter(-1, order, many),
    }


def summarised(found: Any, sinks: Bool[Tensor, "step batch layer head key"]) -> dict[str, Any]:
    """Sums and means of a rerun, as tensors.

    Returns:
        SET_PART, [prompt, layer], sums over steps, heads and queries of the patterns that have a sink; correlation
        and correlation_count, Spearman's of a query's attention on the sinks (or on as many random keys), mean over
        heads, with ||z_i|| / ||h_i||, mean over steps; heads_bound, heads_output, [layer, head], means of both
        sides of Eq. 20 over all patterns; excess, the largest ||o_i|| / bound - 1.
    """
    import torch

    from dlm_lens.probes.updates import spearman

    there = sinks.any(-1)[..., None].cpu()
    values: dict[str, Any] = {}
    for of in SETS:
        for part in PARTS:
            held = getattr(found, f"{of}_{part}").double()
            values[f"{of}_{part}"] = torch.where(there & held.isfinite(), held, 0.0).sum((0, 3, 4))
    relative = found.update_norm.double() / found.residual_norm[..., : found.update_norm.shape[-1]].double()
    for name, of in (("correlation", "sinks"), ("correlation_count", "count")):
        mass = getattr(found, f"{of}_mass").double().mean(3)
        known = relative.isfinite() & mass.isfinite()
        rho, defined = spearman(mass, relative, known)
        some = defined & there.any(3)[..., 0]
        values[name] = (torch.where(some, rho, 0.0).sum(0) / some.sum(0)).masked_fill(~some.any(0), torch.nan)
    bound, output = found.all_bound.double(), found.mixed_norm.double()
    values |= {"heads_bound": bound.nanmean((0, 1, 4)), "heads_output": output.nanmean((0, 1, 4))}
    return values | {"excess": float((output / bound - 1).nan_to_num(nan=-1.0).max())}


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step to denoise, and one to measure."""
    steps, *training = recorded_runs.cost(item, settings)
    return [steps, steps, *training]


def per_attention(results: Results, model: str, part: str, layer: int | None = None) -> Interval:
    """What sinks contribute per unit of attention over what random keys with equal attention contribute.

    sum_p (c_p / m_p) m'_p / sum_p c'_p over prompts p, with contribution c and attention m of the sinks, c' and m'
    of the random keys; prompts without a sink are left out.
    """
    top, weight, other, other_weight = (
        values.sum(-1) if layer is None else values[..., layer]
        for values in (by_network(results, model, f"{of}_{name}") for of in SETS[:2] for name in (part, "mass"))
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return over(top / weight * other_weight, other, bounds=POSITIVE_BOUNDS)


def render(results: Results) -> Rendering:
    """Both sides of Eq. 20 per head, and contributions per layer."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart, scatter_plots

    rows, clouds, curves = [], {}, {}
    for model in results.models:
        layers = range(by_network(results, model, "sinks_mass").shape[-1])
        records = results.where(model=model)
        bound, output = (
            np.mean([one.value[name] for one in records], 0) for name in ("heads_bound", "heads_output")
        )
        clouds[title(model)] = by_depth(bound, output)
        contributions = [per_attention(results, model, "bound", layer) for layer in layers]
        curves[title(model)] = [
            (layer / max(1, len(layers) - 1), found) for layer, found in enumerate(contributions)
        ]
        for layer in layers:
            rho, other = (
                by_network(results, model, name)[..., layer] for name in ("correlation", "correlation_count")
            )
            most, least = bound[layer].mean(), output[layer].mean()
            rows.append([
                title(model), str(layer), f"{most:.2f}", f"{least:.2f}", f"{least / most:.2f}",
                str(per_attention(results, model, "bound", layer)),
                str(per_attention(results, model, "output", layer)),
                *(str(over(one, bounds=CORRELATION_BOUNDS)) for one in (rho, other)),
            ])  # fmt: skip
    head = ["model", "layer", "bound of Eq. 20", "head output", "output / bound", "sinks' bound / random keys'",
            "sinks' output / random keys'", "rank correlation of sink attention with the update",
            "of as many random keys"]  # fmt: skip
    rule = f"sinks by Eq. 3 of 2510.15731, eps = {results.settings['eps']}, per head, relative to uniform"
    table = Table(f"{rule}; contributions per unit of attention; intervals over prompts and networks", head, rows)
    figures = {
        "bound": scatter_plots(clouds, x="bound, sum_j A_ij ||v_j||", y="head output, ||o_i||", diagonal=True),
        "contributions": line_chart(
            curves, x="depth (0: first layer, 1: last)", y="sinks' contribution / random keys'"
        ),
    }
    captions = {
        "bound": "Eq. 20: one point per head, means over queries, steps and prompts. Every point must lie below "
        "the line; the further below, the more the values of a head cancel.",
        "contributions": "What sinks add to the bound per unit of attention, over what random keys with as much "
        "attention add. 1: no difference; a no-op would be far below 1.",
    }
    told = [inequality(results), *(one for model in results.models for one in findings(results, model))]
    notes = [
        "The paper derives Eq. 17 to 22 and measures none of it. The bound on the head output holds for any "
        "attention; that sinks make the update small is a claim about the values, and is what is tested here. "
        "Several random keys can cancel where a single sink cannot, which is why the bound is compared beside the "
        "output."
    ]
    notes += recorded_runs.on_scale(results)
    return Rendering([table], figures, told, notes, captions)


def by_depth(bound: Any, output: Any) -> dict[str, list[tuple[float, float]]]:
    """Both sides of Eq. 20 of every head, by layer; by thirds of the depth where there are more than 8 layers."""
    found: dict[str, list[tuple[float, float]]] = {}
    for layer, pair in enumerate(zip(bound, output, strict=True)):
        third = ("first", "middle", "last")[3 * layer // len(bound)]
        kind = f"layer {layer}" if len(bound) <= 8 else f"{third} third of the layers"
        found.setdefault(kind, []).extend(zip(*pair, strict=True))
    return found


def inequality(results: Results) -> Finding:
    """Eq. 20 itself, a check of the measurement."""
    excess = max(one.value["excess"] for one in results.records)
    return Finding(
        "the norm of a head's output is at most the weighted sum of value norms (Eq. 20)",
        f"all models: the largest ||o|| / bound of all queries is {1 + excess:.5f}",
        "agrees" if excess < ROUNDING else "disagrees",
        f"agrees: no query exceeds 1 by more than rounding ({ROUNDING:g}); it checks the measurement",
        "none: the triangle inequality holds for any attention",
    )


def findings(results: Results, model: str) -> Iterator[Finding]:
    """Contributions of sinks; the update of queries that attend to them."""
    networks = counted(len(by_network(results, model, "sinks_mass")), "network")
    of = f"{title(model)} ({networks})"
    for part, said in (("bound", "to the bound"), ("output", "to the head's output")):
        found = per_attention(results, model, part)
        yield Finding.of(
            f"the contribution of attention to low-norm tokens is correspondingly small (after Eq. 20): {said}",
            f"{of}: per unit of attention, sinks over random keys {found}",
            is_below(found, 1.0),
            "agrees: the whole interval below 1; disagrees: above",
            "1, random other keys of the same pattern that receive as much attention together",
        )
    rho, other = (by_network(results, model, name) for name in ("correlation", "correlation_count"))
    apart = over(mean_known(rho) - mean_known(other), bounds=(-2, 2))
    own, null = (over(mean_known(one), bounds=CORRELATION_BOUNDS) for one in (rho, other))
    judged = only_with(is_below(apart, 0.0), "agrees", [is_below(own, 0.0)])
    yield Finding.of(
        "attending mainly to low-norm values makes the update small (after Eq. 22)",
        f"{of}: rank correlation of a query's attention to sinks with ||z|| / ||h|| {own}; minus that of random "
        f"keys {apart}",
        judged,
        "agrees: the difference to random keys and the correlation itself wholly below 0; disagrees: the "
        "difference above 0",
        f"the same with as many random keys: {null}",
    )


def mean_known(values: Float[np.ndarray, "network prompt layer"]) -> Float[np.ndarray, "network prompt"]:
    """Mean over the layers that have a value; NaN where none has."""
    known = np.isfinite(values)
    count = known.sum(-1)
    return np.where(count > 0, np.where(known, values, 0.0).sum(-1) / np.maximum(count, 1), np.nan)


EXPERIMENT = Experiment(
    name="one-token-noop",
    shows="2601.19657, Eq. 17 to 22",
    title="is attention to sinks a no-op: the bound of Eq. 20, sinks' contributions and the update",
    metric="norms of attention-weighted values per head; ||z|| / ||h|| per layer",
    small=SMALL,
    full=FULL,
    items=items,
    run=run,
    render=render,
    cost=cost,
    own=recorded_runs.OWN,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
