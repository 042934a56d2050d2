"""The rules of a report: those that the page computes, and those whose sinks `find_sinks` found beforehand."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sinks import Detector, Level, Received, Sinks, find_sinks, received_of, trajectories
from dlm_lens.sinks.detector_registry import DETECTORS, DetectorText, text_of
from dlm_lens.sinks.from_recording import has_scores
from dlm_lens.sinks.key_axes import AXES
from dlm_lens.viz.reporting.packing import Pack, narrow, packed

logger = logging.getLogger(__name__)

COMPUTED = ("above-mean", "above-std", "soft-sigmoid", "top-k")
"""Rules that the page computes for any setting (`page/rules.js`). They read received attention."""

LARGEST_PART = 8
"""A rule that was not requested is stored if it takes at most one part in so many of the file."""


def rule_of(detector: Detector) -> dict[str, Any]:
    """A detector as the page names it: name and setting of a computed rule, the repr of a stored one."""
    text = text_of(detector)
    if text is None or text.entry.name not in COMPUTED:
        return {"name": repr(detector), "value": None}
    return {"name": text.entry.name, "value": getattr(detector, text.entry.setting)}


def stored_rules(
    source: Recording | Received,
    requested: Detector,
    levels: Sequence[Mapping[str, Any]],
    keys: Int[Tensor, "shown"],
    *,
    row: int,
    steps: int,
    budget: int,
    queries: QueryClass = "all",
    pack: Pack = packed,
) -> list[dict[str, Any]]:
    """The sinks of one row by every rule that the page does not compute and the recording has the statistics for.

    A rule of the registry is stored with its default setting, `requested` with its own.

    Args:
        source: the recording, or received attention.
        requested: the rule with which the page starts.
        levels: the levels of the page, as `data.content_of` lists them.
        keys: indices of the keys that the page shows.
        row: index of the sequence.
        steps: how many steps it ran.
        budget: characters of the whole file.
        queries: which queries count, of a recording.
        pack: how arrays are given.

    Raises:
        ValueError: the recording lacks the statistic that `requested` reads.
    """
    found = []
    rules = [DetectorText(entry, entry.default).build() for entry in DETECTORS.values()]
    if type(requested) not in [type(rule) for rule in rules] or rule_of(requested)["value"] is None:
        rules = [requested, *(rule for rule in rules if type(rule) is not type(requested) or _computed(rule))]
    for rule in rules:
        if _computed(rule) or not (rule is requested or has_scores(source, rule.quantity, queries)):
            continue
        stored = _stored(source, rule, levels, keys, row=row, steps=steps, queries=queries, pack=pack)
        size = sum(len(stored[name]["data"]) for name in ("count", "key", "score", "threshold"))
        if rule is requested or size <= budget // LARGEST_PART:
            found.append(stored)
        else:
            logger.info("the report leaves out the sinks by %r, which would take %.1f MB", rule, size / 1e6)
    return found


def _computed(rule: Detector) -> bool:
    return rule_of(rule)["value"] is not None


def _stored(
    source: Recording | Received,
    rule: Detector,
    levels: Sequence[Mapping[str, Any]],
    keys: Int[Tensor, "shown"],
    *,
    row: int,
    steps: int,
    queries: QueryClass,
    pack: Pack,
) -> dict[str, Any]:
    """The sinks of every pattern and step, the strongest first: counts, keys, scores and thresholds."""
    attention = source
    if isinstance(source, Recording) and not rule.reads_hidden_states:
        attention = received_of(source, queries)
    first = find_sinks(attention, rule, level="head" if rule.reads_hidden_states else levels[0]["name"])
    found, parts, scale = [], [], first.scale
    for level in levels:
        if rule.reads_hidden_states and level["name"] != first.level:
            parts.append(_empty(level, steps))
            continue
        sinks = first if level["name"] == first.level else find_sinks(attention, rule, level=level["name"])
        parts.append(_listed(sinks, keys, row, steps))
        found.append(level["name"])
    count, key, score, threshold = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    text = text_of(rule)
    formula = "" if text is None else text.entry.formula
    return {
        "name": repr(rule),
        "formula": formula,
        "levels": found,
        "scale": scale,
        "low": rule.low_is_sink,
        "count": pack(narrow(count, len(keys))),
        "key": pack(narrow(key, len(keys))),
        "score": pack(score),
        "threshold": pack(threshold),
    }


Listed = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Number of sinks per pattern and step, and of every sink its key, score and threshold."""


def _empty(level: Mapping[str, Any], steps: int) -> Listed:
    none = np.zeros(0, dtype=np.float32)
    return np.zeros(level["layers"] * level["heads"] * steps, dtype=np.int64), none.astype(np.int64), none, none


def _listed(sinks: Sinks, keys: Int[Tensor, "shown"], row: int, steps: int) -> Listed:
    """The sinks of one level, pattern by pattern and in each step by step."""

    def patterns(values: Tensor) -> Tensor:
        for axis, name in enumerate(AXES):
            if name not in sinks.dims:
                values = values.unsqueeze(axis)
        return values[:steps, row][..., keys].permute(1, 2, 0, 3).flatten(0, 1)

    is_sink, scores, threshold = map(patterns, (sinks.is_sink, sinks.scores.float(), sinks.threshold.float()))
    low = sinks.detector.low_is_sink
    order = scores.masked_fill(~is_sink, torch.inf if low else -torch.inf).argsort(
        dim=-1, descending=not low, stable=True
    )
    counts = is_sink.sum(-1)
    chosen = torch.arange(scores.shape[-1]) < counts[..., None]
    listed = (values.gather(-1, order)[chosen].numpy() for values in (scores, threshold))
    return counts.flatten().numpy(), order[chosen].numpy(), *listed  # type: ignore[return-value]


def kinds_of(received: Received, levels: Sequence[Level], rule: Detector) -> str:
    """A letter per pattern, level by level: n(one), s(tatic), m(oving) or u(nsettled); empty for hidden states.

    `trajectories` follows received attention; a rule without hysteresis is followed without it.
    """
    if rule.reads_hidden_states:
        return ""
    own = rule.hysteresis_setting is None and type(rule).holds is Detector.holds
    settings: dict[str, Any] = {"hysteresis": 1.0} if own else {}
    found = (trajectories(received, rule, level=level, **settings).kinds for level in levels)
    return "".join(kind[0] for kinds in found for kind in kinds.flatten().tolist())
