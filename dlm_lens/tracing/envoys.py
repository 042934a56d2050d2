"""Envoys of attention and of the sampler: values that a trace reads and edits; names of the other modules."""

from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Bool, Float
from nnsight import Envoy
from nnsight.intervention.eproperty import eproperty
from nnsight.intervention.interleaver import Mediator
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dlm_lens.adapters.head import final_norm
from dlm_lens.arguments import check_index
from dlm_lens.attention import (
    HOOK_POINTS,
    NAMES,
    Hook,
    HookKey,
    PointContext,
    SinkLayout,
    adding_module,
    as_hook,
    attends_causally,
    attention_blocks,
    attention_of,
    attention_stacks,
    hook_keys,
    hook_point,
    hooked_attentions,
    step_in_stack,
)
from dlm_lens.attention.layers import MLPS
from dlm_lens.printable import shown
from dlm_lens.tracing.steps import Step


class PointProperty(eproperty):
    """A hook point of an attention module as a value of a trace.

    Raises:
        ValueError: it is read or assigned in an attention that does not have the point (`q` of GPT-2).
    """

    def __get__(self, envoy: Any, owner: Any = None) -> Any:
        if envoy is not None:
            hook_point(envoy._module, str(self.name))
        return super().__get__(envoy, owner)

    def __set__(self, envoy: Any, value: Any) -> None:
        hook_point(envoy._module, str(self.name))
        super().__set__(envoy, value)


class LayersEnvoy(Envoy):
    """A list of modules, whose entries are named where one is not there."""

    def __getitem__(self, key: Any) -> Any:
        """The entry of an index, negative from the end, or the entries of a slice.

        Raises:
            IndexError: naming the index, and how many entries there are.
        """
        if isinstance(key, int) and not -len(self) <= key < len(self):
            path = self.path.removeprefix(self.root.path).lstrip(".")
            name = module_names(self.root._module).get(path, path)
            raise IndexError(
                f"lm.{name}[{key}] is not there: it has {len(self)}, 0 to {len(self) - 1}, or -{len(self)} to -1"
            )
        return super().__getitem__(key)


