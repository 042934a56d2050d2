"""Muon on CPUs without bfloat16 instructions: torch's optimiser with its iteration in float32."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dlm_lens.placement import emulates_bfloat16


def build_muon(matrices: Iterable[nn.Parameter], *, rate: float, weight_decay: float) -> torch.optim.Muon:
    """Muon as in "Muon is scalable" (2502.16982): momentum 0.95, the update scaled to AdamW's RMS.

    torch orthogonalises in bfloat16. For weights on a CPU that has no instructions for it, `Float32Muon` is
    returned: on a Zen 3 core a layer of width 192 then takes 36 ms instead of 766 (`python -m benchmarks.muon`).

    Args:
        matrices: the weights.
        rate: learning rate.
        weight_decay: decoupled, times the rate.
    """
    weights = list(matrices)
    slow = emulates_bfloat16() and all(one.device.type == "cpu" for one in weights)
    return (Float32Muon if slow else torch.optim.Muon)(
        weights, lr=rate, momentum=0.95, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )


class Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` that orthogonalises in float32.

    Its state is torch's, so that a run may begin with one and go on with the other.

    Args:
        params: matrices, or groups of them.
        **options: of `torch.optim.Muon`.

    Raises:
        ValueError: `adjust_lr_fn` is not "match_rms_adamw", the only scale of updates here.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            if group["adjust_lr_fn"] != "match_rms_adamw":
                raise ValueError(
                    f"adjust_lr_fn is {group['adjust_lr_fn']!r}; Float32Muon takes 'match_rms_adamw' alone"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, with Nesterov's momentum where the group has it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        return loss

    def _update(self, weight: nn.Parameter, group: dict[str, Any]) -> None:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        update = orthogonalised(update.float(), group["ns_coefficients"], group["ns_steps"], group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update.to(weight.dtype), alpha=-0.2 * math.sqrt(max(weight.shape)) * group["lr"])


def orthogonalised(
    matrix: Float[Tensor, "rows columns"], coefficients: tuple[float, float, float], steps: int, eps: float
) -> Float[Tensor, "rows columns"]:
    """The Newton-Schulz iteration of Muon: singular values go towards 1, singular vectors stay.

    X_0 = M / max(|M|_F, eps), X_(k+1) = a X_k + (b A + c A A) X_k with A = X_k X_k^T (K. Jordan, "Muon", 2024). In
    the dtype of the matrix, which is not changed.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    # A is of the shorter side.
    result = matrix.T if tall else matrix
    result = result / result.norm().clamp(min=eps)
    for _ in range(steps):
        gram = result @ result.T
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.T if tall else result
