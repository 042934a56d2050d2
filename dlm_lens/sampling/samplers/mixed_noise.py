"""Noise that mixes [MASK] and random tokens (GIDD, 2503.04482): its posterior, and samplers of such models."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.registry import excluded_id
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.mdlm import SelectLikelier
from dlm_lens.sampling.samplers.uniform_noise import UniformNoiseSampler
from dlm_lens.sampling.samplers.uniform_posterior import PosteriorPropose, drawn_once


class Mixture(NamedTuple):
    """A noise level, or one of each position: what a token of a noisy text is. The three numbers sum to 1.

    Args:
        alpha: the probability of the text's token.
        masked: of [MASK].
        random: of a token drawn uniformly from the V - 1 ids other than [MASK], the text's own among them.
    """

    alpha: Float[Tensor, "*#axes"]
    masked: Float[Tensor, "*#axes"]
    random: Float[Tensor, "*#axes"]

    def noise_at(self, tokens: Int[Tensor, "*axes"], mask_id: int, size: int) -> Float[Tensor, "*axes"]:
        """The probability that the noise writes each of these tokens, in a vocabulary of `size` ids."""
        masked, other = self.masked.to(tokens.device), (self.random / (size - 1)).to(tokens.device)
        return torch.where(tokens == mask_id, masked, other)


def mixed_posterior(
    likely: Float[Tensor, "n d_vocab"], seen: Int[Tensor, "n"], now: Mixture, then: Mixture, mask_id: int
) -> Float[Tensor, "n d_vocab"]:
    """Weights of q(x_s | x_t, x_theta) of mixed noise (2503.04482; dvruette/gidd, sampling.py).

    With x = x_theta and b(j) the probability that the noise writes j (`Mixture.noise_at`), Bayes' rule from the
    prior alpha_s x_j + b_s(j) and the likelihood of x_t gives, up to a factor,

        w_j = (alpha_s x_j + b_s(j)) (a [j = x_t] + b_t(x_t) - a b_s(x_t)),  a = alpha_t / alpha_s.

    The weights sum to alpha_t x_i + b_t(i), i = x_t. With no random tokens they are MDLM's: a token stays, and a
    [MASK] becomes j with the weight (alpha_s - alpha_t) x_j. A token that noise and network both exclude stays.

    Args:
        likely: x, the network's probabilities of the text's token.
        seen: x_t.
        now: the noise at t.
        then: the noise at s, which is less.
        mask_id: of [MASK].
    """
    size, ratio = likely.shape[-1], float(now.alpha / then.alpha)
    weights = (float(then.alpha) * likely).add_(float(then.random / (size - 1)))
    weights[:, mask_id] = float(then.alpha) * likely[:, mask_id] + float(then.masked)
    here = seen[:, None]
    stays = ratio * weights.gather(-1, here)
    # Of noise that only grows the difference is at least 0, but for rounding.
    moves = (now.noise_at(seen, mask_id, size) - ratio * then.noise_at(seen, mask_id, size)).clamp(min=0)
    moves = moves[:, None].to(weights)
    stays = stays.masked_fill((stays == 0) & (moves == 0), 1.0)
    return weights.mul_(moves).scatter_add_(-1, here, stays)


def noise_mask_id(config: Any) -> int:
    """`excluded_id` of a model of mixed noise, which always has one."""
    found = excluded_id(config)
    assert found is not None
    return found


class MixedPropose(PosteriorPropose):
    """x_s of mixed noise, drawn by one random number for each position, and the probability that it is the text's.

    Given x_s = j the latter is alpha_s x_j / (alpha_s x_j + b_s(j)), b_s(j) the probability that the noise writes
    j, whatever x_t is: the two terms of the prior of `mixed_posterior`. Of [MASK], which the network does not
    predict, it is 0.

    Args:
        mask_id: of [MASK].
        noise: source of the random numbers.
        reference_quirks: as in `denoise`.

    Attributes:
        now: the noise of the step.
        then: the noise after it.
    """

    now = then = Mixture(torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.0))

    def __init__(self, mask_id: int, noise: Any, *, reference_quirks: bool) -> None:
        super().__init__(noise, reference_quirks=reference_quirks)
        self.mask_id = mask_id

    def drawn(
        self,
        weights: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """A token for each row of weights."""
        return drawn_once(self.noise, weights, evaluated, eligible)

    def weights(
        self, likely: Float[Tensor, "evaluated d_vocab"], seen: Int[Tensor, "evaluated"]
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Of x_s, up to a factor for each position."""
        return mixed_posterior(likely, seen, self.now, self.then, self.mask_id)

    def share(
        self,
        likely: Float[Tensor, "evaluated d_vocab"],
        seen: Int[Tensor, "evaluated"],
        chosen: Int[Tensor, "evaluated"],
    ) -> Float[Tensor, "evaluated"]:
        """The probability that the tokens `chosen` are the text's."""
        text = float(self.then.alpha) * likely.gather(-1, chosen[:, None])[:, 0]
        noise = self.then.noise_at(chosen, self.mask_id, likely.shape[-1]).to(text)
        return (text / (text + noise)).nan_to_num(1.0)


