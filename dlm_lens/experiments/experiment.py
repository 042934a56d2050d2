"""`Experiment`: one figure or table of a paper as data, and the list of all of them."""

import json
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from os.path import expanduser, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_lens.declarations import declarations
from dlm_lens.experiments.model_settings import check_models, is_by_model, with_own
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import Judged
from dlm_lens.experiments.verdicts import Verdict as Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Finding:
    """A statement of the paper, and the measurement that corresponds to it.

    Args:
        paper: the statement, with its number.
        here: the measurement, with its interval.
        verdict: whether the two agree, by a rule on the numbers.
        why: the rule, or the reason of a disagreement where it is known.
        null: what would be measured without the effect, with its number.
        p: p-value of the comparison that decides the verdict; a page corrects its verdicts by it.
    """

    paper: str
    here: str
    verdict: Verdict
    why: str = ""
    null: str = ""
    p: float | None = None

    @classmethod
    def of(cls, paper: str, here: str, judged: Judged, why: str = "", null: str = "") -> "Finding":
        """A finding with the verdict of `is_above`, `is_below` or `is_within`."""
        return cls(paper, here, judged.verdict, why, null, judged.p)


@dataclass(frozen=True)
class Table:
    """A table of text cells.

    Raises:
        ValueError: a row whose length differs from the head's.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"{self.title!r}: a row of {len(row)} cells, and the head has {len(self.head)}")


@dataclass(frozen=True)
class Rendering:
    """The tables, figures, findings and notes of an experiment's results; captions say what to see in a figure."""

    tables: Sequence[Table] = ()
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    captions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """The forward passes of one item.

    Args:
        passes: number of passes.
        rows: canvases per pass.
        positions: tokens of each canvas; for an AR model the longest prefix.
        model: name of the model.
        backward: whether a backward pass follows each (training).
        predicted: share of the positions whose logits are computed.
    """

    passes: int
    rows: int
    positions: int
    model: str
    backward: bool = False
    predicted: float = 1.0


