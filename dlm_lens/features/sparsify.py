"""The form in which EleutherAI's sparsify keeps sparse autoencoders: `cfg.json` and `sae.safetensors`.

Fields and formulas as sparsify 1.3 has them (github.com/EleutherAI/sparsify, `sparse_coder.py`).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dlm_lens.features.saelens import size_in
from dlm_lens.features.sparse_autoencoder import SparseAutoencoder
from dlm_lens.printable import shown

WEIGHTS = "sae.safetensors"

SITES = {"": "resid", ".mlp": "mlp_out", ".self_attn": "attn_out", ".attn": "attn_out"}
"""End of the name of the hooked module -> site."""


def shapes_of(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the file must hold, by name.

    Raises:
        ValueError: sizes that are none, or a coder that is no autoencoder.
    """
    for name in ("transcode", "skip_connection", "signed"):
        if settings.get(name):
            raise ValueError(f"cfg.json: {name} is set; read are autoencoders of one activation without it")
    width = size_in(settings, "d_in")
    # 0 stands for a multiple of the width.
    count = size_in(settings, "num_latents") if settings.get("num_latents") else 0
    count = count or width * size_in(settings, "expansion_factor")
    return {"encoder.weight": (count, width), "encoder.bias": (count,), "W_dec": (count, width), "b_dec": (width,)}


def optional_shapes_of(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the file may hold besides: none."""
    return {}


def read(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> SparseAutoencoder:
    """The autoencoder of a file; the layer is that of the directory's name, such as `layers.5`.

    Raises:
        ValueError: an activation that is not read here.
    """
    activation = settings.get("activation", "topk")
    if activation not in ("topk", "groupmax"):
        raise ValueError(f"cfg.json: activation is {shown(activation)}; read are topk and groupmax")
    place = re.search(r"(?:^|\.)(?:layers|h)[._](\d{1,4})((?:\.\w+)?)$", path.name)
    site: Any = SITES.get(place[2]) if place else "resid"
    if site is None:
        raise ValueError(f"{path.name} names a module that is none of a layer, its attention and its MLP")
    return SparseAutoencoder(
        tensors["encoder.weight"].T.contiguous(),
        tensors["encoder.bias"],
        tensors["W_dec"],
        tensors["b_dec"],
        activation=activation,
        k=settings.get("k"),
        site=site,
        layer=int(place[1]) if place else None,
        of_module=site != "resid",  # sparsify hooks the module of that name
    )
