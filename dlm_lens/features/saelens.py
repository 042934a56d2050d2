"""The form in which SAELens keeps sparse autoencoders: `cfg.json` and `sae_weights.safetensors`.

Fields and formulas as SAELens 6 and its reader of older files have them (github.com/jbloomAus/SAELens, `saes/` and
`loading/pretrained_sae_loaders.py`).
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dlm_lens.features.sparse_autoencoder import POINTS, SparseAutoencoder
from dlm_lens.printable import shown

WEIGHTS = "sae_weights.safetensors"
OF_MODULE = "dlm_lens_of_module"
"""The entry of `metadata` for `SparseAutoencoder.of_module`, which the name of a hook point does not say."""

SCALE = "scaling_factor"
"""A tensor of older files, one number per feature, which was trained after the rest."""

BASE = ("W_enc", "W_dec", "b_dec")
TENSORS = {
    "topk": (*BASE, "b_enc"),
    "standard": (*BASE, "b_enc"),
    "jumprelu": (*BASE, "b_enc", "threshold"),
    "gated": (*BASE, "b_gate", "b_mag", "r_mag"),
}
"""Architecture -> the names of its tensors."""


def architecture_of(settings: Mapping[str, Any]) -> str:
    """The architecture, also of files before SAELens 6, whose Top-K autoencoders are "standard" ones.

    Raises:
        ValueError: one that is not read here.
    """
    function = settings.get("activation_fn", settings.get("activation_fn_str", "relu"))
    if function == "topk" and settings.get("architecture", "standard") == "standard":
        return "topk"
    name = settings.get("architecture", "standard")
    if not isinstance(name, str) or name not in TENSORS:
        raise ValueError(f"cfg.json: architecture is {shown(name)}; read are {', '.join(TENSORS)}")
    if name != "topk" and function != "relu":
        raise ValueError(f"cfg.json: activation_fn is {shown(function)}; read are relu and topk")
    return str(name)


def shapes_of(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the file must hold, by name.

    Raises:
        ValueError: sizes or an architecture that are none.
    """
    width, count = (size_in(settings, name) for name in ("d_in", "d_sae"))
    shapes = {"W_enc": (width, count), "W_dec": (count, width), "b_dec": (width,)}
    return {name: shapes.get(name, (count,)) for name in TENSORS[architecture_of(settings)]}


