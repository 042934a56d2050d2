"""Targets of attribution: the number of a step's logits that is attributed."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.adapters.registry import excluded_id
from dlm_lens.printable import shown


@dataclass(frozen=True, eq=False)
class Decisions:
    """The logits of a step at the positions that count, as a target reads them.

    Args:
        step: of the run.
        logits: guided as in the run; [MASK], which no sampler decides, is -inf.
        row: of the batch, of each entry.
        position: canvas position of each entry.
        token: the token that the step decides; at positions that `explain` names, the one that the run has there
            in the end.
        other: the likeliest other token of the corrupted pass; without a corrupted run, of the run's own.
    """

    step: int
    logits: Float[Tensor, "entry d_vocab"]
    row: Int[Tensor, "entry"]
    position: Int[Tensor, "entry"]
    token: Int[Tensor, "entry"]
    other: Int[Tensor, "entry"]


class Target(Protocol):
    """A number per entry, of which a row's sum is attributed; any function of `Decisions` is one."""

    def __call__(self, decisions: Decisions) -> Float[Tensor, "entry"]:
        """One differentiable number per entry."""
        ...


@dataclass(frozen=True)
class LogProbability:
    """ln p of the token that the run decided.

    Where a model is sure, its gradient is nearly 0: take a difference of logits to rank nodes by gradients.
    """

    def __call__(self, decisions: Decisions) -> Float[Tensor, "entry"]:
        """Log-probabilities, in nats."""
        logs = decisions.logits.log_softmax(-1)
        return logs.gather(-1, decisions.token[:, None])[:, 0]


@dataclass(frozen=True)
class LogitDifference:
    """The logit of the token that the run decided, minus that of another one.

    Args:
        against: id of the other token; None for `Decisions.other`.
    """

    against: int | None = None

    def __call__(self, decisions: Decisions) -> Float[Tensor, "entry"]:
        """Differences of logits."""
        other = decisions.other if self.against is None else torch.full_like(decisions.other, self.against)
        both = decisions.logits.gather(-1, torch.stack([decisions.token, other], -1))
        return both[:, 0] - both[:, 1]


def check_target(model: Any, target: Any, who: str) -> None:
    """Raise for a target that is none, or a difference to what no logit is of.

    Raises:
        ValueError: nothing that can be called, or `against` that is no token of the model, or [MASK].
    """
    if not callable(target) or isinstance(target, type):  # a class would be called with the decisions
        raise ValueError(
            f"{who}: target is {shown(target)}; give LogProbability(), LogitDifference(...) or a function"
        )
    against = target.against if isinstance(target, LogitDifference) else None
    if against is None:
        return
    count = int(model.get_output_embeddings().weight.shape[0])
    if not 0 <= against < count or against == excluded_id(model.config):
        raise ValueError(
            f"{who}: LogitDifference(against={against}); give a token between 0 and {count - 1} that is not "
            "[MASK], which is never decided"
        )


LOGIT_DIFFERENCE = LogitDifference()
"""The target of every attribution by default."""


def named(target: Any) -> str:
    """A target as a contract prints it."""
    return getattr(target, "__name__", None) or repr(target)
