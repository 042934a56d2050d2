"""`LogLikelihood`: how likely a model finds given answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LogLikelihood:
    """Log-likelihoods of answers given their prompts, in nats, item by item; float64 on the CPU.

    Args:
        value: the log-likelihood (with "mc" an estimate of its lower bound). With "greedy_completion", the
            logarithm of the probability that greedy decoding writes the answer: 0 or -inf.
        standard_error: of `value` over the stratified groups of samples; 0 where nothing is drawn, NaN with a
            single group.
        losses: of every item, "mc": the loss of each sample, whose mean is -value; "chain_rule": minus the
            log-probability of each token, whose sum is -value; "greedy_completion": nothing.
        tokens: number of tokens of each answer.
        method: "mc", "chain_rule" or "greedy_completion".
        settings: everything that it ran with.
        completions: with "greedy_completion", the token ids written in place of each answer.

    Raises:
        ValueError: the shapes contradict each other.
    """

    value: Float[Tensor, "item"]
    standard_error: Float[Tensor, "item"]
    losses: tuple[Float[Tensor, "term"], ...]
    tokens: Int[Tensor, "item"]
    method: str
    settings: Mapping[str, Any]
    completions: tuple[Int[Tensor, "answer"], ...] = ()

    def __post_init__(self) -> None:
        items = len(self.tokens)
        for name in ("value", "standard_error", "tokens"):
            if tuple(getattr(self, name).shape) != (items,):
                raise ValueError(
                    f"LogLikelihood.{name} has shape {tuple(getattr(self, name).shape)}, not ({items},)"
                )
        if len(self.losses) != items:
            raise ValueError(f"LogLikelihood.losses has {len(self.losses)} entries for {items} items")
        lengths = [int(length) for length in self.tokens]
        terms = {
            "mc": [self.settings.get("samples")] * items,
            "chain_rule": lengths,
            "greedy_completion": [0] * items,
        }
        if self.method not in terms:
            raise ValueError(f"LogLikelihood.method is {self.method!r}; it must be one of {', '.join(terms)}")
        if [len(losses) for losses in self.losses] != terms[self.method]:
            raise ValueError(f"LogLikelihood.losses must have {terms[self.method]} terms, one number per item")
        written = lengths if self.method == "greedy_completion" else []
        if [len(ids) for ids in self.completions] != written:
            raise ValueError(f"LogLikelihood.completions must have {written} tokens, one number per item")

    def __repr__(self) -> str:
        value = ", ".join(f"{v:.4f}" for v in self.value[:8].tolist()) + (", ..." if len(self.value) > 8 else "")
        return f"LogLikelihood(value=[{value}], method={self.method!r}, settings={dict(self.settings)})"

    def __float__(self) -> float:
        """The value of a single item."""
        if len(self.value) != 1:
            raise ValueError(f"{len(self.value)} items have no single value; read .value")
        return float(self.value)

    @property
    def per_token(self) -> Float[Tensor, "item"]:
        """Value divided by the number of tokens; exp of minus this is the perplexity (its bound with "mc")."""
        return self.value / self.tokens

    @property
    def groups(self) -> Float[Tensor, "item group"]:
        """With "mc", the mean loss of every stratified group: the losses per batch of the authors' code."""
        if self.method != "mc":
            raise ValueError(f"groups of samples exist with method 'mc'; this is {self.method!r}")
        return torch.stack(self.losses).unflatten(-1, (-1, int(self.settings["strata"]))).mean(-1)

    @property
    def is_greedy(self) -> Bool[Tensor, "item"]:
        """With "greedy_completion", whether the model writes exactly the answer."""
        if self.method != "greedy_completion":
            raise ValueError(f"is_greedy needs method 'greedy_completion'; this is {self.method!r}")
        return self.value == 0
