"""Comparisons of detectors: agreement, the share of keys that each keeps, sweeps over eps, and the sink rate."""

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import LEVEL, Rule, check_index, checked_arguments, flag, is_real, plain_number
from dlm_lens.recording import Recording
from dlm_lens.sinks.detection import FOUND, Sinks, find_sinks
from dlm_lens.sinks.detectors.above_mean import AboveMean
from dlm_lens.sinks.detectors.base import Detector
from dlm_lens.sinks.from_recording import received_in
from dlm_lens.sinks.received import Level, Received
from dlm_lens.statistics import SHARE_BOUNDS, prompts_or_rows, prompts_with_cases, ratio_by_prompt

ENTRIES_AT_ONCE = 2**19


@checked_arguments(sinks=FOUND)
def sink_rate(sinks: Sinks, position: int | None = None) -> Float[Tensor, "*rows"]:
    """Share of (layer, head) that have a sink, per step and sequence.

    2410.10781, Eq. 2 with `MeanReceived(0.3)` and a position (the first token there): sink rate_k =
    1 / L sum_l 1 / H sum_h 1(alpha_k > 0.3). Since the sinks of a DLM have no fixed place, by default any key
    counts. Patterns in which no key (or not the position) has a score are left out; NaN if none is left.

    Args:
        sinks: of any detector; the axes layer and head, where they are, are averaged over.
        position: a canvas position; None for any key.

    Raises:
        ValueError: the position is not on the canvas.
    """
    keys = sinks.is_sink.shape[-1]
    if position is not None:
        check_index("position", position, keys - sinks.sinks)
    start = 0 if position is None else position % (keys - sinks.sinks)
    wanted = slice(None) if position is None else slice(start, start + 1)
    passes = sinks.is_sink[..., wanted].any(-1).double()
    passes[sinks.scores[..., wanted].isnan().all(-1)] = torch.nan
    axes = [axis for axis, name in enumerate(sinks.dims) if name in ("layer", "head")]
    return passes.nanmean(axes) if axes else passes


def compare_detectors(
    attention: Received | Recording | Tensor | None,
    detectors: Sequence[Detector | str | Sinks],
    *,
    level: Level = "head",
) -> pd.DataFrame:
    """Agreement of detectors: for every pair the Jaccard index of their sinks, and the share of keys of each.

    J = |A and B| / |A or B| over all keys with a score of both, all patterns together; NaN where neither finds a
    sink.
    Columns: `first`, `second`; `jaccard` with its 95% interval `low`, `high` (bootstrap over prompts; NaN for
    one); `kept_first`, `kept_second`, the share of keys that are sinks; `same_main`, the share of the patterns
    with a sink by both in which the largest is the same; `n` keys, `sequences`; `prompts` with a sink.

    Args:
        attention: what `find_sinks` takes; None if all `detectors` are `Sinks`.
        detectors: rules (or their texts), or `Sinks` of the same run that a rule found elsewhere (hidden states).
        level: the level of the patterns.

    Raises:
        TypeError: a rule, but no attention.
        ValueError: fewer than two, or sinks on other axes.
    """
    found, prompt = [], None
    for rule in detectors:
        if not isinstance(rule, Sinks):
            if attention is None:
                raise TypeError(f"{rule!r} needs attention; give a Received, or Sinks instead of the rule")
            rule = find_sinks(attention, rule, level=level)
        found.append((repr(rule.detector), rule.is_sink, ~rule.scores.isnan(), rule.main(), rule.dims))
        prompt = prompt if rule.row_prompts is None else rule.row_prompts
    if len(found) < 2:
        raise ValueError(f"{len(found)} detectors; give at least two")
    for name, is_sink, _, _, dims in found[1:]:
        if dims != found[0][4] or is_sink.shape != found[0][1].shape:
            raise ValueError(
                f"{name} has sinks on {dims} of shape {list(is_sink.shape)}, {found[0][0]} on {found[0][4]} of "
                f"shape {list(found[0][1].shape)}; compare what has the same axes"
            )
    return pd.DataFrame([_pair(first, second, prompt) for first, second in combinations(found, 2)])


def _pair(first: tuple[Any, ...], second: tuple[Any, ...], prompt: Tensor | None) -> dict[str, Any]:
    (name, a, a_defined, a_main, dims), (other, b, b_defined, b_main, _) = first, second
    both = a_defined & b_defined
    a, b = a & both, b & both
    batch = dims.index("batch") if "batch" in dims else None

    def per_sequence(mask: Tensor) -> Any:
        rows = mask[None] if batch is None else mask.movedim(batch, 0)
        return rows.flatten(1).sum(1).double().numpy()

    rows = 1 if batch is None else a.shape[batch]
    either = per_sequence(a | b)
    jaccard, low, high = ratio_by_prompt(per_sequence(a & b), either, prompt, bounds=SHARE_BOUNDS)
    n, compared = int(both.sum()), (a_main >= 0) & (b_main >= 0)
    same = (a_main == b_main)[compared].double().mean()
    return {
        "first": name,
        "second": other,
        "jaccard": float(jaccard),
        "low": float(low),
        "high": float(high),
        "kept_first": int(a.sum()) / max(n, 1),
        "kept_second": int(b.sum()) / max(n, 1),
        "same_main": float(same),
        "n": n,
        "sequences": rows,
        "prompts": int(prompts_with_cases(either, prompt)),
    }


