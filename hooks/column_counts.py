"""What a hook judges columns by: scores of what keys receive, at the level and on the scale of its detector."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.attention import MIN_VIEWERS, ColumnStats
from dlm_lens.sinks import Level, Quantity


def scores_of(
    given: Sequence[ColumnStats], per: Level, quantity: Quantity, relative: bool
) -> Float[Tensor, "batch #head key"]:
    """Scores of the keys from the statistics of one layer, or of all layers for per="model".

    The arithmetic of `Received`: relative to uniform r_j / e_j, raw r_j, shares r_j / n of n counted queries, or
    mean attention r_j / n_j of n_j viewers; above heads the mean of r_j over the mean of e_j. NaN where fewer than
    MIN_VIEWERS counted queries see the key in any of the patterns.
    """
    sums, expected, viewers = (
        _merged([getattr(columns, name) for columns in given], per) for name in ("sums", "expected", "viewers")
    )
    counted = given[0].counted[:, None, None].clamp(min=1)
    if quantity == "share":
        scores = sums / counted
    elif quantity == "mean attention":
        scores = sums / viewers.clamp(min=1)
    else:
        scores = sums / expected if relative else sums
    return scores.masked_fill(_undefined([columns.viewers for columns in given], per), torch.nan)


def received_by(given: Sequence[ColumnStats], per: Level, keys: int) -> Float[Tensor, "batch #head keys"]:
    """Column sums r_j at a level, on a canvas of `keys` positions; 0 for keys that were not there yet."""
    sums = _merged([columns.sums for columns in given], per)
    return torch.nn.functional.pad(sums, (0, keys - sums.shape[-1]))


def _merged(values: Sequence[Float[Tensor, "batch #head key"]], per: Level) -> Float[Tensor, "batch #head key"]:
    """The mean over heads (and layers) that the level asks for."""
    if per == "head":
        return values[0].float()
    device = values[0].device
    return torch.stack([value.float().to(device).mean(1, keepdim=True) for value in values]).mean(0)


def _undefined(viewers: Sequence[Float[Tensor, "batch #head key"]], per: Level) -> Bool[Tensor, "batch #head key"]:
    few = [value < MIN_VIEWERS for value in viewers]
    if per == "head":
        return few[0]
    device = few[0].device
    return torch.stack([value.to(device).any(1, keepdim=True) for value in few]).any(0)


def grown(found: Bool[Tensor, "batch #head key"], keys: int) -> Bool[Tensor, "batch #head keys"]:
    """What was found on a shorter canvas, on one of `keys` positions: an AR canvas grows at its end."""
    return (
        found
        if found.shape[-1] == keys
        else torch.nn.functional.pad(found.byte(), (0, keys - found.shape[-1])).bool()
    )
