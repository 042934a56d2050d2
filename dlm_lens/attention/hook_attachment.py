"""`attach_hooks`: run hooks at their sites in a model, for as long as a block lasts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dlm_lens.arguments import chosen_indices
from dlm_lens.attention.hook import SITES, ColumnHook, Hook
from dlm_lens.attention.hook_context import PointContext, RunStep
from dlm_lens.attention.hook_points import HOOK_POINTS, hook_point, listening
from dlm_lens.attention.layers import adding_module, attention_blocks, attention_of
from dlm_lens.attention.masking_stats import HookKey, hook_keys
from dlm_lens.attention.sink_layout import SinkLayout
from dlm_lens.attention.sliding_windows import attends_causally
from dlm_lens.printable import is_array, shown


def _never() -> bool:
    return False


@dataclass(frozen=True)
class HookCall:
    """A hook as a forward hook of its module.

    Args:
        hook: the intervention.
        context: what the hook is told.
        off: whether the hook does not act now; it keeps its place among the module's hooks.
    """

    hook: Hook
    context: Callable[[], PointContext]
    off: Callable[[], bool] = _never

    def __call__(self, module: nn.Module, inputs: Any, value: Any) -> Any:
        """The edited activation, of a module with several outputs the first."""
        if self.off():
            return value
        if isinstance(value, Tensor):
            return self.hook(value, self.context())
        return (self.hook(value[0], self.context()), *value[1:])


@dataclass(frozen=True)
class ColumnCall(HookCall):
    """A column hook at its point: a forward hook that attention can also run in stream."""

    hook: ColumnHook


def column_calls(*points: nn.Module) -> list[ColumnCall]:
    """The column hooks that act at these points, in order."""
    calls = [call for point in points for call in point._forward_hooks.values()]
    return [call for call in calls if isinstance(call, ColumnCall) and not call.off()]


def needs_value(call: Any) -> bool:
    """Whether a forward hook must be given the value itself: not if it is off, or can run in stream."""
    return not isinstance(call, HookCall) or not (call.off() or isinstance(call, ColumnCall))


NAMES = {
    **{site: f"attn.hook_{site}" for site in HOOK_POINTS},
    "scores": "attn.hook_attn_scores",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "resid": "hook_resid_post",
}
"""Sites -> what TransformerLens calls them inside a block."""


@contextmanager
def attach_hooks(
    model: Any,
    *hooks: Hook,
    layers: Sequence[int] | None = None,
    run: Callable[[], RunStep | None] = lambda: None,
    off: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Run `hooks` at their sites in every forward pass of `model` inside the block.

    Several hooks at one site run in the order given. Hooks that hide columns run without a pattern while nobody
    reads it. All are gone when the block ends, however it ends. Until then other threads wait for the model, and
    code that torch.compile made of it runs eagerly.

    Args:
        model: from `dlm_lens.load`.
        *hooks: values of `dlm_lens.hooks`, or anything with a `site` and their call.
        layers: indices of the layers, negative from the end; None for all. A hook's own `layers` narrow this.
        run: the run's present step, for hooks that ask; `dlm_lens.denoise(..., hooks=[...])` gives it.
        off: whether the hooks do not act now, as in a pass without hooks; they keep their places meanwhile.

    Raises:
        ValueError: a layer that is not there, a site that is none, or a model without hook points.
    """
    blocks = attention_blocks(model)
    checked(hooks)
    wanted = _layers(layers, len(blocks))
    causal = attends_causally(model)
    sinks = SinkLayout.of(model)
    with ExitStack() as handles:
        handles.enter_context(listening(model))
        for hook, place in zip(hooks, hook_keys(hooks), strict=True):
            for layer in sorted(wanted & _layers(getattr(hook, "layers", None), len(blocks))):
                name, module = f"blocks.{layer}.{NAMES[hook.site]}", _module(hook, blocks[layer])

                def context(
                    name: str = name, layer: int = layer, module: nn.Module = module, place: HookKey = place
                ) -> PointContext:
                    known = getattr(module, "attention_pass", None)
                    return PointContext(name, layer, sinks, causal, run(), len(blocks), known, place=place)

                if isinstance(hook, ColumnHook):
                    call: HookCall = ColumnCall(hook, context, off)
                else:
                    call = HookCall(hook, context, off)
                handles.callback(module.register_forward_hook(call).remove)
        yield


def checked(hooks: Iterable[Hook] | None) -> tuple[Hook, ...]:
    """The hooks, if each is one; None for no hooks.

    Raises:
        ValueError: a hook that is in no list, something without a site, or with a site that is none.
    """
    if isinstance(hooks, Hook | str | bytes) or is_array(hooks) or not isinstance(hooks, Iterable | None):
        raise ValueError(f"hooks is {shown(hooks)}; give a list of hooks, such as hooks=[mask_top_sinks(5)]")
    found = tuple(hooks or ())
    for hook in found:
        if not isinstance(hook, Hook) or isinstance(hook, type):
            raise ValueError(
                f"{shown(hook)} is no hook; take one of dlm_lens.hooks, or an object with a site and a call "
                "(tensor, hook)"
            )
        if not isinstance(hook.site, str) or hook.site not in SITES:
            raise ValueError(f"{shown(hook)} belongs at {shown(hook.site)}, which is none of {', '.join(SITES)}")
    return found


def _layers(layers: Sequence[int] | None, count: int) -> set[int]:
    """The indices of the chosen layers; an empty list chooses none."""
    return set() if layers is not None and not layers else set(chosen_indices("layer", layers, count))


def _module(hook: Hook, block: Any) -> nn.Module:
    """The module of a decoder layer whose output the hook edits."""
    if hook.site in HOOK_POINTS:
        return hook_point(attention_of(block), hook.site)
    return adding_module(block, hook.site)
