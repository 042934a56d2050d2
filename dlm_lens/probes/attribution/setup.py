"""`Setup`: the arguments that every attribution shares, checked and resolved, and its contract."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import chosen_indices
from dlm_lens.attention import HookLike, attention_stacks
from dlm_lens.printable import shown
from dlm_lens.probes.attribution.contract import Contract, model_fields
from dlm_lens.probes.attribution.passes import FirstInput, Passes, Side, likeliest_others, other_side
from dlm_lens.probes.attribution.targets import Target, check_target, named
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import decisions_of, on_canvases

Direction = Literal["noising", "denoising"]
"""Which run is patched: "noising" puts the corrupted run's values into the clean one, "denoising" the reverse."""

MEANS = {"zero": "zero", "mean": "the mean over the row's open (decided) positions at the step"}

ALONE = object()
"""In the place of `corrupted` where no values are put in."""

KEPT = ", after the earlier pass whose keys and values it reads, which has the nodes"


@dataclass(eq=False)
class Setup:
    """The arguments of an attribution: the run that is patched, the values that are put in, target and steps.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: the clean run.
        base: the side that is patched.
        source: the side whose values are put in, or the name of an ablation.
        target: of every row.
        steps: of the run.
        wanted: the entries that the target sums over.
        tokens: what is there after each step, or in the end where positions are named.
        explained: which those are, in words.
        kept: nodes are those of the earlier pass whose keys and values a step reads from a cache.
    """

    model: Any
    run: DenoisingRun
    base: Side
    source: Side | str
    target: Target
    steps: tuple[int, ...]
    wanted: Bool[Tensor, "step batch position"]
    tokens: Int[Tensor, "step batch position"]
    explained: str
    kept: bool = False

    @classmethod
    def of(
        cls,
        model: Any,
        run: DenoisingRun,
        corrupted: Any,
        target: Target,
        steps: Sequence[int] | None,
        explain: Sequence[int] | None,
        direction: str,
        who: str,
        kept: bool = False,
    ) -> "Setup":
        """The setup of a call.

        Args:
            model: its argument.
            run: its argument.
            corrupted: its argument; `other_side`. `ALONE` where no values are put in.
            target: its argument.
            steps: its argument; None for all that decide something.
            explain: canvas positions that count where the step predicts them; None for those that it decides.
            direction: its argument.
            who: the function, for errors.
            kept: its argument.

        Raises:
            TypeError: neither a run nor a recording.
            ValueError: an argument that does not fit.
        """
        if direction not in get_args(Direction):
            raise ValueError(f"{who}: direction is {shown(direction)}; it must be 'noising' or 'denoising'")
        check_target(model, target, who)
        stored = StoredRun(model, run)
        run = stored.run
        clean = Side(run)
        if corrupted is None:  # the run patched with its own values has no effects, and no error shows it
            raise ValueError(
                f"{who}: corrupted is None; give a prompt with as many tokens, another run, hooks, or (for nodes) "
                "'zero' or 'mean'"
            )
        other = clean if corrupted is ALONE else other_side(model, run, corrupted)
        if isinstance(other, str) and direction == "denoising":
            raise ValueError(f"{who}: {shown(other)} is no run that clean values could be put into; take 'noising'")
        base, source = (clean, other) if direction == "noising" or isinstance(other, str) else (other, clean)
        wanted = _wanted(stored, explain, who)
        in_both = _in_both(model, run, other, wanted)
        shared, wanted = not torch.equal(in_both, wanted), in_both
        there = wanted.any(-1).any(-1).nonzero().flatten().tolist()
        chosen = tuple(there) if steps is None else chosen_indices("step", steps, run.steps, f"{who}: ")
        missing = [step for step in chosen if step not in there]
        if not there:
            raise ValueError(
                f"{who}: no step has anything to explain; give explain=, canvas positions that are open"
            )
        if missing:
            raise ValueError(
                f"{who}: step {missing[0]} has nothing to explain; these steps have: {there}. Give explain=, "
                "canvas positions that are open, for others"
            )
        # A sampler that revises may write another token later, also at a step that a part of a run leaves out.
        tokens = torch.where(*decisions_of(run), run.canvases[1:])
        explained = "the tokens that each step decides"
        if explain is not None:
            tokens, explained = (
                on_canvases(run, run.tokens, 0),
                f"the final tokens at canvas positions {', '.join(map(str, explain))}, where they are open",
            )
        if shared:
            explained += ", of those that are open in both runs"
        if kept:
            _check_kept(stored, chosen, (base, source), who)
        return cls(model, run, base, source, target, chosen, wanted, tokens, explained, kept)

    def passes(self, side: Side, times: int = 1) -> Passes:
        """Passes over the canvases of a side."""
        return Passes(self.model, side, self.wanted, self.tokens, times, self.kept)

    @property
    def values_from(self) -> Side:
        """The side whose activations are read for the values: that of the base where they are an ablation."""
        return self.base if isinstance(self.source, str) else self.source

    def contract(self, eligible: str, method: str) -> Contract:
        """The contract of the result."""
        fixed = ["weights", "canvases of every step", "no random draws"]
        if len(attention_stacks(self.model)) > 1:  # the encoder runs again in every pass
            fixed.append("the logits of the step before, on which a step is conditioned")
        elif self.run.settings.get("self_conditioning") == "confidence":
            fixed.append("the confidences of the step before, on which a step is conditioned")
        elif self.run.computed and not self.kept:
            fixed.append("keys and values in the cache")
        name = MEANS[self.source] if isinstance(self.source, str) else self.source.name
        return Contract(
            output=f"{self.explained} ({self.run.settings.get('sampler')} sampler)",
            score=f"{named(self.target)}, summed over the positions",
            eligible=eligible,
            process=f"one forward pass on the stored canvas of a step{KEPT * self.kept}; no canvas changes",
            fixed=tuple(fixed),
            base=self.base.name,
            baseline=name,
            method=method,
            steps=self.steps,
            **model_fields(self.model),
        )


