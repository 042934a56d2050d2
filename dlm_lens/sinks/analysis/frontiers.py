"""`frontier_alignment`: distance of the largest sink to the unmasking frontier and to block borders."""

import numpy as np
import pandas as pd
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from dlm_lens.arguments import checked_arguments, one_of
from dlm_lens.sampling.denoising_run import holds_random_tokens
from dlm_lens.sinks.analysis.enrichment import blocks_of_rows
from dlm_lens.sinks.received import in_model
from dlm_lens.sinks.sink_trajectories import FOLLOWED, GROUPS, By, Trajectories
from dlm_lens.statistics import POSITIVE_BOUNDS, Floats, ratio_by_prompt

POINTS = ("leftmost mask", "rightmost mask", "block start", "block end")
"""References that are one position at every step; the others are the nearest of several."""


@checked_arguments(paths=FOLLOWED)
def frontier_alignment(
    paths: Trajectories,
    by: By = "all",
    *,
    in_block: Bool[Tensor, "step batch position"] | None = None,
    unmasked: Bool[Tensor, "step batch position"] | None = None,
) -> pd.DataFrame:
    """Distance of the largest sink to the unmasking frontier and to block borders, against a random key.

    2510.15731, section 4.2: Dream's sinks start at the rightmost masked token and follow the frontier to the left;
    LLaDA's move right with the blocks. References at step t, from the masks of that step: the "leftmost mask" and
    the "rightmost mask"; the "frontier", the nearest position at a border of masked and decoded
    content; "written now", the nearest position decoded at the step; with `in_block`, "block start" and "block
    end" of the row, and the nearest "block border" of both. Masks after the last key that has a score at the step
    are not there yet (blocks to come, where the canvas grows) and are no references, unless no mask has a score
    (AR decoding).

    Columns: layer, head (by `by`); `reference`; `distance` in positions, mean over steps and patterns; `chance`,
    the same for a random key with a score at the step in the layer; `ratio` = distance / chance (1: unrelated,
    below 1: closer) with its 95% interval `low`, `high` (bootstrap over prompts; NaN for one); `within_1`, part of
    the steps at most one position away, and `chance_within_1`; `correlation` of sink position and reference over
    steps (Pearson, mean over the patterns where both vary; references that are one position only), and `n` steps
    of patterns. The steps after the last one that decodes a position of the row (MMaDA's `eot_token` ends rows
    early) do not count.

    Args:
        paths: from `trajectories`, with masks.
        by: "all", "layer" or "head".
        in_block: the positions of every row's block at each step, `run.in_block`.
        unmasked: the positions that each step decodes, `run.unmasked`; None: those that are masked at a step and
            not at the next one, which is wrong for a part of a run. For `part = recording.select(step=)` give
            `part.run.unmasked`. Where tokens move (DreamOn, LLaDA2.2), the trajectories know the masks that a step
            decides, and this is not read; room for masks is no reference.

    Raises:
        ValueError: no masks, blocks or decoded positions of another run, or an unknown grouping.
    """
    if paths.masked is None:
        raise ValueError("these trajectories have no masks; follow a Received that has them (received_over_steps)")
    one_of("all", "layer", "head").check("by", by)
    opened = paths.masked if paths.answer is None else paths.masked & paths.answer
    masked = opened.numpy()[..., : paths.canvas]
    scored = paths.scored.numpy()[..., : paths.canvas]
    unmasked = unmasked if paths.decided is None else None
    if paths.decided is None:
        decided = _decided(paths, masked) if unmasked is None else _given(paths, unmasked)
    else:
        decided = paths.decided.numpy()[..., : paths.canvas]
    block = None if in_block is None else blocks_of_rows(paths, in_block)[..., : paths.canvas]
    groups = [name for name in GROUPS[by] if name in paths.dims]
    # A row that ended early (`eot_token`) keeps masks that are never decoded.
    running = np.flip(np.logical_or.accumulate(np.flip(decided.any(-1), 0), 0), 0)[..., None]
    if unmasked is not None:
        # The steps of a part that decode a position may all be earlier ones.
        running = running | _unwritten(paths, masked).any(-1, keepdims=True)
    references = _references(_begun(masked, scored), scored, decided, block)
    by_layer = paths.scored_by_layer.numpy()[..., : paths.canvas]
    tables = [_against(paths, by_layer, name, where & running, groups) for name, where in references.items()]
    return pd.concat(tables, ignore_index=True)


