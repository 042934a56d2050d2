"""The tensors of a checkpoint, by the headers of its files: checked against its config before anything is built."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

from dlm_lens.adapters.config_fields import written_name
from dlm_lens.adapters.parameter_names import (
    ExpectedParameters,
    converted_tensor,
    depth_field,
    expected_parameters,
    fused_shapes,
    renamed_tensor,
)
from dlm_lens.adapters.registry import Family
from dlm_lens.files.paths import check_utf8
from dlm_lens.printable import printable_name, shown

LONGEST_HEADER = 100_000_000
"""Bytes, the safetensors library's own bound."""

MOST_TENSORS = 1_000_000
LONGEST_TENSOR_NAME = 1000
"""Characters; a number in a longer name may have more digits than Python reads."""

MOST_AXIS_FIELDS = 16

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of an element, by the names of safetensors headers."""


@dataclass(frozen=True)
class TensorHeader:
    """The header of one tensor.

    Args:
        dtype: by safetensors' name.
        shape: of the tensor.
        size: bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    size: int


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Name -> dtype, shape and size of every tensor of a safetensors file.

    Raises:
        ValueError: no safetensors file, one cut short, a header that contradicts itself, or a path that is not
            UTF-8.
    """
    check_utf8(file)
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start == b"version ":
            raise ValueError(f"{file} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        length = int.from_bytes(start, "little")
        if len(start) == 8 and LONGEST_HEADER < length <= size - 8:
            raise _unreadable(file, f"a header of {length} bytes, {LONGEST_HEADER} is the most")
        content = opened.read(length) if 0 < length <= size - 8 else b""
    try:
        header = json.loads(content.decode("utf-8"), object_pairs_hook=_without_repetition)
    except _RepeatedNameError as error:
        raise _unreadable(file, f"its header holds {printable_name(str(error))} twice") from None
    except (ValueError, RecursionError):
        raise _unreadable(file) from None
    if not isinstance(header, dict):
        raise _unreadable(file)
    header.pop("__metadata__", None)
    if len(header) > MOST_TENSORS:
        raise _unreadable(file, f"{len(header)} tensors, {MOST_TENSORS} is the most")
    entries = {name: _entry(file, name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, begin, stop) in sorted(entries.items(), key=lambda item: item[1][1:]):
        if begin != end:
            what = "overlaps another tensor" if begin < end else "leaves a gap before it"
            raise _unreadable(file, f"{printable_name(name)} {what}")
        end = stop
    needed = 8 + length + end
    if size < needed:
        raise ValueError(f"{file} is cut short, {size} of {needed} bytes; fetch it again")
    if size > needed:
        raise _unreadable(file, f"{size - needed} bytes follow its last tensor")
    return {name: entry for name, (entry, _, _) in entries.items()}


def _entry(file: Path, name: str, entry: Any) -> tuple[TensorHeader, int, int]:
    """The header of one tensor, and the offsets at which its numbers begin and end."""
    what = printable_name(name)
    if len(name) > LONGEST_TENSOR_NAME:
        raise _unreadable(file, f"a name of {len(name)} characters, {LONGEST_TENSOR_NAME} is the most: {what}")
    if not isinstance(entry, Mapping):
        raise _unreadable(file, f"{what} is described by {shown(entry)}")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _unreadable(file, f"{what} has the dtype {shown(dtype)}, none of safetensors'")
    if not _whole(shape) or len(shape) > MOST_AXIS_FIELDS:
        raise _unreadable(file, f"{what} has the shape {shown(shape)}")
    if not _whole(offsets) or len(offsets) != 2:
        raise _unreadable(file, f"{what} has the offsets {shown(offsets)}")
    begin, end = offsets
    needed = -(-math.prod(shape) * BITS[dtype] // 8)
    if end - begin != needed:
        raise _unreadable(
            file,
            f"{what} of shape {shown(shape)} and dtype {dtype} needs {shown(needed)} bytes and has "
            f"{shown(end - begin)}",
        )
    return TensorHeader(dtype, tuple(shape), needed), begin, end


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _unreadable(file: Path, why: str = "") -> ValueError:
    return ValueError(f"{file} is no readable safetensors file{f' ({why})' if why else ''}; fetch it again")


class _RepeatedNameError(Exception):
    pass


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _RepeatedNameError(name)
        found[name] = value
    return found


MISFITS = {
    "missing_keys": "fetch the files again, or check that config.json is of the same model",
    "unexpected_keys": "config.json describes a smaller or another model: take the one that came with the weights",
    "mismatched_keys": "config.json describes another size: take the one that came with the weights",
}
"""Problems in a loading report -> the remedy."""

_HEADS, _GROUPS = "num_attention_heads", "num_key_value_heads"
AXIS_FIELDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "embed_tokens.weight": (("vocab_size", "num_sinks"), ("hidden_size",)),
    "wte.weight": (("vocab_size", "num_sinks"), ("hidden_size",)),
    "embed_tokens.sinks": (("num_sinks",), ("hidden_size",)),
    "lm_head.weight": (("vocab_size",), ("hidden_size",)),
    "q_proj.weight": ((_HEADS, "head_dim"), ("hidden_size",)),
    "k_proj.weight": ((_GROUPS, "head_dim"), ("hidden_size",)),
    "v_proj.weight": ((_GROUPS, "head_dim"), ("hidden_size",)),
    "attn.attn.weight": ((_HEADS, _GROUPS, "head_dim"), ("hidden_size",)),
    "o_proj.weight": (("hidden_size",), (_HEADS, "head_dim")),
    "self_attn.gate_proj.weight": ((_HEADS, "head_dim"), ("hidden_size",)),
    "sink_logits": ((_HEADS,),),
    "mlp.gate_proj.weight": (("intermediate_size",), ("hidden_size",)),
    "mlp.up_proj.weight": (("intermediate_size",), ("hidden_size",)),
    "mlp.down_proj.weight": (("hidden_size",), ("intermediate_size",)),
    "norm.weight": (("hidden_size",),),
}
"""Ends of parameter names -> the fields of Llama's config that each axis is the product of."""

