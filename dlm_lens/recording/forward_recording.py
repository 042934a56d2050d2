"""`record_forward`: the statistics of a recording, of forward passes that the user runs."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from dlm_lens.adapters.model_names import name_of
from dlm_lens.attention import (
    attends_observed_first,
    computed_span,
    decoder_of,
    listening,
    mask_window_of,
    own_blocks,
)
from dlm_lens.attention.cache_argument import given_cache
from dlm_lens.attention.hook_attachment import is_static
from dlm_lens.recording.recorder import Recorder, Storage
from dlm_lens.recording.recording import Recording
from dlm_lens.sampling import DenoisingRun, Sampler, StepPlan
from dlm_lens.sampling.step_attention import attention_of


def sampler_of_pass(
    settings: Mapping[str, Any],
    content: Bool[Tensor, "batch position"],
    prompt_length: int,
    *,
    beside_encoder: bool = False,
) -> Sampler:
    """A sampler that says of a forward pass how it attends, by the settings that its `DenoisingRun` will have."""
    sampler = Sampler()
    sampler.attention = attention_of(settings, content, prompt_length, beside_encoder=beside_encoder)
    return sampler


def settings_of_pass(config: Any, canvas: tuple[int, int] | None = None) -> dict[str, Any]:
    """The settings by which a `DenoisingRun` of forward passes knows who sees whom on its canvases.

    Args:
        config: of the model.
        canvas: where it is beside an encoder; None without one.
    """
    found: dict[str, Any] = {}
    if canvas is not None:
        found["block_causal_length"] = canvas[1] - canvas[0]
    elif (length := getattr(config, "block_causal_length", None)) is not None:
        found["block_causal_length"] = length
    if attends_observed_first(config):
        found["observed_first"] = True
    if (window := mask_window_of(config)) is not None:
        found["mask_window"] = window
    return found


class ForwardRecording:
    """The result of `record_forward`: the `Recording` of the forward passes so far, and its attributes.

    Public calls take it where they take a Recording.
    """

    def __init__(self, recorder: "_ForwardRecorder") -> None:
        self._recorder = recorder

    @property
    def recording(self) -> Recording:
        """The forward passes as the steps of a Recording.

        Raises:
            ValueError: no forward pass has run yet.
        """
        return self._recorder.result()

    def stands_for(self) -> Recording:
        """What public calls take it for."""
        return self.recording

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = self._recorder.result()
        # Python comes here with "recording" where that property raised an AttributeError: it is raised again.
        return found if name == "recording" else getattr(found, name)

    def __repr__(self) -> str:
        return f"ForwardRecording({len(self._recorder.canvases)} forward passes)"


@contextmanager
def record_forward(
    model: Any,
    reducers: Sequence[Any],
    *,
    layers: Sequence[int] | None = None,
    dtype: Storage = "float32",
) -> Iterator[ForwardRecording]:
    """Record statistics of the forward passes that run inside the `with` block; each is a step.

    `with record_forward(model, [ReceivedAttention()]) as rec: model(input_ids)`; `rec.received` and the other
    attributes of a `Recording` can be read inside the block and after it. [MASK] tokens are the masked positions
    and the answer. A model with an encoder (DiffusionGemma) is recorded as a step of its runs is: the queries are
    the canvas, which is open and the answer, and the keys are all positions; `model(input_ids, canvas_start=...)`
    says where the canvas begins.

    Args:
        model: from `dlm_lens.load`.
        reducers: what to record.
        layers: indices of the layers, negative from the end; None for all.
        dtype: how statistics are stored.

    Raises:
        ValueError: as `Recorder`; an encoder-decoder model of transformers, or its decoder (its encoder alone is
            taken); a forward pass without input_ids, with a cache, with decoder_input_ids, or with a mask
            [batch, 1, query, key].
    """
    if _attends_across(model):
        raise ValueError(
            f"{type(model).__name__} attends in a decoder and from it to an encoder; record_forward takes models "
            "whose queries and keys are those of one sequence: record the encoder alone (model.get_encoder()), or "
            "read hook points"
        )
    recorder = _ForwardRecorder(model, reducers, layers=layers, dtype=dtype)
    with on_passes(model, recorder.before, recorder.after):
        try:
            yield ForwardRecording(recorder)
        finally:
            recorder.close()


def _attends_across(model: Any) -> bool:
    """Whether this is an encoder-decoder of transformers or its decoder; T5's encoder has the decoder's class."""
    if not getattr(model.config, "is_encoder_decoder", False) or not type(model).__module__.startswith(
        "transformers."
    ):
        return False
    takes = inspect.signature(model.forward).parameters
    return "decoder_input_ids" in takes or ("encoder_hidden_states" in takes and getattr(model, "is_decoder", True))


@contextmanager
def on_passes(model: Any, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    """Call these before and after every forward pass of the model's decoder in this context.

    Args:
        model: from `dlm_lens.load`.
        before: gets the decoder, its arguments and its keyword arguments.
        after: gets the decoder, its arguments and its output.
    """
    decoder: nn.Module = decoder_of(model)
    with listening(model):
        handles = [
            decoder.register_forward_pre_hook(before, with_kwargs=True),
            decoder.register_forward_hook(after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _by_name(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """The positional arguments of a module's forward by their names."""
    signature = inspect.signature(module.forward)
    # In place of the bound method nnsight sets an object that has the signature of the class's function.
    whole = (module, *args) if next(iter(signature.parameters), "") == "self" else args
    return signature.bind_partial(*whole).arguments


