"""`sink_consistency`: whether the sinks of a head are the same in every sequence."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlm_lens.arguments import checked_arguments
from dlm_lens.sinks.lifetimes import KINDS
from dlm_lens.sinks.sink_trajectories import FOLLOWED, Trajectories


@checked_arguments(paths=FOLLOWED)
def sink_consistency(paths: Trajectories) -> pd.DataFrame:
    """Agreement of the sinks of one (layer, head) across sequences (2510.15731: "consistency across sequences").

    All columns are probabilities over random pairs of different sequences. `same_kind`: both patterns are of one
    kind (static, moving, unsettled, none). `same_position`: at a random step at which both have a sink, their
    largest sinks are at the same canvas position (prompts are padded on the left, so that answers start at the
    same position). `same_token`: they are on the same token id; `chance_token` is the same for two random keys of
    these sequences and steps, if tokens are known. `pairs` is how many pairs of sequences, `n` how many (pair,
    step) had a sink in both.

    Raises:
        ValueError: fewer than two sequences.
    """
    sequences = paths.main.shape[1]
    if sequences < 2:
        raise ValueError(f"{sequences} sequence; consistency needs at least two in the batch")
    kinds = np.stack([paths.kinds == kind for kind in KINDS], 0).sum(1)
    main = paths.main.numpy()
    there = main >= 0
    n = _pairs(there.sum(1)).sum(0)
    columns: dict[str, object] = dict(_places(paths))
    columns["same_kind"] = np.ravel(_pairs(kinds).sum(0) / _pairs(np.asarray(sequences)))
    with np.errstate(invalid="ignore"):
        columns["same_position"] = np.ravel(_equal_pairs(main, there) / n)
        if paths.tokens is not None:
            tokens = paths.tokens.numpy()
            step, row = np.ogrid[: main.shape[0], : main.shape[1]]
            at = tokens[step[..., None, None], row[..., None, None], np.where(there, main, 0)]
            columns["same_token"] = np.ravel(_equal_pairs(at, there) / n)
            weights = _pairs(there.sum(1))
            columns["chance_token"] = np.ravel((weights * _chance(paths, tokens)[..., None]).sum(0) / n)
    columns |= {"pairs": int(_pairs(np.asarray(sequences))), "n": np.ravel(n).astype(int)}
    return pd.DataFrame(columns)


def _pairs(count: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(count * (count - 1) / 2, dtype=float)


def _equal_pairs(values: NDArray[np.int64], there: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Pairs of rows with equal values, summed over steps: [layer, head]. Values are [step, batch, layer, head]."""
    batch = values.shape[1]
    total = np.zeros(values.shape[2:])
    for row in range(batch - 1):
        same = (values[:, row : row + 1] == values[:, row + 1 :]) & there[:, row : row + 1] & there[:, row + 1 :]
        total += same.sum((0, 1))
    return total


def _chance(paths: Trajectories, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Probability that random keys with a score, of two random sequences with scores, hold one token.

    [step, layer], or [step, 1] where all layers have the same keys.
    """
    layers = paths.scored_by_layer.numpy()
    return np.stack([_chance_in(layers[:, :, layer], tokens) for layer in range(layers.shape[2])], -1)


def _chance_in(scored: NDArray[np.bool_], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """`_chance` of keys [step, batch, key]: [step]."""
    steps, batch, _ = scored.shape
    chance = np.zeros(steps)
    pairs = 2 * _pairs(scored.any(-1).sum(-1))  # a sequence that is over has no scores and is in no pair
    for step in range(steps):
        ids, inverse = np.unique(tokens[step], return_inverse=True)
        row = np.broadcast_to(np.arange(batch)[:, None], tokens[step].shape)
        counts = np.zeros((batch, len(ids)))
        np.add.at(counts, (row, inverse.reshape(tokens[step].shape)), scored[step].astype(float))
        share = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
        # Sum over pairs of sequences of the inner product of their shares
        both = (share.sum(0) ** 2).sum() - (share**2).sum()
        chance[step] = both / max(pairs[step], 1)
    return chance


def _places(paths: Trajectories) -> dict[str, NDArray[np.int64]]:
    per_row = paths.static_share[0].numel()
    return {name: index for name, index in paths.place(np.arange(per_row)).items() if name != "batch"}
