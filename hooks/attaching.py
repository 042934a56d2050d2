"""`attached`: run hooks at their sites in a model, for as long as a block lasts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dlm_lens.attention import HOOK_POINTS, Hook, HookedAttention, SinkLayout


@dataclass(frozen=True)
class PointContext:
    """What a hook is told of the point it runs at: its name, its layer, where the model's sinks stand."""

    name: str
    index: int
    sinks: SinkLayout

    def layer(self) -> int:
        """Index of the layer."""
        return self.index


@contextmanager
def attached(model: Any, *hooks: Hook, layers: Sequence[int] | None = None) -> Iterator[None]:
    """Run `hooks` at their sites in every forward pass of `model` inside the block.

    Several hooks at one site run in the order given. They are gone when the block ends, however it ends.

    Args:
        model: from `dlm_lens.load`.
        *hooks: values of `dlm_lens.hooks`, or anything with a `site` and their call.
        layers: indices of the layers, negative from the end; None for all.

    Raises:
        ValueError: a layer that is not there, a site that is no hook point, or a model without hook points.
    """
    modules = [module for module in model.modules() if isinstance(module, HookedAttention)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no hook points; load it with dlm_lens.load")
    wanted = range(len(modules)) if layers is None else layers
    for layer in wanted:
        if not -len(modules) <= layer < len(modules):
            raise ValueError(f"layer {layer} of {len(modules)}: layers go from 0 to {len(modules) - 1}")
    for hook in hooks:
        if hook.site not in HOOK_POINTS:
            raise ValueError(f"{hook} belongs at {hook.site!r}, which is none of {', '.join(HOOK_POINTS)}")
    with ExitStack() as handles:
        for layer in sorted({layer % len(modules) for layer in wanted}):
            for hook in hooks:
                point = modules[layer].get_submodule(f"hook_{hook.site}")
                context = PointContext(f"blocks.{layer}.attn.hook_{hook.site}", layer, SinkLayout.of(model))
                handles.callback(point.register_forward_hook(_calling(hook, context)).remove)
        yield


def _calling(hook: Hook, context: PointContext) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def run(module: nn.Module, inputs: Any, value: Tensor) -> Tensor:
        return hook(value, context)

    return run
