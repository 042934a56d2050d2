"""What a hook is told of the point it runs at, and of the denoising step that the run is in."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention.column_masking import ColumnStats
from dlm_lens.attention.masking_stats import HookKey
from dlm_lens.attention.sink_layout import SinkLayout
from dlm_lens.attention.visibility import AttentionPass

_PER_POSITION = ("tokens", "masked", "valid", "answer")


@dataclass(frozen=True, eq=False)
class RunStep:
    """One step of a denoising run, as a hook sees it.

    Rows are the network's: with guidance every row stands there twice, the conditional ones first. Positions are
    those of the canvas; in an AR run the canvas ends where the network's input ends.

    Args:
        step: counted from the most masked canvas.
        total: steps of the run.
        block: index of the block being decoded.
        span: the block, as (start, stop) canvas positions.
        tokens: the canvas that the step sees.
        masked: which of its positions are still masked.
        valid: which are content rather than padding.
        answer: which positions were masked when the run began; in an AR run, what the run has written.
        config: the model's, with its special token ids.
        tokenizer: decodes ids; None if there is none.
        memory: what hooks remember from step to step of this run.
        known: what was computed for this step and is the same in every layer (`once`).
        clean: what every layer's keys receive in a pass over the same canvas without any hook, by layer; runs that
            pass when first asked.
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
    known: MutableMapping[Any, Any] = field(default_factory=dict, repr=False)
    clean: Callable[[], Mapping[int, ColumnStats]] | None = field(default=None, repr=False)

    @property
    def prompt(self) -> Bool[Tensor, "row position"]:
        """What was given: content that was not masked when the run began."""
        return self.valid & ~self.answer

    @property
    def progress(self) -> Float[Tensor, "row"]:
        """Share of the answer that is written, per row; in an AR run, step / total."""
        written = 1 - self.masked.sum(-1) / self.answer.sum(-1).clamp(min=1)
        return torch.where(self.masked.any(), written, self.step / self.total)

    @property
    def fewest_content(self) -> int:
        """Content positions of the row that has fewest."""
        return int(self.once("content", lambda: int(self.valid.sum(-1).min())))

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """What `compute` returns, computed once for all layers of the step: what waits for a GPU waits once."""
        key = (key, tuple(self.tokens.shape))
        if key not in self.known:
            self.known[key] = compute()
        return self.known[key]

    def until(self, stop: int) -> "RunStep":
        """The same step of a canvas that ends at `stop`."""
        return replace(self, **{name: getattr(self, name)[:, :stop] for name in _PER_POSITION})

    def for_rows(self, rows: int) -> "RunStep":
        """The same step for a batch of `rows`, a multiple of this one's: guidance repeats it.

        Raises:
            ValueError: it is no multiple.
        """
        have = len(self.tokens)
        if rows == have:
            return self
        if rows % have:
            raise ValueError(f"{rows} rows of activations do not fit a run of {have} rows")
        return replace(self, **{name: getattr(self, name).repeat(rows // have, 1) for name in _PER_POSITION})


@dataclass(frozen=True)
class PointContext:
    """What a hook is told of the point it runs at.

    Its name, its layer, where the sinks stand, whether attention is causal, the run's step, None outside a run
    (then `step`, `tokens`, `masked` and `valid`, which stand for the run's, raise a ValueError), and `depth`, how
    many layers the model has, where that is known. At scores and pattern `attention_pass` knows who sees whom;
    `rows` are the rows of its batch that the activation has, None for all. `place` tells the hook from equal ones
    of the run.
    """

    name: str
    index: int
    sinks: SinkLayout = field(default_factory=SinkLayout)
    causal: bool = False
    run: RunStep | None = None
    depth: int | None = None
    attention_pass: AttentionPass | None = field(default=None, repr=False)
    rows: Int[Tensor, "row"] | None = field(default=None, repr=False)
    place: HookKey | None = field(default=None, repr=False)

    def layer(self) -> int:
        """Index of the layer."""
        return self.index

    @property
    def step(self) -> int:
        """The step of the run."""
        return run_of(self, "this hook").step

    @property
    def tokens(self) -> Int[Tensor, "row position"]:
        """The canvas that the step sees."""
        return run_of(self, "this hook").tokens

    @property
    def masked(self) -> Bool[Tensor, "row position"]:
        """Which positions of the canvas are still masked."""
        return run_of(self, "this hook").masked

    @property
    def valid(self) -> Bool[Tensor, "row position"]:
        """Which positions are content rather than padding."""
        return run_of(self, "this hook").valid


class NoRunError(ValueError):
    """A hook was called outside a run, and needs to know of its steps."""


def run_of(hook: Any, who: Any) -> RunStep:
    """The run that a hook is called in.

    Raises:
        NoRunError: `hook`, the context it was given, knows of none; the sentence says how to give it one.
    """
    run = getattr(hook, "run", None)
    if not isinstance(run, RunStep):
        raise NoRunError(
            f"{who} needs to know the run's step: pass it to dlm_lens.denoise(..., hooks=[...]) or "
            "bridge.denoise(..., hooks=[...]), or give attn.apply(hook, step) the step"
        )
    return run
