"""Bounds on the likelihood of models whose noise is random tokens, or masks and random tokens: the NELBOs.

`nelbo` is that of uniform noise in continuous time; `mixed_nelbo` that of mixed noise (GIDD, 2503.04482).
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import NOISE_EPS
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.corruption import LogLinearCorruption
from dlm_lens.sampling.likelihood.noisy_texts import Integrand, NoisyTexts
from dlm_lens.sampling.samplers.mixed_noise import Mixture, noise_mask_id


def mixed_nelbo(
    logs: Float[Tensor, "n d_vocab"],
    seen: Int[Tensor, "n"],
    tokens: Int[Tensor, "n"],
    now: Mixture,
    rates: Mixture,
    mask_id: int,
) -> Float[Tensor, "n"]:
    """The integrand of the NELBO of mixed noise, of every token in nats (2503.04482; dvruette/gidd, loss.py).

    With q(j) = alpha [j = x] + b(j) for the text x, p(j) = alpha x_theta,j + b(j) for the prediction, b(j) what the
    noise writes, z = x_t and r = q(z) / p(z):

        (b'(z) - alpha' / alpha b(z)) / q(z) (sum_j q(j) ln(q(j) / p(j)) + r - ln r - 1),

    with derivatives in time. For noise of masks alone it is MDLM's, -alpha' / (1 - alpha) times -ln x_theta,x at a
    [MASK] and 0 elsewhere. It is 0 where the prediction is the text.

    Args:
        logs: ln x_theta, -inf for [MASK].
        seen: x_t.
        tokens: of the text.
        now: the noise of each, [n] in float64.
        rates: its derivatives in time, likewise.
        mask_id: of [MASK].
    """
    size = logs.shape[-1]
    alpha, each = now.alpha, now.random / (size - 1)
    written, moved = now.noise_at(tokens, mask_id, size), now.noise_at(seen, mask_id, size)
    predicted = alpha[:, None] * logs.double().exp() + each[:, None]
    # Of [MASK], apart: in training a column of zeros would have no derivative.
    predicted[:, mask_id] = 1.0
    at_mask = alpha * logs[:, mask_id].double().exp() + now.masked
    at_token, at_seen = (
        torch.where(ids == mask_id, at_mask, predicted.gather(-1, ids[:, None])[:, 0]) for ids in (tokens, seen)
    )
    own = alpha + written
    right = torch.where(seen == tokens, own, moved)
    # The sum as if no token were the text's, and the difference that it makes.
    noise = torch.xlogy(each[:, None], predicted)
    noise[:, mask_id] = torch.xlogy(now.masked, torch.where(now.masked > 0, at_mask, 1.0))
    total = (size - 1) * torch.xlogy(each, each) + torch.xlogy(now.masked, now.masked) - noise.sum(-1)
    total = total + own * (own / at_token).log() - (torch.xlogy(written, written) - torch.xlogy(written, at_token))
    ratio = right / at_seen
    weight = (rates.noise_at(seen, mask_id, size) - rates.alpha / alpha * moved) / right
    # Without random tokens a token of the text has no weight, whatever the network thinks of it.
    return (weight * (total + ratio - ratio.log() - 1)).masked_fill(weight == 0, 0.0)


@dataclass(frozen=True)
class MixedCorruption:
    """GIDD's: every position is noise by itself, at a random time t, and every one is scored.

    Times of a group of b are t_i = (1 - 2 eps) (u_i + i) / b + eps, with a number u_i for each: uniform, as in the
    authors' trainings. Their evaluations take equally spaced ones. A position holds the text's token, [MASK], or
    one of the other V - 1 ids.

    Args:
        eps: the least time, and 1 minus the greatest.
        scope: put noise on the "answer" and score it, or "both" it and its prompt.

    Raises:
        ValueError: a value is out of its range.
    """

    eps: float = 1e-4
    scope: Literal["answer", "both"] = "answer"

    def __post_init__(self) -> None:
        if not 0 < self.eps < 0.5:
            raise ValueError(f"eps is {self.eps}; it must be between 0 and 0.5")
        if self.scope not in ("answer", "both"):
            raise ValueError(f"scope is {self.scope!r}; it must be 'answer' or 'both'")

    def levels(self, config: Any, times: Float[Tensor, "n"]) -> tuple[Mixture, Mixture]:
        """The noise of a model with this config at these times (float64), and its derivatives in time."""
        raise NotImplementedError

    def times(self, samples: int, generator: torch.Generator) -> Float[Tensor, "sample"]:
        """The times of one group."""
        start = torch.rand(samples, generator=generator, dtype=torch.float64)
        return self.time_of((start + torch.arange(samples)) / samples)

    def time_of(self, share: Float[Tensor, "*sample"]) -> Float[Tensor, "*sample"]:
        """The time at a share of the way from the least one to the greatest."""
        return (1 - 2 * self.eps) * share + self.eps

    def texts_at(
        self, pair: Pair, config: Any, times: Float[Tensor, "sample"], generator: torch.Generator
    ) -> NoisyTexts:
        """A number and a random token for each position of the whole text."""
        alpha, masked, _ = (share[:, None] for share in self.levels(config, times)[0])
        shape, mask = (len(times), len(pair.tokens)), noise_mask_id(config)
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
        random = torch.randint(int(config.vocab_size) - 1, shape, generator=generator)
        noise = torch.where(drawn < alpha + masked, mask, random + (random >= mask))
        kept = (drawn < alpha) | ~pair.in_answer
        return NoisyTexts(torch.where(kept, pair.tokens, noise), times, times)

    def integrand(self, config: Any) -> Integrand:
        """`mixed_nelbo` at a time t; [MASK] has no probability."""
        mask = noise_mask_id(config)

        def of_times(
            logs: Float[Tensor, "n d_vocab"],
            seen: Int[Tensor, "n"],
            tokens: Int[Tensor, "n"],
            times: Float[Tensor, "n"],
        ) -> Float[Tensor, "n"]:
            """The losses of tokens at these times."""
            logs = logs.index_fill(-1, torch.tensor([mask], device=logs.device), -torch.inf).log_softmax(-1)
            return mixed_nelbo(logs, seen, tokens, *self.levels(config, times), mask)

        return of_times


@dataclass(frozen=True)
class UniformCorruption(LogLinearCorruption):
    """Duo's (s-sahoo/duo, trainer_base.py): the positions of `LogLinearCorruption` get random tokens.

    A token is drawn uniformly from the vocabulary, so that it is the text's own with probability 1 / V. Every
    position is scored, noise or not, since the network is not told which is which (`nelbo`).
    """

    def texts_at(
        self, pair: Pair, config: Any, times: Float[Tensor, "sample"], generator: torch.Generator
    ) -> NoisyTexts:
        """Noisy texts, whose level is alpha = 1 - (1 - 1e-3) t."""
        drawn = self.draw_at(pair, times, generator)
        random = torch.randint(int(config.vocab_size), drawn.masked.shape, generator=generator)
        alpha = 1 - (1 - NOISE_EPS) * times.double()
        return NoisyTexts(torch.where(drawn.masked, random, pair.tokens), alpha, -alpha.log())

    def integrand(self, config: Any) -> Integrand:
        """`nelbo`."""
        return nelbo


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
