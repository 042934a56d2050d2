"""The likelihood of models of uniform noise: texts with random tokens, and the NELBO of continuous time."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import NOISE_EPS
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.corruption import LogLinearCorruption
from dlm_lens.sampling.likelihood.noisy_texts import Integrand, NoisyTexts


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
