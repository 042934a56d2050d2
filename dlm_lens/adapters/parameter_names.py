"""The parameters of a config's network, and which of them a tensor of a checkpoint's files becomes."""

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from dlm_lens.adapters.config_fields import LAYERS_IN_FILES, REFUSALS
from dlm_lens.adapters.registry import Family
from dlm_lens.printable import one_line

_ROTARY = "RotaryEmbedding"
_NUMBERED = re.compile(r"(?:^|\.)(\w+)\.(\d+)\.")


@dataclass(frozen=True)
class ExpectedParameters:
    """Parameters of the network that a config describes, and how the files' names become theirs."""

    shapes: Mapping[str, tuple[int, ...]]
    whole_numbers: frozenset[str]
    tied: Mapping[str, str]
    renamings: Sequence[WeightRenaming]
    converters: Sequence[WeightConverter]
    prefix: str
    ignored: Sequence[str]
    layers: int

    @property
    def layer(self) -> re.Pattern[str]:
        """Where a parameter's name has the index of its layer, whatever the list is called (`h` in GPT-2)."""
        lists = Counter(found.group(1) for name in self.shapes if (found := _NUMBERED.search(name)))
        stem = lists.most_common(1)[0][0] if lists else "layers"
        return re.compile(rf"(?:^|\.){re.escape(stem)}\.(\d+)\.")

    def ignores(self, name: str) -> bool:
        """Whether the model class leaves a tensor out."""
        return any(re.search(pattern, name) for pattern in self.ignored)


def depth_field(config: Any) -> str:
    """The field of a config that has the number of layers in the files."""
    return LAYERS_IN_FILES.get(config.model_type, "num_hidden_layers")


def _with_layers(config: Any, count: int) -> Any:
    small = copy.deepcopy(config)
    setattr(small, depth_field(config), count)
    if "layer_types" in vars(small) and small.layer_types is not None:  # a property of it follows by itself
        small.layer_types = small.layer_types[:count]
    if getattr(small, "num_kv_shared_layers", None):  # they use the keys of earlier layers, which are cut away
        small.num_kv_shared_layers = 0
    return small


def expected_parameters(
    model_class: Any, config: Any, what: str, family: Family, renames: Mapping[str, str], layers: int | None = None
) -> ExpectedParameters:
    """The parameters of a config's network, or of one with fewer layers, from one without memory."""
    try:
        config = config if layers is None else _with_layers(config, layers)
        with torch.device("meta"):
            model = model_class(config)
        # With the config of the part that they are in: a text network beside a vision tower has its own.
        rotary = {type(module): module for module in model.modules() if type(module).__name__.endswith(_ROTARY)}
        for kind, module in rotary.items():
            _check_rotary(kind(getattr(module, "config", config)))
    except REFUSALS as error:
        raise ValueError(f"{what} describes a network that cannot be built: {one_line(error)}") from error
    mapping = get_model_conversion_mapping(model, dict(renames))
    # Patterns of an instance may name the layer after its last one (Bailing's), which is another in a cut network.
    owner = model if layers is None else model_class
    own = [conversion.source_patterns for conversion in splitting(family)]
    return ExpectedParameters(
        shapes={name: tuple(value.shape) for name, value in model.state_dict().items()},
        whole_numbers=frozenset(
            name for name, value in model.state_dict().items() if not value.dtype.is_floating_point
        ),
        tied=dict(getattr(model, "all_tied_weights_keys", None) or {}),
        renamings=[one for one in mapping if isinstance(one, WeightRenaming)],
        converters=[one for one in mapping if isinstance(one, WeightConverter) and one.source_patterns not in own],
        prefix=model.base_model_prefix,
        ignored=(r"rotary_emb\.inv_freq", *(owner._keys_to_ignore_on_load_unexpected or ())),
        layers=getattr(config, depth_field(config)),
    )


