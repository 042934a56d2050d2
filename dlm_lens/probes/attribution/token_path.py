"""`token_effects`: a target that carries an effect from one step to later ones, through the tokens it decides."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import Rule, checked_arguments, chosen_indices, is_real, whole
from dlm_lens.attention import exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.probes.attribution.passes import Passes, Side, repeated
from dlm_lens.probes.attribution.setup import ALONE, BothSides, Setup, Start
from dlm_lens.probes.attribution.targets import LOGIT_DIFFERENCE, Decisions, Target, named
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.encoder_decoder_network import StoredConditioning
from dlm_lens.sampling.moved_tokens import came_from
from dlm_lens.sampling.prompt_positions import of_whole_run
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.shapes import check_shapes

POSITIVE = Rule("a number above 0", lambda value: is_real(value) and value > 0)


@dataclass(frozen=True, eq=False)
class TokenEffects(ShowsItself):
    """What every token that a step could have decided changes at later steps; a target of attribution at that step.

    As a target of `activation_patching` or `attribution_patching` it is E_i = sum_v p_i(v) w_i(v) for each position
    i that the step decides, p = softmax(logits / temperature) at the step, w the effects below. Its effect is how
    much a node at this step changes the later targets through the token at i.

    Args:
        run: the run.
        step: that decides the tokens.
        later: the steps whose targets change.
        target: of the later steps.
        temperature: of p.
        row: of each decided position.
        position: on the canvas.
        tokens: candidates; the first is the run's own.
        effects: w: the change of the later targets, summed, when the candidate stands at the position (where tokens
            move, wherever the run has its own token) on every later canvas, up to the one on which the run itself
            has masked or revised it, and everything else is as in the run. Tokens that are no candidates count as
            the run's own.
        probability: of the candidates at the step.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: DenoisingRun = field(repr=False)
    step: int
    later: tuple[int, ...]
    target: Target
    temperature: float
    row: Int[Tensor, "entry"]
    position: Int[Tensor, "entry"]
    tokens: Int[Tensor, "entry candidate"]
    effects: Float[Tensor, "entry candidate"]
    probability: Float[Tensor, "entry candidate"]

    def __post_init__(self) -> None:
        check_shapes(self)

    def __repr__(self) -> str:
        steps = ", ".join(map(str, self.later))
        entries, candidates = self.tokens.shape
        known = float(self.probability.sum(-1).min()) if entries else 1.0
        return (
            f"TokenEffects({named(self.target)} at step {steps}, through {entries} tokens of step {self.step}; "
            f"{candidates} candidates each, at least {known:.3f} of the probability)"
        )

    def __call__(self, decisions: Decisions) -> Float[Tensor, "entry"]:
        """The expected change of the later targets, of every position that the step decides.

        Raises:
            ValueError: another step, or a position that the step does not decide.
        """
        if decisions.step != self.step:
            raise ValueError(f"{self!r} is no target of step {decisions.step}; give steps=[{self.step}]")
        places = torch.full(self.run.tokens.shape, -1)
        places[self.row, self.position] = torch.arange(len(self.row))
        entry = places[decisions.row.cpu() % len(places), decisions.position.cpu()]
        if bool((entry < 0).any()):
            raise ValueError(f"{self!r} is about the tokens that its step decides; leave explain out")
        logs = (decisions.logits / self.temperature).log_softmax(-1)
        chance = logs.gather(-1, self.tokens[entry].to(logs.device)).exp()
        return (chance * self.effects[entry].to(chance)).sum(-1)

    def table(self) -> pd.DataFrame:
        """One line per position and candidate, by absolute effect times probability."""
        text = TokenTexts(self.run.tokenizer)
        entry, candidate = self.tokens.ge(0).nonzero().unbind(-1)
        table = pd.DataFrame(
            {
                "batch": self.row[entry].tolist(),
                "position": self.position[entry].tolist(),
                "token": [text(one) for one in self.tokens[entry, candidate].tolist()],
                "own": (candidate == 0).tolist(),
                "probability": self.probability[entry, candidate].tolist(),
                "effect": self.effects[entry, candidate].tolist(),
            }
        )
        order = (table["probability"] * table["effect"].abs()).sort_values(ascending=False, kind="stable").index
        return of_whole_run(table.loc[order].reset_index(drop=True), self.run)


