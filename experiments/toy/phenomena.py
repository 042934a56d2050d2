"""What the sinks of an embedded model do: how many there are, on which tokens, their values, their moves.

The canvases of a finished run are replayed, and every map (prompt, step, layer, head) is scored by received
attention relative to uniform attention, per head. A sink is a key whose score exceeds the mean of the others
by eps = 3 (2510.15731, Eq. 3); the main sink of a map is its arg-max, whether or not it passes.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int

from dlm_lens import AboveMean, DenoisingRun, received_over_steps
from dlm_lens.attention import SinkLayout, position_ids
from experiments.toy.language import LARGEST_NUMBER, SIGNS
from experiments.toy.statistics import Estimate, clustered_ratio

EPS = 3.0
CLASSES = ("mask", "bos", "eos", "sign", "number", "word", "learned sink")


@dataclass(frozen=True)
class Maps:
    """All maps of a run: scores, raw column sums, value norms and token classes of the keys.

    A key without a score (padding, too few viewers) has NaN. In a bidirectional pass score and column sum are
    the same. The learned sinks of a sink model are the last keys.
    """

    score: Float[torch.Tensor, "step batch layer head key"]
    column_sum: Float[torch.Tensor, "step batch layer head key"]
    value_norm: Float[torch.Tensor, "step batch layer head key"]
    token_class: Int[torch.Tensor, "step batch key"]

    @property
    def defined(self) -> Bool[torch.Tensor, "step batch layer head key"]:
        """Which keys have a score."""
        return ~self.score.isnan()

    @property
    def sink(self) -> Bool[torch.Tensor, "step batch layer head key"]:
        """score_j > mean over the other defined keys + eps."""
        return AboveMean(EPS).detect(self.score)

    @property
    def main(self) -> Int[torch.Tensor, "step batch layer head"]:
        """Position of each map's largest score."""
        return largest(self.score)


def measure(model: Any, run: DenoisingRun) -> dict[str, Any]:
    """All statistics of one run, each with n and an interval clustered by prompt."""
    maps, sinks = replay(model, run), SinkLayout.of(model).count
    return summarise(maps) | ({"learned_sink": learned_sink(maps, sinks)} if sinks else {})


def replay(model: Any, run: DenoisingRun) -> Maps:
    """Run the model again on every canvas that a step of `run` saw.

    An autoregressive baseline sees the prefix at a step: later positions are neither queries nor keys.
    """
    received = received_over_steps(model, run)
    return Maps(
        received.values, received.column_sums, value_norms(model, run), token_classes(model, received.tokens)
    )


@torch.inference_mode()
def value_norms(model: Any, run: DenoisingRun) -> Float[torch.Tensor, "step batch layer head key"]:
    """L2 norms of the values on the canvases of a run, learned sinks last; needs one value head per head."""
    kept: list[torch.Tensor] = []
    handles = [
        layer.self_attn.hook_v.register_forward_hook(lambda module, args, v: kept.append(v.norm(dim=-1)))
        for layer in model.model.layers
    ]
    mask = run.attention_mask.long()
    positions = position_ids(mask)
    steps = []
    try:
        for canvas in run.canvases[:-1]:
            model(input_ids=canvas, attention_mask=mask, position_ids=positions, use_cache=False)
            steps.append(torch.stack(kept, 1).transpose(2, 3))
            kept.clear()
    finally:
        for handle in handles:
            handle.remove()
    return SinkLayout.of(model).sinks_last(torch.stack(steps))


def token_classes(model: Any, tokens: Int[torch.Tensor, "*axes key"]) -> Int[torch.Tensor, "*axes key"]:
    """Index into `CLASSES` of every token; learned sinks have negative ids."""
    tokenizer = model.tokenizer
    special = {tokenizer.mask_token: "mask", tokenizer.bos_token: "bos", tokenizer.eos_token: "eos"}
    of_token = special | dict.fromkeys(SIGNS, "sign") | {str(n): "number" for n in range(LARGEST_NUMBER + 1)}
    words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    table = torch.tensor([CLASSES.index(of_token.get(word, "word")) for word in words])
    return torch.where(tokens < 0, CLASSES.index("learned sink"), table[tokens.clamp(min=0)])


def summarise(maps: Maps) -> dict[str, Any]:
    """The statistics of the model cards."""
    sink, main = maps.sink, maps.main
    steps, prompts = sink.shape[:2]
    return {
        "prompts": prompts,
        "steps": steps,
        "eps": EPS,
        "maps_with_a_sink": _share(sink.any(-1)),
        "tokens_filtered_out": _share(~sink, maps.defined),
        "sinks_per_map": _ratio(sink, torch.ones_like(sink[..., 0])),
        "classes": _classes(maps),
        "value_norm": _value_norms(maps),
        "main_sink_differs_first_to_last": differs(maps.score),
        "main_sink_differs_same_keys": differs(maps.score, same_keys=True),
        "main_sink_differs_by_column_sum": differs(maps.column_sum),
        "main_sink_differs_where_both_pass": _differs_where_both_pass(maps),
        "main_sink_changes_per_step": _share(main[1:] != main[:-1]),
        "main_sink_distinct_positions": _distinct(main),
    }


