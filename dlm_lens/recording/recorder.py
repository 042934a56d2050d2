"""`Recorder`: an observer that reduces every layer of every step of a run; `StoringRecorder` writes them."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.adapters.model_names import name_of
from dlm_lens.arguments import Rule
from dlm_lens.attention import (
    AttentionInputs,
    RunStep,
    SinkLayout,
    attends_causally,
    layer_windows,
)
from dlm_lens.attention.hook_identity import identity_of
from dlm_lens.placement import without_autocast
from dlm_lens.recording.arrays import StepArrays, as_plain, blank_ended_, specs_of
from dlm_lens.recording.canvas_facts import CanvasFacts
from dlm_lens.recording.layer_reduction import on_all_queries, on_canvas, reduce_layer
from dlm_lens.recording.layer_taps import AnyTap, LayerInputs, Tap
from dlm_lens.recording.model_identity import request_of_model, versions, weights_digest
from dlm_lens.recording.recording import Recording
from dlm_lens.recording.reducers.base import STREAM_PARTS, AnyReducer, LayerStep, checked_reducers
from dlm_lens.recording.shards import ShardDirectory
from dlm_lens.recording.storage import load_part, write_end
from dlm_lens.sampling import DenoisingRun, FinishedStep, Proposal, RunState, Sampler, StepObserver, StepPlan
from dlm_lens.sampling.history import revised_positions
from dlm_lens.sampling.token_text import TokenTexts, tokenizer_of

Storage = Literal["float32", "float16"]
STORAGE = Rule("the text 'float32' or 'float16'", lambda dtype: dtype in get_args(Storage))


class Recorder(StepObserver):
    """An observer of `dlm_lens.denoise` and `DiffusionLM.generate` that reduces every layer of every step.

    `recorder.recording(run)` is the `Recording` of the last run that it observed. An AR model is decoded without a
    cache, so that every step has all queries of the written prefix.

    Args:
        model: from `dlm_lens.load`.
        reducers: what to record, as for `record`; no pattern [query, key] is stored.
        layers: indices of the layers, negative from the end; None for all.
        dtype: how floating-point statistics are kept: "float32", or "float16" in half the space, at a relative
            error of at most 2^-11 (0.05%) for magnitudes from 6e-5 to 65,504.

    Raises:
        ValueError: an object or a text that is no reducer, an unknown layer or dtype, or a model
            without hook points.
    """

    whole_prefix = True

    def __init__(
        self,
        model: Any,
        reducers: Sequence[Any],
        *,
        layers: Sequence[int] | None = None,
        dtype: Storage = "float32",
    ) -> None:
        super().__init__(model)
        STORAGE.check("dtype", dtype)
        self.reducers: tuple[AnyReducer, ...] = checked_reducers(reducers)
        self.layout, self.causal = SinkLayout.of(model), attends_causally(model)
        for reducer in self.reducers:
            if reducer.name in dir(Recording) or reducer.name in Recording.__dataclass_fields__:
                raise ValueError(f"{reducer!r} has the name {reducer.name!r}, which a Recording has already")
        if self.causal:
            _no_masks_in_ar(self.reducers)
        self.tap = self.tapped(layers)
        for reducer in self.reducers:
            reducer.check(model, self.tap.layers)
        self.windows = layer_windows(model)
        self.dtype = dtype
        self.arrays = StepArrays(specs_of(self.reducers), getattr(torch, dtype))
        self._unpadded = False
        self._last: Proposal | None = None
        self._memory_of: dict[int, dict[Any, Any]] = {}
        self._found: dict[int, dict[str, Tensor]] = {}
        self._facts: dict[tuple[torch.device, int | None], CanvasFacts] = {}
        self._regions: dict[torch.device, dict[str, Tensor]] = {}

    def tapped(self, layers: Sequence[int] | None) -> AnyTap:
        """The tap on the model's layers; the recorder of a bridge has another one."""
        reads = [read for reducer in self.reducers for read in reducer.reads]
        parts = {part for read in reads for part in STREAM_PARTS.get(read, ())}
        return Tap(self.model, layers, self.show, stream=parts)

    @property
    def remembers(self) -> bool:
        """Whether a hook or a reducer has kept something that depends on earlier steps."""
        return super().remembers or self.reducers_remember

    @property
    def reducers_remember(self) -> bool:
        """Whether a reducer has kept something in its memory that is not the same at every step."""
        keys = (key for memory in self._memory_of.values() for key in memory)
        return any(not (isinstance(key, tuple) and key[:1] == ("constant",)) for key in keys)

    def start(
        self,
        sampler: Sampler,
        content: Bool[Tensor, "batch position"],
        answer: Bool[Tensor, "batch position"] | None = None,
    ) -> None:
        """A run begins: read the model's layers from now on."""
        super().start(sampler, content, answer)
        self.arrays.clear()
        self._last = None
        self._unpadded = sampler.unpadded
        self._memory_of = {layer: {} for layer in self.tap.layers}
        self.tap.open()

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins."""
        canvas = super().step(plan, canvas, masked)
        self._found, self._facts, self._regions = {}, {}, {}
        return canvas

    def finish(self, plan: StepPlan, canvas: Tensor, proposal: Proposal, unmasked: Tensor) -> None:
        """A step has ended: keep its arrays."""
        queries = canvas.shape[1]
        self.arrays.add(
            self.step_arrays(), total=plan.total, positions=queries + self.layout.count, queries=queries
        )
        self._last = proposal

    def step_arrays(self) -> dict[str, Tensor]:
        """The statistics of the current step, each [batch, layer, ...], which are not kept here any longer.

        Raises:
            ValueError: the attention of a layer did not run.
        """
        missing = [layer for layer in self.tap.layers if layer not in self._found]
        if missing:
            raise ValueError(
                f"the hooked attention of layers {missing} did not run for this recorder: it is of another model, "
                "was given twice, or other code replaced the attention (a TransformerLens bridge); give a run one "
                "recorder of its own model, as dlm_lens.load returned it"
            )
        found, self._found = self._found, {}
        return self.arrays.of_layers([found[layer] for layer in self.tap.layers])

    def recording(self, run: DenoisingRun) -> Recording:
        """The `Recording` of the last run, which `denoise` or `generate` returned.

        Raises:
            ValueError: another run.
        """
        if run.steps != self.arrays.steps:
            raise ValueError(f"this recorder observed {self.arrays.steps} steps, but the run has {run.steps}")
        if self._last is not None and not _made(run, self._last):
            raise ValueError(
                "this recorder has observed another run after this one; take recorder.recording(run) before the "
                "next run, or a recorder for each"
            )
        queries = run.tokens.shape[1]
        arrays = self.arrays.result(keys=queries + self.layout.count, queries=queries)
        blank_ended_(arrays.values(), run.running)
        return self.described(run, arrays)

    def described(self, run: DenoisingRun, arrays: dict[str, Tensor]) -> Recording:
        """A Recording of these arrays, with the run, the model and the axes."""
        return Recording(
            run=run,
            arrays=arrays,
            specs={spec.name: spec for spec in self.arrays.specs if spec.name in arrays},
            layers=self.tap.layers,
            answer=run.answer,
            steps=run.step_numbers,
            rows=tuple(range(len(run.tokens))),
            sinks=self.layout.count,
            causal=self.causal,
            unpadded=self._unpadded,
            windows=tuple(self.windows[layer] for layer in self.tap.layers),
            model=name_of(self.model),
            versions=versions(),
            scale=self.tap.scale,
            query_heads=int(self.model.config.num_attention_heads),
            words=_words_of(self.model, run),
        )

    def stop(self) -> None:
        """The run has ended."""
        self.close()

    def close(self) -> None:
        """Remove everything from the model."""
        self.tap.close()
        self._found, self._memory_of = {}, {}
        super().close()

    def show(self, shown: LayerInputs) -> None:
        """Reduce a layer that has computed.

        Raises:
            ValueError: it has computed in this forward pass before.
        """
        if self.now is None or self.elsewhere:
            return
        if shown.inputs.layer in self._found:
            raise ValueError(
                f"the attention of layer {shown.inputs.layer} ran twice in one forward pass, as where layers share "
                "one module (ALBERT): a statistic would be of one of the two; read its hook points instead"
            )
        # Statistics need no gradient, also if the forward pass computes one, and products in float32.
        with torch.no_grad(), without_autocast(shown.inputs.q.device):
            inputs = on_canvas(shown.inputs, len(self.now.tokens), self.layout)
            if self.now.queries is None:
                found = reduce_layer(self._layer_step(self.now, shown, inputs), self.reducers)
            else:
                whole = self._layer_step(self.now, shown, on_all_queries(inputs))
                found = reduce_layer(whole, self.reducers, inputs)
            self._found[inputs.layer] = found

    def _layer_step(self, run: RunStep, shown: LayerInputs, inputs: AttentionInputs) -> LayerStep:
        rows, layout = len(run.tokens), self.layout
        if inputs.q.shape[2] != run.tokens.shape[1]:
            raise ValueError(
                f"attention has {inputs.q.shape[2]} queries and the canvas {run.tokens.shape[1]} positions; is "
                "this a forward pass of the run?"
            )
        facts = self._facts_on(run, inputs.q.device, self.windows[inputs.layer])
        regions = self._regions_on(facts)

        def stream(tensor: Tensor | None) -> Tensor | None:
            """A residual stream, sink tokens last; NaN at positions that the step does not compute."""
            # The layer before may compute on another device.
            if tensor is None:
                return None
            states = layout.sinks_last(tensor[:rows].to(inputs.q.device), 1)
            if run.queries is None:
                return states
            whole = states.new_full((rows, run.tokens.shape[1], states.shape[2]), torch.nan)
            whole[:, slice(*run.queries)] = states
            return whole

        return LayerStep(
            index=inputs.layer,
            inputs=inputs,
            run=run,
            facts=facts,
            regions=regions,
            weight=lambda: self.tap.weight(inputs.layer),
            resid=stream(shown.resid),
            attn_out=stream(shown.attn_out),
            resid_out=stream(shown.resid_out),
            memory=self._memory_of.setdefault(inputs.layer, {}),
        )

    def _facts_on(self, run: RunStep, device: torch.device, window: int | None) -> CanvasFacts:
        """The facts of the step's canvas, computed once per step, device and sliding window."""
        if (device, window) not in self._facts:
            where = torch.arange(run.tokens.shape[1], device=device)
            attention = self.sampler.attention.to(device)
            block = attention.in_block(run.valid.to(device), run.masked.to(device), run.span)
            self._facts[device, window] = CanvasFacts(
                valid=run.valid.to(device),
                masked=run.masked.to(device),
                answer=run.answer.to(device),
                block=block.expand(run.masked.shape),
                causal=self.causal,
                sinks=self.layout.count,
                unpadded=self._unpadded,
                window=window,
                blocks=attention.counted_blocks(run.valid.to(device)),
                computed=None if run.queries is None else (where >= run.queries[0]) & (where < run.queries[1]),
                observed_first=attention.observed_first,
                own_canvas=None if self.sampler.own_canvas is None else self.sampler.own_canvas.to(device),
            )
        return self._facts[device, window]

    def _regions_on(self, facts: CanvasFacts) -> dict[str, Tensor]:
        """Sets of keys, computed once per step and device."""
        device = facts.valid.device
        if device not in self._regions:
            self._regions[device] = _regions(facts)
        return self._regions[device]


