"""Reading the goldens: cases, and every intermediate of a forward under their names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

GOLDEN = Path(__file__).parent.parent / "golden"
# Several times the float32 noise of the references themselves (1.7e-5 on logits of up to 13).
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def cases(*paths: Path) -> list[Any]:
    """(path, case name) of every forward case."""
    return [
        pytest.param(path, case["name"], id=f"{path.name}-{case['name']}")
        for path in paths
        for case in json.loads((path / "forward.json").read_text())["cases"]
    ]


def collect(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """Every intermediate of one forward under the golden's names."""
    seen: dict[str, Tensor] = {}
    handles = []

    def keep(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_forward_hook(lambda _m, _a, out: seen.__setitem__(name, out)))

    keep(model.model.embed_tokens, "hidden.embed")
    keep(model.model.norm, "hidden.final_norm")
    for index, layer in enumerate(model.model.layers):
        keep(layer, f"hidden.block{index}")
        keep(layer.self_attn.o_proj, f"attn_out{index}")
        keep(layer.mlp, f"mlp_out{index}")
        for point, name in (("rot_q", "q"), ("rot_k", "k"), ("v", "v"), ("pattern", "probs"), ("z", "z")):
            keep(getattr(layer.self_attn, f"hook_{point}"), f"{name}{index}")
        if hasattr(layer.self_attn, "gate_proj"):
            keep(layer.self_attn.gate_proj, f"gate{index}")
            gated = layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _m, args, name=f"z_gated{index}": seen.__setitem__(name, args[0])
            )
            handles.append(gated)
    seen["logits"] = model(input_ids=ids, **inputs).logits
    for handle in handles:
        handle.remove()
    for name in seen:
        if name[0] in "qkv":
            seen[name] = seen[name].transpose(1, 2)
        elif name.startswith("gate"):
            seen[name] = seen[name].sigmoid()
        elif name.startswith("z") and "gated" not in name:
            seen[name] = seen[name].flatten(-2)
    return seen