def learned_sink(maps: Maps, count: int) -> dict[str, Any]:
    """What the learned sink tokens receive per layer, their value norms, and movement without them.

    share: their part of all attention; is_main: whether one of them is the map's largest key.
    """
    canvas = maps.score.shape[-1] - count
    layers = range(maps.score.shape[2])
    received = maps.column_sum.nan_to_num()
    ones = torch.ones_like(maps.main)

    def per_layer(top: torch.Tensor, bottom: torch.Tensor, most: float = math.inf) -> list[Estimate]:
        return [_ratio(top[:, :, layer], bottom[:, :, layer], most) for layer in layers]

    norm, defined = maps.value_norm, maps.defined
    return {
        "share": per_layer(received[..., canvas:].sum(-1) / received.sum(-1), ones, 1.0),
        "is_main": per_layer(maps.main >= canvas, ones, 1.0),
        "value_norm": per_layer(norm[..., canvas:].mean(-1), ones),
        "value_norm_others": per_layer((norm * defined)[..., :canvas], defined[..., :canvas]),
        "main_sink_differs_exempted": differs(maps.score[..., :canvas]),
    }


def largest(score: Float[torch.Tensor, "*maps key"]) -> Int[torch.Tensor, "*maps"]:
    """Position of the largest score that is defined."""
    return score.nan_to_num(nan=-1.0).argmax(-1)


def differs(score: Float[torch.Tensor, "step batch layer head key"], same_keys: bool = False) -> Estimate:
    """Share of (prompt, layer, head) whose largest key is not the same at the first and the last step.

    A baseline's last step has keys that its first did not have; `same_keys` looks at those that both have.
    """
    first, last = score[:1], score[-1:]
    if same_keys:
        last = last.masked_fill(first.isnan(), torch.nan)
    return _share(largest(first) != largest(last))


def _differs_where_both_pass(maps: Maps) -> Estimate:
    """The same, of those whose main sink passes eps at both steps."""
    main = maps.main
    passes = maps.sink.gather(-1, main[..., None]).squeeze(-1)
    return _share(main[:1] != main[-1:], passes[:1] & passes[-1:])


def _distinct(main: Int[torch.Tensor, "step batch layer head"]) -> Estimate:
    """Mean number of positions that are a (prompt, layer, head)'s main sink at some step."""
    ordered = main.sort(dim=0).values
    distinct = 1 + (ordered[1:] != ordered[:-1]).sum(0, keepdim=True)
    return _ratio(distinct, torch.ones_like(distinct))


def _classes(maps: Maps) -> dict[str, dict[str, Estimate]]:
    """Per token class, its share of the sinks and its base rate among all keys with a score."""
    sink, defined = maps.sink, maps.defined
    found = {}
    for index, name in enumerate(CLASSES):
        of_class = (maps.token_class == index)[:, :, None, None, :].expand_as(sink)
        found[name] = {"sinks": _share(of_class, sink), "base_rate": _share(of_class, defined)}
    return found


def _value_norms(maps: Maps) -> dict[str, Estimate]:
    """Mean value norm of sinks, of other keys, and of their ratio within a map, over maps with a sink.

    Norms differ between heads, and heads differ in how often they have sinks: only the ratio within a map
    compares like with like.
    """
    sink, norm = maps.sink, maps.value_norm
    other, has_sink = maps.defined & ~sink, sink.any(-1)
    within = _mean_over(norm, sink) / _mean_over(norm, other)
    return {
        "sinks": _ratio(norm * sink, sink),
        "others": _ratio(norm * other, other),
        "ratio_within_map": _ratio(within.nan_to_num() * has_sink, has_sink),
    }


def _mean_over(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return (values * chosen).sum(-1) / chosen.sum(-1)


def _share(event: torch.Tensor, among: torch.Tensor | None = None) -> Estimate:
    """Share of the cases in which `event` holds; both [step, batch, ...]."""
    among = torch.ones_like(event) if among is None else among
    return _ratio(event & among, among, 1.0)


def _ratio(top: torch.Tensor, bottom: torch.Tensor, most: float = math.inf) -> Estimate:
    return clustered_ratio(_per_prompt(top), _per_prompt(bottom), bounds=(0.0, most))


def _per_prompt(values: torch.Tensor) -> torch.Tensor:
    """Sum a [step, batch, ...] tensor over everything but the batch."""
    return values.double().transpose(0, 1).flatten(1).sum(1)
