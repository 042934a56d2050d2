"""The fields of a checkpoint's config.json: which are used, and their kinds and ranges, checked before building."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from dlm_lens.adapters.quantisation import floating_dtype
from dlm_lens.files.json_objects import check_plain
from dlm_lens.printable import one_line, printable_name, shown

LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 1000
WIDEST_HEAD = 65536

ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("d_model", "n_embd", "hidden_dim"),
    "num_attention_heads": ("n_heads", "n_head"),
    "num_key_value_heads": ("n_kv_heads", "n_query_groups"),
    "num_hidden_layers": ("n_layers", "n_layer", "n_blocks"),
    "intermediate_size": ("mlp_hidden_size",),
    "vocab_size": ("embedding_size", "padded_vocab_size"),
    "max_position_embeddings": ("max_sequence_length", "block_size", "model_length"),
    "rms_norm_eps": ("norm_eps",),
    "hidden_act": ("activation_type", "activation_function"),
    "tie_word_embeddings": ("weight_tying",),
}
"""Names in Llama's config -> the names of the same fields in the configs of LLaDA, SMDM, MDLM and DiffuGPT."""

LAYERS_IN_FILES: Mapping[str, str] = {"longcat_flash": "num_layers", "hrm_text": "num_layers_per_stack"}
"""Model types whose `num_hidden_layers` counts attentions or cycles -> the field with the number of layers."""

_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size",
          "vocab_size", "max_position_embeddings", "head_dim", "mlp_ratio", "padding_multiple", "cond_dim",
          "block_length", *LAYERS_IN_FILES.values())  # fmt: skip
_COUNTS = ("num_sinks", "max_window_layers")
_FLAGS = ("tie_word_embeddings", "zero_sink_value", "gated_attention", "logit_shift", "attention_bias", "mlp_bias",
          "is_causal", "use_cache", "use_sliding_window", "multi_query_attention", "time_conditioning", "adaln",
          "cross_attn", "causal", "var_min")  # fmt: skip
_NAMES = ("sink_placement", "softmax", "sampler", "hidden_act")
_NOT_NEGATIVE = ("rms_norm_eps", "initializer_range", "attention_dropout")
_POSITIVE = ("rope_theta", "partial_rotary_factor")
_ID = "_token_id"
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""Kinds of rotary positions -> the settings that each requires."""

_ROPE_NUMBERS = frozenset({
    "factor", "rope_theta", "short_factor", "long_factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor",
})  # fmt: skip

FOREIGN = frozenset({
    "auto_map", "transformers_weights", "configuration_files", "fusion_config", "kernel_config",
    "distributed_config",
})  # fmt: skip
"""Fields by which a config.json would choose what transformers reads, imports or runs: no family takes them."""

ACTED_ON = FOREIGN | {
    "custom_generate", "extra_files", "extra_config_files", "attn_implementation", "experts_implementation",
    "use_kernels", "tp_plan", "tp_size", "device_map", "device_mesh", "gguf_file", "state_dict", "subfolder",
    "variant", "trust_remote_code", "use_safetensors", "weights_only", "key_mapping", "adapter_kwargs",
    "adapter_name", "generation_config", "name_or_path", "tokenizer_class", "tokenizer_file",
}  # fmt: skip
"""The same, with fields that a caller of transformers may give and a file may not."""

UNUSED = frozenset({
    "num_labels", "id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states",
    "return_dict", "use_return_dict", "torchscript", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder",
    "add_cross_attention", "pruned_heads", "tie_encoder_decoder",
})  # fmt: skip
"""Fields of classifiers and of the format of a model's output, which `load` sets itself: not used either."""

_OWN_UNDERSCORED = frozenset({"_norm_class", "_mlp_class"})
RENAMED = frozenset({"rope_scaling", "torch_dtype", "model_type"})
"""Fields that config classes keep under another name, or as an attribute of the class."""

PER_LAYER = "per_layer_config"
OF_LAYERS = frozenset({"head_dim", "num_key_value_heads", "global_head_dim", "num_global_key_value_heads"})
"""Fields in which layers of one network may differ (`PER_LAYER`; Gemma 4)."""

