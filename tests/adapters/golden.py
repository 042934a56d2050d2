"""Reading the goldens: cases, and every intermediate of a forward under their names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import dlm_lens

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


def collect_dit(model: Any, ids: Tensor, sigma: Tensor) -> dict[str, Tensor]:
    """The same of a DiT: its condition and modulations beside them, and the final norm before its modulation."""
    seen: dict[str, Tensor] = {}
    parts = {"cond": model.model.sigma_map, "hidden.final_norm": model.model.norm.norm_final}
    parts |= {f"modulation{index}": layer.modulation for index, layer in enumerate(model.model.layers)}
    handles = [
        part.register_forward_hook(lambda _m, _a, out, name=name: seen.__setitem__(name, out))
        for name, part in parts.items()
    ]
    others = collect(model, ids, sigma=sigma)
    for handle in handles:
        handle.remove()
    return others | seen


@torch.no_grad()
def compare_dit_with_the_original(
    path: Path, case: str, **outputs: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Every stored intermediate of a DiT that is given the noise level; returns those of the case.

    Args:
        path: of the checkpoint.
        case: its name.
        **outputs: what the original makes of the logits -> a function of logits, ids and sigma.
    """
    model: Any = dlm_lens.load(path)
    golden = load_file(path / "forward.safetensors")
    stored = {key.removeprefix(f"{case}."): value for key, value in golden.items() if key.startswith(f"{case}.")}
    ids, sigma = stored.pop("input_ids"), stored.pop("sigma")
    seen = collect_dit(model, ids, sigma)
    seen |= {name: make(seen["logits"], ids, sigma) for name, make in outputs.items()}
    for key, expected in stored.items():
        torch.testing.assert_close(seen[key], expected, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
    # Condition, embedding, final norm, logits; per layer block, q, k, v, pattern, z, two outputs, modulation.
    assert len(stored) == 4 + len(outputs) + 9 * model.config.num_hidden_layers
    return stored


@torch.no_grad()
def compare_with_the_original(path: Path, case: str) -> None:
    """Every stored intermediate of a case without padding, and logits in bfloat16 where they are stored."""
    model = dlm_lens.load(path)
    stored = {
        key.removeprefix(f"{case}."): value
        for key, value in load_file(path / "forward.safetensors").items()
        if key.startswith(f"{case}.")
    }
    ids, half = stored.pop("input_ids"), stored.pop("logits_bfloat16", None)
    seen = collect(model, ids)
    for key, expected in stored.items():
        torch.testing.assert_close(seen[key], expected, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
    # Embedding, final norm, logits; per layer block, q, k, v, pattern, z, attention and MLP outputs.
    assert len(stored) == 3 + 8 * model.config.num_hidden_layers
    if half is not None:
        logits = dlm_lens.load(path, dtype="bfloat16")(input_ids=ids).logits
        difference = (logits.float() - half.float()).abs()
        # Another order of sums differs by a few ulps of logits of up to 8.
        assert difference.max() <= 0.25
        assert difference.mean() < 0.02


def check_saved_names(path: Path, saved: Path) -> PreTrainedModel:
    """A loaded checkpoint that is saved has the names and the numbers of the original; the saved one, loaded."""
    dlm_lens.load(path).save_pretrained(saved)
    original, written = load_file(path / "model.safetensors"), load_file(saved / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    return dlm_lens.load(saved)
