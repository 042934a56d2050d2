"""Hooks of a run in a bridge: which hook points they run at, and the denoising step that each call receives."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens import patching

from dlm_lens.arguments import check_index
from dlm_lens.attention import (
    NAMES,
    ColumnHook,
    ColumnStats,
    Hook,
    HookKey,
    HookLike,
    PointContext,
    RunStep,
    SinkLayout,
    Site,
    as_hook,
    attention_stack,
    checked,
    columns_of,
    counted_queries,
    hook_keys,
    is_hook,
    listening,
    visible_in,
)
from dlm_lens.printable import shown
from dlm_lens.sampling import StepPlan
from dlm_lens.sampling.observers import StepObserver
from dlm_lens.sampling.run_checks import check_hooks, hidden_in, warn_of_steps_not_reached
from dlm_lens.shapes import same_shape

logger = logging.getLogger(__name__)

HookFunction = Callable[[Any, Any], Any]
FwdHook = tuple[str | Callable[[str], bool], HookFunction]
"""A hook point's name, or a filter of names, and the function that runs there; as in `run_with_hooks`."""

_RUN_FIELDS = {field.name for field in fields(RunStep)} | {"progress", "prompt", "open", "decided"}


class StepPoint:
    """A HookPoint of TransformerLens at one step of a run: the `hook` argument of hooks under `denoise`.

    It has the attributes of the HookPoint (`name`, `layer()`, `ctx`, `sinks`, ...) and those of the `RunStep`
    (`step`, `total`, `tokens`, `masked`, `valid`, `progress`, ...); `run` is the RunStep itself.
    """

    def __init__(self, point: Any, run: RunStep, place: HookKey | None = None) -> None:
        self.point, self.run, self.place = point, run, place

    def __getattr__(self, name: str) -> Any:
        if name in ("point", "run", "place"):  # a copy that was never initialised
            raise AttributeError(name)
        return getattr(self.run if name in _RUN_FIELDS else self.point, name)

    def __repr__(self) -> str:
        return f"StepPoint(name={self.point.name!r}, step={self.run.step})"


