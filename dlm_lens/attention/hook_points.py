"""`HookPoint`: an identity module at which activations are seen and replaced."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from dlm_lens.attention.attention_pass import AttentionPass
from dlm_lens.attention.inputs import AttentionInputs

Reader = Callable[[AttentionInputs], None]
"""Called with what an attention module computes with, at every forward pass."""


class Watcher(Protocol):
    """A host that may read a hook point."""

    def __call__(self) -> bool:
        """Whether it is about to read the point."""
        ...

    def passed(self) -> None:
        """The forward pass went by the point, whose value was not computed."""
        ...


class HookPoint(nn.Module):
    """The identity; a PyTorch forward hook on it sees, and may replace, what passes through.

    A host that watches modules without hooks (nnsight) adds to `watchers` a function that says whether it is
    about to read this point. `readers` of `hook_z` are called with the inputs of attention. A copy has neither.
    While scores and pattern run, `attention_pass` is what attention knows of the pass.
    """

    watchers: tuple[Watcher, ...] = ()
    attention_pass: AttentionPass | None = None
    readers: tuple[Reader, ...] = ()

    def forward(self, value: Tensor) -> Tensor:
        """Return `value` itself."""
        return value

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not part of a recording or a trace of the original.
        return {
            name: value for name, value in super().__getstate__().items() if name not in ("watchers", "readers")
        }