class Start(NamedTuple):
    """A step before anything is put in.

    Args:
        base: the target of every row in the run that is patched.
        source: in the run that the values come from; NaN where they come from none.
        others: the likeliest other token at the entries, of the corrupted pass, or without one of the base's.
    """

    base: Float[Tensor, "batch"]
    source: Float[Tensor, "batch"]
    others: Int[Tensor, "batch position"]


class BothSides:
    """The passes of both sides.

    Args:
        setup: of the attribution.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.base = setup.passes(setup.base)
        self.ablation = setup.source if isinstance(setup.source, str) else None
        self.source = self.base if self.ablation is not None else setup.passes(setup.values_from)
        self.noising = setup.base.run is setup.run and not setup.base.hooks

    @torch.no_grad()
    def start(self, step: int, hooks: Sequence[HookLike], first: FirstInput | None = None) -> Start:
        """One pass of each side over a step's canvas, without graphs; `hooks` see that of the source."""
        alone = self.source is self.base
        plain = self.base.decisions(step, hooks, first=first) if alone else self.base.decisions(step)
        found = plain if alone else self.source.decisions(step, hooks, first=first)
        others = likeliest_others(found if self.noising else plain, self.setup.run.tokens.shape)
        known = others[found.row.cpu(), found.position.cpu()].to(found.token.device)
        values = [
            passes.per_row(replace(given, other=known), self.setup.target).cpu()
            for passes, given in ((self.base, plain), (self.source, found))
        ]
        return Start(values[0], torch.full_like(values[1], torch.nan) if alone else values[1], others)