class Bench:
    """Loads models by name for the items of a run, and keeps the last one in memory.

    Args:
        loading: arguments of `dlm_lens.load`, such as dtype and device_map.
        loaded: called after each loading with the model's name, the digest of its weights, and whether it is an AR
            model.
    """

    def __init__(
        self, loading: Mapping[str, Any] | None = None, loaded: Callable[[str, str, bool], None] = lambda *_: None
    ) -> None:
        self.loading, self.loaded = dict(loading or {}), loaded
        self._held: dict[str, Any] = {}
        self._notes: dict[Any, Any] = {}

    def model(self, name: str) -> Any:
        """The model of that name: embedded, a directory or a hub name."""
        if name not in self._held:
            import dlm_lens
            from dlm_lens.adapters import family_of
            from dlm_lens.evaluation.responses import fingerprint

            # Two models of 8B do not fit into memory together.
            self._held.clear()
            self._notes.clear()
            model = dlm_lens.load(name, **self.loading)
            self.loaded(name, fingerprint(model), family_of(model.config.model_type).causal)
            self._held[name] = model
        return self._held[name]

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The value of `compute()`, computed once per key and loaded model."""
        if key not in self._notes:
            self._notes[key] = compute()
        return self._notes[key]


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper; a file declares it as `EXPERIMENT`.

    Args:
        name: on the command line.
        shows: paper and figure or table, "2510.15731, Figure 7"; or "beyond 2510.15731".
        title: what is measured, in one sentence.
        metric: the number, with its unit.
        small: settings with the embedded models that take seconds to minutes.
        full: settings for real checkpoints.
        items: settings -> the items to compute, in a fixed order.
        run: (item, settings, bench) -> JSON values; a pure function of these and of the models' weights.
        render: results -> tables and figures; it reads nothing else.
        cost: (item, settings) -> forward passes; None if it runs no model.
        paper: the paper's own numbers.
        own: model -> its own default of some settings, such as the task of a model that reads English.
        grows: counts among the settings that only add items and change no item's value, such as seeds: stored
            results may be continued with a greater one.
        trains: whether it trains its networks and measures them as they were trained, so that dtype and device of
            a run do not apply.
        paired: whether items compare models with each other, so that no setting differs between the models.

    Raises:
        ValueError: settings of different names, or a name that cannot be a folder's.
    """

    name: str
    shows: str
    title: str
    metric: str
    small: Settings
    full: Settings
    items: Callable[[Settings], Iterable[Item]]
    run: Callable[[Item, Settings, Bench], Mapping[str, Any]]
    render: Callable[[Results], Rendering]
    cost: Callable[[Item, Settings], Sequence[Cost]] | None = None
    paper: Sequence[Table] = ()
    own: Mapping[str, Settings] = field(default_factory=dict)
    grows: Sequence[str] = ()
    trains: bool = False
    paired: bool = False

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").isalnum():
            raise ValueError(f"the name of an experiment is {self.name!r}; use letters, digits and hyphens only")
        if set(self.small) != set(self.full):
            lacking = sorted(set(self.small) ^ set(self.full))
            raise ValueError(f"{self.name}: the settings {', '.join(lacking)} are in only one of small and full")
        if unknown := sorted(set(self.grows) - set(self.small)):
            raise ValueError(f"{self.name} grows by {', '.join(unknown)}, which it has no setting of")

    def config(
        self, small: bool, models: Sequence[str] = (), given: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The config of a run: the defaults with some settings replaced. A resumed run must have an equal config.

        A setting of `dlm_lens.experiments.model_settings.BY_MODEL` may be a mapping model -> value, with "" for the
        models that it does not name. Of files that settings name, such as prompts, the config has the digests.

        Raises:
            ValueError: an unknown setting, a value of the wrong kind, models for an experiment without models, a
                value for a model that is not in the run, or a mapping where the experiment is `paired`.
        """
        settings: dict[str, Any] = dict(self.small if small else self.full)
        if models and "models" not in settings:
            raise ValueError(f"{self.name} takes no models; leave out models=")
        given = dict(given or {}) | ({"models": list(models)} if models else {})
        for name in given:
            if name not in settings:
                raise ValueError(f"{self.name} has no setting {name!r}; it has {', '.join(settings)}")
            mapped = "models" in settings and is_by_model(name, given[name])
            for value in given[name].values() if mapped else (given[name],):
                _check_kind(name, value, (self.small[name], self.full[name]))
                _check_least(name, value, self.small[name])
        settings |= given
        if "models" in settings:
            for name in filter(lambda name: is_by_model(name, given[name]), given):
                if self.paired:
                    raise ValueError(
                        f"{name} is {given[name]!r}; {self.name} compares its models with each other, and all need "
                        "the same value: give one for all, or run each pair with its own --out"
                    )
                check_models(name, given[name], settings["models"])
            settings = with_own(settings, self.own, list(given), settings["models"])
        found: dict[str, Any] = json.loads(json.dumps(settings))
        files = _digests(found)
        return {"experiment": self.name, "small": small, "settings": found, **({"files": files} if files else {})}


def _digests(settings: Settings) -> dict[str, str]:
    """The digest of every file that a setting names, so that a resumed run does not mix two versions of it.

    Of a folder that `text` names, that of each of its .txt files; of a pattern in `overrides`, as in
    data.path=DIR/*.jsonl, that of each file; other folders are those of models and results.
    """
    found: dict[str, str] = {}
    for setting, value in settings.items():
        values = value.values() if isinstance(value, dict) else [value]
        if setting == "overrides":
            values = [override.partition("=")[2] for override in value]
        for one in filter(None, values):
            path = expanduser(one) if isinstance(one, str) else ""
            inside = sorted(Path(path).glob("*.txt")) if path and setting == "text" else []  # none in a file
            if setting == "overrides" and "*" in path:
                inside = [Path(file) for file in sorted(glob(path, recursive=True)) if isfile(file)]
            found |= {str(file): _digest(file) for file in inside}
            if isfile(path):
                found[one] = _digest(Path(path))
    return found


def _digest(file: Path) -> str:
    """Of its contents; of more than 1 GiB, as files of a corpus are, the size alone."""
    from dlm_lens.files.tensor_files import file_digest

    size = file.stat().st_size
    return f"{size} bytes" if size > 2**30 else file_digest(file)[:16]


def _check_kind(name: str, value: Any, defaults: Sequence[Any]) -> None:
    """Raise where a value is of another kind than the setting's defaults."""
    kinds = {_kind(default) for default in defaults}
    # A whole number is accepted as a share or a rate. A default of None allows any kind.
    fits = _kind(value) in kinds or (_kind(value) == "whole number" and "number" in kinds)
    if "None" not in kinds and not fits:
        raise ValueError(
            f"{name} is {value!r}; it must be a {' or '.join(sorted(kinds))}, such as {name}={defaults[0]!r}"
        )


LEAST = {
    "batch": 1, "batch_size": 1, "prompts": 1, "calibration": 1, "seeds": 1, "columns": 1, "seed": 0, "models": 1,
}  # fmt: skip
"""The least value of settings that are counts; a list of them, or of models, has at least one."""


def _check_least(name: str, value: Any, default: Any) -> None:
    """Raise where a count, or one of a list of counts, is too small."""
    if name not in LEAST:
        return
    # A list of seeds holds seeds, which begin at 0; a number of seeds is a count.
    least = 0 if name == "seeds" and isinstance(value, list | tuple) else LEAST[name]
    if isinstance(value, list | tuple) and not value:
        raise ValueError(f"{name} is {value!r}; give at least one, such as {name}={default!r}")
    small = [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, int | float)]
    if any(one < least for one in small):
        raise ValueError(f"{name} is {value!r}; it must be at least {least}, such as {name}={default!r}")


def _kind(value: Any) -> str:
    # bool is tested before int, of which it is a subclass.
    kinds = {bool: "truth value", int: "whole number", float: "number", str: "text"}
    kinds |= {list: "list", tuple: "list", dict: "mapping"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "None")


PAPERS = ("attention_sinks", "one_token", "denoising_axis")
"""Folders of experiments: one for each of the two papers, one for questions of others."""


@cache
def list_experiments() -> tuple[Experiment, ...]:
    """All experiments, by paper and file name."""
    found: list[Experiment] = []
    for paper in PAPERS:
        name = f"dlm_lens.experiments.{paper}"
        if find_spec(name) is None:
            continue
        folder = import_module(name)
        for module in sorted(one.name for one in pkgutil.iter_modules(folder.__path__)):
            declared = getattr(import_module(f"{name}.{module}"), "EXPERIMENT", None)
            if isinstance(declared, Experiment):
                found.append(declared)
    return tuple(found)


@dataclass(frozen=True)
class Declared:
    """An experiment's name and title, read from its file without executing the file.

    Args:
        module: the module that declares the experiment.
        name: on the command line.
        shows: paper and figure or table.
        title: what is measured.
    """

    module: str
    name: str
    shows: str
    title: str


@cache
def declared_experiments() -> tuple[Declared, ...]:
    """Name, source and title of every experiment, in the order of `list_experiments`."""
    found: list[Declared] = []
    for paper in PAPERS:
        package = f"dlm_lens.experiments.{paper}"
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            declared = [one for one in declarations(Path(folder), package) if one.assigned == "EXPERIMENT"]
            found += [Declared(one.module, **one.arguments("name", "shows", "title")[1]) for one in declared]
    return tuple(found)


def check_experiment(name: str) -> Declared:
    """The declaration of the experiment of that name.

    Raises:
        ValueError: no experiment has that name.
    """
    known = {one.name: one for one in declared_experiments()}
    if name not in known:
        near = get_close_matches(name, known, 3) or sorted(known)
        raise ValueError(f"no experiment is named {name!r}; perhaps {', '.join(near)} (`dlm-lens experiment list`)")
    return known[name]


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: no experiment has that name.
    """
    experiment: Experiment = import_module(check_experiment(name).module).EXPERIMENT
    return experiment


def run_script(experiment: Experiment) -> None:
    """Run `dlm-lens experiment NAME` with the arguments of the script.

    Raises:
        SystemExit: when the command ends.
    """
    sys.argv = ["dlm-lens", "experiment", experiment.name, *sys.argv[1:]]
    # By its name: the command line imports this room, not the other way round.
    import_module("dlm_lens.cli.app").main()