def _regions(facts: CanvasFacts) -> dict[str, Bool[Tensor, "batch key"]]:
    """Sets of keys by name; the learned sink tokens come after the canvas positions."""
    shape = facts.keys.shape
    found = {"prompt": facts.positions("prompt"), "masked": facts.positions("masked")}
    found |= {"unmasked": facts.positions("unmasked"), "block": facts.positions("block")}
    regions = {name: torch.nn.functional.pad(region, (0, facts.sinks)) for name, region in found.items()}
    positions = torch.arange(shape[-1], device=facts.valid.device)
    return regions | {"sink": (positions >= shape[-1] - facts.sinks).expand(shape)}


def _made(run: DenoisingRun, last: Proposal) -> bool:
    """Whether a run's last step made this proposal, which has the canvas's tokens where nothing was proposed."""
    if run.tokens.shape[0] != len(last.tokens) or run.tokens.shape[1] > last.tokens.shape[1]:
        return False
    tokens, confidence = (part[:, : run.tokens.shape[1]].cpu() for part in last)
    same = tokens.long().equal(run.proposals[-1])
    return same and confidence.to(run.confidence.dtype).nan_to_num().equal(run.confidence[-1].nan_to_num())


def _no_masks_in_ar(reducers: Sequence[AnyReducer]) -> None:
    for reducer in reducers:
        if reducer.reads == ("received:masked",):
            raise ValueError(f"{reducer!r}: an AR baseline has no masked queries; take queries='all'")