REFUSALS = (
    StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError,
    AssertionError,
)  # fmt: skip
"""Exceptions of transformers' and torch's classes for values that they do not accept."""


def without_foreign_fields(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Config values without those by which a config.json would choose what transformers reads or runs."""
    return {name: value for name, value in kwargs.items() if name not in FOREIGN}


def network_fields(values: Mapping[str, Any], config_class: type[Any]) -> dict[str, Any]:
    """The config values that describe the network; the others would replace what transformers keeps there."""
    own = {field.name for field in fields(config_class)} | RENAMED | _OWN_UNDERSCORED
    if layers_may_differ(config_class):
        own |= {PER_LAYER}
    return {
        name: value
        for name, value in values.items()
        if name not in ACTED_ON | UNUSED
        and (name in own or not (name.startswith("_") or hasattr(config_class, name)))
    }


def layers_may_differ(config_class: type[Any]) -> bool:
    """Whether a class of transformers gives layers different sizes by itself (Gemma 4), so that a file may too."""
    native = config_class.__module__.startswith("transformers.")
    return native and bool(getattr(config_class(), "is_heterogeneous", False))


def check_fields(values: Mapping[str, Any], what: str) -> None:
    """Refuse config values of the wrong kind or outside what a network can have.

    Args:
        values: as config.json holds them.
        what: the file's name in a message.

    Raises:
        ValueError: with the field, its value and what it must be.
    """
    check_plain(dict(values), what)
    for name, value in values.items():
        if value is None:
            continue
        requirement = _requirement(_CANONICAL.get(name, name), value)
        if requirement is not None:
            raise ValueError(
                f"{what} says {printable_name(name)} = {shown(value)}; it must be {requirement}: take the file "
                "that came with the weights"
            )
    if values.get(PER_LAYER):
        raise ValueError(f"{what} says {PER_LAYER}, layers of different sizes, which this family does not have")


def check_fields_of_layers(values: Mapping[str, Any], what: str) -> None:
    """As `check_fields`, for a network whose layers may differ in the width and the number of heads of their keys.

    Raises:
        ValueError: with the field, its value and what it must be.
    """
    layers = values.get(PER_LAYER) or {}
    check_fields({name: value for name, value in values.items() if name != PER_LAYER}, what)
    if not isinstance(layers, dict):
        raise ValueError(f"{what} says {PER_LAYER} = {shown(layers)}; it must be an object by layer")
    for index, given in layers.items():
        if not isinstance(given, dict) or not set(given) <= OF_LAYERS:
            raise ValueError(
                f"{what} says {PER_LAYER}[{shown(index)}] = {shown(given)}; layers differ in head_dim and "
                "num_key_value_heads alone: take the file that came with the weights"
            )
        check_fields(given, f"{what}, {PER_LAYER}[{shown(index)}]")


def _requirement(name: str, value: Any) -> str | None:
    """What a field must be, where its value does not fit; None where it does."""
    if name in _SIZES:
        depths = dict.fromkeys(("num_hidden_layers", *LAYERS_IN_FILES.values()), MOST_LAYERS)
        most = (depths | {"head_dim": WIDEST_HEAD}).get(name, LARGEST_SIZE)
        # Gemma 3n has a width of the MLP for each layer.
        sizes = value if name == "intermediate_size" and isinstance(value, list) and value else [value]
        fits = all(_whole(one) and 1 <= one <= most for one in sizes)
        return None if fits else f"a whole number from 1 to {most}"
    if name in _COUNTS:
        return None if _whole(value) and 0 <= value <= LARGEST_SIZE else f"a whole number from 0 to {LARGEST_SIZE}"
    if name in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name in _NAMES:
        valid = name != "hidden_act" or (isinstance(value, str) and value in (*ACT2FN, "swiglu"))
        return None if isinstance(value, str) and valid else "a name" if name != "hidden_act" else "an activation"
    if name in _NOT_NEGATIVE or name in _POSITIVE:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = number and 0 <= value < 1e30 and (value > 0 or name in _NOT_NEGATIVE)
        return None if fits else f"a finite number {'from' if name in _NOT_NEGATIVE else 'above'} 0"
    if name.endswith(_ID):
        several = value if name == "eos_token_id" and isinstance(value, list) and value else [value]
        fits = all(_whole(one) and -1 <= one <= LARGEST_SIZE for one in several)
        return None if fits else "the id of a token"
    if name in ("dtype", "torch_dtype"):
        return _dtype_requirement(value)
    if name in ("rope_scaling", "rope_parameters"):
        return _rope_requirement(value)
    if name in ("quantization_config", "sampler_defaults"):
        return _settings_requirement(value, name)
    if name == "layer_types":
        plain = isinstance(value, list) and all(one in ALLOWED_LAYER_TYPES for one in value)
        return None if plain else f"a list of every layer's kind, each one of {', '.join(ALLOWED_LAYER_TYPES)}"
    return None


_LEAST_SETTINGS: Mapping[str, int] = {"steps": 1, "gen_length": 0, "block_length": 1}
"""Settings of samplers that count steps or positions -> the least number; `denoise` checks the others."""


def _settings_requirement(value: Any, name: str) -> str | None:
    """What an object of settings must be, where it does not fit; None where it does."""
    if not isinstance(value, dict):
        return "an object with settings"
    for setting, least in _LEAST_SETTINGS.items() if name == "sampler_defaults" else ():
        one = value.get(setting)
        if one is not None and not (_whole(one) and least <= one <= LARGEST_SIZE):
            return f"an object whose {setting} is a whole number from {least}, not {shown(one)}"
    return None


def _rope_requirement(value: Any) -> str | None:
    """What settings of rotary positions must be, where they do not fit; None where they do."""
    if value is False:  # none, in RND1's config.json; transformers reads it so too
        return None
    if not isinstance(value, dict):
        return "an object with settings"
    kind = value.get("rope_type", value.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        return f"an object whose rope_type is one of {', '.join(_ROPE_TYPES)}, not {shown(kind)}"
    for name, one in value.items():
        for number in one if isinstance(one, list) else [one]:
            plain = isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < 1e30
            if number is not None and name in _ROPE_NUMBERS and not plain:
                return f"an object whose {name} is above 0, not {shown(number)}"
    lacking = [name for name in _ROPE_TYPES[kind] if value.get(name) is None]
    return f"an object with {', '.join(lacking)} for the rope_type {kind!r}" if lacking else None


def _dtype_requirement(value: Any) -> str | None:
    try:
        return None if value == "auto" or floating_dtype(value) is not None else "a dtype"
    except ValueError:
        return 'a dtype that weights are computed in, such as "bfloat16"'


def built_config(config_class: type[Any], values: Mapping[str, Any], what: str) -> Any:
    """The config object of checked values.

    Raises:
        ValueError: fields of the wrong kind, that contradict each other, or that the config class refuses.
    """
    (check_fields_of_layers if layers_may_differ(config_class) else check_fields)(values, what)
    _check_division(values, what)
    kept = network_fields(values, config_class)
    if kept.get("dtype") == "auto" or kept.get("torch_dtype") == "auto":
        kept = {name: value for name, value in kept.items() if name not in ("dtype", "torch_dtype")}
    try:
        # As transformers reads its own files, in which infinity is {"__float__": "Infinity"}.
        config = config_class.from_dict(config_class._decode_special_floats(kept))
    except REFUSALS as error:
        raise ValueError(f"{what} does not fit {config_class.__name__}: {one_line(error)}") from error
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # CodeGen's has no padding token
        setattr(config, name, getattr(config, name, None))
    check_agreement(config, values, what)
    return config


def _check_division(values: Mapping[str, Any], what: str) -> None:
    """Refuse numbers of heads that do not divide what they must, where the file gives both."""
    pairs = [("num_attention_heads", "num_key_value_heads")]
    if values.get("head_dim") is None:
        pairs.append(("hidden_size", "num_attention_heads"))
    for whole, part in pairs:
        (written, divided), (also, divisor) = (
            (name := written_name(one, values), values.get(name)) for one in (whole, part)
        )
        if divided is not None and divisor is not None and divided % divisor:
            raise ValueError(
                f"{what} says {written} = {divided} and {also} = {divisor}; the second must divide the first: take "
                "the file that came with the weights"
            )
        if whole == "hidden_size" and divided is not None and divisor is not None:
            _check_width(divided // divisor, f"{written} = {divided} and {also} = {divisor}", what)


def _check_width(width: int, written: str, what: str) -> None:
    if width % 2 or not 0 < width <= WIDEST_HEAD:
        raise ValueError(
            f"{what} says {written}, heads of width {width}; rotary positions need an even number of at most "
            f"{WIDEST_HEAD}"
        )


def check_agreement(config: Any, values: Mapping[str, Any], what: str) -> None:
    """Refuse fields that contradict each other.

    Raises:
        ValueError: with the fields and their values.
    """

    def written(name: str) -> str:
        return f"{written_name(name, values)} = {shown(getattr(config, name))}"

    if not getattr(config, "num_attention_heads", None):
        raise ValueError(
            f"{what} is of a {config.model_type}, which has no attention: there is nothing to add hook points to"
        )
    if config.num_hidden_layers > MOST_LAYERS:
        raise ValueError(
            f"{what} describes a pass through {shown(config.num_hidden_layers)} layers; {MOST_LAYERS} is the most: "
            "take the file that came with the weights"
        )
    # Layers of several widths (Gemma 4) have a config each.
    several = getattr(config, "is_heterogeneous", False)
    for each in config.per_layer_config if several else [config]:
        width = getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads
        _check_width(width, f"{written('hidden_size')} and {written('num_attention_heads')}", what)
    for name, factors in (getattr(config, "rope_parameters", None) or {}).items():
        if isinstance(factors, list) and name in _ROPE_NUMBERS and len(factors) != width // 2:
            raise ValueError(
                f"{what} lists {len(factors)} numbers as {name}; heads of width {width} need {width // 2}"
            )
    if values.get("num_sinks") and "num_sinks" not in {field.name for field in fields(config)}:
        raise ValueError(
            f"{what} says num_sinks = {values['num_sinks']}, and {type(config).__name__} has no learned sink "
            "tokens: take the file that came with the weights"
        )
    types = getattr(config, "layer_types", None)
    own = not type(config).__module__.startswith("transformers.")
    if types is not None and own and not set(types) <= set(_LAYER_TYPES):
        raise ValueError(
            f"{what} says layer_types = {shown(types)}; {type(config).__name__} has layers of "
            f"{' and '.join(_LAYER_TYPES)}: take the file that came with the weights"
        )
    if types is not None and len(types) != config.num_hidden_layers:
        raise ValueError(f"{what} says {written('num_hidden_layers')} and lists layer_types of {len(types)} layers")
    if values.get("is_causal") and "is_causal" in {field.name for field in fields(config)}:
        raise ValueError(
            f"{what} says is_causal = True; {type(config).__name__} is for models that see the whole canvas"
        )
    rows = getattr(config, "embedding_rows", config.vocab_size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "eot_token_id"):
        given = getattr(config, name, None)
        for one in given if isinstance(given, list) else [given]:
            if one is not None and one >= rows:
                raise ValueError(
                    f"{what} says {name} = {one}, which has no row in an embedding of {rows} "
                    f"({written_name('vocab_size', values)}): take the file that came with the weights"
                )
    if getattr(config, "pad_token_id", None) == -1:  # the first Llamas' value for no padding token
        config.pad_token_id = None


def written_name(name: str, values: Mapping[str, Any]) -> str:
    """The name of a field of Llama's config in a config.json."""
    return next((one for one in ALIASES.get(name, ()) if values.get(one) is not None), name)


_CANONICAL = {alias: name for name, aliases in ALIASES.items() for alias in aliases}


def active_experts(name: str, config: Any) -> float:
    """The share of a weight of this name that one position uses: of experts k / E, of other weights 1.

    Args:
        name: within its layer or its model, such as "0.mlp.experts.gate_up_proj".
        config: of the text model, which names E, the number of experts of a layer, and k, how many of them a router
            chooses.
    """
    every, chosen = (
        next((value for field in names if (value := getattr(config, field, None)) is not None), None)
        for names in (("num_experts", "n_routed_experts"), ("top_k_experts", "num_experts_per_tok"))
    )
    return chosen / every if every and chosen and ".experts." in name else 1.0


def _whole(value: Any) -> bool:
    return type(value) is int
