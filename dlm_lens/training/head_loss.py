"""Weighted cross entropy of the positions that are asked for, without ever holding all their logits."""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""Logits held at once, per kind of device: 128 MiB and 1 GiB in float32."""


def weighted_cross_entropy(
    states: Float[Tensor, "n d_model"],
    head: nn.Module,
    targets: Int[Tensor, "n"],
    weights: Float[Tensor, "n"],
    elements: int | None = None,
) -> Float[Tensor, ""]:
    """sum_n weights_n (logsumexp(W x_n) - (W x_n)[target_n]), in float32, a few rows of logits at a time.

    A plain linear head gets its gradient in the forward pass, so that nothing is computed twice; any other head
    (quantised, wrapped, or partitioned by DeepSpeed) is recomputed in the backward pass.

    Args:
        states: what the head sees.
        head: from states to logits.
        targets: ids.
        weights: of each loss.
        elements: logits held at once; None for 2**25 on a CPU and 2**28 on a GPU.
    """
    vocabulary = getattr(head, "out_features", None) or cast(Any, head).weight.shape[0]
    budget = elements or ELEMENTS.get(states.device.type, ELEMENTS["cuda"])
    rows = max(1, budget // int(vocabulary))
    if not len(states):
        # Nothing was masked: a loss of zero that still has a gradient, so that distributed ranks stay in step.
        return states.sum() * 0.0 + sum(parameter.sum() * 0.0 for parameter in head.parameters())
    if _plain(head):
        dtype = torch.get_autocast_dtype(states.device.type) if _autocast(states) else states.dtype
        total: Tensor = _LinearLoss.apply(states, head.weight, targets, weights.float(), rows, dtype)
        return total
    total = states.new_zeros((), dtype=torch.float32)
    for part in range(0, len(states), rows):
        piece = slice(part, part + rows)
        total = total + checkpoint(
            _piece, head, states[piece], targets[piece], weights[piece].float(), use_reentrant=False
        )
    return total


def _piece(head: nn.Module, states: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(head(states).float(), targets, reduction="none")
    return (losses * weights).sum()


def _autocast(states: Tensor) -> bool:
    return bool(torch.is_autocast_enabled(states.device.type))


def _plain(head: nn.Module) -> bool:
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        return False
    # ds_id: a parameter that DeepSpeed gathers only while its module runs.
    watched = bool(head._forward_hooks) or bool(head._forward_pre_hooks)
    return not watched and head.weight.is_floating_point() and not hasattr(head.weight, "ds_id")


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, kernel: Tensor, targets: Tensor, weights: Tensor, rows: int, dtype: torch.dtype
    ) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            wide_states, wide_kernel = ctx.needs_input_grad[:2]
            grad_states = torch.empty_like(states) if wide_states else None
            grad_kernel = torch.zeros_like(kernel, dtype=torch.float32) if wide_kernel else None
            total = torch.zeros((), device=states.device)
            weight = kernel.to(dtype)
            for part in range(0, len(states), rows):
                piece = slice(part, part + rows)
                x, wanted, factor = states[piece].to(dtype), targets[piece, None], weights[piece, None]
                logits = (x @ weight.T).float()
                normaliser = logits.logsumexp(-1, keepdim=True)
                total += (factor * (normaliser - logits.gather(-1, wanted))).sum()
                if grad_states is None and grad_kernel is None:
                    continue
                # d loss / d logits = weight (softmax - one-hot), in place of the logits.
                logits.sub_(normaliser).exp_().mul_(factor).scatter_add_(-1, wanted, -factor)
                slope = logits.to(dtype)
                if grad_states is not None:
                    grad_states[piece] = (slope @ weight).to(states.dtype)
                if grad_kernel is not None:
                    if dtype == torch.float32:
                        grad_kernel.addmm_(slope.T, x)
                    else:
                        grad_kernel += (slope.T @ x).float()
        ctx.gradients = grad_states, None if grad_kernel is None else grad_kernel.to(kernel.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        states, kernel = ctx.gradients
        ctx.gradients = None, None
        scaled = (None if value is None else value.mul_(slope.to(value.dtype)) for value in (states, kernel))
        return (*scaled, None, None, None, None)
