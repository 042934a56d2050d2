"""`LoraAdapter`: a LoRA adapter of PEFT, merged into the weights of a model that `load` makes."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter

from dlm_lens.adapters.hub import needed_file, optional_file
from dlm_lens.adapters.parameter_names import ExpectedParameters, splitting_of
from dlm_lens.adapters.registry import Family
from dlm_lens.adapters.weight_headers import FLOATING, TensorHeader, read_header
from dlm_lens.files.json_objects import read_object
from dlm_lens.files.paths import user_path
from dlm_lens.printable import printable_name, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

REFUSED: Mapping[str, str] = {
    "use_dora": "its matrices have magnitudes of their own (DoRA)",
    "use_qalora": "its inputs are pooled (QALoRA)",
    "alora_invocation_tokens": "it acts from a token on (aLoRA)",
    "trainable_token_indices": "it changes rows of an embedding",
    "target_parameters": "it changes parameters that are no module's weight",
    "lora_bias": "its matrices have biases",
    "arrow_config": "it routes between adapters",
    "layer_replication": "it repeats layers",
    "kasa_config": "its product has singular values of its own (KaSA)",
    "monteclora_config": "its factors are drawn (MonteCLoRA)",
    "use_bdlora": "its factors are in blocks (BD-LoRA)",
}
"""Fields of an adapter's config that say another arithmetic than W + s B A -> what it is."""

