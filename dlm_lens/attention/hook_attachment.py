"""`attach_hooks`: run hooks at their sites in a model, inside a `with` block; warns where padding shifts them."""

import inspect
import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, _GeneratorContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from dlm_lens.arguments import chosen_indices, plain_number
from dlm_lens.attention.hook import ColumnHook, Hook, HookLike, as_hook, is_hook
from dlm_lens.attention.hook_context import PointContext, RunStep
from dlm_lens.attention.hook_points import HOOK_POINTS, attention_stack, decoder_of, hook_point, listening
from dlm_lens.attention.layers import adding_module, attention_blocks, attentions_of
from dlm_lens.attention.left_padding import padding_before
from dlm_lens.attention.masking_stats import hook_keys
from dlm_lens.attention.sink_layout import SinkLayout
from dlm_lens.attention.sliding_windows import attends_causally
from dlm_lens.printable import is_array, shown

logger = logging.getLogger(__name__)

IN_RUN = "count in every row with by_row(...), or run prompts of one length together (record does)"
OUTSIDE = "pass prompts of one length, or count in every row with by_row(...) in dlm_lens.denoise(..., hooks=[...])"


def _never() -> bool:
    return False


@dataclass(frozen=True)
class HookCall:
    """A hook as a forward hook of its module.

    Args:
        hook: the intervention.
        context: returns the context of the call.
        off: whether the hook is switched off; it keeps its place among the module's hooks.
    """

    hook: Hook
    context: Callable[[], PointContext]
    off: Callable[[], bool] = _never

    @property
    def needs_value(self) -> bool:
        """Whether the hook must be given the value itself: not if it is off."""
        return not self.off()

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

    @property
    def needs_value(self) -> bool:
        """False: attention runs the hook in stream."""
        return False


def column_calls(*points: nn.Module) -> list[ColumnCall]:
    """The column hooks that act at these points, in order."""
    calls = [call for point in points for call in point._forward_hooks.values()]
    return [call for call in calls if isinstance(call, ColumnCall) and not call.off()]


NAMES = {
    **{site: f"attn.hook_{site}" for site in HOOK_POINTS},
    "scores": "attn.hook_attn_scores",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "resid": "hook_resid_post",
}
"""Site -> TransformerLens's name of the hook point inside a block."""


KEY_SITES = frozenset({"k", "v", "rot_k", "scores", "pattern"})
"""Sites whose positions, in attention to another stack's states, are those of that stack."""

