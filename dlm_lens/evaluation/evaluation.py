"""`evaluate`: run tasks of lm-evaluation-harness and the shipped tasks; `Evaluation`: their scores."""

import json
import logging
import math
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils import collect_env

from dlm_lens.arguments import is_real, is_whole
from dlm_lens.attention import in_use
from dlm_lens.display import ShowsItself
from dlm_lens.evaluation.settings import GenerationSettings, LikelihoodSettings, read_settings
from dlm_lens.files.atomic_writes import replacing, write_file
from dlm_lens.files.paths import read_utf8, user_path
from dlm_lens.hooks.expressions import parse_hooks
from dlm_lens.placement import seeded
from dlm_lens.printable import one_line, shown

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Score:
    """One metric of a task (after one of its filters) or group, its standard error, and the number of documents.

    `standard_error` is the harness's: s / sqrt(n) for a mean, a bootstrap for others; see `ratio_error` for
    perplexities. It is NaN where there is none. The `n` of a group counts the documents of its tasks.
    """

    task: str
    metric: str
    filter: str
    value: float
    standard_error: float
    n: int

    @property
    def name(self) -> str:
        """The metric, with its filter where it has one."""
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"


@dataclass(frozen=True, eq=False)
class Evaluation(ShowsItself):
    """Scores, and the harness's own results: samples, configs, versions."""

    scores: tuple[Score, ...]
    results: Mapping[str, Any] = field(repr=False)

    def __getitem__(self, task: str) -> Score:
        """The first score of a task.

        Raises:
            ValueError: the task has no score.
        """
        for score in self.scores:
            if score.task == task:
                return score
        raise ValueError(f"no score of {task!r}; there are {', '.join(one.task for one in self.scores) or 'none'}")

    def __repr__(self) -> str:
        values = ", ".join(f"{one.task} {one.name}={one.value:.4g}" for one in self.scores)
        return f"Evaluation({values or 'no scores'})"

    @property
    def settings(self) -> Mapping[str, Any]:
        """Model, fingerprint, hooks, settings and seed of the evaluation."""
        found: Mapping[str, Any] = self.results.get("config", {}).get("dlm_lens", {})
        return found

    def table(self) -> "DataFrame":
        """One row per score."""
        from pandas import DataFrame

        names = ("task", "metric", "filter", "value", "standard_error", "n")
        return DataFrame([[getattr(score, name) for name in names] for score in self.scores], columns=list(names))

    def save(self, directory: str | Path) -> None:
        """Write results.json (scores and settings) and samples.jsonl (every document with its answers).

        JSON has neither NaN, which is null, nor infinities, which are the texts "inf" and "-inf".
        """
        directory = user_path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        kept = {name: self.results.get(name) for name in ("versions", "n-shot", "lm_eval_version", "date")}
        kept["arguments"] = self.results.get("config", {}).get("arguments")
        whole = {"scores": json_of(self.scores), "settings": dict(self.settings), "harness": kept}
        write_file(directory / "results.json", json.dumps(whole, indent=2, default=repr, allow_nan=False) + "\n")
        with replacing(directory / "samples.jsonl") as file:
            for task, samples in self.results.get("samples", {}).items():
                for sample in samples:
                    line = json.dumps(json_of({"task": task, **sample}), default=repr, allow_nan=False)
                    file.write((line + "\n").encode())

    def markdown(self) -> str:
        """The table in Markdown."""
        head = "| task | metric | value | standard error | n |\n|---|---|---:|---:|---:|"
        return "\n".join(
            [head]
            + [
                f"| {one.task} | {one.name} | {one.value:.4f} | {one.standard_error:.4f} | {one.n} |"
                for one in self.scores
            ]
        )


