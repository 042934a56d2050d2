"""`DiffusionLM`: a masked DLM (or an AR baseline) as an nnsight model whose runs have steps."""

import copy
import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Int
from nnsight.intervention.envoy import traceable
from nnsight.intervention.eproperty import eproperty
from nnsight.intervention.interleaver import Mediator
from nnsight.modeling.huggingface import HuggingFaceModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers.utils import TransformersKwargs

from dlm_lens.adapters import family_of, load
from dlm_lens.attention import (
    OUTSIDE,
    ColumnStats,
    Hook,
    RunStep,
    attention_stacks,
    hooked_attentions,
    warn_of_shifts,
)
from dlm_lens.attention.hook_points import ProjectionPoint
from dlm_lens.attention.model_access import without_wrappers
from dlm_lens.placement import input_device
from dlm_lens.sampling import DenoisingRun, RunObserver, Sampler
from dlm_lens.sampling.network import network_inputs
from dlm_lens.sampling.prompts import Prompts, read_prompts
from dlm_lens.sampling.run_checks import check_hooks
from dlm_lens.sampling.settings import listed_observers
from dlm_lens.tracing.controllers import TracedModule, add_projection_point
from dlm_lens.tracing.envoys import AttentionEnvoy, LayersEnvoy, SamplerEnvoy, module_names
from dlm_lens.tracing.self_check import check_model
from dlm_lens.tracing.steps import Step, loop_state
from dlm_lens.tracing.traced_run import (
    PROMPT_NAMES,
    LastOfTrace,
    PromptBatcher,
    Run,
    TracedRun,
    is_generate,
    run_or_scan,
)
from dlm_lens.tracing.tracers import RunEditingTracer, RunInterleaver, RunScanningTracer, RunTracer


