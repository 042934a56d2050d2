"""AdamW, Muon with AdamW as one optimiser, and the learning-rate schedule."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from dlm_lens.placement import emulates_bfloat16
from dlm_lens.training.settings import DECAY_SHARE, Optimisation

logger = logging.getLogger(__name__)

ADDED = re.compile(r"(^|[._])(bias|sinks?|sink_logits)$")
"""The end of the names of parameters that are biases or sinks, whatever their shape."""


def learning_rate(step: int, steps: int, settings: Optimisation) -> float:
    """Rate of a step (from 0): linear warm-up, then by the schedule to `min_rate` at step `steps` - 1.

    With w = max(1, round(warm_up * steps)): rate (step + 1) / w for step < w. From step w on, with "cosine"

        min_rate + (rate - min_rate) (1 + cos(pi p)) / 2,    p = (step - w) / (steps - 1 - w).

    With "warmup_stable_decay" `rate` up to the last d = max(1, round(decay_share * steps)) steps, of which the
    k-th, k = 1..d, has

        min_rate + (rate - min_rate) f(k / d),

    f(p) = 1 - p ("linear"), (1 + cos(pi p)) / 2 ("cosine") or 1 - sqrt(p) ("1-sqrt"): the rates of transformers'
    `get_wsd_schedule` one step earlier, so that the first step is not at rate 0 and the last one is at `min_rate`.
    Where warm-up and decay round to more steps than there are, the decay is shorter; with a decay_share of 0 there
    is none. The last step has `min_rate` also where it is the only one after the warm-up. With a `second_rate` the
    max(1, round(second_share * steps)) steps before the decay have it, and it is in the place of `rate` above:
    the two stable rates of LLaDA's pre-training (2502.09992, section 2.2).
    """
    warm_up = max(1, round(settings.warm_up * steps))
    if step < warm_up:
        return settings.rate * (step + 1) / warm_up
    shape, highest = "cosine", settings.rate
    if settings.schedule == "cosine":
        done = 1.0 if step >= steps - 1 else (step - warm_up) / (steps - 1 - warm_up)
    else:
        shape = settings.decay_type or "linear"
        share = DECAY_SHARE if settings.decay_share is None else settings.decay_share
        first = steps if share == 0 else max(warm_up, steps - max(1, round(share * steps)))
        second = settings.second_rate, settings.second_share
        if second[0] is not None and second[1] is not None and step >= first - max(1, round(second[1] * steps)):
            highest = second[0]
        if step < first or share == 0:
            return highest
        done = min(1.0, (step - first + 1) / (steps - first))
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "1-sqrt": 1 - math.sqrt(done)}.get(shape, 1 - done)
    return settings.min_rate + (highest - settings.min_rate) * left


def build_optimizer(model: nn.Module, settings: Optimisation) -> Optimizer:
    """AdamW on everything, or Muon on the matrices of the layers and AdamW on the rest.

    `weight_decay` is that of the layers' weights of two or more axes (matrices, and experts, which are stacks of
    matrices), `other_weight_decay` that of embeddings, norms, biases and sinks, also those with an axis of heads or
    experts (GIDD's learned key and value). Muon takes matrices alone.

    AdamW runs as one fused kernel, as in transformers' Trainer: the other implementations hold one or two temporary
    tensors of the largest weight's size.

    Muon's update is scaled to AdamW's RMS, so that both share one learning rate.

    Raises:
        ValueError: a model of which nothing is trained, or Muon for one whose layers have no matrices.
    """
    check_trained(model)
    layers, others = _by_place(model)
    decay = settings.weight_decay if settings.other_weight_decay is None else settings.other_weight_decay
    adamw: dict[str, Any] = {"lr": settings.rate, "betas": tuple(settings.betas), "fused": _fusible(model)}
    matrices: list[nn.Parameter] = []
    if settings.optimizer == "muon":
        matrices = [parameter for parameter in layers if parameter.ndim == 2]
        layers = [parameter for parameter in layers if parameter.ndim != 2]
        if not matrices:
            raise ValueError(
                f"optimisation.optimizer is muon, and the layers of {type(model).__name__} have no matrices that "
                "are trained; choose adamw"
            )
        if layers:
            logger.warning(
                "Muon takes matrices: %d weights of the layers with more axes (experts) are left to AdamW",
                len(layers),
            )
    groups = [{"params": layers, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": decay}]
    groups = [group for group in groups if group["params"]]
    if not matrices:
        return torch.optim.AdamW(groups, **adamw)
    muon = build_muon(matrices, rate=settings.rate, weight_decay=settings.weight_decay)
    return Optimizers([muon, *([torch.optim.AdamW(groups, **adamw)] if groups else [])])


def check_trained(model: nn.Module) -> None:
    """Refuse a model of which nothing is trained.

    Raises:
        ValueError: no weight requires a gradient.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"all weights of the {type(model).__name__} are frozen (requires_grad is False), so that nothing would "
            "be trained; call requires_grad_(True) on the model or on what is to be trained"
        )