def json_of(value: Any) -> Any:
    """A value as JSON has it: NaN is None, infinities are "inf" and "-inf"; scores are mappings."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Score):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: json_of(one) for key, one in value.items()}
    return [json_of(one) for one in value] if isinstance(value, list | tuple) else value


logger = logging.getLogger(__name__)

TASKS = Path(__file__).parent / "tasks"
"""The shipped tasks' YAML files and data; the harness's `include_path`."""

BOOTSTRAPS = 1000
"""Bootstrap resamples for standard errors without a formula."""

TORCH_SEED = 1234
"""The harness's seed of torch's random numbers."""

RATIOS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
"""Metrics of a whole corpus: of documents they have a log-likelihood and a size."""

DRAWS = 1000
"""Bootstrap resamples of one generator of random numbers, as in the harness."""


def shipped_tasks() -> list[str]:
    """Names of the shipped tasks, which need no network."""
    return sorted(path.stem for path in TASKS.glob("*.yaml") if path.stem.startswith(("toy_", "english_")))


def evaluate(
    model: Any,
    tasks: str | Sequence[str],
    *,
    limit: float | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    multiturn: bool = True,
    confirm_run_unsafe_code: bool = False,
    bootstrap_iters: int = BOOTSTRAPS,
    **settings: Any,
) -> Evaluation:
    """Evaluate a model on tasks of lm-evaluation-harness and on the shipped tasks.

    A thin layer over `lm_eval.simple_evaluate(model=HarnessLM(model, **settings), ...)`.

    Args:
        model: from `dlm_lens.load`, a name that it loads, or a `HarnessLM`.
        tasks: names; "toy_problems" and the other `toy_` tasks need no network.
        limit: documents per task, or a share of them below 1.
        num_fewshot: worked examples before each document; None for the task's own number.
        chat: put the prompts into the tokenizer's chat template.
        multiturn: make worked examples turns of the chat, rather than one text with the question.
        confirm_run_unsafe_code: let tasks such as HumanEval execute code that the model wrote. The harness refuses
            to start them otherwise.
        bootstrap_iters: bootstrap resamples for standard errors without a formula; 0 omits all standard errors.
        **settings: of `HarnessLM`: hooks, likelihood, generation, seed, batch_size, responses, ...

    Raises:
        ImportError: lm-evaluation-harness is not installed.
        ValueError: an unknown task, settings that cannot work, or code execution that is not allowed.
    """
    _check_arguments(tasks, limit, num_fewshot, bootstrap_iters)
    limit = limit if limit is None or limit < 1 else int(limit)
    if isinstance(settings.get("hooks"), str):
        settings["hooks"] = parse_hooks(settings["hooks"])  # an error in it is raised before anything is loaded
    from dlm_lens.evaluation.harness import HarnessLM

    if isinstance(model, HarnessLM) and settings:
        raise ValueError(f"{', '.join(settings)} given with a HarnessLM, which has its own; give them to HarnessLM")
    from lm_eval.evaluator import simple_evaluate

    names = [tasks] if isinstance(tasks, str) else list(tasks)
    manager = find_tasks(names)
    check_code(manager, names, confirm_run_unsafe_code)
    if isinstance(model, str):  # a model is loaded after the tasks, whose data may be missing
        settings["likelihood"] = read_settings(LikelihoodSettings, settings.get("likelihood"))
        settings["generation"] = read_settings(GenerationSettings, settings.get("generation"))
    elif not isinstance(model, HarnessLM):
        model = HarnessLM(model, **settings)
    with _own_random_numbers(), _own_bootstrap(), _quiet(), _known_surroundings():
        with _forgetting(model):
            loaded = load_tasks(manager, names)
        lm = HarnessLM(model, **settings) if isinstance(model, str) else model
        with _forgetting(lm):
            prepare(lm, loaded["tasks"])
            _warn_fixed_fewshot(loaded["tasks"], num_fewshot)
            with in_use(lm.model), lm.held(), seeded(TORCH_SEED):
                results = simple_evaluate(
                    model=lm,
                    tasks=_top(loaded),
                    task_manager=manager,
                    limit=limit,
                    num_fewshot=num_fewshot,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=multiturn,
                    bootstrap_iters=bootstrap_iters,
                    torch_random_seed=None,  # it would seed every GPU
                    confirm_run_unsafe_code=confirm_run_unsafe_code,
                )
    arguments = {"limit": limit, "num_fewshot": num_fewshot, "chat": chat, "multiturn": multiturn}
    if results:  # of one of several processes; the harness's config lacks some of them
        results["config"]["arguments"] = arguments
    return Evaluation(tuple(read_scores(results or {}, errors=bootstrap_iters > 0)), results or {})


def _check_arguments(tasks: Any, limit: Any, num_fewshot: Any, bootstrap_iters: Any) -> None:
    """Raise for arguments of `evaluate` that cannot be.

    Raises:
        ValueError: naming the argument and its value.
    """
    if limit is not None and (not is_real(limit) or limit <= 0 or (limit > 1 and not float(limit).is_integer())):
        raise ValueError(
            f"limit is {shown(limit)}; give a number of documents, a share below 1, or leave it out for all"
        )
    if num_fewshot is not None and (not is_whole(num_fewshot) or num_fewshot < 0):
        raise ValueError(f"num_fewshot is {shown(num_fewshot)}; give a whole number of at least 0")
    if not is_whole(bootstrap_iters) or bootstrap_iters < 0 or bootstrap_iters == 1:
        raise ValueError(
            f"bootstrap_iters is {shown(bootstrap_iters)}; give a whole number of at least 2, or 0 for no standard "
            "errors"
        )
    if not isinstance(tasks, str | Sequence) or not all(isinstance(task, str) for task in tasks):
        raise ValueError(f"tasks is {shown(tasks)}; give the name of a task, or a list of names")


def prepare(lm: Any, tasks: Mapping[str, Any]) -> None:
    """Prepare a `HarnessLM` for its tasks: check hooks and settings, and note where greedy decoding is needed.

    Raises:
        ValueError: hooks that need steps, or settings that the model does not have, for a task of likelihoods.
    """
    kinds = {task.OUTPUT_TYPE for task in tasks.values()} - {"generate_until"}
    if kinds:
        lm.check_likelihoods(rolling=kinds == {"loglikelihood_rolling"})
    # The only multiple-choice metric that needs the greedy decoding.
    lm.greedy_tasks |= {
        name
        for name, task in tasks.items()
        if task.OUTPUT_TYPE == "multiple_choice" and "exact_match" in task._metric_fn_list
    }


def _warn_fixed_fewshot(tasks: Mapping[str, Any], num_fewshot: int | None) -> None:
    """Warn where a task fixes its worked examples at 0, which the harness only logs at a lower level."""
    fixed = [name for name, task in tasks.items() if task.get_config("num_fewshot") == 0]
    if num_fewshot and fixed:
        logger.warning("num_fewshot=%d is ignored by %s, which fix it at 0", num_fewshot, ", ".join(fixed))


def _top(loaded: Mapping[str, Any]) -> list[Any]:
    """The loaded groups, and the tasks outside groups, so that the harness does not load them again."""
    inner = {name for names in loaded["group_map"].values() for name in names}
    groups = [group for name, group in loaded["groups"].items() if name not in inner]
    grouped = {task.task_name for group in groups for task in group.get_all_tasks()}
    return [*groups, *(task for name, task in loaded["tasks"].items() if name not in grouped)]


def read_scores(results: Mapping[str, Any], *, errors: bool = True) -> Iterator[Score]:
    """The numbers of the harness's results: one per task or group, metric and filter.

    Args:
        results: of `lm_eval.simple_evaluate`.
        errors: whether standard errors are requested; else they are NaN.
    """
    for task, metrics in results.get("results", {}).items():
        count = results["n-samples"].get(task, {}).get("effective")
        for name, value in metrics.items():
            metric, _, kept = name.partition(",")
            if not kept or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{kept}")
            if not isinstance(error, int | float):
                samples = results.get("samples", {}).get(task, ())
                error = ratio_error(metric, float(value), samples) if errors else math.nan
            # A group has its count with each metric: of the documents of its tasks that have the metric.
            n = metrics.get("sample_count", {}).get(name, 0) if count is None else count
            yield Score(task, metric, kept, float(value), float(error), int(n))


def ratio_error(metric: str, value: float, samples: Sequence[Mapping[str, Any]]) -> float:
    """The standard error of a corpus perplexity, which the harness does not compute; NaN for other metrics.

    With document i's log-likelihood l_i and size w_i, r = sum l / sum w has the standard error
    sqrt(n / (n - 1) sum (l_i - r w_i)^2) / sum w (linearised ratio); exp(-r) has that times itself, and bits per
    byte that / ln 2.
    """
    pairs = [sample[metric] for sample in samples if isinstance(sample.get(metric), tuple | list)]
    if metric not in RATIOS or len(pairs) < 2:
        return math.nan
    total = sum(size for _, size in pairs)
    rate = sum(value for value, _ in pairs) / total
    squares = sum((one - rate * size) ** 2 for one, size in pairs)
    error = math.sqrt(len(pairs) / (len(pairs) - 1) * squares) / total
    return error / math.log(2) if metric == "bits_per_byte" else value * error


def find_tasks(names: Sequence[str]) -> Any:
    """The harness's task manager with the shipped tasks, and with its own 14,000 where one of them is requested.

    Raises:
        ValueError: no name, an unknown one, or a file that is not UTF-8.
    """
    if not names:
        raise ValueError(f"no task given; tasks that need no network are {', '.join(shipped_tasks())}")
    manager = _manager(include_defaults=False)
    if not all(name in manager.all_tasks or _is_task_file(name) for name in names):
        files = [name for name in names if Path(name).is_file() and not _is_task_file(name)]
        beside = dict.fromkeys(str(Path(name).resolve().parent) for name in files)
        # The members of a group in a file may be tasks of files beside it, which change between two calls.
        manager = _manager.__wrapped__(True, *beside) if beside else _manager(include_defaults=True)
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            near = ", ".join(get_close_matches(name, manager.all_tasks, 3)) or ", ".join(shipped_tasks())
            raise ValueError(f"no task is named {name!r}; perhaps {near}")
    return manager


def load_tasks(manager: Any, names: Sequence[str]) -> Any:
    """The tasks with these names and their data, as `manager.load` returns them.

    Raises:
        ValueError: a task file or data that cannot be read; the harness raises what its parsers raise.
    """
    try:
        return manager.load([_by_name(manager, name) for name in names])
    except (OSError, ImportError):
        raise  # of the hub, and of packages that a task needs: sentences of their own
    except Exception as error:
        if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
            raise
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        empty, kind = isinstance(first, StopIteration), type(first).__name__
        why = "its data hold no document" if empty else f"{kind}: {one_line(first)}"
        raise ValueError(
            f"{', '.join(names)} cannot be loaded ({why}); correct the task's file or its data, which is "
            "UTF-8 with every field that the task's templates name"
        ) from error


def _is_task_file(name: str) -> bool:
    """Whether a name is the file of a single task; the file of a group names other tasks."""
    return Path(name).is_file() and not re.search(r"^group:", read_utf8(Path(name), "task files"), re.MULTILINE)


@cache
def _manager(include_defaults: bool, *folders: str) -> Any:
    """Cached, because reading the harness's task files takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[str(TASKS), *folders], include_defaults=include_defaults)


