"""The two training losses: masked diffusion and next token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch.nn import functional

from experiments.toy.corpus import Batch

WHOLE_SEQUENCE_SHARE = 0.3  # of the rows; in the others only the answer is masked, as at inference

Logits = Float[torch.Tensor, "batch position d_vocab"]
Forward = Callable[[Int[torch.Tensor, "batch position"], Bool[torch.Tensor, "batch position"]], Logits]


@dataclass(frozen=True)
class Noised:
    """A canvas x_t: corrupted ids, which positions are masked, and each one's weight in the loss."""

    tokens: Int[torch.Tensor, "batch position"]
    masked: Bool[torch.Tensor, "batch position"]
    weight: Float[torch.Tensor, "batch position"]


def noise(batch: Batch, mask_token_id: int, generator: torch.Generator) -> Noised:
    """Mask exactly k_b = ceil(t_b R_b) of the R_b positions of a row's region, t stratified over the batch.

    The region is the answer with its `<eos>` tail (70% of the rows) or the whole canvas (30%). Drawing the
    number of masks instead of a coin per position is the lower-variance form of the same loss (LLaDA,
    2502.09992, Eq. 6 and Eq. 14): t becomes k / R, hence 1 / (t R) = 1 / k, the weight of a masked position.
    """
    size, positions = batch.tokens.shape
    strata = torch.randperm(size, generator=generator) + torch.rand(size, generator=generator)
    whole = torch.rand(size, generator=generator) < WHOLE_SEQUENCE_SHARE
    start = torch.where(whole, 0, batch.prompt_length)
    region = batch.visible & (torch.arange(positions) >= start[:, None])
    count = (strata / size * (batch.length - start)).ceil().clamp(min=1)
    # The k positions with the smallest draws are a uniform choice of k positions.
    draws = torch.rand(size, positions, generator=generator).masked_fill(~region, 2.0)
    masked = draws.argsort(dim=1).argsort(dim=1) < count[:, None]
    tokens = batch.tokens.masked_fill(masked, mask_token_id)
    return Noised(tokens, masked, masked / (count * size)[:, None])


def diffusion_loss(
    forward: Forward, batch: Batch, mask_token_id: int, generator: torch.Generator
) -> Float[torch.Tensor, ""]:
    """Masked cross entropy in nats (2502.09992, Eq. 3).

    L = mean_b 1/(t_b R_b) sum_{i masked} -log p(x_i | x_t), R_b the positions of the row's region.
    """
    noised = noise(batch, mask_token_id, generator)
    return _weighted_cross_entropy(forward(noised.tokens, batch.visible), batch.tokens, noised.weight)


def next_token_loss(forward: Forward, batch: Batch) -> Float[torch.Tensor, ""]:
    """Causal cross entropy, L = mean_b 1/(L_b - 1) sum_{i >= 1} -log p(x_i | x_<i), in nats.

    The `<eos>` tail counts, as it does for the diffusion model: the two see the same tokens.
    """
    logits = forward(batch.tokens, batch.visible)[:, :-1]
    counted = batch.visible[:, 1:]
    weight = counted / (counted.sum(dim=1, keepdim=True) * len(counted))
    return _weighted_cross_entropy(logits, batch.tokens[:, 1:], weight)


def _weighted_cross_entropy(
    logits: Logits,
    targets: Int[torch.Tensor, "batch position"],
    weight: Float[torch.Tensor, "batch position"],
) -> Float[torch.Tensor, ""]:
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * weight.flatten()).sum()
