"""`sampler_settings`: what a model's sampler takes, what a run has without it, and what each setting means."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from textwrap import fill
from typing import TYPE_CHECKING, Any

from dlm_lens.arguments import checked_arguments
from dlm_lens.display import Cell, Line, Preview, ShowsItself
from dlm_lens.sampling.algorithm_registry import Algorithm, algorithm_of
from dlm_lens.sampling.settings import check_model

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class SamplerSetting:
    """A setting of a sampler.

    Args:
        name: as `denoise` takes it.
        value: of a run that is given none of them; None also where the sampler does not use it.
        type: of its values, as Python writes it.
        meaning: what it does.
    """

    name: str
    value: Any
    type: str
    meaning: str


@dataclass(frozen=True, repr=False)
class SamplerSettings(ShowsItself):
    """The settings of a sampler; printed, a paragraph for each.

    Args:
        sampler: its name.
        source: whose code it follows.
        confidence: what `DenoisingRun.confidence` is in its runs.
        settings: in the order of its dataclass.
    """

    sampler: str
    source: str
    confidence: str
    settings: tuple[SamplerSetting, ...]

    def __repr__(self) -> str:
        return f"SamplerSettings({self.sampler}: {', '.join(one.name for one in self.settings)})"

    def __str__(self) -> str:
        head = [self.source, f"confidence: {self.confidence}"]
        each = [f"{one.name} = {one.value!r} ({one.type}): {one.meaning}" for one in self.settings]
        texts = [fill(text, 110, initial_indent="  ", subsequent_indent="      ") for text in head + each]
        return "\n".join([self.sampler, *texts])

    def _preview(self) -> Preview:
        lines = [Line(f"{one.name} = {one.value!r}", [Cell(one.meaning)]) for one in self.settings]
        head = [Line("", [Cell(self.source)]), Line("confidence", [Cell(self.confidence)])]
        return Preview(lines=head + lines, note="as a DataFrame: .table()")

    def table(self) -> "DataFrame":
        """A row for each setting, with the columns value, type and meaning."""
        from pandas import DataFrame

        rows = [(one.name, one.value, one.type, one.meaning) for one in self.settings]
        return DataFrame(rows, columns=["setting", "value", "type", "meaning"], dtype=object).set_index("setting")


@checked_arguments()
def sampler_settings(model: Any) -> SamplerSettings:
    """The settings that `denoise` takes for a model beside its own arguments, and what each means.

    Args:
        model: from `dlm_lens.load`.

    Raises:
        ValueError: not such a model.
    """
    check_model(model)
    return settings_of_sampler(algorithm_of(model.config), model.sampler_defaults)


def settings_of_sampler(algorithm: Algorithm, defaults: Mapping[str, Any]) -> SamplerSettings:
    """The settings of an algorithm, for checkpoints with these defaults (all that a run needs)."""
    values, meanings = algorithm.resolved(defaults, {}, whole=False), _meanings(algorithm.settings)
    found = tuple(
        SamplerSetting(
            one.name,
            values.get(one.name, None if one.default is MISSING else one.default),
            inspect.formatannotation(one.type),
            meanings.get(one.name, ""),
        )
        for one in fields(algorithm.settings)
    )
    source = (inspect.getdoc(algorithm.settings) or "").partition("\n")[0]
    return SamplerSettings(algorithm.name, source, algorithm.confidence, found)


def _meanings(settings: type) -> dict[str, str]:
    """Name -> what the docstring of a dataclass says of it, or that of the class which it extends."""
    found: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        for names, meaning in _arguments(inspect.cleandoc(kind.__doc__ or "")):
            found |= dict.fromkeys(names.split(", "), meaning)
    return found


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """The names and texts of the section "Args:" of a docstring."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)+)", docstring, re.MULTILINE)
    for entry in re.split(r"^    (?=\w)", section[1] if section else "", flags=re.MULTILINE)[1:]:
        names, _, meaning = entry.partition(": ")
        yield names, " ".join(meaning.split())
