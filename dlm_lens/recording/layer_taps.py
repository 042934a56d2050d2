"""`Tap`: passes the inputs of every layer to a function while it is open."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from dlm_lens.arguments import chosen_indices
from dlm_lens.attention import (
    AttentionInputs,
    adding_module,
    attention_blocks,
    attention_of,
    head_width,
    layer_windows,
    listening,
    output_weight,
)


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """The inputs of one layer's attention, and the parts of the residual stream that were requested.

    Args:
        inputs: of attention.
        resid: the stream that enters the layer.
        attn_out: what attention adds to it.
        resid_out: the stream that leaves the layer.
    """

    inputs: AttentionInputs
    resid: Tensor | None = None
    attn_out: Tensor | None = None
    resid_out: Tensor | None = None


class AnyTap(Protocol):
    """The taps that a `Recorder` accepts: of a transformers model or of a TransformerLens bridge."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the tapped layers."""
        ...

    @property
    def scale(self) -> float:
        """The factor of the scores in the first of the layers."""
        ...

    def open(self) -> None:
        """Begin to pass layers to `show`."""
        ...

    def close(self) -> None:
        """Stop, and remove everything from the model."""
        ...

    def weight(self, layer: int) -> Tensor:
        """W_O of every head, [head, d_head, d_model]."""
        ...


class Tap:
    """Calls `show` with the inputs of each chosen layer in every forward pass.

    Args:
        model: from `dlm_lens.load`.
        layers: indices of the layers, negative from the end; None for all.
        show: called with each layer.
        stream: parts of the residual stream to pass too: "resid", "attn_out", "resid_out". For the last one `show`
            is called at the end of the layer, which keeps queries, keys and values in memory during its MLP; else
            right after attention.

    Raises:
        ValueError: a model without hook points, with attention that `layer_windows` refuses, a layer that does not
            exist, or one with several attentions or without a part of the stream.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[int] | None,
        show: Callable[[LayerInputs], None],
        *,
        stream: Collection[str] = (),
    ) -> None:
        blocks = attention_blocks(model)
        layer_windows(model)
        self.layers = chosen_indices("layer", layers, len(blocks))
        self.blocks: dict[int, Any] = {layer: blocks[layer] for layer in self.layers}
        for block in self.blocks.values():
            attention_of(block)  # raises where the layer has several
            for site in ("resid", "attn_out") if "attn_out" in stream else ("resid",) if stream else ():
                adding_module(block, site)  # raises where the layer does not have it
        self.model, self.show, self.stream = model, show, frozenset(stream)
        self._inputs: dict[int, AttentionInputs] = {}
        self._seen: dict[tuple[int, str], Tensor] = {}
        self._open = ExitStack()

    def open(self) -> None:
        """Begin to pass layers to `show`."""
        self.close()
        self._open.enter_context(listening(self.model))
        for layer, block in self.blocks.items():
            attention = attention_of(block)
            attention.hook_z.readers = (*attention.hook_z.readers, self._read)
            self._open.callback(self._remove_reader, attention)
            if "resid" in self.stream:
                self._open.callback(block.register_forward_pre_hook(self._enter(layer), with_kwargs=True).remove)
            if "attn_out" in self.stream:
                self._open.callback(adding_module(block, "attn_out").register_forward_hook(self._add(layer)).remove)
            if "resid_out" in self.stream:
                self._open.callback(block.register_forward_hook(self._leave(layer)).remove)

    def close(self) -> None:
        """Stop, and remove everything from the model."""
        self._open.close()
        self._inputs.clear()
        self._seen.clear()

    def weight(self, layer: int) -> Tensor:
        """W_O of every head, [head, d_head, d_model].

        Raises:
            ValueError: the weight is quantised.
        """
        attention = attention_of(self.blocks[layer])
        weight = output_weight(attention)
        if not weight.is_floating_point() or weight.ndim != 2:
            raise ValueError("the output projection is quantised; load the model unquantised for this reducer")
        return weight.unflatten(0, (-1, head_width(attention)))

    @property
    def scale(self) -> float:
        """The factor of the first layer's scores: its module's `scaling`, or else 1 / sqrt(d_head) (ModernBERT)."""
        attention = attention_of(next(iter(self.blocks.values())))
        scaling = getattr(attention, "scaling", None)
        return float(head_width(attention) ** -0.5 if scaling is None else scaling)

    def _remove_reader(self, attention: Any) -> None:
        attention.hook_z.readers = tuple(reader for reader in attention.hook_z.readers if reader != self._read)

    def _listens(self, layer: int) -> bool:
        # Clean passes of hooks remove the readers: they are no steps of the run.
        return self._read in attention_of(self.blocks[layer]).hook_z.readers

    def _read(self, inputs: AttentionInputs) -> None:
        self._inputs[inputs.layer] = inputs
        if not self.stream & {"attn_out", "resid_out"}:
            self._show(inputs.layer)

    def _enter(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._listens(layer):
                self._seen[layer, "resid"] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _add(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._listens(layer):
                self._seen[layer, "attn_out"] = output if isinstance(output, Tensor) else output[0]
                if "resid_out" not in self.stream:
                    self._show(layer)

        return hook

    def _leave(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if layer in self._inputs:
                self._seen[layer, "resid_out"] = output if isinstance(output, Tensor) else output[0]
                self._show(layer)

        return hook

    def _show(self, layer: int) -> None:
        stream = {name: self._seen.pop((layer, name)) for name in self.stream}
        self.show(LayerInputs(self._inputs.pop(layer), **stream))
