"""Which positions of a text are masked for a likelihood: the families' random masks, and the chain rule's."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.sampling.pairs import Pair


class Drawn(NamedTuple):
    """Masks of a stratified group of samples, and the probability with which each masked a position."""

    masked: Bool[Tensor, "sample position"]
    rate: Float[Tensor, "sample"]


class Corruption(Protocol):
    """A random masking process whose losses, divided by the rate, average to a bound on the likelihood."""

    def draw(self, pair: Pair, samples: int, generator: torch.Generator) -> Drawn:
        """Draw one stratified group of masks, always on the CPU so that devices agree."""
        ...


@dataclass(frozen=True)
class CountCorruption:
    """LLaDA's (ML-GSAI/LLaDA, get_log_likelihood.py): a number of masks in 1..n, then which positions.

    The numbers of a group are evenly spaced from a random start, round(linspace(k, k + (b - 1) n / b, b)),
    wrapped into 1..n; each is uniform. The rate is number / n.
    """

    def draw(self, pair: Pair, samples: int, generator: torch.Generator) -> Drawn:
        """One integer for the group, then one permutation of the answer per sample."""
        length = len(pair.answer)
        first = torch.randint(1, length + 1, (), generator=generator)
        last = first + (samples - 1) * (length / samples)
        counts = torch.linspace(float(first), float(last), samples).round().long()
        counts = (counts - 1) % length + 1
        rank = torch.stack([torch.randperm(length, generator=generator) for _ in range(samples)])
        masked = torch.zeros(samples, len(pair.prompt) + length, dtype=torch.bool)
        masked[:, len(pair.prompt) :] = rank < counts[:, None]
        return Drawn(masked, counts / length)


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
        start = torch.rand(1, generator=generator)
        times = (start + torch.arange(samples) / samples) % 1
        rate = (1 - self.eps) * times + self.eps
        masked = torch.rand(samples, len(pair.tokens), generator=generator) < rate[:, None]
        if self.protect_ends:
            masked[:, [0, -1]] = False
        return Drawn(masked & pair.in_answer if self.scope == "answer" else masked, rate)


def chain_masks(pair: Pair, order: str) -> tuple[Bool[Tensor, "token position"], Bool[Tensor, "token position"]]:
    """Masks and scored positions of the chain rule: one canvas per token of the answer.

    "left_to_right" sees the prompt and the answer before token i, "right_to_left" the prompt and the answer
    behind it (SMDM's chain_rule, Dream's ar_ftb; Dream's ar_btf).

    Raises:
        ValueError: another order.
    """
    square = torch.ones(len(pair.answer), len(pair.answer), dtype=torch.bool)
    orders = {"left_to_right": square.triu(), "right_to_left": square.tril()}
    if order not in orders:
        raise ValueError(f"order is {order!r}; it must be {' or '.join(map(repr, orders))}")
    before = torch.zeros(len(pair.answer), len(pair.prompt), dtype=torch.bool)
    return torch.cat([before, orders[order]], 1), torch.cat([before, square.triu().tril()], 1)
