"""The context of a hook: the hook point at which it runs, and the step of the denoising run."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention.column_stats import ColumnStats
from dlm_lens.attention.sink_layout import SinkLayout
from dlm_lens.attention.visibility import AttentionPass

HookKey = tuple[Any, int]
"""What distinguishes a hook of a run from the others: `Hook.key`, and the number of equal hooks before it."""

_PER_POSITION = ("tokens", "masked", "valid", "answer")
_PER_ROW = ("share", "ends")


@dataclass(frozen=True, eq=False)
class RunStep:
    """One step of a denoising run, as hooks see it.

    Rows are those of the network's batch: with guidance every row occurs twice, the conditional rows first.
    Positions are those of the canvas; in an AR run the canvas ends where the network's input ends.

    Args:
        step: counted from the most masked canvas.
        total: steps of the run.
        block: index of the block being decoded.
        span: the block, as (start, stop) canvas positions; where rows have blocks of their own, from the first
            start to the last end.
        tokens: the canvas before the step.
        masked: which of its positions are open, that is, still masked; in models without a mask token they hold
            random tokens. `open` is the same.
        valid: which are content rather than padding.
        answer: which positions were open when the run began, without those after a row's own last block (LLaDA2)
            and without what is room at the step (DreamOn); in an AR run, what the run has written.
        config: the model's config, with its special token ids.
        tokenizer: decodes ids; None if there is none.
        memory: values that hooks keep from one step of this run to the next.
        computed: values computed once for all layers of this step (`once`).
        clean: returns, by layer, what keys receive in a pass over the same canvas without any hook. Only runs of a
            hook with `needs_clean_pass` have it.
        queries: with an approximate cache, the span (start, stop) of canvas positions that the step computes; the
            keys and values of the others are those of an earlier step. None: every position.
        share: `progress`, where the positions are a part of the canvas, and in an AR run.
        whole: positions of the run's canvas, where the step sees a prefix of it; None where it sees all.
        ends: after how many positions of what the step sees the canvas of each row ends, where blocks are counted
            from its text, so that rows end at different ones; None: with the last one.
        halves: how often the rows of the run are here one after the other: twice with guidance.
        alike: whether all queries of a row see the same keys, as the sampler lays attention out; False where that
            is not known.
    """

    step: int
    total: int
    block: int
    span: tuple[int, int]
    tokens: Int[Tensor, "row position"]
    masked: Bool[Tensor, "row position"]
    valid: Bool[Tensor, "row position"]
    answer: Bool[Tensor, "row position"]
    config: Any = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)
    memory: MutableMapping[Any, Any] = field(default_factory=dict, repr=False)
    computed: MutableMapping[Any, Any] = field(default_factory=dict, repr=False)
    clean: Callable[[], Mapping[int, ColumnStats]] | None = field(default=None, repr=False)
    queries: tuple[int, int] | None = None
    share: Float[Tensor, "row"] | None = field(default=None, repr=False)
    whole: int | None = None
    ends: Int[Tensor, "row"] | None = field(default=None, repr=False)
    alike: bool = False
    halves: int = 1

    @property
    def open(self) -> Bool[Tensor, "row position"]:
        """`masked`, by the word that fits models without a mask token too."""
        return self.masked

    @property
    def decided(self) -> Bool[Tensor, "row position"]:
        """Content that is not open."""
        return self.valid & ~self.masked

    @property
    def prompt(self) -> Bool[Tensor, "row position"]:
        """The prompt: content that was not open when the run began."""
        return self.valid & ~self.answer

    @property
    def progress(self) -> Float[Tensor, "row"]:
        """Share of the answer that is decided, per row; in an AR run, step / total."""
        if self.share is not None:
            return self.share
        return 1 - (self.masked & self.answer).sum(-1) / self.answer.sum(-1).clamp(min=1)

    @property
    def fewest_content(self) -> int:
        """The smallest number of content positions of any row."""
        return int(self.once("content", lambda: int(self.valid.sum(-1).min())))

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """What `compute` returns, computed once for all layers of the step, so that a GPU is waited for once."""
        key = (key, tuple(self.tokens.shape))
        if key not in self.computed:
            self.computed[key] = compute()
        return self.computed[key]

    def until(self, stop: int, seen: Bool[Tensor, "row position"] | None = None) -> "RunStep":
        """The same step, of a canvas cut off at `stop`.

        Positions outside `seen`, after the end of a row's own blocks, are neither content nor masked nor answer.
        """
        cut, ends = {name: getattr(self, name)[:, :stop] for name in _PER_POSITION}, self.ends
        if seen is not None:
            seen = seen[:, :stop]
            cut |= {name: cut[name] & seen.to(cut[name].device) for name in ("masked", "valid", "answer")}
            ends = cut["valid"].shape[1] - cut["valid"].flip(-1).int().argmax(-1)
        # Progress stays that of the whole answer.
        return replace(self, **cut, share=self.progress, whole=self.whole or self.tokens.shape[1], ends=ends)

    def first_of(self, queries: int) -> int | None:
        """The canvas position of the first of the step's `queries`, if they are the span that the step computes."""
        span = self.queries
        return None if span is None or span[1] - span[0] != queries else span[0]

    def of_queries(self) -> "RunStep":
        """The same step with the positions that it computes alone."""
        if self.queries is None:
            return self
        span = slice(*self.queries)
        parts: dict[str, Any] = {name: getattr(self, name)[:, span] for name in _PER_POSITION}
        return replace(self, **parts, queries=None, share=self.progress)

    def of_pass(self, span: tuple[int, int]) -> "RunStep":
        """The same step in an encoder's pass over the positions of `span`, with a cache of all before them.

        What an encoder sees is decided: a prompt, and finished canvases.
        """
        seen = self.until(span[1])
        return replace(seen, masked=torch.zeros_like(seen.masked), queries=span, share=self.progress)

    def of_rows(self, rows: Int[Tensor, "row"]) -> "RunStep":
        """The same step of some rows of its batch."""
        parts = {name: getattr(self, name)[rows.to(getattr(self, name).device)] for name in _PER_POSITION}
        per_row = {name: getattr(self, name) for name in _PER_ROW}
        parts |= {name: None if each is None else each[rows.to(each.device)] for name, each in per_row.items()}
        return replace(self, **parts, computed={})

    def for_rows(self, rows: int) -> "RunStep":
        """The same step for a batch of `rows` rows, which repeats this one's (guidance).

        Raises:
            ValueError: `rows` is no multiple of this step's rows.
        """
        have = len(self.tokens)
        if rows == have:
            return self
        if rows % have:
            raise ValueError(f"{rows} rows of activations do not fit a run of {have} rows")
        parts = {name: getattr(self, name).repeat(rows // have, 1) for name in _PER_POSITION}
        per_row = {name: getattr(self, name) for name in _PER_ROW}
        parts |= {name: None if each is None else each.repeat(rows // have) for name, each in per_row.items()}
        return replace(self, **parts, halves=self.halves * (rows // have))


class HookContext(Protocol):
    """What a host passes to a hook's call: a `PointContext`, or TransformerLens's HookPoint."""

    @property
    def name(self) -> str | None:
        """The hook point, by TransformerLens's name."""
        ...

    def layer(self) -> int:
        """Index of the layer."""
        ...


@dataclass(frozen=True)
class PointContext:
    """What a hook can read of the hook point at which it runs, and of the run.

    `step`, `tokens`, `masked` and `valid` are those of the run's step; without a run they raise a ValueError.

    Args:
        name: the hook point, by TransformerLens's name; empty in a bare call.
        index: index of the layer; None if it is not known.
        sinks: the positions of the network's learned sink tokens; none in a bare call.
        causal: whether attention is causal.
        run: the run's step; None outside a run.
        depth: number of the model's layers; None if it is not known.
        attention_pass: at scores and pattern, which query sees which key; None if it is not known.
        rows: the rows of that pass's batch that the activation has; None for all.
        place: distinguishes the hook from equal ones of the run.
        sinks_known: whether `sinks` is the model's; False in a bare call.
        reach: outside a run, in a pass with a cache: the number of positions from the cache's first to the pass's
            last; None if it is not known, where an activation holds every position.
    """

    name: str = ""
    index: int | None = None
    sinks: SinkLayout = field(default_factory=SinkLayout)
    causal: bool = False
    run: RunStep | None = None
    depth: int | None = None
    attention_pass: AttentionPass | None = field(default=None, repr=False)
    rows: Int[Tensor, "row"] | None = field(default=None, repr=False)
    place: HookKey | None = field(default=None, repr=False)
    sinks_known: bool = field(default=True, repr=False)
    reach: int | None = field(default=None, repr=False)

    @classmethod
    def of(cls, hook: Any) -> "PointContext":
        """The context that a host passed to a call.

        TransformerLens's HookPoint knows its name and layer; those of `dlm_lens.bridge` have some of the other
        values as attributes. None (a bare call) knows nothing.
        """
        if isinstance(hook, PointContext):
            return hook
        sinks, run = getattr(hook, "sinks", None), getattr(hook, "run", None)
        return cls(
            name=str(getattr(hook, "name", None) or ""),
            index=_layer_of(hook),
            sinks=sinks if isinstance(sinks, SinkLayout) else SinkLayout(),
            causal=bool(getattr(hook, "causal", False)),
            run=run if isinstance(run, RunStep) else None,
            depth=getattr(hook, "depth", None),
            attention_pass=getattr(hook, "attention_pass", None),
            rows=getattr(hook, "rows", None),
            place=getattr(hook, "place", None),
            sinks_known=isinstance(sinks, SinkLayout),
        )

    def layer(self) -> int:
        """Index of the layer.

        Raises:
            ValueError: it is not known.
        """
        if self.index is None:
            raise ValueError(f"the layer of hook point {self.name!r} is not known; use attach_hooks(model, ...)")
        return self.index

    def missing(self, length: int) -> int:
        """How many of the first positions are not among the last `length`, which an activation or the keys hold.

        They were computed in earlier passes, or a sliding layer's cache has dropped them.
        """
        return 0 if self.reach is None else max(0, self.reach - length)

    @property
    def step(self) -> int:
        """The step of the run."""
        return run_of(self, "this hook").step

    @property
    def tokens(self) -> Int[Tensor, "row position"]:
        """The canvas before the step."""
        return run_of(self, "this hook").tokens

    @property
    def masked(self) -> Bool[Tensor, "row position"]:
        """Which positions of the canvas are still masked."""
        return run_of(self, "this hook").masked

    @property
    def open(self) -> Bool[Tensor, "row position"]:
        """`masked`, by the word that fits models without a mask token too."""
        return run_of(self, "this hook").masked

    @property
    def valid(self) -> Bool[Tensor, "row position"]:
        """Which positions are content rather than padding."""
        return run_of(self, "this hook").valid


def _layer_of(point: Any) -> int | None:
    """The layer of a host's hook point; None for a point outside the layers, and in a bare call."""
    try:
        return int(point.layer())
    except (AttributeError, IndexError, ValueError):
        return None


class NoRunError(ValueError):
    """A hook that needs the run's step was called outside a run."""


def run_of(hook: HookContext | None, who: Any) -> RunStep:
    """The step of the run in which a hook is called.

    Args:
        hook: the context that the hook's call was given.
        who: the hook, for the error.

    Raises:
        NoRunError: there is no run; the message says how to run the hook in one.
    """
    run = PointContext.of(hook).run
    if run is None:
        raise NoRunError(
            f"{who} needs to know the run's step: pass it to dlm_lens.denoise(..., hooks=[...]) or "
            "bridge.denoise(..., hooks=[...]), or give attn.apply(hook, step) a step of lm.generate(...)"
        )
    return run
