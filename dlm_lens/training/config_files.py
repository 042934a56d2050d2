"""Settings from YAML files, shipped or the user's own, with overrides; every mistake gets a one-line error."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from dlm_lens.arguments import near_name
from dlm_lens.option_values import check_once
from dlm_lens.printable import shown

if TYPE_CHECKING:
    from dlm_lens.training.settings import TrainingSettings

CONFIGS = Path(__file__).parent / "configs"

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "sink": {"sinks": 1, "position": "front"},  # sees only itself and is seen by all: Eq. 5 and 6
    "gated": {"sinks": 0, "gated": True},  # gated attention in place of a sink: A.2
    "end": {"sinks": 1, "position": "end"},  # Table 3, Eq. 7
    "sinks2": {"sinks": 2, "position": "front"},  # Table 4; each sees only itself: Eq. 6 read for more than one
    "sinks4": {"sinks": 4, "position": "front"},
    "zero-value": {"sinks": 1, "position": "front", "zero_value": True},  # Table 5: its value is 0 in every layer
    "off-by-one": {"sinks": 0, "softmax": "off_by_one"},  # not in the paper: exp(s) / (1 + sum exp(s))
}
"""Settings of the model in the variants of "One Token Is Enough" (2601.19657), by the end of a config's name.

"qwen2.5-0.5b-sink" is the shipped "qwen2.5-0.5b" with those of "sink", in runs/qwen2.5-0.5b-sink.
"""

MISSING: Mapping[str, Collection[str]] = {"sft-gsm8k": VARIANTS, "smdm-472m": ("off-by-one",)}
"""Variants that a config has not: a fine-tuning keeps its checkpoint's, and SMDM's layers have one softmax."""

USUAL = "masked_diffusion"
"""The kind of an objective that names none."""


def shipped_configs() -> tuple[str, ...]:
    """Names of the shipped configs, and of their variants (`VARIANTS`)."""
    return tuple(sorted(_shipped()))


def _shipped() -> dict[str, tuple[str, str]]:
    """The name of every shipped config and variant -> its file's, and the variant's ("" for none)."""
    stems = [path.stem for path in CONFIGS.glob("*.yaml") if not path.stem.startswith("accelerate-")]
    found = {stem: (stem, "") for stem in stems}
    for stem in stems:
        found |= {f"{stem}-{end}": (stem, end) for end in VARIANTS if end not in MISSING.get(stem, ())}
    return found


def read_settings(name: str | Path, overrides: Sequence[str] = ()) -> "TrainingSettings":
    """Settings of a shipped config ("qwen2.5-0.5b-sink") or a YAML file, with overrides ("optimisation.rate=2e-4").

    A file may name another file in `base` and replaces its values. The `kind` of the objective is one of
    `training.settings.OBJECTIVES`. Where a file or an override changes it, the settings of the file below that
    only the kind before has are left out.

    Raises:
        FileNotFoundError: neither a file nor a shipped config.
        ValueError: invalid YAML, an unknown setting, one that is overridden twice, or a value of the wrong kind.
    """
    check_once(overrides)
    values = _read(name)
    given = [(override, *_parted(override)) for override in overrides]
    # Before the other overrides: what they set of an objective stays, and is refused where the kind lacks it.
    kinds = [value for _, key, value in given if key == "objective.kind"]
    if kinds and isinstance(values.get("objective"), dict):
        values["objective"] = _of_kind(values["objective"], {"kind": kinds[-1]})
    for override, key, value in given:
        _set(values, key.split("."), value, override)
    return build_settings(values)


def _parted(override: str) -> tuple[str, Any]:
    key, sign, value = override.partition("=")
    if not sign or not key:
        raise ValueError(f"the override {override!r} is not key=value, such as optimisation.rate=2e-4")
    return key, _override_value(override, value)


def _override_value(override: str, value: str) -> Any:
    try:
        return _loaded(value)
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split()) or "nested too deeply"
        raise ValueError(f"the override {shown(override)} is no YAML: {reason}") from error


def build_settings(values: Mapping[str, Any]) -> "TrainingSettings":
    """Settings from plain values.

    Raises:
        ValueError: an unknown setting, or a value of the wrong kind.
    """
    from dlm_lens.training.settings import OBJECTIVES, TrainingSettings

    given = dict(values)
    objective = given.pop("objective", None)
    objective = {} if objective is None else objective
    if not isinstance(objective, Mapping):
        raise ValueError(
            f"objective is {shown(objective)}; it has settings of its own: give objective.kind, one of "
            f"{', '.join(OBJECTIVES)}"
        )
    objective = dict(objective)
    kind = objective.pop("kind", USUAL)
    if not isinstance(kind, str) or kind not in OBJECTIVES:
        raise ValueError(f"objective.kind is {kind!r}; it must be one of {', '.join(map(repr, OBJECTIVES))}")
    _check_names(objective, OBJECTIVES[kind], "objective.")
    _check_names(given, TrainingSettings, "")
    given["objective"] = _validated(OBJECTIVES[kind], objective, "objective.")
    settings: TrainingSettings = _validated(TrainingSettings, given, "")
    return settings


def _validated(kind: Any, values: Mapping[str, Any], prefix: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = prefix + ".".join(str(part) for part in first["loc"])
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ValueError):
            raise ValueError(str(cause)) from None
        raise ValueError(f"the setting {where} is {shown(first['input'])}: {first['msg'].lower()}") from None


def _check_names(values: Mapping[str, Any], kind: Any, prefix: str) -> None:
    names = {field.name: field.default_factory for field in fields(kind)}
    types = get_type_hints(kind)
    for name, value in values.items():
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"there are {', '.join(names)}"
            raise ValueError(f"there is no setting {prefix}{name}; {hint}")
        if isinstance(value, bool) and bool not in (
            types[name],
            *get_args(types[name]),
        ):  # pydantic reads true as 1
            raise ValueError(f"the setting {prefix}{name} is {value}; it takes no truth value")
        if isinstance(value, Mapping) and is_dataclass(names[name]):
            _check_names(value, names[name], f"{prefix}{name}.")


def _read(name: str | Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a file, over those of its base; `above` are the files that have this one as their base."""
    path, variant, shipped = Path(name), "", _shipped()
    if not path.is_file() and str(name) in shipped:
        stem, variant = shipped[str(name)]
        path = CONFIGS / f"{stem}.yaml"
    if not path.is_file():
        hint = near_name(str(name), tuple(sorted(shipped)), {})
        files = ", ".join(sorted(stem for stem, end in shipped.values() if not end))
        raise FileNotFoundError(
            f"{name} is neither a file nor a shipped config{hint}: {files}; nor one with a variant's end, "
            f"-{', -'.join(VARIANTS)}"
        )
    own = {"output": f"runs/{name}", "model": dict(VARIANTS[variant])} if variant else {}
    chain = (*above, path.resolve())
    if path.resolve() in above:
        circle = " -> ".join(str(one) for one in chain[chain.index(path.resolve()) :])
        raise ValueError(f"base: goes in a circle, {circle}; a base must not name a file that is built on it")
    values = _parsed(path)
    base = values.pop("base", None)
    if base is None:
        return _merged(values, own)
    if not isinstance(base, str):
        raise ValueError(f"base is {shown(base)} in {path}; it must be the name of a file or of a shipped config")
    beside = path.parent / base
    return _merged(_merged(_read(beside if beside.is_file() else base, chain), values), own)


