"""`value_norms`: do sinks have short values?"""

from typing import Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import ONE_SEED, checked_arguments, shown
from dlm_lens.probes.intervals import estimate, mean_of
from dlm_lens.probes.norms_result import Alike, ValueNorms, shorter
from dlm_lens.recording import Recording
from dlm_lens.sinks import Sinks

SAMPLES = 10_000
ENTRIES_AT_ONCE = 2**22


@checked_arguments(seed=ONE_SEED)
def value_norms(
    recording: Recording,
    sinks: Sinks | Literal["learned"],
    *,
    samples: int = SAMPLES,
    alike: Alike = "any",
    seed: int = 0,
) -> ValueNorms:
    """Norms of the values of sinks, against matched other tokens (2601.19657, Figures 1 and 3).

    Sinks of the head level are judged by the value in their head, ||v_j^m||_2 (Eq. 15); sinks of the layer level
    by r_j = 1/M sum_m ||v_j^m||_2 (Eq. 16). Each of up to `samples` sinks, drawn without replacement, stands beside
    one other token of the same prompt, step, layer and head, drawn anew for each: a position of the canvas that is
    no sink there. Intervals draw prompts, since the steps and heads of one are not independent.

    Args:
        recording: with ValueNorm, and for shares of attention with ReceivedAttention.
        sinks: as `find_sinks` found them in this recording; "learned" for the model's learned sink tokens.
        samples: pairs at most; the paper has 10,000.
        alike: "masked" for another token that is masked as the sink is, or written as it is.
        seed: of the draw.

    Raises:
        ValueError: norms that were not recorded, sinks of another recording or of the model's mean pattern, no sink
            at all.
    """
    if not isinstance(recording, Recording):
        raise TypeError(f"the recording is a {type(recording).__name__}; give one of dlm_lens.record")
    if samples < 1 or alike not in ("any", "masked"):
        raise ValueError(
            f"value_norms(samples={samples}, alike={alike!r}): samples is at least 1, alike 'any' or 'masked'"
        )
    norms, found, undefined = _given(recording, sinks)
    where = found.nonzero()
    if not len(where):
        raise ValueError(f"there is no sink by {_rule(sinks)}; lower the threshold")
    generator = torch.Generator().manual_seed(seed)
    drawn = where[torch.randperm(len(where), generator=generator)[:samples]]
    rows = max(1, ENTRIES_AT_ONCE // found.shape[-1])
    parts = [_pairs(norms, found, undefined, recording, part, alike, generator) for part in drawn.split(rows)]
    sink, other, percentile = (torch.cat(values) for values in zip(*parts, strict=True))
    kept = other.isfinite()
    layers = torch.tensor(recording.layers)
    return ValueNorms(
        sink=sink[kept],
        other=other[kept],
        percentile=percentile[kept],
        prompt=drawn[kept, 1],
        layer=layers[drawn[kept, 2]],
        rule=_rule(sinks),
        formula="||v_j^m||_2 (2601.19657, Eq. 15)" if found.ndim == 5 else "1/M sum_m ||v_j^m||_2 (Eq. 16)",
        alike=alike,
        found=len(where),
        unmatched=int((~kept).sum()),
        profile=_profile(recording, norms, found, undefined, seed),
        seed=seed,
    )


class _Norms:
    """Norms by place, without a copy for every query head of a group."""

    def __init__(self, values: Tensor, heads: tuple[int, ...] | None, query_heads: int) -> None:
        self.values = values
        groups = 1 if heads is None else query_heads // values.shape[3]
        self.head = None if heads is None else torch.tensor(heads) // groups

    def at(self, places: Int[Tensor, "place axis"]) -> Float[Tensor, "place key"]:
        """The norms of all keys of the patterns (step, batch, layer, head) at these places."""
        step, row, layer = places[:, :3].unbind(-1)
        if self.head is None:
            return self.values[step, row, layer]
        return self.values[step, row, layer, self.head[places[:, 3]]]

    def of_layer(self, layer: int) -> Float[Tensor, "step batch *head key"]:
        """All of one layer."""
        found = self.values[:, :, layer]
        return found if self.head is None else found[:, :, self.head]


def _given(
    recording: Recording, sinks: Sinks | Literal["learned"]
) -> tuple[_Norms, Bool[Tensor, "step batch layer *head key"], Bool[Tensor, "step batch layer *head key"]]:
    """Norms, which keys are sinks, and which are undefined."""
    by_token = isinstance(sinks, str) and sinks == "learned"
    per_head = by_token or (isinstance(sinks, Sinks) and sinks.level == "head" and "head" in sinks.dims)
    heads = recording.heads or tuple(range(recording.query_heads))
    norms = _norms(recording, heads if per_head else None)
    shape = (len(recording.steps), len(recording.rows), len(recording.layers))
    shape = (*shape, *((len(heads),) if per_head else ()), recording.sizes["key"])
    if isinstance(sinks, Sinks):
        if tuple(sinks.is_sink.shape) != shape or sinks.layers != recording.layers:
            raise ValueError(
                f"the sinks have shape {list(sinks.is_sink.shape)} {sinks.dims} and layers {sinks.layers}, the "
                f"recording asks for {list(shape)} and {recording.layers}; find them in this recording, at level "
                "'head' or 'layer'"
            )
        return norms, sinks.is_sink, sinks.scores.isnan()
    if not by_token:
        raise ValueError(f"sinks is {shown(sinks)}; give the Sinks of find_sinks, or 'learned'")
    if not recording.sinks:
        raise ValueError(f"{recording.model} has no learned sink tokens; give the Sinks of find_sinks")
    learned = torch.arange(shape[-1]) >= shape[-1] - recording.sinks
    return norms, learned.expand(shape), torch.zeros(1, dtype=torch.bool).expand(shape)


def _norms(recording: Recording, heads: tuple[int, ...] | None) -> _Norms:
    if "value_norm" not in recording.specs and (heads is not None or "value_norm_mean" not in recording.specs):
        wanted = "ValueNorm()" if heads is not None else "ValueNorm() or ValueNorm('mean')"
        raise ValueError(f"this recording has no norms of values; record with {wanted}")
    if heads is not None:
        return _Norms(recording.value_norm, heads, recording.query_heads)
    if "value_norm_mean" in recording.specs:
        return _Norms(recording.value_norm_mean, None, recording.query_heads)
    # Every key head serves as many query heads, so that the mean over groups is the mean over heads.
    return _Norms(recording.value_norm.mean(3), None, recording.query_heads)


def _pairs(
    norms: _Norms,
    found: Bool[Tensor, "step batch layer *head key"],
    undefined: Bool[Tensor, "step batch layer *head key"],
    recording: Recording,
    drawn: Int[Tensor, "pair axis"],
    alike: Alike,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "pair"], Float[Tensor, "pair"], Float[Tensor, "pair"]]:
    """Norms of the sinks, of one other each (NaN where there is none), and percentile ranks of the sinks."""
    place, key = drawn[:, :-1], drawn[:, -1:]
    values = norms.at(place)
    cell = tuple(place.unbind(-1))
    others = ~found[cell] & ~undefined[cell] & values.isfinite()
    others[:, recording.run.tokens.shape[1] :] = False  # learned sink tokens are no tokens to compare with
    if alike == "masked":
        masked = recording.masked[place[:, 0], place[:, 1]]
        others &= masked == masked.gather(-1, key)
    sink = values.gather(-1, key)[:, 0]
    below = (shorter(values, sink[:, None]) * others).sum(-1)
    chance = torch.rand(values.shape, generator=generator).masked_fill(~others, -1)
    other = values.gather(-1, chance.argmax(-1, keepdim=True))[:, 0]
    other = other.masked_fill(~others.any(-1), torch.nan)
    return sink, other, below / others.sum(-1).clamp(min=1)