class AttentionEnvoy(Envoy):
    """An attention module, whose hook points are values to read, to edit in place and to assign.

    `q`, `k`, `v`, `rot_q`, `rot_k`, `z` are `[batch, position, head, d_head]`, `scores` and `pattern`
    `[batch, head, query, key]`; in a sink model positions count the sink tokens, and with guidance the batch is the
    conditional rows and then the unconditional ones. Scores and pattern are computed only in passes in which a
    trace reads or edits them.

    Reading a point that the architecture does not have (`q` and `k` of GPT-2, which projects both at once) raises
    a ValueError that lists the points it has.
    """

    @PointProperty(key="hook_q.output", description="queries before rotation")
    def q(self, value: Tensor) -> Float[Tensor, "batch position head d_head"]:
        """Queries before rotation."""
        return value

    @PointProperty(key="hook_k.output", description="keys before rotation")
    def k(self, value: Tensor) -> Float[Tensor, "batch position kv_head d_head"]:
        """Keys before rotation, of the key/value heads."""
        return value

    @PointProperty(key="hook_v.output", description="values")
    def v(self, value: Tensor) -> Float[Tensor, "batch position kv_head d_head"]:
        """Values, of the key/value heads."""
        return value

    @PointProperty(key="hook_rot_q.output", description="queries after rotation")
    def rot_q(self, value: Tensor) -> Float[Tensor, "batch position head d_head"]:
        """Queries after rotation."""
        return value

    @PointProperty(key="hook_rot_k.output", description="keys after rotation")
    def rot_k(self, value: Tensor) -> Float[Tensor, "batch position kv_head d_head"]:
        """Keys after rotation, of the key/value heads."""
        return value

    @PointProperty(key="hook_scores.output", description="attention scores before the softmax")
    def scores(self, value: Tensor) -> Float[Tensor, "batch head query key"]:
        """Scores before the softmax, masked."""
        return value

    @PointProperty(key="hook_pattern.output", description="attention probabilities")
    def pattern(self, value: Tensor) -> Float[Tensor, "batch head query key"]:
        """Attention probabilities; every row sums to 1."""
        return value

    @PointProperty(key="hook_z.output", description="values mixed by the pattern")
    def z(self, value: Tensor) -> Float[Tensor, "batch position head d_head"]:
        """Values mixed by the pattern, before the output projection."""
        return value

    def __repr__(self) -> str:
        """Nnsight's tree of values, without the points that this attention does not have."""
        absent = tuple(f"  ({name}) -> " for name in HOOK_POINTS if f"hook_{name}" not in self._module._modules)
        lines = super().__repr__().split("\n")
        return "\n".join(line for line in lines if not (absent and line.startswith(absent)))

    def apply(self, hook: Hook, step: Step | None = None) -> None:
        """Run a hook of `dlm_lens.hooks` at its site in this layer, with the context of `step`.

        The site may also be "attn_out" or "mlp_out", what the layer's attention or MLP adds to the residual stream
        (`lm.layers[i].attn.output`, `.mlp.output`), or "resid", the output of the layer (`lm.layers[i].output`).

        A hook with layers of its own (`at_layers`, `patch_from`) does nothing in others.

        Raises:
            TypeError: `step` is no step of `tracer.steps`.
            ValueError: the hook has no such site, acts in another stack of layers (`at_encoder`) or needs what the
                run or the model do not have; or the step is one of an AR run that keeps keys in a cache.
        """
        hook, own = as_hook(hook), self._stack
        if hook.stack not in ("", own):
            raise ValueError(
                f"{hook} acts in the {hook.stack}, and this is another layer; apply it to "
                f"lm.{hook.stack}_layers[i].attn"
            )
        if step is not None and not isinstance(step, Step):
            raise TypeError(f"apply: step is {step!r}; give the step of the loop, `for step in tracer.steps`")
        blocks = attention_blocks(self.root._module, own)
        count = len(blocks)
        for layer in hook.layers or ():
            check_index("layer", layer, count, f"{hook}: ")
        if hook.layers is not None and self._module.hook_layer not in {layer % count for layer in hook.layers}:
            return
        block = blocks[self._module.hook_layer]
        hook.check_layer(block)
        if hook.site in HOOK_POINTS:
            value = getattr(self, hook.site)
            setattr(self, hook.site, self._edited(hook, value, step, count))
            return
        # Layers without attention (Qwen3-Next) lie between those that hooks count.
        layers = getattr(self.root, f"{own}_layers" if own else "layers")
        layer = next(each for each in layers if each._module is block)
        path = site_path(block, hook.site)
        envoy = layer.get(path) if path else layer
        value = envoy.output
        first = value[0] if isinstance(value, tuple) else value
        edited = self._edited(hook, first, step, count)
        envoy.output = (edited, *value[1:]) if isinstance(value, tuple) else edited

    def _edited(self, hook: Hook, value: Tensor, step: Step | None, depth: int) -> Tensor:
        """The edited activation; in a scan, which has shapes alone, as it is: a hook keeps the shape."""
        with unset_fake_temporarily():
            if step is None:
                self.root.warn_outside_run(hook)
            context = self._context(hook, step, rows=len(value), depth=depth)
        return value if detect_fake_mode() else hook(value, context)

    def _context(self, hook: Hook, step: Step | None, rows: int, depth: int) -> PointContext:
        root, site, stack = self.root, hook.site, self._stack
        causal = attends_causally(root._module, stack)
        layer = self._module.hook_layer
        name = f"{stack}.blocks.{layer}.{NAMES[site]}" if stack else f"blocks.{layer}.{NAMES[site]}"
        run = None if step is None else root.run_of_hook(hook, step).for_rows(rows)
        run = step_in_stack(attention_stacks(root._module)[stack], run) if stack else run
        attention_pass = rows_of_invoke = None
        if site in ("scores", "pattern"):
            attention_pass = self._module.get_submodule(f"hook_{site}").attention_pass
            rows_of_invoke = root.invoke_rows()
        sinks, key = SinkLayout.of(root), self._hook_key(hook, step)
        return PointContext(name, layer, sinks, causal, run, depth, attention_pass, rows_of_invoke, key)

    @property
    def _stack(self) -> str:
        root = self.root._module
        names = attention_stacks(root)
        if len(names) == 1:
            return ""
        return next(name for name in names if any(self._module is each for each in hooked_attentions(root, name)))

    def _hook_key(self, hook: Hook, step: Step | None) -> HookKey | None:
        """The key that tells the hook from equal ones that were applied to this layer at this step."""
        if step is None:
            return None
        key = ("applied", self._module.hook_layer, hook.site)
        at, applied = step.run.memory.get(key, (-1, ()))
        applied = (*(applied if at == int(step) else ()), hook)
        step.run.memory[key] = (int(step), applied)
        return hook_keys(applied)[-1]


