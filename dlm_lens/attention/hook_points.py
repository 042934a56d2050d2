"""Hook points in the attention modules of a transformers model: `add_hook_points`, `HookPoint`, `listening`.

transformers' attention modules look their attention function up by the name in their config. `add_hook_points`
gives every such module a `DispatchedConfig`, which names the function of `dlm_lens.attention.functions`, and
identity modules as children, through which that function passes each quantity. No forward is replaced.

The attention function receives queries and keys after rotation only. Before it, they are the output of the last of
`q_proj` and `q_norm` (`k_proj`, `k_norm`). While a hook is on `hook_q` (`hook_k`), a forward hook on that module
passes its output through the hook point; in an nnsight trace the module's controller does (`tracing.controllers`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dlm_lens.attention.forward_code import computes_attention, forward_code, rotates_before, strings_of
from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.model_access import ModelLock, eagerly, guard_hooks, held, lock_of
from dlm_lens.attention.visibility import AttentionPass
from dlm_lens.placement import allow_float64_experts
from dlm_lens.printable import shown
from dlm_lens.requirements import warn_of_version

HOOK_POINTS = ("q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z")
"""Hook points of an attention module in the order in which they fire; the child is `hook_<name>`.

`q`, `k`, `v`, `rot_q`, `rot_k`, `z` are `[batch, position, head, d_head]` (k and v with key/value heads);
`scores` and `pattern` are `[batch, head, query, key]`. With a cache, `rot_k` and `v` hold the cached keys too. An
attention that projects queries and keys in another way than by `q_proj` and `k_proj` has no `q` and `k`, unless its
family says where they are in the output of a fused projection.
"""

DISPATCH = "dlm_lens"
"""Name of our attention function in transformers' registry; only a `DispatchedConfig` names it."""

OTHER_ARCHITECTURE = "take a model of another architecture (docs/models.md names those that are refused)"
"""The remedy where a class of attention cannot be hooked."""

Model = TypeVar("Model", bound=nn.Module)

Reader = Callable[[AttentionInputs], None]
"""Called with the inputs of attention in every forward pass of a module."""


class TraceReader(Protocol):
    """A host's trace that can read the value of a hook point without a PyTorch hook on it (nnsight)."""

    def __call__(self) -> bool:
        """Whether the trace reads the point in the present forward pass."""
        ...

    def skipped(self) -> None:
        """The forward pass went past the point, whose value was not computed."""
        ...


class HookPoint(nn.Module):
    """The identity; a PyTorch forward hook on it sees, and may replace, the value that passes through.

    Attributes:
        trace_readers: traces that can read the point; a copy of the module has none.
        readers: called with the inputs of attention (`hook_z` only); a copy of the module has none.
        attention_pass: visibility and softmax of the forward pass, while scores and pattern are computed.
    """

    trace_readers: tuple[TraceReader, ...] = ()
    attention_pass: AttentionPass | None = None
    readers: tuple[Reader, ...] = ()

    def forward(self, value: Tensor) -> Tensor:
        """Return `value` itself."""
        return value

    def listened_to(self) -> bool:
        """Whether a hook that needs the value is on the point, or a trace reads it in the present forward pass.

        A hook whose `needs_value` is false does without: it is off, or attention runs it in stream.
        """
        # Loops, not generators: attention calls this several times in every layer of every pass.
        for hook in self._forward_hooks.values():
            if getattr(hook, "needs_value", True):
                return True
        for reads in self._active_readers():
            if reads():
                return True
        return bool(self._forward_pre_hooks)

    def skip(self) -> None:
        """Tell the traces that can read the point that this pass does not compute its value."""
        for reader in self._active_readers():
            reader.skipped()

    def _active_readers(self) -> tuple[TraceReader, ...]:
        # Compiled code runs only while nothing listens to the model (`listening`).
        return () if not self.trace_readers or torch.compiler.is_compiling() else self.trace_readers

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not part of a recording or a trace of the original.
        own = ("trace_readers", "readers")
        return {name: value for name, value in super().__getstate__().items() if name not in own}


class DispatchedConfig:
    """A config as an attention module with hook points reads it: our attention function, the rest as it was.

    `wrapped` is the model's own config. The attention implementation that it names ("sdpa", "eager", ...) decides
    which masks transformers builds, and which of `functions`, those that the module's own file uses, runs while no
    hook needs scores or patterns.
    """

    def __init__(self, wrapped: Any, functions: AttentionInterface) -> None:
        object.__setattr__(self, "wrapped", wrapped)
        object.__setattr__(self, "functions", functions)

    @property
    def _attn_implementation(self) -> str:
        return DISPATCH

    def __getattr__(self, name: str) -> Any:
        if name in ("wrapped", "functions") or name.startswith("__"):
            raise AttributeError(name)  # a copy or an unpickled instance that has no fields yet
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)


