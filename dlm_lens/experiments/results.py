"""`ResultsFile`: the results of one process, one line per item; `Results`: the results of all processes."""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from dlm_lens.files.atomic_writes import open_to_append, sync_directory
from dlm_lens.files.locks import held, lock
from dlm_lens.files.sealed_json import (
    DamagedFileError,
    Document,
    append_lines,
    cut_incomplete_line,
    file_bytes,
    fitted,
    read_lines,
)

logger = logging.getLogger(__name__)

PATTERN = "results*.jsonl"

Settings = Mapping[str, Any]
"""Settings of an experiment: JSON values by name."""

Item = Mapping[str, Any]
"""One unit of work, such as a model, a condition and some prompts: JSON values by name."""


TRAINED = re.compile(r"toy-(blocks|uniform)|converted-.+|.+-converted")
"""Names of the DLMs that experiments train, whose results note them by the directories of their weights."""


def key_of(item: Item) -> str:
    """An item as text, the same for equal items."""
    return json.dumps(item, sort_keys=True)


class ConfigLine(Document):
    """The config that the results depend on; the first line of a file, and one wherever the run has grown."""

    config: dict[str, Any]
    grows: list[str] = Field(default_factory=list)


class SessionLine(Document):
    """Library versions and machine of one start."""

    session: dict[str, Any]


class WeightsLine(Document):
    """The digest of a model's weights, and whether it is an AR model."""

    weights: dict[str, str]
    causal: dict[str, bool] = Field(default_factory=dict)


class ItemLine(Document):
    """A finished item."""

    item: dict[str, Any]
    value: dict[str, Any]
    seconds: float


LINES: Mapping[str, type[Document]] = {
    "config": ConfigLine,
    "session": SessionLine,
    "weights": WeightsLine,
    "item": ItemLine,
}
"""The lines of a results file, by the field that tells them apart."""


