"""`CanvasRecorder`: records the forward passes of one request's likelihood, a canvas or a block of it each."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from dlm_lens.adapters.model_names import name_of
from dlm_lens.attention import BlockLayout, attends_observed_first
from dlm_lens.recording import Recorder, Recording
from dlm_lens.recording.arrays import widened, with_zeros_
from dlm_lens.recording.forward_recording import on_passes, sampler_of_pass, settings_of_pass
from dlm_lens.recording.recorder import Storage
from dlm_lens.sampling import DenoisingRun, StepPlan
from dlm_lens.sampling.algorithm_registry import Algorithm, algorithm_of
from dlm_lens.sampling.two_copies import Blocks


@dataclass(frozen=True)
class BlocksOfText:
    """The blocks of a text whose likelihood is computed block by block.

    Args:
        algorithm: that decodes such blocks.
        length: positions of a block.
        context: positions before the continuation.
        positions: of the text.
        observed_first: attention is causal, observed tokens first, instead of block causal (WeDLM).
    """

    algorithm: Algorithm
    length: int
    context: int
    positions: int
    observed_first: bool

    @classmethod
    def of(cls, config: Any, context: int, positions: int) -> "BlocksOfText | None":
        """Those of a model; None if it is not scored in blocks."""
        if (blocks := Blocks.of(config)) is None:
            return None
        return cls(algorithm_of(config), blocks.length, context, positions, attends_observed_first(config))

    @property
    def settings(self) -> dict[str, Any]:
        """By which a `DenoisingRun` knows them; those of `sees_span` see what their plan's span ends with."""
        if self.observed_first:
            return {"observed_first": True, "sees_span": True}
        return {"blocks_of": self.algorithm.name, "block_length": self.length}

    def layout(self, content: Bool[Tensor, "batch position"]) -> BlockLayout:
        """Where they are in the rows of a pass."""
        found: BlockLayout = self.algorithm.sampler.block_layout_of(self.length, content, self.context)
        return found

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Of the blocks that hold positions of the continuation."""
        one = torch.ones(1, self.positions, dtype=torch.bool)
        return self.layout(one).spans(self.context, self.positions)

    def plan(self, masked: Bool[Tensor, "row position"]) -> StepPlan:
        """The step of a pass that sees these positions: its block is the continuation's first one with masks.

        With observed tokens first it ends with what is seen, since a greedy completion has later masks there.
        """
        place, seen = self.context + int(masked[0, self.context :].byte().argmax()), masked.shape[1]
        number = next(number for number, (_, stop) in enumerate(self.spans) if place < stop)
        start, stop = self.spans[number]
        return StepPlan(0, 1, number, (start, seen if self.observed_first else stop), 1, seen=seen)


class CanvasRecorder(Recorder):
    """Records the forward passes of one request's likelihood; every canvas is a step of the Recording.

    Under guidance only conditional canvases are recorded. The prompt is the context and the answer is the
    continuation, whichever positions are masked. Of a model that is scored in blocks a step is a block: what its
    pass sees of the canvas, with masks after it, as in a run.

    Args:
        model, reducers, layers, dtype: as for `Recorder`.
        context: number of positions of the context.
        length: positions of context and continuation.
        halves: 2 under guidance, else 1.
    """

    def __init__(
        self,
        model: Any,
        reducers: Sequence[Any],
        *,
        context: int,
        length: int,
        halves: int = 1,
        layers: Sequence[int] | None = None,
        dtype: Storage = "float32",
    ) -> None:
        super().__init__(model, reducers, layers=layers, dtype=dtype)
        self.context, self.length, self.halves = context, length, halves
        self.blocks = BlocksOfText.of(model.config, context, length)
        self._canvases: list[Int[Tensor, "canvas position"]] = []
        self._parts: list[dict[str, Tensor]] = []
        self._plans: list[StepPlan] = []

    @contextmanager
    def listening(self, model: Any) -> Iterator[None]:
        """Record the forward passes in this context."""
        with on_passes(model, self._before, self._after):
            try:
                yield
            finally:
                self.close()

    @property
    def canvases(self) -> int:
        """The number of canvases so far."""
        return sum(map(len, self._canvases))

    def canvases_of(self, settings: Mapping[str, Any]) -> Recording:
        """The canvases so far (at least one) as the steps of a Recording, the most masked first."""
        canvases, arrays = torch.cat(self._canvases), {}
        order = self._masked(canvases).sum(-1).argsort(descending=True, stable=True)
        queries = canvases.shape[1]
        sizes = {"key": queries + self.layout.count, "query": queries}
        for spec in self.arrays.specs:
            parts = [widened(part[spec.name], spec.dims[1:], sizes) for part in self._parts]
            arrays[spec.name] = with_zeros_(torch.cat(parts)[order, None], spec)
        canvases, plans = canvases[order], [self._plans[place] for place in order.tolist()]
        run = self._run(canvases[:, None], plans, settings)
        answer = torch.arange(canvases.shape[1])[None] >= self.context
        return replace(self.described(run, arrays), answer=answer)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start a step, before the decoder's forward pass."""
        ids: Int[Tensor, "row position"] = args[0] if args else kwargs["input_ids"]
        ids = ids[: len(ids) // self.halves]
        if self.blocks is None:
            # All positions of the canvas count, in causal models too.
            plan = StepPlan(0, 1, 0, (self.context, ids.shape[1]), 1)
        else:
            plan = self.blocks.plan(self._masked(ids))
            ids = self._whole(ids)
        content = torch.ones_like(ids, dtype=torch.bool)
        sampler = sampler_of_pass(self._attention, content, self.context)
        answer = (torch.arange(ids.shape[1], device=ids.device) >= self.context).expand(ids.shape)
        self._plans += [plan] * len(ids)
        self.start(sampler, content, answer)
        self.step(plan, ids, self._masked(ids))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Finish the step, after the decoder's forward pass."""
        assert self.now is not None
        self._parts.append(self.step_arrays())
        ids = self.now.tokens.detach().cpu()
        self._canvases.append(ids if self.blocks is None else self._whole(ids))
        self.close()

    @property
    def _attention(self) -> dict[str, Any]:
        """The settings by which a `DenoisingRun` knows how a pass attends."""
        return settings_of_pass(self.model.config) if self.blocks is None else self.blocks.settings

    def _whole(self, ids: Int[Tensor, "row seen"]) -> Int[Tensor, "row position"]:
        """The canvas of a pass that sees its first positions: masks follow."""
        return pad(ids, (0, self.length - ids.shape[1]), value=self.model.config.mask_token_id)

    def _masked(self, ids: Int[Tensor, "*run position"]) -> Bool[Tensor, "*run position"]:
        mask_id = getattr(self.model.config, "mask_token_id", None)
        return torch.zeros_like(ids, dtype=torch.bool) if mask_id is None else ids == mask_id

    def _run(
        self, canvases: Int[Tensor, "step batch position"], plans: Sequence[StepPlan], settings: Mapping[str, Any]
    ) -> DenoisingRun:
        masked = self._masked(canvases)
        return DenoisingRun.of_canvases(
            canvases,
            masked,
            torch.ones_like(masked[0]),
            prompt_length=self.context,
            settings={**settings, **self._attention},
            spans=None if self.blocks is None else [plan.span for plan in plans],
            blocks=[plan.block for plan in plans],
            tokenizer=getattr(self.model, "tokenizer", None),
            model=name_of(self.model),
        )