class UndispatchedModule:
    """An attention module as flash attention's function reads it: its config names the implementation that runs.

    That function loads its kernels by the name in the config of the module that it is given, and there is no kernel
    of `DISPATCH`.

    Args:
        module: with hook points.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.config = module, module.config.wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def add_hook_points(model: Model) -> Model:
    """Give every attention module of a transformers model its hook points, in place, and return the model.

    Parameters, their names and every forward stay as they are. A second call only counts the layers again, of which
    some may have been removed or exchanged. Attention modules are
    found by their code: a forward that looks its function up in transformers' attention interface. A version of
    transformers that is not one of those declared is named in a warning. Of a language model with networks for
    images or sound the text network gets them; give another part itself to hook it.

    Raises:
        ValueError: the model has no such module, or one whose quantities cannot be hooked exactly: it computes
            attention itself, or does something else depending on the name of the implementation; or it is no model.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"add_hook_points: {shown(model)} is no model; give a loaded model of transformers")
    if has_hook_points(model):
        for stack in attention_stacks(model):
            for index, attention in enumerate(hooked_attentions(model, stack)):
                attention.hook_layer = index
        return model
    stacks = attention_stacks(model).values()
    found = [list(_dispatching_modules(stack)) for stack in stacks]
    if not any(found):
        raise ValueError(
            f"{type(model).__name__} has no attention module that calls transformers' attention interface "
            f"(ALL_ATTENTION_FUNCTIONS): its attention cannot be hooked; {OTHER_ARCHITECTURE}"
        )
    warn_of_version("transformers")
    guard_hooks()
    allow_float64_experts()
    lock = ModelLock()
    for index, attention in (each for modules in found for each in enumerate(modules)):
        attention.lock, attention.hook_layer = lock, index
        attention.config = DispatchedConfig(attention.config, _attention_functions(type(attention)))
        _add_projection_points(attention)
        for name in HOOK_POINTS[2:]:
            attention.add_module(f"hook_{name}", HookPoint())
    return model


def has_hook_points(module: Any) -> bool:
    """Whether an attention module, or a model's attention modules, have hook points."""
    return any(isinstance(child, HookPoint) for child in module.modules())


def attention_stacks(model: Any) -> Mapping[str, nn.Module]:
    """The parts of a model with attention of their own, by name; "" is the one whose outputs are the predictions.

    Most models are one stack. A model with an encoder names its stacks in a property `attention_stacks`. Of a
    language model with networks for images or sound the text network alone is one.
    """
    stacks: Mapping[str, nn.Module] | None = getattr(model, "attention_stacks", None)
    return {"": _text_network(model)} if stacks is None else stacks


def _text_network(model: Any) -> nn.Module:
    """The text network of a language model of several parts (`text_config`), below its head; else the model."""
    if getattr(getattr(model, "config", None), "text_config", None) is None:
        return model
    has_head = model.get_output_embeddings() is not None
    return decoder_of(model) if has_head else model


def attention_stack(model: Any, stack: str) -> nn.Module:
    """One of the `attention_stacks`.

    Raises:
        ValueError: the model has no such stack, or is none.
    """
    if not hasattr(model, "named_modules"):
        raise ValueError(f"{shown(model)} is no model; load one with dlm_lens.load")
    stacks = attention_stacks(model)
    if stack not in stacks:
        raise ValueError(
            f"{type(model).__name__} has no {stack}; hooks act there in models that have one (DiffusionGemma): "
            f"leave at_{stack} or {stack}=True out"
        )
    return stacks[stack]


def decoder_of(model: Any) -> Any:
    """The network below the output embedding: `get_decoder()`, or the child `model`.

    The child where transformers' lookup finds the model itself (Llama 4), or a single module of the name `decoder`
    (the output embedding of ModernBERT).
    """
    found = model.get_decoder()
    inner = model._modules.get("model")
    return inner if inner is not None and (found is model or not found._modules) else found


def computed_span(model: Any, positions: int, start: int | None = None) -> tuple[int, int] | None:
    """The span (start, stop) of ids whose queries and logits `model(input_ids)` computes; None: all of them.

    In a model with an encoder the canvas, where the decoder says so (`canvas_span`).

    Args:
        model: or a part of one.
        positions: of the ids.
        start: of the canvas, where the call gave it (`canvas_start`).
    """
    decoder = decoder_of(model) if hasattr(model, "get_decoder") else None
    span = getattr(decoder, "canvas_span", None)
    return None if span is None else span(positions, start)


