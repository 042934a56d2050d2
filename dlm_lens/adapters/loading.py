"""`load`: a checkpoint as a ready model, without executing anything that came with it."""

import atexit
import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_peft_available

from dlm_lens.adapters import smollm2
from dlm_lens.adapters.config_fields import REFUSALS, built_config, check_fields
from dlm_lens.adapters.head import check_head, decoder_logits
from dlm_lens.adapters.hub import config_values, needed_file, optional_file
from dlm_lens.adapters.lora import LoraAdapter
from dlm_lens.adapters.memory import INDEX, WEIGHTS, check_memory, weight_files
from dlm_lens.adapters.model_names import check_model_name, embedded_models, embedded_path
from dlm_lens.adapters.parameter_names import expected_parameters
from dlm_lens.adapters.quantisation import check_quantisation, check_quantised, floating_dtype
from dlm_lens.adapters.registry import Family, families, family_of, model_type_of
from dlm_lens.adapters.text_part import text_class, text_values
from dlm_lens.adapters.tokenizer_files import load_tokenizer
from dlm_lens.adapters.weight_headers import MISFITS, check_shapes, described, read_headers
from dlm_lens.adapters.weights_only import config_of_weights, single_weight_file
from dlm_lens.arguments import checked_arguments, flag, instance, whole
from dlm_lens.attention import add_hook_points, check_hook_points
from dlm_lens.files.json_objects import read_object
from dlm_lens.printable import one_line, printable_name, shown

SAMPLER_CONFIGS = ("EntropyBoundSamplerConfig",)
"""Classes of transformers that a generation_config.json may name for its sampler."""

_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")

_LOADING = threading.RLock()
"""Held while a model is built and checked: transformers sets torch's default dtype, which all threads share."""

