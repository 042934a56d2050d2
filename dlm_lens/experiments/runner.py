"""`run_experiment`: compute and store the items that are missing; `render_experiment`: their tables and figures."""

import json
import logging
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dlm_lens.experiments.experiment import Bench, Experiment, Finding, Rendering
from dlm_lens.experiments.model_settings import is_by_model, settings_of, settings_of_item
from dlm_lens.experiments.results import Item, Record, Results, ResultsFile, key_of, read_results
from dlm_lens.experiments.verdicts import RATE
from dlm_lens.files.atomic_writes import write_figure, write_file
from dlm_lens.files.paths import user_path
from dlm_lens.files.sealed_json import naming
from dlm_lens.option_values import process_of_run

logger = logging.getLogger(__name__)


def run_experiment(
    experiment: Experiment,
    out: str | Path,
    *,
    small: bool = False,
    models: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    loading: Mapping[str, Any] | None = None,
) -> Results:
    """Compute the items that `out` lacks, and return all results.

    Every item is on disk (fsync) before the next begins, so a killed run resumes without losing or repeating an
    item. Under torchrun each process computes every WORLD_SIZE-th item into a file of its own. More of what the
    experiment `grows` by, such as seeds, adds items to those that are stored.

    Args:
        experiment: from `find_experiment`.
        out: directory of the results.
        small: the small settings instead of the full ones.
        models: instead of the settings' own.
        settings: settings to replace.
        loading: arguments of `dlm_lens.load` for every model; all but device_map are a part of the config.

    Raises:
        ValueError: an unknown setting, `out` holds results of other settings, or `loading` of an experiment that
            trains its networks.
    """
    rank, world = process_of_run()
    loading, out = dict(loading or {}), user_path(out)
    if experiment.trains and loading:
        names = " and ".join({"device_map": "device"}.get(name, name) + "=" for name in loading)
        raise ValueError(
            f"{experiment.name} trains its networks and measures them as they were trained; leave out {names}"
        )
    config = experiment.config(small, models, settings) | _loaded_with(loading)
    items = list_items(experiment, config)
    with ResultsFile(out, config, _session(rank, world), rank, experiment.grows) as file:
        bench = Bench(loading, file.note_weights)
        mine = items[rank::world]
        left = [item for item in mine if key_of(item) not in file.done]
        logger.info("%s: %d of %d items are computed", out, len(mine) - len(left), len(mine))
        with tqdm(
            total=len(mine), initial=len(mine) - len(left), desc=experiment.name, unit="item", disable=rank != 0
        ) as bar:
            for item in left:
                start = time.perf_counter()
                value = experiment.run(item, settings_of_item(config["settings"], item), bench)
                file.append(Record(item, value, time.perf_counter() - start))
                bar.update()
    return read_results(out, lambda found: list_items(experiment, found))


def _loaded_with(loading: Mapping[str, Any]) -> dict[str, Any]:
    """What the config has of the arguments of `dlm_lens.load`: dtype, and as `load` the others, if any."""
    dtype = loading.get("dtype")
    others = {name: value for name, value in loading.items() if name not in ("dtype", "device_map")}
    plain = json.loads(json.dumps(others, default=repr))
    return {
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        **({"load": plain} if plain else {}),
    }


def list_items(experiment: Experiment, config: Mapping[str, Any]) -> list[Item]:
    """All items of a run.

    Raises:
        ValueError: two items are equal, so that a resumed run could not distinguish them.
    """
    settings = config["settings"]
    if any(is_by_model(name, value) for name, value in settings.items()):
        every = ({**settings_of(settings, model), "models": [model]} for model in settings["models"])
        items = [item for one in every for item in experiment.items(one)]
    else:
        items = list(experiment.items(settings))
    keys = [key_of(item) for item in items]
    if len(set(keys)) < len(keys):
        # A model may stand twice in the settings where items do not repeat: beyond-instruct takes pairs of models.
        for model, times in Counter(settings.get("models", ())).items():
            if times > 1:
                raise ValueError(f"models has {model!r} twice; give each model once")
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{experiment.name} lists the item {twice} twice")
    return items


