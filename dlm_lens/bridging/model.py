"""`bridge`: a model of any family as a TransformerBridge that knows denoising steps."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import (
    build_bridge_config_from_hf,
    detect_tokenizer_bos_eos,
)
from transformer_lens.model_bridge.sources.transformers_driver import TransformersDriver

from dlm_lens.adapters import family_of, load
from dlm_lens.attention import Hook, SinkLayout, in_use, listening
from dlm_lens.attention.model_access import without_wrappers
from dlm_lens.bridging.architectures import ARCHITECTURES, architecture_of
from dlm_lens.bridging.hook_names import on_canvas, placed
from dlm_lens.bridging.step_cache import Keeper, NamesFilter, StepCache, Steps, bytes_per_step, chosen_points
from dlm_lens.bridging.steps import BridgeRun, Placed
from dlm_lens.bridging.weight_sharing import twin_of
from dlm_lens.placement import input_device, is_quantised
from dlm_lens.sampling import DenoisingRun, denoise


class DiffusionBridge(TransformerBridge):
    """A TransformerBridge of a masked DLM (or an AR baseline), with `denoise` and a step axis.

    Build it with `dlm_lens.bridge`. All of TransformerLens works on single forward passes (`run_with_cache`,
    `run_with_hooks`, `enable_compatibility_mode`, its patching helpers); `denoise` and `denoise_with_cache` run the
    family's own sampler, the loop of `dlm_lens.denoise`. `sinks` says where learned sink tokens stand inside:
    activations have S + k positions, logits S. While `silent`, in passes that are no steps of a run, the run's
    hooks do not act and recorders see nothing.
    """

    silent = False

    @classmethod
    def adopt(cls, bridge: TransformerBridge) -> None:
        """Give a bridge that TransformerLens built these methods, and its hook points the place of the sinks."""
        bridge.__class__ = cls
        model: Any = bridge.original_model
        causal = family_of(model.config.model_type).causal
        for point in bridge.hook_points():
            point.sinks, point.causal = SinkLayout.of(model), causal
        if getattr(model, "tokenizer", None) is None:  # booted by TransformerLens
            model.tokenizer = bridge.tokenizer
        # Text means what the tokenizer makes of it, here as in dlm_lens.denoise.
        bridge.cfg.default_prepend_bos = bridge.cfg.tokenizer_prepends_bos

    def forward(self, *args: Any, **options: Any) -> Any:
        """One forward pass; see TransformerLens's `TransformerBridge.forward`."""
        if torch.compiler.is_compiling():
            return super().forward(*args, **options)
        with in_use(self.original_model):
            return super().forward(*args, **options)

    @contextmanager
    def hooks(self, *args: Any, **options: Any) -> Iterator["DiffusionBridge"]:
        """Hooks for as long as a block lasts; see TransformerLens's `TransformerBridge.hooks`."""
        with listening(self.original_model), super().hooks(*args, **options):
            yield self

    def run_with_hooks(self, input: Any, fwd_hooks: Sequence[Any] = (), *args: Any, **options: Any) -> Any:
        """One forward pass under hooks; see TransformerLens's `TransformerBridge.run_with_hooks`.

        The hooks of its patching helpers, which count the tokens' positions, act on the same positions of
        activations that also have the sinks'.
        """
        with listening(self.original_model):
            return super().run_with_hooks(input, on_canvas(fwd_hooks, self.sinks), *args, **options)

    def run_with_cache(self, *args: Any, **options: Any) -> Any:
        """One forward pass and its activations; see TransformerLens's `TransformerBridge.run_with_cache`."""
        with listening(self.original_model):
            return super().run_with_cache(*args, **options)

    @property
    def sinks(self) -> SinkLayout:
        """Where the sink tokens stand; `pos_slice=bridge.sinks.canvas(length)` of a cache leaves the canvas."""
        return SinkLayout.of(self.original_model)

    def denoise(
        self,
        prompt: Any,
        attention_mask: Any = None,
        *,
        fwd_hooks: Sequence[Placed] = (),
        hooks: Sequence[Hook] = (),
        **settings: Any,
    ) -> DenoisingRun:
        """Denoise with the family's own sampler under hooks; without any, the run is that of `dlm_lens.denoise`.

        Hooks are called as (tensor, hook) in every forward pass. `hook` is TransformerLens's HookPoint with the
        run's state on top: `hook.step`, `hook.tokens`, `hook.masked`, `hook.valid`, `hook.progress`, `hook.sinks`.
        With guidance the rows are the conditional ones and then the unconditional ones. An AR baseline is decoded
        without a KV cache, so that hooks see every position.

        Args:
            prompt: text, chat messages, ids, or a list of any of them, as for `dlm_lens.denoise`.
            attention_mask: for ids: 1 content, 0 padding on the left.
            fwd_hooks: (name or filter of names, function), as for `run_with_hooks`.
            hooks: values of `dlm_lens.hooks`, run at their own site in the layers that they declare, or in all.
            **settings: of `dlm_lens.denoise`: steps, gen_length, block_length, temperature, seed, ...

        Raises:
            KeyError: no hook point has such a name.
            ValueError: a prompt, a setting or a site that cannot be.
        """
        run = BridgeRun(self, [*fwd_hooks, *placed(self, hooks)])
        return self._denoise(run, hooks, prompt, attention_mask, settings)

    def denoise_with_cache(
        self,
        prompt: Any,
        attention_mask: Any = None,
        *,
        names_filter: NamesFilter = None,
        cache_steps: Steps = None,
        pos_slice: Any = None,
        device: str | torch.device | None = None,
        max_bytes: int | None = None,
        fwd_hooks: Sequence[Placed] = (),
        hooks: Sequence[Hook] = (),
        **settings: Any,
    ) -> tuple[DenoisingRun, StepCache]:
        """Denoise, and keep activations: `cache[name, step]`, `cache[name]` as [step, ...], `cache.at(step)`.

        Nothing outside the filter is kept. What the cache will take is computed before the first step
        (`bytes_per_step` tells it beforehand). Hooks act before activations are kept.

        Args:
            prompt: as for `denoise`.
            attention_mask: as for `denoise`.
            names_filter: a name, a list of names or a function of a name, as for `run_with_cache`; None for all.
            cache_steps: an index, a slice or indices of steps, negative from the end; None for all.
            pos_slice: which positions to keep, as for `run_with_cache`.
            device: where activations go at once; None to leave them where they are.
            max_bytes: what the cache may take; 80% of the free memory of its device by default.
            fwd_hooks: as for `denoise`.
            hooks: as for `denoise`.
            **settings: as for `denoise`.

        Raises:
            KeyError: no hook point has such a name.
            MemoryError: the cache would not fit; with its size and what to do.
            ValueError: a prompt, a setting, a site or a step that cannot be.
        """
        keeper = Keeper(self, chosen_points(self, names_filter), cache_steps, device, pos_slice, max_bytes)
        keep = [(name, keeper) for name in keeper.points]
        run = BridgeRun(self, [*fwd_hooks, *placed(self, hooks), *keep], on_start=keeper.check)
        return self._denoise(run, hooks, prompt, attention_mask, settings), keeper.result()

    def bytes_per_step(self, names_filter: NamesFilter, positions: int, rows: int = 1) -> dict[str, int]:
        """Bytes of each matching activation per step, for `rows` canvases of `positions` (guidance: twice)."""
        return bytes_per_step(self, chosen_points(self, names_filter), positions, rows)

    def diffusion_generate(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse: TransformerLens's call of a checkpoint's own sampler knows neither steps nor batches."""
        raise NotImplementedError("use bridge.denoise(prompt), which runs the family's own sampler under hooks")

    def _ensure_generation_supported(self, api_name: str) -> None:
        if not self.adapter.supports_generation:
            raise NotImplementedError(
                f"{type(self.original_model).__name__} is a masked diffusion model and does not generate left to "
                "right; use bridge.denoise(prompt)"
            )
        super()._ensure_generation_supported(api_name)

    def process_weights(self, *args: Any, fold_value_biases: bool = True, **options: Any) -> None:
        """TransformerLens's weight processing; value biases stay where not every z gets all of them.

        Only such a bias may move after the output projection: not with a gate, with sinks whose values are zero, or
        with a spare softmax entry, whose patterns do not sum to one.

        Raises:
            ValueError: the weights are quantised.
        """
        self._check_processable()
        config: Any = self.original_model.config
        spare = getattr(config, "softmax", "standard") != "standard"
        scaled = spare or getattr(config, "gated_attention", False) or getattr(config, "zero_sink_value", False)
        super().process_weights(*args, fold_value_biases=fold_value_biases and not scaled, **options)

    def enable_compatibility_mode(
        self, disable_warnings: bool = False, no_processing: bool = False, **options: Any
    ) -> None:
        """TransformerLens's compatibility mode; see `TransformerBridge.enable_compatibility_mode`.

        Raises:
            ValueError: the weights are quantised, and processing is not switched off.
        """
        if not no_processing:
            self._check_processable()
        super().enable_compatibility_mode(disable_warnings, no_processing, **options)

    def _check_processable(self) -> None:
        for name, weight in self.original_model.named_parameters():
            if is_quantised(weight):
                raise ValueError(
                    f"compatibility mode folds and centres weights, and {name.replace('._original_component', '')} "
                    "is quantised; load the model without quantization_config, or pass no_processing=True"
                )

    def _denoise(
        self, run: BridgeRun, hooks: Sequence[Hook], prompt: Any, attention_mask: Any, settings: dict[str, Any]
    ) -> DenoisingRun:
        if family_of(self.original_model.config.model_type).causal and settings.setdefault("use_cache", False):
            raise ValueError(
                "use_cache=True hides all positions but the newest from hooks; leave it out in a bridge"
            )
        host = settings.pop("host", ())
        hosts = (run, *(host if isinstance(host, Sequence) else (host,)))
        with in_use(self.original_model), run:
            done = denoise(self.original_model, prompt, attention_mask, observers=hosts, **settings)
        return replace(done, settings={**done.settings, **run.record(hooks)})


def bridge(model_or_name: Any, **load_options: Any) -> DiffusionBridge:
    """A model of any family in TransformerLens: a `TransformerBridge` with `denoise` and a step axis.

    A loaded model stays as it is: the bridge wraps a twin that shares its weights (`enable_compatibility_mode`
    gives the twin weights of its own). The numbers are those of the model with `attn_implementation="hooked"`.

    Args:
        model_or_name: a model of `dlm_lens.load`, an embedded model's name, a directory or a hub name.
        **load_options: of `dlm_lens.load`, for a name.

    Raises:
        ValueError: options beside a loaded model, a model that dlm_lens did not load, or one of another layout than
            Llama's and Qwen2's.
    """
    model = model_or_name
    if isinstance(model_or_name, str | Path):
        model = load(model_or_name, **load_options)
    elif load_options:
        raise ValueError(f"{', '.join(load_options)}: options are for loading; this model is loaded already")
    if not hasattr(model, "sampler_defaults"):
        raise ValueError(f"{type(model).__name__} was not loaded by dlm_lens.load; load it, then bridge it")
    model = without_wrappers(model)
    architecture = architecture_of(model.config)
    twin = twin_of(model)
    name = model.config._name_or_path or type(model).__name__
    config = build_bridge_config_from_hf(model.config, architecture, name, model.dtype)
    adapter: Any = ARCHITECTURES[architecture](config)
    adapter.cfg.device = str(input_device(model))
    adapter.prepare_model(twin)
    tokenizer = _tokenizer(model.tokenizer)
    if tokenizer is not None:
        adapter.cfg.tokenizer_prepends_bos, adapter.cfg.tokenizer_appends_eos = detect_tokenizer_bos_eos(tokenizer)
    return DiffusionBridge(twin, adapter, tokenizer, driver=TransformersDriver(twin, adapter, tokenizer))


def _tokenizer(tokenizer: Any) -> Any:
    """A copy for TransformerLens, which changes it: padded on the left, with a token to pad with."""
    if tokenizer is None:
        return None
    own = copy.deepcopy(tokenizer)
    own.padding_side = "left"
    if own.pad_token is None:
        own.pad_token = own.eos_token
    return own