def _by_name(manager: Any, name: str) -> str:
    """The name of the group in a file; for the file the harness would take the list of its members as the name."""
    found = manager.task_index.items() if Path(name).is_file() else ()
    groups = (key for key, one in found if one.kind.name == "GROUP" and one.yaml_path == Path(name).resolve())
    return next(groups, name)


def check_code(manager: Any, names: Sequence[str], confirmed: bool) -> None:
    """Refuse tasks that execute code of a model, before they are loaded, unless this is confirmed.

    The harness refuses too, but some of these tasks execute a probe when they are loaded.

    Raises:
        ValueError: naming the task and the two switches.
    """
    for name in names:
        entry = manager.task_index.get(name)
        if entry is not None and (entry.cfg or {}).get("unsafe_code") and not confirmed:
            raise ValueError(
                f"{name} executes the code that the model wrote; if that is safe here, pass "
                "confirm_run_unsafe_code=True (--confirm-run-unsafe-code) and set HF_ALLOW_CODE_EVAL=1"
            )


@contextmanager
def _forgetting(lm: Any) -> Iterator[None]:
    """Remove the files that were made for an evaluation which ends with an error before its first answer."""
    try:
        yield
    except BaseException:
        if not isinstance(lm, str):  # the name of a model that is not loaded
            lm.forget()
        raise


