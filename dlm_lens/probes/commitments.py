"""`commitment`: when a run's predictions settle on a token, how sure they are, and how right."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import LARGEST_COUNT, checked_arguments, flag, whole
from dlm_lens.attention import HookLike, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.probes.predictions import read_predictions, result_of, right_tokens
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.algorithm_registry import sampler_class, setting_of
from dlm_lens.sampling.moved_tokens import at_places, on_canvases
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks.token_classes import TOKEN_CLASSES, TokenClasses
from dlm_lens.statistics import SHARE_BOUNDS, Bounds, Estimate, estimate_mean


@dataclass(frozen=True, eq=False)
class Commitment(ShowsItself):
    """What each step predicts at the open positions of a run, and from when on it is the final token.

    A position is *committed* at step t if from t on until it is decided every step's most likely token is its final
    one: the first step from which the prediction never changes (2604.23235). `lead` is how many steps earlier that
    is than the decision. A position whose last prediction was another token, because the sampler drew one that is
    not the most likely, is committed by the decision itself: its lead is -1. Where a sampler rewrites decided
    positions, the decision is the last step that wrote there; what it was without a reading of that step
    (`commitment(..., decided=True)` has it) is not known. Where masks are inserted and deleted (DreamOn), a
    position is one of the result: it has the readings of its token's mask, wherever that was at a step.

    Args:
        run: the run.
        token: the most likely token ([MASK] is none) at the open positions that the step predicts; -1 elsewhere.
        confidence: its probability; NaN elsewhere.
        entropy: of the prediction, in nats; NaN elsewhere, and where it was read from the run alone.
        likely: the probability of the token that the result has there; NaN like the entropy.
        reference: the tokens that count as right; -1 where none is known.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: DenoisingRun = field(repr=False)
    token: Int[Tensor, "step batch position"]
    confidence: Float[Tensor, "step batch position"]
    entropy: Float[Tensor, "step batch position"]
    likely: Float[Tensor, "step batch position"]
    reference: Int[Tensor, "batch position"]

    def __post_init__(self) -> None:
        step, batch, position = self.run.unmasked.shape
        check_shapes(self, step=step, batch=batch, position=position)

    def __repr__(self) -> str:
        return f"Commitment(lead {self.mean_lead} steps, {int(self.flips.sum())} changes of a prediction)"

    @property
    def predicted(self) -> Bool[Tensor, "step batch position"]:
        """Where there is a prediction."""
        return self.token >= 0

    @property
    def decided_at(self) -> Int[Tensor, "batch position"]:
        """The step that decided or rewrote a position for the last time; -1 for none."""
        return self.run.last_written

    @cached_property
    def followed(self) -> Int[Tensor, "step batch position"]:
        """`token` at the positions of the result; where tokens move (DreamOn), read where each token's mask was."""
        return at_places(self.token, self.run.token_places[:-1], -1)

    @property
    def committed_at(self) -> Int[Tensor, "batch position"]:
        """The step at which a position is committed; -1 where that was not read, or it stayed open."""
        return settled_at(self.followed, self.run.tokens, self.decided_at, self.unknown)

    @property
    def unknown(self) -> Bool[Tensor, "batch position"]:
        """Positions that stayed open, or that a step rewrote last whose prediction there was not read."""
        if not self.run.steps:  # a run that failed at its first step
            return self.run.open[-1]
        unread = self.followed.gather(0, self.decided_at.clamp(min=0)[None])[0] < 0
        return self.run.open[-1] | (unread & (self.decided_at > self.run.step_of))

    @property
    def lead(self) -> Float[Tensor, "batch position"]:
        """How many steps a position is committed before it is decided; NaN where it is not.

        The difference of the steps' numbers in the run, which a part of a run may leave out; -1 where the decision
        itself commits the position.
        """
        if not self.run.steps:
            return torch.full(self.run.tokens.shape, torch.nan)
        number = torch.tensor(self.run.step_numbers)
        last = len(number) - 1
        between = number[self.decided_at.clamp(0, last)] - number[self.committed_at.clamp(0, last)]
        lead = torch.where(self.committed_at > self.decided_at, -1, between).float()
        return lead.masked_fill(self.committed_at < 0, torch.nan)

    @property
    def flips(self) -> Int[Tensor, "batch position"]:
        """How often the most likely token changed from one prediction that was read to the next."""
        count = torch.zeros_like(self.run.tokens)
        last = torch.full_like(self.run.tokens, -1)
        for token in self.followed:
            there = token >= 0
            count += there & (last >= 0) & (token != last)
            last = torch.where(there, token, last)
        return count

    @property
    def mean_lead(self) -> Estimate:
        """The mean lead over positions; the interval is over prompts."""
        return self._mean(self.lead, self.lead.isfinite())

    def by_class(self) -> pd.DataFrame:
        """One line per class of final tokens: positions, mean lead, share committed at the first prediction.

        Raises:
            ValueError: the run has no tokenizer to tell classes.
        """
        class_of = TokenClasses(self.run.tokenizer, None, self.run.eos_token_ids)
        known, start = self.committed_at >= 0, (self.followed >= 0).float().argmax(0)
        names = np.array([[class_of(token) for token in row] for row in self.run.tokens.tolist()])
        lines = []
        for name in TOKEN_CLASSES:
            where = known & torch.from_numpy(names == name)
            if bool(where.any()):
                line: dict[str, Any] = {"class": name, "positions": int(where.sum())}
                line |= self._mean(self.lead, where).columns("lead")
                line |= self._mean((self.committed_at == start).float(), where, SHARE_BOUNDS).columns("from_start")
                lines.append(line)
        return pd.DataFrame(lines)

    def calibration(self, bins: int = 10) -> pd.DataFrame:
        """One line per step: how sure and how right the predictions are, where the right token is known.

        `step` is the number in the whole run. With confidence c and correctness y of n predictions: `brier` is
        mean((c - y)^2); `ece` is the sum over `bins` equal bins of c of (their share of n) |mean y - mean c| (Guo
        et al. 2017, equation 3). Where a confidence is not known, as in `proposed_commitment` of some samplers,
        both are NaN.

        Raises:
            ValueError: less than one bin, or no whole number.
        """
        whole(least=1, most=LARGEST_COUNT).check("bins", bins)
        reference = on_canvases(self.run, self.reference, -1)
        counted = self.predicted & (reference >= 0)
        lines = []
        for step in range(self.run.steps):
            where = counted[step]
            sure = self.confidence[step][where].double().numpy()
            right = (self.token[step] == reference[step])[where].double().numpy()
            line: dict[str, Any] = {"step": self.run.step_numbers[step], "predictions": len(sure)}
            if len(sure):
                # Bins of an unknown confidence do not exist; its means are NaN.
                known = bool(np.isfinite(sure).all())
                index = np.minimum((sure * bins).astype(int), bins - 1) if known else None
                gaps = np.nan if index is None else np.abs(np.bincount(index, right - sure, bins)).sum() / len(sure)
                line |= {"confidence": sure.mean(), "accuracy": right.mean(), "ece": gaps}
                line |= {"brier": ((sure - right) ** 2).mean(), "entropy": self.entropy[step][where].mean().item()}
            lines.append(line)
        return pd.DataFrame(lines)

    def _mean(
        self,
        values: Float[Tensor, "batch position"],
        where: Bool[Tensor, "batch position"],
        bounds: Bounds | None = None,
    ) -> Estimate:
        prompt = self.run.row_prompts
        of_prompt = prompt[where.nonzero()[:, 0]].numpy()
        return estimate_mean(values[where].numpy(), of_prompt, len(prompt), bounds=bounds)


