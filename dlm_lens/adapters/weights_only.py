"""Checkpoints without transformers' config.json: recognised by their tensors, and given a config."""

from pathlib import Path
from typing import Any

from dlm_lens.adapters.config_fields import built_config, network_fields
from dlm_lens.adapters.hub import file_within
from dlm_lens.adapters.registry import Shapes, WeightsOnly, families, family_of
from dlm_lens.adapters.weight_headers import read_header
from dlm_lens.files.json_objects import read_object
from dlm_lens.printable import printable_name


def single_weight_file(path: Path) -> Path | None:
    """The weights that a file or a directory without transformers' config.json holds.

    Raises:
        ValueError: the file is no safetensors file, or the directory holds several, or an adapter of PEFT.
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
    if file_within(path, "adapter_config.json") is not None:
        raise ValueError(
            f"{path} holds adapter_config.json, an adapter of PEFT: give its base model and adapter={str(path)!r}"
        )
    found = [file for name in sorted(path.glob("*.safetensors")) if (file := file_within(path, name.name))]
    if len(found) > 1:
        raise ValueError(
            f"{path} holds {len(found)} weight files and no config.json that names a model_type; give the path of "
            f"one, such as {found[0]}"
        )
    return found[0] if found else None


def config_of_weights(weights: Path, size: str | None) -> dict[str, Any]:
    """Config values, `model_type` included, for weights alone: from `size`, or from a JSON file beside them.

    The JSON file is the one of the same name, or config.json; it holds the fields of the authors' own config.

    Raises:
        ValueError: no family knows the tensors, or a config.json beside them tells it; or neither `size` nor a JSON
            file gives the model's dimensions.
    """
    shapes = _shapes(weights)
    formats = [family.weights_only for family in families() if family.weights_only is not None]
    layout = next((each for each in formats if each.recognise(shapes)), None)
    if layout is None:
        beside = weights.parent / "config.json"
        if beside.is_file() and "model_type" in read_object(beside, str(beside)):
            raise ValueError(
                f"{weights} is a file of a checkpoint with a config.json; give its directory, {weights.parent}"
            )
        names = ", ".join(each.model_type for each in formats)
        first = printable_name(next(iter(shapes), "none"))
        raise ValueError(
            f"{weights} has no config.json with a model_type, and its tensors ({first}, ...) "
            f"are not those of a family that is read without one ({names}): put the config.json that came with the "
            "weights beside them"
        )
    config_class, _ = family_of(layout.model_type).layouts[layout.model_type]
    values = network_fields(_values(layout, weights, size), config_class)
    built_config(config_class, values, f"the description of {weights}")
    return {**layout.complete(values, shapes), "model_type": layout.model_type}


def _values(layout: WeightsOnly, weights: Path, size: str | None) -> dict[str, Any]:
    if size is not None:
        if size not in layout.sizes:
            raise ValueError(f"size {size!r} is none of {layout.model_type}'s: {', '.join(layout.sizes)}")
        return dict(layout.sizes[size])
    for described in (weights.with_suffix(".json"), weights.parent / "config.json"):
        if described.is_file():
            return read_object(described, str(described))
    raise ValueError(
        f"{weights} does not give the dimensions of its model; pass size= ({', '.join(layout.sizes)}) to "
        f"dlm_lens.load, or write the fields of its config to {weights.with_suffix('.json').name} beside it"
    )


def _shapes(weights: Path) -> Shapes:
    return {name: entry.shape for name, entry in read_header(weights).items()}
