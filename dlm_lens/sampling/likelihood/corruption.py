"""Which positions of a text are masked for a likelihood: the families' random masks, and the chain rule's."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.likelihood.answer_pairs import Pair


class Drawn(NamedTuple):
    """Masks of a stratified group of samples, and the probability with which each masked a position.

    `sigma` is the noise level of each, where networks are given it.
    """

    masked: Bool[Tensor, "sample position"]
    rate: Float[Tensor, "sample"]
    sigma: Float[Tensor, "sample"] | None = None


class Corruption(Protocol):
    """A random masking process whose losses, divided by the rate, average to a bound on the likelihood."""

    def draw(self, pair: Pair, samples: int, generator: torch.Generator) -> Drawn:
        """Draw one stratified group of masks, always on the CPU so that devices agree."""
        ...


@dataclass(frozen=True)
class CountCorruption:
    """LLaDA's (ML-GSAI/LLaDA, get_log_likelihood.py): a number of masks in 1..n, then which positions.

    Sample i of a group of b masks 1 + (k + floor(i n / b + 1/2)) mod n positions, k uniform in 0..n-1 for the
    group, so that each sample's number is uniform in 1..n and the numbers of a group are evenly spaced. The rate
    is number / n.

    Args:
        rounding: "half_up", as above; "half_to_even", the authors' round(linspace(k, k + (b - 1) n / b, b)), which
            rounds half the ties in the other direction: where i n / b lies halfway between whole numbers, even and
            odd numbers of masks are not equally likely (n = 2, b = 16: 9/16 and 7/16), a biased estimate.

    Raises:
        ValueError: another rounding.
    """

    rounding: Literal["half_up", "half_to_even"] = "half_up"

    def __post_init__(self) -> None:
        if self.rounding not in ("half_up", "half_to_even"):
            raise ValueError(f"rounding is {self.rounding!r}; it must be 'half_up' or 'half_to_even'")

    def draw(self, pair: Pair, samples: int, generator: torch.Generator) -> Drawn:
        """One integer for the group, then one permutation of the answer per sample."""
        length = len(pair.answer)
        counts = self.counts(int(torch.randint(1, length + 1, (), generator=generator)), length, samples)
        rank = torch.stack([torch.randperm(length, generator=generator) for _ in range(samples)])
        masked = torch.zeros(samples, len(pair.prompt) + length, dtype=torch.bool)
        masked[:, len(pair.prompt) :] = rank < counts[:, None]
        return Drawn(masked, counts / length)

    def counts(self, first: int, length: int, samples: int) -> Int[Tensor, "sample"]:
        """The numbers of masks of a group whose first sample has `first`, in 1..length."""
        if self.rounding == "half_to_even":
            last = first + (samples - 1) * (length / samples)
            rounded = torch.linspace(float(first), float(last), samples, dtype=torch.float32).round().long()
        else:
            # In whole numbers: the offsets then do not depend on `first`.
            rounded = first + (2 * length * torch.arange(samples) + samples) // (2 * samples)
        return (rounded - 1) % length + 1


@dataclass(frozen=True)
class RateCorruption:
    """Dream's and SMDM's: every position is masked independently, with a rate that is uniform over the samples.

    Times of a group of b are (u + i / b) mod 1, rates (1 - eps) t + eps (HKUNLP/Dream, eval/eval.py;
    ML-GSAI/SMDM, evaluate_diff.py with eps = 0).

    Args:
        eps: the least rate.
        protect_ends: never mask the first and the last position of the text (Dream), so that the last token of
            an answer is not scored.
        scope: mask and score the "answer", or "both" it and its prompt (Dream's log_type "ftb" and "union").

    Raises:
        ValueError: a value is out of its range.
    """

    eps: float = 0.0
    protect_ends: bool = False
    scope: Literal["answer", "both"] = "answer"

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps is {self.eps}; it must be at least 0 and below 1")
        if self.scope not in ("answer", "both"):
            raise ValueError(f"scope is {self.scope!r}; it must be 'answer' or 'both'")

    def draw(self, pair: Pair, samples: int, generator: torch.Generator) -> Drawn:
        """One number for the group, then one per sample and position of the whole text."""
        start = torch.rand(1, generator=generator, dtype=torch.float32)
        times = (start + torch.arange(samples, dtype=torch.float32) / samples) % 1
        rate = (1 - self.eps) * times + self.eps
        masked = torch.rand(samples, len(pair.tokens), generator=generator, dtype=torch.float32) < rate[:, None]
        if self.protect_ends:
            masked[:, [0, -1]] = False
        return Drawn(masked & pair.in_answer if self.scope == "answer" else masked, rate)


@dataclass(frozen=True)
class LogLinearCorruption:
    """MDLM's (kuleshov-group/mdlm, diffusion.py), and SEDD's: every position is masked by itself, at a random time.

    Times of a group of b are t_i = (1 - eps) ((u_i / b + i / b) mod 1) + eps, with a number u_i for each. A
    position is masked with the probability (1 - 1e-3) t of the log-linear schedule, and its loss is weighted by
    sigma'(t) / (exp(sigma(t)) - 1) = 1 / t, so that the mean is the NELBO of continuous time (2406.07524,
    equation 11).

    Args:
        eps: the least time.
        scope: mask and score the "answer", or "both" it and its prompt.
        stratified: times as above; without, each is (1 - eps) u_i + eps (louaaron/Score-Entropy-Discrete-Diffusion,
            losses.py).

    Raises:
        ValueError: a value is out of its range.
    """

    eps: float = 1e-3
    scope: Literal["answer", "both"] = "answer"
    stratified: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps is {self.eps}; it must be at least 0 and below 1")
        if self.scope not in ("answer", "both"):
            raise ValueError(f"scope is {self.scope!r}; it must be 'answer' or 'both'")
        if not isinstance(self.stratified, bool):
            raise ValueError(f"stratified is {self.stratified!r}; it must be True or False")

    def draw(self, pair: Pair, samples: int, generator: torch.Generator) -> Drawn:
        """One number per sample, then one per sample and position of the whole text."""
        return self.draw_at(pair, self.times(samples, generator), generator)

    def times(self, samples: int, generator: torch.Generator) -> Float[Tensor, "sample"]:
        """The times of one group."""
        start = torch.rand(samples, generator=generator, dtype=torch.float32)
        if self.stratified:
            start = (start / samples + torch.arange(samples, dtype=torch.float32) / samples) % 1
        return self.time_of(start)

    def time_of(self, share: Float[Tensor, "*sample"]) -> Float[Tensor, "*sample"]:
        """The time at a share of the way from the least one to 1."""
        return (1 - self.eps) * share + self.eps

    def draw_at(self, pair: Pair, times: Float[Tensor, "sample"], generator: torch.Generator) -> Drawn:
        """One number per sample and position of the whole text."""
        sigma = -torch.log1p(-(1 - 1e-3) * times)
        chance = 1 - torch.exp(-sigma)
        shape = (len(times), len(pair.tokens))
        masked = torch.rand(shape, generator=generator, dtype=torch.float32) < chance[:, None]
        return Drawn(masked & pair.in_answer if self.scope == "answer" else masked, times, sigma)


def chain_masks(pair: Pair, order: str) -> tuple[Bool[Tensor, "token position"], Bool[Tensor, "token position"]]:
    """Masks and scored positions of the chain rule: one canvas per token of the answer.

    In "left_to_right" the canvas shows the prompt and the answer before token i, in "right_to_left" the prompt and
    the answer after it (SMDM's chain_rule, Dream's ar_ftb; Dream's ar_btf).

    Raises:
        ValueError: another order.
    """
    square = torch.ones(len(pair.answer), len(pair.answer), dtype=torch.bool)
    orders = {"left_to_right": square.triu(), "right_to_left": square.tril()}
    if order not in orders:
        raise ValueError(f"order is {order!r}; it must be {' or '.join(map(repr, orders))}")
    before = torch.zeros(len(pair.answer), len(pair.prompt), dtype=torch.bool)
    return torch.cat([before, orders[order]], 1), torch.cat([before, square.triu().tril()], 1)
