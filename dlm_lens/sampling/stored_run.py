"""`StoredCanvases` and `StoredRun`: the network of a finished run, for passes over the canvases of its steps."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.adapters import family_of
from dlm_lens.attention import HookLike, computed_span
from dlm_lens.placement import input_device
from dlm_lens.sampling.algorithm_registry import algorithms
from dlm_lens.sampling.cached_network import CachedLogits
from dlm_lens.sampling.denoising_run import DenoisingRun, Proposal, StepPlan
from dlm_lens.sampling.network import Network
from dlm_lens.sampling.observers import HookRunner, RunObserver
from dlm_lens.sampling.samplers.base import Sampler
from dlm_lens.sampling.settings import check_model
from dlm_lens.sampling.token_text import tokenizer_of

logger = logging.getLogger(__name__)


class StoredCanvases:
    """The canvases of a finished run, and the network's forward pass over the canvas of a step.

    Args:
        model: with hook points, the run's.
        run: from `denoise`, or a recording's; without a tokenizer of its own it takes the model's.
        hooks: those under which the passes are made. Where they are not those of the run a warning says so; None
            if another `StoredCanvases` of the run has said it.

    Raises:
        TypeError: the run is not a `DenoisingRun`.
        ValueError: a model without token embeddings, or a run with token ids that the model does not embed.
    """

    def __init__(self, model: Any, run: DenoisingRun, *, hooks: Sequence[HookLike] | None = ()) -> None:
        if not isinstance(run, DenoisingRun):
            raise TypeError(
                f"the run is a {type(run).__name__}; give the DenoisingRun that dlm_lens.denoise returned"
            )
        if not hasattr(model, "get_input_embeddings"):
            raise ValueError(f"{type(model).__name__} has no hook points; load it with dlm_lens.load")
        embedded, highest = model.get_input_embeddings().weight.shape[0], int(run.canvases.max())
        if highest >= embedded:
            raise ValueError(
                f"the run has token id {highest}, but the model embeds {embedded}; is it another model's?"
            )
        _warn_of_hooks(run, hooks)
        self.model, self.run = model, replace(run, tokenizer=tokenizer_of(run, model))
        self.device = input_device(model)
        self.content = run.attention_mask.to(self.device)
        self.sampler = sampler_of(run)
        blocks = run.attention_blocks
        self.sampler.block_layout = None if blocks is None else blocks.to(self.device)
        plans = [self.plan(step) for step in range(run.steps)]
        self._own = self.sampler.rerun_network(model, self.content, self.run, plans)
        self._passes: Network | None = self._own
        self._canvas = computed_span(model, run.canvases.shape[-1]) is not None
        if self._own is None and run.computed and not self._canvas:
            self._passes = CachedLogits(model, self._network_content)
        self._kept: int | None = None

    @property
    def autoregressive(self) -> bool:
        """Whether the run is AR decoding, whose network sees prefixes."""
        return self.sampler.autoregressive

    def length(self, step: int) -> int:
        """Canvas positions that the network sees at a step: all, or in an AR run the written prefix."""
        run = self.run
        if not self.autoregressive:
            return run.spans[step][1] if self.sampler.grows else int(run.canvases.shape[-1])
        return int((run.attention_mask & ~run.masked[step]).any(0).nonzero().amax()) + 1

    def seen(self, step: int) -> Bool[Tensor, "batch position"]:
        """The positions that a row's predictions of a step may depend on: with blocks, up to the end of its own."""
        run, positions = self.run, self.run.canvases.shape[-1]
        before = (torch.arange(positions) < self.length(step)).expand(run.attention_mask.shape)
        blocks = run.attention_blocks
        return before if blocks is None else before & blocks.until(run.spans[step], positions)

    def computes(self, step: int) -> Bool[Tensor, "batch position"]:
        """The positions among `seen` whose states a step computes; with a cache those of its span."""
        span, found = self._computed(step), self.seen(step)
        if span is None:
            return found
        where = torch.arange(found.shape[1])
        return found & (where >= span[0]) & (where < span[1])

    def first(self, step: int) -> int:
        """The position of a pass's first query: 0, or where a cached step's span begins."""
        span = self._computed(step)
        return 0 if span is None else span[0]

    def plan(self, step: int) -> StepPlan:
        """The plan that the run had for a step."""
        run = self.run
        seen = self.length(step) if self.autoregressive or self.sampler.grows else None
        return StepPlan(
            step, run.steps, run.blocks[step], run.spans[step], run.steps - step, seen, self._computed(step)
        )

    def _computed(self, step: int) -> tuple[int, int] | None:
        return self.run.computed[step] if self.run.computed else None

    def forward(self, step: int) -> Any:
        """The network without its head on the canvas of a step; in a guided run the conditional half alone.

        A step with a cache finds the keys of the pass that `prepare` made.
        """
        self.sampler.at(self.plan(step))
        canvas = self.run.canvases[step, :, : self.length(step)].to(self.device)
        if self._passes is not None:
            self._passes.enter(self.plan(step))
            self._kept = step if self._computed(step) is None else self._kept
            return self._passes.forward(canvas)
        content = self._network_content[:, : canvas.shape[1]]
        inputs = self.sampler.inputs(self.model, content, canvas, self.run.prompt_length)
        if self._canvas:  # a forward pass of a model with an encoder (`record_forward`)
            inputs = {**inputs, "canvas_start": self.first(step)}
        return self.model.get_decoder()(input_ids=canvas, **inputs)

    @property
    def _network_content(self) -> Bool[Tensor, "batch position"]:
        """What the network takes for content: a reference's quirk includes the padding."""
        return torch.ones_like(self.content) if self.sampler.unpadded else self.content

    def start(self, observer: RunObserver) -> None:
        """Begin the run for an observer."""
        observer.start(self.sampler, self.content, self.run.masked[0].to(self.device))

    def prepare(self, step: int, observer: RunObserver | None = None) -> None:
        """Make the pass whose keys a step of a cached run keeps, unless the last whole pass was that one.

        Args:
            step: of the run.
            observer: sees that pass as a step.

        Raises:
            ValueError: the run does not hold that step.
        """
        if self._own is not None or self._passes is None or self._computed(step) is None:
            return
        whole = [i for i, span in enumerate(self.run.computed[:step]) if span is None]
        if not whole:
            raise ValueError(
                f"step {step} attends to keys of an earlier step, which this part of the run does not hold; "
                "give the whole run"
            )
        if self._kept != whole[-1]:
            if observer is not None:
                self.enter(observer, whole[-1])
            self._pass(whole[-1])

    def _pass(self, step: int) -> None:
        """A pass of a step for its keys alone."""
        self.forward(step)

    def enter(self, observer: RunObserver, step: int) -> None:
        """Begin a step for an observer; of a cached run after a pass of the step whose keys it keeps.

        Raises:
            ValueError: as `prepare`.
        """
        self.prepare(step, observer)
        self.sampler.at(self.plan(step))
        canvas, masked = self.run.canvases[step], self.run.masked[step]
        observer.step(self.plan(step), canvas.to(self.device), masked.to(self.device))

    def leave(self, observer: RunObserver, step: int) -> None:
        """End a step for an observer, as it ended in the run."""
        run = self.run
        parts = (run.canvases[step + 1], run.proposals[step], run.confidence[step], run.unmasked[step])
        canvas, tokens, confidence, unmasked = (part.to(self.device) for part in parts)
        observer.finish(self.plan(step), canvas, Proposal(tokens, confidence), unmasked)