def _words_of(model: Any, run: DenoisingRun) -> dict[int, str]:
    """The text of every token id that occurs in a run; empty without a tokenizer."""
    tokenizer = tokenizer_of(run, model)
    if tokenizer is None:
        return {}
    texts = TokenTexts(tokenizer)
    return {i: texts.exact(i) for i in run.canvases.unique().tolist()}


def request_of(
    recorder: Recorder,
    ids: Sequence[Sequence[int]],
    seeds: Sequence[int],
    hooks: Sequence[Any],
    settings: Mapping[str, Any],
    batch: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The header of a recording: model, prompts, settings, hooks, reducers, layers, and which batch this is."""
    model = recorder.model
    # The digest of the weights does not contain the windows. Models without windows have no such entry.
    slides = any(window is not None for window in recorder.windows)
    return {
        "model": {
            "name": name_of(model),
            "class": type(model).__name__,
            "dtype": str(model.dtype),
            "weights": weights_digest(model),
            **({"windows": list(recorder.windows)} if slides else {}),
        },
        "prompts": {"count": len(ids), "digest": _digest(repr([list(map(int, row)) for row in ids]).encode())},
        "settings": {**{name: repr(value) for name, value in settings.items()}, "seeds": list(seeds)},
        # What only its place in memory distinguishes, such as a lock, is left out.
        "hooks": [identity_of(hook, strict=False) for hook in hooks],
        "reducers": {spec.name: as_plain(spec) for spec in recorder.arrays.specs},
        **reducer_identities(recorder),
        "layers": list(recorder.tap.layers),
        "dtype": recorder.dtype,
        "batch": None if batch is None else dict(batch),
        **request_of_model(model, settings),
    }


def reducer_identities(recorder: Recorder) -> dict[str, dict[str, str]]:
    """{"identities": name -> `identity_of`} of the reducers that their repr does not determine, or {}.

    The repr of a reducer shows neither all entries of a tensor nor the code of a function that it holds.
    """
    known = {reducer.name: identity_of(reducer, strict=False) for reducer in recorder.reducers}
    known = {name: text for name, text in known.items() if "#" in text}
    return {"identities": known} if known else {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class StoringRecorder(Recorder):
    """A `Recorder` that writes a shard after every step and keeps no array in memory.

    Args:
        model, reducers, layers, dtype: as for `Recorder`.
        path: directory of the recording.
    """

    keeps_state = True

    def __init__(
        self,
        model: Any,
        reducers: Sequence[Any],
        path: Path,
        *,
        layers: Sequence[int] | None = None,
        dtype: Storage = "float32",
    ) -> None:
        super().__init__(model, reducers, layers=layers, dtype=dtype)
        self.shards = ShardDirectory(path)
        self._seen: tuple[Tensor, Tensor] | None = None
        self._step: tuple[FinishedStep, dict[str, Tensor]] | None = None

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins."""
        self._seen = (canvas, masked)
        return super().step(plan, canvas, masked)

    def finish(self, plan: StepPlan, canvas: Tensor, proposal: Proposal, unmasked: Tensor) -> None:
        """Keep the arrays of a finished step until its state is known."""
        assert self._seen is not None
        opened = self.sampler.open_positions(canvas, plan.index + 1)
        revised = revised_positions(*self._seen, canvas, opened)
        step = FinishedStep(plan, *self._seen, proposal, unmasked, revised, self.sampler.origins)
        self._step = (step, self.step_arrays())

    def keep(self, state: RunState) -> None:
        """Write the finished step with the state of the run after it."""
        assert self._step is not None
        self.shards.add(self._step[0], state, self._step[1])

    def recording(self, run: DenoisingRun, rows: Sequence[int] = ()) -> Recording:
        """Write the run, and return the Recording of the files, whose arrays are read on first use."""
        described = self.described(run, {})
        write_end(self.shards, described, self.arrays.specs, rows or described.rows)
        # Without checksums: the files were written, or read to continue the run, a moment ago.
        return Recording.of(load_part(self.shards.path, run.tokenizer, verify=False))
