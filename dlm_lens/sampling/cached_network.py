"""Logits under an approximate cache: a step computes a span and sees keys and values of an earlier step around.

Also caches of transformers' class, and whether a model's keys and values may be kept in one (`keeps_keys`).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dlm_lens.attention import decoder_of, position_ids
from dlm_lens.attention.cache_argument import NEW, OLD, cache_argument
from dlm_lens.attention.model_access import has_listeners
from dlm_lens.attention.sink_layout import SinkLayout
from dlm_lens.placement import on_input_device
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import CanvasLogits


class KeptKeys:
    """Keys (after rotation) and values of every layer of the last whole pass, as transformers' models call a cache.

    A whole pass stores them. A pass over a span [start, stop) attends to its own keys and values inside the span
    and to the stored ones around it, in the order of the canvas; it stores its own only with `replaces`. Gradients
    reach the stored ones only with `graph`.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.span: tuple[int, int] | None = None
        self.keys = 0
        self.graph = False
        self.replaces = False
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def enter(self, keys: int, span: tuple[int, int] | None) -> "KeptKeys":
        """The next pass: over `span` of a canvas of `keys` positions, or (None) over all of it."""
        self.keys, self.span = keys, span
        return self

    @property
    def empty(self) -> bool:
        """Whether there has been no whole pass."""
        return not self._layers

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that the queries of a layer see."""
        keys = keys.to(values.dtype)  # LLaDA's are float32: kept so, they would take twice the memory
        if self.span is not None:
            start, stop = self.span
            kept = self._layers[layer_idx]
            keys, values = (
                torch.cat([old[:, :, :start], new, old[:, :, stop:]], 2)
                for old, new in zip(kept, (keys, values), strict=True)
            )
        if self.span is None or self.replaces:
            self._layers[layer_idx] = (keys, values) if self.graph else (keys.detach(), values.detach())
        return keys, values

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first query."""
        return 0 if self.span is None else self.span[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The position of the first query, from which transformers counts positions where it is not given any."""
        return self.get_query_offset()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The number of keys, and the position of the first."""
        return self.keys, 0


class CachedLogits(CanvasLogits):
    """Logits of a bidirectional model with an approximate cache (Fast-dLLM, 2505.22618).

    A step whose plan has no `computed` span is a pass over the whole canvas, which stores the keys and values of
    every position. A step with one computes the queries, keys and values of that span alone; its queries see the
    stored keys and values of all other positions, which are those of the last whole pass, or of a later step that
    `replaces` some: exact would be that they change with every token that is written.

    A position is predicted at such a step if it lies between the start of the block and the end of the span.

    `forward` keeps keys and values of its own, so that passes without hooks attend to keys without hooks.

    Args:
        model: from `dlm_lens.load`.
        content: False at the padding on the left.
        alone: the output at a span's first position predicts that position even with a logit shift (a quirk of
            Fast-dLLM's code for Dream).
        **options: of `CanvasLogits`.
    """

    def __init__(
        self, model: Any, content: Bool[Tensor, "batch position"], *, alone: bool = False, **options: Any
    ) -> None:
        super().__init__(model, content, **options)
        if self.sinks.count:
            raise ValueError(
                "a cache keeps keys and values of canvas positions, and this model has learned sink tokens beside "
                "them; leave cache out"
            )
        self.positions = position_ids(content.repeat(2 if self.cfg_scale else 1, 1))
        self.alone = alone
        self._plan: StepPlan | None = None
        self._kept, self._clean = KeptKeys(), KeptKeys()
        self._stored: list[tuple[StepPlan, Tensor]] = []  # the last whole step of the run, and those that replaced
        self._clean_steps: list[int] = []  # likewise, of passes without hooks

    def enter(self, plan: StepPlan) -> None:
        """The step of the next passes."""
        self._plan = plan

    def replaces(self, plan: StepPlan) -> bool:
        """Whether the step, which computes a span, stores its keys and values for later steps."""
        return False

    def predicts_from(self, plan: StepPlan, span: tuple[int, int]) -> int:
        """The first position that a step predicts which computes this span: the block's."""
        return plan.span[0]

    @contextmanager
    def keeping_graph(self) -> Iterator[None]:
        """Whole passes keep keys and values with their graph, so that a later step has gradients by them."""
        self._kept.graph = True
        try:
            yield
        finally:
            self._kept.graph = False

    def everywhere(self, canvas: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_vocab"]:
        """Logits of every position that the step predicts, NaN elsewhere."""
        span = self._span
        logits = self._guided(self._run(self.model, canvas, self._kept).logits.to(canvas.device))
        source = self._source(canvas)
        if span is None:
            return logits if source is None else logits[self._rows(canvas), source]
        assert self._plan is not None
        predicted = slice(self.predicts_from(self._plan, span), span[1])
        whole = logits.new_full((*canvas.shape, logits.shape[-1]), torch.nan)
        where = torch.arange(canvas.shape[1], device=canvas.device).expand_as(canvas) if source is None else source
        whole[:, predicted] = logits[self._rows(canvas), self._inside(where[:, predicted], span)]
        return whole

    def states(
        self, canvas: Int[Tensor, "batch position"], needed: Bool[Tensor, "batch position"]
    ) -> Float[Tensor, "half needed d_model"]:
        """The inputs of the head for the `needed` positions, which the step predicts."""
        span = self._span
        states = self._run(decoder_of(self.model), canvas, self._kept).last_hidden_state.to(canvas.device)
        halves, source = states.reshape(-1, len(canvas), *states.shape[1:]), self._source(canvas)
        rows, where = needed.nonzero(as_tuple=True)
        where = where if source is None else source[rows, where]
        return halves[:, rows, where if span is None else self._inside(where, span)]

    def forward(self, canvas: Int[Tensor, "batch position"]) -> Any:
        """A pass of the step without the head, with keys and values of such passes.

        Where a pass of the run whose keys this one reads had none of this kind beside it (a trace asks for one only
        at the steps that it visits), its canvas is passed through first.
        """
        here, done = self._plan, self._clean_steps
        if here is not None and here.computed is not None:
            read = [(plan, canvas) for plan, canvas in self._stored if plan.index < here.index]
            steps = [plan.index for plan, _ in read]
            if done not in (steps, [*steps, here.index]):
                for before, tokens in read[len(done) if done == steps[: len(done)] else 0 :]:
                    self.enter(before)
                    self._run(decoder_of(self.model), tokens, self._clean)
                self.enter(here)
        return self._run(decoder_of(self.model), canvas, self._clean)

    def run_forward(self, canvas: Int[Tensor, "batch position"]) -> Any:
        """A pass of the step without the head, with the keys and values of the run's own passes."""
        return self._run(decoder_of(self.model), canvas, self._kept)

    @property
    def _span(self) -> tuple[int, int] | None:
        return None if self._plan is None else self._plan.computed

    def _inside(self, where: Int[Tensor, "..."], span: tuple[int, int]) -> Int[Tensor, "..."]:
        """Canvas positions as places among the span's outputs."""
        return (where - span[0]).clamp(min=0) if self.alone else where - span[0]

    def _run(self, network: Callable[..., Any], canvas: Int[Tensor, "batch position"], kept: KeptKeys) -> Any:
        plan, span = self._plan, self._span
        kept.replaces = plan is not None and span is not None and self.replaces(plan)
        if plan is not None and (span is None or kept.replaces):
            if kept is self._clean:
                before = [] if span is None else [step for step in self._clean_steps if step < plan.index]
                self._clean_steps = [*before, plan.index]
            else:
                stored = [] if span is None else [one for one in self._stored if one[0].index < plan.index]
                self._stored = [*stored, (plan, canvas.clone())]
        return self._pass(network, canvas, kept, span)

    def _pass(
        self,
        network: Callable[..., Any],
        canvas: Int[Tensor, "batch position"],
        kept: KeptKeys,
        span: tuple[int, int] | None,
    ) -> Any:
        inputs: dict[str, Any] = {**self.inputs, "use_cache": True}
        ids = self._halves(canvas)
        if span is not None:
            where = slice(*span)
            ids = ids[:, where]
            inputs |= {"position_ids": self.positions[:, where], "query_start": span[0]}
        given = on_input_device(self.model, {"input_ids": ids, **inputs})
        return network(**given, **cache_argument(network, kept.enter(canvas.shape[1], span)))


def keeps_keys(model: Any) -> bool:
    """Whether the keys and values of a text may be computed apart from what sees them.

    Not while something listens, which has to see whole texts; not with sink tokens, which the embedding puts before
    every sequence; not where a cache keeps anything but all keys and values (sliding windows, recurrent states), or
    where the rotation depends on the length of the text (dynamic NTK, LongRoPE).
    """
    decoder = decoder_of(model)
    if has_listeners(model) or SinkLayout.of(model).count or getattr(model, "_is_stateful", False):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    rotation = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if {"dynamic", "longrope"}.intersection(map(str, rotation.values())):
        return False
    if not {OLD, NEW}.intersection(inspect.signature(decoder.forward).parameters):
        return False
    layers = empty_cache(model).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def empty_cache(model: Any) -> DynamicCache:
    """A cache of the model's layers, without keys."""
    return DynamicCache(config=model.config)