def _are_numbers(values: Any) -> bool:
    return hasattr(values, "__len__") and all(is_real(plain_number(value)) for value in values)


@checked_arguments(
    eps_values=Rule("a list of finite numbers, such as [1.0, 3.0]", _are_numbers), level=LEVEL, literal=flag()
)
def eps_sweep(
    received: Received | Recording | Iterable[Received | Recording],
    eps_values: Sequence[float],
    *,
    level: Level = "head",
    literal: bool = False,
) -> pd.DataFrame:
    """Share of keys that are sinks, and that are left out, as eps of Eq. 3 grows (2510.15731, Figure 10).

    The figure is for sequences of S = 64; the same eps is another share of attention at another length
    (docs/sinks.md), so that sequences of different lengths are never mixed: one line per S and eps.

    Columns: `S`, how many keys of a sequence ever have a score; `eps`; `kept` with its 95% interval `low`, `high`
    (bootstrap over prompts; NaN for one) and `removed` = 1 - kept; `with_sink`, the share of patterns with at least
    one sink; `n` keys, `patterns`, `sequences`, `prompts`; `scale`, `level`, and the class of `queries`.

    Args:
        received: of one run, or of several, whose prompts count apart. Of a `Recording` that of all queries.
        eps_values: thresholds.
        level: the level of the patterns.
        literal: Eq. 3 on A-bar from 0 to 1, as `AboveMean(eps, literal=True)`.

    Raises:
        ValueError: no or no finite eps, or something else than received attention.
    """
    rules = [AboveMean(float(eps), literal=literal) for eps in eps_values]
    if not rules:
        raise ValueError("eps_values is empty; give at least one threshold")
    given_runs = received if isinstance(received, Iterable) else [received]
    runs = [received_in(run, "received") for run in given_runs]
    counts, labels, prompts = [], [], 0
    for run in runs:
        given = run.at_level(level)
        labels.append(given.part(slice(0, 0)).read(rules[0].quantity)[1])
        of_rows = [_count_row(given.part(rows=slice(row, row + 1)), rules) for row in range(given.values.shape[1])]
        numbers = prompts_or_rows(given.row_prompts, len(of_rows)) + prompts
        prompts = int(numbers.max(initial=prompts - 1)) + 1
        counts += [row | {"prompt": number} for row, number in zip(of_rows, numbers.tolist(), strict=True)]
    lines = []
    for length in sorted({row["S"] for row in counts}):
        rows = [row for row in counts if row["S"] == length]
        kept, low, high = ratio_by_prompt(
            np.stack([row["kept"] for row in rows]),
            np.stack([np.full(len(rules), float(row["n"])) for row in rows]),
            [row["prompt"] for row in rows],
            bounds=SHARE_BOUNDS,
        )
        patterns = sum(row["patterns"] for row in rows)
        with_sink = sum(row["with_sink"] for row in rows) / (patterns or math.nan)  # no share of none
        lines.append(
            pd.DataFrame(
                {"S": length, "eps": [rule.eps for rule in rules], "kept": kept, "low": low, "high": high}
            ).assign(
                removed=1 - kept,
                with_sink=with_sink,
                n=sum(row["n"] for row in rows),
                patterns=patterns,
                sequences=len(rows),
                prompts=len({row["prompt"] for row in rows}),
                scale=labels[0],
                level=level,
                queries=" / ".join(dict.fromkeys(run.queries for run in runs)),
            )
        )
    return pd.concat(lines, ignore_index=True)


def _count_row(row: Received, rules: Sequence[AboveMean]) -> dict[str, Any]:
    """Numbers of keys and patterns of one sequence, and how many every rule keeps, a few heads at a time."""
    steps, _, layers, heads, keys = row.values.shape
    at_once = max(1, ENTRIES_AT_ONCE // max(1, steps * keys))
    kept, with_sink = np.zeros(len(rules)), np.zeros(len(rules))
    scored, n, patterns = torch.zeros(keys, dtype=torch.bool), 0, 0
    for layer in range(layers):
        for head in range(0, heads, at_once):
            part = row.part(layers=slice(layer, layer + 1), heads=slice(head, head + at_once))
            scores = part.read(rules[0].quantity)[0].float()
            # The excess over the mean of the others; every rule compares it with its own eps.
            excess = scores - AboveMean(0.0).thresholds(scores)
            highest = excess.nan_to_num(nan=-torch.inf).amax(-1)
            kept += [int(torch.count_nonzero(excess > rule.eps)) for rule in rules]
            with_sink += [int((highest > rule.eps).sum()) for rule in rules]
            defined = ~scores.isnan()
            scored |= defined.flatten(0, -2).any(0)
            n, patterns = n + int(torch.count_nonzero(defined)), patterns + int(defined.any(-1).sum())
    return {"S": int(scored.sum()), "kept": kept, "with_sink": with_sink, "n": n, "patterns": patterns}
