"""`DiffusionBridge`: a TransformerBridge with denoising runs, hooks by step and a cache of steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from transformer_lens.model_bridge import TransformerBridge

from dlm_lens.adapters import family_of
from dlm_lens.arguments import DEVICE, checked_arguments
from dlm_lens.attention import HookLike, SinkLayout, in_use, is_hook, listening, warning_of_shifts
from dlm_lens.bridging.components import has_hooks
from dlm_lens.bridging.step_cache import (
    POSITIONS,
    CacheCollector,
    NamesFilter,
    StepCache,
    StepSelection,
    bytes_per_step,
    chosen_points,
)
from dlm_lens.bridging.step_hooks import (
    BridgeRun,
    FwdHook,
    check_point,
    checked_pairs,
    fwd_hooks_of,
    past_sinks,
    refuse_hooks,
    warn_of_folded_biases,
)
from dlm_lens.placement import is_quantised
from dlm_lens.sampling import DenoisingRun, RunObserver, denoise
from dlm_lens.sampling.settings import listed_observers


class DiffusionBridge(TransformerBridge):
    """A TransformerBridge of a masked DLM (or an AR baseline), with `denoise` and a step axis.

    Build it with `dlm_lens.bridge`. All of TransformerLens works on single forward passes (`run_with_cache`,
    `run_with_hooks`, `enable_compatibility_mode`, its patching helpers); `denoise` and `denoise_with_cache` run the
    family's own sampler in the loop of `dlm_lens.denoise`. `sinks` is the layout of learned sink tokens:
    activations have S + k positions, logits S. While `silent` is set, in forward passes that are no steps of a run,
    the run's hooks and recorders are not called. `folds_value_biases` after compatibility mode has moved them,
    `centres_stream` after it has taken the mean over features from what is added to the residual stream (GPT-2).
    """

    silent = False
    folds_value_biases = False
    centres_stream = False

    @classmethod
    def adopt(cls, bridge: TransformerBridge) -> None:
        """Make a bridge that TransformerLens built a DiffusionBridge; its hook points get the sink layout."""
        bridge.__class__ = cls
        model: Any = bridge.original_model
        causal = family_of(model.config.model_type).causal
        for point in bridge.hook_points():
            point.sinks, point.causal = SinkLayout.of(model), causal
        if getattr(model, "tokenizer", None) is None:  # booted by TransformerLens
            model.tokenizer = bridge.tokenizer
        # As in dlm_lens.denoise, the tokenizer alone decides whether text begins with a BOS token.
        bridge.cfg.default_prepend_bos = bridge.cfg.tokenizer_prepends_bos

    def forward(self, *args: Any, **options: Any) -> Any:
        """One forward pass; see TransformerLens's `TransformerBridge.forward`."""
        if torch.compiler.is_compiling():
            return super().forward(*args, **options)
        with in_use(self.original_model):
            return super().forward(*args, **options)

    def check_hooks_to_add(
        self, hook_point: Any, hook_point_name: str, hook: Any, dir: str = "fwd", **options: Any
    ) -> None:
        """Check a hook before it is added; TransformerLens calls this for all of them.

        Raises:
            ValueError: a point that is switched off, or a hook of `dlm_lens.hooks` that belongs at another one or
                is put into a backward pass.
        """
        super().check_hooks_to_add(hook_point, hook_point_name, hook, dir, **options)
        if dir == "fwd":
            check_point(self, hook_point, hook_point_name, hook)
        else:
            refuse_hooks([(hook_point_name, hook)], "in a backward pass: they act on activations; use fwd_hooks")

    @contextmanager
    def hooks(self, fwd_hooks: Sequence[Any] = (), *args: Any, **options: Any) -> Iterator["DiffusionBridge"]:
        """Hooks for the duration of a `with` block; see TransformerLens's `TransformerBridge.hooks`."""
        with self._acting(fwd_hooks), super().hooks(fwd_hooks, *args, **options):
            yield self

    def run_with_hooks(self, input: Any, fwd_hooks: Sequence[Any] = (), *args: Any, **options: Any) -> Any:
        """One forward pass under hooks; see TransformerLens's `TransformerBridge.run_with_hooks`.

        The hooks of its patching helpers, which count positions of the tokens, act on the same tokens where
        activations also have the positions of sinks.

        Raises:
            ValueError: `remove_batch_dim=True` with a hook of `dlm_lens.hooks`, which acts on a batch.
        """
        if options.get("remove_batch_dim"):
            refuse_hooks(fwd_hooks, "under remove_batch_dim=True: they act on batches; leave remove_batch_dim out")
        with self._acting(fwd_hooks):
            return super().run_with_hooks(input, past_sinks(fwd_hooks, self.sinks), *args, **options)

    @contextmanager
    def _acting(self, fwd_hooks: Sequence[Any]) -> Iterator[None]:
        """A block in which hooks act; those of `dlm_lens.hooks` warn of padding that shifts their positions."""
        values = [hook for _, hook in fwd_hooks if is_hook(hook)]
        warn_of_folded_biases(self, values)
        with listening(self.original_model), warning_of_shifts(self.original_model, values):
            yield

    def run_with_cache(self, *args: Any, **options: Any) -> Any:
        """One forward pass and its activations; see TransformerLens's `TransformerBridge.run_with_cache`."""
        with listening(self.original_model):
            return super().run_with_cache(*args, **options)

    @property
    def sinks(self) -> SinkLayout:
        """The layout of sink tokens; `pos_slice=bridge.sinks.canvas(length)` keeps the canvas only in a cache."""
        return SinkLayout.of(self.original_model)

    def denoise(
        self,
        prompt: Any,
        attention_mask: Any = None,
        *,
        fwd_hooks: Sequence[FwdHook] = (),
        hooks: Sequence[HookLike] = (),
        observers: RunObserver | Sequence[RunObserver] | None = None,
        **settings: Any,
    ) -> DenoisingRun:
        """Denoise with the family's own sampler under hooks; without any, the run is that of `dlm_lens.denoise`.

        Hooks are called as (tensor, hook) in every forward pass. `hook` is TransformerLens's HookPoint together
        with the state of the run: `hook.step`, `hook.tokens`, `hook.masked`, `hook.valid`, `hook.progress`. With
        guidance the rows are the conditional ones and then the unconditional ones. An AR baseline is decoded
        without a KV cache, so that hooks see every position.

        Args:
            prompt: text, chat messages, ids, or a list of any of them, as for `dlm_lens.denoise`.
            attention_mask: for ids: 1 content, 0 padding on the left.
            fwd_hooks: (name or filter of names, function), as for `run_with_hooks`.
            hooks: values of `dlm_lens.hooks`, run at their own site in the layers that they declare, or in all.
            observers: observers of the run, as for `dlm_lens.denoise`; a `BridgeRecorder`.
            **settings: of `dlm_lens.denoise`: steps, gen_length, block_length, temperature, seed, ...

        Raises:
            KeyError: no hook point has such a name.
            ValueError: an invalid prompt, setting or site, or a hook of `dlm_lens.hooks` in `fwd_hooks` at another
                point than its own.
        """
        run = BridgeRun(self, [*checked_pairs(fwd_hooks), *fwd_hooks_of(self, hooks)])
        return self._denoise(run, hooks, observers, prompt, attention_mask, settings)

    @checked_arguments(device=DEVICE, pos_slice=POSITIONS)
    def denoise_with_cache(
        self,
        prompt: Any,
        attention_mask: Any = None,
        *,
        names_filter: NamesFilter = None,
        cache_steps: StepSelection = None,
        pos_slice: Any = None,
        device: str | torch.device | None = None,
        max_bytes: int | None = None,
        fwd_hooks: Sequence[FwdHook] = (),
        hooks: Sequence[HookLike] = (),
        observers: RunObserver | Sequence[RunObserver] | None = None,
        **settings: Any,
    ) -> tuple[DenoisingRun, StepCache]:
        """Denoise, and keep activations: `cache[name, step]`, `cache[name]` as [step, ...], `cache.at(step)`.

        Only activations that match the filter are kept. The size of the cache is computed before the first step
        (`bytes_per_step` computes it without a run), in AR decoding with the positions that are written at each
        step, else with every position of the canvas: block decoding sees fewer at most steps. Hooks act before
        activations are kept.

        Args:
            prompt: as for `denoise`.
            attention_mask: as for `denoise`.
            names_filter: a name, a list of names or a function of a name, as for `run_with_cache`; None for all.
            cache_steps: an index, a slice or indices of steps, negative from the end of the steps that are planned
                (a run whose steps depend on its tokens may end before them: a warning); None for all. A resumed
                run computes those from its first one on.
            pos_slice: which positions to keep, as for `run_with_cache`; those of the canvas that a step sees, of
                which negative ones count from its end. None beside an approximate cache.
            device: device that activations are moved to as soon as they are computed; None for no move.
            max_bytes: the largest size of the cache; by default 80% of the free memory of its device.
            fwd_hooks: as for `denoise`.
            hooks: as for `denoise`.
            observers: as for `denoise`.
            **settings: as for `denoise`.

        Raises:
            KeyError: no hook point has such a name.
            MemoryError: the cache would not fit; the message has its size and remedies.
            ValueError: an invalid prompt, setting, site or step; a step that a resumed run does not compute; a run
                that ended before the first of the steps; a position of `pos_slice` that a step does not see, or
                positions beside an approximate cache.
        """
        points = chosen_points(self, names_filter)
        edits = bool(fwd_hooks or hooks) or any(map(has_hooks, self.hook_points()))
        collector = CacheCollector(self, points, cache_steps, device, pos_slice, max_bytes, copies=edits)
        collect = [(name, collector) for name in points]
        pairs = checked_pairs(fwd_hooks)
        run = BridgeRun(self, [*pairs, *fwd_hooks_of(self, hooks), *collect], on_start=collector.check)
        found = self._denoise(run, hooks, observers, prompt, attention_mask, settings)
        collector.check_end(found.steps)
        return found, collector.result()

    @checked_arguments(pos_slice=POSITIONS)
    def bytes_per_step(
        self, names_filter: NamesFilter, positions: int, rows: int = 1, pos_slice: Any = None
    ) -> dict[str, int]:
        """Bytes of each matching activation per step, for `rows` canvases of `positions` (guidance: twice).

        With `pos_slice` those of the positions that it keeps, as in `denoise_with_cache`.

        Raises:
            ValueError: fewer than one position or row, or a position of `pos_slice` that is not there.
        """
        return bytes_per_step(self, chosen_points(self, names_filter), positions, rows, pos_slice)

    def diffusion_generate(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse: TransformerLens calls a checkpoint's own sampler here, without steps and batches."""
        raise NotImplementedError("use bridge.denoise(prompt), which runs the family's own sampler under hooks")

    def _ensure_generation_supported(self, api_name: str) -> None:
        if not self.adapter.supports_generation:
            raise NotImplementedError(
                f"{type(self.original_model).__name__} is a masked diffusion model and does not generate left to "
                "right; use bridge.denoise(prompt)"
            )
        super()._ensure_generation_supported(api_name)

    def process_weights(self, *args: Any, fold_value_biases: bool = True, **options: Any) -> None:
        """TransformerLens's weight processing; value biases are folded only where that is exact.

        A value bias may move past the output projection only if every z contains all of it. It does not with a
        gate, with sinks whose values are zero, or with a spare softmax entry, where patterns do not sum to one.

        Raises:
            ValueError: the weights are quantised.
        """
        self._check_processable()
        config: Any = self.original_model.config
        spare = getattr(config, "softmax", "standard") != "standard"
        scaled = spare or getattr(config, "gated_attention", False) or getattr(config, "zero_sink_value", False)
        folds = fold_value_biases and not scaled
        biases = [block.attn.b_V for block in self.blocks if "attn" in block._modules]
        self.folds_value_biases |= folds and any(bias is not None and bool(bias.any()) for bias in biases)
        normed: Any = self.cfg.normalization_type
        self.centres_stream |= normed in ("LN", "LNPre") and bool(options.get("center_writing_weights", True))
        super().process_weights(*args, fold_value_biases=folds, **options)

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
        self,
        run: BridgeRun,
        hooks: Sequence[HookLike],
        observers: RunObserver | Sequence[RunObserver] | None,
        prompt: Any,
        attention_mask: Any,
        settings: dict[str, Any],
    ) -> DenoisingRun:
        with in_use(self.original_model), run:
            # Last, so that hooks see the canvas that other observers leave.
            done = denoise(
                self.original_model,
                prompt,
                attention_mask,
                observers=(*listed_observers(observers), run),
                **settings,
            )
        return replace(done, settings={**done.settings, **run.record(hooks)})
