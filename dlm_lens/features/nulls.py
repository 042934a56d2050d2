"""Nulls of a sparse autoencoder: what the same sparsity gives without training."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlm_lens.arguments import ONE_SEED, checked_arguments
from dlm_lens.features.sparse_autoencoder import AUTOENCODER, SparseAutoencoder


@checked_arguments(sae=AUTOENCODER, seed=ONE_SEED)
def untrained(sae: SparseAutoencoder, seed: int = 0) -> SparseAutoencoder:
    """An autoencoder of the same form with random weights, as training begins (2406.04093, appendix A.1).

    The decoder's rows are random directions of length 1, the encoder is its transpose, and the encoder's bias is 0.
    The decoder's bias, which holds the mean of the activations, is that of the trained one: the null differs in its
    features alone. A threshold stays.
    """
    decoder = _directions(sae, seed)
    zero = torch.zeros_like(sae.encoder_bias)
    gate: dict[str, Any] = {} if sae.gate_bias is None else {"gate_bias": zero, "gate_scale": zero}
    return replace(sae, encoder_weight=decoder.T.contiguous(), encoder_bias=zero, decoder_weight=decoder, **gate)


@checked_arguments(sae=AUTOENCODER, seed=ONE_SEED)
def random_decoder(sae: SparseAutoencoder, seed: int = 0) -> SparseAutoencoder:
    """The trained encoder with a decoder of random directions, each as long as the one that it replaces."""
    directions = _directions(sae, seed) * sae.decoder_weight.norm(dim=-1, keepdim=True)
    return replace(sae, decoder_weight=directions)


def _directions(sae: SparseAutoencoder, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(sae.decoder_weight.shape, generator=generator, dtype=torch.float32)
    return (drawn / drawn.norm(dim=-1, keepdim=True)).to(sae.decoder_weight)
