"""Table 4: none, one, two or four sink tokens."""

from dataclasses import replace

from dlm_lens.experiments.experiment import Finding, Rendering, run_script
from dlm_lens.experiments.one_token import paper, paper_scale, tables
from dlm_lens.experiments.results import Results

VARIANTS = ("plain", "sink", "sinks2", "sinks4")


def findings(results: Results) -> list[Finding]:
    """One is enough."""
    found = [
        tables.improves(
            results,
            f"one is better than none ({paper.mean_gain(paper.TABLE4, '1', '0'):+.2f} points over five benchmarks)",
            "one - none",
            "sink",
            "plain",
        )
    ]
    for name, count in (("sinks2", "2"), ("sinks4", "4")):
        points = paper.mean_gain(paper.TABLE4, count, "1")
        found.append(
            tables.no_better(
                results,
                f"{count} are no better than one ({points:+.2f} points)",
                f"{count} - one",
                name,
                "sink",
            )
        )
    return found


def render(results: Results) -> Rendering:
    """Tables and findings."""
    made = tables.rendering(results, "plain", findings, VARIANTS)
    return replace(made, notes=[*tables.ablated(results), *made.notes])


EXPERIMENT = tables.experiment(
    name="one-token-table4",
    shows="2601.19657, Table 4",
    title="0, 1, 2 or 4 sink tokens",
    small=tables.small(VARIANTS, start="toy-ar"),
    full=tables.full(
        VARIANTS,
        ("qwen2.5-0.5b", "qwen2.5-0.5b-sink", "qwen2.5-0.5b-sinks2", "qwen2.5-0.5b-sinks4"),
        paper_scale.cells("table1", paper.FEWER),
    ),
    render=render,
    paper=[paper.printed("Table 4", paper.TABLE4, paper.FEWER)],
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