logger = logging.getLogger(__name__)


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
        dtype: "bfloat16", torch.float32, ...; None for the checkpoint's own. In float64 experts are computed one
            after the other; a model that is cast later needs `model.set_experts_implementation("eager")` first.
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
            ("diffugpt" for DiffuLLaMA in a directory); released ones are known by their hub names.
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
    values, weights = _describe(source, size, options)
    values["model_type"] = model_type_of(values, source, family, _tensors(values, weights, family, options))
    what = f"the config.json of {source}" if source == weights else f"the description of {weights}"
    values = values if (text := text_values(values, what)) is None else text
    owner = family_of(values["model_type"])
    config_class, model_class = owner.layouts[values["model_type"]]
    given = {"mask_token_id": mask_token_id, "eos_token_id": eos_token_id, "eot_token_id": eot_token_id}
    values |= known_values(owner, str(path_or_hub_name), values, given | {"sampler": sampler})
    config = built_config(config_class, values, what)
    tokenizer = _tokenizer(source, options, config, owner)
    prepare_config(config, owner, tokenizer)
    quantised = {} if quantization_config is None else {"quantization_config": quantization_config}
    own = values.get("quantization_config")
    width = check_quantisation(str(source), owner, own, quantization_config, device_map)
    _check_weights(weights, config, kept, device_map, own, width, options)
    lora = None if adapter is None else LoraAdapter.read(adapter, quantised=bool(quantised or own))
    headers = read_headers(_fetched(weights, options))
    with _LOADING:
        read_as, renames = (model_class, {}) if text is None else text_class(weights, model_class, config, headers)
        check_shapes(weights, what, headers, owner, read_as, config, values, renames, packed=own is not None)
        if lora is not None:
            lora.check_names(names := expected_parameters(read_as, config, what, owner, renames), owner)
        model = _load_weights(
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
            extras: Any = model
            extras.__class__, extras._weight_conversions = model_class, None  # saved as a text network is
        if lora is not None:
            lora.merge_into(model, names, owner)
        if eos_token_id is not None:
            model.generation_config.eos_token_id = eos_token_id
        finish_model(model, owner, tokenizer)
        if quantised or own:
            check_quantised(model, source)
        if check:
            check_model(model)
        return model


def known_values(
    family: Family, name: str, values: Mapping[str, Any], given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The values of the config that the caller gave, or that are known by the checkpoint's name.

    Args:
        family: of the checkpoint.
        name: of the checkpoint.
        values: of its config.json.
        given: special ids and sampler of the caller; None, or nothing, for those that were not given.

    Raises:
        ValueError: a mask token for a family that has none.
    """
    if not family.has_mask_token and given.get("mask_token_id") is not None:
        raise ValueError(
            f"mask_token_id is {given['mask_token_id']}, and {family.name} has no mask token: its positions hold "
            "random tokens until they are decided; leave mask_token_id out"
        )
    requested = given.get("sampler")
    chosen = values.get("sampler") if requested is None else requested
    own = family.hub_samplers.get(name) or next(iter(family.samplers))
    known: dict[str, Any] = {}
    if chosen is None:
        known["sampler"] = family.hub_samplers.get(name)
    is_own = chosen is None or (isinstance(chosen, str) and chosen == own)
    if is_own and values.get("trained_block_length") is None:
        known["trained_block_length"] = family.hub_block_lengths.get(name)
    if isinstance(requested, str) and requested != (values.get("sampler") or own) and "sampler_defaults" in values:
        known["sampler_defaults"] = {}  # those of the checkpoint are settings of its own sampler
    return {name: value for name, value in {**given, **known}.items() if value is not None}


def check_model(model: Any) -> None:
    """Raise unless hook points and output embedding work as the library assumes, on a few tokens.

    A model of transformers must be causal too. Costs two forward passes for a model of our families, three for one
    of transformers.

    Raises:
        ValueError: they are not.
    """
    native = type(model).__module__.startswith("transformers.")
    try:
        _check_logits(model, native)
    except (ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except REFUSALS as error:
        raise ValueError(
            f"a few tokens do not pass through {type(model).__name__} ({one_line(error)}): check its config.json"
        ) from error


def _check_logits(model: Any, native: bool) -> None:
    """Check the hook points and the head of a model.

    Of a model of transformers (native) the plain attention function and causality too.
    """
    try:
        # Sampling's logits with idle hook points, compared with the model's own logits, with patterns and without.
        check_hook_points(model, plain=native, idle=decoder_logits(model, causal=native))
    except ValueError:
        # With a pass of its own for each check, to name the part that is at fault.
        check_head(model, check_hook_points(model, plain=native), causal=native)
        raise


def _supported(attn_implementation: str, model_class: Any) -> str:
    """The requested implementation, or "eager" for a class that the fused kernel does not fit (a soft cap)."""
    fused = bool(getattr(model_class, "_supports_sdpa", True))
    return "eager" if attn_implementation == "sdpa" and not fused else attn_implementation


def finish_model(model: PreTrainedModel, family: Family, tokenizer: Any = None) -> PreTrainedModel:
    """Finish a model: hook points, tokenizer, the sampler's settings, ends of the text, eval mode.

    The text of an AR model ends as in transformers' `generate`, with the ids of its generation config.
    """
    add_hook_points(model)
    extras: Any = model  # attributes that transformers' class does not declare
    extras.tokenizer = tokenizer
    generation = dict(getattr(model, "generation_settings", {}))
    if family.causal:
        generation["eos_token_id"] = getattr(model.generation_config, "eos_token_id", None)
    ends = generation.pop("eos_token_id", None)
    model.config.eos_token_id = model.config.eos_token_id if ends is None else ends
    own = getattr(model.config, "sampler_defaults", None) or {}
    extras.sampler_defaults = {**family.settings_of(model.config), **generation, **own}
    return model.eval()


def prepare_config(config: Any, family: Family, tokenizer: Any = None) -> None:
    """Fill in the special ids and check them; give the tokenizer mask and padding where the authors' code does.

    Raises:
        ValueError: an unknown sampler, a masked DLM without a mask token id, with one that has no embedding row, or
            with one that ends the text.
    """
    family.sampler_of(config)
    if family.causal:
        return
    if config.model_type in family.rows_of_tokenizer and tokenizer is not None:
        tokens = len(tokenizer)
        config.vocab_size = config.vocab_size if tokens <= config.vocab_size else tokens + tokens % 2
    for name, value in family.ids_of(config, tokenizer).items():
        if getattr(config, f"{name}_token_id", None) is None:
            setattr(config, f"{name}_token_id", value)
    if family.pad_token and getattr(tokenizer, "pad_token_id", 0) is None and len(tokenizer) == config.pad_token_id:
        tokenizer.add_special_tokens({"pad_token": family.pad_token})
    if not family.has_mask_token:
        config.mask_token_id = None
        return
    tokenizer_mask = getattr(tokenizer, "mask_token_id", None)
    if config.mask_token_id is None:
        raise ValueError(
            "neither config.json nor the tokenizer names a mask token; pass mask_token_id= to dlm_lens.load"
        )
    rows = getattr(config, "embedding_rows", config.vocab_size)
    if not 0 <= config.mask_token_id < rows:
        raise ValueError(
            f"mask_token_id {config.mask_token_id} has no row in an embedding of {rows}; "
            "pass the right mask_token_id= to dlm_lens.load"
        )
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.mask_token_id in ends:
        raise ValueError(
            f"mask_token_id and eos_token_id are both {config.mask_token_id}, so that a masked position "
            "could not be distinguished from the end of the text; pass the right mask_token_id= or eos_token_id= "
            "to dlm_lens.load"
        )
    if tokenizer_mask is None and family.mask_token and tokenizer is not None:
        if len(tokenizer) == config.mask_token_id:
            tokenizer.add_special_tokens({"mask_token": family.mask_token})
    elif tokenizer_mask is not None and tokenizer_mask != config.mask_token_id:
        logger.warning(
            "the tokenizer's mask token is %d, the config's %d; the config is used",
            tokenizer_mask,
            config.mask_token_id,
        )


def _resolve(name: str | Path, options: dict[str, Any]) -> str:
    check_model_name(name)
    if str(name) in embedded_models():
        return embedded_path(name)
    if str(name) == smollm2.NAME:
        return str(smollm2.smollm2_directory())
    path = Path(name).expanduser()
    if not path.exists() and path.suffix == ".safetensors" and len(path.parts) > 2:
        return needed_file("/".join(path.parts[:2]), "/".join(path.parts[2:]), options)
    return str(path) if str(name).startswith("~") else str(name)


def _tokenizer(source: str, options: dict[str, Any], config: Any, family: Family) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the weights, or the family's where its checkpoints come without one."""
    place = str(Path(source).parent) if Path(source).is_file() else source
    tokenizer = load_tokenizer(place, options, config, family.tokenizer_classes)
    if tokenizer is None and config.vocab_size in family.tokenizers:
        name, model_type = family.tokenizers[config.vocab_size]
        tokenizer = load_tokenizer(name, {}, CONFIG_MAPPING[model_type]())
    return tokenizer


def _describe(source: str, size: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The config's values and the path of the weights, of a transformers checkpoint or of weights alone."""
    path = Path(source)
    alone = path.is_file() or (path.is_dir() and not (path / "config.json").is_file())
    values = {} if alone else config_values(source, options)
    if "model_type" in values:
        if size is not None:
            raise ValueError(f"size is for weights without a config; {source} has one: leave size out")
        return values, source
    held = optional_file(source, "model.safetensors", options) if not path.exists() else None
    weights = single_weight_file(path) if path.exists() else held and Path(held)
    if not weights:
        raise ValueError(
            f"the config.json of {source} names no model_type, and there are no safetensors weights to tell it "
            "from; give a checkpoint's directory, or add the model_type"
        )
    return config_of_weights(weights, size), str(weights)


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


def _check_weights(
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
        where = "holds" if Path(source).is_dir() else "has, in the cache or on the hub as far as it can be reached,"
        raise ValueError(
            f"{source} {where} no {WEIGHTS}; pickled weights are refused because loading them executes "
            "code: convert them to safetensors first"
        )
    _refuse_other_weights(source, options)
    stored = getattr(config, "dtype", None)
    stored = stored if isinstance(stored, torch.dtype) else None
    # Quantised files are kept as they are; the dtype in their config is that of their activations.
    kept = None if own else dtype or stored
    check_memory(source, kept, device_map, options=options, stored=None if own else stored, element_size=width)


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


def _fetched(source: str, options: dict[str, Any]) -> list[Path]:
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
    values |= _possible_ends(values.get("eos_token_id"), config)
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


def _possible_ends(ends: int | list[int] | None, config: Any) -> dict[str, Any]:
    """The ids among these that end a text of the model: those that have a row in its embedding."""
    rows = getattr(config, "embedding_rows", config.vocab_size)
    if not isinstance(ends, list):
        return {"eos_token_id": ends if ends is not None and 0 <= ends < rows else None}
    return {"eos_token_id": [end for end in ends if 0 <= end < rows] or None}


def _load_weights(model_class: type[PreTrainedModel], source: str, **options: Any) -> PreTrainedModel:
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
    if model.dtype == torch.float64:
        # On a CPU torch has no product of groups of tokens (the default for mixtures of experts) in float64.
        model.set_experts_implementation("eager")
    return model


def _may_offload(device_map: Any) -> bool:
    """Whether weights may go to the disk."""
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
