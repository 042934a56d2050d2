"""The text network of a checkpoint of several parts (text beside images or sound): its config and its tensors."""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dlm_lens.adapters.config_fields import ACTED_ON, PER_LAYER, REFUSALS, RENAMED, UNUSED, check_fields
from dlm_lens.adapters.registry import families
from dlm_lens.printable import one_line

SAME_FOR_TEXT: Mapping[str, Mapping[str, Any]] = {
    "glm4v_moe_text": {"model_type": "glm4_moe"},
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
}
"""Text networks without a causal LM of their own -> config values of one that computes the same without images.

Their rotary positions have three coordinates, which are equal for text, and their further inputs come from images.
"""

COORDINATES = ("mrope_section", "mrope_interleaved")
"""Settings of rotary positions that say which pairs of a head's features turn with which coordinate."""

INHERITED = ("dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that count for the text network too where its own part of the config does not have them."""

MOST_NETWORKS = 100
"""Networks of a checkpoint among which the text's is chosen, by the names of all tensors for each."""

TIED = "tie_word_embeddings"

_OF_THE_CLASS = (
    frozenset(dir(PreTrainedConfig)) - {field.name for field in fields(PreTrainedConfig)} - RENAMED - {PER_LAYER}
)
"""Methods and other attributes of every config, which a file could only replace."""


def text_values(values: Mapping[str, Any], what: str) -> dict[str, Any] | None:
    """The config values of the text network of a checkpoint of several parts; None for one of text alone.

    Args:
        values: of config.json, with its `model_type`.
        what: the file's name in a message.

    Raises:
        ValueError: transformers has no causal LM of the text network, or fields of the wrong kind.
    """
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING or any(model_type in family.layouts for family in families()):
        return None
    kind = CONFIG_MAPPING[model_type]
    if "text_config" not in kind.sub_configs:
        return None
    given = _network_values({name: value for name, value in values.items() if name != "model_type"})
    if "torch_dtype" in given:
        given.setdefault("dtype", given.pop("torch_dtype"))
    shared = {name: given[name] for name in INHERITED if given.get(name) is not None}
    check_fields(shared | {TIED: given.get(TIED)}, what)
    try:
        whole = kind.from_dict(given)
        text = whole.get_text_config(decoder=True)
        found = text.to_dict()
    except REFUSALS as error:
        raise ValueError(f"{what} does not fit {kind.__name__}: {one_line(error)}") from error
    own = {name for name, value in (given.get("text_config") or {}).items() if value is not None}
    # The head belongs to the whole model, whatever the text's own part says.
    tied = getattr(whole, TIED, None)
    found |= {name: value for name, value in shared.items() if name not in own}
    found |= {} if tied is None else {TIED: tied}
    if text.model_type in SAME_FOR_TEXT:
        rotary = {name: value for name, value in found["rope_parameters"].items() if name not in COORDINATES}
        found |= {**SAME_FOR_TEXT[text.model_type], "rope_parameters": rotary}
    if found["model_type"] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"{what} is of a {model_type}, of which text is one part of several, and transformers has no causal LM "
            f"of that part ({text.model_type}): load it with transformers, then call "
            "dlm_lens.add_hook_points(model)"
        )
    return found


def _network_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Config values of all parts without fields that choose what transformers runs, or that no network needs."""
    return {
        name: _network_values(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in ACTED_ON | UNUSED | _OF_THE_CLASS and not name.startswith("_")
    }


def text_class(
    source: str, model_class: type[PreTrainedModel], config: Any, names: Iterable[str]
) -> tuple[type[PreTrainedModel], dict[str, str]]:
    """The class of the text network that leaves the tensors of other parts out, and what renames its own.

    The text network's tensors are those that begin like its embedding; its head's may lie elsewhere.

    Args:
        source: name of the weights in messages.
        model_class: of a text network alone.
        config: of it.
        names: of the checkpoint's tensors.

    Returns:
        A subclass that `from_pretrained` can be called on, and pattern -> replacement, its `key_mapping`.

    Raises:
        ValueError: no tensor, or too many, can be the text network's embedding, or its network cannot be built.
    """
    try:
        with torch.device("meta"):
            network: Any = model_class(copy.deepcopy(config))
    except REFUSALS as error:
        raise ValueError(f"the text network of {source} cannot be built: {one_line(error)}") from error
    stem, own, stored = f"{network.base_model_prefix}.", set(network.state_dict()), list(names)
    embedding, head = (_weight_name(network, part) for part in ("input", "output"))
    inner = embedding.removeprefix(stem)
    prefixes = {name.removesuffix(inner) for name in stored if name == inner or name.endswith(f".{inner}")}
    if not prefixes:
        raise ValueError(
            f"none of the tensors in {source} is called {inner}, so that there is no text network among them: "
            "fetch the files again, or check that config.json is of the same model"
        )
    if len(prefixes) > MOST_NETWORKS:
        raise ValueError(
            f"{len(prefixes)} of the tensors in {source} are called {inner}; a checkpoint has at most "
            f"{MOST_NETWORKS} networks with an embedding: fetch the files again"
        )

    def fitting(prefix: str) -> int:
        return sum(stem + name.removeprefix(prefix) in own for name in stored if name.startswith(prefix))

    # An encoder of speech may have an embedding of that name too.
    prefix = max(sorted(prefixes), key=fitting)
    renames = {f"^{re.escape(prefix)}": stem} if prefix != stem else {}
    heads = [name for name in stored if name.endswith(f".{head}")]
    if heads:
        renames[f"^{re.escape(min(heads, key=len))}$"] = head
    parts = {name.removeprefix(stem).split(".")[0] for name in own}
    ours = f"(?:{re.escape(stem)})?(?:{'|'.join(map(re.escape, sorted(parts)))})"
    others = {"_keys_to_ignore_on_load_unexpected": [rf"^(?!{ours}\.)"], "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), others), renames


def restore_class(model: Any, model_class: type[PreTrainedModel]) -> None:
    """Make a model that was read as a class of `text_class` one of its own class, as which it is saved."""
    model.__class__, model._weight_conversions = model_class, None


def _weight_name(network: Any, end: str) -> str:
    """The name of the weight of a network's input or output embedding."""
    weight = getattr(network, f"get_{end}_embeddings")().weight
    return next(name for name, one in network.named_parameters(remove_duplicate=False) if one is weight)