STATES_OF_KEYS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Names in transformers of the states of another stack, to which attention attends."""


Arguments = ParamSpec("Arguments")
Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


class _Attached(_GeneratorContextManager[None]):
    """A context manager that warns where it is deleted before a `with` block entered it, so that it did nothing."""

    def __call__(self, function: Wrapped) -> Wrapped:
        """As a decorator it makes another one for each call of the function."""
        self.gen.close()
        return super().__call__(function)

    def __repr__(self) -> str:
        return "<hooks that act inside `with attach_hooks(model, ...):`>"

    def __del__(self) -> None:
        if hasattr(self, "gen") and inspect.getgeneratorstate(self.gen) == inspect.GEN_CREATED:
            call = "attach_hooks was called without `with`, and no hook was attached"
            warnings.warn(f"{call}; write `with attach_hooks(model, ...):` around the forward passes", stacklevel=2)


def _for_a_block(call: Callable[Arguments, Generator[None, None, None]]) -> Callable[Arguments, _Attached]:
    @wraps(call)
    def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> _Attached:
        return _Attached(call, args, kwargs)

    return made


@_for_a_block
def attach_hooks(
    model: Any,
    *hooks: HookLike,
    layers: Sequence[int] | None = None,
    run: Callable[[], RunStep | None] = lambda: None,
    off: Callable[[], bool] = lambda: False,
) -> Generator[None, None, None]:
    """Run `hooks` at their sites in every forward pass of `model` inside the block.

    Several hooks at one site run in the order given. Hooks that hide columns run without a pattern while nothing
    else reads it. All are removed at the end of the block, also after an error. Until then other threads wait for
    the model, and its torch.compile code runs eagerly. Positions count from the first of a cache that the pass
    continues: those before the pass are not in it, and a negative one counts from the pass's end. Hooks that name
    positions warn in a padded pass outside a run, where a row's padding shifts them.

    Where a layer has several attentions, as a decoder's to itself and to an encoder, a hook acts in each of them.
    In attention to an encoder the positions of keys are the encoder's, those of queries the decoder's.

    Args:
        model: from `dlm_lens.load`.
        *hooks: values of `dlm_lens.hooks`, or objects with a `site` and the call `(tensor, hook)`.
        layers: indices of the layers, negative from the end; None for all. A hook's own `layers` narrow this.
        run: returns the run's present step, None outside a run; `dlm_lens.denoise(..., hooks=[...])` gives it.
        off: whether the hooks are switched off, as in a pass without hooks; they keep their places.

    Raises:
        ValueError: a layer or a site that does not exist, or a model without hook points; a hook that keeps
            something for each layer, where one has several attentions; in a forward pass with a static cache, a
            hook that hides columns; in a pass that continues a cache, outside a run, a hook that reads what keys
            receive.
    """
    values = checked(hooks)
    stacks = {stack: _Stack.of(model, stack) for stack in {hook.stack for hook in values} or {""}}
    chosen = {name: _layers(layers, len(stack.blocks)) for name, stack in stacks.items()}
    sinks = SinkLayout.of(model)
    with ExitStack() as handles:
        handles.enter_context(listening(model))
        handles.enter_context(warning_of_shifts(decoder_of(model), values, run))
        for hook, place in zip(values, hook_keys(values), strict=True):
            stack = stacks[hook.stack]
            for layer in sorted(chosen[hook.stack] & _layers(hook.layers, len(stack.blocks))):
                name = f"{stack.prefix}blocks.{layer}.{NAMES[hook.site]}"
                known = PointContext(name, layer, sinks, stack.causal, depth=len(stack.blocks), place=place)
                for attention, module in _places(hook, stack.blocks[layer]):
                    cached = _CachedPass(run)
                    handles.callback(attention.register_forward_pre_hook(cached, with_kwargs=True).remove)
                    context = partial(_present, known, module, stack, run, cached, hook.site)
                    kind: type[HookCall] = ColumnCall if isinstance(hook, ColumnHook) else HookCall
                    handles.callback(module.register_forward_hook(kind(hook, context, off)).remove)
                    if kind is ColumnCall:
                        check = attention.register_forward_pre_hook(_refuse_static_cache, with_kwargs=True)
                        handles.callback(check.remove)
        yield


def attached_hooks(model: Any) -> list[Hook]:
    """The hooks that `attach_hooks` has on a model now, each once, but for those that are switched off."""
    calls = [call for module in model.modules() for call in module._forward_hooks.values()]
    found = {id(call.hook): call.hook for call in calls if isinstance(call, HookCall) and not call.off()}
    return list(found.values())


def is_static(cache: Any) -> bool:
    """Whether a cache of transformers holds room for positions that are not written yet."""
    return bool(getattr(cache, "is_compileable", False))


def _refuse_static_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise if a layer's keys are those of a static cache, whose last columns are not those of the queries."""
    if is_static(_cache_of(args, kwargs)):
        raise ValueError(
            "hooks that hide columns take no static cache, which holds positions that are not written yet; leave "
            "past_key_values out, or take a DynamicCache"
        )


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    """The cache of transformers that a layer's attention is called with; architectures name it differently."""
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, Cache)), None)


