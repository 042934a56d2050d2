import json

from experiments.toy.seeds import RESULTS, over_seeds, paired, table


def run(loss: float, **more: float) -> dict:
    share = {"value": 0.5}
    return {"loss": loss, "correct": dict.fromkeys("ALF", share), "main_sink_differs": share, **more}


def test_intervals_are_student_s_over_seeds() -> None:
    # Mean 2, standard deviation 1, n = 3: 4.303 / sqrt(3) = 2.484.
    assert over_seeds([1.0, 2.0, 3.0], 3) == "2.000 ± 2.484"
    assert over_seeds([0.25], 2) == "0.25"
    # Eleven seeds, standard deviation 0.5222: 2.228 * 0.5222 / sqrt(11) = 0.351.
    assert over_seeds([0.0] * 5 + [1.0] * 6, 2) == "0.55 ± 0.35"


def test_differences_are_paired_by_seed() -> None:
    results = {"toy-0": run(1.0), "toy-1": run(2.0), "toy-sink-0": run(0.5), "toy-sink-1": run(1.75)}
    assert paired(results, "toy-sink", [0, 1, 2]) == [-0.5, -0.25]
    assert "| -0.375 ± 1.588 |" in table(results, [0, 1], 10)


def test_the_docs_show_the_stored_results() -> None:
    stored = json.loads(RESULTS.read_text())
    seeds = sorted({int(name.rsplit("-", 1)[1]) for name in stored["runs"]})
    assert len(seeds) == 5
    page = (RESULTS.parents[3] / "docs" / "toy.md").read_text()
    assert table(stored["runs"], seeds, stored["steps"]) in page
