"""`load`: a checkpoint as a ready model, without executing anything that came with it."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from dlm_lens.adapters import smollm2
from dlm_lens.adapters.config_fields import built_config
from dlm_lens.adapters.hub import config_values, needed_file, optional_file
from dlm_lens.adapters.lora import LoraAdapter
from dlm_lens.adapters.memory import weight_files
from dlm_lens.adapters.model_names import check_model_name, embedded_models, embedded_path
from dlm_lens.adapters.model_preparation import check_model, finish_model, known_values, prepare_config
from dlm_lens.adapters.parameter_names import expected_parameters
from dlm_lens.adapters.quantisation import check_quantisation, check_quantised, floating_dtype
from dlm_lens.adapters.registry import Family, families, family_of, model_type_of
from dlm_lens.adapters.text_part import restore_class, text_class, text_values
from dlm_lens.adapters.tokenizer_files import load_tokenizer
from dlm_lens.adapters.weight_headers import check_shapes, read_headers
from dlm_lens.adapters.weight_loading import check_weights, fetched_files, load_weights
from dlm_lens.adapters.weights_only import config_of_weights, single_weight_file
from dlm_lens.arguments import checked_arguments, flag, instance, whole
from dlm_lens.files.paths import user_path
from dlm_lens.printable import shown

_LOADING = threading.RLock()
"""Held while a model is built and checked: transformers sets torch's default dtype, which all threads share."""


@checked_arguments(
    attn_implementation=instance(str, 'the name of an attention function, such as "sdpa"'),
    revision=instance(str, "a branch, tag or commit, or None"),
    size=instance(str, "a size's name, or None"),
    family=instance(str, "the name of one of dlm_lens.families(), or None"),
    check=flag(),
    **dict.fromkeys(("mask_token_id", "eos_token_id", "eot_token_id"), whole(least=0)),
)
def load(
    path_or_hub_name: str | Path,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    attn_implementation: str = "sdpa",
    revision: str | None = None,
    *,
    quantization_config: Any = None,
    size: str | None = None,
    mask_token_id: int | None = None,
    eos_token_id: int | None = None,
    eot_token_id: int | None = None,
    sampler: str | None = None,
    family: str | None = None,
    adapter: str | Path | None = None,
    check: bool = True,
) -> PreTrainedModel:
    """Load a masked DLM or an AR baseline (a causal LM of transformers), ready to denoise, in eval mode.

    Of a checkpoint of several parts (text beside images or sound) the text network is loaded, as an AR baseline.

    The result is an ordinary transformers model with hook points in its attention, `model.tokenizer` (None
    where the files hold none) and `model.sampler_defaults`. Native code only: the checkpoint's own Python is
    never executed, whatever its `auto_map` says, and pickled weights are refused.

    Args:
        path_or_hub_name: an embedded model ("toy", "toy-ar", ...; a directory of that name is "./toy"), a
            directory, or a hub name; for weights without a config a safetensors file, local or on
            the hub ("nieshen/SMDM/mdm_safetensors/mdm-....safetensors").
        dtype: "bfloat16", torch.float32, ...; None for the checkpoint's own. In float64, also of a
            model that is cast later, experts are computed one after the other.
        device_map: as in transformers: "cuda", "auto", a mapping from modules to devices.
        attn_implementation: "sdpa" (patterns are computed only while a hook, a reader or a trace needs them),
            "hooked" (always), or any other of transformers'.
        revision: branch, tag or commit on the hub.
        quantization_config: of transformers, for 8 or 4 bits (BitsAndBytesConfig, TorchAoConfig, ...).
        size: of weights that came without a config ("1028M", an SMDM's); otherwise a JSON file beside them
            describes it, of the weights' name or called config.json.
        mask_token_id: id of [MASK], where config.json has none or a wrong one.
        eos_token_id: likewise for the end of the text.
        eot_token_id: likewise for the end of a turn.
        sampler: the sampling algorithm of the family, where config.json names none or a wrong one ("dllm_blocks"
            for block diffusion checkpoints of A2D-Qwen3); released ones are known by their hub names.
        family: name of the checkpoint's family, where its config.json is that of the AR model that it was made from
            ("diffugpt" for DiffuLLaMA in a directory, "a2d_qwen3" for a masked model of your own with the layers of
            Llama, Qwen2 or Qwen3); released ones are known by their hub names.
        adapter: directory or hub name of a LoRA adapter of PEFT, which is merged into the weights.
        check: run a few tokens and check that hook points change nothing and show what attention does
            (`dlm_lens.attention.check_hook_points`), and that the logits are the
            output embedding of the decoder's states.

    Raises:
        FileNotFoundError: nothing loadable under that name, or the hub cannot be reached.
        ImportError: the package of a quantisation is not installed.
        MemoryError: the weights are larger than the free memory.
        ValueError: unknown family, attention that cannot be hooked exactly, weights that do not fit or are damaged,
            pickled weights, a dtype or a quantisation that cannot be, or no valid mask token id.
    """
    options = {"revision": revision} if revision else {}
    kept = floating_dtype(dtype)
    source = _resolve(path_or_hub_name, options)
    values, weights, what = _describe(source, size, options)
    values["model_type"] = model_type_of(values, source, family, _tensors(values, weights, family, options))
    values = values if (text := text_values(values, what)) is None else text
    owner = family_of(values["model_type"])
    model_class = owner.layouts[values["model_type"]][1]
    given = {"mask_token_id": mask_token_id, "eos_token_id": eos_token_id, "eot_token_id": eot_token_id}
    values |= known_values(owner, str(path_or_hub_name), values, given | {"sampler": sampler})
    config, tokenizer = _config_and_tokenizer(owner, values, source, what, options, path_or_hub_name)
    quantised = {} if quantization_config is None else {"quantization_config": quantization_config}
    own = values.get("quantization_config")
    width = check_quantisation(str(source), owner, config.model_type, own, quantization_config, device_map)
    check_weights(weights, config, kept, device_map, own, width, options)
    lora = None if adapter is None else LoraAdapter.read(adapter, quantised=bool(quantised or own))
    headers = read_headers(fetched_files(weights, options))
    with _LOADING:
        read_as, renames = (model_class, {}) if text is None else text_class(weights, model_class, config, headers)
        check_shapes(weights, what, headers, owner, read_as, config, values, renames, packed=own is not None)
        if lora is not None:
            lora.check(names := expected_parameters(read_as, config, what, owner, renames), owner)
        model = load_weights(
            read_as,
            weights,
            key_mapping=renames,
            config=config,
            dtype="auto" if kept is None else kept,
            device_map=device_map,
            attn_implementation=_supported(attn_implementation, model_class),
            **quantised,
            **options,
        )
        if text is not None:
            restore_class(model, model_class)
        if lora is not None:
            lora.merge_into(model, names, owner)
        finish_model(model, owner, tokenizer, eos_token_id)
        if quantised or own:
            check_quantised(model, source)
        if check:
            check_model(model)
        return model


