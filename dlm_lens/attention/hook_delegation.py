"""Hooks that read another hook: `HookWrapper` around it, or `DelegatingHook` beside settings of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from dlm_lens.attention.column_masking import Stage
from dlm_lens.attention.column_stats import ColumnStats
from dlm_lens.attention.hook import HOOK_ATTRIBUTES, ColumnHook, Hook
from dlm_lens.attention.hook_context import PointContext, RunStep


def _of_inner(name: str) -> property:
    """The attribute of the hook inside."""
    return property(lambda self: getattr(self.inner, name), doc=f"`{name}` of `inner`.")


class DelegatingHook(Hook):
    """A hook that reads another one: what a subclass does not override is that of `inner`.

    Attributes:
        inner: the other hook; a subclass defines it.
    """

    if TYPE_CHECKING:

        @property
        def inner(self) -> Hook: ...  # noqa: D102

    @property
    def remembers(self) -> bool:
        """As `inner`; a subclass that says it is not stateless, unless it overrides this too."""
        own = type(self).stateless is not DelegatingHook.stateless
        return self.inner.remembers or (own and not self.stateless)

    def first_step(self, total: int) -> int | None:
        """That of `inner`."""
        return self.inner.first_step(total)

    def check_run(self, run: RunStep) -> None:
        """What `inner` refuses.

        Raises:
            ValueError: naming it.
        """
        self.inner.check_run(run)

    def check_steps(self, steps: Sequence[int], total: int) -> None:
        """What `inner` refuses.

        Raises:
            ValueError: naming it.
        """
        self.inner.check_steps(steps, total)

    def check_layer(self, block: nn.Module) -> None:
        """What `inner` refuses.

        Raises:
            ValueError: naming it.
        """
        self.inner.check_layer(block)


for _name in HOOK_ATTRIBUTES - {"remembers"}:
    setattr(DelegatingHook, _name, _of_inner(_name))


class DelegatingColumnHook(DelegatingHook, ColumnHook):
    """A column hook that reads another one."""

    if TYPE_CHECKING:

        @property
        def inner(self) -> ColumnHook: ...  # noqa: D102

    def observe(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> None:
        """Let `inner` see a step at which this hook does not act."""
        self.inner.observe(keys, columns, hook)


@dataclass(frozen=True)
class HidesNothing(ColumnHook):
    """Hides no columns: `inner` of a hook that was given none."""

    stage: Stage = "before_softmax"
    stateless = padding_safe = True

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> None:
        """None."""


class HookWrapper(DelegatingHook):
    """A hook around another one; what a subclass does not override is that of `hook`.

    Attributes:
        hook: the hook inside.
    """

    hook: Hook

    @property
    def inner(self) -> Hook:
        """The hook inside."""
        return self.hook

    def check_steps(self, steps: Sequence[int], total: int) -> None:
        """Nothing: a wrapper may keep the hook from acting at some of them."""


class ColumnHookWrapper(HookWrapper, DelegatingColumnHook):
    """A column hook around another one; a subclass overrides `hidden`."""

    hook: ColumnHook

    @property
    def inner(self) -> ColumnHook:
        """The hook inside."""
        return self.hook
