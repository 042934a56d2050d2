"""Enrichment of sinks in classes of tokens and of positions, relative to a random key of the same step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from dlm_lens.arguments import checked_arguments, one_of
from dlm_lens.sampling.denoising_run import holds_random_tokens
from dlm_lens.sinks.lifetimes import Ints
from dlm_lens.sinks.received import in_model
from dlm_lens.sinks.sink_trajectories import FOLLOWED, GROUPS, By, Trajectories
from dlm_lens.sinks.token_classes import TOKEN_CLASSES, TokenClasses
from dlm_lens.statistics import (
    POSITIVE_BOUNDS,
    Floats,
    prompts_with_cases,
    ratio_by_prompt,
    wilson_bounds,
)

COLUMNS = ("class", "sinks", "share", "base", "enrichment", "low", "high", "sequences", "prompts")

POSITION_CLASSES = ("prompt", "written", "masked", "in the block", "after the block", "learned sink")


@dataclass(frozen=True)
class _KeyClasses:
    """The class of every key at every step; one key may be in several classes of positions."""

    names: tuple[str, ...]
    member: NDArray[np.bool_]
    """[class, step, batch, key]"""


@checked_arguments(paths=FOLLOWED)
def token_enrichment(
    paths: Trajectories,
    by: By = "all",
    *,
    classes: Mapping[int, str] | Callable[[int], str] | None = None,
    eos_token_ids: Sequence[int] = (),
) -> pd.DataFrame:
    """Enrichment of token classes among sinks: the share of each class among sinks, over its share among all keys.

    2510.15731 (section 4.2) finds LLaDA's sinks on punctuation, whitespace and end-of-text tokens; "One Token Is
    Enough" (section 1) on masks. Every step of a sink counts, with the token of that step. The base is the class
    of a random key of the same step, sequence and layer, so that masks are not enriched because early steps are
    full of them: base_c = sum over sinks of the share of class c among the keys with a score at that step, over
    the number of sinks. enrichment = share / base: 1 for no preference.

    Columns: layer, head (by `by`); `class`; `sinks`, how many sink-steps; `share`, `base`, `enrichment` with its
    95% interval `low`, `high` (bootstrap over prompts; NaN for one; of a class without a sink up to Wilson's bound
    of its share over the base); `sequences`; `prompts` with a base. The classes exclude each other, in the order
    of `TOKEN_CLASSES`; see `dlm_lens.sinks.token_classes`. In models without a mask token "mask" is "open",
    whatever these positions hold.

    Args:
        paths: from `trajectories`, with tokens.
        by: "all", "layer", "head" or "pattern" (a (layer, head) of one sequence, without intervals).
        classes: class of every token id, instead of these; masked positions are "mask" in any case.
        eos_token_ids: ids that end a text, besides the tokenizer's (`run.eos_token_ids`).

    Raises:
        ValueError: no tokens, or neither a tokenizer nor classes.
    """
    if paths.tokens is None:
        raise ValueError("these trajectories have no tokens; follow a Received that has them (received_over_steps)")
    if classes is None and paths.tokenizer is None:
        raise ValueError("there is no tokenizer to decode the tokens; give classes=, a class for every token id")
    tokens = paths.tokens.numpy()
    ids, inverse = np.unique(tokens, return_inverse=True)
    told = TokenClasses(paths.tokenizer, eos_token_ids=eos_token_ids) if classes is None else classes
    of_id = [told(int(i)) if callable(told) else told[int(i)] for i in ids]
    names = TOKEN_CLASSES if classes is None else tuple(dict.fromkeys(["mask", *sorted(set(of_id))]))
    labels = np.asarray([names.index(name) for name in of_id])[inverse.reshape(tokens.shape)]
    if paths.masked is not None:
        labels = np.where(paths.masked.numpy(), names.index("mask"), labels)
    member = np.stack([labels == number for number in range(len(names))])
    if holds_random_tokens(paths.tokens, paths.masked):
        names = tuple("open" if name == "mask" else name for name in names)
    return _enrichment(paths, _KeyClasses(names, member), by)


@checked_arguments(paths=FOLLOWED)
def position_enrichment(
    paths: Trajectories,
    by: By = "all",
    *,
    in_block: Bool[Tensor, "step batch position"] | None = None,
    answer: Bool[Tensor, "batch position"] | None = None,
) -> pd.DataFrame:
    """Enrichment of position classes among sinks: prompt, decoded answer positions ("written"), masked ones.

    "masked" positions are not decoded yet at the step, the future of 2510.15731, section 5.3; in models without a
    mask token they are called "open". With `in_block`, those of the row's block ("in the block") and of its later
    blocks ("after the block") are counted separately as well. Columns as in `token_enrichment`, the base again a
    random key of the same step and layer.

    Args:
        paths: from `trajectories`, with masks.
        by: as in `token_enrichment`.
        in_block: the positions of every row's block at each step, `run.in_block`.
        answer: the positions that were open when the run began, `run.answer`; None: those of the first step, which
            in a part of a run (`Recording.select(step=)`) leave out what was decided before. Where tokens move
            (DreamOn), the trajectories know the prompt's, and this is not read.

    Raises:
        ValueError: no masks, or blocks or an answer of another run.
    """
    if paths.masked is None:
        raise ValueError("these trajectories have no masks; follow a Received that has them (received_over_steps)")
    masked = paths.masked.numpy()
    position = np.arange(masked.shape[-1])
    learned = np.broadcast_to(position >= paths.canvas, masked.shape)
    prompt = np.broadcast_to(~_answer_of(paths, answer) & ~learned[0], masked.shape)
    word = "open" if holds_random_tokens(paths.tokens, paths.masked) else "masked"
    member = {"prompt": prompt, "written": ~masked & ~prompt & ~learned, word: masked}
    if in_block is not None:
        block = blocks_of_rows(paths, in_block)
        member["in the block"] = masked & block
        # Positions from the block's start on, without the block.
        member["after the block"] = masked & np.logical_or.accumulate(block, -1) & ~block & ~learned
    if paths.sinks:
        member["learned sink"] = learned
    return _enrichment(paths, _KeyClasses(tuple(member), np.stack(list(member.values()))), by)


def _answer_of(paths: Trajectories, answer: Bool[Tensor, "batch position"] | None) -> NDArray[np.bool_]:
    """The keys [batch, key] that were open when the run began; where tokens move, those at each step."""
    assert paths.masked is not None
    if paths.answer is not None:
        moved: NDArray[np.bool_] = (paths.answer | paths.masked).numpy()
        return moved
    first: NDArray[np.bool_] = paths.masked[0].numpy()
    if answer is None:
        return first
    if tuple(answer.shape) != (len(first), paths.canvas):
        raise ValueError(
            f"answer has shape {list(answer.shape)}, these trajectories {[len(first), paths.canvas]} (batch, "
            "position); give run.answer of their run"
        )
    return np.pad(answer.numpy(), ((0, 0), (0, paths.sinks)))


def blocks_of_rows(paths: Trajectories, in_block: Bool[Tensor, "step batch position"]) -> NDArray[np.bool_]:
    """`in_block` for the keys of trajectories, [step, batch, key]; learned sinks are in no block.

    Raises:
        ValueError: another shape.
    """
    steps, batch = len(paths.main), paths.main.shape[1]
    if tuple(in_block.shape) != (steps, batch, paths.canvas):
        raise ValueError(
            f"in_block has shape {list(in_block.shape)}, these trajectories {[steps, batch, paths.canvas]} (step, "
            "batch, position); give run.in_block of their run"
        )
    return np.pad(in_block.cpu().numpy(), ((0, 0), (0, 0), (0, paths.sinks)))


def _enrichment(paths: Trajectories, labels: _KeyClasses, by: By) -> pd.DataFrame:
    one_of(*GROUPS).check("by", by)
    seen, base = _observed(paths, labels), _expected(paths, labels)
    groups = [name for name in GROUPS[by] if name in paths.dims and name != "batch"]
    merged = tuple(axis + 1 for axis, name in enumerate(("layer", "head")) if name not in groups)
    seen, base = seen.sum(merged), base.sum(merged)
    total = seen_total(paths).sum(merged)
    sequences: list[tuple[dict[str, int], Floats, Floats, Floats, Any]] = (
        [
            ({"batch": number}, seen[row : row + 1], base[row : row + 1], total[row : row + 1], None)
            for row, number in enumerate(paths.row_numbers)
        ]
        if by == "pattern"
        else [({}, seen, base, total, paths.row_prompts)]
    )
    lines = [
        {**row, **where, **line}
        for row, counts, bases, totals, prompt in sequences
        for where, index in _group_indices(paths, groups, counts.shape[1:-1])
        for line in _lines(labels.names, counts[index], bases[index], totals[index], prompt)
    ]
    columns = [*(["batch"] if by == "pattern" else []), *groups, *COLUMNS]
    return pd.DataFrame(lines, columns=columns)


def _group_indices(
    paths: Trajectories, groups: list[str], shape: tuple[int, ...]
) -> list[tuple[dict[str, int], Any]]:
    """The (layer, head) of each group, and its index after the axis of sequences."""
    found = []
    for index in np.ndindex(*shape):
        where = in_model(dict(zip(groups, index, strict=True)), paths.layers, paths.heads)
        found.append((where, (slice(None), *index)))
    return found


def _lines(
    names: tuple[str, ...], seen: Floats, base: Floats, total: Floats, prompt: Any
) -> list[dict[str, object]]:
    ratio, low, high = ratio_by_prompt(seen, base, prompt, bounds=POSITIVE_BOUNDS)
    everything, prompts = max(total.sum(), 1.0), prompts_with_cases(base, prompt)
    # Of a class without a sink all draws are 0; its share is below Wilson's bound of its prompts, as in `within`.
    for place in np.flatnonzero((seen.sum(0) == 0) & np.isfinite(high)):
        high[place] = wilson_bounds(0, prompts[place])[1] * everything / base[:, place].sum()
    return [
        {
            "class": name,
            "sinks": int(seen[:, number].sum()),
            "share": seen[:, number].sum() / everything,
            "base": base[:, number].sum() / everything,
            "enrichment": ratio[number],
            "low": low[number],
            "high": high[number],
            "sequences": len(seen),
            "prompts": int(prompts[number]),
        }
        for number, name in enumerate(names)
        if base[:, number].sum() > 0
    ]


def sink_steps(paths: Trajectories) -> tuple[Ints, Ints, Ints]:
    """Step, pattern and position of every sink at every step of its lifetime."""
    lifetimes = paths.lives
    owner = np.repeat(np.arange(len(lifetimes)), lifetimes.steps)
    start = np.cumsum(lifetimes.steps) - lifetimes.steps
    step = np.arange(len(owner)) - start[owner] + lifetimes.first[owner]
    return step, lifetimes.pattern[owner], lifetimes.position[owner]


def seen_total(paths: Trajectories) -> Floats:
    """How many sink-steps every pattern has, [batch, layer, head]."""
    return paths.counts.sum(0).numpy().astype(float)


def _observed(paths: Trajectories, labels: _KeyClasses) -> Floats:
    """Sink-steps per [batch, layer, head, class]."""
    step, pattern, position = sink_steps(paths)
    shape = paths.static_share.shape
    row = np.unravel_index(pattern, shape)[0]
    size = paths.static_share.numel()
    return np.stack(
        [
            np.bincount(pattern, weights=member[step, row, position], minlength=size).reshape(shape)
            for member in labels.member
        ],
        -1,
    )


def _expected(paths: Trajectories, labels: _KeyClasses) -> Floats:
    """The same for a random key with a score in the layer, in place of every sink."""
    counts, scored = paths.counts.numpy().astype(float), paths.scored_by_layer.numpy()
    layers = [
        (labels.member & scored[:, :, layer]).sum(-1) / np.maximum(scored[:, :, layer].sum(-1), 1)
        for layer in range(scored.shape[2])
    ]
    share = np.broadcast_to(np.stack(layers, -1), (*np.shape(layers)[1:], counts.shape[2]))
    return np.einsum("tblh,ctbl->blhc", counts, share)
