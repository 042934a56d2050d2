"""The weights of a checkpoint into a model: what must be refused before they are read, and how they are read."""

import atexit
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import is_peft_available

from dlm_lens.adapters.config_fields import check_fields
from dlm_lens.adapters.hub import needed_file, optional_file
from dlm_lens.adapters.memory import INDEX, WEIGHTS, check_memory, weight_files
from dlm_lens.adapters.weight_headers import MISFITS, described
from dlm_lens.files.json_objects import read_object
from dlm_lens.printable import one_line, printable_name, shown

SAMPLER_CONFIGS = ("EntropyBoundSamplerConfig",)
"""Classes of transformers that a generation_config.json may name for its sampler."""

_PART = re.compile(r"-\d+-of-\d+\.")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def check_weights(
    source: str,
    config: Any,
    dtype: torch.dtype | None,
    device_map: Any,
    own: Any,
    width: float | None,
    options: Any,
) -> None:
    """Raise unless the weights exist, are not pickled, and fit into memory."""
    if not Path(source).is_file() and not any(optional_file(source, name, options) for name in (INDEX, WEIGHTS)):
        raise ValueError(_why_no_weights(source))
    _refuse_other_weights(source, options)
    stored = getattr(config, "dtype", None)
    stored = stored if isinstance(stored, torch.dtype) else None
    # Quantised files are kept as they are; the dtype in their config is that of their activations.
    kept = None if own else dtype or stored
    check_memory(source, kept, device_map, options=options, stored=None if own else stored, element_size=width)


def _why_no_weights(source: str) -> str:
    """What a checkpoint without model.safetensors and its index holds in their place, and the remedy."""
    pickled = (
        "pickled weights are refused because loading them executes code: convert them to safetensors first, or "
        "take the checkpoint's safetensors files"
    )
    if not Path(source).is_dir():
        return f"{source} has, in the cache or on the hub as far as it can be reached, no {WEIGHTS}; {pickled}"
    names = sorted(path.name for path in Path(source).iterdir())
    found = [name for name in names if name.endswith(".safetensors")]
    if any(_PART.search(name) for name in found):
        return f"{source} holds {printable_name(found[0])} and no {INDEX}, which lists the parts: fetch it too"
    if found:
        return f"{source} holds {printable_name(found[0])} and no {WEIGHTS}: rename the file that has the weights"
    if any(name.endswith(_PICKLED) for name in names):
        return f"{source} holds no {WEIGHTS}; {pickled}"
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return (
            f"{source} holds {printable_name(ggufs[0])} and no {WEIGHTS}, and GGUF files are not read: take the "
            "checkpoint's safetensors files"
        )
    return f"{source} holds no {WEIGHTS}, nor other weights: fetch it too"


def _refuse_other_weights(source: str, options: dict[str, Any]) -> None:
    """Refuse files beside the weights that transformers would read with them, or in their place.

    Raises:
        ValueError: an adapter of PEFT, or the shards of a distributed checkpoint.
    """
    local = Path(source).is_dir()
    if (local or is_peft_available()) and optional_file(source, "adapter_config.json", options) is not None:
        raise ValueError(
            f"{source} holds adapter_config.json, an adapter of PEFT: give its base model and adapter={source!r}, "
            "or remove the file for the weights alone"
        )
    shards = sorted(path.name for path in Path(source).iterdir() if _SHARD.match(path.name)) if local else []
    if shards:
        raise ValueError(
            f"{source} holds {printable_name(shards[0])}, a part of a distributed checkpoint, which transformers "
            f"would read in place of {WEIGHTS}: save the model with save_pretrained, or remove the parts"
        )


def fetched_files(source: str, options: dict[str, Any]) -> list[Path]:
    """The weight files, downloaded where they are not here yet.

    Raises:
        FileNotFoundError: one of them cannot be had.
        ValueError: as `weight_files`.
    """
    files = weight_files(source, options)
    if isinstance(files, int) or not files:
        index = read_object(needed_file(source, INDEX, options), f"the {INDEX} of {source}")
        for name in sorted(set(index["weight_map"].values())):
            needed_file(source, name, options)
        files = weight_files(source, options)
    return files if isinstance(files, list) else []


