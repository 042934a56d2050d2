"""Files of clocks: what `DenoisingClock.save` writes and `DenoisingClock.load` reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dlm_lens.files.atomic_writes import remove_stale
from dlm_lens.files.paths import made_file_path, user_path
from dlm_lens.files.sealed_json import DamagedFileError, Document, fitted, naming, parsed
from dlm_lens.files.tensor_files import metadata_of, read_with_metadata, write_tensors
from dlm_lens.printable import shown
from dlm_lens.probes.clock.fitting import GroupMeans
from dlm_lens.probes.clock.readings import BASELINES, ClockReading
from dlm_lens.probes.clock.states import EMBEDDING, POSITIONS, QUANTITIES, TARGETS
from dlm_lens.shapes import tensor_axes

if TYPE_CHECKING:
    from dlm_lens.probes.clock.clocks import DenoisingClock

FORMAT = "dlm-lens clock 1"

REMEDY = "write one with denoising_clock(...).save(path)"


LARGEST = 2**63
"""Above every count and seed: the bound of torch's whole numbers."""


class ClockFacts(Document):
    """The metadata of a saved clock; `longest` and `lines` are those of `GroupMeans` and `ClockReading`."""

    model: str
    digest: str
    target: str
    prompts: int
    classes: list[str]
    layers: list[int]
    longest: int
    lines: dict[str, list[float]]
    seed: int


def write_saved(clock: "DenoisingClock", path: str | Path) -> Path:
    """`DenoisingClock.save`."""
    path, reading = made_file_path(path), clock.reading
    about = {
        "model": clock.model, "digest": clock.digest, "target": clock.target, "prompts": clock.prompts,
        "classes": clock.classes, "layers": clock.layers, "longest": clock.baselines["token"].longest,
        "lines": reading.lines, "seed": reading.seed,
    }  # fmt: skip
    remove_stale(path.parent)
    holders = {"": clock, "reading.": reading, **{f"{name}.": one for name, one in clock.baselines.items()}}
    tensors = {f"{at}{name}": getattr(one, name) for at, one in holders.items() for name in tensor_axes(type(one))}
    write_tensors(path, tensors, {"format": FORMAT, "clock": json.dumps(about)})
    return path


def read_saved(kind: "type[DenoisingClock]", path: str | Path, model: Any) -> "DenoisingClock":
    """`DenoisingClock.load`."""
    path = user_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; DenoisingClock.save writes one")
    version = metadata_of(path, REMEDY, "clock").get("format")
    if version != FORMAT:
        raise ValueError(f"{path} is no clock of this version (its format is {version!r:.80}); {REMEDY}")
    tensors, metadata = read_with_metadata(path, REMEDY)
    about = fitted(ClockFacts, parsed(metadata.get("clock", ""), path, REMEDY), path, REMEDY)
    _check_facts(about, path)
    with naming(path, REMEDY):
        clock = _clock_of(kind, about, tensors, path)
        if model is not None:
            clock.check(model)
    return clock


def _check_facts(about: ClockFacts, path: Path) -> None:
    """Raise unless the facts are those that a clock can have.

    Raises:
        DamagedFileError: naming the first that is not.
    """
    right = {
        "target": about.target in TARGETS,
        "prompts": 1 <= about.prompts < LARGEST,
        "classes": bool(about.classes) and about.classes == [one for one in POSITIONS if one in about.classes],
        "layers": about.layers[:1] == [EMBEDDING] and about.layers == sorted(set(about.layers)),
        "longest": 1 <= about.longest < LARGEST,
        "lines": [*about.lines] == [*QUANTITIES] and all(len(line) == 2 for line in about.lines.values()),
        "seed": 0 <= about.seed < LARGEST,
    }
    for name, fits in right.items():
        if not fits:
            value = shown(getattr(about, name))
            raise DamagedFileError(f"{path} is damaged (no clock has {name} {value:.200}); {REMEDY}")


def _clock_of(
    kind: "type[DenoisingClock]", about: ClockFacts, tensors: Mapping[str, Tensor], path: Path
) -> "DenoisingClock":
    """The clock of facts and tensors; the classes compare the shapes.

    Raises:
        ValueError: a tensor is missing, too much, or of another shape.
    """
    kinds = {"": kind, "reading.": ClockReading, **{f"{name}.": GroupMeans for name in BASELINES}}
    names = {at: tuple(tensor_axes(one)) for at, one in kinds.items()}
    if set(tensors) != {f"{at}{name}" for at, each in names.items() for name in each}:
        raise DamagedFileError(f"{path} is damaged (it holds {shown(sorted(tensors)):.200}); {REMEDY}")
    of = {at: {name: tensors[f"{at}{name}"] for name in each} for at, each in names.items()}
    lines = {name: (a, b) for name, (a, b) in about.lines.items()}
    reading = ClockReading(
        classes=tuple(about.classes), layers=tuple(about.layers), lines=lines, seed=about.seed, **of["reading."]
    )
    baselines = {name: GroupMeans(**of[f"{name}."], longest=about.longest) for name in BASELINES}
    sizes = {name: tuple(one.sums.shape) for name, one in baselines.items()}
    if sizes["position"][1] != 2 * about.longest + 1 or {one[0] for one in sizes.values()} != {len(about.classes)}:
        raise DamagedFileError(f"{path} is damaged (its baselines have the shapes {sizes}); {REMEDY}")
    return kind(
        reading=reading, target=about.target, prompts=about.prompts, baselines=baselines, model=about.model,
        digest=about.digest, **of[""],
    )  # fmt: skip
