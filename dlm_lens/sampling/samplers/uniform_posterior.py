"""One step of uniform noise: a token from q(x_s | x_t, x_theta), the posterior between two noise levels."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.sampling.denoising_run import Proposal
from dlm_lens.sampling.network import by_rows, most_likely
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.mdlm import exponential


class Levels(NamedTuple):
    """A step's noise: from t to s, alpha is the share of the tokens that are the text's.

    Args:
        sigma: what the network is given.
        alpha_t: alpha(t) = 1 - (1 - 1e-3) t.
        alpha_s: alpha(s); 1 where the noise is removed.
        drawn: whether tokens are drawn, or the most likely ones taken.
    """

    sigma: float
    alpha_t: Float[Tensor, ""]
    alpha_s: Float[Tensor, ""]
    drawn: bool = True

    @property
    def removed(self) -> "Levels":
        """The same from t to 0."""
        return self._replace(alpha_s=torch.ones_like(self.alpha_t))


def posterior(
    likely: Float[Tensor, "n d_vocab"], seen: Int[Tensor, "n"], levels: Levels
) -> Float[Tensor, "n d_vocab"]:
    """Weights of q(x_s | x_t, x_theta) of uniform noise (2506.10892; s-sahoo/duo, algo.py).

    With x = x_theta, V tokens and a = alpha_t / alpha_s, Bayes' rule from the prior alpha_s x_j + (1 - alpha_s) / V
    and the likelihood (1 - a) / V + a [j = x_t] gives, up to a factor,

        w_j = (alpha_s - alpha_t) x_j + (1 - a) (1 - alpha_s) / V + [j = x_t] (alpha_t V x_j + a - alpha_t).

    X is what the other tokens tell of this one; what x_t itself tells is the likelihood. The weights sum to
    alpha_t V x_i + 1 - alpha_t, i = x_t.

    Args:
        likely: x, the network's probabilities of the text's token.
        seen: x_t.
        levels: of the step.
    """
    alpha_t, alpha_s = levels.alpha_t, levels.alpha_s
    size, ratio = likely.shape[-1], alpha_t / alpha_s
    noise = (1 - ratio) * (1 - alpha_s) / size
    weights = (float(alpha_s - alpha_t) * likely).add_(float(noise))
    here = seen[:, None]
    return weights.scatter_add_(-1, here, float(alpha_t * size) * likely.gather(-1, here) + float(ratio - alpha_t))


def inverse_cdf(weights: Float[Tensor, "n d_vocab"], uniform: Float[Tensor, "n 1"]) -> Int[Tensor, "n"]:
    """The first token j with w_0 + ... + w_j > u sum w: a draw with the weights w from one number u for each row.

    Args:
        weights: w, in float64, in which the sums of rare tokens are not rounded away.
        uniform: u, from 0 and below 1.
    """
    sums = weights.cumsum(-1)
    found: Tensor = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)[:, 0]
    return found.clamp(max=weights.shape[-1] - 1)


def drawn_once(
    noise: Noise,
    weights: Float[Tensor, "evaluated d_vocab"],
    evaluated: Bool[Tensor, "batch position"],
    eligible: Bool[Tensor, "batch position"],
) -> Int[Tensor, "evaluated"]:
    """A token for each row of weights from one random number; the most likely one where nothing is written.

    A vocabulary of 100,000 takes as many numbers for Gumbel's trick at each of 2,000 positions, in every step.
    """
    chosen = inverse_cdf(weights, noise.columns(evaluated, eligible, 1).to(weights))
    written = eligible[evaluated].to(chosen.device)
    return chosen if bool(written.all()) else torch.where(written, chosen, most_likely(weights))


class UniformPropose(nn.Module):
    """A token and a confidence for every position, each from its own logits, by `by_rows`.

    The authors' one stream of random numbers is drawn for all positions at once.

    Args:
        noise: source of the random numbers.
        reference_quirks: as in `denoise`.
    """

    def __init__(self, noise: Any, *, reference_quirks: bool) -> None:
        super().__init__()
        self.noise, self.reference_quirks = noise, reference_quirks

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return a token for every evaluated position and the confidence of the eligible ones."""

        def of_part(rows: Float[Tensor, "n d_vocab"], where: Int[Tensor, "n 2"]) -> tuple[Tensor, Tensor]:
            part = torch.zeros_like(evaluated)
            part[where.unbind(-1)] = True
            return self.proposed(rows, canvas[part].to(rows.device), part, eligible & part)

        chosen, certain = by_rows(of_part, logits, evaluated.nonzero(), whole=self.reference_quirks)
        tokens = canvas.masked_scatter(evaluated, chosen.to(canvas.device))
        confidence = torch.full(canvas.shape, -torch.inf, dtype=torch.float64, device=canvas.device)
        confidence = confidence.masked_scatter(evaluated, certain.to(confidence))
        return Proposal(tokens, confidence.masked_fill(~eligible, -torch.inf))

    def proposed(
        self,
        logits: Float[Tensor, "evaluated d_vocab"],
        seen: Int[Tensor, "evaluated"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> tuple[Int[Tensor, "evaluated"], Float[Tensor, "evaluated"]]:
        """The tokens and confidences of the evaluated positions, which hold the tokens `seen`."""
        raise NotImplementedError


class PosteriorPropose(UniformPropose):
    """x_s drawn from q(x_s | x_t, x_theta), and the probability that its token is the text's and not noise.

    A process of noise is a subclass with `weights` and `share`.

    Attributes:
        greedy: whether the most likely tokens of the text are taken, in place of draws.
    """

    greedy: bool = False

    def proposed(
        self,
        logits: Float[Tensor, "evaluated d_vocab"],
        seen: Int[Tensor, "evaluated"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> tuple[Int[Tensor, "evaluated"], Float[Tensor, "evaluated"]]:
        """X_s of every evaluated position, and the probability that it is the text's."""
        likely = self.probabilities(logits)
        if self.greedy:
            return (chosen := most_likely(likely)), self.share(likely, seen, chosen)
        chosen = self.drawn(self.weights(likely, seen), evaluated, eligible)
        return chosen, self.share(likely, seen, chosen)

    def drawn(
        self,
        weights: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """A token for each row of weights, by Gumbel's trick on that row's own numbers."""
        uniform = self.noise.columns(evaluated, eligible, weights.shape[-1]).to(weights)
        return most_likely(weights / exponential(uniform, reference_quirks=self.reference_quirks))

    def weights(
        self, likely: Float[Tensor, "evaluated d_vocab"], seen: Int[Tensor, "evaluated"]
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Of x_s, up to a factor for each position."""
        raise NotImplementedError

    def share(
        self,
        likely: Float[Tensor, "evaluated d_vocab"],
        seen: Int[Tensor, "evaluated"],
        chosen: Int[Tensor, "evaluated"],
    ) -> Float[Tensor, "evaluated"]:
        """The probability that the tokens `chosen` are the text's."""
        raise NotImplementedError

    def probabilities(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """P(x_0)."""
        raise NotImplementedError


class UniformPosteriorPropose(PosteriorPropose):
    """The same for noise that is uniform over the vocabulary.

    Given x_s = j the probability that it is the text's is alpha_s x_j / (alpha_s x_j + (1 - alpha_s) / V), whatever
    x_t is: the two terms of the prior of `posterior`. It is 1 where the noise is removed.

    Attributes:
        levels: of the step.
    """

    levels = Levels(0.0, torch.tensor(0.5), torch.tensor(1.0))

    @property
    def greedy(self) -> bool:  # type: ignore[override]
        """Whether the step removes the noise without draws."""
        return not self.levels.drawn

    def weights(
        self, likely: Float[Tensor, "evaluated d_vocab"], seen: Int[Tensor, "evaluated"]
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Of x_s, up to a factor for each position."""
        return posterior(likely, seen, self.levels)

    def share(
        self,
        likely: Float[Tensor, "evaluated d_vocab"],
        seen: Int[Tensor, "evaluated"],
        chosen: Int[Tensor, "evaluated"],
    ) -> Float[Tensor, "evaluated"]:
        """The probability that the tokens `chosen` are the text's."""
        text = float(self.levels.alpha_s) * likely.gather(-1, chosen[:, None])[:, 0]
        return (text / (text + float(1 - self.levels.alpha_s) / likely.shape[-1])).nan_to_num(1.0)
