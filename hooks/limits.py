"""What a wrapper limits a hook to: steps, layers, heads, progress."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.attention import RunStep, run_of

Active = bool | Bool[Tensor, "row"]
"""Whether the hook acts: at all, or in which rows."""


class Limit(Protocol):
    """A condition on where a hook acts."""

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The only layers in which the hook need run; None for all."""
        ...

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The only heads in which the hook acts; None for all."""
        ...

    @property
    def padding_safe(self) -> bool:
        """Whether it decides for every row by itself."""
        ...

    @property
    def of_one_pass(self) -> bool:
        """Whether it heeds neither step nor progress."""
        ...

    def active(self, hook: Any, who: Any) -> Active:
        """Whether the hook acts at the point and step that `hook` tells."""
        ...

    def check(self, run: RunStep, who: Any) -> None:
        """Refuse what the run or its model do not have."""
        ...

    def call(self, hook: str) -> str:
        """The wrapper around a hook as the call that makes it."""
        ...


class _Anywhere:
    """The parts of a limit that most limits leave alone."""

    @property
    def padding_safe(self) -> bool:
        return True

    @property
    def of_one_pass(self) -> bool:
        return False

    @property
    def layers(self) -> tuple[int, ...] | None:
        return None

    @property
    def heads(self) -> tuple[int, ...] | None:
        return None

    def check(self, run: RunStep, who: Any) -> None:
        """Nothing to refuse."""


@dataclass(frozen=True)
class Steps(_Anywhere):
    """Some steps of the run; `bounds` are those of a slice, which may reach beyond the run."""

    steps: range | tuple[int, ...] = ()
    bounds: tuple[int | None, int | None, int | None] | None = None

    def active(self, hook: Any, who: Any) -> Active:
        """Whether the run is at one of the steps."""
        run = run_of(hook, who)
        if self.bounds is not None:
            return run.step in range(*slice(*self.bounds).indices(run.total))
        self.check(run, who)
        return run.step in self.steps or run.step - run.total in self.steps

    def check(self, run: RunStep, who: Any) -> None:
        """Refuse steps that the run does not have."""
        if self.bounds is None and self.steps:
            for step in (min(self.steps), max(self.steps)):
                if not -run.total <= step < run.total:
                    raise ValueError(
                        f"{who}: step {step} is not there; the run has steps 0 to {run.total - 1} (or -{run.total} "
                        "to -1; a slice may reach beyond)"
                    )

    def call(self, hook: str) -> str:
        """As written."""
        if self.bounds is not None:
            given = self.bounds if self.bounds[2] is not None else self.bounds[:2]
            return f"at_steps({hook}, slice({', '.join(map(str, given))}))"
        return f"at_steps({hook}, {self.steps if isinstance(self.steps, range) else list(self.steps)})"


@dataclass(frozen=True)
class Layers(_Anywhere):
    """Some layers of the model."""

    indices: tuple[int, ...]

    @property
    def of_one_pass(self) -> bool:
        """It heeds no step."""
        return True

    @property
    def layers(self) -> tuple[int, ...]:
        """These."""
        return self.indices

    def active(self, hook: Any, who: Any) -> Active:
        """Whether the point is in one of the layers."""
        if hook is None:
            raise ValueError(f"{who} needs to know the layer: put it at a hook point by name, or use attached")
        count = _count(hook, "num_hidden_layers")
        if count is None and min(self.indices) < 0:
            raise ValueError(f"{who}: without a run the number of layers is unknown; count them from 0")
        return hook.layer() in {index % count if count and index < 0 else index for index in self.indices}

    def check(self, run: RunStep, who: Any) -> None:
        """Refuse layers that the model does not have."""
        _check_indices(self.indices, getattr(run.config, "num_hidden_layers", None), "layer", who)

    def call(self, hook: str) -> str:
        """As written."""
        return f"at_layers({hook}, {list(self.indices)})"


@dataclass(frozen=True)
class Heads(_Anywhere):
    """Some heads of every layer."""

    indices: tuple[int, ...]

    @property
    def of_one_pass(self) -> bool:
        """It heeds no step."""
        return True

    @property
    def heads(self) -> tuple[int, ...]:
        """These."""
        return self.indices

    def active(self, hook: Any, who: Any) -> Active:
        """Yes: the heads are told to the hook's result."""
        return True

    def check(self, run: RunStep, who: Any) -> None:
        """Refuse heads that the model does not have."""
        grouped = getattr(who, "site", "") in ("k", "v", "rot_k")
        name = "num_key_value_heads" if grouped else "num_attention_heads"
        _check_indices(self.indices, getattr(run.config, name, None), "head", who)

    def call(self, hook: str) -> str:
        """As written."""
        return f"at_heads({hook}, {list(self.indices)})"


@dataclass(frozen=True)
class Progress(_Anywhere):
    """Rows whose progress lies in [low, high); `high` = 1 includes 1. Or rows that a function chooses."""

    low: float = 0.0
    high: float = 1.0
    chosen: Callable[[Float[Tensor, "row"]], Any] | None = None

    @property
    def padding_safe(self) -> bool:
        """Unless a function chooses, which sees all rows at once."""
        return self.chosen is None

    def active(self, hook: Any, who: Any) -> Active:
        """The rows."""
        progress = run_of(hook, who).progress
        if self.chosen is None:
            return (progress >= self.low) & ((progress < self.high) | (self.high >= 1))
        found = torch.as_tensor(self.chosen(progress), device=progress.device).bool()
        if found.ndim and found.shape != progress.shape:
            raise ValueError(
                f"{who}: the function returned shape {list(found.shape)} for the progress of {len(progress)} rows; "
                "return one truth value, or one per row"
            )
        return found.expand(progress.shape)

    def call(self, hook: str) -> str:
        """As written."""
        return f"when({hook}, {(self.low, self.high) if self.chosen is None else self.chosen})"


def _count(hook: Any, name: str) -> int | None:
    run = getattr(hook, "run", None)
    return getattr(getattr(run, "config", None), name, None) or getattr(hook, "depth", None)


def _check_indices(indices: tuple[int, ...], count: int | None, what: str, who: Any) -> None:
    for index in indices:
        if count is not None and not -count <= index < count:
            raise ValueError(
                f"{who}: {what} {index} of {count}; {what}s go from 0 to {count - 1}, or from -{count} to -1"
            )
