"""What all hooks that hide columns share: the site, the call, and a repr that reads as it was written."""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, get_args

from jaxtyping import Float
from torch import Tensor

from dlm_lens.attention import HookContext, Site, Stage, hide_columns


class HidesColumns:
    """A hook that hides columns of attention: `hidden` says which.

    Called, it edits scores or a pattern; where nobody reads these, attention asks `hidden` and needs no pattern.

    `padding_safe` and `stateless` let others put runs together and cut them short; a hook without them is taken
    for neither.
    """

    stage: Stage

    @property
    def padding_safe(self) -> bool:
        """Whether every row of a padded batch gets what it gets alone."""
        return True

    @property
    def stateless(self) -> bool:
        """Whether what it does follows from the pass at hand, not from the step, nor from what came before."""
        return False

    @property
    def site(self) -> Site:
        """`scores` before the softmax, `pattern` after it."""
        return "scores" if self.stage == "before_softmax" else "pattern"

    def __call__(
        self, tensor: Float[Tensor, "batch head query key"], hook: HookContext | None = None
    ) -> Float[Tensor, "batch head query key"]:
        """Return the scores or the pattern without the hidden columns.

        A bare call knows neither sink tokens nor padding nor the run; `attach_hooks`, `denoise` and `attn.apply`
        do.

        Raises:
            ValueError: the hook needs to know what a bare call does not tell.
        """
        return hide_columns(self, tensor, hook)  # type: ignore[arg-type]


def check_stage(stage: str, renormalise: bool) -> None:
    """Refuse a stage that is none, and a renormalisation where there is nothing to renormalise.

    Raises:
        ValueError: either.
    """
    if stage not in get_args(Stage):
        raise ValueError(f"stage is {stage!r}; it must be 'before_softmax' or 'after'")
    if renormalise and stage == "before_softmax":
        raise ValueError("renormalise=True is for stage='after'; before the softmax rows sum to 1 anyway")


def written(value: Any, name: str, positional: Sequence[str] = ()) -> str:
    """A frozen value as the call that makes it, settings at their defaults left out."""
    parts = [_argument(getattr(value, field)) for field in positional]
    for field in fields(value):
        given = getattr(value, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.repr and field.name not in positional and given != default:
            parts.append(f"{field.name}={given!r}")
    return f"{name}({', '.join(parts)})"


def _argument(value: Any) -> str:
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