def load_weights(model_class: type[PreTrainedModel], source: str, **options: Any) -> PreTrainedModel:
    """The model of a class with the weights of a checkpoint.

    Args:
        model_class: to build.
        source: directory, file or hub name of the weights.
        options: of transformers' `from_pretrained`, among them `config` and `device_map`.

    Raises:
        ValueError: names or shapes of the weights do not fit the class, or a damaged generation_config.json.
    """
    revision = {name: value for name, value in options.items() if name == "revision"}
    # Given, so that transformers reads no further file to learn how to generate.
    kind = getattr(model_class, "generation_config_class", None) or GenerationConfig
    options["generation_config"] = _generation_config(kind, source, options["config"], revision)
    if _may_offload(options["device_map"]):
        options["offload_folder"] = tempfile.mkdtemp(dir=_offload_root())
    # Sizes that do not match are reported like the rest, by name, instead of by an error that names nothing.
    model, report = model_class.from_pretrained(
        source, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    for misfit, remedy in MISFITS.items():
        names = sorted(described(key) for key in report.get(misfit) or ())
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(
                f"the weights in {source} do not fit {model_class.__name__}: {misfit.replace('_', ' ')} "
                f"{', '.join(names[:5])}{more}; {remedy}"
            )
    return model


def _generation_config(kind: Any, source: str, config: Any, options: dict[str, Any]) -> Any:
    """How transformers' own `generate` decodes the model: from generation_config.json, or from the config.

    Args:
        kind: the class that the model has for it.
        source: of the weights.
        config: of the model.
        options: `revision`, if any.

    Raises:
        ValueError: the file is damaged.
    """
    found = None if Path(source).is_file() else optional_file(source, "generation_config.json", options)
    if found is None:
        return GenerationConfig.from_model_config(config) if kind is GenerationConfig else kind()
    what = f"the generation_config.json of {source}"
    values = {name: value for name, value in read_object(found, what).items() if name in vars(kind())}
    check_fields({"eos_token_id": values.get("eos_token_id")}, what)
    values |= _possible_ends(values.get("eos_token_id"), config, what)
    sampler = values.get("sampler_config")
    if isinstance(sampler, dict) and sampler.get("_cls_name") not in SAMPLER_CONFIGS:
        raise ValueError(
            f"{what} says sampler_config = {shown(sampler)}; its _cls_name must be {', '.join(SAMPLER_CONFIGS)}: "
            "take the file that came with the weights"
        )
    try:
        return kind.from_dict(values)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{what} cannot be read ({one_line(error)}); fetch it again, or remove it") from error


def _possible_ends(ends: int | list[int] | None, config: Any, what: str) -> dict[str, Any]:
    """The ids among these that end a text of the model: those that have a row in its embedding.

    Raises:
        ValueError: none of them has, so that no text could end.
    """
    rows = getattr(config, "embedding_rows", config.vocab_size)
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    kept = [end for end in listed if 0 <= end < rows]
    beyond = [end for end in listed if end >= rows]
    if beyond and not kept:
        raise ValueError(
            f"{what} says eos_token_id = {shown(ends)}, which has no row in an embedding of {rows}: take the file "
            "that came with the weights"
        )
    return {"eos_token_id": (kept or None) if isinstance(ends, list) else next(iter(kept), None)}


def _may_offload(device_map: Any) -> bool:
    places = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    return bool(places & {"disk", "auto", "balanced", "balanced_low_0", "sequential"})


@cache
def _offload_root() -> str:
    """The folder of offloaded weights whose form in the files differs from the model's (SMDM splits them).

    A folder of this process, removed when it ends: a model that shares weights may read it
    after the first is deleted.
    """
    root = tempfile.mkdtemp(prefix="dlm-lens-offloaded-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
