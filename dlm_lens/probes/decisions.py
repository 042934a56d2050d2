"""`decision_order`: in which order a run decides its positions, compared with the order of the text."""

from dataclasses import dataclass, field
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import checked_arguments, one_of
from dlm_lens.display import ShowsItself
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.run_rows import decided_answer
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import CORRELATION_BOUNDS, Estimate, estimate_mean

Within = Literal["answer", "block"]


@dataclass(frozen=True, eq=False)
class DecisionOrder(ShowsItself):
    """When each position of the answer got its final token.

    A pair of positions i < j that were decided at different steps is *in order* if i was first. Kendall's tau is
    (pairs in order - pairs in reverse) / pairs decided at different steps: 1 from left to right, -1 from right to
    left, 0 on average in a random order. Pairs of one step have no order and do not count (Goodman and Kruskal's
    gamma, which tau is without such pairs). 2606.20560, section 5.1, calls an order in reverse non-chronological.

    Args:
        run: the run.
        within: pairs of the whole "answer", or of one "block", in which the sampler is free to choose.
        step: the last step that wrote the token; -1 outside the answer, where the result has a mask, and where a
            part of a run (`Recording.select(step=)`) lacks the step that decided the token.
        rewrites: how often a position was rewritten or opened again after it was first decided.
        tau: of every row; NaN without a pair.
        pairs: how many pairs count.
        retracted: positions whose token was replaced after a position to their right had been decided, so that what
            follows in the text may have caused it: the shape of retroactive correction (2606.20560, section 5.1.2).

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: DenoisingRun = field(repr=False)
    within: Within
    step: Int[Tensor, "batch position"]
    rewrites: Int[Tensor, "batch position"]
    tau: Float[Tensor, "batch"]
    pairs: Int[Tensor, "batch"]
    retracted: Bool[Tensor, "batch position"]

    def __post_init__(self) -> None:
        _, batch, position = self.run.unmasked.shape
        check_shapes(self, batch=batch, position=position)

    def __repr__(self) -> str:
        return (
            f"DecisionOrder(tau {self.mean} within the {self.within}, {int(self.pairs.sum())} pairs; "
            f"{int(self.rewrites.sum())} rewrites, {int(self.retracted.sum())} retracted tokens)"
        )

    @property
    def mean(self) -> Estimate:
        """The mean of tau over rows; the interval is over prompts."""
        rows = self.tau.isfinite().nonzero().flatten()
        prompt = self.run.row_prompts
        return estimate_mean(self.tau[rows].numpy(), prompt[rows].numpy(), len(prompt), bounds=CORRELATION_BOUNDS)

    @property
    def reversed(self) -> Float[Tensor, "batch"]:
        """The share of pairs in reverse: (1 - tau) / 2."""
        return (1 - self.tau) / 2

    def table(self) -> pd.DataFrame:
        """One line per row."""
        return pd.DataFrame(
            {
                "batch": self.run.row_numbers,
                "tau": self.tau.tolist(),
                "reversed": self.reversed.tolist(),
                "pairs": self.pairs.tolist(),
                "rewrites": self.rewrites.sum(-1).tolist(),
                "retracted": self.retracted.sum(-1).tolist(),
            }
        )


@checked_arguments(within=one_of("answer", "block"))
def decision_order(run: RunLike, *, within: Within = "answer") -> DecisionOrder:
    """The order in which a run decided its positions; no model is needed, a recording's `run` will do.

    A semi-autoregressive sampler fixes the order of the blocks: `within="block"` counts what is left to choose.
    Of a part of a run the positions count that its steps write.

    Args:
        run: from `denoise`, or `recording.run`.
        within: the pairs that count.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: another `within`.
    """
    run = as_run(run)
    given, run = run, run.by_token
    answer = decided_answer(run)
    retracted = _retracted(run, answer)
    if run.part is not None:  # when the others were decided is not known
        answer = answer & (run.last_written >= 0)
    step = run.last_written.masked_fill(~answer, -1)
    before = step[:, :, None] < step[:, None, :]
    after = step[:, :, None] > step[:, None, :]
    where = torch.arange(step.shape[-1])
    counted = answer[:, :, None] & answer[:, None, :] & (where[:, None] < where[None, :])
    if within == "block":
        block = _block_of(run)
        counted &= block[:, :, None] == block[:, None, :]
    ordered, backward = (counted & before).sum((1, 2)), (counted & after).sum((1, 2))
    pairs = ordered + backward
    rewrites = (run.revised & answer).sum(0)
    return DecisionOrder(given, within, step, rewrites, (ordered - backward) / pairs, pairs, retracted)


def _block_of(run: DenoisingRun) -> Int[Tensor, "batch position"]:
    """The block of every position; -1 for none."""
    found = torch.full(run.tokens.shape, -1)
    for index, block in enumerate(run.blocks):
        found = torch.where(run.in_block[index], block, found)
    return found


def _retracted(run: DenoisingRun, answer: Bool[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
    """Where a decided token gave way to another one while a position to its right was decided."""
    found = torch.zeros_like(answer)
    for step in range(run.steps):
        replaced = run.revised[step] & (run.canvases[step] != run.tokens)
        decided = (answer & ~run.open[step]).flip(-1).cumsum(-1).flip(-1)
        right = decided - (answer & ~run.open[step]).long() > 0
        found |= replaced & right & answer
    return found