BASES = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Beginnings of `init_lora_weights` of adapters that belong to weights which training changed at its start."""

_LORA = re.compile(r"^(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight$")
_PREFIX = "base_model.model."
_NAME = re.compile(r"^\^?[\w.\\]+$")


@dataclass(frozen=True)
class LoraConfig:
    """What an adapter's config says of its matrices.

    Args:
        rank: of the two factors, r.
        alpha: the product is multiplied by alpha / r, or with `rank_stabilised` by alpha / sqrt(r).
        rank_stabilised: `use_rslora`.
        transposed: `fan_in_fan_out`: the weights are `[in, out]`, as GPT-2's.
        ranks: pattern of a module's name -> its rank.
        alphas: likewise.
    """

    rank: int
    alpha: float
    rank_stabilised: bool
    transposed: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @classmethod
    def of(cls, values: Mapping[str, Any], what: str) -> "LoraConfig":
        """Read adapter_config.json.

        Raises:
            ValueError: another kind of adapter, or one whose arithmetic is not W + s B A.
        """
        if values.get("peft_type") != "LORA":
            raise ValueError(f"{what} says peft_type = {shown(values.get('peft_type'))}; only LORA is read here")
        for name, kind in REFUSED.items():
            if values.get(name):
                raise ValueError(
                    f"{what} says {name} = {shown(values[name])}: {kind}; merge it with PEFT, and load the result"
                )
        start = values.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(BASES):
            raise ValueError(
                f"{what} says init_lora_weights = {shown(start)}: training changed the base weights too; merge it "
                "with PEFT, and load the result"
            )
        if values.get("bias", "none") != "none":
            raise ValueError(f"{what} says bias = {shown(values['bias'])}: it trains biases; merge it with PEFT")
        rank, alpha = values.get("r"), values.get("lora_alpha")
        if not (isinstance(rank, int) and isinstance(alpha, int | float) and _positive(rank) and _positive(alpha)):
            raise ValueError(
                f"{what} says r = {shown(rank)} and lora_alpha = {shown(alpha)}; both are positive numbers"
            )
        ranks, alphas = (values.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
        for name, each in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
            # Of regular expressions, which a stranger wrote, only names are read.
            if not isinstance(each, dict) or not all(
                _positive(value) and _NAME.match(key) and (isinstance(value, int) or each is alphas)
                for key, value in each.items()
            ):
                raise ValueError(
                    f"{what} says {name} = {shown(each)}; it maps names of modules to positive numbers (ranks are "
                    "whole), others are not read: merge it with PEFT"
                )
        own = bool(values.get("use_rslora")), bool(values.get("fan_in_fan_out"))
        return cls(rank, float(alpha), *own, ranks, alphas)

    def scale(self, module: str, rank: int, what: str) -> float:
        """What the product of a module's factors is multiplied by.

        Raises:
            ValueError: factors of another rank than the config says.
        """
        said = int(_of_module(self.ranks, module, self.rank))
        if said != rank:
            raise ValueError(f"{what} says rank {said} for {printable_name(module)}, and its factors have {rank}")
        alpha = float(_of_module(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter of PEFT, read but for its tensors.

    Args:
        source: directory or hub name.
        config: of the factors.
        file: of the tensors.
        factors: module -> the names of its factors A and B.
        whole: names of tensors that replace weights (`modules_to_save`).
        headers: name -> dtype and shape of every tensor.
    """

    source: str
    config: LoraConfig
    file: str
    factors: Mapping[str, tuple[str, str]]
    whole: tuple[str, ...]
    headers: Mapping[str, TensorHeader]

    @classmethod
    def read(cls, source: Any, *, quantised: bool = False) -> "LoraAdapter":
        """Read an adapter's config and the names of its tensors.

        Args:
            source: directory or hub name.
            quantised: whether the weights of the model are.

        Raises:
            FileNotFoundError: there is no adapter under that name.
            ValueError: quantised weights, or another kind of adapter.
        """
        if not isinstance(source, str | Path) or not str(source).strip():
            raise ValueError(f"adapter is {shown(source)}; give the directory or the hub name of a LoRA adapter")
        name = str(user_path(source)) if str(source).startswith("~") else str(source)
        if quantised:
            raise ValueError(
                f"the weights are quantised, and {name} is added to whole ones; merge it before quantising"
            )
        values, file = _files(name)
        config = LoraConfig.of(values, f"the {CONFIG} of {name}")
        headers = read_header(Path(file))
        factors, whole = _grouped(list(headers), name)
        if not factors and not whole:
            raise ValueError(f"{name} holds no factors of LoRA: {WEIGHTS} has no tensor lora_A")
        return cls(name, config, file, factors, whole, headers)

    def check(self, expected: ExpectedParameters, family: Family) -> None:
        """Raise unless the model has every weight that the adapter changes, of the same shape.

        By the headers alone: two small factors of a wrong shape may have a product that no memory holds.

        Args:
            expected: the parameters of the model, by the names of its files.
            family: of the model.

        Raises:
            ValueError: naming a weight.
        """
        for name, header in self.headers.items():
            if header.dtype not in FLOATING:
                raise ValueError(
                    f"{printable_name(name)} in {self.source} has the dtype {header.dtype}; an adapter's tensors "
                    "are floating-point numbers: fetch it again"
                )
        shapes = {name: self.headers[name].shape for name in self.whole}
        shapes |= {f"{module}.weight": self._product_shape(module) for module in self.factors}
        for name, shape in shapes.items():
            names, _ = _parameters_of(name, expected, family, self.source)
            first = expected.shapes[names[0]]
            # A fused projection is held in one tensor, one part after another.
            wanted = (sum(expected.shapes[one][0] for one in names), *first[1:]) if len(names) > 1 else first
            if shape != wanted:
                raise ValueError(
                    f"{self.source} changes {', '.join(names)} by a tensor of {list(shape)}, and the model's has "
                    f"{list(wanted)}; is it an adapter of another model?"
                )

    def _product_shape(self, module: str) -> tuple[int, ...]:
        """The shape of what a module's factors add to its weight.

        Raises:
            ValueError: no factors [r, in] and [out, r], or of another rank than the config says.
        """
        a, b = (self.headers[name].shape for name in self.factors[module])
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise ValueError(
                f"the factors of {printable_name(module)} in {self.source} have the shapes {list(a)} and "
                f"{list(b)}; they are [r, in] and [out, r]"
            )
        self._scale(module)
        return (a[1], b[0]) if self.config.transposed else (b[0], a[1])

    def _scale(self, module: str) -> float:
        """What the product of a module's factors is multiplied by."""
        rank = self.headers[self.factors[module][0]].shape[0]
        return self.config.scale(module, rank, f"the {CONFIG} of {self.source}")

    @torch.no_grad()
    def merge_into(self, model: nn.Module, expected: ExpectedParameters, family: Family) -> None:
        """Add the products of the factors to the weights: W + (alpha / r) B A (LoRA, 2106.09685, Eq. 3).

        Product and sum are taken in float32, and rounded once. Names are those of the authors' module file or of
        this library's; the product of a fused projection is split as its weight is. Tensors that the adapter holds
        whole replace the weights.

        Args:
            model: loaded.
            expected: its parameters, by the names of its files.
            family: of the model, which `check` has passed.

        Raises:
            ValueError: a weight that is tied or offloaded, or a product that is not finite.
        """
        weights = dict(model.named_parameters(remove_duplicate=False))
        with safe_open(self.file, framework="pt") as held:
            for module, pair in sorted(self.factors.items()):
                a, b = (held.get_tensor(name).float() for name in pair)
                product = self._scale(module) * (b @ a)
                if not bool(product.isfinite().all()):
                    raise ValueError(
                        f"what {self.source} adds to {printable_name(module)} holds NaN or infinity: the adapter "
                        "is damaged, or its lora_alpha is; fetch it again"
                    )
                names, converter = _parameters_of(f"{module}.weight", expected, family, self.source)
                parts = _split(product.T if self.config.transposed else product, converter, names, model)
                _add(weights, dict(zip(names, parts, strict=True)), self.source)
            for name in self.whole:
                names, converter = _parameters_of(name, expected, family, self.source)
                parts = _split(held.get_tensor(name), converter, names, model)
                _replace(weights, dict(zip(names, parts, strict=True)), self.source)
        extras: Any = model
        extras.merged_adapter = Path(self.source).name


