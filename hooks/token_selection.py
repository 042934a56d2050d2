"""`classes=` of the sink hooks: columns whose token at the step belongs to some classes."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from dlm_lens.attention import PointContext, RunStep, run_of
from dlm_lens.sinks.token_classes import TOKEN_CLASSES, TokenClasses

Classes = str | Sequence[str] | None
"""What a user gives as `classes=`: names of `TOKEN_CLASSES`, one name, or None for all tokens."""


def checked_classes(classes: Any, known: Sequence[str] = TOKEN_CLASSES) -> tuple[str, ...] | None:
    """The names as a tuple, each once; None for all tokens. "open" is "mask": open positions, whatever they hold.

    Raises:
        ValueError: no name, or an unknown one.
    """
    if classes is None:
        return None
    names = (classes,) if isinstance(classes, str) else tuple(classes) if isinstance(classes, Sequence) else ()
    names = tuple("mask" if name == "open" and "mask" in known else name for name in names)
    if not names or any(name not in known for name in names):
        raise ValueError(f"classes is {classes!r:.200}; it must be one or several of {', '.join(map(repr, known))}")
    return tuple(dict.fromkeys(names))


def classes_of(run: RunStep) -> TokenClasses:
    """The classes of the run's token ids; every id is looked up once a run."""
    found: TokenClasses = run.memory.setdefault("classes of tokens", TokenClasses.of(run.config, run.tokenizer))
    return found


def columns_of_classes(
    classes: tuple[str, ...], keys: int, hook: PointContext, who: Any
) -> Bool[Tensor, "row 1 key"]:
    """The columns whose token at this step belongs to the classes, in the network's order of positions.

    Masked positions are "mask"; learned sink tokens "learned sink". In both halves of guidance the tokens are those
    of the canvas.

    Raises:
        ValueError: there is no run, or no tokenizer where a class needs one.
    """
    run = run_of(hook, who)

    def chosen() -> Bool[Tensor, "row position"]:
        try:
            return classes_of(run).among(run.tokens, run.masked, classes)
        except ValueError as error:
            raise ValueError(f"{who}: {error}") from None

    on_canvas = run.once(("tokens of classes", classes), chosen)
    found = torch.zeros(len(on_canvas), 1, keys, dtype=torch.bool, device=on_canvas.device)
    found[:, 0, hook.sinks.canvas(keys)] = on_canvas
    found[:, 0, hook.sinks.sinks(keys)] = "learned sink" in classes
    return found
