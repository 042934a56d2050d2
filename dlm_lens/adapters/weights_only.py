"""Checkpoints without transformers' config.json: recognised by their tensors, and given a config."""

from pathlib import Path
from typing import Any

from dlm_lens.adapters.config_fields import built_config, network_fields
from dlm_lens.adapters.hub import file_within
from dlm_lens.adapters.registry import BareWeights, Shapes, families, family_of
from dlm_lens.adapters.weight_headers import read_header
from dlm_lens.files.json_objects import read_object
from dlm_lens.printable import printable_name


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
    if (held := file_within(path, "model.safetensors")) is not None:
        return held
    found = [file for name in sorted(path.glob("*.safetensors")) if (file := file_within(path, name.name))]
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
        ValueError: no family knows the tensors, or neither `size` nor a JSON file gives the model's dimensions.
    """
    shapes = _shapes(weights)
    formats = [family.bare for family in families() if family.bare is not None]
    known = next((bare for bare in formats if bare.recognise(shapes)), None)
    if known is None:
        names = ", ".join(bare.model_type for bare in formats)
        first = printable_name(next(iter(shapes), "none"))
        raise ValueError(
            f"{weights} has no config.json with a model_type, and its tensors ({first}, ...) "
            f"are not those of a family that is read without one ({names})"
        )
    config_class, _ = family_of(known.model_type).layouts[known.model_type]
    values = network_fields(_values(known, weights, size), config_class)
    built_config(config_class, values, f"the description of {weights}")
    return {**known.complete(values, shapes), "model_type": known.model_type}


def _values(known: BareWeights, weights: Path, size: str | None) -> dict[str, Any]:
    if size is not None:
        if size not in known.sizes:
            raise ValueError(f"size {size!r} is none of {known.model_type}'s: {', '.join(known.sizes)}")
        return dict(known.sizes[size])
    for described in (weights.with_suffix(".json"), weights.parent / "config.json"):
        if described.is_file():
            return read_object(described, str(described))
    raise ValueError(
        f"{weights} does not give the dimensions of its model; pass size= ({', '.join(known.sizes)}) to "
        f"dlm_lens.load, or write the fields of its config to {weights.with_suffix('.json').name} beside it"
    )


def _shapes(weights: Path) -> Shapes:
    return {name: entry.shape for name, entry in read_header(weights).items()}