def _parameters_of(
    name: str, expected: ExpectedParameters, family: Family, source: str
) -> tuple[list[str], WeightConverter | None]:
    """The parameters that a weight of the adapter becomes, and what splits it.

    Raises:
        ValueError: the model has no such parameter, or it is joined of several.
    """
    names, converter = splitting_of(name.removeprefix(_PREFIX), expected, family)
    if converter is not None and len(converter.target_patterns) == 1:
        raise ValueError(
            f"{source} changes {printable_name(name)}, which is joined with others while loading; merge it with "
            "PEFT, and load the result"
        )
    if missing := [one for one in names if one not in expected.shapes]:
        raise ValueError(
            f"{source} changes {printable_name(missing[0])}, which this model does not have; is it an adapter of "
            "another model?"
        )
    return names, converter


def _files(source: str) -> tuple[dict[str, Any], str]:
    if not Path(source).is_dir():  # on the hub, or the reason why it cannot be had
        found: dict[str, str | None] = {name: needed_file(source, name, {}) for name in (CONFIG, WEIGHTS)}
    else:
        found = {name: optional_file(source, name, {}) for name in (CONFIG, WEIGHTS)}
    for name, path in found.items():
        if path is None:
            pickled = optional_file(source, "adapter_model.bin", {}) if name == WEIGHTS else None
            why = "; pickled weights are refused, since loading them executes code" if pickled else ""
            raise FileNotFoundError(f"the adapter {source} has no {name}{why}")
    return read_object(str(found[CONFIG]), f"the {CONFIG} of {source}"), str(found[WEIGHTS])


def _grouped(names: list[str], source: str) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """The names of both factors of every module, and those of tensors that are held whole."""
    pairs: dict[str, dict[str, str]] = {}
    whole = []
    for name in names:
        if match := _LORA.match(name):
            pairs.setdefault(match["module"].removeprefix(_PREFIX), {})[match["factor"]] = name
        elif "lora_" in name:
            raise ValueError(
                f"{source} holds {printable_name(name)}, which is no factor of a weight; merge it with PEFT"
            )
        else:
            whole.append(name)
    for module, held in pairs.items():
        if len(held) < 2:
            raise ValueError(f"{source} holds one factor of {printable_name(module)} alone; fetch the files again")
    return {module: (held["A"], held["B"]) for module, held in pairs.items()}, tuple(whole)


def _split(value: Tensor, converter: WeightConverter | None, names: list[str], model: Any) -> list[Tensor]:
    """A tensor as the parameters that it becomes, rearranged as its weight is while loading."""
    if converter is None:
        return [value]
    parts: dict[str, Any] = {converter.source_patterns[0]: value}
    sources, targets = list(converter.source_patterns), list(converter.target_patterns)
    for operation in converter.operations:
        given = {"source_patterns": sources, "target_patterns": targets, "full_layer_name": names[0]}
        parts = operation.convert(parts, **given, model=model, config=model.config)
    return [parts[target] for target in targets]


def _add(weights: Mapping[str, nn.Parameter], parts: Mapping[str, Tensor], source: str) -> None:
    for name, part in parts.items():
        _check(weights, name, source)
        wide = torch.promote_types(weights[name].dtype, torch.float32)
        weights[name].copy_(weights[name].to(wide) + part.to(weights[name].device, wide))


def _replace(weights: Mapping[str, nn.Parameter], parts: Mapping[str, Tensor], source: str) -> None:
    for name, part in parts.items():
        _check(weights, name, source)
        weights[name].copy_(part)


def _check(weights: Mapping[str, nn.Parameter], name: str, source: str) -> None:
    """Refuse a parameter that has another name too, or is offloaded.

    Raises:
        ValueError: naming it.
    """
    weight = weights[name]
    if tied := next((other for other, value in weights.items() if value is weight and other != name), None):
        raise ValueError(f"{source} changes {name}, which is {tied} too in this model; merge it with PEFT")
    if weight.is_meta:
        raise ValueError(f"{name} is offloaded, so that {source} cannot be merged into it; load without offloading")


def _of_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that is a module's name, or its end; after "^" the whole name."""
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^").replace("\\.", ".")
        if module == name or (not pattern.startswith("^") and module.endswith(f".{name}")):
            return value
    return default


def _positive(value: Any) -> bool:
    """Whether a value is a number above 0 that a float can be; an int may be larger than all of these."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