def settled_at(
    read: Int[Tensor, "step batch position"],
    final: Int[Tensor, "batch position"],
    decided_at: Int[Tensor, "batch position"],
    undecided: Bool[Tensor, "batch position"],
) -> Int[Tensor, "batch position"]:
    """The first step from which on every reading until the decision is the final value.

    Args:
        read: what each step reads; -1 where it reads nothing.
        final: the value that counts.
        decided_at: the step of the decision; readings after it do not count.
        undecided: positions without a decision, or whose decision was not read.

    Returns:
        The step; one after the decision where the last reading was another value; -1 where nothing was read, or
        nothing was decided.
    """
    if not len(read):  # a run that failed at its first step
        return torch.full_like(final, -1)
    steps = torch.arange(len(read), device=read.device)[:, None, None]
    before = (read >= 0) & (steps <= decided_at)
    other = before & (read != final)
    # The step after the last one that read another value, among those that read something.
    after = before & (steps > (other * (steps + 1)).amax(0) - 1)
    first = torch.where(after, steps, len(read)).amin(0)
    first = torch.where(first < len(read), first, decided_at + 1)
    return torch.where(before.any(0) & ~undecided, first, -1)


@checked_arguments(decided=flag())
@torch.no_grad()
@exclusive
def commitment(
    model: Any,
    run: RunLike,
    *,
    hooks: Sequence[HookLike] = (),
    reference: Any = None,
    decided: bool = False,
    progress: bool = False,
) -> Commitment:
    """Run the model on every canvas of a run, and read what it predicts at the open positions.

    One forward pass per step; logits are read a few positions at a time.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`.
        hooks: interventions under which the model predicts.
        reference: token ids [batch, position] on the run's canvas that count as right, -1 where none is known; None
            for the run's own result, so that calibration says how well the run foresees itself.
        decided: also the decided positions that a step may rewrite, in models that revise (uniform noise,
            LLaDA2.1).
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model, or a reference of another shape.
    """
    run = as_run(run)
    stored = StoredRun(model, run, decided=decided, hooks=hooks)
    result = result_of(stored.run)
    right = right_tokens(result, reference)
    shape = run.unmasked.shape
    token, results = torch.full(shape, -1), on_canvases(run, result, -1)
    names = ("confidence", "entropy", "likely")
    found = {name: torch.full(shape, torch.nan, dtype=torch.float32) for name in names}
    for one in read_predictions(stored, result, progress="commitment" if progress else ""):
        at = one.step, one.row, one.where
        token[at] = one.token
        found["confidence"][at], found["entropy"][at] = one.confidence.float(), one.entropy.float()
        own = one.final.diagonal().masked_fill(results[at] < 0, torch.nan)
        found["likely"][at] = own.float()
    return Commitment(run, token, found["confidence"], found["entropy"], found["likely"], right)