def _attends_elsewhere(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a layer's attention is called with the states of another stack, by any of `STATES_OF_KEYS`."""
    if any(kwargs.get(name) is not None for name in STATES_OF_KEYS):
        return True
    if len(args) < 2:  # the layer's own states alone; a signature takes longer than the rest
        return False
    given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
    return any(given.get(name) is not None for name in STATES_OF_KEYS)


@dataclass
class _CachedPass:
    """How far the present pass of an attention module reaches in its cache; a forward pre-hook of the module.

    Args:
        run: returns the run's present step. A run says itself which positions a pass computes.
        reach: number of positions from the cache's first to the pass's last; None without a cache, and in a run.
        crosses: whether the module attends to another stack's states.
    """

    run: Callable[[], RunStep | None]
    reach: int | None = None
    crosses: bool = False

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what the pass that begins now is given."""
        self.reach, cache = None, _cache_of(args, kwargs)
        states = args[0] if args else kwargs.get("hidden_states")
        layer = getattr(module, "layer_idx", None)
        if cache is None or self.run() is not None or not isinstance(states, Tensor) or layer is None:
            return
        self.crosses = _attends_elsewhere(module, args, kwargs)
        if getattr(module, "is_kv_shared_layer", False):
            # It has no keys of its own in the cache. Those of the first layer have this pass's positions already.
            self.reach = int(cache.get_seq_length())
            return
        # Attention to another stack comes after the layer's own attention, which has updated the cache.
        self.reach = int(cache.get_seq_length(layer)) + (0 if self.crosses else states.shape[1])

    def at(self, site: str) -> int | None:
        """`PointContext.reach` at a site of the layer."""
        return None if self.crosses and site in KEY_SITES else self.reach


@dataclass(frozen=True)
class _Stack:
    """A part of the model with attention of its own, as hooks in it see it."""

    name: str
    module: nn.Module
    blocks: list[nn.Module]
    causal: bool

    @classmethod
    def of(cls, model: Any, name: str) -> "_Stack":
        """The stack of that name (`attention_stacks`)."""
        return cls(name, attention_stack(model, name), attention_blocks(model, name), attends_causally(model, name))

    @property
    def prefix(self) -> str:
        """What names of its hook points begin with."""
        return f"{self.name}." if self.name else ""

    def step(self, run: RunStep | None) -> RunStep | None:
        """The run's step as the stack sees it: an encoder computes a span of decided positions."""
        return step_in_stack(self.module, run) if self.name else run


def _present(
    known: PointContext,
    module: nn.Module,
    stack: _Stack,
    run: Callable[[], RunStep | None],
    cached: _CachedPass,
    site: str,
) -> PointContext:
    """What is known of a hook point, with the run's step and the attention of the present forward pass."""
    now = getattr(module, "attention_pass", None)
    return replace(known, run=stack.step(run()), attention_pass=now, reach=cached.at(site))


def step_in_stack(stack: Any, run: RunStep | None) -> RunStep | None:
    """The step in the present pass of an encoder, which sets `pass_span`, the positions that it computes."""
    span: tuple[int, int] | None = getattr(stack, "pass_span", None)
    return None if run is None or span is None else run.of_pass(span)


def refuse_row_lists(hooks: Iterable[Hook], why: str) -> None:
    """Raise if one of the hooks has values for the rows of a single batch.

    Args:
        hooks: of a call.
        why: what makes several batches, and the remedy.

    Raises:
        ValueError: naming the hook and its number of rows.
    """
    for hook in hooks:
        if hook.row_count is not None:
            raise ValueError(f"{hook}: positions for {hook.row_count} rows, and {why}")


def checked(hooks: Iterable[Any] | None) -> tuple[Hook, ...]:
    """The hooks that a user gave, a user's own objects and functions adapted (`as_hook`); None for no hooks.

    Raises:
        ValueError: a hook outside a list, something without a site or a call, or a site that does not exist.
    """
    listed = isinstance(hooks, Iterable | None) and not (isinstance(hooks, str | bytes) or is_array(hooks))
    if is_hook(hooks) or not listed:
        raise ValueError(f"hooks is {shown(hooks)}; give a list of hooks, such as hooks=[mask_top_sinks(5)]")
    return tuple(map(as_hook, hooks or ()))


def _layers(layers: Sequence[int] | None, count: int) -> set[int]:
    """The indices of the chosen layers; an empty list chooses none."""
    given = plain_number(layers)
    return set() if isinstance(given, Sized) and not len(given) else set(chosen_indices("layer", given, count))


def _places(hook: Hook, block: Any) -> list[tuple[Any, nn.Module]]:
    """Attention, and the module whose output the hook edits: in every attention of a decoder layer, or once.

    Raises:
        ValueError: the layer has no such module, or the hook refuses the layer.
    """
    hook.check_layer(block)
    attentions = attentions_of(block)
    if hook.site not in HOOK_POINTS:
        return [(attentions[0], adding_module(block, hook.site))]
    if len(attentions) > 1 and (hook.remembers or hook.needs_clean_pass):
        raise ValueError(
            f"{hook} keeps something for each layer, and {type(block).__name__} has {len(attentions)} attentions: "
            "take a hook that depends on the present pass alone, such as mask_positions, or other layers"
        )
    return [(attention, hook_point(attention, hook.site)) for attention in attentions]


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