MOST_VALUES = 10_000
"""Values of a file; settings have a hundred. Aliases (&a, [*a, *a], ...) let a hundred bytes stand for billions."""


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds, which does not take the last of two values of a name in silence."""

    def get_single_node(self) -> yaml.Node | None:
        """The whole text as nodes.

        Raises:
            ConstructorError: more than `MOST_VALUES` values, counted wherever they are referred to.
        """
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _values_of(node, {}) > MOST_VALUES:
            what = (
                f"more than {MOST_VALUES} values, counted wherever an alias stands for them; leave the aliases out"
            )
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The mapping as it is written, before others are merged into it.

        Raises:
            ConstructorError: a name that is there twice.
        """
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            what = f"{twice} is given twice, leave one of them out"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        return node


def _values_of(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of values below a node; too many for one that holds itself. `known` has those of other nodes."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # until it is counted
        inner: Any = node.value if isinstance(node, yaml.CollectionNode) else ()
        below = (one for pair in inner for one in pair) if isinstance(node, yaml.MappingNode) else inner
        known[id(node)] = 1 + sum(_values_of(one, known) for one in below)
    return known[id(node)]


def _loaded(text: str) -> Any:
    return yaml.load(text, Loader=_BoundedLoader)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        values = _loaded(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to hold settings") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {values!r:.40}; it must hold settings, name: value")
    return values


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        held = merged.get(name)
        if isinstance(value, dict) and isinstance(held, dict):
            value = _merged(_of_kind(held, value) if name == "objective" else held, value)
        merged[name] = value
    return merged


def _of_kind(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """The settings of an objective, without those that only its kind has where `above` changes the kind."""
    from dlm_lens.training.settings import OBJECTIVES

    before = below.get("kind", USUAL)
    kinds = (before, above.get("kind", before))
    if not all(isinstance(kind, str) and kind in OBJECTIVES for kind in kinds):
        return below
    old, new = ({field.name for field in fields(OBJECTIVES[kind])} for kind in kinds)
    # A name that no kind has stays, and is refused.
    return {name: value for name, value in below.items() if name not in old - new}


def _set(values: dict[str, Any], path: Sequence[str], value: Any, override: str) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ValueError(f"the override {override!r} goes below {name}, which is a value")
    values[path[-1]] = value


NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None",
         Path: "a path"}  # fmt: skip


def check_types(settings: Any, prefix: str = "") -> None:
    """Raise where a field of a dataclass has a value of another type; a config file is checked before it is built.

    Args:
        settings: the dataclass. Fields of a Literal have their own check, and one of another kind has none.
        prefix: of the fields' names, such as "data.".

    Raises:
        ValueError: naming the field, its value and what it must be.
    """
    for name, kind in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if not _fits(value, kind):
            raise ValueError(f"{prefix}{name} is {shown(value)}; it must be {_said(kind)}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        first = get_args(kind)[0]
        return isinstance(value, list | tuple) and all(_fits(each, first) for each in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in NAMES or is_dataclass(kind) else True


def _said(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_said(each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, and each part {_said(get_args(kind)[0])}"
    return NAMES.get(kind) or f"a {kind.__name__}"