@dataclass(frozen=True)
class Record:
    """One finished item.

    Args:
        item: the unit of work.
        value: its result.
        seconds: computing time.
    """

    item: Item
    value: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Results:
    """The finished items of a run, in the order in which the experiment lists them.

    Args:
        config: experiment, scale and settings.
        records: finished items.
        missing: how many are not finished.
        left_out: how many are finished and left out, because another network or condition lacks their prompts.
        sessions: versions and machine of every start.
        weights: digest of every model's weights.
        causal: whether each model that was loaded is autoregressive.
    """

    config: Mapping[str, Any]
    records: Sequence[Record]
    missing: int = 0
    sessions: Sequence[Mapping[str, Any]] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    causal: Mapping[str, bool] = field(default_factory=dict)
    left_out: int = 0

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings."""
        settings: Mapping[str, Any] = self.config["settings"]
        return settings

    @property
    def seconds(self) -> float:
        """Computing time of all items together."""
        return sum(record.seconds for record in self.records)

    @cached_property
    def models(self) -> list[str]:
        """The models of the records, in order."""
        return list(dict.fromkeys(record.item["model"] for record in self.records if "model" in record.item))

    def is_causal(self, model: str) -> bool:
        """Whether a model is autoregressive, as its loading noted; `TRAINED` names are of DLMs.

        Raises:
            ValueError: the results do not say it.
        """
        if model in self.causal:
            return self.causal[model]
        if TRAINED.fullmatch(model):
            return False
        raise ValueError(
            f"these results do not record whether {model} is autoregressive; compute them again with this version"
        )

    @property
    def diffusion_models(self) -> list[str]:
        """The models that are not autoregressive, in order."""
        return [model for model in self.models if not self.is_causal(model)]

    def where(self, **wanted: Any) -> list[Record]:
        """The records whose items have these values."""
        found = list(self.records)
        for name, value in wanted.items():
            found = [record for record in found if record.item.get(name) == value]
        return found

    @property
    def unfinished(self) -> str:
        """How much of an unfinished run is missing or left out, in a sentence; empty for a finished run."""
        if not self.missing:
            return ""
        every = len(self.records) + self.left_out + self.missing
        lacking = (
            f"; of the finished ones {self.left_out} are left out, because another network or condition of the "
            "same model does not have their prompts yet"
            if self.left_out
            else ""
        )
        return f"Unfinished: {self.missing} of {every} items are missing{lacking}."

    def with_shared_prompts(self, planned: Sequence[Item]) -> "Results":
        """The results with, for every model, only the prompts that all of its networks and conditions have.

        Prompts are those of an item, named by `start`; what else an item has is its network and condition. Those
        with no finished item are not begun, and take no prompt from the others. In a finished run nothing changes.

        Args:
            planned: all items of the run.
        """
        begun = {(_group(record.item), _condition(record.item)) for record in self.records}
        done = {key_of(record.item) for record in self.records}
        lacking = {
            (_group(item), item["start"])
            for item in planned
            if "start" in item and (_group(item), _condition(item)) in begun and key_of(item) not in done
        }
        kept = [one for one in self.records if (_group(one.item), one.item.get("start")) not in lacking]
        return replace(self, records=kept, left_out=len(self.records) - len(kept))

    def listed(self, name: str, **wanted: Any) -> list[Any]:
        """The concatenated lists of one value, over the records whose items match."""
        return [entry for record in self.where(**wanted) for entry in record.value[name]]


def _group(item: Item) -> str:
    """The items whose values are compared prompt by prompt."""
    return key_of({name: value for name, value in item.items() if name in ("model", "measure")})


def _condition(item: Item) -> str:
    return key_of({name: value for name, value in item.items() if name != "start"})


class ResultsFile:
    """The results file of one process; every line is flushed to the disk (fsync) when it is written.

    The first line holds the config. Every start appends a line with versions, every model a line with the digest
    of its weights, every item a line with its value. An incomplete last line, left by a crash, is removed, and its
    item is computed again. A run that has grown, by more seeds, has another line with its config.

    Args:
        directory: of the run; every process has its own file in it.
        config: what the results depend on.
        session: library versions and machine.
        rank: of this process.
        grows: counts among the settings which may be greater than those of the stored results.

    Raises:
        ValueError: the directory holds results of another config, another process writes this file, or a line is
            not a valid result.
    """

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        session: Mapping[str, Any],
        rank: int = 0,
        grows: Sequence[str] = (),
    ) -> None:
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file; give a directory as --out")
        self.path = directory / f"results-{rank:05d}.jsonl"
        self._grows = list(grows)
        # One process starts at a time, so that checking the locks of other files does not block their owners.
        with held(directory, wait=True):
            self._check(directory, config)
            self._file = open_to_append(self.path)
            try:
                self._start(directory, config, session)
            except BaseException:
                self._file.close()
                raise
        found = read_results(directory)
        self.weights = dict(found.weights)
        self.done = {key_of(record.item) for record in found.records}

    def _start(self, directory: Path, config: Mapping[str, Any], session: Mapping[str, Any]) -> None:
        try:
            lock(self._file, wait=False)
        except BlockingIOError:
            raise ValueError(f"another process writes {self.path}; wait for it, or choose another --out") from None
        self._check_others(directory, session.get("world_size", 1))
        cut_incomplete_line(self._file, self.path)
        if not _has_items(self.path):
            # A start that was refused or killed before its first item left nothing to keep.
            os.truncate(self.path, 0)
        configs = [line["config"] for line in _lines(self.path) if "config" in line]
        if not configs or configs[-1] != config:
            self._write({"config": config, **({"grows": self._grows} if configs else {})})
            sync_directory(directory)
        self._write({"session": session})

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, record: Record) -> None:
        """Write a finished item; it is on disk when this returns."""
        self._write({"item": record.item, "value": record.value, "seconds": round(record.seconds, 3)})
        self.done.add(key_of(record.item))

    def note_weights(self, model: str, digest: str, causal: bool = False) -> None:
        """Write the digest of a model's weights, and whether it is an AR model.

        Raises:
            ValueError: the earlier results were computed with other weights.
        """
        before = self.weights.get(model)
        if before is None:
            self._write({"weights": {model: digest}, "causal": {model: causal}})
            self.weights[model] = digest
        elif before != digest:
            raise ValueError(
                f"{self.path.parent} holds results of {model} with the weights {before}, and the weights are now "
                f"{digest}; choose another --out"
            )

    def _check(self, directory: Path, config: Mapping[str, Any]) -> None:
        for path in sorted(directory.glob(PATTERN)):
            if not _has_items(path) and (path == self.path or _is_written(path) is False):
                # Left by a start that was refused or killed; this process empties its own file under its lock.
                if path != self.path:
                    path.unlink()
                continue
            for line in _lines(path):
                if "config" in line:
                    check_config(directory, line["config"], config, self._grows)

    def _check_others(self, directory: Path, world: int) -> None:
        """Refuse to start while a run with another number of processes, so another split of items, is active."""
        for path in sorted(directory.glob(PATTERN)):
            if path == self.path:
                continue
            sizes = [line["session"].get("world_size", 1) for line in _lines(path) if "session" in line]
            if sizes and sizes[-1] != world and _is_written(path):
                raise ValueError(
                    f"another process writes {path} in a run of {sizes[-1]} processes, and this run has {world}; "
                    "wait for it, or choose another --out"
                )

    def _write(self, line: Mapping[str, Any]) -> None:
        append_lines(self._file, [line], self.path)


def check_config(
    directory: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], grows: Sequence[str] = ()
) -> None:
    """Refuse to mix results of different settings; only the counts `grows` may be greater in ours.

    Raises:
        ValueError: naming the first setting that differs.
    """
    for name, before, now in _differences(theirs, ours):
        if name == "files" and before is None and isinstance(now, Mapping):
            raise ValueError(
                f"{directory} holds results of an earlier version, which did not record the content of "
                f"{', '.join(now)}; it may have changed since, so that nothing is added: choose another --out"
            )
        growing = name.removeprefix("settings.") in grows
        if growing and now > before:
            continue
        remedy = f"or {name.removeprefix('settings.')}={before!r} or more" if growing else "or the same settings"
        raise ValueError(
            f"{directory} holds results with {name}={before!r:.100}, and this run has {name}={now!r:.100}; choose "
            f"another --out, {remedy}"
        )


def read_results(directory: Path, order: Callable[[Mapping[str, Any]], Sequence[Item]] | None = None) -> Results:
    """The results of all processes.

    Args:
        directory: of the run.
        order: config -> all items, to sort the records and to count the missing items.

    Raises:
        FileNotFoundError: the directory holds no results.
        ValueError: a line is damaged or not a result, or the files have different settings.
    """
    paths = sorted(directory.glob(PATTERN))
    configs: list[tuple[Mapping[str, Any], Sequence[str]]] = []
    sessions: list[Mapping[str, Any]] = []
    weights: dict[str, str] = {}
    causal: dict[str, bool] = {}
    records: dict[str, Record] = {}
    for path in paths:
        for line in _lines(path):
            if "config" in line:
                configs.append((line["config"], line["grows"]))
            elif "session" in line:
                sessions.append(line["session"])
            elif "weights" in line:
                weights |= line["weights"]
                causal |= line.get("causal", {})
            else:
                key = key_of(line["item"])
                record = Record(line["item"], line["value"], line["seconds"])
                # Two independent runs with equal settings computed this item; either value is valid.
                if records.setdefault(key, record).value != record.value:
                    logger.warning(
                        "%s holds the item %s a second time with another value; the first counts", path, key
                    )
    if not configs:
        raise FileNotFoundError(f"{directory} holds no results; run the experiment first")
    config = _largest(directory, configs)
    if order is None:
        return Results(config, list(records.values()), 0, sessions, weights, causal)
    keys = [key_of(item) for item in order(config)]
    found = [records[key] for key in keys if key in records]
    return Results(config, found, len(keys) - len(found), sessions, weights, causal)


def _largest(directory: Path, configs: Sequence[tuple[Mapping[str, Any], Sequence[str]]]) -> Mapping[str, Any]:
    """The config of the run as far as it has grown; the others must differ in these counts alone."""
    grows = sorted({name for _, names in configs for name in names})
    largest = max((config for config, _ in configs), key=lambda config: [_count(config, name) for name in grows])
    for config, _ in configs:
        check_config(directory, config, largest, grows)
    return largest


def _count(config: Mapping[str, Any], name: str) -> int:
    return int(config.get("settings", {}).get(name, 0))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file, with their checksums verified where they have one."""
    remedy = "move the file away, or choose another --out"
    for where, found in read_lines(file_bytes(path, remedy), path, remedy):
        kind = next((name for name in LINES if name in found), None)
        if kind is None:
            raise DamagedFileError(f"{where} is not a line of results; {remedy}")
        yield fitted(LINES[kind], found, where, remedy).model_dump()


def _is_written(path: Path) -> bool | None:
    """Whether a process holds the file open for writing; None where files are not locked (`lock`)."""
    with path.open("rb") as file:
        try:
            return False if lock(file, wait=False, shared=True) else None
        except BlockingIOError:
            return True


def _has_items(path: Path) -> bool:
    return any("item" in line for line in _lines(path))


def _differences(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted({*theirs, *ours}):
        before, now = theirs.get(name), ours.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _differences(before, now, f"{prefix}{name}.")
        elif before != now:
            yield f"{prefix}{name}", before, now
