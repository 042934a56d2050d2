"""Figures 3 and 9: the statistics of planted patterns, and verdicts against both nulls."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dlm_lens.experiments import find_experiment, run_experiment
from dlm_lens.experiments.attention_sinks import fig3_distribution
from dlm_lens.experiments.attention_sinks.fig3_distribution import EDGES, nulls
from dlm_lens.experiments.results import Record
from dlm_lens.sinks import Received
from tests.experiments.finished_runs import finished_run


def received(values: torch.Tensor, expected: torch.Tensor) -> Received:
    steps = values.shape[0]
    return Received(
        values=values.float(),
        expected=expected.float().expand(steps, 1, 1, 1, -1).clone(),
        counted=torch.full((steps, 1), values.shape[-1]),
        layers=(0, 1),
    )


def test_describe_is_a_loop_over_patterns_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(3, 1, 2, 2, 25, generator=generator).double() ** 4 + 0.01
    scores[1, ..., 20:] = torch.nan  # undefined keys
    found = fig3_distribution.describe(received(scores, torch.ones(25)))
    tops, medians, exponential = [], [], []
    counts = np.zeros((3, len(EDGES) - 1))
    for step in range(3):
        for layer in range(2):
            for head in range(2):
                one = scores[step, 0, layer, head].numpy()
                one = np.float32(one[~np.isnan(one)]).astype(float)
                n = len(one)
                tops.append(sorted(one)[-1] / one.sum())  # 4% of 20 and of 25 keys: one
                medians.append(np.median(one) * n / one.sum())
                exponential.append(sum(1 / j for j in range(1, n + 1)) / n)
                counts[step] += np.histogram(one / one.sum(), EDGES)[0]
    assert found["relative top"] == pytest.approx(np.mean(tops), abs=1e-4)
    assert found["relative median"] == pytest.approx(np.mean(medians), abs=1e-4)
    assert found["relative exponential top"] == pytest.approx(np.mean(exponential), abs=0.005)
    assert found["counts"] == counts.astype(int).tolist()
    # Without a causal mask both scales are one.
    assert all(found[f"raw {name}"] == found[f"relative {name}"] for name in fig3_distribution.STATISTICS)


def test_column_sums_have_the_nulls_of_a_causal_mask() -> None:
    even = torch.tensor([sum(1 / i for i in range(j, 26)) for j in range(1, 26)])
    found = fig3_distribution.describe(received(torch.ones(2, 1, 2, 2, 25), even))
    assert found["relative top"] == pytest.approx(1 / 25, abs=1e-4)
    # Uniform attention under a causal mask: the first key's column sum is H_25 of 25.
    assert found["raw top"] == pytest.approx(float(even[0]) / 25, abs=1e-4)
    assert found["raw top"] == found["raw uniform top"] < found["raw exponential top"]


@pytest.mark.parametrize(
    ("kind", "verdicts"),
    [
        ("sinks", ["agrees", "agrees"]),
        ("lognormal", ["agrees", "disagrees"]),
        ("exponential", ["undecided", "disagrees"]),
        ("flat", ["disagrees", "disagrees"]),
    ],
)
def test_verdicts_of_planted_distributions(kind: str, verdicts: list[str]) -> None:
    draw = np.random.default_rng(4)
    values: dict[str, list] = {}
    for _ in range(12):
        scores = draw.exponential(size=(6, 1, 2, 4, 50))
        if kind == "sinks":
            scores[..., [4, 9]] = scores.sum(-1, keepdims=True) * 0.7
        elif kind == "lognormal":
            scores = np.exp(1.6 * draw.standard_normal(scores.shape))
        elif kind == "flat":
            scores = 1 + 0.1 * scores
        scores /= scores.mean(-1, keepdims=True)
        for name, value in fig3_distribution.describe(received(torch.tensor(scores), torch.ones(50))).items():
            values.setdefault(name, []).append(value)
    found = finished_run({"settings": {}}, [Record({"model": "toy", "start": 0}, values, 0.0)])
    findings = list(fig3_distribution.findings(found))
    assert [one.verdict for one in findings] == verdicts
    assert f"exponential scores: {nulls(50).exponential.top:.2f}" in findings[0].null


def test_runs_that_are_too_short_for_received_attention_have_no_distribution(tmp_path: Path) -> None:
    """Fewer than `MIN_VIEWERS` queries see any key of an AR run of 9 positions."""
    settings = {"prompts": 2, "batch": 1, "task": str(tmp_path / "two.jsonl"), "sampler": {"gen_length": 2}}
    short, whole = "how many ? a :", "tom has 2 cups . bob has 3 more . how many ? a :"
    experiment = fig3_distribution.EXPERIMENT
    for number, prompts in enumerate(((short, short), (short, whole))):
        (tmp_path / "two.jsonl").write_text("\n".join(json.dumps({"prompt": one}) for one in prompts))
        out = tmp_path / str(number)
        results = run_experiment(experiment, out, small=True, models=["toy-ar"], settings=settings)
        assert results.records[0].value["raw top"] == [None]
        if number == 0:
            with pytest.raises(ValueError, match="decode longer answers"):
                experiment.render(results)
    rendering = experiment.render(results)
    # The prompt without patterns counts for nothing.
    assert results.records[1].value["raw top"][0] > 0
    assert rendering.tables[0].rows[0][-1] == "1"


@pytest.mark.parametrize("name", ["fig1-incoming", "beyond-blocks"])
def test_a_canvas_that_is_too_short_for_received_attention_has_no_map(name: str, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "how many ? a :"}))
    settings = {"prompts": 1, "batch": 1, "task": str(tmp_path / "one.jsonl"), "sampler": {"gen_length": 1}}
    results = run_experiment(find_experiment(name), tmp_path / "out", small=True, models=["toy"], settings=settings)
    assert results.records[0].value["maps"] == []
    rendering = find_experiment(name).render(results)
    assert rendering.tables[0].rows[0][0] == "toy"
    assert not rendering.figures
