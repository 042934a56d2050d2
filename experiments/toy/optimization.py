"""Optimisers, learning rate and the resumable state, without pickle."""

import json
import math
import os
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import nn

OptimizerName = Literal["muon", "adamw"]

PEAK_RATE = 2e-3
WARM_UP_SHARE = 0.04
FINAL_RATE_SHARE = 0.02


def build_optimizers(model: nn.Module, name: OptimizerName) -> list[torch.optim.Optimizer]:
    """Muon on the 2-D weights of the layers and AdamW on the rest, or AdamW on everything.

    Muon as in "Muon is scalable" (2502.16982): momentum 0.95, weight decay 0.1, update scaled to AdamW's RMS,
    so that both share one learning rate. AdamW: betas (0.9, 0.98), weight decay 0.01; the AdamW twin decays
    its 2-D layer weights by 0.1 as Muon does, so that the twins differ in the optimiser only.
    """
    matrices, others = [], []
    for path, parameter in model.named_parameters():
        in_layer = ".layers." in path and parameter.ndim == 2
        (matrices if in_layer else others).append(parameter)
    adamw = {"lr": PEAK_RATE, "betas": (0.9, 0.98)}
    if name == "adamw":
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.01}]
        return [torch.optim.AdamW(groups, **adamw)]
    muon = torch.optim.Muon(matrices, lr=PEAK_RATE, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, weight_decay=0.01, **adamw)]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over 4% of the steps, then a cosine from the peak down to 2% of it."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step < warm_up:
        return PEAK_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return PEAK_RATE * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


def save_state(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], record: dict[str, Any]
) -> None:
    """Write weights and optimiser moments as one safetensors file, atomically, with `record` in its header.

    Batches and masks are functions of the step number, so no generator state is needed to resume exactly.
    """
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for index, optimizer in enumerate(optimizers):
        for slot, values in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{slot}/{key}": value for key, value in values.items()}
    partial = path.with_suffix(".partial")
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata={"record": json.dumps(record)})
    os.replace(partial, path)


def load_state(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Restore what `save_state` wrote, in place, and return its record."""
    from safetensors import safe_open

    tensors = load_file(path)
    model.load_state_dict({k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")})
    for index, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, torch.Tensor]] = {}
        prefix = f"optimizer/{index}/"
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                slot, key = name.removeprefix(prefix).split("/")
                state.setdefault(int(slot), {})[key] = tensor
        # Hyper-parameters come from the code; only the moments are restored.
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["record"])