class SamplerEnvoy(Envoy):
    """The sampler of the run: the tokens it proposes, their confidence, the positions it unmasks and revises."""

    @eproperty(key="propose.output", description="x0: proposed tokens [batch, position]")
    def proposal(self, value: Any) -> Tensor:
        """x0: the token proposed for every position that was evaluated; elsewhere the token of the canvas."""
        return value[0].clone()

    @proposal.postprocess  # type: ignore[no-redef]
    def proposal(self, value: Any) -> Any:
        """Combine assigned tokens with the confidence."""
        raw = self._raw_proposal()
        return type(raw)(_assigned("proposal", value, raw[0]), raw[1])

    @proposal.transform  # type: ignore[no-redef]
    def proposal(self, view: Any, raw: Any) -> Any:
        """Combine edited tokens with the confidence."""
        return type(raw)(view, raw[1])

    @eproperty(key="propose.output", description="confidence that ranks the positions [batch, position]")
    def confidence(self, value: Any) -> Tensor:
        """The score by which positions are ranked; -inf where a position is not eligible."""
        return value[1].clone()

    @confidence.postprocess  # type: ignore[no-redef]
    def confidence(self, value: Any) -> Any:
        """Combine an assigned confidence with the tokens."""
        raw = self._raw_proposal()
        return type(raw)(raw[0], _assigned("confidence", value, raw[1]))

    @confidence.transform  # type: ignore[no-redef]
    def confidence(self, view: Any, raw: Any) -> Any:
        """Combine an edited confidence with the tokens."""
        return type(raw)(raw[0], _assigned("confidence", view, raw[1]))

    @eproperty(key="select.output", description="positions unmasked at this step [batch, position]")
    def unmasked(self, value: Tensor) -> Bool[Tensor, "batch position"]:
        """The positions that the sampler decides at this step; assign to force an order.

        A sampler that renoises (uniform noise) selects among decided positions too: those that stay decided are in
        it, and what is left out becomes open.
        """
        return value

    @unmasked.postprocess  # type: ignore[no-redef]
    def unmasked(self, value: Any) -> Tensor:
        """Truth values, or 0 and 1 for every position."""
        return _assigned("unmasked", value, Mediator.value(f"{self.path}.select.output"))

    @eproperty(key="revise.output", description="decided positions rewritten at this step [batch, position]")
    def revised(self, value: Tensor) -> Bool[Tensor, "batch position"]:
        """The decided positions that take over the proposal at this step; none in samplers that do not edit."""
        return value

    @revised.postprocess  # type: ignore[no-redef]
    def revised(self, value: Any) -> Tensor:
        """Truth values, or 0 and 1 for every position."""
        return _assigned("revised", value, Mediator.value(f"{self.path}.revise.output"))

    @property
    def written(self) -> Tensor:
        """The canvas after the step, `[batch, position]`; it follows from `proposal`, `unmasked` and `revised`."""
        return self.output[0]

    @written.setter
    def written(self, value: Any) -> None:
        raise AttributeError(
            "lm.sampler.written follows from lm.sampler.proposal and lm.sampler.unmasked; assign to one of them, "
            "or to lm.canvas in the next step"
        )

    def _raw_proposal(self) -> Any:
        return Mediator.value(f"{self.path}.propose.output")


