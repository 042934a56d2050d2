"""Checkpoints that are weights alone: found, recognised by their tensors, and given a config."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dlm_lens.adapters.registry import BareWeights, Shapes, families


def bare_file(path: Path) -> Path | None:
    """The weights that a file or a directory without transformers' config.json holds.

    Raises:
        ValueError: the file is no safetensors file, or the directory holds several.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(
                f"{path} is no safetensors file; pickled weights are refused because loading them executes code: "
                "convert them to safetensors first"
            )
        return path
    if (path / "model.safetensors").is_file():
        return path / "model.safetensors"
    found = sorted(path.glob("*.safetensors"))
    if len(found) > 1:
        raise ValueError(
            f"{path} holds {len(found)} weight files and no config.json that names a model_type; give the path of "
            f"one, such as {found[0]}"
        )
    return found[0] if found else None


def bare_config(weights: Path, size: str | None) -> dict[str, Any]:
    """Config values, `model_type` included, for weights alone: from `size`, or from a JSON file beside them.

    The JSON file is the one of the same name, or config.json; it holds the fields of the authors' own config.

    Raises:
        ValueError: no family knows the tensors, or nothing (or something else) says how large the model is.
    """
    shapes = _shapes(weights)
    formats = [family.bare for family in families() if family.bare is not None]
    known = next((bare for bare in formats if bare.recognise(shapes)), None)
    if known is None:
        names = ", ".join(bare.model_type for bare in formats)
        raise ValueError(
            f"{weights} has no config.json with a model_type, and its tensors ({next(iter(shapes), 'none')}, ...) "
            f"are not those of a family that is read without one ({names})"
        )
    return {**known.complete(_values(known, weights, size), shapes), "model_type": known.model_type}


def _values(known: BareWeights, weights: Path, size: str | None) -> dict[str, Any]:
    if size is not None:
        if size not in known.sizes:
            raise ValueError(f"size {size!r} is none of {known.model_type}'s: {', '.join(known.sizes)}")
        return dict(known.sizes[size])
    for described in (weights.with_suffix(".json"), weights.parent / "config.json"):
        if described.is_file():
            return _read(described)
    raise ValueError(
        f"{weights} does not say how large its model is; pass size= ({', '.join(known.sizes)}) to dlm_lens.load, "
        f"or write the fields of its config to {weights.with_suffix('.json').name} beside it"
    )


def _read(described: Path) -> dict[str, Any]:
    try:
        values = json.loads(described.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{described} is no JSON file: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{described} holds {values!r:.40}; it must hold an object with the fields of a config")
    return values


def _shapes(weights: Path) -> Shapes:
    try:
        with safe_open(str(weights), framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{weights} is no readable safetensors file: {error}") from error
