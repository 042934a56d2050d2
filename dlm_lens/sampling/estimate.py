"""The Monte Carlo estimate of a likelihood from random masks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.corruption import Corruption
from dlm_lens.sampling.likelihood_result import LogLikelihood
from dlm_lens.sampling.pairs import Pair
from dlm_lens.sampling.scoring import Query, Scorer

MOST, FEWEST_GROUPS = 16, 4


def strata_of(samples: int, strata: int | None) -> int:
    """How many samples share one stratified draw.

    Raises:
        ValueError: the samples do not divide into groups of that size.
    """
    if strata is None:
        most = max(1, min(MOST, samples // FEWEST_GROUPS))
        return next(size for size in range(most, 0, -1) if samples % size == 0)
    if strata < 1 or samples % strata:
        raise ValueError(
            f"{samples} samples do not divide into groups of {strata} (strata, and batch_size with "
            "reference_quirks); choose samples as a multiple of it"
        )
    return strata


class _Samples(NamedTuple):
    """An item's samples: which of its different masks each is, and the rate that drew it."""

    different: Bool[Tensor, "mask position"]
    which: Int[Tensor, "sample"]
    rate: Float[Tensor, "sample"]


def monte_carlo(
    scorer: Scorer, pairs: Sequence[Pair], items: Iterable[int], corruption: Corruption, record: Mapping[str, Any]
) -> LogLikelihood:
    """Mean over the samples of the cross entropies of what is masked, divided by the masking rate.

    A mask that an item draws several times (all of them, if its answer is one token) is evaluated once.
    """
    shared = torch.Generator().manual_seed(record["seeds"][0]) if record["reference_quirks"] else None
    drawn: dict[int, _Samples] = {}

    def queries() -> Iterator[Query]:
        for item in items:
            generator = shared or torch.Generator().manual_seed(record["seeds"][item])
            drawn[item] = _draw(pairs[item], corruption, record, generator)
            sums[item] = torch.zeros(len(drawn[item].different), dtype=torch.float64)
            for number, mask in enumerate(drawn[item].different):
                if mask.any():
                    yield Query(item, pairs[item], mask, mask, number)

    sums: dict[int, Float[Tensor, "mask"]] = {}
    for query, loss in scorer.losses(queries()):
        sums[query.item][query.term] = loss.sum()
    losses = tuple(_per_sample(drawn[item], sums[item]) for item in range(len(pairs)))
    groups = torch.stack(losses).unflatten(-1, (-1, record["strata"])).mean(-1)
    spread = groups.std(-1) if groups.shape[1] > 1 else torch.full((len(pairs),), torch.nan, dtype=torch.float64)
    return LogLikelihood(
        -groups.mean(-1),
        spread / groups.shape[1] ** 0.5,
        losses,
        torch.tensor([len(pair.answer) for pair in pairs]),
        "mc",
        record,
    )


def _draw(pair: Pair, corruption: Corruption, record: Mapping[str, Any], generator: torch.Generator) -> _Samples:
    size = record["strata"]
    groups = [corruption.draw(pair, size, generator) for _ in range(record["samples"] // size)]
    different, which = torch.cat([group.masked for group in groups]).unique(dim=0, return_inverse=True)
    return _Samples(different, which, torch.cat([group.rate for group in groups]))


def _per_sample(samples: _Samples, sums: Float[Tensor, "mask"]) -> Float[Tensor, "sample"]:
    some = samples.different.any(-1)
    # A rate of 0 masks nothing, and nothing masked is no loss.
    return torch.where(some[samples.which], sums[samples.which] / samples.rate.double(), 0.0)