FLOATING = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Dtypes of weights, by safetensors' names; torch computes with no smaller ones."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """The tensors of all files of a checkpoint.

    Raises:
        ValueError: a damaged file, or a tensor that two files hold.
    """
    found: dict[str, TensorHeader] = {}
    for file in files:
        header = read_header(file)
        twice = next((name for name in header if name in found), None)
        if twice is not None:
            raise ValueError(f"{file} holds {printable_name(twice)} a second time; fetch the checkpoint again")
        found |= header
    return found


def check_shapes(
    source: str,
    what: str,
    headers: Mapping[str, TensorHeader],
    family: Family,
    model_class: type[PreTrainedModel],
    config: Any,
    values: Mapping[str, Any],
    renames: Mapping[str, str] = MappingProxyType({}),
    *,
    packed: bool = False,
) -> None:
    """Refuse weights that do not fit the network of the config, without reading or allocating any weight.

    Args:
        source: name of the weights in messages.
        what: name of the config in messages.
        headers: of the weights' files.
        family: of the model.
        model_class: of the model.
        config: of the model.
        values: of config.json, for the names of its fields.
        renames: pattern -> replacement in the names of the files' tensors, before those of the model class.
        packed: whether the files are quantised, so that their shapes are the method's; then only layers count.

    Raises:
        ValueError: with the field, the config's value and the files', or with the tensors' names.
    """
    expected = expected_parameters(model_class, config, what, family, renames, layers=1)
    stored = {renamed_tensor(name, expected, 0): name for name in headers}
    layer = expected.layer
    layers = {
        int(found.group(1)) for name in stored if (found := layer.search(name)) and not expected.ignores(name)
    }
    count, field = getattr(config, depth_field(config)), written_name(depth_field(config), values)
    cause = f"{what} says {field} = {count}, the files hold {len(layers)} layers: " if count != len(layers) else ""
    if count > len(layers):
        raise ValueError(
            f"the weights in {source} do not fit {model_class.__name__}: {cause}missing keys of layers "
            f"{len(layers)} to {count - 1}; {MISFITS['missing_keys']}"
        )
    if packed:
        return
    expected = expected_parameters(model_class, config, what, family, renames)
    stored = {renamed_tensor(name, expected, count): name for name in headers}
    whole = fused_shapes(expected.shapes, stored, family)
    joined = _take_joined(stored, whole, expected)
    _check_experts(source, joined, headers)
    problems = {
        "missing_keys": [*_missing(whole, stored, expected), *_missing_experts(joined)],
        "unexpected_keys": [printable_name(name) for name in sorted(stored) if _surplus(name, whole, expected)],
        "mismatched_keys": [
            f"{name} ({list(headers[stored[name]].shape)} in the file, {list(shape)} in the model)"
            for name, shape in sorted(whole.items())
            if name in stored and headers[stored[name]].shape != shape
        ],
    }
    differing = [name for name in sorted(whole) if name in stored and headers[stored[name]].shape != whole[name]]
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            if kind == "unexpected_keys" and values.get("add_cross_attention") is True:
                raise ValueError(
                    f"{what} says add_cross_attention = true, and the weights in {source} hold attention to an "
                    "encoder, which load leaves out: load it with transformers, and use dlm_lens.add_hook_points"
                )
            if kind == "mismatched_keys":
                cause = _differences(differing, whole, stored, headers, config, values, what)
            raise ValueError(
                f"the weights in {source} do not fit {model_class.__name__}: {cause}{kind.replace('_', ' ')} "
                f"{', '.join(names[:5])}{more}; {MISFITS[kind]}"
            )
    floating = sorted(whole.keys() - expected.whole_numbers)
    of_files = [stored[name] for name in floating if name in stored]
    _check_dtypes(source, what, [*of_files, *(name for name in joined.names if name in joined.floating)], headers)


@dataclass(frozen=True)
class _Joined:
    """The tensors of the files that transformers joins or splits.

    Args:
        names: of them.
        floating: those that become parameters of floating-point numbers.
        experts: of each matrix of a layer's experts (its name before and after the number): expert -> name.
        counts: likewise, how many experts the network has.
    """

    names: list[str]
    floating: set[str]
    experts: dict[tuple[str, str], dict[int, str]]
    counts: dict[tuple[str, str], int]


def _take_joined(
    stored: dict[str, str], whole: dict[str, tuple[int, ...]], expected: ExpectedParameters
) -> _Joined:
    """Take out of both what transformers joins or splits, whose sizes its loading report tells of."""
    joined = _Joined([], set(), {}, {})
    for name, source_name in list(stored.items()):
        if made := converted_tensor(source_name, expected):
            del stored[name]
            joined.names.append(source_name)
            if not expected.whole_numbers.issuperset(made):
                joined.floating.add(source_name)
            for parameter in made:
                whole.pop(parameter, None)
            if found := _EXPERT.search(source_name):
                key = (source_name[: found.start()], source_name[found.end() :])
                joined.experts.setdefault(key, {})[int(found.group(1))] = source_name
                joined.counts[key] = expected.shapes.get(made[0], (MOST_TENSORS,))[0]
    return joined


def _check_experts(source: str, joined: _Joined, headers: Mapping[str, TensorHeader]) -> None:
    """Refuse experts of one layer whose matrices have several shapes, which transformers cannot join."""
    for held in joined.experts.values():
        shapes = {name: headers[name].shape for name in held.values()}
        usual, _ = Counter(shapes.values()).most_common(1)[0]
        if other := next((name for name, shape in sorted(shapes.items()) if shape != usual), None):
            raise ValueError(
                f"{printable_name(other)} in {source} has the shape {list(shapes[other])}, and that matrix of the "
                f"other experts {list(usual)}: the files are damaged, fetch them again"
            )


def _check_dtypes(source: str, what: str, names: Iterable[str], headers: Mapping[str, TensorHeader]) -> None:
    """Refuse weights that are no floating-point numbers, where no quantisation explains them."""
    for name in names:
        if (dtype := headers[name].dtype) not in FLOATING:
            raise ValueError(
                f"{printable_name(name)} in {source} has the dtype {dtype}, and {what} has no "
                "quantization_config that says how to read it: take the file that came with the weights"
            )


def _missing(whole: Mapping[str, Any], stored: Mapping[str, str], expected: ExpectedParameters) -> list[str]:
    """Parameters that no file holds, themselves, in a fused tensor, or under the name that they are tied to."""
    tied = dict(expected.tied) | {source: target for target, source in expected.tied.items()}
    held = stored.keys() | (expected.shapes.keys() - whole.keys())  # what a fused tensor holds is not in `whole`
    return [name for name in sorted(whole) if name not in held and tied.get(name) not in held]


def _missing_experts(joined: _Joined) -> list[str]:
    """Experts of which the files hold some matrices and not others.

    An expert that passes its input on (LongCat-Flash) may lack some: the network has fewer of these matrices.
    """
    of_layer: dict[str, set[int]] = {}
    for (layer, _), held in joined.experts.items():
        of_layer[layer] = of_layer.get(layer, set()) | held.keys()
    return [
        printable_name(f"{layer}.experts.{one}.{rest}")
        for (layer, rest), held in sorted(joined.experts.items())
        for one in sorted(of_layer[layer] - held.keys())
        if one < joined.counts[layer, rest]
    ]


def _surplus(name: str, whole: Mapping[str, Any], expected: ExpectedParameters) -> bool:
    return name not in whole and not expected.ignores(name)


def _differences(
    names: Sequence[str],
    whole: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, str],
    headers: Mapping[str, TensorHeader],
    config: Any,
    values: Mapping[str, Any],
    what: str,
) -> str:
    """The fields that the files contradict, with both values: those that alone decide a size first."""
    cause: dict[str, str] = {}
    for alone in (True, False):
        for name in names:
            shape, found = whole[name], headers[stored[name]].shape
            axes = next((axes for end, axes in AXIS_FIELDS.items() if name.endswith(end)), None)
            if axes is None or len(shape) != len(found):
                continue
            for axis, parts in enumerate(axes):
                if shape[axis] != found[axis] and (len(parts) == 1) is alone and not (cause and not alone):
                    written = " and ".join(
                        f"{written_name(part, values)} = {getattr(config, part, None)}" for part in parts
                    )
                    cause.setdefault(
                        written,
                        f"{what} says {written}, the file's {printable_name(stored[name])} has {found[axis]}",
                    )
    return "".join(f"{sentence}; " for sentence in list(cause.values())[:3])


def described(key: Any) -> str:
    """A weight's name; of one with another shape, the shapes too."""
    if isinstance(key, str):
        return key
    name, *shapes = key
    return (
        f"{name} ({' in the file, '.join(str(list(shape)) for shape in shapes)} in the model)" if shapes else name
    )