def _warn_of_hooks(run: DenoisingRun, hooks: Sequence[HookLike] | None) -> None:
    """Warn where passes over a run's canvases are made under other hooks than the run."""
    had = tuple(run.settings.get("hooks", ()))
    if hooks is not None and had and had != tuple(map(repr, hooks)):
        logger.warning(
            "the run was made under the hooks [%s]; this computes the network on its canvases under [%s]",
            ", ".join(had),
            ", ".join(map(repr, hooks)),
        )


class StoredRun(StoredCanvases):
    """Runs a model again over the canvases of a run, with its guidance, padding and logit shift.

    The canvases stay fixed. A pass goes over all rows of a step; an AR step sees the prefix and predicts one
    position. A step of a run with a cache computes its span and sees the keys that an earlier step left, which is
    run again where it was not the last whole pass. Passes with hooks and passes without take a `StoredRun` each, so
    that each keeps its own keys.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, or a recording's; without a tokenizer of its own it takes the model's.
        decided: whether the logits are also about the decided positions of the answer that a step may rewrite:
            those of its block, in rows that had open ones there when it began. For samplers that edit.
        hooks: as for `StoredCanvases`.

    Raises:
        TypeError: the run is not a `DenoisingRun`.
        ValueError: a run of another model, as far as sampler and vocabulary tell (it does not name its model), or
            of a sampler whose logits cannot be computed again; `decided` where the sampler does not edit.
    """

    def __init__(
        self, model: Any, run: DenoisingRun, *, decided: bool = False, hooks: Sequence[HookLike] | None = ()
    ) -> None:
        if isinstance(run, DenoisingRun):
            check_model(model)
        super().__init__(model, run, hooks=hooks)
        name = str(run.settings.get("sampler"))
        if name not in algorithms():
            raise ValueError(f"a run of the sampler {name!r} cannot be run again; take one of dlm_lens.denoise")
        own = family_of(model.config.model_type).sampler_of(model.config)
        if name != own:
            raise ValueError(
                f"the run has the sampler {name!r} and the model samples with {own!r}: is it another model's?"
            )
        if decided and not self.sampler.edits:
            raise ValueError(
                f"decided=True: the sampler {name!r} predicts open positions alone and rewrites none; leave it out"
            )
        self.decided = decided
        masked = self.run.masked[0].to(self.device)
        first = self.run.canvases[0].to(self.device)
        self._network = self._own or self.sampler.network(model, self.content, masked, run.prompt_length, first)

    @property
    def halves(self) -> int:
        """How often the network sees every row: twice with guidance."""
        return self.sampler.halves

    def predicted(self, step: int) -> Bool[Tensor, "batch position"]:
        """The positions that the step's logits are about: every masked one, in an AR run the next one.

        A row that has ended has none. With `decided` also those that the step may rewrite.
        """
        if not self.autoregressive:
            masked = self.run.masked[step].to(self.device)
            found = masked & self.sampler.reach(masked, self.plan(step))
            return found | self._rewritable(step).to(self.device) if self.decided else found
        predicted = torch.zeros_like(self.content)
        predicted[:, self.length(step)] = (self.run.row_steps > step).to(self.device)
        return predicted

    def _rewritable(self, step: int) -> Bool[Tensor, "batch position"]:
        """Decided positions of the answer in the step's block, in rows that had open ones when it began."""
        run, first = self.run, self.run.blocks.index(self.run.blocks[step])
        begun = (run.masked[first] & run.in_block[first]).any(-1, keepdim=True)
        return run.masked[0] & run.in_block[step] & ~run.masked[step] & begun

    def states(self, step: int) -> Float[Tensor, "half predicted d_model"]:
        """A forward pass over the canvas of a step: the head's inputs for the predicted positions, row by row."""
        self.prepare(step)
        plan = self.plan(step)
        self.sampler.at(plan)
        self._network.enter(plan)
        canvas = self.run.canvases[step].to(self.device)[:, : self.length(step)]
        self._kept = step if plan.computed is None else self._kept
        return self._network.states(canvas, self.predicted(step))

    def _pass(self, step: int) -> None:
        """A pass of a step for its keys alone."""
        self.states(step)

    @property
    def reads_kept(self) -> tuple[int, ...]:
        """The steps that read keys and values of an earlier whole pass from an approximate cache."""
        if not isinstance(self._network, CachedLogits):
            return ()
        return tuple(step for step, span in enumerate(self.run.computed) if span is not None)

    def keep_again(self, step: int) -> None:
        """Run the whole pass again whose keys and values a step reads, and keep their graph.

        Hooks on the model during the call act on that pass. The next other step makes a pass of its own.
        """
        assert isinstance(self._network, CachedLogits)
        self._kept = None
        with self._network.keeping_graph():
            self.prepare(step)

    def forget_kept(self) -> None:
        """Let the next step of a cached run make its keys and values anew."""
        self._kept = None

    def enter(self, observer: RunObserver, step: int) -> None:
        """Begin a step for an observer, whose passes without hooks are of the same step."""
        self.prepare(step, observer)
        self._network.enter(self.plan(step))
        super().enter(observer, step)

    def logits(self, states: Float[Tensor, "half predicted d_model"]) -> Float[Tensor, "predicted d_vocab"]:
        """Logits of (some of) the states, guided as in the run."""
        return self._network.head(states)

    def runner(self, hooks: Sequence[HookLike]) -> HookRunner:
        """The observer that runs `hooks` over these steps: `with runner: enter(runner, step); states(step)`."""
        runner = HookRunner(self.model, hooks, self._network.forward)
        self.start(runner)
        return runner


def sampler_of(run: DenoisingRun) -> Sampler:
    """The sampler of a finished run for passes over its canvases: its network, but no schedule and no proposals."""
    algorithm = algorithms().get(str(run.settings.get("sampler")))
    if algorithm is None:
        return Sampler.for_rerun(run.settings)
    sampler: Sampler = algorithm.sampler.for_rerun(
        {"cfg_scale": getattr(algorithm.settings, "cfg_scale", 0.0)} | dict(run.settings)
    )
    return sampler