def hooked_attentions(model: Any, stack: str = "") -> list[Any]:
    """The attention modules with hook points, in order.

    Args:
        model: or a part of one.
        stack: of `attention_stacks`; by default the one that predicts.
    """
    return [module for module in attention_stack(model, stack).modules() if is_hooked_attention(module)]


def is_hooked_attention(module: Any) -> bool:
    """Whether this module itself is an attention module with hook points."""
    return isinstance(module, nn.Module) and isinstance(module._modules.get("hook_z"), HookPoint)


def hook_point(attention: Any, name: str) -> HookPoint:
    """A hook point of an attention module.

    Raises:
        ValueError: the module does not have it.
    """
    point = attention._modules.get(f"hook_{name}")
    if isinstance(point, HookPoint):
        return point
    have = ", ".join(each for each in HOOK_POINTS if f"hook_{each}" in attention._modules)
    raise ValueError(f"{type(attention).__name__} has no hook point {name!r}: it has {have}")


@contextmanager
def listening(model: Any) -> Iterator[None]:
    """A block in which hooks, readers or a trace are on `model`.

    Other threads wait for the model, and no compiled code runs.

    Raises:
        RuntimeError: as `ModelLock.acquire`, or inside code that torch.compile runs.
    """
    lock = lock_of(model)
    with held(lock), eagerly():
        if lock is not None:
            lock.listeners += 1
        try:
            yield
        finally:
            if lock is not None:
                lock.listeners -= 1


def _attention_functions(kind: type) -> AttentionInterface:
    """The attention functions that a module's own file uses; some override one of transformers' locally."""
    for parent in kind.__mro__:
        found = getattr(sys.modules.get(parent.__module__), "ALL_ATTENTION_FUNCTIONS", None)
        if isinstance(found, AttentionInterface):
            return found
    return ALL_ATTENTION_FUNCTIONS


def _dispatching_modules(model: nn.Module) -> Iterator[Any]:
    """Attention modules that call the interface; raises for those that cannot be hooked."""
    for name, module in model.named_modules():
        code = forward_code(type(module))
        calls = any("ALL_ATTENTION_FUNCTIONS" in each.co_names for each in code)
        if calls and "sdpa" in strings_of(code):
            raise ValueError(
                f"{type(module).__name__} ({name}) computes something else for the attention implementation 'sdpa' "
                f"than for others, so that its attention cannot be hooked exactly; {OTHER_ARCHITECTURE}"
            )
        if calls:
            yield module
        elif computes_attention(module):
            raise ValueError(
                f"{type(module).__name__} ({name}) computes attention without transformers' attention interface, "
                f"so that its attention cannot be hooked; {OTHER_ARCHITECTURE}"
            )


_NORMS = {"q": ("q_norm", "q_layernorm"), "k": ("k_norm", "k_layernorm")}


def _norm_before_rotation(attention: Any, name: str) -> nn.Module | None:
    """The norm of an attention module's queries ("q") or keys; None if it has none before their rotation."""
    # Some layers rotate queries before they compute keys, so that the queries' norm tells the order for both.
    for norm, of_queries in zip(_NORMS[name], _NORMS["q"], strict=True):
        module = attention._modules.get(norm)
        if isinstance(module, nn.Module) and not rotates_before(type(attention), of_queries):
            return module
    return None