class _ForwardRecorder(Recorder):
    """A recorder whose steps are forward passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.canvases: list[Tensor] = []
        self.steps: list[dict[str, Tensor]] = []
        self.content: Bool[Tensor, "batch position"] | None = None
        self.computed: tuple[int, int] | None = None
        self._made: tuple[int, Recording] | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pass begins."""
        given = _by_name(module, args) | kwargs
        ids: Int[Tensor, "batch position"] | None = given.get("input_ids", args[0] if args else None)
        mask, cache = given.get("attention_mask"), given_cache(given)
        if not isinstance(ids, Tensor):
            raise ValueError(
                "record_forward needs the forward pass's input_ids; it was given embeddings: of a model with "
                "images, record the text network (record_forward(model.get_decoder(), ...)), and call that"
            )
        if kwargs.get("decoder_input_ids") is not None:
            raise ValueError(
                "record_forward needs prompt and canvas in one input_ids; say where the canvas begins with "
                "canvas_start, instead of decoder_input_ids"
            )
        if mask is not None and mask.ndim != 2:
            raise ValueError(f"record_forward takes masks [batch, position]; this one is {list(mask.shape)}")
        if cache is not None and (is_static(cache) or cache.get_seq_length()):
            raise ValueError("record_forward needs all queries of the canvas; run the forward without a cache")
        if self.canvases and self.canvases[0].shape != ids.shape:
            raise ValueError(
                f"this forward has ids of shape {list(ids.shape)}, the ones before {list(self.canvases[0].shape)}; "
                "open another record_forward for it"
            )
        content = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        if self.content is not None and not torch.equal(content, self.content):
            raise ValueError(
                "this forward has another attention_mask than the ones before; open another record_forward"
            )
        span = computed_span(self.model, ids.shape[1], kwargs.get("canvas_start"))
        if self.canvases and span != self.computed:
            raise ValueError(
                f"this forward has its canvas at {span}, the ones before at {self.computed}; open another "
                "record_forward for it"
            )
        masked = self._masked(ids, span) & content
        # Also of a causal model: the forward pass sees the whole canvas.
        answer = masked if not self.canvases else self._masked(self.canvases[0], span).to(ids.device) & content
        self.content, self.computed, index = content, span, len(self.canvases)
        settings, before = settings_of_pass(self.model.config, span), ids.shape[1] if span is None else span[0]
        sampler = sampler_of_pass(settings, content, before, beside_encoder=span is not None)
        self.start(sampler, content, answer)
        self.step(StepPlan(index, index + 1, 0, span or self._span(content), 1, computed=span), ids, masked)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward pass has ended."""
        assert self.now is not None
        self.steps.append(self.step_arrays())
        self.canvases.append(self.now.tokens.detach().cpu())
        self.close()

    def result(self) -> Recording:
        """The forward passes so far."""
        if not self.canvases:
            raise ValueError("no forward pass ran inside record_forward yet")
        if self._made is None or self._made[0] != len(self.steps):
            arrays = {name: torch.stack([step[name] for step in self.steps]) for name in self.steps[0]}
            self._made = (len(self.steps), self.described(self._run(), arrays))
        return self._made[1]

    def _span(self, content: Bool[Tensor, "batch position"]) -> tuple[int, int]:
        """The canvas; of a network that attends block by block its last block, up to which all is present."""
        layout, positions = own_blocks(self.model.config, content), content.shape[1]
        return (0, positions) if layout is None else layout.spans(positions - 1, positions)[0]

    def _masked(
        self, ids: Int[Tensor, "*run position"], canvas: tuple[int, int] | None
    ) -> Bool[Tensor, "*run position"]:
        """[MASK]; beside an encoder the canvas."""
        if canvas is not None:
            where = torch.arange(ids.shape[-1], device=ids.device)
            return ((where >= canvas[0]) & (where < canvas[1])).expand(ids.shape)
        mask_id = getattr(self.model.config, "mask_token_id", None)
        return torch.zeros_like(ids, dtype=torch.bool) if mask_id is None else ids == mask_id

    def _run(self) -> DenoisingRun:
        assert self.content is not None
        canvases, canvas = torch.stack(self.canvases), self.computed
        masked = self._masked(canvases, canvas) & self.content.cpu()
        attention = settings_of_pass(self.model.config, canvas)
        span = canvas or (self._span(self.content.cpu()) if "block_causal_length" in attention else None)
        return DenoisingRun.of_canvases(
            canvases,
            masked,
            self.content.cpu(),
            prompt_length=canvases.shape[-1] if canvas is None else canvas[0],
            settings={"sampler": "forward", **attention},
            spans=None if span is None else [span] * len(canvases),
            computed=() if canvas is None else (canvas,) * len(canvases),
            tokenizer=getattr(self.model, "tokenizer", None),
            model=name_of(self.model),
        )
