"""`HookPoint`: an identity module at which activations are seen and replaced, and the points before rotation.

The attention function is handed queries and keys after rotation only. Before it, they are what the last of `q_proj`
and `q_norm` (`k_proj`, `k_norm`) returns. While anything listens to the model (`listening`), or a hook is on the
point, a forward hook on that module passes its output through the hook point.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.visibility import AttentionPass

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


_NORMS = {"q": ("q_norm", "q_layernorm"), "k": ("k_norm", "k_layernorm")}


class ProjectionPoint(HookPoint):
    """`hook_q` or `hook_k`: fed by a hook on the module that computes queries or keys, while anything listens.

    Args:
        name: "q" or "k".
        heads: how many query (key) heads.
        width: d_head.
    """

    def __init__(self, name: str, heads: int, width: int) -> None:
        super().__init__()
        self.name, self.heads, self.width = name, heads, width
        self.followers = 0
        self.source: list[nn.Module] = []  # in a list: a module set as an attribute would become a child
        self.attention: list[Any] = []

    def register_forward_hook(self, hook: Callable[..., Any], **options: Any) -> Any:
        """As `torch.nn.Module.register_forward_hook`."""
        return _FollowingHandle(self, super().register_forward_hook(hook, **options))

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> Any:
        """As `torch.nn.Module.register_forward_pre_hook`."""
        return _FollowingHandle(self, super().register_forward_pre_hook(hook, **options))

    def follow(self) -> None:
        """Begin to pass on what the projection returns; called as often as `leave`."""
        self.followers += 1
        if not self.source:
            self.source.append(_source(self.attention[0], self.name))
            self.source[0].register_forward_hook(self.pass_on)

    def leave(self) -> None:
        """The end of one `follow`."""
        self.followers -= 1
        if self.followers == 0:
            # Found by what it belongs to: a copy of the model has a hook of its own, and no handle.
            hooks = self.source.pop()._forward_hooks
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]

    def check_source(self) -> None:
        """Raise if the module that computes queries (keys) is another one than the one that is followed.

        Raises:
            ValueError: it was replaced, as LoRA and quantisation do, after a hook was put on this point.
        """
        if self.source and self.source[0] is not _source(self.attention[0], self.name):
            raise ValueError(
                f"the {self.name}_proj of {type(self.attention[0]).__name__} was replaced after a hook was put on "
                f"hook_{self.name}, which therefore missed what the new module computes: remove the hook and put "
                "it on again"
            )

    def pass_on(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        """The edited output of the projection; None where nothing was edited."""
        if output.ndim == 3:
            heads = output.unflatten(-1, (self.heads, self.width))
            edited: Tensor = self(heads)
            return None if edited is heads else edited.flatten(-2)
        # [batch, position, head, d_head], or [batch, head, position, d_head] where the module transposed before.
        if not self._transposed(inputs[0], output):
            edited = self(output)
            return None if edited is output else edited
        heads = output.transpose(1, 2)
        edited = self(heads)
        return None if edited is heads else edited.transpose(1, 2)

    def _transposed(self, value: Tensor, output: Tensor) -> bool:
        if output.shape[1] != self.heads or output.shape[2] != self.heads:
            return output.shape[1] == self.heads
        # As many positions as heads: a transposed view has the smaller stride first.
        return value.stride(1) < value.stride(2)


class _FollowingHandle:
    """Removes a hook on a `ProjectionPoint`, and what fed the point for it."""

    def __init__(self, point: ProjectionPoint, handle: RemovableHandle) -> None:
        self.point, self.handle, self.removed = point, handle, False
        self.id = handle.id
        point.follow()

    def remove(self) -> None:
        """Remove the hook; again: nothing."""
        self.handle.remove()
        if not self.removed:
            self.removed = True
            self.point.leave()

    def __enter__(self) -> "_FollowingHandle":
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


def add_projection_points(attention: Any) -> None:
    """Give an attention module `hook_q` and `hook_k`, where it has projections of their own for both."""
    width = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    sizes = {name: _out_features(getattr(attention, f"{name}_proj", None)) for name in ("q", "k")}
    clipped = getattr(attention.config, "clip_qkv", None) is not None
    if not isinstance(width, int) or clipped or any(not size or size % width for size in sizes.values()):
        return
    for name, size in sizes.items():
        point = ProjectionPoint(name, size // width, width)
        point.attention.append(attention)
        attention.add_module(f"hook_{name}", point)


def projection_points(module: nn.Module) -> list[ProjectionPoint]:
    """All `hook_q` and `hook_k` of a model or a part of one."""
    return [point for point in module.modules() if isinstance(point, ProjectionPoint)]


@contextmanager
def following(model: Any) -> Iterator[None]:
    """Feed every `hook_q` and `hook_k` of the model inside the block."""
    points = projection_points(model) if isinstance(model, nn.Module) else []
    for point in points:
        point.follow()
    try:
        yield
    finally:
        for point in points:
            point.leave()


def _source(attention: Any, name: str) -> Any:
    """The module whose output is the query (key) before rotation."""
    for norm in _NORMS[name]:
        if isinstance(attention._modules.get(norm), nn.Module):
            return attention._modules[norm]
    return attention._modules[f"{name}_proj"]


def _out_features(module: Any) -> int:
    size = getattr(module, "out_features", None)
    return size if isinstance(size, int) else 0