class MixedNoiseSampler(UniformNoiseSampler):
    """A sampler of mixed noise: a step writes every open position and the answer, with tokens or with [MASK].

    The answer begins as noise at t = 1: masks, or random tokens. Masks of the prompt are open too and begin alike.
    After a step a position is decided while its token is rather the text's than noise, and open otherwise; what
    holds [MASK] is open, also where an edit of the canvas has written it.

    Args:
        noise: source of the random numbers.

    Attributes:
        noise_mask_id: the id of [MASK], also where no noise has it and `mask_id` is None.
    """

    noise_mask_id = 0

    def __init__(self, noise: Noise) -> None:
        super().__init__(noise)
        self.select = SelectLikelier()

    def first_noise(self) -> Mixture:
        """The noise of the first canvas, of which `masked` and `random` count."""
        raise NotImplementedError

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """The prompts, and noise in the answer and at the masks of the prompts."""
        config = model.config
        self.mask_id, self.fillable, self.vocabulary = config.mask_token_id, fillable, int(config.vocab_size)
        self.noise_mask_id = noise_mask_id(config)
        masks = prompts.new_full((len(prompts), fillable.shape[1] - prompts.shape[1]), self.noise_mask_id)
        canvas = torch.cat([prompts, masks], 1)
        in_answer = torch.arange(canvas.shape[1], device=canvas.device) >= prompts.shape[1]
        self._open = in_answer.expand(canvas.shape)
        if self.mask_id is not None:
            self._open = self._open | ((canvas == self.mask_id) & fillable)
        self._answer = self._open
        return self.first_canvas(canvas)

    def first_canvas(self, canvas: Int[Tensor, "batch position"]) -> Int[Tensor, "batch position"]:
        """The canvas, which holds masks at the open positions, with random tokens at the noise's share of them."""
        _, masked, random = self.first_noise()
        share, chosen = float(random / (masked + random)), self._open
        if share == 0:
            return canvas
        if share < 1:
            chosen = chosen & (self.noise.positions(chosen).to(canvas.device) < share)
        tokens = self.noise.uniform_tokens(chosen, self.vocabulary - 1)
        return torch.where(chosen, tokens + (tokens >= self.noise_mask_id), canvas)

    def open_positions(self, canvas: Int[Tensor, "batch position"], step: int) -> Bool[Tensor, "batch position"]:
        """What the last finished step left open, and what holds [MASK]."""
        if self.mask_id is None or self.fillable is None:
            return self._open
        return self._open | ((canvas == self.mask_id) & self.fillable)

    def running(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The positions that the step may write: the answer, and what is open elsewhere."""
        return self._answer | masked
