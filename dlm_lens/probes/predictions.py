"""`read_predictions`: what the model predicts at every open position of every step of a finished run."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.printable import shown
from dlm_lens.probes.unembedding import positions_at_once, without_mask
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import on_canvases


class Predictions(NamedTuple):
    """The predictions of a row at a step, in float64 and on the CPU; [MASK] has no probability.

    Args:
        step: of the run.
        row: of the batch.
        where: the canvas positions that the step predicts.
        token: the most likely token at each.
        confidence: its probability.
        entropy: of the prediction, in nats.
        final: [i, j], the probability at position i of the token that the result has at position j, wherever that
            token is in the result (`on_canvases`); 0 where the result has no token.
        likely_at: for every token with more than the threshold, the index in `where`.
        likely_token: that token.
    """

    step: int
    row: int
    where: Int[Tensor, "predicted"]
    token: Int[Tensor, "predicted"]
    confidence: Float[Tensor, "predicted"]
    entropy: Float[Tensor, "predicted"]
    final: Float[Tensor, "predicted predicted"]
    likely_at: Int[Tensor, "likely"]
    likely_token: Int[Tensor, "likely"]


def read_predictions(
    stored: StoredRun, result: Int[Tensor, "batch position"], *, threshold: float = 1.0, progress: str = ""
) -> Iterator[Predictions]:
    """The predictions of every step and row that predicts anything; one forward pass per step.

    Args:
        stored: the run.
        result: the tokens of the result, -1 where there is none.
        threshold: above which a token is likely; none is above 1.
        progress: what a progress bar calls it; empty for none.
    """
    size, results = positions_at_once(stored.model), on_canvases(stored.run, result, -1)
    for step in tqdm(range(stored.run.steps), desc=progress, unit="step", disable=not progress):
        predicted, states = stored.predicted(step).cpu(), stored.states(step)
        start = 0
        for row in range(len(predicted)):
            where = predicted[row].nonzero().flatten()
            wanted, parts = results[step, row, where], []
            for first in range(start, start + len(where), size):
                part = states[:, first : min(first + size, start + len(where))]
                logits = without_mask(stored.model, stored.logits(part).double())
                parts.append(_reduced(logits.log_softmax(-1), wanted, threshold, first - start))
            start += len(where)
            if parts:
                yield Predictions(step, row, where, *(torch.cat(values) for values in zip(*parts, strict=True)))


def _reduced(
    log: Float[Tensor, "part d_vocab"], wanted: Int[Tensor, "predicted"], threshold: float, first: int
) -> tuple[Tensor, ...]:
    """What is kept of the predictions of a few positions, the first of which has index `first`."""
    likely = log.exp()
    confidence, token = likely.max(-1)
    entropy = torch.special.entr(likely).sum(-1)
    final = likely[:, wanted.clamp(min=0).to(likely.device)].cpu().masked_fill(wanted < 0, 0.0)
    at, among = (likely > threshold).nonzero().unbind(-1)
    return token.cpu(), confidence.cpu(), entropy.cpu(), final, at.cpu() + first, among.cpu()


def result_of(run: DenoisingRun) -> Int[Tensor, "batch position"]:
    """The tokens of the run's result; -1 where a position stayed open."""
    return run.tokens.masked_fill(run.open[-1], -1)


def right_tokens(result: Int[Tensor, "batch position"], reference: Any) -> Int[Tensor, "batch position"]:
    """The tokens that count as right: those that were given, or the run's own.

    Args:
        result: the run's own, of `result_of`.
        reference: token ids [batch, position], -1 where none is known; None for the run's own.

    Raises:
        ValueError: a reference of another shape, or that is none.
    """
    if reference is None:
        return result
    try:
        right = torch.as_tensor(reference)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        right = torch.empty(0)
    whole = not (right.is_floating_point() or right.is_complex())
    if not whole or right.shape != result.shape:
        what = f"has shape {list(right.shape)}" if right.numel() and right.shape != result.shape else ""
        raise ValueError(
            f"reference {what or f'is {shown(reference)}'}, and the run's canvas {list(result.shape)}; give token "
            "ids for every position of the canvas, -1 where none is known"
        )
    return right
