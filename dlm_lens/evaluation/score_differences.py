"""`score_differences`: two evaluations compared on the same documents, with paired standard errors."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict

from dlm_lens.evaluation.evaluation import RATIOS, Evaluation, Score
from dlm_lens.files.json_objects import read_json_lines, read_object
from dlm_lens.files.paths import user_path
from dlm_lens.files.sealed_json import Document, fitted
from dlm_lens.printable import shown
from dlm_lens.statistics import Floats

if TYPE_CHECKING:
    from pandas import DataFrame

Sample = Mapping[str, Any]
"""A document with its answers and its metrics, as the harness logs it."""


Number = float | Literal["inf", "-inf"] | None
"""A number as `json_of` writes it."""


class ScoreLine(Document):
    """A `Score` in results.json."""

    task: str
    metric: str
    filter: str
    value: Number
    standard_error: Number
    n: int


class ScoresFile(Document):
    """What is read of results.json."""

    model_config = ConfigDict(extra="ignore")
    scores: list[ScoreLine]


class SampleLine(Document):
    """What every line of samples.jsonl has beside answers and metrics."""

    model_config = ConfigDict(extra="ignore")
    task: str
    filter: str
    doc_id: int
    doc_hash: str


class _Scored(NamedTuple):
    """The scores of an evaluation, and its documents by task."""

    scores: Sequence[Score]
    samples: Mapping[str, Sequence[Sample]]


def score_differences(one: Evaluation | str | Path, other: Evaluation | str | Path) -> "DataFrame":
    """The scores of `one` minus those of `other`, such as an intervention's and its control's.

    Scores of the same documents vary together, so that the difference varies less than two independent scores do:
    its standard error is that of the documents' own differences (Miller 2024, 2411.00640). With n documents, the
    sizes w_i (1 for a mean, words or bytes for a perplexity of a corpus), W = sum w_i, a score f(r) of the ratio
    r = sum x_i / W, and likewise g(s) of y_i, it is

        sqrt(n / (n - 1) sum_i u_i^2) / W,  u_i = f'(r) (x_i - r w_i) - g'(s) (y_i - s w_i),

    which for means is s / sqrt(n) of x_i - y_i.

    Args:
        one: an evaluation, or the directory to which it was saved (`Evaluation.save`, `dlm-lens eval --out`).
        other: of the same tasks and documents; another model, other hooks or settings.

    Returns:
        A row for each score that both have: task, metric, filter, one, other, difference, standard_error (NaN
        for a group, a metric that is neither a mean nor a perplexity, or fewer than two documents), n.

    Raises:
        ValueError: no score in common, other documents, or a directory without the files.
    """
    from pandas import DataFrame

    first, second = _scored(one), _scored(other)
    others = {(score.task, score.metric, score.filter): score for score in second.scores}
    rows = []
    for score in first.scores:
        place = score.task, score.metric, score.filter
        if place not in others:
            continue
        values = [_values(each.samples.get(score.task, ()), score) for each in (first, second)]
        _check_documents(score.task, *values)
        pairs = [(x[0], y[0]) for x, y in zip(values[0].values(), values[1].values(), strict=True)]
        error = _paired_error(pairs, score, others[place])
        both = score.value, others[place].value
        rows.append([*place, *both, both[0] - both[1], error, len(pairs) or score.n])
    if not rows:
        tasks = [
            ", ".join(dict.fromkeys(score.task for score in each.scores)) or "none" for each in (first, second)
        ]
        where = [f" ({given})" if isinstance(given, str | Path) else "" for given in (one, other)]
        raise ValueError(
            "the evaluations have no score in common; their tasks are "
            f"{tasks[0]}{where[0]} and {tasks[1]}{where[1]}"
        )
    names = ["task", "metric", "filter", "one", "other", "difference", "standard_error", "n"]
    return DataFrame(rows, columns=names)


def _scored(given: Evaluation | str | Path) -> _Scored:
    if isinstance(given, Evaluation):
        return _Scored(given.scores, given.results.get("samples", {}))
    if not isinstance(given, str | Path):
        raise ValueError(f"{shown(given)} is no evaluation; give an Evaluation, or the directory of a saved one")
    return read_saved(user_path(given))


def read_saved(directory: Path) -> _Scored:
    """An evaluation as `Evaluation.save` writes it.

    Raises:
        ValueError: the directory lacks its files, or they hold something else.
    """
    results, lines = directory / "results.json", directory / "samples.jsonl"
    for path in (results, lines):
        if not path.is_file():
            raise ValueError(f"{path} does not exist; give the directory of a saved evaluation")
    samples: dict[str, list[Sample]] = {}
    remedy = "give the directory of a saved evaluation"
    given = fitted(ScoresFile, read_object(results, str(results), remedy), results, remedy).scores
    numbers = [{name: _number(getattr(one, name)) for name in ("value", "standard_error")} for one in given]
    scores = [Score(**{**one.model_dump(), **both}) for one, both in zip(given, numbers, strict=True)]
    for where, _, sample in read_json_lines(lines, "a document", "a JSON object"):
        line = fitted(SampleLine, sample if isinstance(sample, dict) else {}, where, remedy)
        samples.setdefault(line.task, []).append(sample)
    return _Scored(scores, samples)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or value in ("inf", "-inf")


def _values(samples: Sequence[Sample], score: Score) -> dict[int, tuple[Floats, str]]:
    """Of every document with this score its number (and size, in a perplexity of a corpus), and its digest."""
    found = {}
    for sample in samples:
        if sample["filter"] != score.filter or score.metric not in sample:
            continue
        value = sample[score.metric]
        several = value if isinstance(value, list | tuple) else [value]
        if several and all(map(_is_number, several)):
            numbers = np.array([_number(one) for one in several])
            found[int(sample["doc_id"])] = numbers, str(sample["doc_hash"])
    return dict(sorted(found.items()))


def _check_documents(task: str, one: Mapping[int, Any], other: Mapping[int, Any]) -> None:
    for number in sorted(one.keys() | other.keys()):
        if number not in one or number not in other:
            raise ValueError(
                f"document {number} of {task} is in one of the evaluations alone ({len(one)} and {len(other)} "
                "documents); give both the same limit"
            )
        if one[number][1] != other[number][1]:
            raise ValueError(
                f"document {number} of {task} is another one in the other evaluation; give both its data"
            )


def _paired_error(pairs: Sequence[tuple[Floats, Floats]], one: Score, other: Score) -> float:
    if len(pairs) < 2 or len({values.shape for pair in pairs for values in pair}) > 1:
        return math.nan
    n, parts = len(pairs), []
    for values, score in zip(map(np.stack, zip(*pairs, strict=True)), (one, other), strict=True):
        sums, sizes = values.T if values.shape[1] == 2 else (values[:, 0], np.ones(n))
        rate = sums.sum() / sizes.sum()
        slope = _slope(score, float(rate), with_sizes=values.shape[1] == 2)
        if math.isnan(slope):
            return math.nan
        parts.append(slope * (sums - rate * sizes) / sizes.sum())
    return float(math.sqrt(n / (n - 1) * float(((parts[0] - parts[1]) ** 2).sum())))


def _slope(score: Score, rate: float, *, with_sizes: bool) -> float:
    """The derivative of a score by the ratio that it is a function of; NaN where its function is not known."""
    if not math.isfinite(rate) or not math.isfinite(score.value):
        return math.nan
    perplexity = math.exp(-rate), -math.exp(-rate)
    if with_sizes:
        bits = -rate / math.log(2), -1 / math.log(2)
        known = [bits if score.metric == "bits_per_byte" else perplexity] if score.metric in RATIOS else []
    else:
        known = [(rate, 1.0), perplexity]
    # Saved results name no aggregation of a metric; its value does.
    return next((slope for value, slope in known if math.isclose(value, score.value, rel_tol=1e-6)), math.nan)