def optional_shapes_of(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the file may hold besides."""
    return {SCALE: (size_in(settings, "d_sae"),)}


def read(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SparseAutoencoder:
    """The autoencoder of a file.

    Raises:
        ValueError: a setting that is not read here.
    """
    architecture = architecture_of(settings)
    site, layer = place_of(settings)
    decoder = tensors["W_dec"]
    if SCALE in tensors:
        decoder = decoder * tensors[SCALE][:, None]  # features are multiplied before the decoder
    own: dict[str, Any] = {"activation": {"standard": "relu"}.get(architecture, architecture)}
    if architecture == "topk":
        own["k"] = settings.get("k", _object(settings, "activation_fn_kwargs").get("k"))
        own["rescaled"] = _flag(settings, "rescale_acts_by_decoder_norm", usual=False)
    own["threshold"] = tensors.get("threshold")
    own["gate_bias"], own["gate_scale"] = tensors.get("b_gate"), tensors.get("r_mag")
    if settings.get("reshape_activations", "none") not in ("none", None):
        raise ValueError("cfg.json: reshape_activations is set; autoencoders of single heads' outputs are not read")
    return SparseAutoencoder(
        tensors["W_enc"],
        tensors["b_mag" if architecture == "gated" else "b_enc"],
        decoder,
        tensors["b_dec"],
        subtracts_bias=_flag(settings, "apply_b_dec_to_input", usual=True),
        normalisation=_normalisation(settings.get("normalize_activations")),
        site=site,
        layer=layer,
        model=str(_metadata(settings).get("model_name") or ""),
        of_module=_metadata(settings).get(OF_MODULE) is True,
        **own,
    )


def place_of(settings: Mapping[str, Any]) -> tuple[Any, int | None]:
    """The site and layer that `hook_name` says; (resid, None) without one.

    The stream that enters block i is that after block i - 1.

    Raises:
        ValueError: a hook point that is none of those.
    """
    about = _metadata(settings)
    name = about.get("hook_name", about.get("hook_point"))
    if not name:
        return "resid", None
    point = re.fullmatch(r"blocks\.(\d{1,4})\.(hook_\w+)", str(name))
    sites = {hook: site for site, hook in POINTS.items()}
    if point is not None and point[2] in sites:
        return sites[point[2]], int(point[1])
    if point is not None and point[2] == "hook_resid_pre" and int(point[1]) > 0:
        return "resid", int(point[1]) - 1
    raise ValueError(
        f"cfg.json: hook_name is {shown(name)}; read are blocks.LAYER. followed by {', '.join(sites)}, or by "
        "hook_resid_pre from the second layer on"
    )


def settings_of(sae: SparseAutoencoder) -> dict[str, Any]:
    """`cfg.json` of an autoencoder.

    Raises:
        ValueError: what SAELens does not have: "groupmax", and `rescaled` of others than "topk".
    """
    if sae.activation == "groupmax":
        raise ValueError(f"{sae}: SAELens has no groupmax; keep the file that it was read from")
    if sae.rescaled and sae.activation != "topk":
        raise ValueError(f"{sae}: SAELens rescales topk alone, so that a file would not say it; keep the weights")
    hook = {} if sae.layer is None else {"hook_name": f"blocks.{sae.layer}.{POINTS[sae.site]}"}
    found = {
        "architecture": {"relu": "standard"}.get(sae.activation, sae.activation),
        "d_in": sae.d_model,
        "d_sae": sae.features,
        "dtype": str(sae.encoder_weight.dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": sae.subtracts_bias,
        "normalize_activations": sae.normalisation,
        "reshape_activations": "none",
        "metadata": {
            "sae_lens_version": "6.0.0",
            "model_name": sae.model,
            **hook,
            **({OF_MODULE: True} if sae.of_module else {}),
        },
    }
    return found | ({"k": sae.k, "rescale_acts_by_decoder_norm": sae.rescaled} if sae.k else {})


def weights_of(sae: SparseAutoencoder) -> dict[str, Tensor]:
    """The tensors of an autoencoder by SAELens's names."""
    own = {"threshold": sae.threshold, "b_gate": sae.gate_bias, "r_mag": sae.gate_scale}
    found = {"W_enc": sae.encoder_weight, "W_dec": sae.decoder_weight, "b_dec": sae.decoder_bias}
    found["b_mag" if sae.activation == "gated" else "b_enc"] = sae.encoder_bias
    return found | {name: value for name, value in own.items() if value is not None}


def _metadata(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the model and the hook point are: `metadata` since SAELens 6, before it the settings themselves."""
    inner = settings.get("metadata")
    return {**settings, **inner} if isinstance(inner, dict) else settings


def _object(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A setting that holds others; none where it is missing."""
    value = settings.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"cfg.json: {name} is {shown(value)}; it must be an object of settings")
    return value


def _flag(settings: Mapping[str, Any], name: str, *, usual: bool) -> bool:
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"cfg.json: {name} is {shown(value)}; it must be true or false")
    return usual if value is None else value


def size_in(settings: Mapping[str, Any], name: str) -> int:
    """A size of `cfg.json`.

    Raises:
        ValueError: it is none.
    """
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31:
        raise ValueError(f"cfg.json: {name} is {shown(value)}; it must be a whole number from 1 to {2**31}")
    return value


def _normalisation(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        value = "expected_average_only_in" if value else "none"
    if value == "expected_average_only_in":
        raise ValueError(
            "cfg.json: normalize_activations is 'expected_average_only_in', whose factor is not in the files; fold "
            "it into the weights first (SAELens: fold_activation_norm_scaling_factor, then save_model)"
        )
    if value not in ("none", "constant_norm_rescale", "layer_norm"):
        raise ValueError(
            f"cfg.json: normalize_activations is {shown(value)}; read are none, constant_norm_rescale, layer_norm"
        )
    return value
