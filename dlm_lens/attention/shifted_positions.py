"""Warns of hooks that name canvas positions where rows are padded, in runs and in forward passes outside one."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor, nn

from dlm_lens.attention.hook import Hook, HookLike, as_hook
from dlm_lens.attention.hook_context import RunStep
from dlm_lens.attention.left_padding import padding_before

logger = logging.getLogger(__name__)

IN_RUN = "count in every row with by_row(...), or run prompts of one length together (record does)"
OUTSIDE = "pass prompts of one length, or count in every row with by_row(...) in dlm_lens.denoise(..., hooks=[...])"


def warn_of_shifts(
    hooks: Iterable[Hook],
    content: Bool[Tensor, "row position"] | Int[Tensor, "row position"],
    remedy: str = IN_RUN,
) -> None:
    """Warn of hooks that name canvas positions from the beginning, if a row begins after its padding.

    Args:
        hooks: that are about to act.
        content: False, or 0, at padding.
        remedy: what to do instead, which ends the sentence.
    """
    shifted = dict.fromkeys(str(hook) for hook in hooks if hook.shifts_with_padding)
    if not shifted:
        return
    padding = padding_before(content)
    if bool(padding.any()):
        logger.warning(
            "%s: positions count from the beginning of the canvas, and rows of this batch begin at %s, after "
            "their padding: in a padded row they are other tokens than in the row alone; %s",
            ", ".join(shifted),
            " to ".join(map(str, sorted({int(padding.min()), int(padding.max())}))),
            remedy,
        )


@contextmanager
def warning_of_shifts(
    network: nn.Module, hooks: Sequence[HookLike], run: Callable[[], RunStep | None] = lambda: None
) -> Iterator[None]:
    """Warn once of shifted positions in the padded passes of `network` inside the block; runs warn for themselves.

    Args:
        network: is called with the padding as `attention_mask=`, 0 or False at padding.
        hooks: that act in the passes.
        run: returns the run's present step, None outside a run.
    """
    shifted = [hook for hook in map(as_hook, hooks) if hook.shifts_with_padding]
    if not shifted:
        yield
        return

    def check(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Warn before the first padded pass, and listen no longer."""
        content = kwargs.get("attention_mask")
        if not isinstance(content, Tensor) or content.ndim != 2 or run() is not None:
            return
        if bool(padding_before(content).any()):
            handle.remove()
            warn_of_shifts(shifted, content, OUTSIDE)

    handle = network.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
