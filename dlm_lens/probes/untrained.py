"""`untrained_twin`: a network of the same shape that has learned nothing, as a null of probes."""

import copy
from typing import Any

import torch

from dlm_lens.arguments import checked_arguments, whole
from dlm_lens.attention import exclusive


@checked_arguments(seed=whole(0))
@torch.no_grad()
@exclusive
def untrained_twin(model: Any, *, seed: int = 0) -> Any:
    """A copy of a model whose weights are permuted at random within every tensor.

    Each tensor keeps the distribution of its entries, so that norms of activations stay of the trained model's
    size, and loses all structure. What a probe finds in it does not come from training: attention that averages
    over keys shows the share of masks in any network.

    Args:
        model: from `dlm_lens.load`.
        seed: of the permutations.

    Raises:
        ValueError: a quantised model.
        RuntimeError: a model with hooks, a recording or a trace on it.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(f"untrained_twin: {name} holds {parameter.dtype}; load the model unquantised")
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in twin.parameters():
        order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
        parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))
    return twin