class BridgeRun(StepObserver):
    """The observer that runs hooks on a bridge's hook points during one run; use it as a context.

    Args:
        bridge: the bridge whose hook points are used.
        hooks: (name or filter, function), in the order in which they run.
        on_start: called once, before the first forward pass, as (rows of the network, step -> how many positions it
            sees at most, the run's approximate cache).
    """

    needs_full_logits = True
    whole_prefix = True

    def __init__(
        self,
        bridge: Any,
        hooks: Sequence[FwdHook],
        on_start: Callable[[int, Mapping[int, int], str | None], None] | None = None,
    ) -> None:
        super().__init__(bridge.original_model)
        self.bridge, self.hooks, self.on_start = bridge, hooks, on_start
        # The others are plain functions, as TransformerLens takes them, which declare nothing.
        self.step_hooks = [as_hook(hook) for _, hook in hooks if is_hook(hook)]
        self._stack = ExitStack()
        self._begun = False

    def __enter__(self) -> "BridgeRun":
        warn_of_folded_biases(self.bridge, self.step_hooks)
        with ExitStack() as stack:
            stack.enter_context(listening(self.model))
            fwd_hooks = [(name, self._with_step(name, hook, key)) for name, hook, key in self._keyed_hooks()]
            stack.enter_context(self.bridge.hooks(fwd_hooks=fwd_hooks))
            if any(hook.needs_clean_pass for hook in self.step_hooks):
                stack.callback(self.model.register_forward_pre_hook(self._clean_pass, with_kwargs=True).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins; before the first one hooks may refuse the run."""
        canvas = super().step(plan, canvas, masked)
        rows = len(canvas) * self.sampler.halves
        if self.now is not None:
            self.now = self.now.for_rows(rows)
            if not self._begun:
                self._begun = True
                self._begin(rows, self._seen(plan, canvas.shape[1]), self.now)
        return canvas

    def stop(self) -> None:
        """The run is over."""
        warn_of_steps_not_reached(self.step_hooks, self.now)
        super().stop()

    def record(self, hooks: Sequence[HookLike]) -> dict[str, Any]:
        """What the settings of a finished run hold about its hooks, as after `dlm_lens.denoise`."""
        if not hooks:
            return {}
        entries: dict[str, Any] = {"hooks": tuple(map(repr, hooks))}
        if any(isinstance(hook, ColumnHook) for hook in checked(hooks)):
            entries |= hidden_in(self._memory, hooks)
        return entries

    def _seen(self, plan: StepPlan, positions: int) -> dict[int, int]:
        """How many positions each step from `plan` on sees at most: all but in AR decoding.

        In blocks fewer too; but where the number of steps depends on the tokens, so does the block of a step.
        """
        if not self.sampler.autoregressive:
            return dict.fromkeys(range(plan.index, plan.total), positions)
        plans = self.sampler.plans(plan.span[0], positions)
        return {one.index: one.prefix_length for one in plans[plan.index :]}

    def _begin(self, rows: int, seen: Mapping[int, int], now: RunStep) -> None:
        clean = [hook for hook in self.step_hooks if hook.needs_clean_pass]
        if self.sampler.cache is not None and clean:
            raise ValueError(
                f"{clean[0]!r} with cache={self.sampler.cache!r}: a bridge has no keys of passes without hooks; "
                "use dlm_lens.denoise"
            )
        whole = [hook for hook in self.step_hooks if hook.site in ("v", "rot_k")]
        if self.sampler.cache is not None and whole:
            raise ValueError(
                f"{whole[0]!r} with cache={self.sampler.cache!r}: a bridge's {whole[0].site} has the positions "
                "that a step computes, and not the kept ones that it reads too; use dlm_lens.denoise"
            )
        check_hooks(self.step_hooks, now)
        if self.on_start is not None:
            with self._silence():
                self.on_start(rows, seen, self.sampler.cache)

    @contextmanager
    def _silence(self) -> Iterator[None]:
        """Exclude forward passes that are no steps from the run's hooks and from recorders of the bridge."""
        self.bridge.silent = True
        try:
            yield
        finally:
            self.bridge.silent = False

    def at(self, point: Any, rows: int, place: HookKey | None = None) -> Any:
        """The `hook` argument at this point and step, with the run's rows repeated for an activation of `rows`."""
        if self.now is None:
            return point
        fits = rows > 0 and rows % len(self.now.tokens) == 0
        return StepPoint(point, self.now.for_rows(rows) if fits else self.now, place)

    def _keyed_hooks(self) -> Iterator[tuple[str | Callable[[str], bool], HookFunction, HookKey]]:
        """Every hook at every point, with the key that tells it from equal hooks at that point."""
        before: dict[str, list[HookFunction]] = {}
        for name, hook in self.hooks:
            names = [name] if isinstance(name, str) else [each for each in self.bridge.hook_dict if name(each)]
            if not names:
                raise ValueError(
                    f"fwd_hooks: the filter {shown(name)} of {shown(hook)} matches no hook point; see "
                    "bridge.hook_dict for the names"
                )
            for each in names:
                before.setdefault(each, []).append(hook)
            # A filter and a name may meet at some points of the model.
            keys = [hook_keys(before[each])[-1] for each in names]
            yield name, hook, max(keys, key=lambda key: key[1])

    def _with_step(
        self, name: str | Callable[[str], bool], function: HookFunction, key: HookKey
    ) -> Callable[..., Any]:
        def hook_function(tensor: Any, hook: Any) -> Any:
            """The function with the step of the run, whose result has the shape of what it was given."""
            if self.bridge.silent or self.elsewhere:
                return None
            rows = tensor.shape[0] if isinstance(tensor, Tensor) and tensor.ndim else 0
            edited = function(tensor, hook=self.at(hook, rows, key))  # type: ignore[call-arg]
            if edited is not None and isinstance(tensor, Tensor):
                where = name if isinstance(name, str) else hook.name
                same_shape(f"the hook at {where}", tensor, edited, or_none=True)
            return edited

        hook_function.__wrapped__ = function  # type: ignore[attr-defined]  # for `check_point`
        return hook_function

    def _clean_pass(self, model: Any, inputs: Any, kwargs: Any) -> None:
        """Measure what every layer's keys receive without hooks, in one more pass over the same input."""
        if self.bridge.silent or self.elsewhere or self.now is None or self.now.clean is not None:
            return
        columns: dict[int, ColumnStats] = {}

        def read(scores: Float[Tensor, "batch head query key"], hook: Any) -> None:
            rows, _, length, keys = scores.shape
            start = None if self.now is None else self.now.first_of(length)
            queries = counted_queries(rows, length, keys, self.at(hook, rows), scores.device, start=start)
            pattern = hook.attention_pass.softmax(scores)
            columns[hook.layer()] = columns_of(pattern, visible_in(scores), queries)

        points = [(f"blocks.{layer}.attn.hook_attn_scores", read) for layer in range(len(self.bridge.blocks))]
        with self._silence(), torch.no_grad(), self.bridge.hooks(fwd_hooks=points):
            model(*inputs, **kwargs)
        self.now = replace(self.now, clean=lambda: columns)


def checked_pairs(fwd_hooks: Any) -> list[FwdHook]:
    """The pairs of `fwd_hooks`; None for none.

    Raises:
        ValueError: something else than a list of pairs.
    """
    if not isinstance(fwd_hooks, Iterable | None):
        raise ValueError(f"fwd_hooks is {shown(fwd_hooks)}; give a list of pairs (name or filter, function)")
    found = list(fwd_hooks or ())
    for pair in found:
        kinds = isinstance(pair, tuple | list) and [isinstance(each, str) or 2 * callable(each) for each in pair]
        if kinds not in ([1, 2], [2, 2]):
            raise ValueError(
                f"fwd_hooks takes pairs (name or filter of names, function), not {shown(pair)}; hooks of "
                "dlm_lens.hooks go into hooks="
            )
    return found


def fwd_hooks_of(bridge: Any, hooks: Sequence[HookLike]) -> list[tuple[str, Hook]]:
    """(name of the hook point, hook) for every layer that each hook acts in.

    Names are those of the native model's activations: see `point_of`.

    Raises:
        ValueError: a site or a layer that the model does not have.
    """
    count, fwd_hooks = len(bridge.blocks), []
    for hook in checked(hooks):
        attention_stack(bridge.original_model, hook.stack)
        layers = hook.layers
        for layer in range(count) if layers is None else layers:
            check_index("layer", layer, count, f"{hook}: ")
            fwd_hooks.append((f"blocks.{layer % count}.{point_of(bridge.blocks[layer].attn, hook.site)}", hook))
    return fwd_hooks


def point_of(attention: Any, site: Site) -> str:
    """The hook point inside a block that has what the native model has at a site.

    "z" of a gated attention is the value before the gate, `hook_z_ungated`. "q" and "k" of an attention with a norm
    of each head (Qwen3) are those after it, `hook_q_normed` and `hook_k_normed`.
    """
    if site == "z" and "gate" in attention._modules:
        return "attn.hook_z_ungated"
    if site in ("q", "k") and "q_norm" in attention._modules:
        return f"attn.hook_{site}_normed"
    return NAMES[site]


def check_point(bridge: Any, point: Any, name: str, function: Any) -> None:
    """Raise if a hook of `dlm_lens.hooks` is put at another hook point than that of its site.

    Plain functions, which have no site, belong at every point.

    Raises:
        ValueError: naming the hook, its point and the other one.
    """
    function = inspect.unwrap(function)
    if not is_hook(function):
        return
    hook, layer = as_hook(function), PointContext.of(point).index
    own = f"blocks.{layer or 0}.{point_of(bridge.blocks[layer or 0].attn, hook.site)}"
    if layer is None or bridge.hook_dict[own] is not point:
        raise ValueError(f"{hook} belongs at {own} and was put at {name}; name that point, or give hooks=[...]")


def warn_of_folded_biases(bridge: Any, hooks: Sequence[HookLike]) -> None:
    """Warn of hooks at v, z and pattern where compatibility mode moved the value biases past them."""
    if not bridge.folds_value_biases:
        return
    found = dict.fromkeys(str(hook) for hook in hooks if hook.site in ("v", "z", "pattern"))
    if found:
        logger.warning(
            "%s: compatibility mode has folded the value biases into the bias of attention's output, so that v and "
            "z are without them and an edit of v, z or a pattern's sums can differ from that in the other hosts; "
            "enable_compatibility_mode(fold_value_biases=False) keeps them equal",
            ", ".join(found),
        )


def refuse_hooks(pairs: Sequence[tuple[Any, Any]], where: str) -> None:
    """Raise if one of the functions of (name, function) is a hook of `dlm_lens.hooks`.

    Raises:
        ValueError: naming the hook and its point; `where` ends the sentence.
    """
    for name, function in pairs:
        hook = inspect.unwrap(function)
        if is_hook(hook):
            raise ValueError(f"{hook} was put at {shown(name)}, and hooks of dlm_lens.hooks do not run {where}")


_POSITION_ENTRIES = {
    patching.layer_pos_patch_setter: (1,),
    patching.layer_pos_head_vector_patch_setter: (1,),
    patching.layer_head_pos_pattern_patch_setter: (2,),
    patching.layer_head_dest_src_pos_pattern_patch_setter: (2, 3),
}
"""Setters of TransformerLens's patching helpers -> which entries of their index are positions."""


def past_sinks(fwd_hooks: Sequence[tuple[Any, Any]], layout: SinkLayout) -> list[tuple[Any, Any]]:
    """Hooks of TransformerLens's patching helpers, moved from canvas positions to those of the activations.

    The helpers count positions of the tokens; an activation also has the positions of sink tokens. The index of a
    setter that is not TransformerLens's own is not changed.
    """
    first = layout.locate(0, layout.count + 1)
    return [(name, _moved(hook, first)) for name, hook in fwd_hooks]


def _moved(hook: Any, first: int) -> Any:
    if not (first and isinstance(hook, partial) and hook.func.__module__ == patching.__name__):
        return hook
    setter = inspect.getclosurevars(hook.func).nonlocals.get("patch_setter")
    entries = _POSITION_ENTRIES.get(setter, ())
    index = [value + first if entry in entries else value for entry, value in enumerate(hook.keywords["index"])]
    return partial(hook, index=index)