class _NoRun(Sampler):
    """The module of `lm.sampler` outside runs; a run replaces it by its own sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.propose, self.select, self.revise = nn.Identity(), nn.Identity(), nn.Identity()


class DiffusionLM(HuggingFaceModel):
    """A model of `dlm_lens.load` in nnsight, with the denoising step as an axis.

    `lm.trace(text_or_ids)` is one forward pass (bidirectional; causal for an AR baseline).
    `with lm.generate(prompt, steps=...) as tracer:` is a whole run with the family's own sampler, in the loop of
    `dlm_lens.denoise`. Inside, `for step in tracer.steps[...]` reads and edits any activation of any step:
    `lm.canvas`, `lm.layers[i].attn.pattern` (`q k v rot_q rot_k scores pattern z`), `lm.layers[i].output` (the
    residual stream), `lm.layers[i].mlp.output`, `lm.lm_head.output`, `lm.sampler.confidence`,
    `lm.sampler.unmasked`, `lm.sampler.revised`. `tracer.result` is the `DenoisingRun`.

    Args:
        model: an embedded model's name, a directory, a hub name, or a model of `dlm_lens.load`.
        check: run two tiny forwards and check that patterns can be read, are patterns, and can be edited.
        **options: of `dlm_lens.load`, for a name.

    Raises:
        ValueError: options beside a loaded model, or a model that dlm_lens did not load.
        SelfCheckError: the check failed.
    """

    _batcher_class = PromptBatcher

    def __init__(self, model: Any, *, check: bool = True, **options: Any) -> None:
        if isinstance(model, str | Path):
            model = load(model, **options)
        elif options:
            raise ValueError(f"{', '.join(options)}: options are for loading; this model is loaded already")
        model = model._module if isinstance(model, DiffusionLM) else model
        if not hasattr(model, "sampler_defaults"):
            raise ValueError(f"{type(model).__name__} was not loaded by dlm_lens.load; load it, then wrap it")
        model = without_wrappers(model)
        self.causal = family_of(model.config.model_type).causal
        stacks = attention_stacks(model)
        attentions = [module for stack in stacks for module in hooked_attentions(model, stack)]
        super().__init__(
            model,
            rename=module_names(model),
            envoys={type(module): AttentionEnvoy for module in attentions} | {nn.ModuleList: LayersEnvoy},
            interleaver=RunInterleaver(),
        )
        # A child outside the module's tree, like nnsight's `generator`; a run sets its sampler there.
        self.sampler = SamplerEnvoy(
            _NoRun(), path=f"{self.path}.sampler", interleaver=self.interleaver, parent=self
        )
        self._children.append(self.sampler)
        _add_trace_readers(self)
        if check:
            check_model(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DiffusionLM":
        """A `DiffusionLM` of a copy of the model, without stored edits, whose code names this one."""
        return type(self)(copy.deepcopy(self._module, memo), check=False)

    @property
    def device(self) -> torch.device:
        """The device of token ids, to which nnsight moves a trace's inputs; of an offloaded model too."""
        return input_device(self._module)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None if it takes ids only."""
        return self._module.tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._module.tokenizer = value

    @eproperty(key="canvas", description="x_t: the tokens that a step starts from [batch, position]")
    def canvas(self, value: Tensor) -> Int[Tensor, "batch position"]:
        """x_t. Assign or edit it to set tokens, or to mask some again (`lm.config.mask_token_id`)."""
        return value.clone()

    @canvas.transform  # type: ignore[no-redef]
    def canvas(self, view: Tensor, raw: Tensor) -> Tensor:
        """The edited copy; the canvas of the step before is not changed."""
        return view

    @traceable
    def generate(
        self,
        prompt: Any,
        attention_mask: Any = None,
        *,
        grad: bool = False,
        observers: RunObserver | Sequence[RunObserver] | None = None,
        **settings: Any,
    ) -> DenoisingRun:
        """Denoise with the family's own sampler; traced (`with lm.generate(...) as tracer:`) or not.

        Args:
            prompt: text, chat messages, ids, or a list of any of them, as for `dlm_lens.denoise`.
            attention_mask: for ids: 1 content, 0 padding on the left.
            grad: keep the graphs of the forward passes, so that `with loss.backward():` works inside a step.
            observers: observers of the run, as for `dlm_lens.denoise`; a `dlm_lens.Recorder`.
            **settings: of `dlm_lens.denoise`: steps, gen_length, block_length, temperature, seed, ...

        Raises:
            ValueError: an invalid prompt or setting.
            RuntimeError: inside the body of another trace, or while another thread traces.
        """
        self.interleaver.check_free()
        canvas = f"{self.path}.canvas"
        run = TracedRun(self._module, self.interleaver, canvas, grad=grad, on_start=self._use_sampler)
        # Not on this object: the copies that `edit` makes share layers, whose hooks ask for the run, with it.
        self.interleaver.run = run
        observers = (run, *listed_observers(observers), LastOfTrace(run))
        run.going = True
        try:
            return Run.of(run_or_scan(self._module, prompt, attention_mask, observers=observers, **settings))
        finally:
            run.going = False

    def trace(self, *inputs: Any, **options: Any) -> Any:
        """Open a trace of one forward pass, of a prompt or of `inputs_embeds=`; see nnsight's `Envoy.trace`."""
        self.interleaver.check_free()
        options.setdefault("tracer_cls", RunTracer)
        return super().trace(*inputs, **options)

    def edit(self, *, inplace: bool = False, backend: Any = None) -> RunEditingTracer:
        """Open an editing trace, whose interventions act in every later trace; see nnsight's `Envoy.edit`."""
        return RunEditingTracer(self, inplace=inplace, backend=backend)

    def scan(self, *inputs: Any, fn: Any = None, backend: Any = None, **options: Any) -> RunScanningTracer:
        """Open a trace that computes shapes only: of one forward pass, or of a run with `fn=lm.generate`."""
        return RunScanningTracer(self, fn or "__call__", *inputs, backend=backend, **options)

    def _remote_backend(self, remote: bool | str, *options: Any) -> NoReturn:
        """Refuse to run on a server: NDIF has no models of this library, and no denoising loop.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"remote={remote!r}: traces of a DiffusionLM run in this process, since nnsight's servers have neither "
            "its models nor its denoising loop; leave remote out"
        )

    def run_step(self, step: Step) -> RunStep:
        """The `RunStep` that a hook receives; `clean` computes a pass without hooks.

        Raises:
            ValueError: the run is at another step.
        """
        traced: TracedRun | None = self.interleaver.run

        def clean() -> Mapping[int, ColumnStats]:
            if traced is None or traced.now is None:
                raise ValueError(f"{step}: the run is over, and a pass without hooks needs its canvas")
            rows = self.invoke_rows()
            found = traced.clean()
            return found if rows is None else {layer: columns.of_rows(rows) for layer, columns in found.items()}

        now = None if traced is None else traced.now
        if now is None or now.step != int(step):
            loop = loop_state(Mediator.current("run_step").worker)
            if loop.inside and loop.at == int(step):
                raise ValueError(
                    f"{step} had passed the hook's site when it was applied, and the model was at the next step: "
                    "apply hooks in the order in which the model computes their sites (in a layer q, k, v, rot_q, "
                    "rot_k, scores, pattern, z, attn_out, mlp_out, resid), or in another tracer.invoke()"
                )
            raise ValueError(f"step {step} is over: a hook is applied to the step that the loop is at")
        run = step.seen(now, self._rows(1))
        return replace(run, config=self.config, tokenizer=self.tokenizer, clean=clean)

    def run_of_hook(self, hook: Hook, step: Step) -> RunStep:
        """`run_step` for a hook that is applied, which may refuse the run before its first edit.

        Raises:
            ValueError: the hook needs a step, a layer, a head or a position that is not there, or the run keeps
                keys and values in a cache (an AR model's).
        """
        run = self.run_step(step)
        if self.interleaver.run is not None and self.interleaver.run.cached:
            raise ValueError(
                f"{hook}: the run keeps keys and values in a cache, so that a hook would not act on the whole "
                "prefix; decode without a cache: lm.generate(..., use_cache=False)"
            )
        checked = run.memory.setdefault("checked hooks", set())
        if hook.key not in checked:
            check_hooks([hook], run)
            checked.add(hook.key)
        return run

    def warn_outside_run(self, hook: Hook) -> None:
        """Warn, once a trace, of a hook without a step whose positions are shifted by the padding of its rows."""
        content, warned = self.interleaver.content, self.interleaver.warned
        if content is None or hook.key in warned:
            return
        warned.add(hook.key)
        rows = self._rows(1)
        warn_of_shifts([hook], content if rows is None else content[rows.to(content.device)], OUTSIDE)

    def invoke_rows(self) -> Int[Tensor, "row"] | None:
        """Rows of the network's batch that belong to the running invoke; None for all."""
        batcher = self.interleaver.batcher
        return self._rows(2 if batcher is not None and batcher.guided else 1)

    def _rows(self, halves: int) -> Int[Tensor, "row"] | None:
        """Rows of the running invoke in a batch that is `halves` times that of the run; None for all."""
        batcher, group = self.interleaver.batcher, Mediator.current("invoke_rows").batch_group
        if batcher is None or not batcher.batching or group is None:
            return None
        rows: Int[Tensor, "row"] = batcher.narrow(torch.arange(batcher.total * halves), group)
        return rows

    def _use_sampler(self, sampler: Sampler) -> None:
        self.sampler._update(_NoRun() if sampler.autoregressive else sampler)
        if self.interleaver.batcher is not None:
            self.interleaver.batcher.guided = bool(sampler.cfg_scale)

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        # A tracer asks whether it was given a prompt at all; `PromptBatcher.add` reads it.
        return int(_prompt(inputs, kwargs) is not None or "inputs_embeds" in kwargs)

    def read_invoke(self, *inputs: Any, **kwargs: Any) -> Prompts | None:
        """The prompts of an invoke; None if it has none."""
        given = _prompt(inputs, kwargs)
        if given is None:
            return None
        # Under lm.scan the forward runs on fake tensors; the prompt's ids are real.
        with unset_fake_temporarily():
            return read_prompts(self._module, given, kwargs.get("attention_mask"))

    def _batch(self, invokes: list[tuple[Prompts, Any]], fn: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The invokes' prompts, as `PromptBatcher` keeps them, as one left-padded batch, and their settings."""
        self.interleaver.content, self.interleaver.warned = None, set()
        settings: dict[str, Any] = {}
        found = []
        for prompts, kwargs in invokes:
            found.append(prompts)
            settings |= {name: value for name, value in kwargs.items() if name not in PROMPT_NAMES}
        if not found:
            return (), settings
        prompts = found[0] if len(found) == 1 else self._joined(found)
        self.interleaver.content = prompts.attention_mask
        with unset_fake_temporarily():
            if is_generate(fn):
                return (prompts.ids, prompts.attention_mask.long()), settings
            return (), {**_forward_inputs(prompts), **self._checked(settings)}

    def _checked(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a forward pass; transformers' forwards accept any name and ignore those they do not use.

        Raises:
            ValueError: the model's forward has no such argument.
        """
        names = {*inspect.signature(self._module.forward).parameters, *TransformersKwargs.__annotations__}
        for name in settings:
            if name not in names:
                raise ValueError(
                    f"lm.trace has no argument {name!r}: it takes one prompt (text, chat, ids) and the arguments "
                    f"of {type(self._module).__name__}.forward; tokenize the prompt yourself for other settings of "
                    "the tokenizer, and pass settings of a run to lm.generate"
                )
        return settings

    def _joined(self, found: list[Prompts]) -> Prompts:
        with unset_fake_temporarily():
            pairs = [pair for part in found for pair in zip(part.ids, part.attention_mask, strict=True)]
            rows = [ids[content].tolist() for ids, content in pairs]
            return read_prompts(self._module, rows)


def _prompt(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(inputs) > 1:
        raise ValueError(
            f"{len(inputs)} positional arguments; give one prompt, or a list of them, and attention_mask= by name"
        )
    return inputs[0] if inputs else kwargs.get("prompt", kwargs.get("input_ids"))


def _forward_inputs(prompts: Prompts) -> dict[str, Any]:
    return {"input_ids": prompts.ids, **network_inputs(prompts.attention_mask)}


def _add_trace_readers(lm: DiffusionLM) -> None:
    """Let attention form scores, patterns, and heads of q and k, only in passes in which a trace reads them.

    Keys and values that a cache may hold are copied in these passes alone.
    """
    interleaver = weakref.ref(lm.interleaver)
    for envoy in lm.modules():
        if isinstance(envoy, AttentionEnvoy):
            points = envoy._module._modules
            for name in {f"hook_{site}" for site in ("q", "k", "v", "rot_k", "scores", "pattern")} & set(points):
                point: Any = points[name]
                live = tuple(each for each in point.trace_readers if each.interleaver() is not None)
                traced = lm.interleaver.counts.of_module(f"{envoy.path}.{name}")
                point.trace_readers = (*live, _TraceReader(interleaver, traced))
                if isinstance(point, ProjectionPoint):
                    add_projection_point(point, lm.interleaver, traced.path)


class _TraceReader:
    """A callable that is true while a trace waits for the values of one hook point."""

    def __init__(self, interleaver: "weakref.ref[Any]", traced: TracedModule) -> None:
        self.interleaver, self.traced = interleaver, traced
        self.locations = tuple(f"{traced.path}.{name}" for name in ("output", "input", "skip"))

    def __call__(self) -> bool:
        if not self.traced.awaited:
            return False
        interleaver = self.interleaver()
        if interleaver is None or not interleaver.interleaving:
            return False
        return any(
            location in interleaver.observers or (location in interleaver.parked and interleaver._ready(location))
            for location in self.locations
        )

    def skipped(self) -> None:
        """Count a pass without values, so that nnsight's occurrence n of a pattern is that of forward n."""
        interleaver = self.interleaver()
        if interleaver is not None and interleaver.interleaving:
            self.traced.pass_by()
