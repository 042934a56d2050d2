"""Differences of scores on the same documents: against the documents' own differences and a bootstrap."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlm_lens as dl
from dlm_lens.evaluation import Evaluation, Score, evaluate, score_differences


def made(metric: str, values: Any, value: float, *, task: str = "task", hashes: str = "h") -> Evaluation:
    """An evaluation of documents with these values of a metric."""
    samples = [
        {"doc_id": number, "doc_hash": f"{hashes}{number}", "filter": "none", "metrics": [metric], metric: one}
        for number, one in enumerate(values)
    ]
    return Evaluation((Score(task, metric, "none", value, math.nan, len(samples)),), {"samples": {task: samples}})


def test_of_a_mean_it_is_the_error_of_the_documents_differences() -> None:
    generator = np.random.default_rng(0)
    one = generator.random(30) < 0.8
    other = one & (generator.random(30) < 0.7)
    first, second = (made("acc", values.astype(int).tolist(), values.mean()) for values in (one, other))
    (row,) = score_differences(first, second).to_dict("records")
    differences = one.astype(float) - other
    assert row["difference"] == pytest.approx(differences.mean())
    assert row["standard_error"] == pytest.approx(differences.std(ddof=1) / 30**0.5)
    assert (row["one"], row["other"], row["n"]) == (one.mean(), other.mean(), 30)
    # As if they were independent it would be larger: the answers vary together.
    assert row["standard_error"] < math.hypot(one.std(ddof=1), other.std(ddof=1)) / 30**0.5


@pytest.mark.parametrize("metric", ["perplexity", "word_perplexity", "bits_per_byte"])
def test_of_perplexities_it_is_the_bootstrap_of_the_documents(metric: str) -> None:
    generator = np.random.default_rng(1)
    sizes = generator.integers(5, 40, 300) if metric != "perplexity" else np.ones(300)
    one = -sizes * generator.normal(0.9, 0.2, 300)
    other = one - sizes * generator.normal(0.1, 0.05, 300)

    def value(sums: Any, of: Any) -> Any:
        rate = sums.sum(-1) / of.sum(-1)
        return -rate / math.log(2) if metric == "bits_per_byte" else np.exp(-rate)

    pairs = [
        list(sums) if metric == "perplexity" else [[float(x), int(w)] for x, w in zip(sums, sizes, strict=True)]
        for sums in (one, other)
    ]
    first, second = (made(metric, both, value(sums, sizes)) for both, sums in zip(pairs, (one, other), strict=True))
    (row,) = score_differences(first, second).to_dict("records")
    draws = generator.integers(0, 300, (4000, 300))
    drawn = value(one[draws], sizes[draws]) - value(other[draws], sizes[draws])
    assert row["difference"] == pytest.approx(value(one, sizes) - value(other, sizes))
    assert row["standard_error"] == pytest.approx(drawn.std(), rel=0.06)  # 4,000 draws: 1%; and a linearisation


def test_what_has_no_known_error_has_none() -> None:
    values = [0.0, 1.0, 1.0]
    (row,) = score_differences(made("f1", values, 0.8), made("f1", values, 0.8)).to_dict("records")
    assert (row["difference"], math.isnan(row["standard_error"])) == (0.0, True)
    infinite = made("word_perplexity", [[-math.inf, 3], [-2.0, 3]], math.inf)
    (row,) = score_differences(infinite, made("word_perplexity", [[-1.0, 3], [-2.0, 3]], math.exp(0.5))).to_dict(
        "records"
    )
    assert math.isnan(row["standard_error"])
    (row,) = score_differences(made("acc", [1], 1.0), made("acc", [0], 0.0)).to_dict("records")
    assert (row["n"], math.isnan(row["standard_error"])) == (1, True)


def test_other_documents_are_refused(tmp_path: Path) -> None:
    one = made("acc", [1, 0, 1], 2 / 3)
    with pytest.raises(ValueError, match=r"document 2 of task is in one of the evaluations alone \(3 and 2 doc"):
        score_differences(one, made("acc", [1, 0], 0.5))
    with pytest.raises(ValueError, match="document 0 of task is another one in the other evaluation"):
        score_differences(one, made("acc", [1, 0, 1], 2 / 3, hashes="other"))
    with pytest.raises(ValueError, match="no score in common; their tasks are task and b"):
        score_differences(one, made("acc", [1], 1.0, task="b"))
    with pytest.raises(ValueError, match=r"results\.json does not exist; give the directory of a saved evaluation"):
        score_differences(one, tmp_path)
    with pytest.raises(ValueError, match="3 is no evaluation; give an Evaluation"):
        score_differences(3, one)  # type: ignore[arg-type]
    (tmp_path / "results.json").write_text('{"accuracy": 1}')
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"results.json is damaged \(scores: Field required\); give the dir"):
        score_differences(one, tmp_path)


@pytest.mark.long
def test_saved_evaluations_are_compared_as_those_in_memory(tmp_path: Path) -> None:
    model = dl.load("toy")
    found = []
    for name, hooks in (("plain", ()), ("masked", "mask_top_sinks(3)")):
        tasks = ["toy_lists", "toy_last_word", "toy_text"]
        given: dict[str, Any] = {"likelihood": {"samples": 4}, "generation": {"steps": 4, "block_length": 32}}
        found.append(evaluate(model, tasks, limit=6, hooks=hooks, bootstrap_iters=20, **given))
        found[-1].save(tmp_path / name)
    here, there = score_differences(*found), score_differences(tmp_path / "plain", str(tmp_path / "masked"))
    assert here.round(12).equals(there.round(12))
    assert here.standard_error.notna().all()
    assert (here.n == 6).all()
    assert here.metric.tolist() == ["exact_match", "perplexity", "acc", "word_perplexity"]
    assert bool((here.difference != 0).any())
