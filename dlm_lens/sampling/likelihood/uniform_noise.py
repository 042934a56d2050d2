"""The likelihood of models of uniform noise: texts with random tokens, and the NELBO of continuous time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import NOISE_EPS
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.corruption import LogLinearCorruption
from dlm_lens.sampling.likelihood.scoring import Query, Scorer, assemble

ENTRIES = 2**22
"""Probabilities in float64 at a time, 32 MiB each of a few."""


@dataclass(frozen=True)
class UniformCorruption(LogLinearCorruption):
    """Duo's (s-sahoo/duo, trainer_base.py): the positions of `LogLinearCorruption` get random tokens.

    A token is drawn uniformly from the vocabulary, so that it is the text's own with probability 1 / V. Every
    position is scored, noise or not, since the network is not told which is which (`nelbo`).
    """

    def canvases(
        self, pair: Pair, size: int, samples: int, generator: torch.Generator
    ) -> tuple[Int[Tensor, "sample position"], Float[Tensor, "sample"]]:
        """Draw one stratified group of noisy texts, and their times."""
        drawn = self.draw(pair, samples, generator)
        random = torch.randint(size, drawn.masked.shape, generator=generator)
        return torch.where(drawn.masked, random, pair.tokens), drawn.rate

    def scored(self, pair: Pair) -> Bool[Tensor, "position"]:
        """The positions whose losses are summed."""
        return pair.in_answer if self.scope == "answer" else torch.ones_like(pair.in_answer)


def nelbo(
    logs: Float[Tensor, "n d_vocab"],
    seen: Int[Tensor, "n"],
    tokens: Int[Tensor, "n"],
    alpha: Float[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """The integrand of the NELBO of uniform noise in continuous time, of every token in nats (float64).

    With V tokens, y = V alpha x + 1 - alpha for the text x (one-hot) and for the prediction x_theta, i = x_t and
    w_j = y_j / y_i (2506.10892; 2412.10193, equation 18):

        -alpha' / (V alpha) [V / y_theta,i - V / y_i + sum_j w_j ln(w_j y_theta,i / y_theta,j)],

    where alpha' = -(1 - 1e-3) in the log-linear schedule, and w ln w = 0 for w = 0. It is 0 where the prediction is
    the text.

    Args:
        logs: ln x_theta.
        seen: x_t.
        tokens: of the text.
        alpha: the share of the text's tokens; 1 only where x_t is the text.
    """
    size, a = logs.shape[-1], alpha.double()
    predicted = size * a[:, None] * logs.double().exp() + 1 - a[:, None]
    own, right = predicted.gather(-1, seen[:, None])[:, 0], predicted.gather(-1, tokens[:, None])[:, 0]
    here = torch.where(seen == tokens, size * a + 1 - a, 1 - a)
    others, text = (1 - a) / here, (size * a + 1 - a) / here  # w_j of the other tokens, and of the text's
    # The sum as if every token were another one, and the difference that the text's makes.
    total = size * torch.xlogy(others, others * own) - torch.xlogy(others[:, None], predicted).sum(-1)
    total = total + text * (text * own / right).log() - torch.xlogy(others, others * own / right)
    return (1 - NOISE_EPS) / (size * a) * (size / own - size / here + total)


@dataclass(frozen=True, eq=False)
class NoisyQuery(Query):
    """A text with random tokens.

    Args:
        noisy: x_t.
        alpha: the share of tokens that are the text's.
    """

    noisy: Int[Tensor, "position"] | None = None
    alpha: float = 1.0

    def canvas(self, mask: int) -> Int[Tensor, "position"]:
        """What the network sees."""
        assert self.noisy is not None
        return self.noisy


@dataclass(frozen=True)
class UniformScorer(Scorer):
    """Evaluates noisy texts: the loss of a token needs its whole distribution."""

    def losses(self, queries: Iterable[Query]) -> Iterator[tuple[Query, Float[Tensor, "scored"]]]:
        """Every query with the losses of its scored tokens (float64), batch by batch."""
        for rows in self.batches(queries):
            batch = assemble(self.model, rows)
            counts = [int(query.scored.sum()) for query in rows]
            levels = [query.alpha for query in rows if isinstance(query, NoisyQuery)]
            alpha = torch.tensor(levels, dtype=torch.float64).repeat_interleave(torch.tensor(counts))
            known, found = (batch.canvas[batch.scored], batch.tokens[batch.scored], alpha), list[Tensor]()
            for first, logits in self.logits(batch, rows):
                given = (logits, *(part[first : first + len(logits)].to(logits.device) for part in known))
                parts = zip(*(part.split(max(1, ENTRIES // logits.shape[-1])) for part in given), strict=True)
                found += [nelbo(part.float().log_softmax(-1), *others) for part, *others in parts]
            yield from zip(rows, torch.cat(found).cpu().split(counts), strict=True)


def uniform_losses(
    scorer: UniformScorer,
    pairs: Sequence[Pair],
    items: Iterable[int],
    corruption: UniformCorruption,
    record: Mapping[str, Any],
) -> tuple[Float[Tensor, "sample"], ...]:
    """The loss of every sample of every item: the sum over its scored tokens."""
    shared = torch.Generator().manual_seed(record["seeds"][0]) if record["reference_quirks"] else None
    found = [torch.zeros(record["samples"], dtype=torch.float64) for _ in pairs]

    def queries() -> Iterator[NoisyQuery]:
        """Every noisy text of every item, drawn when its turn comes."""
        for item in items:
            pair, size = pairs[item], int(scorer.model.config.vocab_size)
            generator = shared or torch.Generator().manual_seed(record["seeds"][item])
            scored = corruption.scored(pair)
            for group in range(record["samples"] // record["strata"]):
                noisy, times = corruption.canvases(pair, size, record["strata"], generator)
                for number, (row, time) in enumerate(zip(noisy, times.double().tolist(), strict=True)):
                    alpha = 1 - (1 - NOISE_EPS) * time
                    sigma = -float(torch.tensor(alpha, dtype=torch.float64).log())
                    term = group * record["strata"] + number
                    yield NoisyQuery(item, pair, row != pair.tokens, scored, term, sigma, noisy=row, alpha=alpha)

    for query, loss in scorer.losses(queries()):
        found[query.item][query.term] = loss.sum()
    return tuple(found)