@checked_arguments()
def proposed_commitment(run: RunLike, *, reference: Any = None) -> Commitment:
    """The commitment of a run's own proposals, from the run alone: no model, no forward pass.

    At temperature 0 a step proposes the most likely token for every position that it evaluates. These are the open
    positions of its block, so that leads count from the step at which the block begins; a run with
    `denoise(logits="all")` has them at all open positions, as `commitment` does. Samplers that choose positions at
    random (Dream's and SMDM's `remasking="origin"`) propose only for those, with a lead of 0. Where the
    sampler ranks by probability (`remasking="low_confidence"`) the confidence is the run's, in which [MASK] has a
    share; elsewhere it is NaN.

    Args:
        run: from `denoise`, or a recording.
        reference: as for `commitment`.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run whose proposals are drawn, or by its settings without some tokens, so that the proposed
            token is not the most likely one; a model without a mask token; a reference of another shape.
    """
    run = as_run(run)
    if drawn := why_drawn(run):
        raise ValueError(
            f"proposed_commitment: the run {drawn}, so that what it proposes is not always its most likely token; "
            "commitment(model, run) reads the predictions themselves"
        )
    # Where nothing is proposed, the proposal is the canvas's own token: [MASK].
    predicted = run.open[:-1] & (run.proposals != run.canvases[:-1]) & run.running[..., None]
    token = run.proposals.masked_fill(~predicted, -1)
    unknown = torch.full(token.shape, torch.nan, dtype=torch.float32)
    by_probability = setting_of(run.settings, "remasking") == "low_confidence"
    probable = by_probability and not run.settings.get("reference_quirks")
    confidence = run.confidence.masked_fill(~predicted | run.confidence.isinf(), torch.nan) if probable else unknown
    right = right_tokens(run.tokens.masked_fill(run.open[-1], -1), reference)
    return Commitment(run, token, confidence, unknown, unknown, right)


def why_drawn(run: DenoisingRun) -> str:
    """Why a run's proposals are not always its most likely tokens; "" where they are."""
    temperature = setting_of(run.settings, "temperature")
    if run.uniform_noise:
        return "holds random tokens at open positions"
    if temperature != 0:
        return f"has temperature {temperature}"
    sampler = sampler_class(run.settings)
    if sampler.resizes:
        return "inserts and deletes masks, where there is room"
    kept = [f"{name}={run.settings[name]}" for name in sampler.withholds if run.settings.get(name)]
    return f"has {kept[0]}" if kept else ""