class ProjectionPoint(HookPoint):
    """`hook_q` or `hook_k`: receives queries or keys from a hook on the module that computes them.

    That hook exists only while the point is connected: between `connect` and `disconnect`, and while a hook is on
    the point itself. At other times the projection runs as if there were no hook point, except under a trace.

    Args:
        name: "q" or "k".
        heads: how many query (key) heads.
        width: d_head.
        start: the first of its columns in the output of a fused projection; None for a projection of its own.
    """

    def __init__(self, name: str, heads: int, width: int, start: int | None = None) -> None:
        super().__init__()
        self.name, self.heads, self.width, self.start = name, heads, width, start
        self.connections = 0
        self.source: list[nn.Module] = []  # in a list: a module set as an attribute would become a child
        self.attention: list[Any] = []

    def register_forward_hook(self, hook: Callable[..., Any], **options: Any) -> Any:
        """As `torch.nn.Module.register_forward_hook`."""
        return _ConnectedHandle(self, super().register_forward_hook(hook, **options))

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> Any:
        """As `torch.nn.Module.register_forward_pre_hook`."""
        return _ConnectedHandle(self, super().register_forward_pre_hook(hook, **options))

    def connect(self) -> None:
        """Pass the projection's output through this point until `disconnect` was called as often as `connect`."""
        self.connections += 1
        if not self.source:
            self.source.append(self.find_source())
            self.source[0].register_forward_hook(self.pass_through)

    def disconnect(self) -> None:
        """Undo one `connect`."""
        self.connections -= 1
        if self.connections == 0:
            # Found by the point that it belongs to: a copy of the model has a hook of its own, and no handle.
            hooks = self.source.pop()._forward_hooks
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]

    def find_source(self) -> Any:
        """The module whose output is, or holds, the queries (keys) before rotation."""
        attention = self.attention[0]
        fused = getattr(attention, "fused_projections", None)
        if fused is not None:
            return attention.get_submodule(fused[self.name][0])
        norm = _norm_before_rotation(attention, self.name)
        return attention._modules[f"{self.name}_proj"] if norm is None else norm

    def check_source(self) -> None:
        """Raise if the module that computes queries (keys) was replaced since this point was connected to it.

        Raises:
            ValueError: it was, as LoRA and quantisation do.
        """
        if self.source and self.source[0] is not self.find_source():
            raise ValueError(
                f"the {self.name}_proj of {type(self.attention[0]).__name__} was replaced after a hook was put on "
                f"hook_{self.name}, which therefore missed what the new module computes: remove the hook and put "
                "it on again"
            )

    def pass_through(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        """The edited output of the projection; None where nothing was edited, or nothing sees the point."""
        if not self.listened_to():
            self.skip()
            return None
        if self.start is not None:
            part = slice(self.start, self.start + self.heads * self.width)
            heads = output[..., part].unflatten(-1, (self.heads, self.width))
            changed = self(heads)
            if changed is heads and not _has_gradient(heads):
                return None
            return torch.cat([output[..., : part.start], changed.flatten(-2), output[..., part.stop :]], -1)
        if output.ndim == 3:
            heads = output.unflatten(-1, (self.heads, self.width))
            edited: Tensor = self(heads)
            return None if edited is heads and not _has_gradient(heads) else edited.flatten(-2)
        # [batch, position, head, d_head], or [batch, head, position, d_head] where the module transposed before.
        if not self._transposed(inputs[0], output):
            edited = self(output)
            return None if edited is output else edited
        heads = output.transpose(1, 2)
        edited = self(heads)
        return None if edited is heads and not _has_gradient(heads) else edited.transpose(1, 2)

    def _transposed(self, value: Tensor, output: Tensor) -> bool:
        if output.shape[1] != self.heads or output.shape[2] != self.heads:
            return output.shape[1] == self.heads
        # As many positions as heads: a transposed view has the smaller stride first.
        return value.stride(1) < value.stride(2)


def _has_gradient(view: Tensor) -> bool:
    """Whether a view may get a gradient: the network must then continue from the view itself."""
    return torch.is_grad_enabled() and view.requires_grad


class _ConnectedHandle:
    """Removes a hook on a `ProjectionPoint`, and the connection that it needed."""

    def __init__(self, point: ProjectionPoint, handle: RemovableHandle) -> None:
        self.point, self.handle, self.removed = point, handle, False
        self.id = handle.id
        point.connect()

    def remove(self) -> None:
        """Remove the hook; a second call does nothing."""
        self.handle.remove()
        if not self.removed:
            self.removed = True
            self.point.disconnect()

    def __enter__(self) -> "_ConnectedHandle":
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


def _add_projection_points(attention: Any) -> None:
    """Give an attention module `hook_q` and `hook_k`, where it has projections for both.

    They are `q_proj` and `k_proj`, or those that a family names in `fused_projections` of the module: for "q" and
    "k" the name of the projection, and the first of its output's columns.
    """
    width = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    sizes = {name: _out_features(getattr(attention, f"{name}_proj", None)) for name in ("q", "k")}
    fused = getattr(attention, "fused_projections", None)
    if fused is not None:
        sizes = dict.fromkeys(("q", "k"), attention.config.num_attention_heads * width)
    clipped = getattr(attention.config, "clip_qkv", None) is not None
    if not isinstance(width, int) or clipped or any(not size or size % width for size in sizes.values()):
        return
    for name, size in sizes.items():
        heads = size // width
        if name == "q" and _norm_before_rotation(attention, "q") is not None:
            own = attention.config.num_attention_heads
            heads = own if heads == 2 * own else heads  # the other half of the projection is a gate (Qwen3-Next)
        point = ProjectionPoint(name, heads, width, None if fused is None else fused[name][1])
        point.attention.append(attention)
        attention.add_module(f"hook_{name}", point)


def _out_features(module: Any) -> int:
    size = getattr(module, "out_features", None)
    return size if isinstance(size, int) else 0
