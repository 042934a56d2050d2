"""`Evaluation`: the numbers of an evaluation, with how many documents and standard errors."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_lens.files.atomic_writes import replacing, write_file

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Score:
    """One number: a task's metric (behind a filter of the task), its standard error, and the number of documents.

    `standard_error` is the harness's: s / sqrt(n) of a mean, by bootstrap for perplexities, NaN where it has none.
    """

    task: str
    metric: str
    filter: str
    value: float
    standard_error: float
    n: int

    @property
    def name(self) -> str:
        """The metric, and its filter if it has one."""
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Scores, and everything that the harness returned: samples, configs, versions."""

    scores: tuple[Score, ...]
    results: Mapping[str, Any] = field(repr=False)

    def __getitem__(self, task: str) -> Score:
        """The first score of a task.

        Raises:
            ValueError: it has none.
        """
        for score in self.scores:
            if score.task == task:
                return score
        raise ValueError(f"no score of {task!r}; there are {', '.join(one.task for one in self.scores) or 'none'}")

    @property
    def settings(self) -> Mapping[str, Any]:
        """What answered: model, fingerprint, hooks, settings, seed."""
        found: Mapping[str, Any] = self.results.get("config", {}).get("dlm_lens", {})
        return found

    def table(self) -> "DataFrame":
        """One row per score."""
        from pandas import DataFrame

        names = ("task", "metric", "filter", "value", "standard_error", "n")
        return DataFrame([[getattr(score, name) for name in names] for score in self.scores], columns=list(names))

    def save(self, directory: str | Path) -> None:
        """Write results.json (scores and settings) and samples.jsonl (every document with its answers)."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        kept = {name: self.results.get(name) for name in ("versions", "n-shot", "lm_eval_version", "date")}
        # NaN is no JSON.
        scores = [
            asdict(one) | {"standard_error": None if isnan(one.standard_error) else one.standard_error}
            for one in self.scores
        ]
        whole = {"scores": scores, "settings": dict(self.settings), "harness": kept}
        write_file(directory / "results.json", json.dumps(whole, indent=2, default=repr) + "\n")
        with replacing(directory / "samples.jsonl") as file:
            for task, samples in self.results.get("samples", {}).items():
                for sample in samples:
                    file.write((json.dumps({"task": task, **sample}, default=repr) + "\n").encode())

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
