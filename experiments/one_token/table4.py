"""Table 4: none, one, two or four sink tokens."""

from dlm_lens.experiments.experiment import Experiment, Finding, Rendering, run_script
from dlm_lens.experiments.one_token import miniature, paper, real
from dlm_lens.experiments.results import Results

VARIANTS = ("plain", "sink", "sinks2", "sinks4")


def findings(results: Results) -> list[Finding]:
    """One is enough."""
    gain = miniature.difference(results, "sink", "plain")
    found = [
        miniature.improves(
            f"one is better than none ({paper.mean_gain(paper.TABLE4, '1', '0'):+.2f} points over five benchmarks)",
            "one - none",
            gain,
        )
    ]
    for name, count in (("sinks2", "2"), ("sinks4", "4")):
        points = paper.mean_gain(paper.TABLE4, count, "1")
        found.append(
            miniature.no_better(
                f"{count} are no better than one ({points:+.2f} points)",
                f"{count} - one",
                miniature.difference(results, name, "sink"),
                gain,
            )
        )
    return found


def render(results: Results) -> Rendering:
    """Tables and findings."""
    return miniature.rendering(results, "plain", findings, VARIANTS)


EXPERIMENT = Experiment(
    name="one-token-table4",
    shows="2601.19657, Table 4",
    title="0, 1, 2 or 4 sink tokens",
    metric=miniature.METRIC,
    small=miniature.small(VARIANTS),
    full=miniature.full(
        VARIANTS,
        ("qwen2.5-0.5b", "qwen2.5-0.5b-sink", "qwen2.5-0.5b-sinks2", "qwen2.5-0.5b-sinks4"),
        real.cells("table1", paper.FEWER),
    ),
    items=miniature.items,
    run=miniature.run,
    render=render,
    cost=miniature.cost,
    paper=[paper.printed("Table 4", paper.TABLE4, paper.FEWER)],
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