def ablated(name: str, kept: Tensor, passes: Passes, step: int) -> Tensor:
    """The values of an ablation for activations [row, position, ...] of a step.

    Args:
        name: "zero" or "mean".
        kept: the base's activations, guidance's halves one after the other.
        passes: of the base.
        step: of the run.
    """
    if name == "zero":
        return torch.zeros_like(kept)
    seen = canvas_part(passes, step, kept.shape[1])
    canvas = passes.layout.canvas(kept.shape[1])
    run, found = passes.stored.run, kept.clone()
    # Not masks that the step does not see, whose states no prediction depends on.
    content = run.attention_mask & passes.stored.seen(step)
    # A sum over positions can exceed what float16 holds, and bfloat16 rounds it.
    part = found[:, canvas].unflatten(0, (passes.halves, -1)).to(torch.promote_types(kept.dtype, torch.float32))
    for open_ in (True, False):
        chosen = content & (run.masked[step] == open_)
        chosen = chosen[:, seen].to(kept.device)
        weight = chosen.to(part.dtype).reshape(1, *chosen.shape, *[1] * (kept.ndim - 2))
        mean = (part * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp(min=1)
        part = torch.where(weight.bool(), mean, part)
    found[:, canvas] = part.flatten(0, 1).to(kept.dtype)
    return found


def canvas_part(passes: Passes, step: int, positions: int) -> slice:
    """The canvas positions that an activation of so many network positions has at a step.

    Raises:
        ValueError: neither all that the step sees nor its span.
    """
    count = positions - passes.layout.count
    stored = passes.stored
    for first in (stored.first(step), 0, stored.run.spans[step][0]):
        if first + count == stored.length(step):
            return slice(first, first + count)
    span = stored.run.computed[step] if stored.run.computed else None
    if span is not None and span[1] - span[0] == count:
        return slice(*span)
    raise ValueError(f"the activation has {count} canvas positions and the step sees {stored.length(step)}")


def _check_kept(stored: StoredRun, steps: Sequence[int], sides: Sequence[Side | str], who: str) -> None:
    """Raise unless every step reads keys of an earlier pass, on which nothing but the nodes acts.

    Raises:
        ValueError: a run without an approximate cache, a step that computes everything, or hooks or means.
    """
    there = stored.reads_kept
    if not there:
        raise ValueError(
            f"{who}: kept=True, and no step of this run reads keys and values of an earlier one; denoise with "
            "cache='prefix' or 'dual', or take token_effects for the path through tokens"
        )
    if missing := [step for step in steps if step not in there]:
        computes = "computes the whole canvas"
        if stored.run.computed[missing[0]] is not None:
            computes = "reads keys of several passes"
        raise ValueError(f"{who}: step {missing[0]} {computes}; these read kept keys of one: {list(there)}")
    if any(side == "mean" or (isinstance(side, Side) and side.hooks) for side in sides):
        raise ValueError(f"{who}: kept=True takes a prompt, a run or 'zero' as corrupted, no hooks and no 'mean'")


def _in_both(
    model: Any, run: DenoisingRun, other: Side | str, wanted: Bool[Tensor, "step batch position"]
) -> Bool[Tensor, "step batch position"]:
    """The entries that the other run predicts too: what it has decided by then has no logits there."""
    if isinstance(other, str) or other.run is run:
        return wanted
    stored = StoredRun(model, other.run, warn=False)
    return wanted & torch.stack([stored.predicted(step).cpu() for step in range(run.steps)])


def _wanted(stored: StoredRun, explain: Sequence[int] | None, who: str) -> Bool[Tensor, "step batch position"]:
    """The entries that the target sums over."""
    run = stored.run
    predicted = torch.stack([stored.predicted(step).cpu() for step in range(run.steps)])
    if explain is None:
        return predicted & decisions_of(run)[0]
    places = chosen_indices("position", explain, run.tokens.shape[1], f"{who}: ", argument="explain")
    named_ = torch.zeros(run.tokens.shape[1], dtype=torch.bool)
    named_[list(places)] = True
    # A position that the result leaves open has no final token.
    return predicted & on_canvases(run, named_ & ~run.open[-1], False)
