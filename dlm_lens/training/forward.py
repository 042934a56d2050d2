"""The forward pass of training: states of the canvas, and the head only where something is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.attention import SinkLayout
from dlm_lens.training.head_loss import weighted_cross_entropy


def masked_loss(
    model: Any,
    input_ids: Int[Tensor, "batch position"],
    outputs: Int[Tensor, "n"],
    targets: Int[Tensor, "n"],
    weights: Float[Tensor, "n"],
    *,
    elements: int | None = None,
    **inputs: Tensor,
) -> Float[Tensor, ""]:
    """sum_n weights_n CE(logits of output n, target n): the numerator of an objective's loss.

    The head runs on the outputs that are asked for, a few at a time; learned sinks leave before it.

    Args:
        model: any causal LM or masked DLM of transformers' layout.
        input_ids: the canvas.
        outputs: indices into the flattened [batch * position].
        targets: ids.
        weights: of each loss.
        elements: logits held at once.
        **inputs: attention_mask and position_ids of the decoder.
    """
    states = model.get_decoder()(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    states = states[:, SinkLayout.of(model).canvas(states.shape[1])]
    wanted = states.flatten(0, 1)[outputs]
    return weighted_cross_entropy(wanted, model.get_output_embeddings(), targets, weights, elements)


@contextmanager
def loss_forward(model: Any) -> Iterator[None]:
    """While this runs, `model(input_ids=..., outputs=..., targets=..., weights=...)` is `{"loss": masked_loss}`.

    Wrappers that share gradients or shards (DDP, FSDP, DeepSpeed) work on a module's own forward, so the loss has
    to be part of it; calls without `outputs` are the model's as ever.
    """
    usual = model.forward

    def forward(self: Any, *args: Any, outputs: Tensor | None = None, **inputs: Any) -> Any:
        if outputs is None:
            return usual(*args, **inputs)
        return {"loss": masked_loss(self, outputs=outputs, **inputs)}

    model.forward = MethodType(forward, model)
    try:
        yield
    finally:
        del model.forward
