"""Hidden states as tokens: the final norm and the head, applied to the residual stream of any layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.head import final_norm, head_logits
from dlm_lens.attention import Hook, PointContext, SinkLayout, Site, attach_hooks
from dlm_lens.placement import execution_device

ENTRIES_AT_ONCE = 2**22
"""Logits in float64 at a time, 32 MiB each of a few."""

Translate = Callable[[int, Tensor], Tensor]
"""What a tuned lens does to the stream of a layer."""


class Head:
    """What turns the stream behind the last layer into logits: final norm, then unembedding.

    Args:
        model: from `dlm_lens.load`.

    Raises:
        ValueError: a model without a final norm of a known name.
    """

    def __init__(self, model: Any) -> None:
        norm = final_norm(model)
        self.model, self.norm, self.unembed = model, norm, model.get_output_embeddings()
        self.vocabulary: int = self.unembed.weight.shape[0]
        self.mask_id: int | None = getattr(model.config, "mask_token_id", None)
        self.device = execution_device(self.unembed)
        own: Tensor = next(norm.parameters(), self.unembed.weight)  # OLMo's norm has no weights
        self.norm_device, self.dtype = execution_device(norm), own.dtype

    @property
    def rows_at_once(self) -> int:
        """How many states may be turned into logits at a time."""
        return max(1, ENTRIES_AT_ONCE // self.vocabulary)

    def logits(self, stream: Float[Tensor, "state d_model"]) -> Float[Tensor, "state d_vocab"]:
        """Logits, in the model's dtype."""
        states = self.norm(stream.to(self.norm_device, self.dtype))
        return head_logits(self.model, states.to(self.device)).to(self.device)

    def log_probabilities(self, stream: Float[Tensor, "state d_model"]) -> Float[Tensor, "state d_vocab"]:
        """Log-probabilities ln p, in float64."""
        return self.logits(stream).double().log_softmax(-1)

    def ranked(self, logs: Float[Tensor, "state d_vocab"], token: Int[Tensor, "state"]) -> Int[Tensor, "state"]:
        """How many tokens are likelier than this one; [MASK], which is never written, does not count."""
        own = logs.gather(-1, token[:, None])
        likelier = logs > own
        if self.mask_id is not None and self.mask_id < self.vocabulary:
            likelier[:, self.mask_id] = False
        return likelier.sum(-1)


def numbers(
    head: Head,
    streams: Sequence[Float[Tensor, "entry d_model"]],
    layers: Sequence[int],
    written: Int[Tensor, "entry"],
    predicted: Bool[Tensor, "entry"],
    top: int,
    translate: Translate,
) -> dict[str, Tensor]:
    """What the streams of the layers say, a few entries at a time; the last of `streams` is the network's end.

    Returns top_tokens and top_probabilities [entry, layer, top], entropy, kl and rank [entry, layer]; kl and rank
    are blank (NaN, -1) where not `predicted` or, for the rank, where nothing was written (-1).
    """
    rows = head.rows_at_once
    parts = []
    for start in range(0, len(written), rows):
        part = slice(start, start + rows)
        final = head.log_probabilities(streams[-1][part])
        token, wanted = written[part].to(final.device), predicted[part].to(final.device)
        parts.append(
            [
                _numbers(head, head.log_probabilities(translate(layer, stream[part])), final, token, wanted, top)
                for layer, stream in zip(layers, streams, strict=False)
            ]
        )
    shape = (0, len(layers))
    blank = {"top_tokens": torch.empty(*shape, top).long(), "top_probabilities": torch.empty(*shape, top)}
    blank |= {"entropy": torch.empty(shape), "kl": torch.empty(shape), "rank": torch.empty(shape).long()}
    return {
        name: torch.cat([torch.stack([layer[name] for layer in part], 1) for part in parts]) if parts else empty
        for name, empty in blank.items()
    }


def _numbers(
    head: Head, logs: Tensor, final: Tensor, token: Int[Tensor, "part"], predicted: Bool[Tensor, "part"], top: int
) -> dict[str, Tensor]:
    best = logs.topk(top, dim=-1)
    rank = head.ranked(logs, token.clamp(min=0)).masked_fill(~predicted | (token < 0), -1)
    found = {"top_tokens": best.indices, "top_probabilities": best.values.exp().float()}
    found |= {"entropy": torch.special.entr(logs.exp()).sum(-1).float(), "rank": rank}
    found["kl"] = divergence(final, logs).masked_fill(~predicted, torch.nan).float()
    return {name: value.cpu() for name, value in found.items()}


def change(
    head: Head, plain: Sequence[Tensor], hooked: Sequence[Tensor], layers: Sequence[int], translate: Translate
) -> Float[Tensor, "entry layer"]:
    """KL(plain || hooked) of what the streams of each layer say, in nats."""
    rows = max(1, head.rows_at_once)
    found = []
    for layer, one, two in zip(layers, plain, hooked, strict=False):
        parts = zip(one.split(rows), two.split(rows), strict=True)
        logs = ([head.log_probabilities(translate(layer, stream)) for stream in pair] for pair in parts)
        found.append(torch.cat([divergence(*pair).float().cpu() for pair in logs]))
    return torch.stack(found, 1)


def divergence(p: Float[Tensor, "state d_vocab"], q: Float[Tensor, "state d_vocab"]) -> Float[Tensor, "state"]:
    """KL(p || q) of log-probabilities, in nats."""
    return (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0).sum(-1).clamp(min=0)


@dataclass(eq=False)
class StreamReader(Hook):
    """Keeps the residual stream behind some layers, on the canvas's positions and behind them the sink tokens'.

    Args:
        layout: where the sink tokens stand.
        rows: rows of the batch, without guidance's second half.
        batch: row of every entry.
        position: its position.
    """

    layout: SinkLayout
    rows: int
    batch: Int[Tensor, "entry"]
    position: Int[Tensor, "entry"]
    streams: dict[int, Float[Tensor, "entry d_model"]] = field(default_factory=dict)

    site: Site = "resid"

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Keep the entries' states."""
        states = self.layout.sinks_last(tensor[: self.rows], 1)
        self.streams[hook.layer()] = states[self.batch.to(tensor.device), self.position.to(tensor.device)]
        return tensor


@contextmanager
def reading(model: Any, reader: StreamReader, layers: Sequence[int]) -> Iterator[None]:
    """Let the reader see the forward passes of the block."""
    with attach_hooks(model, reader, layers=layers):
        yield
