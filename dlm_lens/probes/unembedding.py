"""Residual streams as distributions over tokens: final norm and unembedding, and measures of the distributions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.head import final_norm, head_logits
from dlm_lens.adapters.registry import excluded_id
from dlm_lens.placement import execution_device, in_float64

ENTRIES_AT_ONCE = 2**22
"""Logits in float64 at a time, 32 MiB each of a few."""

Translate = Callable[[int, Tensor], Tensor]
"""(layer, stream) -> the stream in the basis of the last layer: the map of a tuned lens, or the identity."""


class Unembedding:
    """The final norm and the unembedding W_U, which turn the output of the last layer into logits.

    Args:
        model: from `dlm_lens.load`.

    Attributes:
        sigma: noise level of the states, for the final norm of a network that is given it (a DiT); None for others.

    Raises:
        ValueError: a model without a final norm of a known name.
    """

    sigma: float | None = None

    def __init__(self, model: Any) -> None:
        norm = final_norm(model)
        self.model, self.norm, self.unembed = model, norm, model.get_output_embeddings()
        self.vocabulary: int = self.unembed.weight.shape[0]
        self.mask_id = excluded_id(model.config)
        self.device = execution_device(self.unembed)
        own: Tensor = next(norm.parameters(), self.unembed.weight)  # OLMo's norm has no weights
        self.norm_device, self.dtype = execution_device(norm), own.dtype

    @property
    def rows_at_once(self) -> int:
        """How many states are turned into logits at a time, so that memory stays bounded."""
        return positions_at_once(self.model)

    def logits(self, stream: Float[Tensor, "state d_model"]) -> Float[Tensor, "state d_vocab"]:
        """Logits, in the model's dtype."""
        states = stream.to(self.norm_device, self.dtype)
        states = self.norm(states) if self.sigma is None else self.norm(states, sigma=self.sigma)
        return head_logits(self.model, states.to(self.device)).to(self.device)

    def log_probabilities(self, stream: Float[Tensor, "state d_model"]) -> Float[Tensor, "state d_vocab"]:
        """Log-probabilities ln p, in float64."""
        return in_float64(self.logits(stream)).log_softmax(-1)


def positions_at_once(model: Any) -> int:
    """Of how many positions there may be logits in float64 at a time, so that memory stays bounded."""
    return max(1, ENTRIES_AT_ONCE // int(model.get_output_embeddings().weight.shape[0]))


def without_mask(model: Any, logits: Float[Tensor, "state d_vocab"]) -> Float[Tensor, "state d_vocab"]:
    """Logits or log-probabilities in which [MASK], which no sampler proposes, has -inf."""
    mask_id = excluded_id(model.config)
    if mask_id is None or mask_id >= logits.shape[-1]:
        return logits
    return logits.index_fill(-1, torch.tensor([mask_id], device=logits.device), -torch.inf)


def lens_measures(
    head: Unembedding,
    passes: Sequence[Sequence[Float[Tensor, "entry d_model"]]],
    layers: Sequence[int],
    written: Int[Tensor, "entry"],
    predicted: Bool[Tensor, "entry"],
    top: int,
    translate: Translate,
) -> dict[str, Tensor]:
    """Top tokens, entropy, KL and rank of the distributions that the lens reads, a few entries at a time.

    Args:
        head: the model's unembedding.
        passes: of one pass or two, without and with hooks, the outputs of `layers`, then that of the network's last
            layer.
        layers: index of each stream's layer.
        written: id of the token that was finally decoded; -1 for none.
        predicted: whether the model is trained to predict there.
        top: how many tokens to keep.
        translate: applied to each stream before the final norm.

    Returns:
        top_tokens and top_probabilities [entry, layer, top], entropy, kl and rank [entry, layer]. kl (NaN) and rank
        (-1) are undefined where not `predicted`, the rank also where `written` is -1. Of two passes also those of
        the second, called hooked_..., and change [entry, layer], KL(first || second) in nats.
    """
    rows = head.rows_at_once
    parts = []
    # Of no entries one empty part has the shapes.
    for start in range(0, max(1, len(written)), rows):
        part = slice(start, start + rows)
        final = [head.log_probabilities(streams[-1][part]) for streams in passes]
        token, wanted = written[part].to(final[0].device), predicted[part].to(final[0].device)
        of_layers = []
        for place, layer in enumerate(layers):
            # The logits of a layer are computed once, for its measures and for the comparison of the passes.
            logs = [head.log_probabilities(translate(layer, streams[place][part])) for streams in passes]
            found = _measures_of_layer(head, logs[0], final[0], token, wanted, top)
            for other, last in zip(logs[1:], final[1:], strict=True):
                hooked = _measures_of_layer(head, other, last, token, wanted, top)
                found |= {f"hooked_{name}": value for name, value in hooked.items()}
                found["change"] = kl_divergence(logs[0], other).float().cpu()
            of_layers.append(found)
        parts.append({name: torch.stack([each[name] for each in of_layers], 1) for name in of_layers[0]})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _measures_of_layer(
    head: Unembedding,
    logs: Tensor,
    final: Tensor,
    token: Int[Tensor, "part"],
    predicted: Bool[Tensor, "part"],
    top: int,
) -> dict[str, Tensor]:
    best = logs.topk(top, dim=-1)
    rank = token_rank(logs, token, head.mask_id).masked_fill(~predicted, -1)
    found = {"top_tokens": best.indices, "top_probabilities": best.values.exp().float()}
    found |= {"entropy": torch.special.entr(logs.exp()).sum(-1).float(), "rank": rank}
    found["kl"] = kl_divergence(final, logs).masked_fill(~predicted, torch.nan).float()
    return {name: value.cpu() for name, value in found.items()}


def kl_divergence(p: Float[Tensor, "state d_vocab"], q: Float[Tensor, "state d_vocab"]) -> Float[Tensor, "state"]:
    """KL(p || q) = sum_v p_v (ln p_v - ln q_v) of log-probabilities, in nats; terms with p_v = 0 are 0."""
    return (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0).sum(-1).clamp(min=0)


def token_rank(
    logs: Float[Tensor, "state d_vocab"], token: Int[Tensor, "state"], mask_id: int | None
) -> Int[Tensor, "state"]:
    """How many tokens are likelier than this one, 0 for the first; -1 where `token` is -1.

    Args:
        logs: log-probabilities.
        token: id of the token; -1 for none.
        mask_id: of [MASK], which is never decoded and does not count; None if the model has none.
    """
    likelier = logs > logs.gather(-1, token.clamp(min=0)[:, None])
    if mask_id is not None and mask_id < logs.shape[-1]:
        likelier[:, mask_id] = False
    return likelier.sum(-1).masked_fill(token < 0, -1)
