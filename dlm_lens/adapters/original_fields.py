"""The fields of config.json that the authors' code reads, beside the names of transformers' config classes."""

from collections.abc import Mapping
from typing import Any, ClassVar


class OriginalFields:
    """Mixin before a config of transformers: it is written with the authors' names too, which their code reads.

    For a field that is missing their code takes the default of its own config class, without an error: a LLaDA's
    theta of 500,000 would be 10,000. transformers 5 writes neither the authors' names nor `rope_theta`,
    `partial_rotary_factor` and `rope_scaling`, which it keeps in `rope_parameters`.

    Attributes:
        original_names: fields of the authors' config -> the names of the host's.
        original_options: options that no released checkpoint varies -> their values.
        original_class: the authors' class of the network with its head, by which inference engines choose theirs;
            None where this library's has the same name.
        original_properties: names of the host that the authors' config class derives and cannot be given.
    """

    original_names: ClassVar[Mapping[str, str]] = {}
    original_options: ClassVar[Mapping[str, Any]] = {}
    original_class: ClassVar[str | None] = None
    original_properties: ClassVar[frozenset[str]] = frozenset()

    def take_original_names(self, given: dict[str, Any]) -> None:
        """Take the values under the authors' names out of a config's arguments, before the host reads its own."""
        for theirs, ours in self.original_names.items():
            if (value := given.pop(theirs, None)) is not None:
                setattr(self, ours, value)

    def to_dict(self) -> dict[str, Any]:
        """The host's names and those that the authors' code reads."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        own = {theirs: values.get(ours, getattr(self, ours)) for theirs, ours in self.original_names.items()}
        return {**values, **rotary_fields(values.get("rope_parameters") or {}), **self.original_options, **own}

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds: the fields that the authors' config class takes, and their class."""
        values: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        values |= {} if self.original_class is None else {"architectures": [self.original_class]}
        return {name: value for name, value in values.items() if name not in self.original_properties}


def rotary_fields(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which transformers before 5 keeps `rope_parameters`; none where kinds of layers differ."""
    if any(isinstance(value, Mapping) for value in rotary.values()):
        return {}
    outside = {name: rotary[name] for name in ("rope_theta", "partial_rotary_factor") if name in rotary}
    if rotary.get("rope_type", "default") == "default":
        return outside
    return {**outside, "rope_scaling": {name: value for name, value in rotary.items() if name not in outside}}
