"""`StoredCanvases` and `StoredRun`: the network of a finished run, for passes over the canvases of its steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal
from weakref import ref

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import takes_noise_level
from dlm_lens.attention import HookLike, attention_stack, checked, computed_span, decoder_of
from dlm_lens.placement import canvas_device, on_input_device
from dlm_lens.sampling.algorithm_registry import algorithm_of, algorithms
from dlm_lens.sampling.cached_network import CachedLogits
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.network import Network, run_forward
from dlm_lens.sampling.observers import HookRunner, RunObserver
from dlm_lens.sampling.run_checks import check_steps, warn_of_hooks, warn_of_model
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.run_rows import own_canvas, place_in_plan, with_one_plan
from dlm_lens.sampling.samplers.base import FirstCanvas, rerun_sampler
from dlm_lens.sampling.settings import check_model
from dlm_lens.sampling.token_text import tokenizer_of

Carried = Literal["all", "keys", "nothing"]


class StoredCanvases:
    """The canvases of a finished run, and the network's forward pass over the canvas of a step.

    Readers of a pass are attached inside `with stored.at(step)`. If a hook depends on what earlier steps left
    (`Hook.remembers`, or a hook of an encoder), the steps before run first. What a step leaves for the network
    itself (keys in a cache, the logits that condition the next step) is `carried` on from passes with the hooks.

    Args:
        model: with hook points, the run's.
        run: from `denoise`, or a recording's; without a tokenizer of its own it takes the model's.
        hooks: those under which the passes are made.
        steps: over whose canvases, by their places in `run`, for `Hook.check_steps`; None for all.
        carried: what a step finds of what earlier steps left under the hooks: "all", as in a run with them; the
            "keys" in an approximate cache, but logits (on which DiffusionGemma's steps are conditioned) of passes
            without hooks; "nothing": what passes without hooks leave.
        warn: whether a warning says that model or hooks are not those of the run.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a model without token embeddings, a run with token ids that the model does not embed, or an
            object that is no hook, acts in an encoder that the model lacks or refuses one of the steps; rows of
            several plans.
    """

    def __init__(
        self,
        model: Any,
        run: RunLike,
        *,
        hooks: Sequence[HookLike] = (),
        steps: Sequence[int] | None = None,
        carried: Carried = "all",
        warn: bool = True,
    ) -> None:
        run = as_run(run)
        if not hasattr(model, "get_input_embeddings"):
            raise ValueError(f"{type(model).__name__} has no hook points; load it with dlm_lens.load")
        embedded, highest = model.get_input_embeddings().weight.shape[0], int(run.canvases.max())
        if highest >= embedded:
            raise ValueError(
                f"the run has token id {highest}, but the model embeds {embedded}; is it another model's?"
            )
        likelihood = (run.settings.get("sampler"), run.settings.get("method")) == ("likelihood", "mc")
        if likelihood and takes_noise_level(model):
            raise ValueError(
                f"a recorded mc likelihood does not hold the noise level that {type(model).__name__} was given: "
                "record it again, with all reducers that you need"
            )
        self.hooks, self.carried = checked(hooks), carried
        for hook in self.hooks:
            attention_stack(model, hook.stack)
        if warn:
            warn_of_model(run, model)
            warn_of_hooks(run, self.hooks)
        self.model, self.run = model, replace(run, tokenizer=tokenizer_of(run, model))
        self._progress, self.device = run.progress, canvas_device(model)
        self.content = run.attention_mask.to(self.device)
        self.sampler = rerun_sampler(with_one_plan(run, self.hooks).settings)
        self.sampler.attention = run.attention.to(self.device)
        self.sampler.own_canvas = own_canvas(run).to(self.device)
        self._plans = [self._plan_in_run(step) for step in range(run.steps)]
        chosen = [self._plans[step].index for step in (range(run.steps) if steps is None else steps)]
        check_steps(self.hooks, chosen, self._plans[0].total if self._plans else 0)
        given = (model, self.content, run.prompt_length, self._plans, run.block_numbers)
        self.own_network = self.sampler.rerun_network(*given)
        self._canvas = computed_span(model, run.canvases.shape[-1]) is not None
        self._network: Network | None = self.own_network
        if self.own_network is None and run.computed and not self._canvas:
            self._network = self.sampler.cached_network(model, self.content)
        self._at: int | None = None
        """The step that was entered."""
        self._attached = False
        self._done = 0
        """How many steps the hooks remember."""
        self._kept: tuple[int, ...] = ()
        """The steps whose keys the cache holds, in the order of their passes."""
        self._fresh = False
        """Whether the last pass left something for later steps that was not there before."""

    @property
    def halves(self) -> int:
        """How often a pass sees every row: once; in a guided run the conditional half."""
        return 1

    @property
    def autoregressive(self) -> bool:
        """Whether the run is AR decoding, whose network sees prefixes."""
        return self.sampler.autoregressive

    @property
    def sigma(self) -> float | None:
        """The noise level of the step that was entered last, where the network is given it; else None."""
        return self.sampler.sigma if takes_noise_level(self.model) else None

    def length(self, step: int) -> int:
        """Canvas positions that the network sees at a step: all, or in an AR run the written prefix."""
        run = self.run
        if not self.autoregressive:
            return run.spans[step][1] if self.sampler.grows else int(run.canvases.shape[-1])
        return int((run.attention_mask & ~run.masked[step]).any(0).nonzero().amax()) + 1

    def seen(self, step: int) -> Bool[Tensor, "batch position"]:
        """The positions that a row's predictions of a step may depend on: with blocks, up to the end of its own."""
        run, positions = self.run, self.run.canvases.shape[-1]
        before = (torch.arange(positions) < self.length(step)) & (run.seen_content[step] | ~run.attention_mask)
        own = run.attention.until_block(run.attention_mask, run.masked[step], run.spans[step])
        return before if own is None else before & own

    def computes(self, step: int) -> Bool[Tensor, "batch position"]:
        """The positions among `seen` whose states a step computes; with a cache those of its span.

        Those of a row that is over are computed beside the others, but are none of its run.
        """
        span, found = self._computed(step), self.seen(step) & self.run.running[step, :, None]
        if span is None:
            return found
        where = torch.arange(found.shape[1])
        return found & (where >= span[0]) & (where < span[1])

    def first(self, step: int) -> int:
        """The position of a pass's first query: 0, or where a cached step's span begins."""
        span = self._computed(step)
        return 0 if span is None else span[0]

    def plan(self, step: int) -> StepPlan:
        """The plan that the run had for a step; in a part of a run steps count from 0, as in its canvases."""
        run = self.run
        seen = self.length(step) if self.autoregressive or self.sampler.grows else None
        total, left = max(run.steps, run.planned or 0), run.steps - step
        return StepPlan(step, total, run.blocks[step], run.spans[step], left, seen, self._computed(step))

    def _plan_in_run(self, step: int) -> StepPlan:
        """The plan of a step, which a part of a run counts as the whole run: for the network and for hooks."""
        index, total = place_in_plan(self.run, step)
        plan = replace(self.plan(step), index=index, total=total)
        return self.sampler.planned_again(plan, self.run.block_numbers[step])

    def _computed(self, step: int) -> tuple[int, int] | None:
        return self.run.computed[step] if self.run.computed else None

    def forward(self, step: int) -> Any:
        """The network without its head on the canvas of a step; in a guided run the conditional half alone."""
        with self._entered(step) as canvas:
            return self._own_pass(canvas)

    def _seen(self, step: int) -> Int[Tensor, "batch seen"]:
        """What a step sees of its canvas."""
        return self.run.canvases[step, :, : self.length(step)].to(self.device)

    def _own_pass(self, canvas: Int[Tensor, "batch seen"]) -> Any:
        """A pass of the present step over what it sees of a canvas."""
        return self._decode(canvas) if self._network is None else run_forward(self._network, canvas)

    def _clean_pass(self, canvas: Int[Tensor, "batch seen"]) -> Any:
        """The same pass for statistics without hooks, whose keys in a cache no hook has edited."""
        if self._network is None:
            return self._decode(canvas)
        # Where nothing is carried, the keys that the run's own passes find are such keys.
        plain = self.own_network is None and not self._carries
        return run_forward(self._network, canvas) if plain else self._network.forward(canvas)

    def _decode(self, canvas: Int[Tensor, "batch seen"]) -> Any:
        content = self.sampler.network_content(self.content)[:, : canvas.shape[1]]
        inputs = self.sampler.inputs(self.model, content, canvas, self.run.prompt_length)
        if self._canvas:  # a forward pass of a model with an encoder (`record_forward`)
            assert self._at is not None
            inputs = {**inputs, "canvas_start": self.first(self._at)}
        return decoder_of(self.model)(**on_input_device(self.model, {"input_ids": canvas, **inputs}))

    def start(self, observer: RunObserver) -> None:
        """Begin the run for an observer."""
        observer.start(self.sampler, self.content, self.run.answer.to(self.device))

    @contextmanager
    def under_hooks(self) -> Iterator[None]:
        """Attach the hooks for the block; readers that are attached in it see what they leave."""
        if self._attached:
            yield
            return
        try:
            with nullcontext() if self._runner is None else self._runner:
                self._attached = True
                yield
        finally:
            self._attached, self._at = False, None

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Enter a step under the hooks; its pass and its readers belong inside the block.

        Raises:
            ValueError: as `enter`.
        """
        if not self._carries:
            for before in self._to_remember(step):
                self._carry(before, ())
                with self.under_hooks():
                    self._begin(before, ())
                    self._pass(before)
            self._carry(step, ())
        with self.under_hooks():
            self.enter(step)
            yield

    @property
    def _carries(self) -> bool:
        """Whether what a step leaves for the network is that of passes with the hooks, if there are any."""
        return not self.hooks or self.carried == "all" or (self.carried == "keys" and self.own_network is None)

    @cached_property
    def _runner(self) -> HookRunner | None:
        """The observer that runs the hooks."""
        if not self.hooks:
            return None
        this = ref(self)  # no cycle, so that kept keys go with this object

        def clean_pass(canvas: Tensor) -> Any:
            stored = this()
            assert stored is not None
            return stored._clean_pass(canvas)

        runner = HookRunner(self.model, self.hooks, clean_pass, halves=self.halves)
        self.start(runner)
        return runner

    def enter(self, step: int, *observers: RunObserver) -> None:
        """Begin a step, for observers too: `at` without attaching the hooks, which `under_hooks` does.

        A step of a cached run whose keys another pass left comes after that pass, unless it was the last whole one.
        Observers see that pass as a step that does not end. They do not see other passes of the steps before.

        Raises:
            ValueError: the run does not hold the step whose keys this one reads.
        """
        if self._carries:
            seeing = observers if self.run.computed else ()
            for before in self._to_remember(step):
                self._carry(before, seeing)
                self._begin(before, seeing)
                self._pass(before)
            self._carry(step, observers)
        self._begin(step, observers)

    def discard(self, step: int) -> None:
        """The last pass of the step was not the run's own, as others than the hooks edited it: no step reads it."""
        self._done, self._kept = min(self._done, step), () if step in self._kept else self._kept
        if self.own_network is not None and self._fresh:
            self.own_network.forget(step)

    def _to_remember(self, step: int) -> range:
        """The steps before that have to run for what the hooks depend on."""
        remembering = [hook for hook in self.hooks if hook.remembers or hook.stack]
        if not remembering:
            return range(0)
        number = self.run.step_numbers[step]
        if self.run.step_numbers[:step] != tuple(range(number)):
            raise ValueError(
                f"{remembering[0]!r} depends on earlier steps, and this part of the run does not hold all those "
                f"before step {number}; give the whole run"
            )
        if step < self._done - 1:
            assert self._runner is not None
            self.start(self._runner)
            self._done = 0
        return range(self._done, step)

    def _carry(self, step: int, observers: Sequence[RunObserver]) -> None:
        """Make the passes of earlier steps that leave something for the network at this one."""
        if self.own_network is not None:
            missing = self.own_network.missing_before(step)
            with torch.no_grad():
                for before in missing:
                    self._begin(before, ())
                    if self._carries:
                        self._pass(before)
                    else:  # with an encoder's cache of its own
                        self._clean_pass(self._seen(before))
                        self.own_network.keep(before)
            if missing and self._carries:
                self.own_network.encode_again()
            return
        if self._canvas or self._computed(step) is None:
            return
        numbers, read = self.run.step_numbers, self._left_before(step)
        # Between them there may be another pass that left keys, which a part does not hold.
        if not read or numbers[step] - numbers[read[0]] != step - read[0]:
            raise ValueError(
                f"step {numbers[step]} attends to keys of an earlier step, which this part of the run does not "
                "hold; give the whole run"
            )
        known = len(self._kept) if self._kept == read[: len(self._kept)] else 0
        for before in () if self._kept == (*read, step) else read[known:]:
            self._begin(before, observers)
            self._pass(before)

    def _left_before(self, step: int) -> tuple[int, ...]:
        """The steps whose passes left the keys that an approximate cache holds when a step begins, in order."""
        return tuple(self.sampler.keys_left_by(self._plans[:step])) if self.run.computed else ()

    def _begin(self, step: int, observers: Sequence[RunObserver]) -> None:
        """Begin a step for the network, the attached hooks and observers."""
        self._at = step
        plan = self._plan_in_run(step)
        self.sampler.at(plan)
        self.sampler.follow(self.run, step)
        if self._network is not None:
            self._network.enter(plan)
        canvas, masked = (tensor[step].to(self.device) for tensor in (self.run.canvases, self.run.masked))
        share = None if self.autoregressive else self._progress[step].to(self.device)
        if self._attached and self._runner is not None:
            self._runner.share = share
            self._runner.step(plan, canvas, masked)
        for observer in observers:
            observer.share = share
            observer.step(self.plan(step), canvas, masked)

    @contextmanager
    def _entered(self, step: int) -> Iterator[Int[Tensor, "batch seen"]]:
        """What a step sees of its canvas, for a pass in the block; enters the step if it is not the present one."""
        if self._attached and self._at != step:
            self.enter(step)
        with nullcontext() if self._at == step else self.at(step):
            left = self._left_before(step + 1)
            self._kept = () if step in left else self._kept
            yield self._seen(step)
            hooked = self._attached and bool(self.hooks)
            self._done = step + 1 if hooked else self._done
            if self._carries or not hooked:
                self._kept = left if step in left else self._kept
                self._fresh = self.own_network is not None and self.own_network.keep(step)

    def _pass(self, step: int) -> None:
        """A pass of a step for what it leaves alone."""
        self.forward(step)

    def leave(self, step: int, observer: RunObserver) -> None:
        """End a step for an observer, as it ended in the run."""
        run = self.run
        parts = (run.canvases[step + 1], run.proposals[step], run.confidence[step], run.unmasked[step])
        canvas, tokens, confidence, unmasked = (part.to(self.device) for part in parts)
        observer.finish(self.plan(step), canvas, Proposal(tokens, confidence), unmasked)


class StoredRun(StoredCanvases):
    """Runs a model again over the canvases of a run, with its guidance, padding and logit shift.

    The canvases stay fixed. A pass goes over all rows of a step; an AR step sees the prefix and predicts one
    position. A step of a run with a cache computes its span and sees the keys that an earlier step left.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, or a recording's; without a tokenizer of its own it takes the model's.
        decided: whether the logits are also about the decided positions of the answer that a step may rewrite:
            those of its block, in rows that had open ones there when it began. For samplers that edit.
        hooks, steps, carried, warn: as for `StoredCanvases`.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model, as far as sampler and vocabulary tell (its name only warns), or
            of a sampler whose logits cannot be computed again; `decided` where the sampler does not edit.
    """

    _network: Network

    def __init__(
        self,
        model: Any,
        run: RunLike,
        *,
        decided: bool = False,
        hooks: Sequence[HookLike] = (),
        steps: Sequence[int] | None = None,
        carried: Carried = "all",
        warn: bool = True,
    ) -> None:
        run = as_run(run)
        check_model(model)
        super().__init__(model, run, hooks=hooks, steps=steps, carried=carried, warn=warn)
        name = str(run.settings.get("sampler"))
        if name not in algorithms():
            raise ValueError(f"a run of the sampler {name!r} cannot be run again; take one of dlm_lens.denoise")
        own = algorithm_of(model.config).name
        if name != own:
            raise ValueError(
                f"the run has the sampler {name!r} and the model samples with {own!r}: is it another model's? "
                f"If not, load it with sampler={name!r} (--load sampler={name})"
            )
        if decided and not self.sampler.edits:
            raise ValueError(
                f"decided=True: the sampler {name!r} predicts open positions alone and rewrites none; leave it out"
            )
        self.decided = decided
        masked = self.run.answer.to(self.device)
        first = FirstCanvas(self.run.canvases[0].to(self.device), self.content, masked, run.prompt_length)
        self._network = self.own_network or self.sampler.network(model, first)

    @property
    def halves(self) -> int:
        """How often the network sees every row: twice with guidance."""
        return self.sampler.halves

    def predicted(self, step: int) -> Bool[Tensor, "batch position"]:
        """The positions that the step's logits are about: every masked one, in an AR run the next one.

        A row that has ended has none. With `decided` also those that the step may rewrite.
        """
        if not self.autoregressive:
            room = self.sampler.room_of(self.run, step)
            masked = self.run.masked[step] if room is None else self.run.masked[step] & ~room
            masked = masked.to(self.device)
            found = masked & self.sampler.reach(masked, self.plan(step))
            found &= self.run.running[step].to(self.device)[:, None]
            return found | self._rewritable(step).to(self.device) if self.decided else found
        predicted = torch.zeros_like(self.content)
        predicted[:, self.length(step)] = self.run.running[step].to(self.device)
        return predicted

    def _rewritable(self, step: int) -> Bool[Tensor, "batch position"]:
        """Decided positions of the answer in the step's block, in rows that run and had open ones when it began.

        A part that lacks the first step of the block does not hold what was open then: all of its rows count.
        """
        run, first = self.run, self.run.blocks.index(self.run.blocks[step])
        begun = (run.masked[first] & run.in_block[first]).any(-1) | bool(run.block_numbers[first])
        return run.answer & run.in_block[step] & ~run.masked[step] & (begun & run.running[step])[:, None]

    def states(self, step: int) -> Float[Tensor, "half predicted d_model"]:
        """A forward pass over the canvas of a step: the head's inputs for the predicted positions, row by row."""
        with self._entered(step) as canvas:
            return self._network.states(canvas, self.predicted(step))

    def _pass(self, step: int) -> None:
        """A pass of a step for what it leaves alone."""
        self.states(step)

    @property
    def reads_kept(self) -> tuple[int, ...]:
        """The steps that read keys and values of one earlier pass from an approximate cache."""
        if not isinstance(self._network, CachedLogits):
            return ()
        read = enumerate(self.run.computed)
        return tuple(step for step, span in read if span is not None and len(self._left_before(step)) == 1)

    def keep_again(self, step: int) -> None:
        """Run the whole pass again whose keys and values a step reads, and keep their graph.

        Hooks on the model during the call act on that pass. The next other step makes a pass of its own.
        """
        assert isinstance(self._network, CachedLogits)
        self._kept = ()
        with self._network.keeping_graph():
            self.enter(step)

    def forget_kept(self) -> None:
        """Let the next step of a cached run make its keys and values anew."""
        self._kept, self._at = (), None

    def logits(self, states: Float[Tensor, "half predicted d_model"]) -> Float[Tensor, "predicted d_vocab"]:
        """Logits of (some of) the states, guided as in the run."""
        return self._network.head(states)