def _assigned(name: str, value: Any, own: Tensor) -> Tensor:
    """A value that was assigned to one of the sampler's, in the shape and dtype of the value it replaces.

    Raises:
        ValueError: something that has no such shape, fractions where token ids belong, positions where truth values
            belong, or a confidence that cannot be ranked.
    """
    try:
        given = torch.as_tensor(value, device=own.device)
        fitting = given.expand(own.shape)
    except (RuntimeError, TypeError, ValueError):
        of = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else shown(value)
        raise ValueError(
            f"lm.sampler.{name} was assigned {of}; assign [batch, position], of shape {list(own.shape)} here"
        ) from None
    whole = given.shape == own.shape and bool(((given == 0) | (given == 1)).all())
    if own.dtype == torch.bool and given.dtype != torch.bool and not whole:
        # Numbers may be positions: broadcast to truth values, [10] would stand for every position.
        raise ValueError(
            f"lm.sampler.{name} was assigned {shown(value)}; assign truth values [batch, position], such as "
            "step.masked & (torch.arange(step.masked.shape[1]) == 10)"
        )
    if own.is_floating_point() and bool((fitting.isnan() & ~own.isnan()).any()):
        raise ValueError(f"lm.sampler.{name} was assigned NaN; assign numbers, or -inf where none is to be chosen")
    if given.is_floating_point() and not own.is_floating_point() and own.dtype != torch.bool:
        raise ValueError(f"lm.sampler.{name} was assigned a tensor of {given.dtype}; it must hold token ids")
    return fitting.to(own.dtype)


def module_names(model: Any) -> dict[str, str]:
    """Path of a module -> its name in a trace, the same for all families.

    `layers`, `embed`, `ln_final` and `lm_head`; in a layer `attn` and `mlp`. In a model with an encoder its layers
    are `encoder_layers`.

    Raises:
        ValueError: a model whose modules do not have such places, or whose `lm_head` is another module.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    block, *others = attention_blocks(model)
    for each in others:
        attention_of(each)  # raises where a layer has several, of which a trace would misname one
    layers = model.get_submodule(paths[id(block)].rpartition(".")[0])
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"attention of {type(model).__name__} is a child of {paths[id(block)]}, and a trace reads that of "
            "lm.layers[i]: use dlm_lens.denoise(hooks=...) and dlm_lens.record"
        )
    head = model._modules.get("lm_head")
    if head is not None and head is not model.get_output_embeddings():
        raise ValueError(
            f"{type(model).__name__} calls another module lm_head than its output embedding, which a trace reads "
            "by that name: use dlm_lens.denoise(hooks=...) and dlm_lens.record"
        )
    names = {
        paths[id(block)].rpartition(".")[0]: "layers",
        paths[id(model.get_input_embeddings())]: "embed",
        paths[id(model.get_output_embeddings())]: "lm_head",
        _child(block, attention_of(block)): "attn",
    }
    for stack in attention_stacks(model):
        if stack:
            names[paths[id(attention_blocks(model, stack)[0])].rpartition(".")[0]] = f"{stack}_layers"
    names[_mlp(block)] = "mlp"  # OPT has no such module; then no module has the name
    with suppress(ValueError):
        names[paths[id(final_norm(model))]] = "ln_final"
    return {path: name for path, name in names.items() if path != name}


def _mlp(block: nn.Module) -> str:
    """Name of the layer's MLP. In Gemma 2 a norm after it adds to the residual stream."""
    return next((name for name in MLPS if name in block._modules), "mlp")


def _child(block: nn.Module, module: nn.Module) -> str:
    return next(name for name, child in block.named_children() if child is module)


def site_path(block: nn.Module, site: str) -> str:
    """Path in a layer of the module that it adds to the stream at "attn_out" or "mlp_out"; "" of "resid"."""
    module = adding_module(block, site)
    return next(path for path, child in block.named_modules() if child is module)
