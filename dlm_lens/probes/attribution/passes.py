"""The two runs of an attribution, and passes over their canvases with hooks, gradients and repeated rows."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import (
    Hook,
    HookLike,
    PointContext,
    SinkLayout,
    Site,
    attach_hooks,
    attention_blocks,
    checked,
    is_hook,
)
from dlm_lens.probes.attribution.targets import Decisions, Target
from dlm_lens.probes.unembedding import positions_at_once, without_mask
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import at_places, came_from
from dlm_lens.sampling.prompts import read_prompts
from dlm_lens.sampling.run_like import as_run, is_run
from dlm_lens.sampling.run_rows import first_places


@dataclass(frozen=True)
class Side:
    """One of the two runs of an attribution: canvases, and hooks on the passes over them.

    Args:
        run: the canvases.
        hooks: on every pass.
        name: as a contract says it.
    """

    run: DenoisingRun = field(repr=False)
    hooks: tuple[HookLike, ...] = ()
    name: str = "the run's own canvases"


ABLATIONS = ("zero", "mean")
"""Values that need no second run."""


def other_side(model: Any, run: DenoisingRun, corrupted: Any) -> Side | str:
    """The corrupted run that an argument describes, or the name of an ablation.

    Args:
        model: the run's.
        run: the clean run.
        corrupted: "zero" or "mean"; a run or recording with canvases of the same shape; hooks; or a prompt with as
            many tokens in every row, which replaces that of the run on every canvas, but for what the run fills in.

    Raises:
        ValueError: a run of another shape, or a prompt of another length.
    """
    if isinstance(corrupted, str) and corrupted in ABLATIONS:
        return corrupted
    if is_run(corrupted):
        corrupted = as_run(corrupted)
        same = corrupted.canvases.shape == run.canvases.shape
        if not same or not torch.equal(corrupted.attention_mask, run.attention_mask):
            raise ValueError(
                f"the corrupted run has canvases {list(corrupted.canvases.shape)} and the clean one "
                f"{list(run.canvases.shape)}; both need prompts of one length in every row, and as many steps"
            )
        return Side(corrupted, name="another run's canvases")
    if is_hook(corrupted) or (isinstance(corrupted, Sequence) and corrupted and all(map(is_hook, corrupted))):
        hooks = checked([corrupted] if is_hook(corrupted) else corrupted)
        return Side(run, hooks, f"the run's own canvases under {', '.join(map(repr, hooks))}")
    return Side(with_prompt(model, run, corrupted), name="the run's canvases with another prompt")


def with_prompt(model: Any, run: DenoisingRun, prompt: Any) -> DenoisingRun:
    """A run whose canvases hold another prompt, and else the same tokens; its [MASK]s are filled in as in the run.

    Raises:
        ValueError: a row of the prompt has another number of tokens, there are more or fewer rows, or a token is
            where the run fills in a [MASK].
    """
    given = read_prompts(model, prompt)
    ids, content = given.ids.cpu(), given.attention_mask.cpu()
    old = first_places(run)
    if len(ids) == 1 and len(old) > 1:
        ids, content = ids.expand(len(old), -1), content.expand(len(old), -1)
    if len(ids) != len(old) or not torch.equal(content.sum(-1), old.sum(-1)):
        raise ValueError(
            f"the corrupted prompt has {content.sum(-1).tolist()} tokens a row and the run's "
            f"{old.sum(-1).tolist()}; give prompts with as many tokens, row by row"
        )
    prompts = run.canvases[0].clone()
    prompts[old] = ids[content]
    filled = old & run.answer
    wrong = filled & (prompts != getattr(model.config, "mask_token_id", None))
    if bool(wrong.any()):
        row, position = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"the corrupted prompt has token {int(prompts[row, position])} at canvas position {position} of row "
            f"{row}, which the run fills in; give [MASK] there"
        )
    changed = old & ~filled
    if run.origins is None:
        return replace(run, canvases=torch.where(changed, prompts, run.canvases))
    # A token between two gaps moves.
    came = came_from(run, 0)
    new, tokens = (at_places(each.expand(came.shape), came, 0) for each in (changed, prompts))
    return replace(run, canvases=torch.where(new, tokens, run.canvases))


def repeated(run: DenoisingRun, times: int) -> DenoisingRun:
    """The run with its rows `times` times one after the other."""
    if times == 1:
        return run
    names = ("canvases", "masked", "proposals", "confidence", "unmasked", "revised")
    parts: dict[str, Any] = {name: getattr(run, name).repeat(1, times, 1) for name in names}
    ran = None if run.rows_ran is None else run.rows_ran * times
    starts = None if run.joined_at is None else run.joined_at * times
    planned = None if run.rows_planned is None else run.rows_planned * times
    place = run.part and replace(
        run.part, answer=run.part.answer.repeat(times, 1), rows_ran=run.part.rows_ran and run.part.rows_ran * times
    )
    return replace(
        run,
        attention_mask=run.attention_mask.repeat(times, 1),
        origins=None if run.origins is None else run.origins.repeat(1, times, 1),
        rows_ran=ran,
        joined_at=starts,
        rows_planned=planned,
        part=place,
        **parts,
    )


@dataclass(eq=False)
class Keep(Hook):
    """A hook that changes nothing and keeps the activation at its site, the very tensor.

    Args:
        site: where.
        layers: in which layers.
        found: layer -> the activation in the last pass.
    """

    site: Site
    layers: tuple[int, ...] | None = None
    found: dict[int, Tensor] = field(default_factory=dict)

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Keep the activation."""
        self.found[hook.layer()] = tensor
        return tensor