def bootstrap_error(statistic: Callable[[Sequence[Any]], float], cases: Sequence[Any], iters: int) -> float:
    """The standard deviation of a statistic over bootstrap draws: as many cases, drawn with replacement.

    The harness's `bootstrap_stderr`, with its random numbers (a generator for every 1,000 draws). That prints to
    standard output, forks, which torch's threads do not survive, and leaves out the draws after the last 1,000.

    Args:
        statistic: of the cases of a draw.
        cases: one for each document.
        iters: number of draws, at least 2.
    """
    drawn: list[float] = []
    for chunk, start in enumerate(range(0, iters, DRAWS)):
        generator = random.Random(chunk)
        some = range(min(DRAWS, iters - start))
        drawn += [float(statistic(generator.choices(cases, k=len(cases)))) for _ in some]
    with np.errstate(invalid="ignore"):
        return float(np.std(drawn, ddof=1))


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Give back Python's and numpy's random numbers as they were: the harness seeds and draws them."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@contextmanager
def _own_bootstrap() -> Iterator[None]:
    """Let the harness take `bootstrap_error` for the standard errors that have no formula."""
    from lm_eval.api import metrics

    before = metrics.bootstrap_stderr
    metrics.bootstrap_stderr = bootstrap_error
    try:
        yield
    finally:
        metrics.bootstrap_stderr = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's message on custom arguments, logged for every task with its own data."""

    def keep(record: logging.LogRecord) -> bool:
        return "Custom kwargs can be passed" not in record.getMessage()

    source = logging.getLogger("lm_eval.api.task")
    source.addFilter(keep)
    try:
        yield
    finally:
        source.removeFilter(keep)


_environment = cache(collect_env.get_pretty_env_info)  # starts pip and ten other programs: once a process


@contextmanager
def _known_surroundings() -> Iterator[None]:
    """Let the harness look for the commit without git's message where there is none, and know its environment."""
    from lm_eval import evaluator
    from lm_eval.loggers.utils import get_commit_from_path

    def commit() -> Any:
        """As the harness's `get_git_commit_hash`, which leaves standard error to git."""
        try:
            found = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=True)
        except (subprocess.CalledProcessError, OSError):
            return get_commit_from_path(os.getcwd())
        return found.stdout.strip()

    before = evaluator.get_git_commit_hash, collect_env.get_pretty_env_info
    evaluator.get_git_commit_hash, collect_env.get_pretty_env_info = commit, _environment
    try:
        yield
    finally:
        evaluator.get_git_commit_hash, collect_env.get_pretty_env_info = before