def _check_rotary(rotary: Any) -> None:
    tables = [value for name, value in rotary.named_buffers() if name.endswith("inv_freq")]
    # One for each kind of layer in models with several (Gemma 3).
    scales = [float(value) for name, value in vars(rotary).items() if name.endswith("attention_scaling")]
    kinds = getattr(rotary, "rope_type", None)
    if "proportional" in (kinds.values() if isinstance(kinds, Mapping) else [kinds]):
        tables = [table[table != 0] for table in tables]  # its frequencies of 0 leave a part of each head unrotated
    numbers = all(len(table) and bool((table.isfinite() & (table > 0)).all()) for table in tables)
    if not (numbers and all(0 < scale < float("inf") for scale in scales)):
        raise ValueError(
            "the frequencies of its rotary positions are not finite and above 0; look at rope_theta and "
            "rope_scaling, or take the file that came with the weights"
        )


def renamed_tensor(name: str, expected: ExpectedParameters, layers: int) -> str:
    """The parameter that a file's tensor becomes, before tensors are split."""

    def first_layer(parameter: str) -> str:
        if layers:
            return parameter
        return expected.layer.sub(lambda place: place.group(0).replace(place.group(1), "0"), parameter, count=1)

    found, _ = rename_source_key(name, list(expected.renamings), [], None, None)
    outer, bare = f"{expected.prefix}.{found}", found.removeprefix(f"{expected.prefix}.")
    if first_layer(outer) in expected.shapes:
        return outer
    if found != bare and bare in expected.shapes:
        return bare
    # As transformers: a pattern may fit a parameter that has its final name (DeepSeek-V4: ".norm.").
    final = first_layer(found) not in expected.shapes and first_layer(name) in expected.shapes
    return name if final else str(found)


def converted_tensor(name: str, expected: ExpectedParameters) -> list[str]:
    """The parameters that a tensor of a file becomes a part of or is split into; none where it becomes one."""
    first, converter = _renamed_by_converter(name, expected)
    if converter is None:
        return []
    # A name is made with the first of a converter's targets.
    head, *others = converter.target_patterns
    before, _, after = first.rpartition(head)
    names = [first, *(before + other + after for other in others)]
    outer = [f"{expected.prefix}.{found}" for found in names]
    return [one if one in expected.shapes else found for one, found in zip(outer, names, strict=True)]


def splitting_of(
    name: str, expected: ExpectedParameters, family: Family
) -> tuple[list[str], WeightConverter | None]:
    """The parameters that a tensor of a file becomes, and what splits or joins it; None where it becomes one."""
    found = renamed_tensor(name, expected, expected.layers)
    for conversion in splitting(family):
        (fused,) = conversion.source_patterns
        if found.endswith(fused):
            return [found.removesuffix(fused) + target for target in conversion.target_patterns], conversion
    converter = _renamed_by_converter(name, expected)[1]
    return ([found], None) if converter is None else (converted_tensor(name, expected), converter)


def _renamed_by_converter(name: str, expected: ExpectedParameters) -> tuple[str, WeightConverter | None]:
    """The first name that a converter makes of a tensor's, and the converter; None where none takes it."""
    first, pattern = rename_source_key(name, list(expected.renamings), list(expected.converters), None, None)
    fits = (one for one in expected.converters if pattern in one.source_patterns)
    return str(first), None if pattern is None else next(fits)


def fused_shapes(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, str], family: Family
) -> dict[str, tuple[int, ...]]:
    """The parameters as the files hold them: what is split while loading in one tensor, one after another."""
    whole = dict(shapes)
    for conversion in splitting(family):
        (source,) = conversion.source_patterns
        for name in stored:
            if not name.endswith(source):
                continue
            stem = name.removesuffix(source)
            parts = [stem + target for target in conversion.target_patterns if stem + target in shapes]
            sizes = [shapes[part] for part in parts]
            for part in parts:
                whole.pop(part, None)
            if sizes:
                whole[name] = (sum(size[0] for size in sizes), *sizes[0][1:])
    return whole


def splitting(family: Family) -> list[WeightConverter]:
    """The conversions that split a tensor; the others join experts that the files hold one by one."""
    return [
        one for one in family.conversions if len(one.source_patterns) == 1 and "*" not in one.source_patterns[0]
    ]