def _begun(masked: NDArray[np.bool_], scored: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The masks up to the last key with a score; all where no mask of the row has one at the step."""
    until = np.flip(np.logical_or.accumulate(np.flip(scored, -1), -1), -1)
    return masked & (until | ~(masked & scored).any(-1, keepdims=True))


def _references(
    masked: NDArray[np.bool_],
    scored: NDArray[np.bool_],
    decided: NDArray[np.bool_],
    block: NDArray[np.bool_] | None,
) -> dict[str, NDArray[np.bool_]]:
    """Name -> the positions of the reference, [step, batch, key]."""
    position = np.arange(masked.shape[-1])
    some = masked.any(-1, keepdims=True)
    left = (position == masked.argmax(-1)[..., None]) & some
    right = (position == masked.shape[-1] - 1 - masked[..., ::-1].argmax(-1)[..., None]) & some
    meets = np.zeros_like(masked)
    # Padding and keys without a score are not decoded content.
    content = scored | masked
    meet = (masked[..., 1:] != masked[..., :-1]) & content[..., 1:] & content[..., :-1]
    meets[..., 1:] |= meet
    meets[..., :-1] |= meet
    found = {"leftmost mask": left, "rightmost mask": right, "frontier": meets, "written now": decided}
    if block is not None:
        edge = np.diff(block, axis=-1, prepend=False, append=False)
        first, last = block & edge[..., :-1], block & edge[..., 1:]
        found |= {"block start": first, "block end": last, "block border": first | last}
    return found


def _decided(paths: Trajectories, masked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Positions decoded at each step; at the last step all masks except those that remain in the final text.

    Random tokens of a model of uniform noise may be the final ones already: there the last step decodes all that
    are open.
    """
    written = np.zeros_like(masked)
    written[:-1] = masked[:-1] & ~masked[1:]
    written[-1] = masked[-1]
    if paths.tokens is not None and paths.final_tokens is not None:
        left = (paths.tokens[-1] == paths.final_tokens).numpy()[..., : paths.canvas]
        written[-1] &= ~left | holds_random_tokens(paths.tokens, paths.masked)
    return written


def _given(paths: Trajectories, unmasked: Bool[Tensor, "step batch position"]) -> NDArray[np.bool_]:
    """The positions decoded at each step as the run has them.

    Raises:
        ValueError: another shape.
    """
    shape = [len(paths.main), paths.main.shape[1], paths.canvas]
    if list(unmasked.shape) != shape:
        raise ValueError(
            f"unmasked has shape {list(unmasked.shape)}, these trajectories {shape} (step, batch, position); give "
            "run.unmasked of their run, for a part of a recording part.run.unmasked"
        )
    return unmasked.cpu().numpy()


def _unwritten(paths: Trajectories, masked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Masks that the run decodes at the step or later; none where the tokens do not tell."""
    if paths.tokens is None or paths.final_tokens is None or holds_random_tokens(paths.tokens, paths.masked):
        return np.zeros_like(masked)
    return masked & (paths.tokens != paths.final_tokens).numpy()[..., : paths.canvas]


def _against(
    paths: Trajectories, scored: NDArray[np.bool_], name: str, reference: NDArray[np.bool_], groups: list[str]
) -> pd.DataFrame:
    main = paths.main.numpy()
    distance = _nearest(reference)
    reachable = np.asarray(np.isfinite(distance).all(-1))[..., None, None]
    known = reachable & (main >= 0) & (main < paths.canvas)
    at = np.where(known, main, 0)
    steps, rows = np.ogrid[: main.shape[0], : main.shape[1]]
    found = np.where(known, distance[steps[..., None, None], rows[..., None, None], at], 0)
    count = np.maximum(scored.sum(-1), 1)
    finite = np.where(np.isfinite(distance), distance, 0)[:, :, None]
    chance = ((finite * scored).sum(-1) / count)[..., None] * known
    near = ((finite <= 1) & scored).sum(-1) / count
    sums = {
        "distance": found.sum(0),
        "chance": chance.sum(0),
        "within_1": ((found <= 1) & known).sum(0),
        "chance_within_1": (near[..., None] * known).sum(0),
        "n": known.sum(0),
    }
    merged = tuple(axis + 1 for axis, axis_name in enumerate(("layer", "head")) if axis_name not in groups)
    totals = {key: value.sum(merged).astype(float) for key, value in sums.items()}
    ratio, low, high = ratio_by_prompt(
        totals["distance"], totals["chance"], paths.row_prompts, bounds=POSITIVE_BOUNDS
    )
    n = totals["n"].sum(0)
    columns: dict[str, object] = _columns(paths, groups, n.shape) | {"reference": name}
    with np.errstate(invalid="ignore", divide="ignore"):
        for key in ("distance", "chance"):
            columns[key] = np.ravel(totals[key].sum(0) / n)
        columns |= {"ratio": np.ravel(ratio), "low": np.ravel(low), "high": np.ravel(high)}
        for key in ("within_1", "chance_within_1"):
            columns[key] = np.ravel(totals[key].sum(0) / n)
    correlation = _correlation(main, reference, known) if name in POINTS else np.full(main.shape[1:], np.nan)
    columns["correlation"] = np.ravel(_nanmean(correlation, (0, *merged)))
    columns["n"] = np.ravel(n).astype(int)
    return pd.DataFrame(columns)


def _columns(paths: Trajectories, groups: list[str], shape: tuple[int, ...]) -> dict[str, object]:
    at = dict(zip(groups, map(np.ravel, np.indices(shape)), strict=True))
    return in_model(at, paths.layers, paths.heads)


def _nearest(reference: NDArray[np.bool_]) -> Floats:
    """Distance of every position to the nearest reference position, inf where there is none."""
    length = reference.shape[-1]
    far = np.where(reference, 0.0, np.inf)
    right, left = far.copy(), far.copy()
    for place in range(1, length):
        left[..., place] = np.minimum(far[..., place], left[..., place - 1] + 1)
        back = length - 1 - place
        right[..., back] = np.minimum(far[..., back], right[..., back + 1] + 1)
    return np.minimum(right, left)


def _correlation(main: NDArray[np.int64], reference: NDArray[np.bool_], known: NDArray[np.bool_]) -> Floats:
    """Pearson correlation over the steps of each pattern; NaN where either side is constant."""
    place = np.broadcast_to(reference.argmax(-1)[..., None, None], main.shape)
    count = np.maximum(known.sum(0), 1)
    sink, other = (np.where(known, v - np.where(known, v, 0).sum(0) / count, 0) for v in (main, place))
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.sqrt((sink**2).sum(0) * (other**2).sum(0))
        return np.where(scale > 1e-9, (sink * other).sum(0) / scale, np.nan)


def _nanmean(values: Floats, axes: tuple[int, ...]) -> Floats:
    there = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(there, values, 0).sum(axes) / there.sum(axes))
