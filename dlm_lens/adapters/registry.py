"""Model families: `Family`, and the registry of the files in `families/`, each of which defines `FAMILY`."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from dlm_lens.arguments import near_name
from dlm_lens.attention import mask_window_of
from dlm_lens.declarations import defined_in
from dlm_lens.printable import shown

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]
"""Names of a checkpoint's tensors -> their shapes."""


@dataclass(frozen=True)
class WeightsOnly:
    """How a family reads weights that came without transformers' config.json.

    Args:
        model_type: of the model that they make.
        recognise: whether a checkpoint with these tensors is the family's.
        sizes: config values of released models, under the names that users pass as `size`.
        complete: adds the config values that only the tensors show; raises ValueError where they contradict.
    """

    model_type: str
    recognise: Callable[[Shapes], bool]
    sizes: Mapping[str, Mapping[str, Any]]
    complete: Callable[[Mapping[str, Any], Shapes], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A model family: its classes, samplers, special ids and weight names.

    Args:
        name: in `dlm_lens.families()`, `tiny` and the command line.
        layouts: `model_type` of config.json -> (config class, model class).
        samplers: sampling algorithms of `dlm_lens.sampling` that its checkpoints use -> the settings of `denoise`
            where neither the checkpoint nor the caller says otherwise. The first is the family's; a checkpoint's
            config.json may name another in its field `sampler`.
        causal: whether it is autoregressive: a position sees the ones before it and predicts the next.
        has_mask_token: whether its diffusion models fill in [MASK]; in those of uniform noise open positions hold
            random tokens, and their sampler says which are open (`Sampler.open_positions`).
        hub_names: released checkpoints that load.
        hub_samplers: released checkpoint -> its sampler, where config.json does not name it.
        hub_block_lengths: released checkpoint -> block length of its training, which becomes the config's
            `trained_block_length`, where config.json does not say it.
        architectures: class that a checkpoint's config.json names in `architectures` -> model type in `layouts`,
            where the config.json has that of another class.
        adapted: model type of an AR model -> model type in `layouts`, for checkpoints that have the config.json of
            the AR model that they were made from: those in `hub_names` and `architectures`, those with
            `adapted_tensors` or `adapted_field`, and those that the caller says are the family's.
        adapted_tensors: pattern of the tensors' names in such checkpoints, where the AR model has others.
        adapted_field: a field of such checkpoints' config.json that the AR model's has not.
        refused: model type or architecture of a config.json, or name of a checkpoint -> what it is, and the remedy.
        special_ids: vocabulary size of a released checkpoint -> its ids (mask, eos, eot), for configs without
            them.
        special_ids_of_types: model type -> likewise, where its checkpoints have other ids than those of another
            type with as large a vocabulary.
        mask_token: text of [MASK], added to tokenizers without one whose next free id it is; the authors' code adds
            it when it loads them.
        pad_token: text of padding, likewise added where the next free id is that of the config's padding.
        rows_of_tokenizer: model types whose embedding has a row for each token of the tokenizer, and an even number
            of rows where the tokenizer has more than config.json says, as the authors' code resizes it.
        tokenizers: vocabulary size of a released checkpoint -> hub name and model type of its tokenizer, for
            checkpoints without one.
        tokenizer_classes: tokenizer class that only a checkpoint's own Python defines -> class of transformers that
            reads its vocab.json and merges.txt alike, for checkpoints without tokenizer.json.
        chat_options: arguments of the tokenizer's chat template.
        text_options: arguments of the tokenizer for plain texts.
        renames: (pattern, replacement) from checkpoint keys to the host's parameter names, in every checkpoint.
        renames_of_options: likewise, of parameters that not every checkpoint has.
        renames_of_types: model type -> likewise, in its checkpoints alone.
        conversions: of tensors that the host holds split or joined.
        conversions_of_types: model type -> likewise, in its checkpoints alone.
        weights_only: for checkpoints without transformers' config.json.
        tiny: config fields of the random model that `dlm_lens.testing.tiny` builds, where the class's defaults are
            too large for a test.
        tiny_of_types: model type -> likewise, of its class alone.
    """

    name: str
    layouts: Mapping[str, tuple[type[Any], type[Any]]]
    samplers: Mapping[str, Mapping[str, Any]]
    causal: bool = False
    has_mask_token: bool = True
    hub_names: tuple[str, ...] = ()
    hub_samplers: Mapping[str, str] = field(default_factory=dict)
    hub_block_lengths: Mapping[str, int] = field(default_factory=dict)
    architectures: Mapping[str, str] = field(default_factory=dict)
    adapted: Mapping[str, str] = field(default_factory=dict)
    adapted_tensors: str | None = None
    adapted_field: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    special_ids: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    special_ids_of_types: Mapping[str, Mapping[int, Mapping[str, int]]] = field(default_factory=dict)
    mask_token: str | None = None
    pad_token: str | None = None
    rows_of_tokenizer: tuple[str, ...] = ()
    tokenizers: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    tokenizer_classes: Mapping[str, str] = field(default_factory=dict)
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    text_options: Mapping[str, Any] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    renames_of_options: tuple[tuple[str, str], ...] = ()
    renames_of_types: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    conversions: tuple[WeightConverter, ...] = ()
    conversions_of_types: Mapping[str, tuple[WeightConverter, ...]] = field(default_factory=dict)
    weights_only: WeightsOnly | None = None
    tiny: Mapping[str, Any] = field(default_factory=dict)
    tiny_of_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def sampler_of(self, config: Any) -> str:
        """The sampler that a checkpoint's config names, or the family's first.

        Raises:
            ValueError: the family does not have the sampler.
        """
        name = getattr(config, "sampler", None) or next(iter(self.samplers))
        if name not in self.samplers:
            raise ValueError(
                f"config.json names the sampler {shown(name)}; {self.name} has {', '.join(self.samplers)}"
            )
        return str(name)

    def settings_of(self, config: Any) -> dict[str, Any]:
        """The settings of `denoise` that a checkpoint's config names, over those of the family for its sampler.

        Raises:
            ValueError: the family does not have the config's sampler.
        """
        trained, window = getattr(config, "trained_block_length", None), mask_window_of(config)
        own = self.samplers[self.sampler_of(config)]
        return {
            **own,
            **({} if trained is None else {"block_length": trained}),
            **({"window_length": window} if window is not None and "window_length" in own else {}),
            **getattr(config, "sampler_settings", {}),
            **(getattr(config, "sampler_defaults", None) or {}),
        }

    def ids_of(self, config: Any, tokenizer: Any) -> dict[str, int]:
        """The special ids (mask, eos, eot) of a checkpoint whose config.json has none.

        The mask is the tokenizer's, or the id that the authors' code adds to it; without a tokenizer that of the
        released checkpoints of this size.
        """
        known = self.special_ids_of_types.get(config.model_type, self.special_ids)
        found = dict(known.get(config.vocab_size, {}))
        mask = getattr(tokenizer, "mask_token_id", None)
        if mask is None and self.mask_token and tokenizer is not None:
            mask = len(tokenizer) if len(tokenizer) < config.vocab_size else None
        return found if mask is None else found | {"mask": int(mask)}

    def conversions_in(self, model_type: str) -> tuple[WeightConverter, ...]:
        """The conversions in the checkpoints of a model type."""
        return (*self.conversions, *self.conversions_of_types.get(model_type, ()))

    def register(self) -> None:
        """Register the family's own model types with transformers' Auto classes and its weight loader.

        A registered class takes precedence over a checkpoint's `auto_map`, so that its Python is never executed.
        Types that transformers ships itself (llama, modernbert) are left as they are: only `load` takes them for
        the family's.
        """
        for model_type, (config_class, model_class) in self.layouts.items():
            if model_type in CONFIG_MAPPING_NAMES:
                continue
            AutoConfig.register(model_type, config_class, exist_ok=True)
            for auto in (AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM):
                auto.register(config_class, model_class, exist_ok=True)
            mapping = [
                *(WeightRenaming(pattern, name) for pattern, name in self.renames),
                *(_optional(pattern, name) for pattern, name in self.renames_of_options),
                *(_optional(pattern, name) for pattern, name in self.renames_of_types.get(model_type, ())),
                *self.conversions_in(model_type),
            ]
            if mapping:
                register_checkpoint_conversion_mapping(model_type, mapping, overwrite=True)


def _optional(pattern: str, name: str) -> WeightRenaming:
    """A renaming that may match nothing, which transformers allows those with a scope; its scope is every key."""
    renaming = WeightRenaming(pattern, name)
    renaming.scope_prefix = renaming.base_model_prefix = ""
    return renaming


def _autoregressive_layout(model_type: str) -> tuple[type[Any], type[Any]] | None:
    """Config and model class of a causal LM that transformers ships; None if it ships none of that type.

    A type that it ships as a masked LM too (BERT) is an encoder, whose causal class attends both ways.
    """
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES or model_type not in CONFIG_MAPPING:
        return None
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    config_class = CONFIG_MAPPING[model_type]
    try:
        return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    except (KeyError, ImportError):  # a class that needs a package which is not installed
        return None


@cache
def families() -> tuple[Family, ...]:
    """Every family, registered with transformers, in alphabetical order of the files.

    Returns:
        A tuple of `Family`, of which a user reads `name`, `layouts` (model type -> config and model class),
        `samplers` (name -> default settings), `hub_names` (released checkpoints), `causal` and `has_mask_token`.
    """
    found = tuple(defined_in("dlm_lens.adapters.families", "FAMILY", Family))
    for family in found:
        family.register()
    return found


def family_named(name: str) -> Family:
    """The family with a name.

    Raises:
        ValueError: there is none.
    """
    known = {family.name: family for family in families()}
    if name not in known:
        raise ValueError(f"family is {shown(name)}{near_name(name, known, {})}; there are {', '.join(known)}")
    return known[name]


def model_type_of(
    values: Mapping[str, Any], source: str, family: str | None = None, tensors: Iterable[str] = ()
) -> str:
    """The model type of a config.json, by its class where another class's checkpoints have the same `model_type`.

    Args:
        values: of the config.json.
        source: name of the checkpoint.
        family: of the checkpoint, where the caller says it.
        tensors: names of the checkpoint's tensors, as far as they are known.

    Raises:
        ValueError: a class that a family does not load, though model type or name are like its own; or a `family`
            that is none, or does not load this model type.
    """
    own, architectures = str(values.get("model_type")), values.get("architectures")
    classes = [one for one in (architectures if isinstance(architectures, list) else []) if isinstance(one, str)]
    for each in families():
        if source in each.refused:
            raise ValueError(f"{source} is {each.refused[source]}")
        for name in (own, *classes):
            if name in each.refused:
                raise ValueError(f"the config.json of {source} says {name}: it is {each.refused[name]}")
    if family is not None:
        return _type_in(family, own, source)
    for each in families():
        if own in each.adapted and (each.adapted_field in values or _is_adapted(each, source, tensors)):
            return each.adapted[own]
    types = [
        each.adapted.get(own, each.architectures[name])
        for each in families()
        for name in classes
        if name in each.architectures
    ]
    if types:
        return types[0]
    owners = {name: _types_of(name) for name in classes}
    if any(owners.values()) and not any(own in found for found in owners.values()):
        name, found = next((name, found) for name, found in owners.items() if found)
        logger.warning(
            "the config.json of %s says model_type %s and the class %s, which is that of %s; it is loaded as %s",
            source,
            own,
            name,
            " or ".join(found),
            own,
        )
    return own


def _type_in(name: str, model_type: str, source: str) -> str:
    """The model type of a checkpoint that is of the family with this name.

    Raises:
        ValueError: there is no such family, or it does not load the model type.
    """
    family = family_named(name)
    if model_type in family.layouts or (family.causal and _autoregressive_layout(model_type)):
        return model_type
    if model_type not in family.adapted:
        types = sorted({*family.layouts, *family.adapted})
        raise ValueError(
            f"the config.json of {source} says model_type {shown(model_type)}, and {name} has "
            f"{', '.join(types)}: leave family out, or name that of the checkpoint"
        )
    return family.adapted[model_type]


def _is_adapted(family: Family, source: str, tensors: Iterable[str]) -> bool:
    """Whether a checkpoint with the config.json of an AR model is the family's, by its name or its tensors'."""
    pattern = family.adapted_tensors
    return source in family.hub_names or any(pattern is not None and re.match(pattern, name) for name in tensors)


def _types_of(name: str) -> tuple[str, ...]:
    """The model types whose class has a name, that of this library's or the authors'."""
    layouts = [layout for family in families() for layout in family.layouts.items()]
    return tuple(
        model_type
        for model_type, (config, kind) in layouts
        if not kind.__module__.startswith("transformers.")
        and name in (kind.__name__, getattr(config, "original_class", None))
    )


def family_of(model_type: str) -> Family:
    """The family of a checkpoint's `model_type`; the causal one for every causal LM that transformers ships.

    Raises:
        ValueError: no family has this type.
    """
    for family in families():
        if model_type in family.layouts:
            return family
    layout = _autoregressive_layout(model_type)
    if layout is not None:
        causal = next(family for family in families() if family.causal)
        return replace(causal, layouts={model_type: layout}, hub_names=())
    known = sorted(name for family in families() for name in family.layouts)
    raise ValueError(
        f"no family loads model_type {shown(model_type)}; known model types: {', '.join(known)} (a checkpoint of "
        "one of them under another name loads once its config.json says so), and every causal LM of transformers; "
        "load an encoder or an encoder-decoder with transformers, and use dlm_lens.add_hook_points"
    )


def fills_masks(config: Any) -> bool:
    """Whether open positions of a diffusion model hold [MASK], rather than random tokens.

    It is so in families with a mask token, but where the config says that the noise of the training was another
    (`masked_noise`, of GIDD).

    Args:
        config: of the model.
    """
    return family_of(config.model_type).has_mask_token and bool(getattr(config, "masked_noise", True))


def excluded_id(config: Any) -> int | None:
    """The id of [MASK], which has no probability; None in a vocabulary of which every id can be written.

    Of GIDD it has none either where the noise is random tokens, and the network is never shown it
    (`excluded_token_id`).

    Args:
        config: of the model.
    """
    mask = getattr(config, "mask_token_id", None)
    found: int | None = getattr(config, "excluded_token_id", None) if mask is None else mask
    return found
