"""`load_sae` and `save_sae`: sparse autoencoders in directories, in the form of SAELens or of sparsify."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dlm_lens.adapters.weight_headers import FLOATING, TensorHeader, read_header
from dlm_lens.arguments import DIRECTORY
from dlm_lens.features import saelens, sparsify
from dlm_lens.features.sparse_autoencoder import FeatureSite, SparseAutoencoder
from dlm_lens.files.atomic_writes import write_file
from dlm_lens.files.json_objects import read_object
from dlm_lens.files.paths import check_directory, user_path
from dlm_lens.files.sealed_json import naming
from dlm_lens.files.tensor_files import write_tensors
from dlm_lens.placement import input_device
from dlm_lens.printable import printable_name

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".npz")
"""Endings of files that are not read: loading one may run code."""


def load_sae(
    path: str | Path,
    model: Any = None,
    *,
    layer: int | None = None,
    site: FeatureSite | None = None,
    device: Any = None,
    dtype: torch.dtype = torch.float32,
) -> SparseAutoencoder:
    """Read a sparse autoencoder from a directory with `cfg.json` and safetensors; nothing is downloaded.

    Two forms are read, by the name of the weights: `sae_weights.safetensors` (SAELens 2 to 6: topk, standard,
    jumprelu and gated; a BatchTopK autoencoder is saved as jumprelu) and `sae.safetensors` (EleutherAI's sparsify:
    topk and groupmax). Names and shapes are compared with `cfg.json` before a weight is read.

    Args:
        path: of the directory.
        model: from `dlm_lens.load`; width, layer and site are compared with it.
        layer: of the activation, where the files do not say or are to be overruled.
        site: likewise "resid", "attn_out" or "mlp_out".
        device: for the weights; None for that of the model's embedding, or the CPU.
        dtype: of the weights and of what is computed with them.

    Raises:
        FileNotFoundError: there is no such directory, or no weights in it.
        ValueError: an empty path, a form, setting, name or shape that is not read, or an autoencoder that does not
            fit the model.
    """
    DIRECTORY.check("path", path)
    if not str(path).strip():
        raise ValueError(f"path is {str(path)!r}; give the directory of a sparse autoencoder")
    path = user_path(path)
    weights = _weights(path)
    if not (path / "cfg.json").is_file():
        raise FileNotFoundError(f"{path} holds {weights.name} but no cfg.json, which says what the weights are")
    settings = read_object(path / "cfg.json", str(path / "cfg.json"))
    with naming(path, "give another autoencoder"):
        form: Any = saelens if weights.name == saelens.WEIGHTS else sparsify
        shapes = form.shapes_of(settings)
        _compare(weights, read_header(weights), shapes, form.optional_shapes_of(settings))
        if model is not None and shapes["b_dec"][0] != int(model.config.hidden_size):
            raise ValueError(
                f"{path} is an autoencoder of vectors of {shapes['b_dec'][0]} entries; the model's have "
                f"{model.config.hidden_size}"
            )
        if device is None:
            device = "cpu" if model is None else input_device(model)
        tensors = _read(weights, dtype)
        sae = saelens.read(settings, tensors) if form is saelens else sparsify.read(settings, tensors, path)
        named: dict[str, Any] = {"layer": layer, "site": site}
        if site is not None:
            named["of_module"] = False
        sae = replace(sae, **{name: value for name, value in named.items() if value is not None}).to(device)
        if model is not None:
            sae.check(model)
        return sae


def save_sae(sae: SparseAutoencoder, path: str | Path) -> Path:
    """Write a directory in the form of SAELens 6, which `load_sae` and SAELens read.

    A process that is killed leaves a directory that `load_sae` refuses, never new weights with an older cfg.json.

    Raises:
        ValueError: what SAELens does not have: "groupmax", and `rescaled` of others than "topk".
        OSError: the disk is full, or takes no files.
    """
    path = user_path(path)
    settings, weights = saelens.settings_of(sae), saelens.weights_of(sae)
    check_directory(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "cfg.json").unlink(missing_ok=True)
    write_tensors(path / saelens.WEIGHTS, weights)
    write_file(path / "cfg.json", json.dumps(settings, indent=1))
    return path


def _weights(path: Path) -> Path:
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no directory; give the one that holds cfg.json and the weights")
    for name in (saelens.WEIGHTS, sparsify.WEIGHTS):
        if (path / name).is_file():
            return path / name
    there = sorted(file.name for file in path.iterdir())
    inner = [name for name in there if (path / name / "cfg.json").is_file()]
    if inner:
        raise FileNotFoundError(
            f"{path} holds {len(inner)} autoencoders; give the directory of one, such as "
            f"{printable_name(str(path / inner[0]), 500)}"
        )
    pickles = [name for name in there if name.endswith(PICKLES)]
    if pickles:
        raise FileNotFoundError(
            f"{path} holds {printable_name(pickles[0])}, and no pickle is read here, since loading one may run "
            f"code; save its tensors as {saelens.WEIGHTS} with a cfg.json, where you trust the file"
        )
    raise FileNotFoundError(f"{path} holds neither {saelens.WEIGHTS} nor {sparsify.WEIGHTS}")


def _compare(
    file: Path,
    found: Mapping[str, TensorHeader],
    shapes: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise unless a file holds tensors of these names and shapes, those of `optional` or not."""
    missing = [name for name in shapes if name not in found]
    surplus = [printable_name(name) for name in found if name not in (*shapes, *optional)]
    if missing or surplus:
        what = f"lacks {missing[0]}" if missing else f"holds {surplus[0]}, which such an autoencoder does not have"
        raise ValueError(f"{file} {what}; cfg.json calls for {', '.join(shapes)}")
    there = {**shapes, **{name: shape for name, shape in optional.items() if name in found}}
    for name, shape in there.items():
        if found[name].shape != shape:
            raise ValueError(
                f"{file}: {name} has shape {list(found[name].shape)}; cfg.json calls for {list(shape)}"
            )
        if found[name].dtype not in FLOATING:
            raise ValueError(f"{file}: {name} holds {found[name].dtype}; weights are of {', '.join(FLOATING)}")


def _read(file: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name).to(dtype) for name in opened.keys()}  # noqa: SIM118