def _session(rank: int, world: int) -> dict[str, Any]:
    import torch
    import transformers

    import dlm_lens

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "dlm_lens": dlm_lens.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "devices": devices or ["cpu"],
        "threads": torch.get_num_threads(),
        "rank": rank,
        "world_size": world,
    }


REMEDY = "move its files away, or choose another --out"


def render_experiment(experiment: Experiment, out: str | Path) -> Path:
    """Write the tables (`NAME.md`) and figures (`NAME-FIGURE.png`) of a run into its directory; return the page.

    Raises:
        FileNotFoundError: the directory holds no results.
        ValueError: the results are of another experiment, or no item is finished.
    """
    directory = user_path(out)
    results = load_results(experiment, directory)
    with naming(directory, REMEDY):
        rendering = experiment.render(results)
    for name, figure in rendering.figures.items():
        write_figure(directory / f"{experiment.name}-{name}.png", figure)
    page = directory / f"{experiment.name}.md"
    pictures = [f"![{experiment.name}, {name}]({experiment.name}-{name}.png)" for name in rendering.figures]
    text = [f"# {experiment.shows}: {experiment.title}", *describe(experiment, results, rendering), *pictures]
    return write_file(page, "\n\n".join(text) + "\n")


def load_results(experiment: Experiment, directory: Path) -> Results:
    """The results of a run, in the order of its items; of an unfinished run those with shared prompts.

    Raises:
        FileNotFoundError: the directory holds no results.
        ValueError: the results are of another experiment, no item is finished, or no prompt is shared.
    """
    found = read_results(directory, lambda config: _items(experiment, config, directory))
    if not found.records:
        raise ValueError(f"{directory} holds no finished item of {experiment.name} yet")
    if not found.missing:
        return found
    shared = found.with_shared_prompts(_items(experiment, found.config, directory))
    if not shared.records:
        raise ValueError(
            f"{directory} holds {len(found.records)} finished items of {experiment.name}, and no prompt that all "
            f"networks and conditions of a model have; let the run go on, {found.missing} items are missing"
        )
    return shared


def _items(experiment: Experiment, config: Mapping[str, Any], directory: Path) -> list[Item]:
    if config["experiment"] != experiment.name:
        raise ValueError(f"{directory} holds results of {config['experiment']}, not of {experiment.name}")
    with naming(directory, REMEDY):
        return list_items(experiment, config)


def describe(experiment: Experiment, results: Results, rendering: Rendering) -> Iterable[str]:
    """Paragraphs of a run's own page: metric, scale, verdicts, measured tables, the paper's tables, notes."""
    yield f"Metric: {experiment.metric}. {scale_of(results)}"
    if results.unfinished:
        yield f"**{results.unfinished}**"
    if rendering.findings:
        yield findings_table(rendering.findings)
    yield from number_tables(experiment, rendering)
    yield from rendering.notes


def scale_of(results: Results) -> str:
    """Scale and settings of a run, and how its models were loaded where that was given, in a sentence."""
    scale = "small" if results.config["small"] else "full"
    loaded = {name: results.config[name] for name in ("dtype", "load") if results.config.get(name) is not None}
    shown = {**results.settings, **loaded}
    return f"Scale: {scale} ({', '.join(f'{name}={value!r}' for name, value in shown.items())})."


def number_tables(experiment: Experiment, rendering: Rendering) -> Iterable[str]:
    """The measured tables, then the paper's."""
    for said, tables in (("Here", rendering.tables), ("In the paper", experiment.paper)):
        for table in tables:
            yield f"{said}, {table.title}:"
            yield markdown(table.head, table.rows)


def findings_table(findings: Sequence[Finding], after: Mapping[Finding, float] | None = None) -> str:
    """Claims, measurements, nulls, verdicts and rules.

    Args:
        findings: the rows.
        after: p-values after a correction for many comparisons; a verdict above the error rate is marked.
    """
    rows = [
        [one.paper, one.here, one.null, f"**{one.verdict}**{_lost(one, after or {})}", one.why] for one in findings
    ]
    return markdown(["the paper", "here", "null", "verdict", "rule"], rows)


def _lost(finding: Finding, after: Mapping[Finding, float]) -> str:
    lost = finding.verdict in ("agrees", "disagrees") and after.get(finding, 0.0) > RATE
    return " (not after the correction)" if lost else ""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; bars in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())
