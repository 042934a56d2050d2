"""Likelihoods of texts with random tokens: every position is scored, since none shows whether it is noise."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.scoring import Query, Scorer, assemble

ENTRIES = 2**22
"""Probabilities in float64 at a time, 32 MiB each of a few."""

Integrand = Callable[
    [Float[Tensor, "n d_vocab"], Int[Tensor, "n"], Int[Tensor, "n"], Float[Tensor, "n"]], Float[Tensor, "n"]
]
"""(ln x_theta, x_t, the text's tokens, the level of each) -> losses in nats (float64)."""


class NoisyTexts(NamedTuple):
    """A stratified group of noisy texts.

    Args:
        tokens: x_t of each sample.
        level: what the integrand is given of the noise (alpha, or the time); float64.
        sigma: what the network is given, if it is given the noise level.
    """

    tokens: Int[Tensor, "sample position"]
    level: Float[Tensor, "sample"]
    sigma: Float[Tensor, "sample"]


@runtime_checkable
class NoisyCorruption(Protocol):
    """A process of noise with random tokens, and the integrand of its bound on the likelihood.

    Attributes:
        scope: whether noise is on the "answer", or on "both" it and its prompt.
    """

    @property
    def scope(self) -> str:
        """Which part of a text is noisy and scored."""
        ...

    def times(self, samples: int, generator: torch.Generator) -> Float[Tensor, "sample"]:
        """Draw the times of one stratified group, always on the CPU so that devices agree."""
        ...

    def time_of(self, share: Float[Tensor, "*sample"]) -> Float[Tensor, "*sample"]:
        """The time at a share, in [0, 1), of the way from the least to the greatest."""
        ...

    def texts_at(
        self, pair: Pair, config: Any, times: Float[Tensor, "sample"], generator: torch.Generator
    ) -> NoisyTexts:
        """Draw a text with noise on the answer for each time, likewise."""
        ...

    def integrand(self, config: Any) -> Integrand:
        """The losses of tokens, for a model with this config."""
        ...


def drawn_texts(
    corruption: NoisyCorruption, pair: Pair, config: Any, samples: int, generator: torch.Generator
) -> NoisyTexts:
    """Draw one stratified group of noisy texts: the times, then the noise."""
    return corruption.texts_at(pair, config, corruption.times(samples, generator), generator)


@dataclass(frozen=True, eq=False)
class NoisyQuery(Query):
    """A text with random tokens.

    Args:
        noisy: x_t.
        level: of its noise, for the integrand.
    """

    noisy: Int[Tensor, "position"] | None = None
    level: float = 1.0

    def canvas(self, mask: int) -> Int[Tensor, "position"]:
        """What the network sees."""
        assert self.noisy is not None
        return self.noisy


@dataclass(frozen=True)
class NoisyScorer(Scorer):
    """Evaluates noisy texts: the loss of a token needs its whole distribution.

    Args:
        integrand: of the model's process of noise.
    """

    integrand: Integrand | None = None

    def losses(self, queries: Iterable[Query]) -> Iterator[tuple[Query, Float[Tensor, "scored"]]]:
        """Every query with the losses of its scored tokens (float64), batch by batch."""
        assert self.integrand is not None
        for rows in self.batches(queries):
            batch = assemble(self.model, rows)
            counts = [int(query.scored.sum()) for query in rows]
            levels = [query.level for query in rows if isinstance(query, NoisyQuery)]
            level = torch.tensor(levels, dtype=torch.float64).repeat_interleave(torch.tensor(counts))
            known, found = (batch.canvas[batch.scored], batch.tokens[batch.scored], level), list[Tensor]()
            for first, logits in self.logits(batch, rows):
                given = (logits, *(part[first : first + len(logits)].to(logits.device) for part in known))
                parts = zip(*(part.split(max(1, ENTRIES // logits.shape[-1])) for part in given), strict=True)
                found += [self.integrand(part.float().log_softmax(-1), *others) for part, *others in parts]
            yield from zip(rows, torch.cat(found).cpu().split(counts), strict=True)


def noisy_losses(
    scorer: NoisyScorer,
    pairs: Sequence[Pair],
    items: Iterable[int],
    corruption: NoisyCorruption,
    record: Mapping[str, Any],
) -> tuple[Float[Tensor, "sample"], ...]:
    """The loss of every sample of every item: the sum over its scored tokens."""
    shared = torch.Generator().manual_seed(record["seeds"][0]) if record["reference_quirks"] else None
    found = [torch.zeros(record["samples"], dtype=torch.float64) for _ in pairs]

    def queries() -> Iterator[NoisyQuery]:
        """Every noisy text of every item, drawn when its turn comes."""
        for item in items:
            pair = pairs[item]
            if corruption.scope == "both":  # no part of the text is clean
                pair = Pair(pair.tokens[:0], pair.tokens)
            generator = shared or torch.Generator().manual_seed(record["seeds"][item])
            for group in range(record["samples"] // record["strata"]):
                texts = drawn_texts(corruption, pair, scorer.model.config, record["strata"], generator)
                lines = zip(texts.tokens, texts.level.tolist(), texts.sigma.tolist(), strict=True)
                for number, (row, level, sigma) in enumerate(lines):
                    term = group * record["strata"] + number
                    known = item, pair, row != pair.tokens, pair.in_answer, term, sigma
                    yield NoisyQuery(*known, noisy=row, level=level)

    for query, loss in scorer.losses(queries()):
        found[query.item][query.term] = loss.sum()
    return tuple(found)