def _by_place(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained `layer_weights` of a network, and its other trained parameters."""
    layers = [parameter for parameter in layer_weights(model) if parameter.requires_grad]
    chosen = {id(parameter) for parameter in layers}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return layers, [parameter for parameter in trained if id(parameter) not in chosen]


def layer_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of two or more axes in the layers of a network, which multiply activations, in its own order.

    A parameter that is added, or that stands in for a key, has a row for every head or expert and is no matrix.
    """
    within: set[int] = set()
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList):
            embeddings = {id(p) for m in stack.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
            within |= {id(p) for name, p in stack.named_parameters() if not ADDED.search(name)} - embeddings
    return [parameter for parameter in model.parameters() if id(parameter) in within and parameter.ndim >= 2]


def _fusible(model: nn.Module) -> bool | None:
    """True where torch has a fused AdamW for every trained weight; None leaves the choice to torch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    devices = {parameter.device.type for parameter in trained}
    return (devices <= {"cpu", "cuda"} and all(map(torch.is_floating_point, trained))) or None


class Optimizers(Optimizer):
    """Several optimisers with one interface: their parameter groups are concatenated."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__(self._groups(), {})

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The joint state, with the parameters numbered consecutively."""
        state: dict[int, Any] = {}
        groups: list[Any] = []
        offset = 0
        for part in (optimizer.state_dict() for optimizer in self.optimizers):
            state |= {offset + slot: value for slot, value in part["state"].items()}
            groups += [
                {**group, "params": [offset + slot for slot in group["params"]]} for group in part["param_groups"]
            ]
            offset += sum(len(group["params"]) for group in part["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a joint state from `state_dict`."""
        offset, first = 0, 0
        for optimizer in self.optimizers:
            count = len(optimizer.param_groups)
            groups = state_dict["param_groups"][first : first + count]
            size = sum(len(group["params"]) for group in groups)
            own = range(offset, offset + size)
            optimizer.load_state_dict(
                {
                    "state": {slot - offset: value for slot, value in state_dict["state"].items() if slot in own},
                    "param_groups": [
                        {**group, "params": [slot - offset for slot in group["params"]]} for group in groups
                    ],
                }
            )
            offset, first = offset + size, first + count
        self.param_groups = self._groups()


def optimizer_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The moments of a `state_dict` as named tensors; hyper-parameters come from the settings."""
    return {
        f"{slot}/{name}": torch.as_tensor(value).detach().clone().contiguous()
        for slot, values in state["state"].items()
        for name, value in values.items()
    }


def restore_optimizer(optimizer: Optimizer, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load named moments into an optimiser.

    Raises:
        ValueError: moments of weights of other shapes, which a fused kernel would read and write beyond their end.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        slot, key = name.split("/", 1)
        shape = tuple(weights[int(slot)].shape) if int(slot) < len(weights) else None
        if tensor.ndim and tuple(tensor.shape) != shape:  # the number of steps is a single number
            own = "which has fewer weights" if shape is None else f"whose shape is {list(shape)}"
            raise ValueError(
                f"the checkpoint has moments of shape {list(tensor.shape)} for weight {slot} of the optimiser, "
                f"{own}: they are of another network, or in the order of an earlier version; choose another output "
                "(model.start takes the weights of a checkpoint)"
            )
        state.setdefault(int(slot), {})[key] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


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