def _profile(recording: Recording, norms: _Norms, found: Tensor, undefined: Tensor, seed: int) -> pd.DataFrame:
    """Per layer, over all sinks and all others: mean norms, and the share of attention that the sinks get."""
    canvas = recording.run.tokens.shape[1]
    received = "received" in recording.specs
    lines = []
    for place, layer in enumerate(recording.layers):
        values, here = norms.of_layer(place), found[:, :, place]
        usable = values.isfinite() & ~undefined[:, :, place]
        other = usable & ~here
        other[..., canvas:] = False
        line: dict[str, float | int] = {"layer": layer}
        for name, kept in (("sink", here & usable), ("other", other)):
            e = estimate(
                torch.stack([_per_prompt(values.nan_to_num(), kept), _per_prompt(kept, kept)], -1),
                mean_of,
                seed=seed,
            )
            line |= {f"norm_{name}": e.value, f"norm_{name}_low": e.low, f"norm_{name}_high": e.high}
        if received:
            scores = recording.arrays["received"][:, :, place].float()
            sums = (scores * recording.expected(layer=layer)[:, :, None]).nan_to_num()
            sums = sums.mean(2) if here.ndim == 3 else sums
            total = torch.ones_like(sums, dtype=torch.bool)
            e = estimate(torch.stack([_per_prompt(sums, here), _per_prompt(sums, total)], -1), mean_of, seed=seed)
            line |= {"share": e.value, "share_low": e.low, "share_high": e.high}
        lines.append(line)
    return pd.DataFrame(lines)


def _per_prompt(values: Tensor, kept: Tensor) -> Float[Tensor, "batch"]:
    """Sum over all but the rows, axis 1."""
    return (values.double() * kept).transpose(0, 1).flatten(1).sum(-1)


def _rule(sinks: Sinks | Literal["learned"]) -> str:
    return sinks.rule if isinstance(sinks, Sinks) else "learned sink tokens"