@checked_arguments(candidates=whole(least=1), batch=whole(least=1), temperature=POSITIVE)
@torch.no_grad()
@exclusive
def token_effects(
    model: Any,
    run: RunLike,
    step: int,
    later: Sequence[int] | None = None,
    *,
    target: Target = LOGIT_DIFFERENCE,
    candidates: int = 4,
    temperature: float = 1.0,
    batch: int = 32,
    progress: bool = False,
) -> TokenEffects:
    """Measure what each likely token of a step would change later: the path of an effect from step to step.

    Between two steps of a sampler of tokens lie only the tokens that the first one decides. They are discrete:
    the derivative of a later logit by an activation of an earlier step is 0 wherever no token changes, and patching
    that changes none has no effect later. Differentiable is the *expected* later target over the token that is
    drawn, sum_v p_i(v) f(v), with f(v) the later target with token v at position i. f is measured exactly, one
    forward pass for each candidate; p is what a node at the step changes.

    Held fixed: the other positions' tokens, of this step and those between, and the order in which positions are
    decided; positions of one step are changed one at a time (no interaction). So are the logits on which
    DiffusionGemma conditions a step, and the confidences on which DMax does: they are those of the run's own
    canvases (a changed token has none, and DMax sees its own embedding). Where the step decides one position
    and `later` is the next step, the effect is exactly that on the expectation of a run that samples at
    `temperature`; elsewhere it leaves out what goes on through tokens of the steps between.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`.
        step: whose decided tokens carry the effect, negative from the end.
        later: steps whose targets are summed; None for all after it that decide something.
        target: of the later steps.
        candidates: the likeliest tokens of every position, beside the run's own. What they leave out of the
            probability counts as the run's own token.
        temperature: of the softmax. The run's own may be 0, where every probability is 0 or 1 and no small change
            counts; 1 takes the model's probabilities.
        batch: candidates of a row in one forward pass.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a step that decides nothing, a later one that is not later, or one that explains nothing.
    """
    run = as_run(run)
    (at,) = chosen_indices("step", [step], run.steps, "token_effects: ")
    first = Setup.of(model, run, ALONE, target, [at], None, "noising", "token_effects")
    if later is None:
        # A step that only inserts or deletes masks (DreamOn) decides no token.
        deciding = first.wanted.any(-1).any(-1).nonzero().flatten().tolist()
        later = [one for one in deciding if one > at]
        if not later:
            raise ValueError(
                f"token_effects: no step after step {at} of the run's {run.steps} decides a token; give an earlier "
                "step, or a run of more steps"
            )
    after = chosen_indices("step", later, run.steps, "token_effects: ", argument="later")
    if after[0] <= at:
        raise ValueError(f"token_effects: later is {list(after)}; give steps after step {at}")
    last = Setup.of(model, run, ALONE, target, after, None, "noising", "token_effects")
    first.source = last.source = "zero"  # no other run: start makes one pass
    decided = first.passes(first.base).decisions(at)
    row, position = decided.row.cpu(), decided.position.cpu()
    chance = (decided.logits / temperature).softmax(-1)
    others = chance.scatter(-1, decided.token[:, None], -1.0).topk(min(candidates, chance.shape[-1] - 1))
    tokens = torch.cat([decided.token[:, None], others.indices], -1)
    starts = {one: BothSides(last).start(one, []) for one in after}
    conditioning = _conditioning(last, after)
    effects = torch.zeros(tokens.shape, dtype=torch.float64)
    jobs = [(entry, each) for entry in range(len(row)) for each in range(1, tokens.shape[1])]
    chunks = list(_chunks(jobs, row, batch))
    for chunk in tqdm(chunks, desc="candidates", unit="pass", disable=not progress):
        changed = [
            (slot, int(row[entry]), int(position[entry]), int(tokens[entry, each])) for slot, entry, each in chunk
        ]
        change = _changes(last, starts, at, changed, conditioning)
        for slot, entry, each in chunk:
            effects[entry, each] = change[slot, row[entry]]
    probability = chance.gather(-1, tokens).double().cpu()
    return TokenEffects(
        first.run, at, after, target, temperature, row, position, tokens.cpu(), effects, probability
    )  # fmt: skip


def _chunks(jobs: list[tuple[int, int]], row: Tensor, batch: int) -> "list[list[tuple[int, int, int]]]":
    """The (repetition, entry, candidate) of every pass: a repetition of the rows changes each row once at most."""
    of_row: dict[int, int] = {}
    chunks: dict[int, list[tuple[int, int, int]]] = {}
    for entry, each in jobs:
        count = of_row.get(int(row[entry]), 0)
        of_row[int(row[entry])] = count + 1
        chunks.setdefault(count // batch, []).append((count % batch, entry, each))
    return list(chunks.values())


def _conditioning(setup: Setup, steps: Sequence[int]) -> StoredConditioning | None:
    """The network that keeps what conditions these steps in the run itself; None of a model without that."""
    stored = setup.passes(setup.base).stored
    if not isinstance(stored.own_network, StoredConditioning):
        return None
    for step in steps:
        with stored.at(step):  # makes the passes of the steps before
            pass
    return stored.own_network


def _changes(
    setup: Setup,
    starts: dict[int, Start],
    step: int,
    changed: Sequence[tuple[int, int, int, int]],
    conditioning: StoredConditioning | None,
) -> Float[Tensor, "slot batch"]:
    """The later targets with (repetition, row, position, token) on the canvases after a step, minus the run's.

    Steps are conditioned on the logits of the run's own canvases, not of the changed ones.
    """
    times, rows = max(slot for slot, *_ in changed) + 1, len(setup.run.tokens)
    run = repeated(setup.run, times)
    canvases = run.canvases.clone()
    came = came_from(run, step)[1:]
    for slot, row, position, token in changed:
        later_on = canvases[step + 1 :, slot * rows + row]
        there = came[:, slot * rows + row] == position
        held = there & later_on.eq(later_on[0][there[0]])
        later_on[held & held.any(-1, keepdim=True).cumprod(0).bool()] = token
    wanted, tokens = setup.wanted.repeat(1, times, 1), setup.tokens.repeat(1, times, 1)
    passes = Passes(setup.model, Side(replace(run, canvases=canvases)), wanted, tokens)
    own = passes.stored.own_network
    if conditioning is not None and isinstance(own, StoredConditioning):
        own.take(conditioning, times)
    found = torch.zeros(times, rows, dtype=torch.float64)
    for later, start in starts.items():
        decisions = passes.decisions(later, others=start.others.repeat(times, 1))
        values = passes.per_row(decisions, setup.target).unflatten(0, (times, rows)).cpu()
        found += values.double() - start.base.double()
    return found
