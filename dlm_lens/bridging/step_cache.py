"""`StepCache`: activations of some steps of a run, by name and step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformer_lens import ActivationCache


@dataclass(frozen=True, eq=False)
class StepCache:
    """Activations that a run kept, `cache[name, step]` as the hook points gave them.

    `cache[name]` stacks all steps into [step, ...], in the order of `steps`. Every activation is kept once, and
    answers to all names that TransformerLens has for its hook point. With guidance the batch axis holds the
    conditional rows and then the unconditional ones.

    Args:
        names: what was asked for and seen.
        steps: the steps kept, counted from the most masked canvas.
        values: (the hook point's own name, step) -> the activation.
        aliases: every name -> the hook point's own.
        bridge: the model, for `at`.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    values: Mapping[tuple[str, int], Tensor] = field(repr=False)
    aliases: Mapping[str, str] = field(repr=False)
    bridge: Any = field(default=None, repr=False)

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        """One activation for (name, step), or all steps of a name as [step, ...].

        Raises:
            KeyError: a name or a step that was not kept.
            ValueError: the steps are of unequal length (an AR run), so that they do not stack.
        """
        if isinstance(key, tuple):
            return self._one(*key)
        found = [self._one(key, step) for step in self.steps]
        if len({value.shape for value in found}) > 1:
            raise ValueError(
                f"{key}: the steps have shapes {list(found[0].shape)} to {list(found[-1].shape)} and do not stack; "
                "take cache[name, step]"
            )
        return torch.stack(found)

    def __contains__(self, key: object) -> bool:
        name, steps = (key[0], key[1:]) if isinstance(key, tuple) else (key, self.steps[:1])
        return all((self.aliases.get(str(name)), step) in self.values for step in steps) and bool(steps)

    def _one(self, name: str, step: int) -> Tensor:
        if step not in self.steps:
            raise KeyError(f"step {step} was not kept; there are {_listed(self.steps)}")
        value = self.values.get((self.aliases.get(name, name), step))
        if value is None:
            raise KeyError(f"{name!r} was not kept; there are {_listed(self.names)}")
        return value

    @property
    def nbytes(self) -> int:
        """Bytes of all activations."""
        return sum(value.numel() * value.element_size() for value in self.values.values())

    def at(self, step: int) -> ActivationCache:
        """One step as TransformerLens's own cache, under every name of what was kept.

        Raises:
            KeyError: a step that was not kept.
        """
        if step not in self.steps:
            raise KeyError(f"step {step} was not kept; there are {_listed(self.steps)}")
        found = {name: self.values.get((own, step)) for name, own in self.aliases.items()}
        kept = {name: value for name, value in found.items() if value is not None}
        return ActivationCache(kept, self.bridge, has_batch_dim=True)

    def to(self, device: str | torch.device) -> "StepCache":
        """A cache with the same activations on `device`."""
        return replace(self, values={key: value.to(device) for key, value in self.values.items()})


def _listed(items: Iterable[Any]) -> str:
    found = [str(item) for item in items]
    return ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "") if found else "none"