def _supported(attn_implementation: str, model_class: Any) -> str:
    """The requested implementation, or "eager" for a class that the fused kernel does not fit (a soft cap)."""
    fused = bool(getattr(model_class, "_supports_sdpa", True))
    return "eager" if attn_implementation == "sdpa" and not fused else attn_implementation


def _resolve(name: str | Path, options: dict[str, Any]) -> str:
    check_model_name(name)
    if str(name) in embedded_models():
        return embedded_path(name)
    if str(name) == smollm2.NAME:
        return str(smollm2.smollm2_directory())
    path = user_path(name)
    if not path.exists() and path.suffix == ".safetensors" and len(path.parts) > 2:
        return needed_file("/".join(path.parts[:2]), "/".join(path.parts[2:]), options)
    return str(path) if str(name).startswith("~") else str(name)


def _config_and_tokenizer(
    family: Family, values: dict[str, Any], source: str, what: str, options: dict[str, Any], given: str | Path
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """The config of these values with its special ids, and the tokenizer; `given` is what `load` was given."""
    config = built_config(family.layouts[values["model_type"]][0], values, what)
    tokenizer = _tokenizer(source, options, config, family, fetch=not user_path(given).exists())
    prepare_config(config, family, tokenizer)
    return config, tokenizer


def _tokenizer(
    source: str, options: dict[str, Any], config: Any, family: Family, *, fetch: bool
) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the weights, or the family's where its checkpoints come without one.

    That one is taken from the cache alone unless `fetch`: of a local checkpoint nothing else needs a network.
    """
    place = str(Path(source).parent) if Path(source).is_file() else source
    tokenizer = load_tokenizer(place, options, config, family.tokenizer_classes)
    if tokenizer is None and config.vocab_size in family.tokenizers:
        name, model_type = family.tokenizers[config.vocab_size]
        tokenizer = load_tokenizer(name, {}, CONFIG_MAPPING[model_type](), fetch=fetch)
    return tokenizer


def _describe(source: str, size: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """The config's values, the path of the weights, and the name of the values' source in messages.

    Of a transformers checkpoint or of weights alone.
    """
    path = Path(source)
    alone = path.is_file() or (path.is_dir() and not (path / "config.json").is_file())
    values = {} if alone else config_values(source, options)
    if "model_type" in values:
        if size is not None:
            raise ValueError(f"size is for weights without a config; {source} has one: leave size out")
        kind = values["model_type"]
        if not isinstance(kind, str) or not kind:
            raise ValueError(
                f"the config.json of {source} says model_type = {shown(kind)}; it must be the name of an "
                'architecture, such as "llama": take the file that came with the weights'
            )
        return values, source, f"the config.json of {source}"
    held = optional_file(source, "model.safetensors", options) if not path.exists() else None
    weights = single_weight_file(path) if path.exists() else held and Path(held)
    if not weights:
        raise ValueError(
            f"the config.json of {source} names no model_type, and there are no safetensors weights to tell it "
            "from; give a checkpoint's directory, or add the model_type"
        )
    return config_of_weights(weights, size), str(weights), f"the description of {weights}"


def _tensors(values: Mapping[str, Any], source: str, family: str | None, options: dict[str, Any]) -> list[str]:
    """Names of a directory's tensors, where they tell a checkpoint from the AR model whose config.json it has."""
    own = str(values["model_type"])
    adapted = any(own in each.adapted and each.adapted_tensors for each in families())
    if family is not None or not adapted or not Path(source).is_dir():
        return []
    try:
        files = weight_files(source, options)
        return list(read_headers(files)) if isinstance(files, list) else []
    except (ValueError, OSError):  # the checks of the weights tell what is wrong
        return []
