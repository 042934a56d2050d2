"""Checkpoints as SAELens and sparsify write them, and what their formulas give in float64."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

WIDTH, COUNT, K = 12, 20, 4


def draw(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by SAELens's names, those of every architecture."""
    made = np.random.default_rng(seed)
    sizes: dict[str, tuple[int, ...]] = {"W_enc": (WIDTH, COUNT), "W_dec": (COUNT, WIDTH), "b_dec": (WIDTH,)}
    names = ("b_enc", "threshold", "b_gate", "b_mag", "r_mag")
    sizes |= dict.fromkeys(names, (COUNT,))
    # Float32 numbers: the file holds those.
    return {name: made.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def vectors(seed: int = 1) -> np.ndarray:
    """Activations to encode."""
    return np.random.default_rng(seed).normal(size=(7, WIDTH)).astype(np.float32)


def write_saelens(path: Path, names: str, settings: dict[str, Any], **changed: np.ndarray) -> Path:
    """A directory of SAELens with the weights of these names."""
    path.mkdir(exist_ok=True)
    weights = draw() | changed
    save_file({name: torch.from_numpy(weights[name]) for name in names.split()}, path / "sae_weights.safetensors")
    (path / "cfg.json").write_text(json.dumps({"d_in": WIDTH, "d_sae": COUNT} | settings))
    return path


def write_sparsify(path: Path, settings: dict[str, Any]) -> Path:
    """A directory of sparsify."""
    path.mkdir(exist_ok=True)
    weights = {name: torch.from_numpy(value) for name, value in draw().items()}
    tensors = {"encoder.weight": weights["W_enc"].T.contiguous(), "encoder.bias": weights["b_enc"]}
    save_file(tensors | {"W_dec": weights["W_dec"], "b_dec": weights["b_dec"]}, path / "sae.safetensors")
    (path / "cfg.json").write_text(json.dumps({"d_in": WIDTH, "k": K} | settings))
    return path


def kept(inner: np.ndarray, k: int) -> np.ndarray:
    """The k largest entries of every row after relu, 0 elsewhere."""
    found = np.zeros_like(inner)
    for row, values in enumerate(inner):
        for place in np.argsort(-values)[:k]:
            found[row, place] = max(values[place], 0.0)
    return found