@dataclass(eq=False)
class FirstInput:
    """The residual stream before the first layer: read, and replaced or made the beginning of the graph.

    Args:
        given: the stream of the last pass.
        put: replaces it; None to leave it as it is.
        leaf: whether gradients end at it.
    """

    given: Tensor = field(default_factory=lambda: torch.empty(0))
    put: Tensor | None = None
    leaf: bool = False

    def __call__(self, module: Any, args: Any, kwargs: Any) -> Any:
        """As a forward pre-hook of the first layer."""
        stream = args[0] if args else kwargs["hidden_states"]
        if self.put is not None:
            stream = self.put
        if self.leaf:
            stream = stream.detach().requires_grad_()
        self.given = stream
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})


@contextmanager
def at_first_input(model: Any, first: FirstInput) -> Iterator[None]:
    """Attach `first` to the passes of the block."""
    handle = attention_blocks(model)[0].register_forward_pre_hook(first, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class Passes:
    """Passes over the canvases of one side, with its rows once or several times.

    Args:
        model: from `dlm_lens.load`, the run's.
        side: canvases and hooks.
        wanted: the positions that count at every step, of the rows once.
        tokens: at the entries of every step, the token that is explained.
        times: how often every row is there.
        kept: hooks and gradients are those of the earlier pass whose keys and values the step reads from a cache.
    """

    def __init__(
        self,
        model: Any,
        side: Side,
        wanted: Bool[Tensor, "step batch position"],
        tokens: Int[Tensor, "step batch position"],
        times: int = 1,
        kept: bool = False,
    ) -> None:
        self.model, self.side, self.times, self.rows, self.kept = model, side, times, tokens.shape[1], kept
        steps = wanted.flatten(1).any(1).nonzero().flatten().tolist()
        own = repeated(side.run, times)
        self.stored = StoredRun(model, own, hooks=side.hooks, steps=steps, carried="nothing", warn=False)
        self.wanted, self.tokens = wanted.repeat(1, times, 1), tokens.repeat(1, times, 1)
        self.layout = SinkLayout.of(model)

    @property
    def halves(self) -> int:
        """How often the network sees every row: twice with guidance."""
        return self.stored.halves

    def decisions(
        self,
        step: int,
        hooks: Sequence[HookLike] = (),
        *,
        first: FirstInput | None = None,
        others: Int[Tensor, "batch position"] | None = None,
        grad: bool = False,
    ) -> Decisions:
        """One pass over a step's canvas: the logits at the positions that count.

        Args:
            step: of the run.
            hooks: further ones; they act after those of the side.
            first: of the first layer's input.
            others: the likeliest other token of the other side, of the rows once.
            grad: keep the graph.
        """
        if self.kept:
            return self._after_kept(step, hooks, first, others, grad)
        with ExitStack() as stack:
            with torch.no_grad():
                stack.enter_context(self.stored.at(step))
            stack.enter_context(attach_hooks(self.model, *hooks))
            if first is not None:
                stack.enter_context(at_first_input(self.model, first))
            with torch.set_grad_enabled(grad):
                states = self.stored.states(step)
                if len(hooks) or first is not None:
                    self.stored.discard(step)
                return self._decisions(step, states, others)

    def _after_kept(
        self, step: int, hooks: Sequence[HookLike], first: FirstInput | None, others: Tensor | None, grad: bool
    ) -> Decisions:
        """A pass of a step without hooks, after the pass with hooks whose keys and values it reads."""
        with torch.set_grad_enabled(grad):
            with ExitStack() as stack:
                stack.enter_context(attach_hooks(self.model, *hooks))
                if first is not None:
                    stack.enter_context(at_first_input(self.model, first))
                self.stored.keep_again(step)
            try:
                return self._decisions(step, self.stored.states(step), others)
            finally:
                self.stored.forget_kept()

    def _decisions(self, step: int, states: Tensor, others: Tensor | None) -> Decisions:
        predicted = self.stored.predicted(step)
        if states.shape[1] != int(predicted.sum()):  # an AR pass has every row, also those that have ended
            states = states[:, predicted.any(-1)]
        wanted = self.wanted[step].to(predicted.device) & predicted
        row, position = wanted.nonzero().unbind(-1)
        vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        kept = states[:, wanted[predicted]].split(positions_at_once(self.model), 1) if len(row) else ()
        parts = [self.stored.logits(part) for part in kept]
        logits = torch.cat(parts) if parts else states.new_zeros(0, vocabulary)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = without_mask(self.model, logits)
        where = row.cpu(), position.cpu()
        token = self.tokens[step][where].to(logits.device)
        other = (
            torch.full_like(token, -1) if others is None else others.repeat(self.times, 1)[where].to(token.device)
        )
        return Decisions(step, logits, row.to(logits.device), position.to(logits.device), token, other)

    def per_row(self, decisions: Decisions, target: Target) -> Float[Tensor, "row"]:
        """The target of every row, repeated ones included: the sum over its entries.

        Raises:
            ValueError: the target returned no number per entry.
        """
        values: Any = target(decisions) if len(decisions.row) else decisions.logits.new_zeros(0)
        if not isinstance(values, Tensor) or values.shape != decisions.row.shape:
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"the target returned {shape}; it must return one number for each of {len(decisions.row)} entries"
            )
        return values.new_zeros(self.rows * self.times).index_add(0, decisions.row, values)


def likeliest_others(decisions: Decisions, shape: Sequence[int]) -> Int[Tensor, "batch position"]:
    """At the entries, the likeliest token other than the run's own; -1 elsewhere."""
    found = torch.full(tuple(shape), -1)
    if len(decisions.row):
        logits = decisions.logits.scatter(-1, decisions.token[:, None], -torch.inf)
        found[decisions.row.cpu(), decisions.position.cpu()] = logits.argmax(-1).cpu()
    return found
